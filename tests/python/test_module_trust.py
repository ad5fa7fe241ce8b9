"""PyTorch's own tools do to offloaded layers what they do to others, or are refused by an error that names the remedy."""
import copy
import multiprocessing
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from module_actions import Net  # noqa: E402
from module_pairs import MODES, X, pair, same, step, wrapped  # noqa: E402
from torch import nn  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch.utils.module_tracker import ModuleTracker  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")


# ---- Layers.

@MODES
def test_a_piece_that_stands_twice_in_a_sequential_counts_twice(mode):
    bend = nn.ReLU()
    here = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), bend, nn.Linear(16, 16), bend)])
    there = attnd.torch.offload(copy.deepcopy(here), optimizer=mode)
    x = torch.randn(4, 16)
    torch.testing.assert_close(there[0](x), here[0](x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Dropout(0.1, inplace=True),
                                   nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))], ids=lambda one: type(one).__name__)
@MODES
def test_a_piece_that_would_write_the_layers_input_is_refused(first, mode):
    with pytest.raises(TypeError, match="would write into the layer's input"):
        attnd.torch.offload(nn.ModuleList([nn.Sequential(first, nn.Linear(16, 16))]), optimizer=mode)
    attnd.torch.offload(nn.ModuleList([nn.Sequential(nn.Linear(16, 16), first)]), optimizer=mode)


class Residual(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


def a_list(change):
    made = nn.ModuleList([nn.Sequential(nn.Linear(16, 16))])
    change(made)
    return made


MORE = {
    "forward": (lambda: Residual(nn.Sequential(nn.Linear(16, 16))), "a forward of its own"),
    "hooks": (lambda: a_list(lambda made: made.register_forward_hook(lambda *_: None)), "hooks"),
    "parameter": (lambda: a_list(lambda made: made.register_parameter("scale", nn.Parameter(torch.ones(1)))), "scale"),
    "stack": (lambda: attnd.torch.offload(a_list(lambda made: None)), "on a daemon already"),
}


@pytest.mark.parametrize("name", MORE)
@MODES
def test_a_list_that_is_more_than_its_layers_is_refused(name, mode):
    made, told = MORE[name]
    with pytest.raises(TypeError, match=told):
        attnd.torch.offload(made(), optimizer=mode)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@MODES
def test_layers_are_offloaded_and_copied_where_no_gradients_are_wanted(around, mode):
    here = Net(2)
    there = copy.deepcopy(here)
    with around():
        there.layers = attnd.torch.offload(there.layers, optimizer=mode, max_rows=64)
        torch.testing.assert_close(there(X), here(X), rtol=1e-5, atol=1e-5)
        twin = copy.deepcopy(there)
        torch.testing.assert_close(twin(X), here(X), rtol=1e-5, atol=1e-5)
    for net in (here, there):
        step(net, wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    same(here, there)


RAW = {
    "apply_": lambda y: y.apply_(lambda value: 2 * value), "map_": lambda y: torch.ones_like(y).map_(y, lambda a, b: a + b),
    "format": lambda y: f"{y}", "resize_as_": lambda y: torch.zeros(1).resize_as_(y).shape,
    "numpy": lambda y: np.add(y, 1)}


@pytest.mark.parametrize("name", RAW)
def test_what_reaches_for_an_outputs_memory_finds_it(name):
    found = []
    for net in pair():
        with torch.no_grad():
            found.append(RAW[name](net.layers[0](torch.ones(3, 16))))
    assert found[0] == found[1] if isinstance(found[0], (str, tuple)) else np.allclose(*found, atol=1e-4)


def test_what_cannot_find_an_outputs_memory_raises():
    _, there = pair()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"expected x.detach\(\)"):
        torch.utils.dlpack.to_dlpack(there.layers[0](torch.ones(3, 16)))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"a Parameter from an instance of type Deferred"):
        nn.Parameter(there.layers[0](torch.ones(3, 16)))


