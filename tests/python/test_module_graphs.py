"""Offloaded layers in autograd's graph: a backward ends it, gradients may not come, hooks of parameters are refused."""
import pytest

torch = pytest.importorskip("torch")
from module_pairs import MODES, pair, same  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")

AGAIN = {
    "loss": lambda y, z: (y, z.sum(), z.sum()), "input": lambda y, z: (y, torch.autograd.grad(z.sum(), y), z.sum()),
    "another": lambda y, z: (z, z.square().sum(), z.sum()), "state": lambda y, z: (y, z.sum(), y.sum())}


@MODES
@pytest.mark.parametrize("name", AGAIN)
def test_a_second_backward_without_retain_graph_is_refused(name, mode):
    for net in pair(mode):
        x = torch.ones(3, 16, requires_grad=True)
        y = net.layers[0](x)
        _, first, second = AGAIN[name](y, net.layers[1](y))
        if name != "input":
            first.backward()
        before = [p.grad is None for p in net.layers.parameters()]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            second.backward()
        assert [p.grad is None for p in net.layers.parameters()] == before


@MODES
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_graph_that_is_kept_can_be_gone_through_again(reentrant, mode):
    seen = []
    for net in pair(mode):
        x = torch.ones(3, 16, requires_grad=True)
        y = checkpoint(net.layers[0], x, use_reentrant=reentrant)
        loss = net.layers[1](y).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        seen.append(x.grad)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@MODES
@pytest.mark.parametrize("stops", [1, 2], ids=["behind one layer", "behind both"])
def test_where_no_gradient_comes_parameters_have_none_and_are_not_stepped(stops, mode):
    """0 would be stepped, by the decay of weights."""
    nets, seen = pair(mode), []
    for net in nets:
        parameters = list(net.layers.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, eps=1e-2)
        optimizer = attnd.torch.optimizer(optimizer) if net is nets[1] and mode == "server" else optimizer
        x = torch.ones(3, 16, requires_grad=True)
        y = net.layers[0](x)
        z = net.layers[1](y)
        (Stop.apply(z).sum() + (Stop.apply(y) if stops == 2 else y[:, 1] ** 3).sum()).backward()
        seen.append([p.grad is None for p in [x, *parameters]])
        optimizer.step()
    assert seen[0] == seen[1] and True in seen[0]
    same(*nets)


def test_a_hook_of_gradients_of_parameters_is_refused_by_name():
    _, there = pair()
    with pytest.raises(attnd.Unimplemented, match='hooks of a parameter .* optimizer="local"'):
        torch.autograd.graph.register_multi_grad_hook(list(there.parameters()), print)
