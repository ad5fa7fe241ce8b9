"""Weights of offloaded layers that are written between calls, loaded, lent or shared: as PyTorch does it, or refused."""
import pytest

torch = pytest.importorskip("torch")
from module_actions import Net  # noqa: E402
from module_pairs import MODES, X, pair, same, step, wrapped  # noqa: E402
from torch import nn  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")


# ---- Written between calls.

WRITTEN = {
    "step": lambda net, optimizer: optimizer.step(),
    "load": lambda net, _: net.layers.load_state_dict({key: 2 * value for key, value in net.layers.state_dict().items()}),
    "layer": lambda net, _: net.layers[0].load_state_dict(Net(2).layers[0].state_dict())}


@MODES
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("of", ["parameters", "input"])
def test_a_backward_of_weights_that_were_written_is_refused(of, name, mode):
    for net in pair(mode):
        optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
        h = torch.randn(2, 16, requires_grad=of == "input")
        y = net.layers[1](net.layers[0](h))
        y.detach().sum()
        if name == "step":
            net(X).sum().backward()
        WRITTEN[name](net, optimizer)
        net.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward(inputs=[h] if of == "input" else None)


@MODES
def test_a_backward_may_follow_a_step_of_other_layers(mode):
    gradients = []
    for net in pair(mode):
        optimizer = wrapped(net, torch.optim.SGD(net.layers[0].parameters(), lr=0.5))
        net(X).square().mean().backward()
        h = torch.ones(2, 16, requires_grad=True)
        y = net.layers[1](h)
        y.detach().sum()
        optimizer.step()
        net.zero_grad()
        y.square().sum().backward()
        gradients.append(h.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@MODES
def test_weights_that_change_between_two_layers_are_those_of_each_call(mode):
    seen = []
    for net in pair(mode):
        state = {key: 2 * value for key, value in net.state_dict().items()}
        h = net.layers[0](torch.ones(2, 16))
        net.load_state_dict(state)
        seen.append(net.layers[1](h).detach().clone())
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


# ---- Hooks of load_state_dict.

def double(module, state, prefix, *_):
    state[prefix + "weight"] = 2 * state[prefix + "weight"]


def double_all(module, state, prefix, *_):
    state.update({key: 2 * value for key, value in state.items() if key.startswith(prefix)})


def leave_out(module, state, prefix, *_):
    del state[prefix + "weight"]


def rename(module, state, prefix, *_):
    state[prefix + "weight"] = state.pop(prefix + "bias").new_ones(24, 16)


@pytest.mark.parametrize("hook", [double, double_all, leave_out, rename])
@pytest.mark.parametrize("is_called", [False, True])
def test_hooks_of_load_state_dict_change_what_is_loaded(hook, is_called):
    nets = pair()
    missing = []
    for net in nets:
        if is_called:
            net(X)
        owner = net.layers[0] if hook is double_all else net.layers[0][0]
        owner.register_load_state_dict_pre_hook(hook)
        state = {key: 0.5 * value for key, value in net.state_dict().items()}
        missing.append(net.load_state_dict(state, strict=False).missing_keys)
        net.layers[0][0].load_state_dict({"bias": torch.ones(24), "weight": torch.ones(24, 16)}, strict=False)
    same(*nets)
    assert missing[0] == missing[1]


def test_what_was_loaded_before_a_hook_that_fails_is_there():
    nets = pair()
    for net in nets:
        optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net(X)
        state = {key: 0.5 * value for key, value in net.state_dict().items()}
        handle = net.layers[1][3].register_load_state_dict_pre_hook(lambda *_: {}["none"])
        with pytest.raises(KeyError):
            net.load_state_dict(state)
        handle.remove()
        step(net, optimizer)
    same(*nets)


# ---- Lent.

def parameters_of(net, held=None):
    """Under local_weights, where they are on a daemon. held: gets what in C++ has them."""
    if type(net.layers) is nn.ModuleList:
        return list(net.parameters())
    with attnd.torch.local_weights(net):
        made = list(net.parameters())
        held is None or held.extend(parameter.expand_as(parameter).grad_fn for parameter in made)
        return made


def test_parameters_of_local_weights_are_the_daemons_after_it():
    nets, norms = pair(), []
    for net in nets:
        parameters = parameters_of(net)
        optimizer = wrapped(net, torch.optim.SGD(parameters, lr=0.5))
        for _ in range(2):
            optimizer.zero_grad()
            net(X).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.1))
            optimizer.step()
        parameters[4].requires_grad_(False)
        parameters[5].requires_grad = False
        step(net, optimizer)
    same(*nets)
    torch.testing.assert_close(norms[2:], norms[:2])
    with pytest.raises(attnd.Unimplemented, match="mul_: 0.0.weight is on a daemon"), torch.no_grad():
        parameters[4].mul_(2)


