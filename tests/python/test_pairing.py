"""backward(dout, r) takes inputs and options from forward's result, and refuses what contradicts them; so does the long
form, given the result's own lse. The client has no listener where a call must not get as far as the wire."""
import pickle

import numpy as np
import pytest

import attnd
from attnd import local

KV_LENGTHS, MASK = [7, 3], np.tril(np.ones((5, 7), bool))
CASES = {
    "plain": {}, "causal": {"causal": "bottom_right"}, "window": {"window": (2, 1), "align": 1},
    "layout": {"layout": "blhd"}, "dropout": {"dropout_p": 0.25, "seed": 5, "offset": 2},
    "lengths": {"kv_lengths": KV_LENGTHS}, "mask": {"mask": MASK}, "sink": {"sink": [0.5, -0.5]},
    "softcap": {"softcap": 2.0, "scale": 0.3}, "precision": {"precision": "f16"},
}


def tensors(rng, layout="bhld"):
    given = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))]
    return given if layout == "bhld" else [x.transpose(0, 2, 1, 3) for x in given]


@pytest.fixture(scope="module")
def nowhere(native_library):
    with attnd.connect("127.0.0.1:1", timeout=5, retries=0) as client:
        yield client


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_result_stands_for_inputs_and_options(client, rng, name, keep):
    options = CASES[name]
    q, k, v = tensors(rng, options.get("layout", "bhld"))
    r = client.forward(q, k, v, keep=keep, **options)
    dout = rng.standard_normal(r.out.shape).astype(np.float32)
    expected = client.backward(dout, q, k, v, r.out, r.lse, **options)
    got = client.backward(dout, r)
    for field in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field))
    assert expected.receipt.leased == 0 and got.receipt.leased == (got.receipt.shards if keep else 0)
    again = client.backward(dout, r, **options)  # what forward had may be said
    np.testing.assert_array_equal(again.dq, expected.dq)


def test_a_small_call_that_repeats_another_keeps_its_own_inputs(client, rng):
    for _ in range(3):
        q, k, v = tensors(rng)
        r = client.forward(q, k, v)
        np.testing.assert_array_equal(client.backward(r.out, r).dq, client.backward(r.out, q, k, v, r.out, r.lse).dq)


def test_the_gradient_of_a_bias(client, rng):
    q, k, v = tensors(rng)
    r = client.forward(q, k, v, bias=rng.standard_normal((2, 1, 7)).astype(np.float32), keep=True, bias_grad=True)
    assert client.backward(r.out, r, bias_grad=True).dbias.shape == (2, 1, 7)
    with pytest.raises(attnd.InvalidArgument, match="^bias_grad: expected False without a bias"):
        client.backward(r.out, client.forward(q, k, v), bias_grad=True)


# forward's options, backward's others, and what is said of them
CONTRADICTIONS = [
    ({}, {"causal": "top_left"}, "causal: expected None, as forward had, got 'top_left'"),
    ({"causal": "top_left"}, {"causal": "bottom_right"}, "causal: expected 'top_left', as forward had, got 'bottom_right'"),
    ({"causal": True, "align": 1}, {"align": 2}, "align: expected 1, as forward had, got 2"),
    ({"window": (2, 0), "align": 0}, {"window": (3, 0)}, "window: expected (2, 0), as forward had, got (3, 0)"),
    ({"scale": 0.5}, {"scale": 0.25}, "scale: expected 0.5, as forward had, got 0.25"),
    ({}, {"softcap": 2.0}, "softcap: expected None, as forward had, got 2.0"),
    ({}, {"dropout_p": 0.5, "seed": 1}, "dropout_p: expected None, as forward had, got 0.5"),
    ({"dropout_p": 0.5, "seed": 1}, {"seed": 2}, "seed: expected 1, as forward had, got 2"),
    ({"dropout_p": 0.5, "seed": 1}, {"offset": 2}, "offset: expected None, as forward had, got 2"),
    ({"mask": MASK}, {"mask": ~MASK}, "mask: expected the array, as forward had, got another array"),
    ({}, {"mask": MASK}, "mask: expected None, as forward had, got another array"),
    ({"kv_lengths": KV_LENGTHS}, {"kv_lengths": [7, 4]}, "kv_lengths: expected [7, 3], as forward had, got [7, 4]"),
    ({"sink": [0.5, 0.0]}, {"sink": [0.5, 1.0]}, "sink: expected [0.5, 0.0], as forward had, got [0.5, 1.0]"),
    ({}, {"zero_rest": True}, "zero_rest: expected None, as forward had, got True"),
    ({}, {"alibi_slopes": [1.0, 1.0], "align": 0}, "alibi_slopes: expected None, as forward had, got [1.0, 1.0]"),
    ({}, {"bias": np.zeros((5, 7), np.float32)}, "bias: expected None, as forward had, got another array"),
    ({}, {"precision": "bf16"}, "precision: expected None, as forward had, got 'bf16'"),
]


