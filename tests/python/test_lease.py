"""Residuals: backward sends dout alone, with the same bits, whatever becomes of what the servers kept."""
import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import attnd


def arrays(rng, *shape, dtype=np.float16, count=4):
    return [rng.standard_normal(shape).astype(dtype) for _ in range(count)]


def same(a, b):
    for name in ("dq", "dk", "dv", "dbias", "dsink"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


@pytest.mark.parametrize("options", [
    {}, {"causal": "top_left"}, {"layout": "blhd"}, {"precision": "f16"}, {"dropout_p": 0.25, "seed": 3},
    {"window": (8, 0), "causal": "top_left", "softcap": 5.0}, {"zero_rest": True}])
def test_backward_by_a_residual_gives_the_same_bits_and_sends_a_fifth(client, rng, options):
    dtype = np.float32 if "precision" in options else np.float16
    q, k, v, dout = arrays(rng, 2, 4, 64, 64, dtype=dtype)
    if options.get("layout") == "blhd":
        q, k, v, dout = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v, dout)]
    r = client.forward(q, k, v, keep=True, **options)
    assert r.receipt.leased == r.receipt.shards and r.residual.bytes_held > 0
    expected = client.backward(dout, q, k, v, r.out, r.lse, **options)
    for _ in range(2):
        got = client.backward(dout, q, k, v, r.out, r.lse, residual=r.residual, **options)
        same(got, expected)
        assert got.receipt.leased == got.receipt.shards
        assert got.receipt.bytes_sent * 5 <= expected.receipt.bytes_sent


@pytest.mark.parametrize("kv_len, heads", [(1, 16), (512, 64)])
def test_what_is_kept_is_cut_no_finer_than_what_is_not(daemon, rng, kv_len, heads):
    """Since a backward that sends dout alone moves no more than a forward, and small pieces do not fill a GPU."""
    q, dout = arrays(rng, 1, heads, 8192 * 16 // heads, 64, count=2)
    k, v = arrays(rng, 1, heads, kv_len, 64, count=2)
    with attnd.connect(daemon.address, channels=1, timeout=60) as client:
        whole, kept = client.forward(q, k, v), client.forward(q, k, v, keep=True)
        assert whole.receipt.shards >= kept.receipt.shards == kept.receipt.leased > 1
        assert np.array_equal(whole.out, kept.out)
        expected = client.backward(dout, q, k, v, kept.out, kept.lse)
        got = client.backward(dout, q, k, v, kept.out, kept.lse, residual=kept.residual)
        same(got, expected)
        assert got.receipt.shards == got.receipt.leased == kept.receipt.shards < expected.receipt.shards


def test_gradients_of_bias_and_sink(client, rng):
    q, k, v, dout = arrays(rng, 2, 4, 32, 16, dtype=np.float32)
    bias, sink = rng.standard_normal((1, 4, 32, 32)).astype(np.float32), np.zeros(4, np.float32)
    options = {"bias": bias, "sink": sink}
    for told in (False, True):
        r = client.forward(q, k, v, keep=True, bias_grad=told, **options)
        expected = client.backward(dout, q, k, v, r.out, r.lse, bias_grad=True, **options)
        same(client.backward(dout, q, k, v, r.out, r.lse, bias_grad=True, residual=r.residual, **options), expected)


def test_the_layout_that_was_kept_is_used_when_other_arrays_would_suggest_another(client, rng):
    q, k, v, dout = [x.transpose(0, 2, 1, 3) for x in arrays(rng, 2, 32, 4, 16)]  # lies as blhd
    r = client.forward(q, k, v, keep=True)
    other = [np.ascontiguousarray(x) for x in (dout, q, k, v, r.out)]  # lies as bhld
    expected = client.backward(*other, r.lse)
    got = client.backward(*other, r.lse, residual=r.residual)
    same(got, expected)
    assert got.receipt.leased == got.receipt.shards


def test_other_options_than_forwards_make_it_send_everything(client, rng):
    q, k, v, dout = arrays(rng, 1, 2, 16, 16)
    r, causal = client.forward(q, k, v, keep=True), client.forward(q, k, v, causal="top_left")
    expected = client.backward(dout, q, k, v, causal.out, causal.lse, causal="top_left")
    got = client.backward(dout, q, k, v, causal.out, causal.lse, causal="top_left", residual=r.residual)
    same(got, expected)
    assert got.receipt.leased == 0


def test_a_restarted_daemon_is_sent_everything(own_daemon, rng):
    q, k, v, dout = arrays(rng, 1, 2, 16, 16)
    with attnd.connect(own_daemon.address, timeout=60, wait_for_ready=True) as client:
        r = client.forward(q, k, v, keep=True)
        expected = client.backward(dout, q, k, v, r.out, r.lse)
        own_daemon.kill()
        own_daemon.start()
        got = client.backward(dout, q, k, v, r.out, r.lse, residual=r.residual)
        same(got, expected)
        assert got.receipt.leased == 0 and r.residual.bytes_held == 0


@pytest.mark.parametrize("how", ["del", "release", "close"])
def test_letting_go_gives_the_memory_back(own_daemon, rng, how):
    q, k, v = arrays(rng, 1, 2, 16, 16, count=3)
    client = attnd.connect(own_daemon.address, timeout=60)
    r = client.forward(q, k, v, keep=True)
    assert r.residual is not None and own_daemon.metric("attnd_leases_active") > 0
    if how == "del":
        del r
    elif how == "release":
        r.residual.release()
        assert r.residual.bytes_held == 0
    else:
        client.close()
    deadline = time.monotonic() + 60  # long before it expires
    while own_daemon.metric("attnd_leases_active") > 0:  # the library's thread gives it back
        assert time.monotonic() < deadline


def test_a_forked_child_computes_without_it(client, rng):
    q, k, v, dout = arrays(rng, 1, 2, 16, 16)
    r = client.forward(q, k, v, keep=True)
    expected = client.backward(dout, q, k, v, r.out, r.lse)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            got = client.backward(dout, q, k, v, r.out, r.lse, residual=r.residual)
            same(got, expected)
            code = 0 if got.receipt.leased == 0 else 2
            del r
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    got = client.backward(dout, q, k, v, r.out, r.lse, residual=r.residual)
    same(got, expected)
    assert got.receipt.leased == got.receipt.shards  # the child has not given it back


# ---- PyTorch: kept between forward and backward, released with the graph.

class Recorder(attnd.Client):
    """Notes how many shards of each backward were leased."""

    def backward(self, *arguments, **keywords):
        result = super().backward(*arguments, **keywords)
        self.leased.append(result.receipt.leased)
        return result


@pytest.fixture
def recorder(daemon):
    torch = pytest.importorskip("torch")
    import attnd.torch as remote
    made = Recorder(daemon.address, timeout=60)
    made.leased = []
    remote.connect(made)
    remote.connect(made, name="stateless", keep=False)
    torch.manual_seed(1)
    yield made
    gc.collect()
    assert not remote._kept
    remote.disconnect()
    remote.disconnect("stateless")


def leaves(torch, count=3, *shape):
    return [torch.randn(*(shape or (2, 4, 32, 16)), requires_grad=True) for _ in range(count)]


def run(torch, tensors, server, backwards=1, **options):
    """The gradients after some backward passes over one graph."""
    import attnd.torch as remote
    for tensor in tensors:
        tensor.grad = None
    out = remote.scaled_dot_product_attention(*tensors, is_causal=True, server=server, **options)
    for n in range(backwards):
        out.square().sum().backward(retain_graph=n + 1 < backwards)
    return [tensor.grad.clone() for tensor in tensors]


def test_torch_uses_leases_without_being_asked(recorder):
    torch = pytest.importorskip("torch")
    tensors = leaves(torch)
    for backwards in (1, 2):
        for options in ({}, {"dropout_p": 0.5}):
            torch.manual_seed(2)
            expected = run(torch, tensors, "stateless", backwards, **options)
            torch.manual_seed(2)
            got = run(torch, tensors, "", backwards, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, expected))
            assert recorder.leased == [0] * backwards + [1] * backwards
            recorder.leased.clear()