def test_a_slice_of_a_sequential_is_called_as_one():
    here, there = pair(is_sequential=True)
    x = torch.randn(3, 16)
    torch.testing.assert_close(there.layers[1:](x), here.layers[1:](x), rtol=1e-5, atol=1e-5)
    assert type(there.layers[1:]) is nn.Sequential and list(there.layers[1:].state_dict()) == list(
        here.layers[1:].state_dict())


@pytest.fixture(params=[None, "cpu"], ids=["no default device", "default device"])
def default_device(request):
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)


@MODES
@pytest.mark.usefixtures("default_device")
def test_layers_in_a_list_of_ones_own_are_moved_and_train(mode):
    nets = pair(mode)
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = attnd.torch.optimizer(optimizer) if net is nets[1] and mode == "server" else optimizer
        net.layers = nn.ModuleList(list(net.layers))
        for _ in range(2):
            net.to("cpu").float()
            step(net, optimizer)
        assert net.to(torch.float32) is net
    same(*nets)
    if mode == "server":
        with pytest.raises(attnd.Unimplemented, match="convert the model before attnd.torch.offload"):
            nets[1].double()


@pytest.mark.parametrize("made", [nn.utils.weight_norm, nn.utils.spectral_norm,
                                  lambda linear: prune.l1_unstructured(linear, "weight", 0.5)])
@MODES
def test_weights_that_are_computed_are_refused_by_name(made, mode):
    linear = nn.Linear(16, 16)
    made(linear)
    with pytest.raises(TypeError, match="weight is computed from other parameters"):
        attnd.torch.offload(nn.ModuleList([linear]), optimizer=mode)


def test_pruning_inside_a_layer_is_refused_and_leaves_it_callable():
    here, there = pair("local")
    with pytest.raises(attnd.Unimplemented, match="hooks inside layers"):
        prune.l1_unstructured(there.layers[0][0], "weight", 0.5)
    torch.testing.assert_close(there(X), here(X), rtol=1e-5, atol=1e-5)


# ---- Calls.

@MODES
@pytest.mark.parametrize("x", [None, [1.0], torch.ones(3, 16).long(), torch.ones(3, 16).double(),
                               torch.ones(3, 16, dtype=torch.complex64), torch.ones(3, 16, device="meta")],
                         ids=["None", "list", "long", "double", "complex", "meta"])
def test_an_input_that_has_no_numbers_of_a_layer_is_refused(x, mode):
    _, there = pair(mode)
    with pytest.raises((attnd.InvalidArgument, TypeError), match="^x: expected"):
        there.layers[0](x)


def fake(net):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        net(torch.randn(3, 8))


TRACED = {"trace": lambda net: torch.jit.trace(net, X), "script": torch.jit.script, "make_fx": lambda net: make_fx(net)(X),
          "fake": fake}


@MODES
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_that_would_have_the_output_as_a_constant_is_refused(name, mode):
    _, there = pair(mode)
    with pytest.raises(attnd.Unimplemented, match="trace: expected|torch.jit.script: expected"), torch.no_grad():
        TRACED[name](there)
    there(X)


@MODES
def test_counting_operations_is_refused_and_tracking_modules_is_not(mode):
    here, there = pair(mode)
    with pytest.raises(attnd.Unimplemented, match="FlopCounterMode"), FlopCounterMode(display=False):
        there(X)
    with ModuleTracker() as tracker:
        y = there(X)
        y.sum().backward()
    assert tracker.parents == {"Global"}
    torch.testing.assert_close(y, here(X), rtol=1e-5, atol=1e-5)


