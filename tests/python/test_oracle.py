"""The tests' oracle against plain loops in float64, finite differences, and the dropout generator's known answers."""
import math

import numpy as np
import pytest

import dropout_bytes
import oracle

import attnd

WORD = np.zeros(1, np.uint64)


def test_philox_gives_the_known_answer():
    words = dropout_bytes.philox4x32x7((WORD, WORD, WORD, WORD), 0, 0)
    assert [int(word[0]) for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def scalar_dropout_byte(seed, offset, head, row, column):
    """One score's byte by the definition."""
    lane = (row & 7) * 4 + ((column & 7) >> 1)
    counter = [np.array([word], np.uint64) for word in (offset & 0xFFFFFFFF, (row >> 4) * 32 + lane, head, column >> 5)]
    words = dropout_bytes.philox4x32x7(tuple(counter), seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32))
    index = ((row >> 3) & 1) * 8 + ((column >> 3) & 3) * 2 + (column & 1)
    return int(words[index >> 2][0]) >> ((index & 3) * 8) & 255


def test_dropout_bytes_agree_with_the_definition_for_any_block_of_rows():
    seed, offset = 0x123456789ABCDEF0, 0xFEDCBA9876543210
    rows, columns, heads = range(13, 37), 70, np.array([3, 500])
    got = dropout_bytes.dropout_bytes(seed, offset, heads, rows, columns)
    expected = [[[scalar_dropout_byte(seed, offset, int(h), i, j) for j in range(columns)] for i in rows]
                for h in heads]
    np.testing.assert_array_equal(got, expected)


def loops(q, k, v, visible, score):
    """O and lse of [B, H, L, D] in plain loops; visible and score are functions of (b, h, i, j)."""
    batch, heads, rows = q.shape[:3]
    o, lse = np.zeros((batch, heads, rows, v.shape[3])), np.full((batch, heads, rows), -np.inf)
    for b, h, i in np.ndindex(batch, heads, rows):
        kv = h // (heads // k.shape[1])
        keys = [j for j in range(k.shape[2]) if visible(b, h, i, j)]
        s = [score(b, h, i, j, float(q[b, h, i].astype(np.float64) @ k[b, kv, j].astype(np.float64))) for j in keys]
        if keys:
            lse[b, h, i] = math.log(sum(math.exp(x) for x in s))
            o[b, h, i] = sum(math.exp(x - lse[b, h, i]) * v[b, kv, j].astype(np.float64) for x, j in zip(s, keys))
    return o, lse