@pytest.mark.parametrize("held", [None, []], ids=["free", "held"])
def test_an_optimizer_made_under_local_weights_is_wrapped_or_refused(held):
    nets = here, there = pair()
    optimizers = [torch.optim.SGD(parameters_of(net, held), lr=0.5) for net in nets]
    with pytest.raises(TypeError, match="expected attnd.torch.optimizer"):
        step(there, optimizers[1])
    for net, optimizer in zip(nets, optimizers):
        net.zero_grad()
        step(net, wrapped(net, optimizer))
    same(here, there)


# ---- Shared.

TIES = {
    "data": lambda net: setattr(net.layers[1][0].weight, "data", net.layers[0][0].weight.data),
    "parameter": lambda net: setattr(net.layers[1][0], "weight", nn.Parameter(net.layers[0][0].weight)),
    "transposed": lambda net: setattr(net.head, "weight", nn.Parameter(net.layers[0][0].weight.detach().T)),
    "buffer": lambda net: net.register_buffer("seen", net.layers[0][0].weight.detach())}


@pytest.mark.parametrize("name", TIES)
def test_memory_that_is_shared_with_another_tensor_is_refused(name):
    net = Net(2)
    TIES[name](net)
    with pytest.raises(TypeError, match="or has its memory"):
        attnd.torch.offload(net.layers)
    attnd.torch.offload(net.layers, optimizer="local")


def test_parameters_may_lie_side_by_side_in_memory():
    here, there = Net(2), Net(2)
    there.load_state_dict(here.state_dict())
    lined = torch.cat([parameter.detach().reshape(-1) for parameter in there.parameters()])
    torch.nn.utils.vector_to_parameters(lined, there.parameters())
    there.layers = attnd.torch.offload(there.layers)
    torch.testing.assert_close(there(X), here(X), rtol=1e-5, atol=1e-5)


# ---- Gradients beside them.

def test_gradients_are_there_under_local_weights_and_can_be_set_to_none_or_0():
    nets = pair()
    for is_zero in (False, True):
        for net in nets:
            optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
            net(X).square().mean().backward()
            with attnd.torch.local_weights(net), torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * attnd.torch.fetch(p.grad)
                net.zero_grad(set_to_none=not is_zero)
            optimizer.step()
            assert {p.grad is None for p in net.parameters()} == {not is_zero}
            net.zero_grad()
        same(*nets)


def test_numbers_of_gradients_under_local_weights_are_refused_by_name():
    here, there = pair()
    there(X).square().mean().backward()
    weight = there.layers[0][0].weight
    with attnd.torch.local_weights(there):
        there.to("cpu")  # changes nothing
        with pytest.raises(attnd.Unimplemented, match=r"attnd.torch.fetch\(p.grad\)"):
            there.layers[0][0].weight.grad * 0.1
        with pytest.raises(attnd.FailedPrecondition, match="not in one of local_weights"):
            with attnd.torch.local_gradients(there):
                pass
    with attnd.torch.local_gradients(there), pytest.raises(attnd.FailedPrecondition, match="not in one of local_gradients"):
        with attnd.torch.local_weights(there):
            pass
    here(X).square().mean().backward()
    torch.testing.assert_close(attnd.torch.fetch(weight.grad), here.layers[0][0].weight.grad, rtol=1e-3, atol=1e-5)


def test_states_that_were_taken_in_inference_mode_are_ordinary():
    nets = pair()
    for net in nets:
        optimizer = wrapped(net, torch.optim.AdamW(net.parameters(), eps=1e-3))
        step(net, optimizer)
        with torch.inference_mode():
            states = net.state_dict(), optimizer.state_dict()
        for state in [states[0], *states[1]["state"].values()]:
            for tensor in state.values():
                tensor.add_(0)
        net.zero_grad()
        net.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        step(net, optimizer)
    same(*nets)
