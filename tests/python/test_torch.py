"""attnd.torch against PyTorch itself: values and gradients, dtypes, shapes, autocast, compile, checkpointing, threads."""
import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import attnd  # noqa: E402
import attnd.torch as remote  # noqa: E402
from attnd._operator_options import Words  # noqa: E402

UNIT = {torch.float32: 2.0**-17, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
original = F.scaled_dot_product_attention
DEVICE = os.environ.get("ATTND_TEST_DEVICE", "cpu")  # of the tensors: "cuda" where there is one


@pytest.fixture(autouse=True)
def connected(client):
    remote.connect(client)
    torch.manual_seed(int(torch.initial_seed()) % 2**31)
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


def make(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()


def exact(function, tensors, **options):
    """The float64 result and gradients of `function`, for a fixed weighting of the output."""
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    return function(*wide, **options), wide


def check(ours, tensors, theirs, wide, scale=1.0, floor=1e-3):
    """Compares output and all gradients with the float64 ones, within the element's rounding of the largest number, or
    of `floor` where that is more."""
    unit = scale * UNIT[tensors[0].dtype]
    assert ours.dtype == tensors[0].dtype and ours.shape == theirs.shape
    largest = theirs.detach().abs().max().clamp(min=1e-3)
    torch.testing.assert_close(ours.double(), theirs, rtol=2 * unit, atol=unit * float(largest))
    weight = torch.randn(ours.shape).to(ours.dtype)
    leaves = [t for t in tensors if t.requires_grad]
    got = torch.autograd.grad(ours, leaves, weight)
    expected = torch.autograd.grad(theirs, [w for w in wide if w.requires_grad], weight.double())
    for mine, leaf, other in zip(got, leaves, expected):
        assert mine.shape == leaf.shape and mine.dtype == leaf.dtype
        torch.testing.assert_close(mine.double(), other, rtol=4 * unit,
                                   atol=4 * unit * float(other.abs().max().clamp(min=floor)))


SHAPES = {  # q, k, v, options
    "four": ((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16), {}),
    "three": ((4, 9, 16), (4, 7, 16), (4, 7, 24), {}),
    "two": ((9, 16), (7, 16), (7, 24), {}),
    "five": ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8), {}),
    "causal": ((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16), {"is_causal": True}),
    "causal wide": ((1, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16), {"is_causal": True}),
    "causal tall": ((1, 2, 9, 16), (1, 2, 5, 16), (1, 2, 5, 16), {"is_causal": True}),
    "grouped": ((2, 8, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16), {"enable_gqa": True}),
    "broadcast batch": ((2, 1, 9, 8), (3, 1, 1, 7, 8), (1, 2, 1, 7, 8), {}),
    "broadcast heads": ((2, 4, 9, 8), (2, 1, 7, 8), (2, 1, 7, 8), {}),
    "broadcast query": ((9, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
    "scale": ((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16), {"scale": -0.7}),
    "one": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), {}),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_agrees_with_pytorch(name, dtype):
    *shapes, options = SHAPES[name]
    tensors = [make(*shape, dtype=dtype) for shape in shapes]
    ours = remote.scaled_dot_product_attention(*tensors, **options)
    check(ours, tensors, *exact(original, tensors, **options))


@pytest.mark.parametrize("shape", [(9, 7), (1, 7), (9, 1), (4, 9, 7), (2, 1, 9, 7), (2, 4, 9, 7), (2, 1, 1, 7),
                                   (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_float_mask_and_its_gradient_agree_with_pytorch(shape, dtype):
    tensors = [make(2, 4, 9, 16, dtype=dtype), make(2, 4, 7, 16, dtype=dtype), make(2, 4, 7, 16, dtype=dtype),
               make(*shape, dtype=dtype)]
    ours = remote.scaled_dot_product_attention(*tensors)
    # A number that is the same for all keys of a row has no influence: its gradient is a sum that cancels to zero.
    check(ours, tensors, *exact(original, tensors), scale=2, floor=4 if shape[-1] == 1 else 1e-3)


@pytest.mark.parametrize("shape", [(9, 7), (2, 1, 1, 7), (2, 4, 9, 7), (7,)])
def test_bool_mask_agrees_with_pytorch_rows_without_keys_included(shape):
    tensors = [make(2, 4, 9, 16), make(2, 4, 7, 16), make(2, 4, 7, 16)]
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    if len(shape) == 4 and shape[2] > 1:
        mask[:, :, 3] = False
    theirs, wide = exact(lambda q, k, v: original(q, k, v, attn_mask=mask.expand(2, 4, 9, 7)), tensors)
    check(remote.scaled_dot_product_attention(*tensors, attn_mask=mask), tensors, theirs, wide)


@pytest.mark.parametrize("shape", [(20, 20), (2, 1, 20, 20), (2, 4, 20, 20)])
def test_a_mask_that_was_transposed_agrees_with_pytorch(shape):
    tensors = [make(2, 4, 20, 16) for _ in range(3)]
    mask = (torch.rand(shape) < 0.7) | torch.eye(20, dtype=torch.bool)
    for given in (mask.mT, mask.permute(*reversed(range(mask.dim()))).contiguous().permute(*reversed(range(mask.dim())))):
        theirs, wide = exact(lambda q, k, v, given=given: original(q, k, v, attn_mask=given), tensors)
        check(remote.scaled_dot_product_attention(*tensors, attn_mask=given), tensors, theirs, wide)


def test_five_dimensional_masks_broadcast():
    tensors = [make(2, 3, 4, 5, 8), make(2, 3, 4, 6, 8), make(2, 3, 4, 6, 8)]
    for shape in ((5, 6), (1, 1, 1, 5, 6), (3, 1, 5, 6), (2, 3, 1, 5, 6), (2, 1, 4, 1, 6)):
        mask = torch.rand(shape) < 0.8
        mask[..., 0] = True
        theirs, wide = exact(lambda q, k, v: original(q, k, v, attn_mask=mask), tensors)
        check(remote.scaled_dot_product_attention(*tensors, attn_mask=mask), tensors, theirs, wide)


def test_transposed_memory_keeps_its_order_and_is_not_copied():
    q, k, v = [torch.randn(2, 9, 4, 16).transpose(1, 2) for _ in range(3)]
    out = remote.scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous() and not out.is_contiguous()
    torch.testing.assert_close(out, original(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", [None, "f16", "bf16"])
def test_attention_takes_length_before_heads_and_sixteen_bits_on_the_wire(precision):
    tensors = [make(2, 9, 4, 16), make(2, 7, 2, 16), make(2, 7, 2, 16)]
    ours = remote.attention(*tensors, layout="blhd", causal="bottom_right", precision=precision)
    bound = torch.ones(9, 7).tril(-2).bool()

    def plain(q, k, v):
        q, k, v = [x.transpose(1, 2) for x in (q, k, v)]
        return original(q, k, v, attn_mask=bound, enable_gqa=True).nan_to_num(0).transpose(1, 2)
    check(ours, tensors, *exact(plain, tensors), scale={None: 1, "f16": 2.0**9, "bf16": 2.0**12}[precision])


@pytest.mark.parametrize("size", [1e-5, 1e-8, 1e-12, 0.0])
def test_small_gradients_survive_float16_on_the_wire(client, size):
    q, k, v, bias, d_o = [make(2, 3, 9, n).detach().requires_grad_() for n in (16, 16, 16, 9, 16)]
    found = []
    for scale in (size, 1.0):
        out = remote.attention(q, k, v, bias=bias, precision="f16")
        found.append(torch.autograd.grad(out, (q, k, v, bias), (d_o * scale).detach()))
        arrays = [x.detach().numpy() for x in (q, k, v)]
        r = client.forward(*arrays, bias=bias.detach().numpy(), precision="f16", bias_grad=True)
        g = client.backward((d_o * scale).detach().numpy(), r, dlse=np.float32(scale) * r.lse, bias_grad=True)
        found[-1] += tuple(map(torch.from_numpy, (g.dq, g.dk, g.dv, g.dbias)))
    for small, whole in zip(*found):
        torch.testing.assert_close(small, whole * size, rtol=1e-2, atol=1e-2 * size * float(whole.abs().max()))


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_numpy_client_takes_tensors_by_dlpack(client, dtype):
    torch.set_default_device(None)
    tensors = [torch.randn(2, 9, 4, 16).to(dtype).transpose(1, 2) for _ in range(3)]
    got = torch.from_dlpack(client.forward(*tensors).out) if dtype != torch.bfloat16 else \
        torch.from_numpy(client.forward(*tensors).out.view("int16")).view(torch.bfloat16)
    assert torch.equal(got, remote.scaled_dot_product_attention(*tensors))
    with pytest.raises(attnd.InvalidArgument, match="q: expected an array that DLPack can export"):
        client.forward(tensors[0].clone().requires_grad_(), *tensors[1:])


def test_precision_of_a_connection_is_that_of_its_float32_calls(client):
    tensors = [make(2, 4, 9, 16) for _ in range(3)]
    named = remote.attention(*tensors, precision="f16")
    remote.connect(client, precision="f16")
    ours = remote.scaled_dot_product_attention(*tensors)
    assert torch.equal(ours, named) and torch.equal(ours, ours.half().float()) and ours.dtype == torch.float32
    check(ours, tensors, *exact(original, tensors), scale=2.0**9)
    bfloats = [make(2, 4, 9, 16, dtype=torch.bfloat16) for _ in range(3)]
    check(remote.scaled_dot_product_attention(*bfloats), bfloats, *exact(original, bfloats))
    with pytest.raises(attnd.InvalidArgument, match='precision: expected None, "f16", "bf16" or "auto", got \'f8\''):
        remote.connect(client, precision="f8")


def test_attention_has_windows_softcap_sinks_and_lse_with_gradients():
    q, k, v, sink = make(2, 4, 9, 16), make(2, 2, 12, 16), make(2, 2, 12, 8), make(4)

    def plain(q, k, v, sink):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = 3.0 * torch.tanh(q @ k.mT / 4 / 3.0)
        distance = torch.arange(12)[None] - torch.arange(9)[:, None] - 3
        scores = scores.masked_fill((distance > 1) | (distance < -4), -torch.inf)
        lse = torch.logsumexp(torch.cat([scores, sink[None, :, None, None].expand(2, 4, 9, 1)], -1), -1)
        return torch.cat([(scores - lse[..., None]).exp() @ v, lse[..., None]], -1)

    ours, lse = remote.attention(q, k, v, window=(4, 1), align="bottom_right", softcap=3.0, sink=sink, return_lse=True)
    theirs, wide = exact(plain, [q, k, v, sink])
    check(torch.cat([ours, lse[..., None]], -1), [q, k, v, sink], theirs, wide, scale=2)


def test_directional_derivatives_through_dropout():
    q, k, v = make(1, 2, 17, 8), make(1, 2, 33, 8), make(1, 2, 33, 8)
    seed = torch.tensor([1234567890123])

    def value(*tensors):
        return remote.attention(*tensors, causal="bottom_right", dropout_p=0.3, seed=seed).double().square().sum()

    gradients = torch.autograd.grad(value(q, k, v), (q, k, v))
    directions = [torch.randn_like(t) for t in (q, k, v)]
    step = 2.0**-7
    with torch.no_grad():
        ends = [float(value(*[t + sign * step * d for t, d in zip((q, k, v), directions)])) for sign in (1, -1)]
    expected = (ends[0] - ends[1]) / (2 * step)
    got = sum(float((g * d).sum()) for g, d in zip(gradients, directions))
    assert got == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_packed_sequences():
    q, k, v = make(20, 4, 8), make(20, 2, 8), make(20, 2, 8)
    cu = torch.tensor([0, 6, 20], dtype=torch.int32)
    ours = remote.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal="top_left")

    def plain(q, k, v):
        parts = [original(q[a:b].transpose(0, 1), k[a:b].transpose(0, 1), v[a:b].transpose(0, 1), is_causal=True,
                          enable_gqa=True).transpose(0, 1) for a, b in ((0, 6), (6, 20))]
        return torch.cat(parts)
    check(ours, [q, k, v], *exact(plain, [q, k, v]))


def test_dropout_follows_torchs_generator_and_drops_as_often_as_said():
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8)
    v = torch.eye(64)[None, None]
    torch.manual_seed(5)
    first, second = [remote.scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    torch.manual_seed(5)
    again = remote.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2 / 64}
    assert abs(float((first == 0).float().mean()) - 0.5) < 0.05


@pytest.mark.parametrize("case", ["plain", "mask", "bias", "everything"])
def test_opcheck_passes(case):
    bias = make(2, 1, 9, 7) if case in ("bias", "everything") else None
    mask = torch.rand(9, 7) < 0.9 if case in ("mask", "everything") else None
    extra = (make(4), torch.rand(4), torch.tensor([7, 5]), None, None, torch.tensor([1, 2]), torch.tensor([9])) \
        if case == "everything" else (None,) * 7
    window = (5, 3) if case == "everything" else (None, None)
    keep = {"plain": "", "mask": "keep"}.get(case, "bias")
    options = Words("bhld", None, None, *window, False, "f32", None, keep, 7, False, "", "").pack()
    arguments = (make(2, 4, 9, 8), make(2, 2, 7, 8), make(2, 2, 7, 12), bias, mask, *extra, None, 0.0,
                 0.25 if case == "everything" else 0.0, options)
    result = torch.library.opcheck(torch.ops.attnd.forward, arguments)
    assert set(result.values()) == {"SUCCESS"}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x, dropout_p=0.0):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def test_replace_puts_it_in_place_and_takes_it_back():
    block, x = Block(), torch.randn(2, 11, 32)
    expected = block(x)
    with remote.replace():
        assert F.scaled_dot_product_attention is not original
        torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)
    assert F.scaled_dot_product_attention is original
    held = remote.replace()
    held.restore()
    assert F.scaled_dot_product_attention is original


def test_compiles_without_a_graph_break():
    block, x = Block(), torch.randn(2, 11, 32, requires_grad=True)
    with remote.replace():
        expected = block(x)
        expected_gradient = torch.autograd.grad(expected.sum(), x)[0]
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        got = compiled(x)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], expected_gradient, rtol=1e-4, atol=1e-5)
        longer = torch.randn(3, 17, 32)
        torch.testing.assert_close(compiled(longer), block(longer), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_compiles_with_symbols_for_sizes_and_numbers():
    """dynamic=True makes symbols of lengths, windows and floats, defaults included."""
    def attend(q, k, v, reach, number):
        out, lse = remote.attention(q, k, v, causal="top_left", window=(reach, 0), softcap=number, scale=number / 7,
                                    return_lse=True)
        return out.sum() + lse.sum() + remote.scaled_dot_product_attention(q, k, v, is_causal=True).sin().sum()

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, reach, number in ((5, 2, 3.0), (7, 4, 2.5), (9, 3, 4.5)):
        q, k, v = [make(2, 3, length, 8) for _ in range(3)]
        got, expected = compiled(q, k, v, reach, number), attend(q, k, v, reach, number)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.autograd.grad(got, (q, k, v)), torch.autograd.grad(expected, (q, k, v)))


