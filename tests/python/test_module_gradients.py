"""attnd.torch.local_gradients: any code may edit the gradients of parameters on a daemon, and the next step uses what it
left; a backward that adds to gradients which were multiplied, set to 0 or to None."""
import copy
import math

import pytest

torch = pytest.importorskip("torch")
from module_actions import BUILDS, Net  # noqa: E402
from torch import nn  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


class Pair:
    """A net here and the same on the daemon, with their optimizers."""

    def __init__(self, kind="adamw", mode="server", **options):
        here = Net()
        there = copy.deepcopy(here)
        there.layers = attnd.torch.offload(there.layers, optimizer=mode, **options)
        self.nets = [here, there]
        self.optimizers = [BUILDS[kind](net.parameters()) for net in self.nets]
        if mode == "server":
            self.optimizers[1] = attnd.torch.optimizer(self.optimizers[1])

    def each(self, act):
        for net, optimizer in zip(self.nets, self.optimizers):
            act(net, optimizer)

    def backward(self, scale=1.0):
        self.each(lambda net, _: (net(X).square().mean() * scale).backward())

    def edit(self, change):
        for net in self.nets:
            with attnd.torch.local_gradients(net):
                change(net)

    def step(self):
        self.each(lambda _, optimizer: optimizer.step())

    def check(self):
        here, there = self.nets
        for (name, one), other in zip(here.state_dict().items(), there.state_dict().values()):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")
        for (name, one), other in zip(here.named_parameters(), there.parameters()):
            assert (one.grad is None) == (other.grad is None), name


def add_noise(net):
    for n, p in enumerate(net.parameters()):
        p.grad.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(n)) * 0.01)


def average(net):
    """As an all_reduce with another rank's gradients leaves them."""
    for p in net.parameters():
        p.grad += torch.ones(p.shape)
        p.grad /= 2


def zero_rows(net):
    net.get_parameter("layers.0.0.weight").grad[3:9] = 0
    net.get_parameter("layers.2.3.bias").grad.zero_()


def forget(net):
    net.get_parameter("layers.1.0.weight").grad = None
    net.get_parameter("head.weight").grad = None


def put_another(net):
    p = net.get_parameter("layers.1.0.weight")
    p.grad = torch.full(p.shape, 0.25)


def clip_values(net):
    nn.utils.clip_grad_value_(net.parameters(), 1e-3)


def normalise(net):
    for p in net.parameters():
        p.grad.div_(p.grad.norm() + 1e-6)


def nothing(net):
    assert all(type(p.grad) is torch.Tensor for p in net.parameters())


EDITS = [add_noise, average, zero_rows, forget, put_another, clip_values, normalise, nothing]


