"""Module calls bring more than x: a memory for cross-attention, and sequences that lie end to end."""
import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from module_pairs import MODES  # noqa: E402
from torch import nn  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402
from attnd.modules import Heads, Layout  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")


def decoders(**options):
    """PyTorch's decoder here, and with its layers on the daemon; each a step's gradients away from the other."""
    layer = nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True, **options)
    here = nn.TransformerDecoder(layer, 2)
    there = copy.deepcopy(here)
    there.layers = attnd.torch.offload(there.layers)
    return here, there


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=["post", "pre"])
def test_decoder_layers_attend_to_a_memory(options):
    here, there = decoders(**options)
    optimizers = [torch.optim.SGD(here.parameters(), lr=0.1),
                  attnd.torch.optimizer(torch.optim.SGD(there.parameters(), lr=0.1))]
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.tensor([[False] * 4, [False] * 2 + [True] * 2])
    for step in range(4):
        x, memory, target = torch.randn(2, 6, 16), torch.randn(2, 4, 16), torch.randn(2, 6, 16)
        found = []
        for model, optimizer in zip((here, there), optimizers):
            inputs = [x.clone().requires_grad_(), memory.clone().requires_grad_()]
            optimizer.zero_grad()
            y = model(*inputs, tgt_mask=causal, tgt_is_causal=True,
                      memory_key_padding_mask=padding if step % 2 else None)
            nn.functional.mse_loss(y, target).backward()
            optimizer.step()
            found.append([y, *(one.grad for one in inputs)])
        for expected, got in zip(*found):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    expected, got = here.state_dict(), there.state_dict()
    assert list(expected) == list(got)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


REFUSED = {
    "memory_mask": {"memory_mask": torch.zeros(6, 4)},
    "memory_key_padding_mask": {"memory_key_padding_mask": torch.tensor([[True, False, False, False]] * 2)},
}


@pytest.mark.parametrize("field", REFUSED)
def test_masks_of_the_memory_that_no_lengths_say_raise(field):
    _, there = decoders()
    with pytest.raises(attnd.Unimplemented, match=field):
        there(torch.randn(2, 6, 16), torch.randn(2, 4, 16), **REFUSED[field])


HIDDEN = torch.rand(20, 20, generator=torch.Generator().manual_seed(3)) < 0.4


@pytest.mark.parametrize("options", [
    {"src_mask": (HIDDEN & ~torch.eye(20, dtype=torch.bool)).T},
    {"src_mask": torch.zeros(20, 20).masked_fill(HIDDEN & ~torch.eye(20, dtype=torch.bool), -torch.inf).T},
    {"src_key_padding_mask": HIDDEN[:, :3].T}], ids=["bool", "float", "padding"])
def test_masks_that_were_transposed_agree_with_pytorch(options):
    here = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
    there = attnd.torch.offload(nn.ModuleList([copy.deepcopy(here)]))
    x = torch.randn(3, 20, 16)
    torch.testing.assert_close(there[0](x, **options), here(x, **options), rtol=1e-4, atol=1e-5)


WRONG = {
    "padding of another order": ({"src_key_padding_mask": torch.zeros(5, 3, dtype=torch.bool)}, r"expected shape \(3, 5\)"),
    "padding of one": ({"src_key_padding_mask": torch.zeros(1, 5, dtype=torch.bool)}, r"expected shape \(3, 5\)"),
    "a mask for each sequence": ({"src_mask": torch.zeros(3, 5, 5)}, r"expected shape \(5, 5\) or \(6, 5, 5\)"),
    "four dimensions": ({"src_mask": torch.zeros(3, 1, 5, 5)}, r"expected shape \(5, 5\) or \(6, 5, 5\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_masks_of_other_shapes_than_pytorchs_raise(name):
    options, message = WRONG[name]
    here = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
    there = attnd.torch.offload(nn.ModuleList([copy.deepcopy(here)]))
    with pytest.raises(attnd.InvalidArgument, match=message):
        there[0](torch.randn(3, 5, 16), **options)
    with pytest.raises((RuntimeError, AssertionError)):
        here(torch.randn(3, 5, 16), **options)


def test_the_memory_has_as_many_sequences():
    _, there = decoders()
    with pytest.raises(attnd.InvalidArgument, match="^memory: expected 2 sequences"):
        there(torch.randn(2, 6, 16), torch.randn(1, 4, 16))


MEMORIES = {"its own input": lambda x, states: states[-1], "the first input": lambda x, states: states[0],
            "the state before": lambda x, states: states[max(0, len(states) - 2)]}


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_may_be_what_other_layers_read(name):
    twins = decoders()
    x, found = torch.randn(2, 6, 16), []
    for model in twins:
        states = [x.clone().requires_grad_()]
        for layer in model.layers:
            states.append(layer(states[-1], MEMORIES[name](x, states)))
        states[-1].square().sum().backward()
        found.append([states[-1], states[0].grad, *(attnd.torch.fetch(p.grad) for p in model.layers.parameters())])
        del states
    for expected, got in zip(*found):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_attention_to_what_a_layer_before_has_read_is_refused(shared):
    layers = attnd.torch.offload(nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2)]))
    x = torch.randn(2, 6, 16)
    if shared:
        x.numpy()  # who has it may write it at any time
    y, _ = layers[0](x, x, x, need_weights=False)
    with pytest.raises(attnd.Unimplemented, match="key, value: expected the query"):
        layers[1](y, x, x, need_weights=False)


