"""The contract through a live daemon, against the oracle in float64: values, gradients, elements, layouts, memory."""
import numpy as np
import oracle
import pytest
from conftest import close

import attnd
from attnd import _arrays

ELEMENTS = ["f32", "f16", "bf16"]


def cast(array, element):
    """An array of the element, in the type that a caller would have."""
    if element == "bf16":
        pytest.importorskip("ml_dtypes")
    return _arrays.give(_arrays.cast(_arrays.Tensor(np.asarray(array, np.float32), "f32"), element))


def tensors(rng, element="f32", batch=2, q_heads=4, kv_heads=2, q_len=19, kv_len=23, dim=16, v_dim=24):
    shapes = (batch, q_heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)
    return [cast(rng.standard_normal(shape), element) for shape in shapes]


def option_sets(rng):
    bias = rng.standard_normal((2, 1, 19, 23)).astype(np.float32)
    bias[0, 0, 3, :5] = -np.inf
    return {
        "plain": {}, "top_left": {"causal": "top_left"}, "bottom_right": {"causal": "bottom_right"},
        "offset": {"causal": True, "align": 3}, "offsets": {"causal": True, "align": [2, -4]},
        "window": {"window": (3, 2), "align": "bottom_right"}, "window left": {"causal": "top_left", "window": (4, None)},
        "softcap": {"softcap": 2.5, "scale": 0.9}, "mask": {"mask": rng.random((2, 4, 19, 23)) < 0.6},
        "mask per key": {"mask": rng.random((2, 1, 1, 23)) < 0.6}, "mask 2d": {"mask": rng.random((19, 23)) < 0.6},
        "bias": {"bias": bias}, "bias per head": {"bias": rng.standard_normal((4, 1, 23)).astype(np.float16)},
        "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "align": "bottom_right"},
        "alibi per batch": {"alibi_slopes": rng.random((2, 4)), "align": 1},
        "lengths": {"kv_lengths": [23, 9], "causal": "bottom_right"}, "no keys": {"kv_lengths": [0, 23]},
        "dropout": {"dropout_p": 0.35, "seed": 2**63 + 5, "offset": 2**40 + 17},
        "sink": {"sink": rng.standard_normal(4).astype(np.float32), "causal": "top_left"},
        "zero_rest": {"zero_rest": True, "causal": "top_left"},
        "all": {"causal": "bottom_right", "window": (9, 0), "mask": rng.random((1, 4, 19, 23)) < 0.8, "bias": bias,
                "softcap": 4.0, "dropout_p": 0.2, "seed": 3, "kv_lengths": [21, 23],
                "sink": rng.standard_normal(4).astype(np.float32), "scale": -0.4},
    }


@pytest.mark.parametrize("name", option_sets(np.random.default_rng(0)))
@pytest.mark.parametrize("element", ELEMENTS)
def test_forward_and_backward_agree_with_local_computation(client, rng, name, element):
    options = option_sets(rng)[name]
    q, k, v = tensors(rng, element)
    got, expected = client.forward(q, k, v, **options), oracle.forward(q, k, v, **options)
    assert got.out.dtype == q.dtype and got.receipt.backend != "local"
    close(got.out, expected.out, element)
    close(got.lse, expected.lse)
    dout, dlse = cast(rng.standard_normal(got.out.shape), element), rng.standard_normal(got.lse.shape).astype(np.float32)
    arguments = dict(options, dlse=dlse, bias_grad="bias" in options)
    g = client.backward(dout, q, k, v, got.out, got.lse, **arguments)
    e = oracle.backward(dout, q, k, v, got.out, got.lse, **arguments)
    for field in ("dq", "dk", "dv"):
        close(getattr(g, field), getattr(e, field), element, scale=4)
    for field in ("dbias", "dsink"):
        assert (getattr(g, field) is None) == (getattr(e, field) is None)
        if getattr(g, field) is not None:
            close(getattr(g, field), getattr(e, field), element, scale=8)