SECOND_ORDER = {
    "create_graph": lambda f, q: torch.autograd.grad(torch.autograd.grad(f(q).sum(), q, create_graph=True)[0].sum(), q),
    "func.grad": lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
    "func.jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q), "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "vmap of grad": lambda f, q: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(q[None]),
}


@pytest.mark.parametrize("way", SECOND_ORDER)
@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "attention"])
def test_derivatives_that_do_not_exist_raise_and_are_never_zero(way, function):
    q = make(2, 2, 5, 8) if way == "create_graph" else make(2, 2, 5, 8).detach()
    with pytest.raises(attnd.Unimplemented, match="^attention has no .*derivative"):
        SECOND_ORDER[way](lambda x: getattr(remote, function)(x, x, x), q)


def test_vmap_agrees_with_pytorch_masks_and_gradients_included():
    q, k, v = [make(3, 2, 5, 8) for _ in range(3)]
    mask = torch.rand(3, 5, 5) < 0.7
    got = torch.vmap(lambda q, k, v, m: remote.scaled_dot_product_attention(q, k, v, attn_mask=m))(q, k, v, mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(got.sin().sum(), (q, k, v)),
                               torch.autograd.grad(expected.sin().sum(), (q, k, v)), rtol=1e-3, atol=1e-4)