@pytest.mark.parametrize("field", ["src_mask", "src_key_padding_mask"])
@pytest.mark.parametrize("index", [0, 1])
def test_masks_that_are_trained_are_refused(field, index):
    layers = attnd.torch.offload(nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
                                                for _ in range(2)]))
    x, mask = torch.randn(5, 5, 16), nn.Parameter(torch.zeros(5, 5))
    for layer in layers[:index]:
        x = layer(x, **{field: mask.detach()})
    with pytest.raises(attnd.Unimplemented, match=f"^{field}: expected a tensor that wants no gradient"):
        layers[index](x, **{field: mask})
    with torch.no_grad():
        layers[index](x, **{field: mask})


@MODES
def test_causal_calls_and_others_are_mixed_in_a_step(mode):
    """The first one is not causal."""
    later, gradients = nn.Transformer.generate_square_subsequent_mask(5).isinf(), []
    padding = torch.arange(5) >= torch.tensor([5, 3])[:, None]
    here = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(2)])
    there = attnd.torch.offload(copy.deepcopy(here), optimizer=mode, max_rows=64)
    x = torch.randn(2, 5, 16)
    for layers in (here, there):
        seen = 0
        for given in ({}, {"src_mask": later}, {"src_mask": later, "src_key_padding_mask": padding}):
            seen = seen + layers[1](layers[0](x), **given)[:, :3]
            (layers[0](x[:, :1], **({"src_mask": later[:1, :1]} if given else {})) * x[:, 1:2]).sum().backward()
        (seen * x[:, 2:]).sum().backward()
        gradients.append([attnd.torch.fetch(p.grad) if mode == "server" and layers is there else p.grad
                          for p in layers.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


def test_a_call_without_a_causal_mask_among_causal_ones_says_what_to_do():
    layers = attnd.torch.offload(nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)]))
    x, later = torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5)
    y = layers[0](x, src_mask=later)
    layers[0](x)
    with pytest.raises(attnd.FailedPrecondition, match="make the first call without a causal mask"):
        y.sum().backward()
    for _ in range(2):  # from now on in any order
        (layers[0](x, src_mask=later) + layers[0](x)).sum().backward()


@pytest.mark.parametrize("field", ["src_mask", "src_key_padding_mask"])
def test_masks_of_whole_numbers_are_refused_by_name(field):
    layers = attnd.torch.offload(nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)]))
    with pytest.raises(attnd.InvalidArgument, match=r"mask: expected bool or floating numbers, as \w+.bool\(\)"):
        layers[0](torch.randn(5, 5, 16), **{field: torch.zeros(5, 5, dtype=torch.uint8)})


@pytest.mark.parametrize("field", ["src_mask", "src_key_padding_mask"])
def test_a_row_that_is_hidden_by_the_lowest_number_is_refused(field):
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
    there = attnd.torch.offload(nn.ModuleList([copy.deepcopy(layer)]))[0]
    x, mask = torch.randn(5, 5, 16), torch.zeros(5, 5)
    mask[2] = torch.finfo(torch.float32).min
    with pytest.raises(attnd.Unimplemented, match="whole row is hidden"):
        there(x, **{field: mask})
    mask[2, :2] = 0
    torch.testing.assert_close(there(x, **{field: mask}), layer(x, **{field: mask}), rtol=1e-4, atol=1e-5)


