"""More that programs of training do to a net, as module_actions.py: optimizers, what they know, and gradients."""
import copy
import io
import math

import torch
from module_actions import BUILDS, action, data, entries
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import attnd
import attnd.torch


def numbers(tensors):
    """All numbers of these tensors, one behind the other."""
    return torch.cat([torch.zeros(0), *[torch.as_tensor(tensor).detach().float().reshape(-1) for tensor in tensors]])


def through_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def steady(kind):
    """An eps that keeps rounding small, as BUILDS has it."""
    return {} if kind is torch.optim.SGD else {"eps": 1e-4}


def train(twin, x, y, optimizers=None):
    for one in twin.optimizers:
        one.zero_grad()
    twin.loss(x, y).backward()
    for one in twin.optimizers if optimizers is None else optimizers:
        one.step()


def rates(optimizers):
    return numbers([1e3 * torch.tensor(float(group["lr"])) for one in optimizers for group in one.param_groups])


@action(2)
def look_at_moments(draw):
    def act(twin):
        found = []
        for one in twin.optimizers:
            for number, entry in entries(twin, one, one.state_dict()):
                found.append(float(number))
                for key, value in sorted(entry.items()):
                    if value is not None:
                        value = torch.as_tensor(value)
                        found.append(value.sqrt() if "sq" in key else value / 10 if key == "momentum_buffer" else value)
        twin.seen = numbers(found)
    return act


@action(2)
def look_at_gradients(draw):
    word = draw.choice(["layers.0", "bias", "layers", ""])

    def act(twin):
        twin.seen = numbers(attnd.torch.fetch(p.grad) * 2 for n, p in twin.net.named_parameters()
                            if word in n and p.grad is not None)
    return act


@action()
def resume(draw):
    seed = draw.randrange(1 << 30)

    def act(twin):
        old = twin.optimizers[0]
        is_whole = len(twin.optimizers) == 1 and len(old.param_groups) == 1 and [
            id(p) for p in old.param_groups[0]["params"]] == [id(p) for p in twin.net.parameters()]
        weights, state = through_bytes([twin.net.state_dict(), old.state_dict()])
        torch.manual_seed(seed)
        net = twin.make_net()
        net.load_state_dict(weights)
        made = twin.make(old.made_by, net.parameters())
        if is_whole:
            made.load_state_dict(state)
        twin.net, twin.optimizers, twin.schedules, twin.averaged = net, [made], [], None
    return act


@action()
def exchange(draw):
    def act(twin):
        twin.net.load_state_dict(through_bytes(twin.other.net.state_dict()))
        for one, other in zip(twin.optimizers, twin.other.optimizers):
            one.load_state_dict(through_bytes(other.state_dict()))
    return act


@action()
def scale_loop(draw):
    x, y = data(draw, 3, 5)
    clips, factor = draw.random() < 0.5, draw.choice([1.0, 1.0, 1.0, math.inf])

    def act(twin):
        if twin.scaler is None:
            twin.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        twin.net.zero_grad()
        twin.scaler.scale(twin.loss(x, y) * factor).backward()
        if clips:
            for one in twin.optimizers:
                twin.scaler.unscale_(one)
            nn.utils.clip_grad_norm_(twin.net.parameters(), 0.3)
        for one in twin.optimizers:
            if any(p.grad is not None for group in one.param_groups for p in group["params"]):
                twin.scaler.step(one)
        twin.scaler.update()
        twin.seen = torch.tensor(twin.scaler.get_scale())
    return act


@action()
def hook_of_steps(draw):
    x, y = data(draw, 3, 5)
    how = draw.randrange(4)

    def act(twin):
        one = twin.optimizers[0]

        def hook(optimizer, *_):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.8
        register = [one.register_step_pre_hook, one.register_step_post_hook,
                    register_optimizer_step_pre_hook, register_optimizer_step_post_hook][how]
        handle = register(hook)
        try:
            train(twin, x, y)
        finally:
            handle.remove()
        twin.seen = rates(twin.optimizers)
    return act