def test_tensors_without_numbers_give_shapes_and_those_that_are_not_dense_are_refused():
    shape = (2, 3, 5, 4)
    assert remote.scaled_dot_product_attention(*[torch.empty(shape, device="meta")] * 3).shape == shape
    parts = [torch.randn(2, 3, 4), torch.randn(2, 5, 4)]
    ragged = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts], layout=torch.jagged).transpose(1, 2)
    for tensor in (ragged, torch.nested.nested_tensor(parts), torch.randn(2, 3, 4).to_sparse()):
        for function in (remote.scaled_dot_product_attention, remote.attention):
            with pytest.raises(attnd.InvalidArgument, match="^(query|q): expected a dense tensor.*got "):
                function(tensor, tensor, tensor)


def test_checkpointing_replays_dropout():
    from torch.utils.checkpoint import checkpoint
    block, x = Block(), torch.randn(2, 11, 32, requires_grad=True)
    gradients = []
    with remote.replace():
        for run in (lambda: block(x, 0.4), lambda: checkpoint(block, x, 0.4, use_reentrant=False)):
            torch.manual_seed(3)
            gradients.append(torch.autograd.grad(run().square().sum(), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_autocast_computes_in_its_type():
    q, k, v = make(2, 4, 9, 16), make(2, 4, 9, 16), make(2, 4, 9, 16)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, theirs = remote.scaled_dot_product_attention(q, k, v), original(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    ours.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):  # a projection's type beside a norm's
        assert remote.attention(q.bfloat16(), k, v, bias=torch.zeros(9, 9)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_autocast_casts_what_pytorch_casts_and_no_more(dtype):
    x = torch.ones(1, 2, 3, 4)
    with torch.autocast(DEVICE, torch.bfloat16):
        for arguments, field in (((x.to(dtype), x, x), "query"), ((x, x, x.to(dtype)), "value")):
            with pytest.raises(attnd.InvalidArgument, match=f"got one of {dtype}") as caught:
                remote.scaled_dot_product_attention(*arguments)
            assert caught.value.field == field
        with pytest.raises(attnd.InvalidArgument, match="^attn_mask: expected .*, got "):
            remote.scaled_dot_product_attention(x, x, x, np.ones((3, 3), "int32") if dtype == torch.bool
                                                else torch.ones(3, 3, dtype=dtype))


def test_threads_run_forward_and_backward_at_the_same_time():
    blocks = [Block() for _ in range(4)]
    inputs = [torch.randn(2, 11, 32) for _ in blocks]
    expected = [torch.autograd.grad(b(x).square().sum(), list(b.parameters())) for b, x in zip(blocks, inputs)]
    got = [None] * 4

    def work(n):
        got[n] = torch.autograd.grad(blocks[n](inputs[n]).square().sum(), list(blocks[n].parameters()))

    with remote.replace():
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for mine, theirs in zip(got, expected):
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shapes", [((0, 3, 5, 8),) * 3, ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
                                    ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)), ((5, 8), (0, 8), (0, 3)),
                                    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0))])