class Twice(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        return made * 2 if function is torch.ops.aten.gelu.default else made


class TwiceToo(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        return made * 2 if function is nn.functional.gelu else made


@MODES
@pytest.mark.parametrize("kind", [Twice, TwiceToo])
def test_modes_of_ones_own_are_refused_and_pytorchs_are_not(kind, mode):
    here, there = pair(mode)
    with kind(), pytest.raises(attnd.Unimplemented, match=f"{kind.__name__}: expected no mode"):
        there(X)
    with torch.device("cpu"), torch.autograd.graph.allow_mutation_on_saved_tensors():
        torch.testing.assert_close(there(X), here(X), rtol=1e-5, atol=1e-5)


def test_a_hint_that_the_mask_is_causal_has_to_be_true():
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
    there = attnd.torch.offload(nn.ModuleList([layer]))
    x, mask = torch.randn(2, 5, 16), torch.zeros(5, 5)
    with pytest.raises(attnd.InvalidArgument, match="is_causal"):
        there[0](x, src_mask=mask, is_causal=True)
    there[0](x, src_mask=nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)


def test_a_step_of_training_is_compiled_around_the_layers():
    nets = pair()
    for net in nets:
        optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
        compiled = torch.compile(lambda: step(net, optimizer), backend="eager")
        for _ in range(2):
            compiled()
    same(*nets)


WRITES = {"mul": lambda h: h.mul_(2), "out": lambda h: torch.add(h, 1, out=h), "add": lambda h: h.__iadd__(1),
          "view": lambda h: h.view(-1).zero_(), "item": lambda h: h.__setitem__(0, 1.0),
          "numpy": lambda h: h.numpy().fill(0), "data": lambda h: h.data.zero_()}


@MODES
@pytest.mark.parametrize("name", WRITES)
def test_an_output_that_is_written_after_another_layer_got_it_changes_nothing_there(name, mode):
    seen = []
    for net in pair(mode):
        with torch.no_grad():
            first = net.layers[0](torch.ones(2, 16))
            second = net.layers[1](first)
            WRITES[name](first)
            seen.append((first.clone(), second.clone()))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


def test_a_view_that_is_written_after_another_layer_got_what_it_is_of_is_refused():
    _, there = pair()
    with torch.no_grad():
        first = there.layers[0](torch.ones(2, 16))
        view = first.view(-1)
        second = there.layers[1](first)
        view.zero_()
        with pytest.raises(attnd.FailedPrecondition, match="changed in place"):
            second.clone()


@MODES
def test_an_input_in_numpys_memory_may_be_written_after_the_call(mode):
    here, there = pair(mode)
    memory = np.ones((2, 16), np.float32)
    with torch.no_grad():
        y = there.layers[0](torch.from_numpy(memory))
        memory[:] = 0
        torch.testing.assert_close(y.clone(), here.layers[0](torch.ones(2, 16)), rtol=1e-5, atol=1e-5)


@MODES
def test_a_tensor_of_inference_mode_may_be_written_after_the_call(mode):
    seen = []
    for net in pair(mode):
        with torch.inference_mode():
            x, made = torch.empty(2, 16), []
            for number in range(3):
                made.append(net.layers[1](net.layers[0](x.fill_(number))))
            seen.append([one.clone() for one in made])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


@MODES
def test_an_input_may_be_another_tensor_after_the_call(mode):
    here, there = pair(mode)
    x = torch.ones(2, 16)
    y = there.layers[0](x)
    x.data = torch.zeros(2, 16)
    torch.testing.assert_close(y.detach().clone(), here.layers[0](torch.ones(2, 16)).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_forked_is_told_so():
    net = Net(2)
    net.layers = attnd.torch.offload(net.layers, micro_batches=2)
    barrier = threading.Barrier(3)
    for waiting in net.layers.line.add([barrier.wait] * 3):  # there are as many threads as there can be, and all wait
        waiting.result()
    net(X)
    here, there = multiprocessing.Pipe()

    def call():
        with pytest.raises(attnd.InvalidArgument, match="registered in this process"):
            net(X)
        there.send("refused")
    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    is_told = here.poll(60)
    child.kill()
    child.join()
    assert is_told and here.recv() == "refused"


def test_threads_call_two_stacks_in_either_order():
    one, two = [attnd.torch.offload(Net(2, is_sequential=True).layers) for _ in range(2)]
    x = torch.randn(3, 16)
    one(x), two(x)

    def call(first, second):
        with torch.no_grad():
            for _ in range(60):
                float(second(first(x)).sum())
                y = x
                for layer in [*first, *second]:
                    y = layer(y)
                float(y.sum())
    threads = [threading.Thread(target=call, args=order, daemon=True) for order in ((one, two), (two, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_an_output_keeps_its_shape():
    _, there = pair()
    with torch.no_grad(), pytest.raises(attnd.Unimplemented, match=r"transpose_: expected x = x.transpose\(...\)"):
        there.layers[0](torch.ones(2, 3, 16)).transpose_(0, 1)


# ---- Derivatives.

def penalty(layer, x):
    gradient, = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (gradient.norm(dim=1) - 1).square().mean().backward()


SECOND = {
    "penalty": penalty,
    "hessian": lambda layer, x: torch.autograd.functional.hessian(lambda x: layer(x).square().sum(), x),
    "jvp": lambda layer, x: torch.autograd.functional.jvp(layer, x, torch.ones_like(x)),
    "create_graph": lambda layer, x: layer(x).square().sum().backward(create_graph=True)}


@MODES
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_refused_where_they_begin(name, mode):
    layer, = attnd.torch.offload(nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))]),
                                 optimizer=mode)
    with pytest.raises(attnd.Unimplemented, match="create_graph: expected False"):
        SECOND[name](layer, torch.randn(2, 8, requires_grad=True))


@MODES
def test_derivatives_of_several_outputs_at_once_and_forward_ones_are_refused(mode):
    _, there = pair(mode)
    x = torch.randn(2, 8, requires_grad=True)
    y = there(x)
    with pytest.raises(attnd.Unimplemented, match="one gradient of the output at a time"):
        torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), pytest.raises(attnd.Unimplemented, match="forward_ad"):
        there(forward_ad.make_dual(torch.randn(2, 8), torch.randn(2, 8)))


def test_what_is_frozen_between_forward_and_backward_gets_no_gradient():
    nets = pair()
    for net in nets:
        optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5))
        loss = net(X).square().mean()
        net.layers[0].requires_grad_(False)
        loss.backward()
        assert net.layers[0][0].weight.grad is None and net.layers[1][0].weight.grad is not None
        optimizer.step()
    same(*nets)


