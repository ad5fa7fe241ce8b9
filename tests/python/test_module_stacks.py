"""One optimizer over stacks on two daemons: what one of them refuses, or fails, changes neither."""
import contextlib
import copy
import threading

import pytest
from conftest import check_same

torch = pytest.importorskip("torch")

import attnd.torch  # noqa: E402
from attnd.modules.module import Module  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("two_daemons")
WIDTH = 16


class Both:
    """Two stacks on two daemons, or the same layers here, and an optimizer over them."""

    def __init__(self, parts=None, **options):
        if parts is None:
            self.parts = [nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(2)]
        else:
            self.parts = [attnd.torch.offload(copy.deepcopy(part), server=server, replay_mib=0)
                          for part, server in zip(parts, "ab")]
        self.make(**options)

    def make(self, kind=torch.optim.AdamW, **options):
        self.optimizer = attnd.torch.optimizer(kind(self.parameters(), **{"lr": 1e-2, **options}))

    def parameters(self):
        return [parameter for part in self.parts for parameter in part.parameters()]

    def backward(self, parts=(0, 1), scale=1.0):
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        for part in parts:
            x = self.parts[part](x)
        (x.square().sum() * scale).backward()

    def train(self, steps=2):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()


def both(**options):
    torch.manual_seed(4)
    here = Both(**options)
    return here, Both(here.parts, **options)


def check_alike(here, there, atol=1e-5):
    for one, other in zip(here.parts, there.parts):
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=atol)
    states = [part.optimizer.state_dict()["state"] for part in (here, there)]
    assert list(states[0]) == list(states[1])
    for number, state in states[0].items():
        for key, tensor in state.items():
            torch.testing.assert_close(states[1][number][key], tensor, rtol=0, atol=atol)


@contextlib.contextmanager
def away(stack, *calls):
    """The stack's daemon does not answer these calls."""
    real = Module._run

    def run(self, name, *arguments, **options):
        if self is stack.module and name.removeprefix("attnd_module_") in calls:
            raise attnd.Unavailable("nobody")
        return real(self, name, *arguments, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Module, "_run", run)
        yield


@pytest.mark.parametrize("wrong", ["gradients", "kind"])
def test_an_optimizer_that_one_stack_refuses_is_nowhere(wrong):
    here, there = both()
    for one in (here, there):
        one.train()
    given, kind = there.parameters(), torch.optim.AdamW
    if wrong == "gradients":
        there.optimizer.zero_grad()
        there.backward(parts=[1])
    else:
        given, kind = given[:-1], torch.optim.SGD
    with pytest.raises((attnd.FailedPrecondition, TypeError), match="optimizer: "):
        attnd.torch.optimizer(kind(given, lr=0.5))
    for one in (here, there):
        one.train()
    check_alike(here, there)


def test_an_optimizer_is_made_while_a_daemon_is_away_and_then_begins_anew():
    here, there = both()
    for one in (here, there):
        one.train()
    with away(there.parts[1], "put", "release", "get"):
        there.make(amsgrad=True)
        with pytest.raises(attnd.Unavailable):
            there.train(1)
    here.make(amsgrad=True)
    for one in (here, there):
        one.train()
    check_alike(here, there)


def test_a_registration_that_fails_leaves_weights_and_moments_to_the_next(monkeypatch):
    here, there = both()
    for one in (here, there):
        one.train()
        one.optimizer.param_groups[0]["amsgrad"] = True
        state = one.optimizer.state_dict()
        for number in state["param_groups"][0]["params"]:
            state["state"][number]["max_exp_avg_sq"] = torch.zeros_like(state["state"][number]["exp_avg_sq"])
        one.optimizer.load_state_dict(state)
    with monkeypatch.context() as patch:
        patch.setattr(Module, "__init__", lambda *_, **__: (_ for _ in ()).throw(attnd.Unavailable("nobody")))
        with pytest.raises(attnd.Unavailable):
            there.train(1)
    for one in (here, there):
        one.train()
    check_alike(here, there)