@pytest.mark.parametrize("before, after, text", CONTRADICTIONS)
@pytest.mark.parametrize("form", ["short", "long"])
def test_contradicting_options_are_refused(nowhere, rng, before, after, text, form):
    q, k, v = tensors(rng)
    r = local.forward(q, k, v, **before)
    for backward in (nowhere.backward, local.backward):
        with pytest.raises(attnd.InvalidArgument) as caught:
            if form == "short":
                backward(r.out, r, **after)
            else:
                backward(r.out, q, k, v, r.out, r.lse, **{**before, **after})
        assert str(caught.value) == text and caught.value.field == text.partition(":")[0]


def test_the_long_form_misses_what_is_left_out(nowhere, client, rng):
    q, k, v = tensors(rng)
    for r in (client.forward(q, k, v, causal="top_left"), client.forward(q, k, v, causal="top_left")):  # as planned
        with pytest.raises(attnd.InvalidArgument, match="^causal: expected 'top_left', as forward had, got None"):
            nowhere.backward(r.out, q, k, v, r.out, r.lse)
    with pytest.raises(attnd.InvalidArgument, match="^q, k, v: expected the arrays that forward had"):
        r = local.forward(q, k, v, kv_lengths=KV_LENGTHS)
        nowhere.backward(r.out, q, k[:, :, :4], v[:, :, :4], r.out, r.lse)


@pytest.mark.parametrize("before, after", [
    ({"causal": "top_left"}, {"causal": True, "align": 0}), ({}, {"align": 3}), ({}, {"window": (-1, None), "align": 0}),
    ({}, {"scale": 8**-0.5}), ({}, {"seed": 5}), ({"mask": MASK}, {"mask": np.broadcast_to(MASK, (2, 2, 5, 7)).copy()}),
    ({"kv_lengths": KV_LENGTHS}, {"kv_lengths": np.array(KV_LENGTHS)}), ({}, {"accumulate": "f16"}),
    ({"causal": "bottom_right"}, {"causal": True, "align": [2, 2]}), ({}, {"zero_rest": False}),
])
def test_the_same_said_otherwise_is_taken(rng, before, after):
    q, k, v = tensors(rng)
    r = local.forward(q, k, v, **before)
    expected = local.backward(r.out, q, k, v, r.out, r.lse, **before)
    np.testing.assert_array_equal(local.backward(r.out, q, k, v, r.out, r.lse, **after).dq, expected.dq)


def test_an_lse_of_the_callers_own_is_taken_as_it_is(rng):
    q, k, v = tensors(rng)
    r, causal = local.forward(q, k, v), local.forward(q, k, v, causal="top_left")
    lse = causal.lse.copy()
    del causal
    assert local.backward(r.out, q, k, v, r.out, lse, causal="top_left").dq.shape == q.shape


def test_nothing_is_remembered_of_results_that_are_gone(rng):
    from attnd import _pairing
    q, k, v = tensors(rng)
    before = len(_pairing._calls)
    r = local.forward(q, k, v, mask=MASK)
    assert len(_pairing._calls) == before + 1
    del r
    assert len(_pairing._calls) == before


def test_results_that_cannot_stand_for_a_call_say_so(nowhere, rng):
    q, k, v = tensors(rng)
    r = local.forward(q, k, v)
    with pytest.raises(attnd.InvalidArgument, match="^q: expected a result that forward gave in this process"):
        nowhere.backward(r.out, pickle.loads(pickle.dumps(r)))
    with pytest.raises(attnd.InvalidArgument, match="^lse: expected that of forward, which return_lse=False"):
        nowhere.backward(r.out, local.forward(q, k, v, return_lse=False))
    with pytest.raises(attnd.InvalidType, match="^k: expected nothing beside forward's result"):
        nowhere.backward(r.out, r, k)
    with pytest.raises(attnd.InvalidType, match="^k: expected an array"):
        nowhere.backward(r.out, q)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -1e9])
def test_gradients_of_rows_that_a_finite_bias_hides_whole_are_refused(client, rng, lowest):
    q, k, v = tensors(rng)
    bias = np.float32(rng.standard_normal((5, 7)))
    bias[2], bias[4, 3:] = lowest, lowest
    r = client.forward(q, k, v, bias=bias)
    np.testing.assert_allclose(r.out[:, :, 2], v.mean(axis=2), rtol=1e-5, atol=1e-6)
    dout = np.float32(rng.standard_normal(r.out.shape))
    with pytest.raises(attnd.Unimplemented, match="-inf or a bool mask"):
        client.backward(dout, r)
    dout[:, :, 2] = 0
    assert np.isfinite(client.backward(dout, r).dq).all()
    dlse = np.zeros(r.lse.shape, np.float32)
    dlse[0, 0, 2] = 1
    with pytest.raises(attnd.Unimplemented, match="bias"):
        client.backward(dout, r, dlse=dlse)