@action()
def hook_of_states(draw):
    loads, after = draw.random() < 0.5, draw.random() < 0.5

    def act(twin):
        one, seen = twin.optimizers[0], []

        def hook(optimizer, state=None):
            if state is None:
                return seen.append(len(entries(twin, optimizer, optimizer.state_dict())))
            seen.append(len(entries(twin, optimizer, state)))
            made = copy.deepcopy(state)
            for entry in made["state"].values():
                for key in ("exp_avg", "momentum_buffer"):
                    if entry.get(key) is not None:
                        entry[key].mul_(0.5)
            return made
        if loads:
            handle = one.register_load_state_dict_post_hook(hook) if after else one.register_load_state_dict_pre_hook(hook)
        else:
            handle = one.register_state_dict_post_hook(hook)
        try:
            one.load_state_dict(copy.deepcopy(one.state_dict()))
        finally:
            handle.remove()
        twin.seen = numbers(map(float, seen))
    return act


@action()
def named_optimizer(draw):
    kind = draw.choice([torch.optim.AdamW, torch.optim.SGD])

    def act(twin):
        made = twin.make(lambda p: kind(p, lr=1e-2, **steady(kind)), twin.net.named_parameters())
        made.made_by = lambda p: kind(p, lr=1e-2, **steady(kind))
        twin.optimizers, twin.schedules = [made], []
        twin.seen = numbers([float(len("".join(made.state_dict()["param_groups"][0]["param_names"])))])
    return act


@action()
def groups_by_name(draw):
    words = draw.choice([("weight", "bias"), ("layers.0", "layers.1"), ("norm", "layers")])
    kind, amsgrad = draw.choice([torch.optim.AdamW, torch.optim.Adam]), draw.random() < 0.5

    def act(twin):
        groups = [[], [], []]
        for name, p in twin.net.named_parameters():
            groups[next((n for n, word in enumerate(words) if word in name), 2)].append(p)
        options = [{"lr": 1e-2, "weight_decay": 0.2}, {"lr": 5e-3, "betas": (0.5, 0.9), "amsgrad": amsgrad},
                   {"lr": 2e-3, "eps": 1e-2, "maximize": True}]
        twin.optimizers = [twin.make(lambda groups: kind(groups, lr=1e-2, eps=1e-4), [
            {"params": group, **given} for group, given in zip(groups, options) if group])]
        twin.schedules = []
    return act


@action()
def faster_optimizer(draw):
    kind, how = draw.choice([torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD]), draw.choice(["foreach", "fused"])

    def act(twin):
        made = twin.make(lambda p: kind(p, lr=1e-2, weight_decay=0.1, **{how: True}, **steady(kind)), twin.net.parameters())
        twin.optimizers, twin.schedules = [made], []
    return act


@action()
def rate_as_tensor(draw):
    kind, lr = draw.choice([torch.optim.AdamW, torch.optim.SGD]), draw.choice([1e-3, 2e-2])
    x, y = data(draw, 3, 5)

    def act(twin):
        made = twin.make(lambda p: kind(p, lr=torch.tensor(1e-2), foreach=False, **steady(kind)), twin.net.parameters())
        twin.optimizers, twin.schedules = [made], []
        train(twin, x, y)
        made.param_groups[0]["lr"].fill_(lr)
        train(twin, x, y)
    return act


@action()
def change_more_options(draw):
    kind = draw.randrange(5)

    def act(twin):
        for one in twin.optimizers:
            for group in one.param_groups:
                if kind == 0:
                    group["maximize"] = not group["maximize"]
                elif kind == 1 and group.get("momentum"):
                    group.update(nesterov=not group["nesterov"], dampening=0.0)
                elif kind == 2 and "dampening" in group and not group["nesterov"]:
                    group["dampening"] = 0.5
                elif kind == 3 and group.get("momentum"):
                    group["momentum"] = 0.0
                elif kind == 4 and "betas" in group:
                    group["amsgrad"] = False
    return act


@action()
def optimizer_of_a_part(draw):
    kind, word = draw.choice(list(BUILDS)), draw.choice(["layers.0", "weight", "layers"])

    def act(twin):
        twin.optimizers = [twin.make(BUILDS[kind], [p for n, p in twin.net.named_parameters() if word in n])]
        twin.schedules = []
    return act