def test_nothing_to_attend_to_gives_zeros_as_in_pytorch(shapes):
    tensors = [make(*shape) for shape in shapes]
    ours = remote.scaled_dot_product_attention(*tensors)
    theirs, wide = exact(original, tensors)
    torch.testing.assert_close(ours.double(), theirs)
    for mine, other in zip(torch.autograd.grad(ours.sum(), tensors), torch.autograd.grad(theirs.sum(), wide)):
        torch.testing.assert_close(mine.double(), other)


def test_dropout_of_everything_gives_zeros_as_in_pytorch():
    q, k, v = make(2, 3, 5, 8), make(2, 3, 7, 8), make(2, 3, 7, 6)
    out = remote.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    assert torch.equal(out, original(q, k, v, dropout_p=1.0))
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_keys_and_values_of_different_heads_are_grouped_as_in_pytorch():
    tensors = [make(2, 8, 5, 8), make(2, 4, 7, 8), make(2, 2, 7, 6)]
    check(remote.scaled_dot_product_attention(*tensors, enable_gqa=True), tensors,
          *exact(original, tensors, enable_gqa=True))


def test_attention_takes_lists_ints_and_the_generators_offset(client):
    q, k, v = make(2, 4, 5, 8), make(2, 2, 7, 8), make(2, 2, 7, 8)
    numbers = {"kv_lengths": [7, 3], "align": [1, 2], "alibi_slopes": [.1, .2, .3, .4], "sink": [.5, 0., -1., 2.]}
    named = {**numbers, "causal": True, "dropout_p": 0.5, "offset": 3, "allow_nondeterministic": True}
    from_lists = remote.attention(q, k, v, seed=2**64 - 5, **named)
    tensors = {name: torch.tensor(value) for name, value in numbers.items()}
    assert torch.equal(from_lists, remote.attention(q, k, v, seed=torch.tensor([-5]), **{**named, **tensors}))
    numpys = [t.detach().cpu().numpy() for t in (q, k, v)]
    assert np.array_equal(from_lists.detach().cpu(), client.forward(*numpys, seed=2**64 - 5, **named).out)
    assert not torch.equal(from_lists, remote.attention(q, k, v, seed=2**64 - 5, **{**named, "offset": 4}))