def test_packed_sequences_agree_with_local_computation(client, rng):
    q, k, v = (rng.standard_normal((30, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    options = dict(cu_seqlens_q=[0, 7, 7, 30], cu_seqlens_k=np.array([0, 5, 12, 30]), causal="bottom_right")
    for layout in ("thd", "htd"):
        given = [x if layout == "thd" else np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k, v)]
        got = client.forward(*given, layout=layout, **options)
        expected = oracle.forward(*given, layout=layout, **options)
        close(got.out, expected.out)
        close(got.lse, expected.lse)
        g = client.backward(got.out, *given, got.out, got.lse, layout=layout, **options)
        e = oracle.backward(got.out, *given, got.out, got.lse, layout=layout, **options)
        for field in ("dq", "dk", "dv"):
            close(getattr(g, field), getattr(e, field), scale=4)


def test_any_strides_give_the_same_bits(client, rng):
    q, k, v = tensors(rng)
    expected = client.forward(q, k, v, causal="top_left").out
    views = {
        "blhd memory": [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)],
        "reversed": [np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1] for x in (q, k, v)],
        "every second": [np.repeat(x, 2, axis=3)[..., ::2] for x in (q, k, v)],
        "fortran": [np.asfortranarray(x) for x in (q, k, v)],
        "mixed": [np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2), k, v],
    }
    for name, given in views.items():
        np.testing.assert_array_equal(client.forward(*given, causal="top_left").out, expected, name)
    blhd = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    np.testing.assert_array_equal(client.forward(*blhd, layout="blhd", causal="top_left").out, expected.swapaxes(1, 2))


@pytest.mark.parametrize("shape", [(19, 23), (1, 19, 23), (4, 19, 23), (2, 1, 19, 23), (2, 4, 19, 23), (2, 1, 1, 23)])
def test_a_mask_may_lie_in_memory_in_any_order(client, rng, shape):
    q, k, v = tensors(rng)
    mask = rng.random(shape) < 0.6
    expected = client.forward(q, k, v, mask=mask)
    close(expected.out, oracle.forward(q, k, v, mask=mask).out)
    last = range(len(shape))[:-3:-1]
    for name, given in {"fortran": np.asfortranarray(mask), "reversed": np.ascontiguousarray(mask[..., ::-1])[..., ::-1],
                        "transposed": np.ascontiguousarray(np.swapaxes(mask, *last)).swapaxes(*last)}.items():
        got = client.forward(q, k, v, mask=given)
        np.testing.assert_array_equal(got.out, expected.out, name)
        g, e = [client.backward(got.out, q, k, v, got.out, got.lse, mask=one) for one in (given, mask)]
        np.testing.assert_array_equal(g.dk, e.dk, name)


def test_tensors_that_fit_a_layout_are_not_copied(client, rng, monkeypatch):
    from attnd import _wire
    q, k, v = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in tensors(rng)]
    sent = []
    pack = _wire.pack
    monkeypatch.setattr(_wire, "pack", lambda *a, **o: sent.append(pack(*a, **o)) or sent[-1])
    client.forward(q, k, v)
    assert [np.shares_memory(a, b) for a, b in zip((q, k, v), sent[0][1:4])] == [True] * 3


def test_out_receives_the_result_and_is_returned(client, rng):
    q, k, v = tensors(rng)
    expected = client.forward(q, k, v)
    places = {"contiguous": np.full(expected.out.shape, np.nan, np.float32),
              "blhd memory": np.full((2, 19, 4, 24), np.nan, np.float32).swapaxes(1, 2),
              "strided": np.full((2, 4, 19, 48), np.nan, np.float32)[..., ::2]}
    for name, out in places.items():
        assert client.forward(q, k, v, out=out).out is out, name
        np.testing.assert_array_equal(out, expected.out, name)
    outs = [np.full(x.shape, np.nan, np.float32) for x in (q, k, v)]
    g = client.backward(expected.out, q, k, v, expected.out, expected.lse, out=tuple(outs))
    assert [a is b for a, b in zip((g.dq, g.dk, g.dv), outs)] == [True] * 3
    assert all(np.isfinite(x).all() for x in outs)


