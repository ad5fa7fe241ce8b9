"""attnd.local: the engine of this process against the oracle, and against a daemon on the same processor."""
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import oracle
import pytest
from conftest import close

import attnd
import attnd.masks as m
from attnd import _arrays, local
from attnd._problem import resolve

HEADS, KV_HEADS, ROWS, KEYS = 4, 2, 37, 45
OPTIONS = {
    "plain": {}, "causal": {"causal": "top_left"}, "bottom right": {"causal": "bottom_right"},
    "window": {"window": (9, 3), "align": "bottom_right"}, "softcap": {"softcap": 3.0}, "scale": {"scale": 0.25},
    "dropout": {"dropout_p": 0.25, "seed": 7, "offset": 1 << 40}, "key lengths": {"kv_lengths": [45, 17]},
    "sink": {"sink": [0.5, -0.5, 1.0, 0.0]}, "zero_rest": {"zero_rest": True, "causal": "top_left"},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "align": "bottom_right"},
    "bool mask": {"mask": np.random.default_rng(1).random((2, 1, ROWS, KEYS)) < 0.7},
    "bias": {"bias": np.random.default_rng(2).standard_normal((HEADS, ROWS, KEYS)).astype(np.float32)},
    "mask": {"mask": (m.window(8, 8) | m.global_(cols=[(0, 2)])) & m.random_blocks(8, 4, seed=3), "align": "top_left"},
    "no keys": {"causal": True, "align": -5},
}


def tensors(rng, dtype=np.float32):
    shapes = (2, HEADS, ROWS, 32), (2, KV_HEADS, KEYS, 32), (2, KV_HEADS, KEYS, 16), (2, HEADS, ROWS, 16)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("element", ["f32", "f16"])
@pytest.mark.parametrize("compute", ["float32", "float64"])
def test_results_are_the_oracles(rng, name, element, compute):
    q, k, v, dout = tensors(rng, np.float16 if element == "f16" else np.float32)
    options, with_bias = OPTIONS[name], name == "bias"
    r, exact = local.forward(q, k, v, compute=compute, **options), oracle.forward(q, k, v, **options)
    close(r.out, exact.out, element, scale=4)
    close(r.lse, exact.lse, "f32", scale=4)
    got = local.backward(dout, q, k, v, r.out, r.lse, bias_grad=with_bias, compute=compute, **options)
    wanted = oracle.backward(dout, q, k, v, r.out, r.lse, bias_grad=with_bias, **options)
    for field in ("dq", "dk", "dv", "dbias", "dsink"):
        one, other = getattr(got, field), getattr(wanted, field)
        assert (one is None) == (other is None), field
        if one is not None:
            close(one, other, element, scale=8)
    assert r.receipt.backend == got.receipt.backend == "local" and r.receipt.elapsed > 0
    assert r.receipt.dropout_p_effective == (0.25 if name == "dropout" else 0)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_daemon_on_this_processor_gives_the_same_bits(client, rng, name):
    q, k, v, dout = tensors(rng)
    here, there = local.forward(q, k, v, **OPTIONS[name]), client.forward(q, k, v, **OPTIONS[name])
    if there.receipt.backend != "cpu":
        pytest.skip("the daemon computes by another engine")
    np.testing.assert_array_equal(here.out, there.out)
    np.testing.assert_array_equal(here.lse, there.lse)
    for one, other in zip(local.backward(dout, here), client.backward(dout, there)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_layouts_strides_and_precision(rng, layout):
    q, k, v, dout = tensors(rng)
    axes = (0, 1, 2, 3) if layout == "bhld" else (0, 2, 1, 3)
    laid = [x.transpose(axes) for x in (q, k, v)]  # as it lies, or strided
    r = local.forward(*laid, layout=layout, precision="f16", causal="bottom_right")
    assert r.out.dtype == np.float32
    exact = oracle.forward(q, k, v, causal="bottom_right")
    close(r.out.transpose(axes), exact.out, "f16", scale=8)
    o, d_o = [np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (r.out, dout.transpose(axes))]  # to be copied
    g = local.backward(d_o, *laid, o, r.lse, layout=layout, precision="f16", causal="bottom_right")
    wanted = oracle.backward(dout, q, k, v, exact.out, exact.lse, causal="bottom_right")
    for field in ("dq", "dk", "dv"):
        close(getattr(g, field).transpose(axes), getattr(wanted, field), "f16", scale=16)


def test_packed_sequences(rng):
    q, k, v = [rng.standard_normal((11, heads, dim)).astype(np.float32) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    options = dict(cu_seqlens_q=[0, 3, 3, 11], cu_seqlens_k=[0, 4, 6, 11], causal="bottom_right")
    r, exact = local.forward(q, k, v, **options), oracle.forward(q, k, v, **options)
    close(r.out, exact.out)
    close(r.lse, exact.lse)


def test_not_visible_numbers_never_leak(rng):
    q, k, v, _ = tensors(rng)
    k[:, :, 3], v[:, :, 3] = np.nan, np.inf
    clean = [np.where(np.isfinite(x), x, 0) for x in (k, v)]
    mask = np.ones((ROWS, KEYS), bool)
    mask[:2, 3] = False
    r, expected = local.forward(q, k, v, mask=mask), local.forward(q, *clean, mask=mask)
    np.testing.assert_array_equal(r.out[:, :, :2], expected.out[:, :, :2])
    assert np.isnan(r.out[:, :, 2:]).all()


def test_what_it_refuses_is_named(rng):
    q, k, v, _ = tensors(rng)
    with pytest.raises(attnd.InvalidArgument, match='^compute: expected "float32" or "float64"'):
        local.forward(q, k, v, compute="float16")
    with pytest.raises(attnd.InvalidArgument, match="^problem.mask.empty_row: .* got none for row 0 of head 0") as caught:
        local.forward(q, k, v, mask=m.window(5, 0).require_keys(), align=-3)
    assert caught.value.reason == "EMPTY_ROW"


def test_ctrl_c_ends_a_call(rng):
    q = rng.standard_normal((8, 8, 1024, 64)).astype(np.float32)
    signal.setitimer(signal.ITIMER_REAL, 0.3)

    def interrupt(*_):
        raise KeyboardInterrupt
    before, start = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            local.forward(q, q, q, compute="float64")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 30
    assert math.isfinite(local.forward(q[:1], q[:1], q[:1]).out.sum())


def test_a_forked_process_has_an_engine_of_its_own(rng):
    q, k, v, _ = tensors(rng)
    expected = local.forward(q, k, v).out
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = np.array_equal(local.forward(q, k, v).out, expected)
        finally:
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_ends_quietly_whatever_its_engine_does():
    program = """
import threading, numpy as np
from attnd import local
q = np.ones((1, 4, 1024, 64), np.float32)
local.forward(q, q, q)
threading.Thread(target=local.forward, args=(q, q, q), kwargs={"compute": "float64"}, daemon=True).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("p, expected", [(0.0, 0), (0.1, 26), (0.5, 128), (0.996, 255)])
def test_dropout_is_rounded_to_256ths(p, expected):
    q = np.ones((1, 1, 4, 8), np.float32)
    assert resolve(q, q, q, dropout_p=p, seed=1).dropout_threshold == expected


def test_bfloat16_rounds_to_nearest_even():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.0, 1.00390625, 1.01171875, -3.1415, 1e38, np.inf, -np.inf, np.nan, 1e-40], np.float32)
    got = _arrays.give(_arrays.cast(_arrays.Tensor(values, "f32"), "bf16"))
    np.testing.assert_array_equal(got.astype(np.float32), values.astype(ml_dtypes.bfloat16).astype(np.float32))
