"""Random programs of training, on twins: one in PyTorch, the other with its layers on a daemon.

A program is a list of actions drawn by a seed. Each is tried on the remote twin first: it raises, nothing has happened, and
the local twin skips it; or both do it. After each, outputs, the gradients' norms and the weights agree to rounding. Nothing
is random in what is compared: dropout is on only where its modules are in eval().
"""
import copy
import math
import random

import graph_actions  # noqa: F401  # more ACTIONS
import model_actions  # noqa: F401
import optimizer_actions  # noqa: F401
import torch
from module_actions import ACTIONS, BUILDS, Net, Twin, data

import attnd
import attnd.torch

REFUSALS = (attnd.Unimplemented, attnd.FailedPrecondition, attnd.InvalidArgument, attnd.ResourceExhausted, TypeError)
TOLERANCE = 1e-3  # lr is 1e-2
MOST = 30.0  # of weights that are finite

# PyTorch's own: .grad of None, a scaler without gradients, the state of an optimizer with other groups,
# gradients of parameters of layers that were left out, groups that a schedule does not know, amsgrad that is switched on
OF_PYTORCH = ("NoneType", "No inf checks", "doesn't match the size", "to not have been used",
              "initial_lr", "swa_lr", "zip() argument 2 is shorter", "max_exp_avg_sq")

# Actions of several parts, of which the last may be refused.
HALF = {"train_step", "step", "scaled_step", "step_with_closure", "load", "load_assigned", "two_optimizers",
        "part_and_late_group", "schedule_step", "scale_loop", "hook_of_steps", "rate_as_tensor", "two_kinds_of_optimizers",
        "schedules_of_all", "schedule_before_wrapping", "exchange", "backward_of_nothing", "train_under_both",
        "calls_from_threads", "states_of_parts", "weights_of_the_average", "vector_of_weights"}


def norms(net):
    return {name: None if p.grad is None else float(p.grad.norm()) for name, p in net.named_parameters()}


def alike(one, other, rtol, atol):
    """Numbers that are not finite count as one: whether inf - inf or inf comes first, PyTorch's own devices differ in."""
    one, other = one.detach(), other.detach()
    finite = one.isfinite()
    return (one.shape == other.shape and torch.equal(finite, other.isfinite())
            and torch.allclose(one[finite], other[finite], rtol=rtol, atol=atol))


def differences(here, there, x):
    """Lists what is not the same, in words. x: None: only what the action has seen."""
    found = []
    seen = [getattr(twin, "seen", None) for twin in (here, there)]
    if seen[0] is not None and not alike(*seen, rtol=1e-3, atol=TOLERANCE):
        found.append("what the action saw")
    if x is None:
        return found
    with torch.no_grad():
        outputs = [twin.net(x) for twin in (here, there)]
    if not alike(*outputs, rtol=2e-3, atol=4 * TOLERANCE):
        found.append(f"outputs, by {float((outputs[0] - outputs[1]).abs().max()):.3g}")
    one, two = here.net.state_dict(), there.net.state_dict()
    if list(one) != list(two):
        found.append("names of the state")
    for name in one:
        if not alike(one[name], two[name], rtol=1e-3, atol=TOLERANCE):
            found.append(f"{name}, by {float((one[name] - two[name]).abs().max()):.3g}")
    if [p.requires_grad for p in here.net.parameters()] != [p.requires_grad for p in there.net.parameters()]:
        found.append("requires_grad")
    try:
        theirs = norms(there.net)
    except REFUSALS:
        return found  # a step has cleared them: nobody can look
    for name, norm in norms(here.net).items():
        other = theirs[name]
        if (norm is None) != (other is None):
            found.append(f"gradient of {name}: {norm} and {other}")
        elif norm is not None and not math.isclose(norm, other, rel_tol=2e-2, abs_tol=2e-3) and (
                math.isfinite(norm) or math.isfinite(other)):
            found.append(f"gradient of {name}: {norm:.6g} and {other:.6g}")
    return found