def test_out_may_be_an_input(client, rng):
    q, k, v = tensors(rng, v_dim=16)
    from attnd import _problem, _wire
    problem = _problem.resolve(q, k, v)
    wire = _wire.choose(problem, [q, k, v])
    place = _wire.Destination(problem, wire, problem.o_shape, problem.q, (problem.q.bits, k, v))
    assert not np.shares_memory(place.array, q)  # a later shard, or a retry, still reads q
    expected = client.forward(q, k, v).out
    np.testing.assert_array_equal(client.forward(q, k, v, out=q).out, expected)


@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_precision_sends_half_the_bytes_and_gives_float32(client, rng, precision):
    q, k, v = tensors(rng)
    whole, half = client.forward(q, k, v), client.forward(q, k, v, precision=precision)
    assert half.out.dtype == np.float32 and half.receipt.bytes_sent < 0.6 * whole.receipt.bytes_sent
    close(half.out, whole.out, precision)
    g = client.backward(half.out, q, k, v, half.out, half.lse, precision=precision)
    e = client.backward(half.out, q, k, v, half.out, half.lse.copy())  # in float32
    for field in ("dq", "dk", "dv"):
        assert getattr(g, field).dtype == np.float32
        close(getattr(g, field), getattr(e, field), precision, scale=4)


