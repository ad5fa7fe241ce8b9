"""Masks by description in calls: what the daemon and the local computation make of them is what they make of the array that
the mask stands for. What masks show is test_described_masks.py's, torch and JAX test_mask_torch.py's."""
import pickle

import numpy as np
import oracle
import pytest
from conftest import Daemon, close

import attnd
import attnd.masks as m
from attnd import local

B, H, KV, ROWS, KEYS, D = 2, 4, 2, 70, 90, 16
LAYOUT = np.random.default_rng(1).random((H, 5, 6)) < 0.5
ROW = np.arange(ROWS)
KINDS = {
    "all": m.all_(),
    "nothing": ~m.all_(),
    "causal": m.causal(),
    "window": m.window(9, 3),
    "dilated": m.dilated(3, 4, 4),
    "stride": m.stride(4, 1),
    "stride columns": m.stride_columns(8, 2, 5),
    "block window": m.block_window(16, -1, 0, shift=[0, 5]),
    "global": m.global_(rows=[(0, 3)], cols=[(5, 9), (40, 41)]),
    "prefix": m.prefix([20, 33]) | m.causal(),
    "documents": m.documents([0, 20, 55, 90]) & m.causal(),
    "groups": m.groups(np.stack([ROW % 4, ROW % 5]), np.stack([np.arange(KEYS) % 4, np.arange(KEYS) % 5])),
    "random blocks": m.random_blocks(8, 3, seed=5, per_head=True),
    "random blocks beside a window": m.random_blocks(8, 2, seed=9, exclude=m.window(8, 8)) | m.window(8, 8),
    "blocks": m.blocks(LAYOUT, (14, 15)),
    "partial blocks": m.from_bsr([0, 2, 2, 3, 5, 6], [0, 2, 1, 0, 2, 1], 14, 30, KEYS,
                                 np.random.default_rng(2).random((6, 14, 30)) < 0.5),
    "column runs": m.from_flashmask(np.random.default_rng(3).integers(0, ROWS, (B, KV, KEYS, 1)), True, q_heads=H),
    "runs": m.runs(ROW % 7, np.full(ROWS, 3), np.full(ROWS, 20), KEYS),
    "intervals": m.from_endpoints(np.sort(np.random.default_rng(4).integers(0, KEYS + 1, (H, 3, ROWS)), axis=1)),
    "rectangles": m.rectangles([(0, 30, 0, 40), (20, 70, 30, 80, "causal"), (50, 70, 0, 30, "band")]),
    "bits": m.bits(np.random.default_rng(5).random((B, H, ROWS, KEYS)) < 0.3),
    "heads": m.per_head([m.causal(), m.window(5, 5), m.all_(), m.blocks(LAYOUT[0], (14, 15))]),
    "entries": m.per_batch([m.causal(), m.per_head([m.window(n, 0) for n in range(4)])]),
    "everything": (m.window(9, 9) | m.global_(cols=[(0, 2)]) | ~m.blocks(LAYOUT, (14, 15))) & m.causal(),
    "a part": m.bits(np.random.default_rng(6).random((100, 120)) < 0.5).at(row=20, key=11),
}


