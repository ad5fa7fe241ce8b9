"""Captured attention maps and block patterns, by NumPy alone, against a daemon."""
import math

import numpy as np
import pytest

import attnd
from attnd.sparse import Capture, Tracker, build_pattern, sat, spion
from attnd.sparse.capture import Captured, pattern_layout

RNG = np.random.default_rng


@pytest.fixture(scope="module")
def client(daemon):
    with attnd.connect(daemon.address) as made:
        yield made


def tensors(batch=2, heads=2, rows=96, dim=32, kind=np.float32, seed=1):
    return [RNG(seed + n).standard_normal((batch, heads, rows, dim)).astype(kind) for n in range(3)]


def attention_map(q, k, causal=False, keys=None):
    """The averaged map in float64."""
    scores = np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k.astype(np.float64)) / math.sqrt(q.shape[-1])
    hidden = np.zeros(scores.shape, bool)
    if causal:
        hidden |= ~np.tril(np.ones(scores.shape[-2:], bool))
    if keys is not None:
        hidden |= np.arange(scores.shape[-1]) >= np.asarray(keys)[:, None, None, None]
    scores[hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).mean((0, 1))


def pooled(array, block):
    rows, keys = array.shape
    return np.array([[array[i:i + block, j:j + block].mean() for j in range(0, keys, block)]
                     for i in range(0, rows, block)])


@pytest.mark.parametrize("options,kind,bound", [({}, np.float32, 1e-6), ({"causal": True}, np.float32, 1e-6),
                                                ({"kv_lengths": [96, 50]}, np.float32, 1e-6), ({}, np.float16, 1e-3)])
@pytest.mark.parametrize("block", [32, 40])
def test_map_and_moments(client, options, kind, bound, block):
    q, k, v = tensors(kind=kind)
    plain = client.forward(q, k, v, **options)
    r = client.forward(q, k, v, capture=Capture(block), **options)
    assert r.out.tobytes() == plain.out.tobytes() and r.lse.tobytes() == plain.lse.tobytes()
    assert plain.captured is None
    want = attention_map(q, k, bool(options.get("causal")), options.get("kv_lengths"))
    np.testing.assert_allclose(r.captured.pooled, pooled(want, block), rtol=bound, atol=1e-12)
    assert r.captured.mean == pytest.approx(want.mean(), rel=bound)
    assert r.captured.variance == pytest.approx(want.var(), rel=bound)
    assert r.captured.skewness == pytest.approx((((want - want.mean()) / want.std()) ** 3).mean(), rel=bound)
    assert r.captured.distance is None and not r.captured.kept


def test_on_a_gpu(gpu_daemon):
    q, k, v = tensors(rows=80, kind=np.float16)
    with attnd.connect(gpu_daemon.address, timeout=60) as client:
        assert "capture" in client.info().features
        plain = client.forward(q, k, v, causal=True)
        first = client.forward(q, k, v, causal=True, capture=Capture(32, keep=True))
        assert first.out.tobytes() == plain.out.tobytes() and first.lse.tobytes() == plain.lse.tobytes()
        want = attention_map(q, k, causal=True)
        np.testing.assert_allclose(first.captured.pooled, pooled(want, 32), rtol=1e-3, atol=1e-12)
        assert first.captured.skewness == pytest.approx((((want - want.mean()) / want.std()) ** 3).mean(), rel=1e-3)
        second = client.forward(q * np.float16(1.5), k, v, causal=True, capture=Capture(32, previous=first.captured))
        changed = attention_map(q * np.float16(1.5), k, causal=True)
        assert second.captured.distance == pytest.approx(np.linalg.norm(changed - want), rel=1e-3)
        first.captured.release()


def test_large_calls_go_in_one_piece(client):
    q, k, v = tensors(batch=4, heads=4, rows=1024, dim=64)
    r = client.forward(q, k, v, capture=Capture(64))
    assert r.receipt.shards == 1
    np.testing.assert_allclose(r.captured.pooled, pooled(attention_map(q, k), 64), rtol=1e-6)
    again = client.forward(q, k, v, capture=Capture(64))
    assert again.captured.pooled.tobytes() == r.captured.pooled.tobytes()


def test_distance_of_kept_maps(client, daemon):
    q, k, v = tensors()
    first = client.forward(q, k, v, capture=Capture(32, keep=True)).captured
    assert first.kept and daemon.metric("attnd_capture_bytes") == 96 * 96 * 4
    second = client.forward(1.5 * q, k, v, capture=Capture(32, keep=True, previous=first)).captured
    want = np.linalg.norm(attention_map(1.5 * q, k) - attention_map(q, k))
    assert second.distance == pytest.approx(want, rel=1e-5)
    same = client.forward(q, k, v, capture=Capture(32, previous=first)).captured
    assert same.distance == 0 and not same.kept
    first.release()
    first.release()
    with pytest.raises(attnd.FailedPrecondition) as raised:
        client.forward(q, k, v, capture=Capture(32, previous=first))
    assert raised.value.reason == "CAPTURE_LOST"
    second.release()
    assert daemon.metric("attnd_capture_bytes") == 0


def test_a_map_of_another_size_is_refused(client):
    q, k, v = tensors()
    first = client.forward(q, k, v, capture=Capture(32, keep=True)).captured
    small = [t[:, :, :64] for t in (q, k, v)]
    with pytest.raises(attnd.InvalidArgument, match="capture.previous: expected a map of 64 rows and 64 keys, got one of"):
        client.forward(*small, capture=Capture(32, previous=first))
    first.release()