@action(2)
def add_group_of_others(draw):
    options = draw.choice([{}, {"lr": 1e-3}, {"weight_decay": 0.3}])

    def act(twin):
        owned = {id(p) for one in twin.optimizers for group in one.param_groups for p in group["params"]}
        others = [(n, p) for n, p in twin.net.named_parameters() if id(p) not in owned]
        if "param_names" not in twin.optimizers[0].param_groups[0]:
            others = [p for _, p in others]
        if others:
            twin.optimizers[0].add_param_group({"params": others, **options})
    return act


@action()
def move_to_another_group(draw):
    index = draw.randrange(100)

    def act(twin):
        group = twin.optimizers[0].param_groups[0]
        if len(group["params"]) > 1 and "param_names" not in group:
            at = index % len(group["params"])
            moved = group["params"].pop(at)
            try:
                twin.optimizers[0].add_param_group({"params": [moved], "lr": 3e-3})
            except attnd.FailedPrecondition:
                group["params"].insert(at, moved)
                raise
    return act


@action()
def two_kinds_of_optimizers(draw):
    kinds = draw.sample(["adamw", "adam", "sgd", "plain"], 2)

    def act(twin):
        parts = [[p for p in twin.net.parameters() if (p.dim() > 1) == big] for big in (True, False)]
        twin.optimizers, twin.schedules = [twin.make(BUILDS[kind], part) for kind, part in zip(kinds, parts)], []
    return act


@action()
def step_of_an_old_optimizer(draw):
    x, y = data(draw, 3, 5)
    kind = draw.choice(list(BUILDS))

    def renew(twin):
        twin.optimizers, twin.schedules = [twin.make(BUILDS[kind], twin.net.parameters())], []

    def act(twin):
        old = twin.optimizers
        renew(twin)
        try:
            train(twin, x, y, old)
        except attnd.FailedPrecondition:
            renew(twin.other)
            raise
    return act


@action()
def lbfgs(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        made = twin.make(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), twin.net.parameters())

        def closure():
            made.zero_grad()
            loss = twin.loss(x, y)
            loss.backward()
            return loss
        made.step(closure)
    return act


SCHEDULES = [
    lambda one: lr_scheduler.CyclicLR(one, 1e-3, 2e-2, step_size_up=3,
                                      cycle_momentum=bool(one.param_groups[0].get("momentum", 1))),
    lambda one: lr_scheduler.SequentialLR(one, [lr_scheduler.LinearLR(one, 0.1, total_iters=2),
                                                lr_scheduler.CosineAnnealingLR(one, 5)], [2]),
    lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 2),
    lambda one: lr_scheduler.LambdaLR(one, lambda n: 0.9 ** n),
    lambda one: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(one, 0.5, 2), lr_scheduler.ExponentialLR(one, 0.9)]),
    lambda one: torch.optim.swa_utils.SWALR(one, swa_lr=5e-3, anneal_epochs=2)]


@action()
def schedules_of_all(draw):
    kind, steps = draw.randrange(len(SCHEDULES)), draw.randrange(4)
    x, y = data(draw, 3, 5)

    def act(twin):
        twin.schedules = [SCHEDULES[kind](one) for one in twin.optimizers]
        for _ in range(steps):
            train(twin, x, y)
            for one in twin.schedules:
                one.step()
        twin.seen = rates(twin.optimizers)
    return act


