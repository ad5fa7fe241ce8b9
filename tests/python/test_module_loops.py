"""Loops over offloaded layers: whatever is done between two of them is what PyTorch does, and a plain loop is one call."""
import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from module_actions import BUILDS, Net  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import attnd  # noqa: E402
import attnd.modules  # noqa: E402
import attnd.torch  # noqa: E402
from attnd.modules.module import Module  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")
COUNT = 4
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def calls(monkeypatch):
    """Layers of each forward, negative ones of a backward."""
    found = []
    forward, backward = Module.forward, Module.backward
    monkeypatch.setattr(Module, "forward", lambda self, *a, **k: (found.append(k.get("layers")), forward(self, *a, **k))[1])
    monkeypatch.setattr(Module, "backward", lambda self, *a, **k: (found.append("back"), backward(self, *a, **k))[1])
    return found


def pair(**options):
    here = Net(COUNT)
    there = copy.deepcopy(here)
    there.layers = attnd.torch.offload(there.layers, **options)
    return here, there


def gate(net, x):
    for n, layer in enumerate(net.layers):
        x = x + torch.sigmoid(x.mean()) * layer(x) if n == 2 else layer(x)
    return x


def collected(net, x):
    states = [x]
    for layer in net.layers:
        states.append(layer(states[-1]))
    return torch.stack(states).sum(0) * states[2].tanh()


def branches(net, x):
    first = net.layers[0](x)
    one, two = net.layers[1](first), net.layers[2](first)
    del first
    return net.layers[3](one * two)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def own_function(net, x):
    return net.layers[2](Twice.apply(net.layers[1](net.layers[0](x))))


def in_place(net, x):
    x = net.layers[0](x)
    x.mul_(0.5)
    y = net.layers[1](x)
    y[:, 0] = 0
    return net.layers[2](y)


def some_without_gradient(net, x):
    with torch.no_grad():
        for layer in net.layers[:2]:
            x = layer(x)
    for layer in net.layers[2:]:
        x = layer(x)
    return x


def detached(net, x):
    for layer in net.layers[:2]:
        x = layer(x)
    x = x.detach()
    return net.layers[-1](net.layers[2](x))


def gradient_of_a_state(net, x):
    states = [net.layers[0](x)]
    states.append(net.layers[1](states[-1]))
    y = net.layers[2](states[-1])
    slope, = torch.autograd.grad(y.square().sum(), states[0], retain_graph=True, create_graph=False)
    return y + slope


def hooked(net, x):
    x = net.layers[0](x)
    x.register_hook(lambda g: g * 3)
    return net.layers[2](net.layers[1](x))


def retained(net, x):
    first = net.layers[0](x)
    first.retain_grad()
    net.first = first
    return net.layers[1](first)


def through_numpy(net, x):
    y = net.layers[1](net.layers[0](x))
    scale = float(y.detach().numpy().std()) + float(y.max()) + y.tolist()[0][0][0] + len(repr(y)) * 0
    return net.layers[2](y) * scale


def checkpointed(net, x):
    for n, layer in enumerate(net.layers):
        x = checkpoint(layer, x, use_reentrant=False) if n % 2 else layer(x)
    return x


def checkpointed_reentrant(net, x):
    for n, layer in enumerate(net.layers):
        x = checkpoint(layer, x, use_reentrant=True) if n % 2 else layer(x)
    return x


LOOPS = {
    "skipped": lambda net, x: net.layers[3](net.layers[2](net.layers[0](x))),
    "backwards": lambda net, x: net.layers[0](net.layers[3](x)),
    "the same layer twice": lambda net, x: net.layers[1](net.layers[1](net.layers[0](x))),
    "the first alone": lambda net, x: net.layers[0](x),
    "the last alone": lambda net, x: net.layers[-1](x),
    "a slice": lambda net, x: nn.Sequential(*net.layers[1:3])(x),
    "zip": lambda net, x: [x := layer(x) * s for layer, s in zip(net.layers, (1.0, 0.5, 2.0))][-1],
    "named": lambda net, x: net.get_submodule("layers.2")(dict(net.named_modules())["layers.1"](x)),
    "residual": lambda net, x: [x := x + layer(x) for layer in net.layers][-1],
    "a cell of each": lambda net, x: sum(layer(x)[:, :1] for layer in net.layers).expand_as(x),
    "gate": gate, "collected": collected, "branches": branches, "own function": own_function, "in place": in_place,
    "some without gradient": some_without_gradient, "detached": detached, "gradient of a state": gradient_of_a_state,
    "hooked": hooked, "retained": retained, "numpy": through_numpy, "checkpoint": checkpointed,
    "reentrant": checkpointed_reentrant}