Z = torch.zeros(1, 2, 3, 4)
E = torch.zeros(0, 2, 3, 4)  # a batch of none


@pytest.mark.parametrize("options, field", [
    ({"layout": "x"}, "layout"), ({"layout": "x", "mask": torch.ones(3, 3) > 0}, "layout"), ({"window": 5}, "window"),
    ({"window": (1, 2, 3)}, "window"), ({"mask": torch.ones(3, 3)}, "mask"), ({"mask": 5}, "mask"), ({"bias": 5}, "bias"),
    ({"bias": torch.ones(3, 3).double()}, "bias"), ({"scale": "x"}, "scale"), ({"softcap": "x"}, "softcap"),
    ({"dropout_p": "x"}, "dropout_p"), ({"seed": 5.5}, "seed"), ({"seed": torch.tensor(5.5)}, "seed"),
    ({"sink": "x"}, "sink"), ({"kv_lengths": "x"}, "kv_lengths"), ({"kv_lengths": [1.0]}, "kv_lengths"),
    ({"causal": "x"}, "causal"), ({"align": "x"}, "align"), ({"align": 1.5}, "align"), ({"accumulate": "x"}, "accumulate"),
    ({"precision": "x"}, "precision"), ({"zero_rest": "x"}, "zero_rest"), ({"alibi_slopes": "x"}, "alibi_slopes"),
    ({"cu_seqlens_q": [0, 3]}, "cu_seqlens_k"), ({"offset": -1}, "offset"), ({"k": Z.half()}, "k"), ({"v": None}, "v"),
])
def test_wrong_options_of_attention_are_named(options, field):
    with pytest.raises(attnd.InvalidArgument, match=f"^{field}.*: expected .*, got ") as caught:
        remote.attention(**{"q": Z, "k": Z, "v": Z, **options})
    assert caught.value.field.split(" ")[0] == field