@action()
def schedule_before_wrapping(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        inner = torch.optim.AdamW(twin.net.parameters(), lr=1e-2, eps=1e-4)
        twin.schedules = [lr_scheduler.OneCycleLR(inner, 2e-2, total_steps=100)]
        twin.optimizers = [twin.make(lambda _: inner, None)]
        twin.optimizers[0].made_by = BUILDS["adamw"]
        for _ in range(2):
            train(twin, x, y)
            twin.schedules[0].step()
    return act


def swap_gradients(net):
    one, other = net.get_parameter("layers.0.0.weight"), net.get_parameter("layers.1.0.weight")
    one.grad, other.grad = other.grad, one.grad


CHANGES = [
    lambda g: g.neg_(), lambda g: g.sub_(g * 0.5), lambda g: g.data.mul_(0.5), lambda g: g.detach().mul_(0.5),
    lambda g: g.view(-1).mul_(0.5), lambda g: torch.mul(g, 0.5, out=g), lambda g: g.clamp_(-1e-3, 1e-3),
    lambda g: g.nan_to_num_(), lambda g: g.copy_(g * 0.5), lambda g: torch._foreach_mul_([g], 0.5),
    lambda g: torch._foreach_div_([g], [2.0]), lambda g: g.mul_(torch.tensor(0.5)), lambda g: g.mul_(torch.tensor([0.5])),
    lambda g: g.mul_(other=0.5), lambda g: g.div_(0.3, rounding_mode="trunc"), lambda g: g.lerp_(torch.ones_like(g), 0.1),
    lambda g: g.fill_(0.0), lambda g: g.fill_(0.1), lambda g: g.t().zero_(), lambda g: g.tanh_(), lambda g: g.mT.mul_(2),
    lambda g: g.masked_fill_(torch.ones(g.shape, dtype=torch.bool), 0.1), lambda g: g.add_(0), lambda g: g.sub_(0.1),
    lambda g: setattr(g, "data", torch.ones(g.shape)), lambda g: g.__setitem__(..., 0.0), lambda g: g.unsqueeze(0).mul_(2),
    lambda g: torch._foreach_zero_([g]), lambda g: torch._foreach_neg_([g]), lambda g: torch._foreach_add_([g], 0.1),
    lambda g: torch.clamp_(g, -1e-3, 1e-3), lambda g: g.addcmul_(g, g), lambda g: torch.nn.init.ones_(g),
    lambda g: g.multiply_(0.5), lambda g: g.true_divide_(2), lambda g: torch._foreach_norm([g])[0].mul_(2),
    lambda g: g.index_fill_(0, torch.tensor([0]), 0.0), lambda g: g.sum().backward() if g.requires_grad else None,
    lambda g: g[:1].mul_(2), lambda g: next(iter(g)).zero_(), lambda g: g.unbind(0)[0].zero_(), lambda g: g.pow_(2)]


@action(2)
def change_gradients(draw):
    change, word = draw.choice(CHANGES), draw.choice(["layers.0.0.weight", "layers.1.3.weight", "layers.2.0.weight"])

    def act(twin):
        gradient = twin.net.get_parameter(word).grad
        if gradient is not None:
            change(gradient)
            twin.seen = attnd.torch.fetch(twin.net.get_parameter(word).grad) * 10
    return act


@action()
def exchange_gradients(draw):
    return lambda twin: swap_gradients(twin.net)


@action()
def clip_with_a_norm(draw):
    most, word = draw.choice([0.05, 0.5]), draw.choice(["layers.1", "weight", ""])

    def act(twin):
        found = [p for n, p in twin.net.named_parameters() if word in n and p.grad is not None]
        if found:
            norm = nn.utils.get_total_norm([p.grad for p in found])
            nn.utils.clip_grads_with_norm_(found, most, norm)
            twin.seen = norm
    return act


@action()
def backward_into_parameters(draw):
    x, y = data(draw, 3, 5)
    word = draw.choice(["layers", "layers.1", "weight", ""])

    def act(twin):
        found = [p for n, p in twin.net.named_parameters() if word in n and p.requires_grad]
        if found:
            twin.loss(x, y).backward(inputs=found)
    return act


@action()
def gradients_of_parameters(draw):
    x, y = data(draw, 3, 5)
    names = draw.choice([["head.weight", "inp.bias"], ["layers.0.0.weight"], ["head.bias", "layers.1.3.bias"]])
    unused = draw.random() < 0.5

    def act(twin):
        found = [twin.net.get_parameter(name) for name in names]
        if all(p.requires_grad for p in found):
            twin.seen = numbers(torch.autograd.grad(twin.loss(x, y), found, allow_unused=unused))
    return act