def test_what_is_frozen_between_forward_and_a_second_backward_is_refused():
    _, there = pair()
    there(X).sum().backward()
    loss = there(X).sum()
    there.layers[0].requires_grad_(False)
    with pytest.raises(attnd.FailedPrecondition, match="was frozen after this forward"):
        loss.backward()


# ---- Gradients, states.

def test_norms_of_some_dimensions_are_refused():
    _, there = pair()
    there(X).sum().backward()
    gradient = there.layers[0][0].weight.grad
    for ask in (lambda: torch.linalg.vector_norm(gradient, dim=0), lambda: torch.linalg.vector_norm(gradient, dim=1),
                lambda: torch.linalg.vector_norm(gradient, dtype=torch.float64), lambda: torch.norm(gradient, "nuc")):
        with pytest.raises(attnd.Unimplemented, match="norm"):
            ask()
    expected = attnd.torch.fetch(gradient)
    for order in (1, 2, float("inf"), "inf"):
        torch.testing.assert_close(torch.norm(gradient, order), torch.norm(expected, float(order)))


def test_a_deleted_gradient_is_none():
    nets = pair()
    for net in nets:
        optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net(X).square().mean().backward()
        del net.layers[0][0].weight.grad
        assert net.layers[0][0].weight.grad is None
        optimizer.step()
    same(*nets)


def write_state(net, optimizer):
    with torch.no_grad():
        net.state_dict()["layers.0.0.weight"].copy_(torch.ones(24, 16))


def write_inner_state(net, optimizer):
    net.layers[1][0].state_dict()["weight"].zero_()


def write_moments(net, optimizer):
    optimizer.state_dict()["state"][4]["exp_avg"].zero_()