@pytest.mark.parametrize("mode", ["server", "local"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_the_next_step_uses_what_an_edit_left(edit, mode):
    pair = Pair("sgd" if edit is forget else "adamw", mode)
    for _ in range(2):
        pair.each(lambda _, optimizer: optimizer.zero_grad())
        pair.backward()
        pair.edit(edit)
        pair.check()
        pair.step()
    pair.check()


def test_a_gradient_that_was_none_is_one_and_zero_is_no_none():
    pair = Pair("adamw")
    pair.backward()
    pair.each(lambda net, _: net.zero_grad())

    def fill(net):
        for name, p in net.named_parameters():
            p.grad = torch.zeros(p.shape) if "bias" in name else torch.ones(p.shape)
    pair.edit(fill)
    pair.step()
    pair.check()
    for optimizer in pair.optimizers:
        assert len(optimizer.state_dict()["state"]) == len(list(pair.nets[0].parameters()))


def test_backward_adds_to_edited_gradients():
    pair = Pair("plain")
    pair.backward()
    pair.edit(zero_rows)
    pair.backward(0.5)
    pair.edit(average)
    pair.backward(0.25)
    pair.step()
    pair.check()


@pytest.mark.parametrize("change", ["clip", "scale", "zero", "none"])
def test_backward_adds_to_gradients_that_were_multiplied_set_to_zero_or_forgotten(change):
    pair = Pair("plain")
    pair.backward()

    def act(net, _):
        p = net.get_parameter("layers.1.0.weight")
        if change == "clip":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        elif change == "scale":
            p.grad.mul_(-3)
        elif change == "zero":
            p.grad.zero_()
        else:
            p.grad = None
    pair.each(act)
    pair.backward(2.0)
    pair.check()
    for one, other in zip(*(net.parameters() for net in pair.nets)):
        torch.testing.assert_close(attnd.torch.fetch(other.grad), one.grad, rtol=1e-4, atol=1e-6)
    pair.step()
    pair.check()


def test_with_a_grad_scaler_gradients_are_edited_after_unscale():
    pair = Pair("adamw")
    for inf in (False, True):
        for net, optimizer in zip(pair.nets, pair.optimizers):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            optimizer.zero_grad()
            scaler.scale(net(X).square().mean()).backward()
            scaler.unscale_(optimizer)
            with attnd.torch.local_gradients(net):
                add_noise(net)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scaler.scale(net(X).square().mean()).backward()
            with attnd.torch.local_gradients(net):
                net.get_parameter("layers.0.0.weight").grad[0, 0] = math.inf if inf else 1.0
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (128.0 if inf else 256.0)
        pair.check()


def test_what_would_miss_the_edits_is_refused_in_the_block():
    pair = Pair("adamw")
    there, optimizer = pair.nets[1], pair.optimizers[1]
    pair.backward()
    p = there.get_parameter("layers.0.0.weight")
    old = p.grad
    with attnd.torch.local_gradients(there):
        with pytest.raises(attnd.FailedPrecondition, match="no step in this block"):
            optimizer.step()
        with pytest.raises(attnd.FailedPrecondition, match="no backward in this block"):
            there(X).sum().backward()
        with pytest.raises(attnd.FailedPrecondition, match="take 0.0.weight.grad anew"):
            old.mul_(2)
        with pytest.raises(attnd.InvalidArgument, match="shape"):
            p.grad = torch.zeros(3)
        with attnd.torch.local_gradients(there):  # within another one
            p.grad.mul_(2)
    with pytest.raises(attnd.InvalidArgument, match="local_gradients"):
        p.grad = torch.zeros(p.shape)
    with pytest.raises(attnd.Unimplemented, match="local_gradients"):
        p.grad.add_(1)
    pair.each(lambda _, optimizer: optimizer.zero_grad())
    p.requires_grad_(False)
    there(X).sum().backward()
    with attnd.torch.local_gradients(there):
        with pytest.raises(attnd.FailedPrecondition, match="requires_grad"):
            p.grad = torch.zeros(p.shape)


def test_an_edit_outlives_a_daemon_that_is_killed(own_daemon):
    attnd.torch.connect(own_daemon.address, timeout=60, wait_for_ready=True)
    pair = Pair("plain")
    pair.backward()
    pair.edit(add_noise)
    own_daemon.kill()
    own_daemon.start()
    pair.backward()
    pair.step()
    pair.check()


@pytest.mark.parametrize("kind", [nn.ReLU, nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.Tanh])
def test_what_is_not_finite_is_so_in_the_same_places(kind):
    """A ReLU lets no infinite gradient through where it is 0; an infinite input is NaN where another is."""
    made = nn.Sequential(nn.Linear(16, 24), kind(), nn.Linear(24, 16))
    other = attnd.torch.offload(nn.ModuleList([copy.deepcopy(made)]))
    for at, value in ((None, 0.0), (3, math.inf), (5, -math.inf), (7, 1e30)):
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(4))
        dy = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(5))
        if at is None:
            dy[0, 2, 3] = math.inf
        else:
            x[1, 2, at] = value
        found = []
        for one in (made, other[0]):
            leaf = x.clone().requires_grad_()
            y = one(leaf)
            y.backward(dy)
            found.append([y.detach(), leaf.grad, *[attnd.torch.fetch(p.grad) for p in one.parameters()]])
            one.zero_grad()
        for one, two in zip(*found):
            assert torch.equal(one.isfinite(), two.isfinite()), (at, value)
            finite = one.isfinite()
            torch.testing.assert_close(two[finite], one[finite], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["server", "local"])
@pytest.mark.parametrize("scales", [[1e-9], [1e7], [1e-8, 1e-3, 1e2]])
def test_float16_layers_have_gradients_of_any_size(mode, scales):
    """Each of them is of a power of two that float16 has, and those that are added too."""
    pair = Pair("plain", mode, precision="f16")
    for scale in scales:
        pair.each(lambda net, _: (net(X).square().mean() * scale).backward())
    for (name, one), two in zip(pair.nets[0].named_parameters(), pair.nets[1].parameters()):
        got = attnd.torch.fetch(two.grad) if mode == "server" else two.grad
        assert float((got - one.grad).norm()) <= 0.02 * float(one.grad.norm()), name
        assert math.isclose(float(two.grad.norm()), float(one.grad.norm()), rel_tol=0.02), name
    x = X.clone().requires_grad_()
    dx = [torch.autograd.grad(net(x).sum() * scales[0], x)[0] for net in pair.nets]
    assert float((dx[1] - dx[0]).norm()) <= 0.02 * float(dx[0].norm())
    before = [copy.deepcopy(net.state_dict()) for net in pair.nets]
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = 1e-2 / max(scales)
    pair.step()
    for name, one in pair.nets[0].state_dict().items():
        moved, other = one - before[0][name], pair.nets[1].state_dict()[name] - before[1][name]
        assert float((moved - other).norm()) <= 0.02 * float(moved.norm()) + 1e-6, name