def test_torch_keeps_nothing_where_no_backward_follows(recorder):
    torch = pytest.importorskip("torch")
    import attnd.torch as remote
    tensors = leaves(torch)
    with torch.no_grad():
        remote.scaled_dot_product_attention(*tensors)
    remote.scaled_dot_product_attention(*[t.detach() for t in tensors])
    assert not remote._kept
    out = remote.scaled_dot_product_attention(*tensors)
    assert len(remote._kept) == 1
    del out
    assert not remote._kept


def test_torch_bias_gradient_by_lease(recorder):
    torch = pytest.importorskip("torch")
    import attnd.torch as remote
    tensors, (bias,) = leaves(torch), leaves(torch, 1, 1, 4, 32, 32)
    found = []
    for server in ("stateless", ""):
        remote.attention(*tensors, bias=bias, server=server).square().sum().backward()
        found.append([t.grad.clone() for t in (*tensors, bias)])
        for t in (*tensors, bias):
            t.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert recorder.leased == [0, 1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpointing_by_lease(recorder, reentrant):
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint
    import attnd.torch as remote
    tensors = leaves(torch)
    expected = run(torch, tensors, "stateless")
    for tensor in tensors:
        tensor.grad = None
    out = checkpoint(lambda *t: remote.scaled_dot_product_attention(*t, is_causal=True), *tensors,
                     use_reentrant=reentrant)
    assert not remote._kept  # of the pass whose tensors are computed again
    out.square().sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(tensors, expected))
    assert recorder.leased == [0, 1]


def test_torch_tensors_that_a_hook_copied_are_sent(recorder):
    torch = pytest.importorskip("torch")
    tensors = leaves(torch)
    expected = run(torch, tensors, "stateless")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        got = run(torch, tensors, "")
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert recorder.leased == [0, 0]


def test_torch_compile_by_lease(recorder):
    torch = pytest.importorskip("torch")
    import attnd.torch as remote
    tensors = leaves(torch)
    expected = run(torch, tensors, "stateless")
    for tensor in tensors:
        tensor.grad = None
    compiled = torch.compile(lambda *t: remote.scaled_dot_product_attention(*t, is_causal=True), backend="aot_eager",
                             fullgraph=True)
    compiled(*tensors).square().sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(tensors, expected))
    assert recorder.leased == [0, 1]


def test_torch_threads_by_lease(recorder):
    torch = pytest.importorskip("torch")
    failures = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            tensors = [torch.randn(1, 2, 16, 8, generator=generator, requires_grad=True) for _ in range(3)]
            expected = run(torch, tensors, "stateless")
            for _ in range(5):
                got = run(torch, tensors, "")
                assert all(torch.equal(a, b) for a, b in zip(got, expected))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert recorder.leased.count(1) == 20


def test_interpreter_ends_while_residuals_are_held(daemon, native_library):
    program = ("import attnd, sys, numpy as np; c = attnd.connect(sys.argv[1]); x = np.zeros((1, 1, 4, 4), np.float32); "
               "r = c.forward(x, x, x, keep=True); assert r.residual is not None")
    done = subprocess.run([sys.executable, "-c", program, daemon.address], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