@pytest.mark.parametrize("optimizer", ["server", "local"])
@pytest.mark.parametrize("name", LOOPS)
def test_what_is_between_layers_is_what_it_is_in_pytorch(name, optimizer):
    here, there = pair(optimizer=optimizer)
    optimizers = [torch.optim.AdamW(here.parameters(), lr=1e-2, eps=1e-5)]
    made = torch.optim.AdamW(there.parameters(), lr=1e-2, eps=1e-5)
    optimizers.append(attnd.torch.optimizer(made) if optimizer == "server" else made)
    for _ in range(3):
        results = []
        for net, one in zip((here, there), optimizers):
            one.zero_grad()
            x = X.clone().requires_grad_()
            y = LOOPS[name](net, net.inp(x))
            net.head(y).square().mean().backward()
            results.append((y.detach(), x.grad, *([net.first.grad] if hasattr(net, "first") else [])))
            one.step()
        for one, other in zip(*results):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)
        norms = [{n: None if p.grad is None else 1 for n, p in net.named_parameters()} for net in (here, there)]
        assert norms[0] == norms[1] or optimizer == "server"
    for (key, one), other in zip(here.state_dict().items(), there.state_dict().values()):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=2e-4, msg=lambda text: f"{key}: {text}")


@pytest.mark.parametrize("optimizer", ["server", "local"])
def test_a_plain_loop_is_one_call_and_a_cut_one_as_many_as_it_has_parts(optimizer, calls):
    _, there = pair(optimizer=optimizer)
    there(X).sum().backward()
    assert calls == [None, "back"]
    del calls[:]
    gate(there, there.inp(X)).sum().backward()
    assert calls == [(0, 2), (2, 3), (3, 4), "back", "back", "back"]
    del calls[:]
    collected(there, there.inp(X)).sum().backward()
    assert calls == [(n, n + 1) for n in range(COUNT)] + ["back"] * COUNT
    del calls[:]
    unused = there.layers[1](there.layers[0](there.inp(X)))
    assert unused.requires_grad and not calls
    with torch.no_grad():
        there(X)
    assert calls == [None]


def test_parameters_of_layers_left_out_have_no_gradient_and_do_not_step():
    here, there = pair()
    optimizers = [BUILDS["adamw"](here.parameters()), attnd.torch.optimizer(BUILDS["adamw"](there.parameters()))]
    for skipped in (1, 2, 1):
        for net, optimizer in zip((here, there), optimizers):
            optimizer.zero_grad()
            x = net.inp(X)
            for n, layer in enumerate(net.layers):
                x = x if n == skipped else layer(x)
            net.head(x).square().mean().backward()
            assert [p.grad is None for p in net.layers[skipped].parameters()] == [True] * 6
            optimizer.step()
    for one, other in zip(here.state_dict().values(), there.state_dict().values()):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)
    steps = [{n: int(v["step"]) for n, v in o.state_dict()["state"].items()} for o in optimizers]
    assert steps[0] == steps[1]


def test_what_was_called_before_a_change_is_computed_as_it_was():
    here, there = pair()
    change = torch.full((24, 16), 0.1)
    results = []
    for net in (here, there):
        late = net.layers[1](net.layers[0](net.inp(X)))
        with torch.no_grad():
            late_too = net(X)
        attnd.torch.assign_(net.layers[0][0].weight, change)
        results.append((late.detach(), late_too, net(X).detach()))
    for one, other in zip(*results):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    x = torch.randn(2, 16)
    y = there.layers[0](x)
    x.add_(1)
    with pytest.raises(attnd.FailedPrecondition, match="changed in place"):
        y.sum()