def test_a_state_that_one_stack_refuses_is_loaded_nowhere():
    here, there = both()
    for one in (here, there):
        one.train(1)
    early = there.optimizer.state_dict()
    for one in (here, there):
        one.optimizer.param_groups[0]["lr"] = 2e-2
        one.train()
    there.optimizer.zero_grad()
    there.backward(parts=[1])
    with pytest.raises(attnd.FailedPrecondition, match="load_state_dict: gradients"):
        there.optimizer.load_state_dict(early)
    early["state"][0]["exp_avg"] = torch.zeros(3)
    there.optimizer.zero_grad()
    with pytest.raises(attnd.InvalidArgument, match=r"load_state_dict: expected moments of shape \(16, 16\)"):
        there.optimizer.load_state_dict(early)
    for one in (here, there):
        one.train()
    check_alike(here, there)


def test_a_group_that_is_refused_is_not_there():
    _, there = both()
    other = attnd.torch.offload(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(TypeError, match="differentiable=False"):
        there.optimizer.add_param_group({"params": list(other.parameters()), "differentiable": True})
    assert len(there.optimizer.param_groups) == 1 and other.owner("0.weight") is None


def test_a_state_of_meta_tensors_is_refused_each_time():
    _, there = both()
    there.train(1)
    inner = torch.optim.AdamW(there.parameters(), lr=1e-2)
    inner.state[there.parameters()[0]] = {"step": torch.ones(()), "exp_avg": torch.empty(WIDTH, WIDTH, device="meta")}
    for _ in range(2):
        with pytest.raises(attnd.FailedPrecondition, match="expected load_state_dict of attnd.torch.optimizer"):
            attnd.torch.optimizer(inner)
    there.train(1)


def test_a_step_that_fails_on_one_stack_is_done_once_on_the_other():
    _, there = both()
    there.train(1)
    there.optimizer.zero_grad()
    there.backward()
    with away(there.parts[1], "step"), pytest.raises(attnd.Unavailable):
        there.optimizer.step()
    weights = [part.state_dict() for part in there.parts]
    with pytest.raises(attnd.FailedPrecondition, match="cleared these gradients"):
        there.optimizer.step()
    for part, before in zip(there.parts, weights):
        check_same(part.state_dict(), before)
    assert [part.steps["0.0.weight"] for part in there.parts] == [2, 1]
    there.train(1)
    assert [part.steps["0.0.weight"] for part in there.parts] == [3, 2]


def shared(**options):
    """A stack, or the same layer here, and two optimizers of it."""
    torch.manual_seed(4)
    here = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    made = []
    for part in (here, attnd.torch.offload(copy.deepcopy(here), **options)):
        made.append((part, [attnd.torch.optimizer(torch.optim.AdamW([one], lr=1e-2)) for one in part.parameters()]))
    return made


def shared_backward(part, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    part(torch.ones(2, 3, WIDTH)).square().sum().backward()


def shared_train(part, optimizers):
    shared_backward(part, optimizers)
    for optimizer in optimizers:
        optimizer.step()


def check_shared(here, there):
    for name, tensor in here[0].state_dict().items():
        torch.testing.assert_close(there[0].state_dict()[name], tensor, rtol=0, atol=1e-5)
    for one, other in zip(here[1], there[1]):
        assert one.state_dict()["state"][0]["step"] == other.state_dict()["state"][0]["step"]


USES = {"step": lambda one: one.step(), "zero_grad": lambda one: one.zero_grad(), "state_dict": lambda one: one.state_dict(),
        "load_state_dict": lambda one: one.load_state_dict({"state": {}, "param_groups": []}),
        "add_param_group": lambda one: one.add_param_group({"params": []})}


@pytest.mark.parametrize("use", USES)
def test_a_step_that_waited_and_failed_is_told_to_its_optimizer_once(use):
    here, there = shared()
    for one in (here, there):
        shared_train(*one)
        shared_backward(*one)
    part, (first, second) = there
    first.step()
    with away(part, "step"), pytest.raises(attnd.Unavailable, match="^nobody"):
        second.step()
    with pytest.raises(attnd.Unavailable, match="step: the last one of this optimizer waited .* was not done: nobody"):
        USES[use](first)
    check_shared(here, there)  # nothing was done
    for _, optimizers in (here, there):
        for optimizer in optimizers:
            optimizer.step()  # on the same gradients
    shared_train(*here)
    shared_train(*there)
    check_shared(here, there)


def test_a_step_that_waited_and_fails_in_a_forward_is_told_to_its_optimizer():
    here, there = shared()
    for one in (here, there):
        shared_train(*one)
        shared_backward(*one)
    part, (first, second) = there
    first.step()
    with away(part, "step"), pytest.raises(attnd.Unavailable, match="^nobody"):
        part(torch.ones(2, 3, WIDTH))
    with pytest.raises(attnd.Unavailable, match="was not done"):
        first.step()
    for _, optimizers in (here, there):
        for optimizer in optimizers:
            optimizer.step()
    check_shared(here, there)


def test_a_step_whose_reply_is_lost_counts_as_what_it_is(daemon):
    pytest.importorskip("grpc")
    from faulty_proxy import FaultyProxy

    class Losing(FaultyProxy):
        loses, ends = False, threading.Event()

        def _forward(self, method, requests, context):
            replies = list(self._channel.stream_stream(method)(iter(requests), timeout=20))
            if self.loses and method.endswith("/Step"):
                self.ends.wait()  # the caller does not
            yield from replies
    proxy = Losing(daemon.address, seed=1)
    attnd.torch.connect(proxy.address, name="losing", timeout=60)
    try:
        here, there = shared(server="losing", timeout=1.0)
        for one in (here, there):
            shared_train(*one)
            shared_train(*one) if one is here else shared_backward(*one)
        part, (first, second) = there
        first.step()
        proxy.loses = True
        with pytest.raises((attnd.DeadlineExceeded, attnd.Unavailable)):
            second.step()
        proxy.loses = False
        proxy.ends.set()
        check_shared(here, there)  # it was done, of both
        shared_train(*here)
        shared_train(*there)
        check_shared(here, there)
    finally:
        proxy.ends.set()
        attnd.torch.disconnect("losing")
        proxy.close()


def test_unscaling_that_failed_is_done_once():
    here, there = both(kind=torch.optim.SGD)
    for one in (here, there):
        one.backward(scale=1024.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        with contextlib.ExitStack() as fails:
            if one is there:
                fails.enter_context(away(there.parts[1], "parameter_stats"))
                fails.enter_context(pytest.raises(attnd.Unavailable))
                scaler.unscale_(one.optimizer)
        scaler.unscale_(one.optimizer)
        scaler.step(one.optimizer)
    check_alike(here, there)


def test_local_weights_that_fail_on_one_stack_leave_both_callable():
    _, there = both()
    there.train(1)
    with away(there.parts[1], "get"), pytest.raises(attnd.Unavailable), attnd.torch.local_weights(*there.parts):
        pass
    there.train(1)
    trained = [part.state_dict() for part in there.parts]
    there.optimizer.zero_grad()
    there.backward(parts=[1])
    with pytest.raises(attnd.FailedPrecondition, match="local_weights: gradients"):
        with attnd.torch.local_weights(*there.parts):
            for part in there.parts:
                part[0][0].bias.data.fill_(2.0)
    for part, expected in zip(there.parts, trained):
        check_same(part.state_dict(), expected)
    there.optimizer.zero_grad()
    with away(there.parts[0], "put"), pytest.raises(attnd.Unavailable), attnd.torch.local_weights(*there.parts):
        for part in there.parts:
            part[0][0].bias.data.fill_(2.0)
    assert float(attnd.torch.fetch(there.parts[1][0][0].bias)[0]) == 2.0
    there.train(1)