@pytest.mark.parametrize("arguments, field", [
    ((torch.zeros(4), torch.zeros(2, 4), torch.zeros(2, 4)), "query"),
    ((5, Z, Z), "query"), ((Z, Z, Z, 5), "attn_mask"), ((Z, Z, Z, None, "x"), "dropout_p"),
    ((Z, Z, Z, None, 0.0, "x"), "is_causal"), ((Z, Z, Z.half()), "value"), ((Z, Z, Z, torch.ones(3, 3).int()), "attn_mask"),
    ((torch.zeros(2, 4, dtype=torch.float64),) * 3, "query"), ((torch.zeros(2, 300),) * 3, "query"),
    ((torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4)), "query, key, value"),
    ((torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(3, 2)), "attn_mask"),
    ((torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 2), 0.0, True), "attn_mask"),
    ((torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4), None, 1.5), "dropout_p"),
    ((torch.zeros(2, 4), torch.zeros(2, 5), torch.zeros(2, 4)), "key"),
])
def test_wrong_arguments_are_named(arguments, field):
    with pytest.raises(RuntimeError) as caught:  # PyTorch's own kind of error
        remote.scaled_dot_product_attention(*arguments)
    assert caught.value.field == field and str(caught.value).startswith(f"{field}: expected ")