class Exported:
    """An array that shows itself by DLPack alone."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("element", ["f32", "f16"])
def test_dlpack_arrays_are_taken_in_place(client, rng, element):
    arrays = tensors(rng, element)
    arrays[1] = np.ascontiguousarray(arrays[1].swapaxes(1, 2)).swapaxes(1, 2)
    taken = _arrays.take("q", Exported(arrays[1]))
    assert np.shares_memory(taken.bits, arrays[1]) and taken.element == element
    got = client.forward(*[Exported(x) for x in arrays])
    np.testing.assert_array_equal(got.out, client.forward(*arrays).out)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 256), (3, 1, 1, 8), (1, 2, 300, 8)])
def test_extreme_shapes(client, rng, shape):
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    close(client.forward(q, k, v).out, oracle.forward(q, k, v).out)


def test_large_call_is_cut_into_shards_with_the_same_bits(client, rng):
    q, k, v = (rng.standard_normal((8, 8, 256, 128)).astype(np.float32) for _ in range(3))
    options = dict(causal="top_left", dropout_p=0.1, seed=11)
    seen_progress = []
    r = client.forward(q, k, v, progress=seen_progress.append, **options)
    assert r.receipt.shards > 1 and seen_progress[-1].shards_done == r.receipt.shards
    one = client.forward(q[5:6, :, :16], k[5:6], v[5:6], causal="top_left")
    plain = client.forward(q, k, v, causal="top_left")
    np.testing.assert_array_equal(plain.out[5:6, :, :16], one.out)
    expected = oracle.forward(q[:2], k[:2], v[:2], **options)
    close(r.out[:2], expected.out)


def test_calls_of_the_same_shapes_have_their_own_numbers_strides_and_options(client, rng):
    """The second call of a kind takes a shorter way: each kind here is called twice, between the others."""
    for _ in range(2):
        for element in ("f32", "f16"):
            for options in ({}, {"causal": "top_left"}, {"scale": 0.5}, {"scale": 1}, {"scale": True}, {"window": (2, 1)}):
                given = tensors(rng, element, q_len=21, kv_len=21)
                given[0] = given[0].swapaxes(1, 2).copy().swapaxes(1, 2) if "scale" in options else given[0]
                got = client.forward(*given, **options)
                close(got.out, oracle.forward(*given, **options).out, element)
                g = client.backward(got.out, *given, got.out, got.lse, **options)
                e = oracle.backward(got.out, *given, got.out, got.lse, **options)
                close(g.dk, e.dk, element, scale=4)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("memory", ["bhld", "blhd"])
def test_small_call_that_is_known_by_its_shapes_gives_what_the_first_gave(client, rng, layout, memory):
    given = []
    for _ in range(3):
        tensors = [rng.standard_normal((2, 4, 5, 8)).astype(np.float16) for _ in range(3)]
        laid = [t if layout == "bhld" else t.swapaxes(1, 2) for t in tensors]
        laid = [t.copy() if memory == layout else t.swapaxes(1, 2).copy().swapaxes(1, 2) for t in laid]
        result = client.forward(*laid, layout=layout, causal="top_left")
        expected = oracle.forward(*tensors, causal="top_left")
        close(result.out if layout == "bhld" else result.out.swapaxes(1, 2), expected.out, "f16")
        close(result.lse, expected.lse, "f16")
        assert result.receipt.backend in ("cpu", "reference")
        given.append(result.out)
    assert not np.shares_memory(given[1], given[2])
    assert client.forward(*laid, layout=layout, causal="top_left", return_lse=False).lse is None
    for wrong in ({"keep": 1}, {"return_lse": 0}, {"bias_grad": 0}, {"timeout": -1}, {"progress": 5}):
        with pytest.raises(attnd.InvalidArgument):
            client.forward(*laid, layout=layout, causal="top_left", **wrong)


def test_residuals_cannot_be_pickled(client, rng):
    import pickle
    q, k, v = tensors(rng)
    residual = client.forward(q, k, v, keep=True).residual
    with pytest.raises(attnd.InvalidType, match="^residual: expected .* got Residual"):
        pickle.dumps(residual)


def test_results_can_be_pickled_with_their_receipts(client, rng):
    import pickle
    q, k, v = tensors(rng)
    r = client.forward(q, k, v)
    again = pickle.loads(pickle.dumps(r))
    np.testing.assert_array_equal(again.out, r.out)
    assert again.receipt == r.receipt and r.receipt.backend
    g = client.backward(r.out, q, k, v, r.out, r.lse)
    assert pickle.loads(pickle.dumps(g)).receipt.bytes_sent == g.receipt.bytes_sent > 0


def test_results_repeat_bitwise(client, rng):
    q, k, v = tensors(rng)
    options = dict(causal="top_left", dropout_p=0.25, seed=1)
    first = client.forward(q, k, v, **options)
    for _ in range(3):
        np.testing.assert_array_equal(client.forward(q, k, v, **options).out, first.out)


def test_who_asks_one_of_several_addresses_is_told_of_that_one(daemon):
    with attnd.connect(["127.0.0.1:1", daemon.address], timeout=5) as both:
        for ask in (both.info, both.serving):
            with pytest.raises(attnd.Unavailable, match="^no attnd server at 127.0.0.1:1: "):
                ask(0)
        assert both.serving(1)


def test_info_tells_what_the_server_is(client, daemon):
    info = client.info()
    assert info.address == daemon.address and info.version and info.max_message_bytes >= 1 << 20
    assert info.devices and info.devices[0].serving and "dropout" in info.features
    assert client.serving()


def test_lse_is_left_out_when_not_wanted(client, rng):
    assert client.forward(*tensors(rng), return_lse=False).lse is None


def test_errors_of_the_server_carry_reason_and_metadata(client, rng, monkeypatch):
    """A problem that passes this package's checks only because they were switched off."""
    from attnd import client as module
    from attnd import _problem
    problem = _problem.resolve(*tensors(rng))
    import dataclasses
    monkeypatch.setattr(module, "memo_of", lambda key: {})
    monkeypatch.setattr(module, "resolve", lambda *a, **o: dataclasses.replace(problem, softcap=-1.0, memo={}))
    with pytest.raises(attnd.InvalidArgument) as caught:
        client.forward(*tensors(rng))
    assert "softcap" in str(caught.value)