def test_a_layer_takes_its_input_by_name():
    layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    there = attnd.torch.offload(nn.ModuleList([copy.deepcopy(layer)]))[0]
    x = torch.randn(5, 16)
    torch.testing.assert_close(there(input=x), layer(input=x), rtol=1e-5, atol=1e-5)


def test_a_memory_in_numpys_memory_may_be_written_after_the_call():
    here, there = decoders()
    x, memory = torch.randn(2, 6, 16), np.ones((2, 4, 16), np.float32)
    y = there.layers[0](x, torch.from_numpy(memory))
    memory[:] = 0
    torch.testing.assert_close(y.detach().clone(), here.layers[0](x, torch.ones(2, 4, 16)).detach(), rtol=1e-4, atol=1e-5)


def test_nested_tensors_are_what_their_sequences_are_alone():
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
    here = nn.ModuleList([layer, copy.deepcopy(layer)])
    there = attnd.torch.offload(copy.deepcopy(here), optimizer="local")
    parts = [torch.randn(length, 16) for length in (3, 7, 1)]
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    for mask in (None, causal):
        whole = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        y = there(whole, src_mask=mask)
        assert y.is_nested and y.shape[0] == 3
        y.values().square().sum().backward()
        assert whole.grad is not None
        for got, slope, part in zip(y.unbind(), whole.grad.unbind(), parts):
            x = part[None].clone().requires_grad_()
            alone = x
            for one in here:
                alone = one(alone, src_mask=None if mask is None else causal[:len(part), :len(part)])
            alone.square().sum().backward()
            torch.testing.assert_close(got, alone[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(slope, x.grad[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(attnd.Unimplemented, match="mask"):
        there(torch.nested.nested_tensor(parts, layout=torch.jagged), src_mask=torch.rand(7, 7) > 0.5)


def cross_layout():
    layout = Layout(16, memory_width=8)
    block = layout.block()
    q = Heads(block.linear(0, block.parameter("q", 16, 16)), 2, 8)
    packed = block.linear(1, block.parameter("kv", 32, 8))
    made = block.attention(q, Heads(packed, 2, 8), Heads(packed, 2, 8, 16))
    block.add(0, block.linear(made, block.parameter("out", 16, 16)))
    layout.layer(block, "")
    return layout


def test_packed_rows_and_memory_have_the_bits_of_each_sequence(client, rng):
    layout = cross_layout()
    module = attnd.register(layout, client, name="packed", max_rows=32)
    module.put({p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in layout.parameters})
    starts, ends = [0, 3, 10, 11], [0, 2, 3, 9]
    x, memory, dy = [np.float32(rng.normal(size=shape)) for shape in ((11, 16), (9, 8), (11, 16))]
    y, act = module.forward(x, keep=True, cu_seqlens=starts, memory=memory, memory_cu_seqlens=ends)
    dx, d_memory = module.backward(dy, act)
    for n in range(3):
        rows, keys = slice(starts[n], starts[n + 1]), slice(ends[n], ends[n + 1])
        alone, act = module.forward(x[rows][None], keep=True, memory=memory[keys][None])
        d_alone, d_keys = module.backward(dy[rows][None], act)
        for got, expected in ((y[rows], alone[0]), (dx[rows], d_alone[0]), (d_memory[keys], d_keys[0])):
            np.testing.assert_array_equal(got, expected)
    long = np.concatenate([memory, np.full((2, 8), np.nan, np.float32)])[None]
    by_length = module.forward(x[None], memory=long, memory_lengths=[9])
    np.testing.assert_array_equal(by_length, module.forward(x[None], memory=memory[None]))
    for told, wrong in {"memory": {}, "memory_cu_seqlens": {"memory": memory, "cu_seqlens": starts},
                        "cu_seqlens": {"memory": memory, "cu_seqlens": [0, 12], "memory_cu_seqlens": [0, 9]}}.items():
        with pytest.raises(attnd.InvalidArgument, match=f"^{told}: expected"):
            module.forward(x, **wrong)
    module.release()