def test_looking_between_layers_changes_no_dropout():
    _, there = pair()
    for module in there.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    found = []
    for looks in (False, True):
        torch.manual_seed(3)
        x = there.inp(X)
        for layer in there.layers:
            x = layer(x)
            if looks:
                float(x.sum())
        found.append((x.detach(), torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    twice = [there.layers[0](there.inp(X)) for _ in range(2)]
    assert not torch.equal(*twice)
    state = there.layers[0](there.inp(X))
    assert not torch.equal(there.layers[1](state), there.layers[1](state))


def dropping(p=0.5):
    _, there = pair()
    for module in there.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
    return there


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gates", [True, False], ids=["gated", "plain"])
def test_checkpointed_layers_have_the_dropout_of_their_forward(reentrant, gates):
    there, scale = dropping(), torch.full((16,), 0.9).requires_grad_()
    found = []
    for saves in (False, True):
        torch.manual_seed(3)
        x = y = there.inp(X).detach().requires_grad_()
        scale.grad = None
        for layer in there.layers:
            def run(h, layer=layer):
                return layer(h) * scale if gates else layer(h)
            y = checkpoint(run, y, use_reentrant=reentrant) if saves else run(y)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *([scale.grad.clone()] if gates else [])])
    for expected, got in zip(*found):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_generator_set_back_brings_a_layers_dropout_again():
    there = dropping()
    state = there.layers[0](there.inp(X))
    before = torch.get_rng_state()
    first = there.layers[1](state)
    torch.set_rng_state(before)
    assert torch.equal(there.layers[1](state), first)
    assert not torch.equal(there.layers[1](state), first)


def test_a_thousand_calls_in_a_row_are_computed():
    here, there = pair()
    with torch.no_grad():
        found = []
        for net in (here, there):
            x = net.inp(X)
            for _ in range(1000):
                x = net.layers[0](x)
            found.append(x)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


def test_hooks_of_whole_layers_run():
    here, there = pair()
    seen = []
    for net in (here, there):
        handles = [net.layers[1].register_forward_hook(lambda m, i, o: o * 2),
                   net.layers[2].register_forward_pre_hook(lambda m, i: (i[0] + 1,)),
                   net.layers[3].register_full_backward_hook(lambda m, i, o: (i[0] * 5,))]
        x = X.clone().requires_grad_()
        y = net(x)
        y.sum().backward()
        seen.append((y.detach(), x.grad))
        for handle in handles:
            handle.remove()
        seen[-1] += (net(X).detach(),)
    for one, other in zip(*seen):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_a_layer_that_another_replaced_says_so():
    _, there = pair()
    old = there.layers[1]
    there.layers[1] = copy.deepcopy(old)
    there(X)
    with pytest.raises(attnd.FailedPrecondition, match="replaced"):
        old(there.inp(X))


def test_activations_beyond_kept_rows_are_computed_again(calls):
    here, there = pair(kept_rows=15, max_rows=15)
    grads = []
    for net in (here, there):
        x = X.clone().requires_grad_()
        (net(x) * net(2 * x) * net(x - 1)).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)
    for one, other in zip(here.parameters(), there.parameters()):
        torch.testing.assert_close(attnd.torch.fetch(other.grad), one.grad, rtol=1e-3, atol=1e-4)


def test_kept_rows_grow_with_a_call_and_none_are_refused_by_name(client):
    here, there = pair(kept_rows=4)
    for x in (X, torch.cat([X, X])):
        found = []
        for net in (here, there):
            net.zero_grad()
            leaf = x.clone().requires_grad_()
            net(leaf).square().sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    here, there = pair(kept_rows=0)
    with torch.no_grad():
        torch.testing.assert_close(there(X), here(X), rtol=1e-4, atol=1e-5)
    with pytest.raises(attnd.ResourceExhausted, match="kept_rows"):
        there(X)
    for options in ({"kept_rows": -1}, {"max_rows": 0}):
        with pytest.raises(attnd.InvalidArgument, match=next(iter(options))):
            pair(**options)
    layout = attnd.modules.Layout(8)
    block = layout.block()
    block.activation(block.linear(0, block.parameter("w", 8, 8)), "gelu")
    layout.layer(block, "0.")
    with attnd.connect(client.addresses[0], timeout=20, retries=0) as made:
        module = attnd.register(layout, made, name="kept", max_rows=4, kept_rows=4)
        module.put({"0.w": np.eye(8, dtype=np.float32)})
        x = np.ones((4, 8), np.float32)
        _, kept = module.forward(x, keep=True)
        with pytest.raises(attnd.ResourceExhausted, match="kept_rows.*makes_room") as caught:
            module.forward(x, keep=True)
        assert caught.value.reason == "ACTIVATION_PRESSURE"
        module.backward(x, kept)
        module.release()