def begins(seed):
    """Draws a program's first numbers."""
    draw = random.Random(seed)
    return draw, draw.random() < 0.3, draw.random() < 0.2, draw.choice(list(BUILDS)), draw.randint(5, 40)


def actions(draw, count):
    """Draws its actions: name, what does it, whether all is looked at after it."""
    names, weights = zip(*((name, weight) for name, (_, weight) in ACTIONS.items()))
    for n in range(count):
        name = draw.choices(names, weights)[0]
        # Not always: so the next action may be the first that meets what this one did.
        yield name, ACTIONS[name][0](draw), draw.random() < 0.75 or n == count - 1


def kinds_of(seed):
    """The actions of the program, if nothing ends it."""
    draw, *_, count = begins(seed)
    return {name for name, _, _ in actions(draw, count)}


def run(seed, optimizer="server", trace=None, restart=lambda: None):
    """Returns what differs after which action, or None. trace: a list that gets (action, refusal or None)."""
    draw, is_sequential, before_offload, kind, count = begins(seed)
    torch.manual_seed(seed)
    here, there = Twin(is_sequential), Twin(is_sequential, optimizer, restart)
    here.net = Net(is_sequential=is_sequential)
    there.net, here.other, there.other = copy.deepcopy(here.net), there, here
    for twin in (here, there):
        if before_offload:
            twin.optimizers = [BUILDS[kind](twin.net.parameters())]
        if twin is there:
            twin.place(twin.net)
        if before_offload:
            twin.optimizers = [twin.make(lambda inner: inner, twin.optimizers[0])]
            twin.optimizers[0].made_by = BUILDS[kind]
        else:
            twin.optimizers = [twin.make(BUILDS[kind], twin.net.parameters())]
    look = data(random.Random(1), 2, 3)[0]
    for name, act, looks in actions(draw, count):
        here.seen = there.seen = None
        refusal = None
        try:
            act(there)
        except REFUSALS as error:
            refusal = error.with_traceback(None)  # which would keep what the action made
        except (AttributeError, AssertionError, KeyError, ValueError, RuntimeError) as error:
            if not any(word in str(error) for word in OF_PYTORCH):
                raise
            refusal = error
        if trace is not None:
            trace.append((name, refusal))
        if refusal is None:
            act(here)
        elif name in HALF:
            return None  # one of its steps may have been done
        else:
            there.seen = None
            changed = undo(here, there)
            if changed:
                return f"seed {seed}, {optimizer}: {name} was refused ({refusal}), and has changed {changed[:4]}"
        x = look if looks else None
        try:
            found = differences(here, there, x)
        except REFUSALS:  # gradients wait, and the look needs the module anew
            found = undo(here, there) or differences(here, there, x)
        if any(MOST < float(p.abs().max()) < math.inf for p in here.net.parameters()):
            return None  # the training diverges: what rounding makes of it grows as fast
        if found:
            why = f" (refused: {refusal})" if refusal else ""
            return f"seed {seed}, {optimizer}: after {name}{why}: {found[:4]}"
    return None


def undo(here, there):
    """A refused action may have got half way: what is beside the layers is made alike again, gradients are forgotten. Lists
    the layers' weights that it has changed here."""
    names = [name for name, p in there.net.named_parameters() if not p.is_meta]
    state, changed = here.net.state_dict(), []
    with torch.no_grad():
        for name in names:
            found = there.net.get_parameter(name)
            if not name.startswith("layers."):
                found.copy_(state[name])
            elif not alike(found, state[name], rtol=1e-3, atol=TOLERANCE):
                changed.append(name)
    for name, p in here.net.named_parameters():
        q = there.net.get_parameter(name)
        if q.requires_grad != p.requires_grad:
            q.requires_grad_(p.requires_grad)
    for twin in (here, there):
        for one in [twin.net, *twin.optimizers]:
            one.zero_grad()
    return changed