@pytest.mark.parametrize("changed, field", [
    ({"key": E[..., :3]}, "key"), ({"value": E[:, :, :2]}, "value"), ({"key": E.half()}, "key"),
    ({"query": E.double()}, "query"), ({"attn_mask": torch.ones(3, 3, dtype=torch.int32)}, "attn_mask"),
    ({"dropout_p": 7}, "dropout_p"), ({"dropout_p": "x"}, "dropout_p"), ({"scale": float("nan")}, "scale"),
])
@pytest.mark.parametrize("empty", [True, False])
def test_wrong_arguments_are_named_where_there_is_nothing_to_compute(changed, field, empty):
    given = {"query": E, "key": E, "value": E, "attn_mask": None, "dropout_p": 1.0, **changed}
    with pytest.raises(attnd.InvalidArgument, match=f"^{field}: expected .*, got "):
        remote.scaled_dot_product_attention(**(given if empty else {
            name: Z[..., :x.shape[-2], :x.shape[-1]].to(x.dtype) if name in ("query", "key", "value") else x
            for name, x in given.items()}))


@pytest.mark.parametrize("make_tensor", [lambda x: torch._neg_view(x), lambda x: x.to("meta"), lambda x: x.to_sparse(),
                                         lambda x: x.clone().requires_grad_()])
def test_tensors_whose_memory_is_not_their_numbers_are_refused_as_arrays(client, make_tensor):
    given = make_tensor(torch.ones(1, 1, 2, 4, device="cpu"))
    with pytest.raises(attnd.InvalidArgument, match="^q: expected an array that DLPack can export, got Tensor "):
        client.forward(given, given, given)


def test_without_a_connection_it_says_how_to_connect():
    with pytest.raises(attnd.Unavailable, match=r'attnd.torch.connect\("host:port", name="elsewhere"\)'):
        remote.attention(*[torch.zeros(1, 1, 2, 4)] * 3, server="elsewhere")


def test_named_connections_exist_beside_each_other(daemon):
    remote.connect(daemon.address, name="second", timeout=30)
    tensors = [torch.randn(1, 1, 5, 4) for _ in range(3)]
    with remote.replace(server="second"):
        got = F.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(got, original(*tensors), rtol=1e-4, atol=1e-5)
    remote.disconnect("second")
    with pytest.raises(attnd.Unavailable):
        remote.client("second")


def test_names_and_messages_are_for_those_who_type_them():
    assert dir(remote) == remote.__all__
    q, k = make(1, 4, 8, 16), make(1, 2, 8, 16)
    with pytest.raises(attnd.InvalidArgument, match="heads that broadcast, or enable_gqa=True, got"):
        remote.scaled_dot_product_attention(q, k, k)
    with pytest.raises(TypeError, match="chanels"):
        remote.connect("127.0.0.1:1", chanels=3)