def test_refused(client):
    q, k, v = tensors()
    with pytest.raises(attnd.InvalidArgument, match="capture block"):
        Capture(0)
    with pytest.raises(attnd.InvalidType, match="capture"):
        client.forward(q, k, v, capture=32)
    long = [np.zeros((1, 1, 4097, 8), np.float32)] * 3
    with pytest.raises(attnd.OutOfRange, match="capture.keep: expected at most 4096 rows and keys, got 4097; without it the "
                                               "pooled map"):
        client.forward(*long, capture=Capture(64, keep=True))
    packed = [np.zeros((10, 1, 8), np.float32)] * 3
    with pytest.raises(attnd.Unimplemented, match="capture: expected a dense layout"):
        client.forward(*packed, layout="thd", cu_seqlens_q=[0, 4, 10], cu_seqlens_k=[0, 4, 10], capture=Capture(4))
    assert "capture" in client.info().features


def test_patterns_of_a_captured_map(client):
    q, k, v = tensors(rows=128)
    found = client.forward(q, k, v, capture=Capture(16, keep=True)).captured
    here = pattern_layout(found.pooled, rule="top_k", block=16, density=0.25)
    assert here.sum() == 16
    assert (pattern_layout(found, rule="top_k", block=16, density=0.25) == here).all()
    # The server has the map itself: another block, and SPION's convolution.
    want = attention_map(q, k)
    spread = sum(np.pad(want, 15)[15 + t:143 + t, 15 + t:143 + t] for t in range(-15, 16))
    there = pattern_layout(found, rule="top_k", block=32, density=0.5, diagonals=True)
    assert (there == pattern_layout(pooled(spread, 32), rule="top_k", block=32, density=0.5)).all()
    mask = build_pattern(found, rule="flood", quantile=0.9, force_diagonal=True)
    r = client.forward(q, k, v, mask=mask, zero_rest=True)
    assert np.isfinite(r.out).all()
    found.release()
    with pytest.raises(attnd.FailedPrecondition) as raised:
        build_pattern(found, rule="flood", quantile=0.9, diagonals=True)
    assert raised.value.reason == "CAPTURE_LOST"


@pytest.mark.parametrize("arguments,message", [
    ({"rule": "flood", "block": 8}, "quantile: expected a number"),
    ({"rule": "flood", "block": 8, "quantile": 1.5}, "quantile: expected 0..1, got 1.5"),
    ({"rule": "flood", "block": 8, "quantile": 0.5, "density": 0.1}, "density: expected None"),
    ({"rule": "top_k", "block": 8, "density": 0.0}, "density: expected above 0"),
    ({"rule": "top_k", "block": 8, "density": 0.01}, "density: expected at least one block of 16"),
    ({"rule": "top_k", "block": 0, "density": 0.5}, "block"),
    ({"rule": "top_k", "density": 0.5}, "block"),
    ({"rule": "top_k", "block": 8, "density": 0.5, "diagonals": True}, "diagonals"),
    ({"rule": "largest", "block": 8}, "rule"),
])
def test_patterns_refused(arguments, message):
    with pytest.raises((attnd.InvalidArgument, attnd.InvalidType), match=message):
        build_pattern(np.ones((4, 4), np.float32), **arguments)


def test_pattern_of_nan_is_refused():
    with pytest.raises(attnd.InvalidArgument, match=r"pooled: expected finite averages, got nan in block \(0, 1\)"):
        build_pattern(np.array([[0, np.nan], [1, 1]], np.float32), rule="flood", block=8, quantile=0.5)


def captured(distance, skewness=2.0, mean=1e-3):
    return Captured(np.zeros((2, 2), np.float32), 32, (64, 64), mean, 1e-6, skewness, distance)


def test_tracker_follows_spion():
    tracker = Tracker(2, spion(32, quantile=0.9))
    outcomes = [tracker.observe(step, [captured(a), captured(b)]) for step, (a, b) in enumerate(
        [(None, None), (4.0, 2.0), (3.0, 1.9), (2.56, 1.9), (2.56, 1.7)])]
    assert [o.settled for o in outcomes] == [False, False, False, True, True]
    assert outcomes[2].layers[0].change == 25 and not outcomes[2].layers[0].settled and outcomes[2].layers[1].settled
    assert "two" not in str(outcomes[0]) and "1 of three captures" in str(outcomes[0])
    assert int(outcomes[3].layers[0].change) == 14


def test_tracker_follows_sat():
    tracker = Tracker(1, sat(32, density=0.05))
    for step, distance in enumerate([None, 1.0]):
        assert not tracker.observe(step, [captured(distance)]).settled
    assert not tracker.observe(2, [captured(1.01, skewness=1.6)]).settled
    assert "skewness of 1.6" in str(tracker.last)
    assert tracker.observe(3, [captured(1.0, skewness=1.7)]).settled
    assert not tracker.observe(4, [captured(1.02, skewness=9.0)]).settled  # 2 %
    assert not tracker.observe(5, [captured(1.02, skewness=math.nan)]).settled
    assert "constant" in str(tracker.last)


def test_tracker_never_settles_on_nothing():
    tracker = Tracker(1, spion(32, quantile=0.9), warmup=9)
    for step, distance in enumerate([None, 0.0, 0.0, 0.0]):
        report = tracker.observe(step, [captured(distance)])
        assert not report.settled
    assert "distance before was 0" in str(report)
    with pytest.raises(attnd.InvalidArgument, match="layer 0"):
        tracker.observe(5, [captured(1.0, mean=math.nan)])
    with pytest.raises(attnd.InvalidArgument, match="a distance"):
        tracker.observe(5, [captured(None)])
    tracker.restart()
    for step, distance in ((6, None), (7, 1.0), (8, 1.0)):
        assert not tracker.observe(step, [captured(distance)]).settled  # the warm-up
    assert tracker.observe(9, [captured(1.0)]).settled