def tensors(rng, batch=2, q_heads=4, kv_heads=2, q_len=5, kv_len=7, dim=8, v_dim=6):
    shapes = (batch, q_heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_forward_composes_window_mask_bias_softcap_alibi_and_lengths(rng):
    q, k, v = tensors(rng)
    mask, bias = rng.random((2, 1, 5, 7)) < 0.7, rng.standard_normal((4, 5, 1)).astype(np.float32)
    slopes, lengths = np.array([0.5, 0.25, 0.125, 0.0]), [7, 4]
    r = oracle.forward(q, k, v, causal="bottom_right", window=(4, -1), mask=mask, bias=bias, softcap=2.0, scale=0.7,
                      alibi_slopes=slopes, kv_lengths=lengths)

    def visible(b, h, i, j):
        diagonal = i + lengths[b] - 5
        return j < lengths[b] and diagonal - 4 <= j <= diagonal and mask[b, 0, i, j]

    def score(b, h, i, j, dot):
        return (2 * math.tanh(float(np.float32(0.7)) * dot / 2) + bias[h, i, 0]
                - slopes[h] * abs(i + lengths[b] - 5 - j))

    o, lse = loops(q, k, v, visible, score)
    np.testing.assert_allclose(r.out, o, atol=1e-6)
    np.testing.assert_allclose(r.lse, lse, atol=1e-6)


def test_sink_and_zero_rest_add_to_the_denominator(rng):
    q, k, v = tensors(rng)
    sink = np.array([0.3, -1, 2, 0], np.float32)
    plain = oracle.forward(q, k, v, causal="top_left")
    with_sink = oracle.forward(q, k, v, causal="top_left", sink=sink)
    with_rest = oracle.forward(q, k, v, causal="top_left", zero_rest=True)
    np.testing.assert_allclose(with_sink.lse, np.logaddexp(plain.lse, sink[:, None]), atol=1e-6)
    rest = np.log(7 - 1 - np.arange(5))
    np.testing.assert_allclose(with_rest.lse, np.logaddexp(plain.lse, rest), atol=1e-6)
    factor = np.exp(plain.lse - with_sink.lse)[..., None]
    np.testing.assert_allclose(with_sink.out, plain.out * factor, atol=1e-6)


def test_row_without_visible_key_gives_zero_and_minus_infinity(rng):
    q, k, v = tensors(rng)
    r = oracle.forward(q, k, v, causal=True, align=-2)
    assert (r.out[:, :, :2] == 0).all() and (r.lse[:, :, :2] == -np.inf).all()
    g = oracle.backward(np.ones_like(r.out), q, k, v, r.out, r.lse, causal=True, align=-2)
    assert (g.dq[:, :, :2] == 0).all() and np.isfinite(g.dk).all()


def test_nan_in_masked_keys_never_leaks_and_in_visible_ones_surfaces(rng):
    q, k, v = tensors(rng)
    k[:, :, 3], v[:, :, 3] = np.nan, np.inf
    clean = k.copy(), v.copy()
    clean[0][:, :, 3], clean[1][:, :, 3] = 0, 0
    mask = np.ones((5, 7), bool)
    mask[:2, 3] = False
    r, expected = oracle.forward(q, k, v, mask=mask), oracle.forward(q, *clean, mask=mask)
    np.testing.assert_array_equal(r.out[:, :, :2], expected.out[:, :, :2])
    assert np.isnan(r.out[:, :, 2:]).all()


def test_packed_sequences_equal_separate_ones(rng):
    q, k, v = (rng.standard_normal((11, heads, dim)).astype(np.float32) for heads, dim in ((4, 8), (2, 8), (2, 6)))
    cu_q, cu_k = [0, 3, 3, 11], [0, 4, 6, 11]
    r = oracle.forward(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal="bottom_right")
    assert r.lse.shape == (4, 11)
    for a, b, c, d in ((0, 3, 0, 4), (3, 11, 6, 11)):
        one = oracle.forward(q[None, a:b], k[None, c:d], v[None, c:d], layout="blhd", causal="bottom_right")
        np.testing.assert_array_equal(r.out[a:b], one.out[0])
        np.testing.assert_array_equal(r.lse[:, a:b], one.lse[0])


OPTION_SETS = {
    "plain": {}, "causal": {"causal": "top_left"}, "window": {"window": (2, 1), "align": "bottom_right"},
    "softcap": {"softcap": 1.5}, "dropout": {"dropout_p": 0.4, "seed": 99, "offset": 1 << 40},
    "sink": {"sink": np.array([0.1, 0.5, -0.5, 1.0], np.float32)}, "zero_rest": {"zero_rest": True, "causal": "top_left"},
    "alibi": {"alibi_slopes": [0.5, 0.3, 0.2, 0.1], "align": "top_left"}, "lengths": {"kv_lengths": [7, 3]},
}


@pytest.mark.parametrize("name", OPTION_SETS)
def test_gradients_agree_with_finite_differences(name, rng):
    options = OPTION_SETS[name]
    given = dict(zip("qkv", tensors(rng)))
    given["bias"] = rng.standard_normal((1, 4, 5, 7)).astype(np.float32)
    weights = rng.standard_normal((2, 4, 5, 6)).astype(np.float32)
    lse_weights = rng.standard_normal((2, 4, 5)).astype(np.float32)

    def objective(changed, sink):
        more = {**options, **({} if sink is None else {"sink": sink})}
        o, lse = oracle.forward_arrays(attnd._problem.resolve(changed["q"], changed["k"], changed["v"],
                                                             bias=changed["bias"], **more), np.float64)
        return float((o * weights.astype(np.float64)).sum() + (lse * lse_weights.astype(np.float64)).sum())

    r = oracle.forward(*[given[n] for n in "qkv"], bias=given["bias"], **options)
    g = oracle.backward(weights, *[given[n] for n in "qkv"], r.out, r.lse, bias=given["bias"], dlse=lse_weights,
                        bias_grad=True, **options)
    sink = options.get("sink")
    for field, gradient in (("q", g.dq), ("k", g.dk), ("v", g.dv), ("bias", g.dbias), ("sink", g.dsink)):
        if field == "sink" and sink is None:
            assert gradient is None
            continue
        base = sink if field == "sink" else given[field]
        direction = rng.standard_normal(base.shape).astype(np.float32)
        step = np.float32(2.0**-6)
        ends = []
        for sign in (1, -1):
            moved = (base + sign * step * direction).astype(np.float32)
            ends.append(objective(given if field == "sink" else {**given, field: moved},
                                  moved if field == "sink" else sink))
        expected, got = (ends[0] - ends[1]) / (2 * float(step)), float((gradient * direction).sum())
        assert got == pytest.approx(expected, rel=5e-3, abs=2e-2), field


def test_blocks_of_rows_do_not_change_the_result(rng, monkeypatch):
    q, k, v = tensors(rng, q_len=40, kv_len=33)
    options = dict(causal="bottom_right", dropout_p=0.3, seed=5, bias=rng.standard_normal((40, 33)).astype(np.float32))
    whole = oracle.forward(q, k, v, **options)
    whole_g = oracle.backward(whole.out, q, k, v, whole.out, whole.lse, bias_grad=True, **options)
    monkeypatch.setattr(oracle, "_BLOCK_SCORES", 4 * 33 * 7)
    parts = oracle.forward(q, k, v, **options)
    parts_g = oracle.backward(whole.out, q, k, v, whole.out, whole.lse, bias_grad=True, **options)
    np.testing.assert_allclose(parts.out, whole.out, atol=1e-6)
    for name in ("dq", "dk", "dv", "dbias"):
        np.testing.assert_allclose(getattr(parts_g, name), getattr(whole_g, name), atol=1e-5)