def arrays(rng, dtype=np.float32, batch=B, heads=H, kv_heads=KV, rows=ROWS, keys=KEYS):
    shapes = (batch, heads, rows, D), (batch, kv_heads, keys, D), (batch, kv_heads, keys, D), (batch, heads, rows, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_its_array(client, rng, name):
    mask, (q, k, v, dout) = KINDS[name], arrays(rng)
    options = {"align": "bottom_right", "kv_lengths": [KEYS, 61]}
    dense = np.stack([mask.to_dense(B, H, ROWS, KEYS, align=[KEYS - ROWS, 61 - ROWS])[b] for b in range(B)])
    expected = oracle.forward(q, k, v, mask=dense, **options)
    gradients = oracle.backward(dout, q, k, v, expected.out, expected.lse, mask=dense, **options)
    for engine in (client, local):
        r = engine.forward(q, k, v, mask=mask, **options)
        close(r.out, expected.out)
        close(r.lse, expected.lse)
        g = engine.backward(dout, r)
        for got, want in zip((g.dq, g.dk, g.dv), (gradients.dq, gradients.dk, gradients.dv)):
            close(got, want, scale=4)


def test_a_mask_stands_beside_other_options(client, rng):
    q, k, v, dout = arrays(rng)
    bias, mask = rng.standard_normal((1, H, ROWS, KEYS)).astype(np.float32), m.window(30, 30) & ~m.stride_columns(5, 0, 1)
    for options in ({"causal": "bottom_right"}, {"bias": bias, "align": 3}, {"softcap": 2.0, "align": "top_left"},
                    {"dropout_p": 0.25, "seed": 4, "align": "top_left"}, {"zero_rest": True, "align": "top_left"},
                    {"sink": np.arange(H, dtype=np.float32), "align": "top_left"}):
        offset = {"bottom_right": KEYS - ROWS, "top_left": 0}.get(options.get("align", options.get("causal")), 3)
        dense = mask.to_dense(B, H, ROWS, KEYS, align=offset)
        r, e = client.forward(q, k, v, mask=mask, **options), client.forward(q, k, v, mask=dense, **options)
        close(r.out, e.out)
        g, f = client.backward(dout, r), client.backward(dout, e)
        close(g.dq, f.dq, scale=4), close(g.dk, f.dk, scale=4)


def test_packed_sequences_count_inside_themselves(client, rng):
    cu = np.array([0, 30, 37, 70], np.int32)
    q, k, v, dout = [rng.standard_normal((70, heads, D)).astype(np.float32) for heads in (H, KV, KV, H)]
    mask = m.per_batch([m.block_window(8), m.prefix(3), m.bits(np.tri(33, dtype=bool))])
    r = client.forward(q, k, v, mask=mask, cu_seqlens_q=cu, cu_seqlens_k=cu)
    g = client.backward(dout, r)
    for n, (begin, end) in enumerate(zip(cu, cu[1:])):
        part = [x[begin:end].swapaxes(0, 1)[None] for x in (q, k, v, dout)]
        dense = mask.to_dense(3, H, 33, 33)[n:n + 1, :, :end - begin, :end - begin]
        expected = oracle.forward(*part[:3], mask=dense)
        close(r.out[begin:end].swapaxes(0, 1)[None], expected.out)
        wanted = oracle.backward(part[3], *part[:3], expected.out, expected.lse, mask=dense)
        close(g.dk[begin:end].swapaxes(0, 1)[None], wanted.dk, scale=4)


def test_a_residual_keeps_the_mask(client, rng):
    q, k, v, dout = arrays(rng, np.float16)
    for mask in (KINDS["blocks"], KINDS["window"]):
        r = client.forward(q, k, v, mask=mask, align="bottom_right", keep=True)
        expected = client.backward(dout, q, k, v, r.out, r.lse, mask=mask, align="bottom_right")
        got = client.backward(dout, r)
        assert got.receipt.leased == got.receipt.shards > 0 == expected.receipt.leased
        assert got.receipt.bytes_sent * 4 < expected.receipt.bytes_sent
        for a, b in ((got.dq, expected.dq), (got.dk, expected.dk), (got.dv, expected.dv)):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(attnd.InvalidArgument, match=r"^mask: expected Window.*, as forward had, got Prefix"):
        client.backward(dout, q, k, v, r.out, r.lse, mask=m.prefix(3), align="bottom_right", residual=r.residual)


def test_servers_know_masks_by_name_and_may_forget(rng):
    """Two replicas, of which the second asks once, and both again when they have restarted."""
    q, k, v, _ = arrays(rng, rows=128, keys=128)
    mask, daemons = m.bits(rng.random((128, 128)) < 0.5), [Daemon(), Daemon()]

    def counted(name):
        return [daemon.metric(f"attnd_mask_cache_{name}_total") for daemon in daemons]
    try:
        with attnd.connect([daemon.address for daemon in daemons], timeout=60, channels=1) as client:
            expected = client.forward(q, k, v, mask=mask.to_dense(B, H, 128, 128))
            for again in [mask] * 7 + [pickle.loads(pickle.dumps(mask))]:  # as another process has it
                np.testing.assert_array_equal(client.forward(q, k, v, mask=again).out, expected.out)
            assert sum(counted("misses")) == 1 and sum(counted("hits")) == 6 and min(counted("hits")) >= 2
            for daemon in daemons:
                daemon.kill()
                daemon.start()
            for _ in range(4):
                np.testing.assert_array_equal(client.forward(q, k, v, mask=mask).out, expected.out)
            assert sum(counted("misses")) >= 1
    finally:
        for daemon in daemons:
            daemon.stop()


def test_shards_have_their_part_of_the_mask(client, rng):
    """Cut by batch entries, heads and rows."""
    for batch, heads, rows in ((8, 8, 256), (1, 4, 4096)):
        q, k, v = [rng.standard_normal((batch, heads, rows, 64)).astype(np.float32) for _ in range(3)]
        mask = m.per_head([m.window(40 + h, 0) | m.global_(cols=[(0, h + 1)]) for h in range(heads)])
        r = client.forward(q, k, v, mask=mask)
        assert r.receipt.shards > 1
        b, h, begin = batch - 1, heads - 1, rows - 32
        part = q[b:, h:, begin:], k[b:, h:], v[b:, h:]
        dense = mask.to_dense(1, heads, rows, rows)[:, h:, begin:]
        close(r.out[b:, h:, begin:], oracle.forward(*part, mask=dense).out)


def test_what_is_refused(client, rng):
    q, k, v, _ = arrays(rng)

    def said(mask, **options):
        messages = []
        for engine in (client, local):
            with pytest.raises(attnd.InvalidArgument) as caught:
                engine.forward(q, k, v, mask=mask, **options)
            messages.append(str(caught.value))
            assert caught.value.field.startswith("mask") or options == {}
        assert messages[0] == messages[1]
        return messages[0]
    top = {"align": "top_left"}
    assert said(m.per_head([m.causal()] * 3 + [m.all_()] * 2), **top) == \
        "mask per_head: expected 1 or 4, the problem's query heads, got 5"
    assert said(m.prefix([1, 2, 3]), **top) == "mask prefix lengths: expected 1 or 2, the problem's batch entries, got 3"
    assert said(m.bits(np.ones((10, 12), bool)), **top) == \
        "mask bits: expected at least 70 rows, for the problem's 70, got 10"
    assert "align: expected" in said(m.causal())
    for engine in (client, local):
        with pytest.raises(attnd.InvalidArgument, match="head 0, row 0|row 0") as caught:
            engine.forward(q, k, v, mask=m.window(5, 0).require_keys(), align=-3)
        assert caught.value.reason == "EMPTY_ROW", engine
    with pytest.raises(attnd.InvalidType, match="^mask: expected"):
        client.forward(q, k, v, mask="causal")


def test_a_mask_that_no_message_holds_travels_beside_it(rng, client):
    q, k, v, _ = arrays(rng, np.float16, batch=1, heads=1, kv_heads=1, rows=4096, keys=4096)
    mask = m.bits(rng.random((4096, 4096)) < 0.5)  # 2 MiB
    small = Daemon("--max_message_mib", "1")
    try:
        with attnd.connect(small.address, timeout=60) as other:
            assert other.forward(q, k, v, mask=mask).out.tobytes() == client.forward(q, k, v, mask=mask).out.tobytes()
    finally:
        small.stop()


def test_a_mask_above_the_callers_share_is_refused_before_it_is_sent(rng):
    q, k, v, _ = arrays(rng, np.float16, batch=1, heads=1, kv_heads=1, rows=4096, keys=4096)
    small = Daemon("--mask_memory_mib", "4")  # a caller has a quarter
    try:
        with attnd.connect(small.address, timeout=60) as other:
            with pytest.raises(attnd.OutOfRange) as raised:
                other.forward(q, k, v, mask=m.bits(rng.random((4096, 4096)) < 0.5))
            assert raised.value.reason == "MASK_TOO_LARGE"
            assert other.forward(q, k, v, mask=m.causal()).out.shape == q.shape
    finally:
        small.stop()


def test_compile_mask_says_what_the_mask_costs(daemon, client, rng):
    mask = m.per_batch([m.window(63, 0), m.bits(rng.random((300, 300)) < 0.3)])
    dense = mask.to_dense(2, 4, 300, 300)
    report = client.compile_mask(mask, rows=300, batch=2, q_heads=4, kv_heads=2)
    assert (report.scores, report.nnz) == (dense.size, np.count_nonzero(dense))
    assert report.empty_rows == np.count_nonzero(~dense.any(-1)) and len(report.id) == 64
    (device,) = report.devices
    cells = np.zeros((2, 4, 320, 320), bool)
    cells[..., :300, :300] = dense
    cells = cells.reshape(2, 4, 5, 64, 5, 64)
    outside = np.ones((320, 320), bool)
    outside[:300, :300] = False  # beyond the problem's end nothing has to be visible
    full = (cells | outside.reshape(5, 64, 5, 64)).all((3, 5)) & cells.any((3, 5))
    assert (device.tile_rows, device.tile_keys, device.tiles) == (64, 64, 2 * 4 * 25)
    assert (device.tiles_full, device.tiles_partial) == (full.sum(), (cells.any((3, 5)) & ~full).sum())
    assert device.distinct_bitmaps > 0 and device.plan_bytes > 0 and device.compile_seconds > 0 and device.reason
    text = repr(report)
    assert f"<mask {report.id[:8]}: {report.nnz:,} of 720,000 scores" in text and device.kernel_forward in text
    assert f"{device.tiles_full + device.tiles_partial:,} of 200 tiles of 64 x 64" in text
    # The daemon knows a mask that it has compiled in the calls to come, which run these kernels.
    q, k, v = [rng.standard_normal((2, heads, 300, 64)).astype(np.float32) for heads in (4, 2, 2)]
    before = [daemon.metric(f"attnd_mask_cache_{name}_total") for name in ("hits", "misses")]
    r = client.forward(q, k, v, mask=mask)
    assert [daemon.metric(f"attnd_mask_cache_{name}_total") for name in ("hits", "misses")][1] == before[1]
    g = client.backward(np.ones_like(r.out), r)
    assert (r.receipt.kernel, g.receipt.kernel) == (device.kernel_forward, device.kernel_backward)


def test_compile_mask_takes_the_options_of_calls(client, gpu_daemon):
    base = client.compile_mask(m.causal(), rows=96, keys=128, align="top_left")
    assert base.nnz == 96 * 97 // 2
    assert client.compile_mask(m.causal(), rows=96, keys=128, align="top_left", layout="blhd").id == base.id
    assert client.compile_mask(m.causal(), rows=96, keys=128, align="bottom_right").nnz == 96 * 97 // 2 + 96 * 32
    assert client.compile_mask(m.causal(), rows=96, keys=128, align=-10).empty_rows == 10
    cu = np.array([0, 40, 96], np.int32)
    packed = client.compile_mask(m.causal(), rows=96, q_heads=3, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert packed.scores == 2 * 3 * 56 * 56
    with attnd.connect(gpu_daemon.address, timeout=60) as gpu:
        (without,), (device,) = [gpu.compile_mask(m.window(9, 0), rows=512, **options).devices
                                 for options in ({"head_dim": 129}, {"precision": "f16"})]
        assert without.kernel_forward == "" and without.reason in str(without)
        q = np.zeros((1, 1, 512, 64), np.float16)
        r = gpu.forward(q, q, q, mask=m.window(9, 0))
        assert (device.kernel_forward, device.kernel_backward) == (
            r.receipt.kernel, gpu.backward(q, r).receipt.kernel) and device.tile_rows < 512
        assert 0 < device.tiles_full + device.tiles_partial < device.tiles


def test_compile_mask_refuses_what_calls_refuse(client):
    mask = m.causal()

    def said(error, *arguments, **options):
        with pytest.raises(error) as caught:
            client.compile_mask(*arguments, **options)
        return str(caught.value)
    wrong = attnd.InvalidArgument
    assert said(wrong, mask, rows=0) == "rows: expected 1..1048576, got 0"
    assert said(wrong, mask, rows=9, q_heads=3, kv_heads=2).startswith("k: expected heads that divide q's 3, got 2")
    assert said(wrong, mask, rows=9, keys=12).startswith("align: expected")
    assert said(wrong, m.prefix([1, 2, 3]), rows=9, batch=2).startswith("mask prefix lengths: expected 1 or 2")
    assert said(wrong, mask, rows=9, index=1) == "index: expected 0..0, got 1"
    assert said(wrong, mask, rows=9, precision="f64").startswith('precision: expected None, "f16" or "bf16"')
    cu = {"cu_seqlens_q": [0, 9], "cu_seqlens_k": [0, 9]}
    assert said(wrong, mask, rows=9, batch=2, **cu).startswith("batch: expected 1 beside cu_seqlens")
    assert said(attnd.InvalidType, np.ones((9, 9), bool), rows=9).startswith("mask: expected a Mask")
    assert said(attnd.InvalidType, mask, rows=9, windo=(1, 1)).startswith("windo: expected no such option; did you mean wi")
    slow = m.stride(1009) | m.stride(1013)
    assert said(attnd.OutOfRange, slow, rows=1 << 20).startswith("problem.mask.pattern[0]: expected at most")