@pytest.mark.parametrize("write", [write_state, write_inner_state, write_moments])
def test_what_is_written_into_a_state_that_was_given_is_refused_until_it_is_loaded(write):
    _, there = pair()
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(there.parameters()))
    step(there, optimizer)
    optimizer.zero_grad()
    state, moments = there.state_dict(), optimizer.state_dict()
    write(there, optimizer)
    with pytest.raises(attnd.FailedPrecondition, match="was written in what state_dict"):
        step(there, optimizer)
    there.load_state_dict(state)
    optimizer.load_state_dict(moments)
    step(there, optimizer)


def test_a_state_that_is_written_and_loaded_is_what_it_says():
    nets = pair()
    for net in nets:
        net(X)
        state = net.state_dict()
        for tensor in state.values():
            tensor.mul_(0.5)
        net.load_state_dict(state)
        net(X)
    same(*nets)


def test_groups_that_are_set_are_those_of_both_sides():
    nets = pair()
    for net in nets:
        optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
        optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.5}]
        step(net, optimizer)
    same(*nets)


STATES = {
    "clear": lambda o, p: o.state.clear(), "another": lambda o, p: setattr(o, "state", {}),
    "pop": lambda o, p: o.state.pop(p), "del": lambda o, p: o.state.__delitem__(p), "get": lambda o, p: o.state[p],
    "values": lambda o, p: list(o.state.values()), "set": lambda o, p: o.state.__setitem__(p, {})}


@pytest.mark.parametrize("name", STATES)
def test_what_an_optimizer_has_on_a_daemon_is_refused_by_name(name):
    nets = pair()
    made = []
    for net in nets:
        made.append(wrapped(net, torch.optim.AdamW(net.parameters(), eps=1e-4)))
        step(net, made[-1])
    here, there = made
    weight = nets[1].layers[0][0].weight
    assert weight in there.state and len(there.state) == len(here.state)
    with pytest.raises(attnd.Unimplemented, match=r"state: what the optimizer has of 0.0.weight"):
        STATES[name](there, weight)
    there.state[nets[1].head.weight]["exp_avg"].zero_()
    here.state[nets[0].head.weight]["exp_avg"].zero_()
    for net, optimizer in zip(nets, made):
        step(net, optimizer)
    same(*nets)


# ---- Parameters.

def test_a_parameter_that_was_swapped_away_is_nobodys():
    _, there = pair()
    there(X)
    other = nn.Parameter(torch.ones(24, 16))
    torch.utils.swap_tensors(there.layers[0][0].weight, other)
    there(X)
    with pytest.raises(attnd.Unimplemented, match="in whose place there is another"):
        attnd.torch.fetch(other)
    there(X).sum().backward()
    assert other.grad is None and there.layers[0][0].weight.grad is not None


def test_a_refused_parameter_is_not_sent():
    here, there = pair()
    there(X)
    outside = nn.Linear(16, 24)
    held = weakref.ref(outside.weight)  # so that it cannot be changed in place
    old = there.layers[0][0].weight
    there.layers[0][0].weight = outside.weight
    with pytest.raises(TypeError, match="layers share nothing with others"):
        there(X)
    there.layers[0][0].weight = old
    torch.testing.assert_close(there(X), here(X), rtol=1e-5, atol=1e-5)
    assert held() is outside.weight


def test_what_is_new_beside_a_parameter_on_a_daemon_is_converted_and_moved():
    net = Net(2).bfloat16()
    net.layers = attnd.torch.offload(net.layers, max_rows=64)
    net(X.bfloat16())
    net.layers[0][0].bias = nn.Parameter(torch.zeros(24))
    net.to(torch.bfloat16)
    assert net.layers[0][0].bias.dtype == torch.bfloat16
    assert net(X.bfloat16()).dtype == torch.bfloat16


def test_all_attributes_of_a_model_can_be_looked_at():
    _, there = pair()
    assert all(hasattr(there, name) for name in dir(nn.Module) if not name.startswith("__"))
