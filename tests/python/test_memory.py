"""The memory of large results: used again when it is free, never before, and no more kept than said."""
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import attnd
from attnd import _memory
from attnd.modules import Layout

MIB = 1 << 20
F32 = np.dtype(np.float32)


@pytest.fixture
def cache(monkeypatch):
    made = _memory._Cache(8 * MIB)
    monkeypatch.setattr(_memory, "cache", made)
    return made


def address(array):
    return array.__array_interface__["data"][0]


def test_free_memory_serves_the_next_of_its_size(cache):
    first = _memory.empty((1024, 1024), F32)
    at, first = address(first), None
    assert cache.free_bytes == 4 * MIB
    other = _memory.empty((1024, 512), F32)
    second = _memory.empty((512, 2, 1024), np.dtype(np.int32))
    assert address(other) != at == address(second) and cache.free_bytes == 0
    assert address(_memory.empty((1024, 1024), F32)) != at
    assert second.flags.writeable and second.flags.c_contiguous and at % 64 == 0


def test_memory_in_use_is_not_lent_again(cache):
    whole = _memory.empty((1024, 1024), F32)
    whole[:] = 7
    part = whole[3:5].T
    del whole
    gc.collect()
    fresh = [_memory.empty((1024, 1024), F32) for _ in range(3)]
    for array in fresh:
        array[:] = 9
    assert (part == 7).all() and len({address(array) for array in fresh}) == 3


def test_no_more_is_kept_than_said_and_the_oldest_goes_first(cache):
    arrays = [_memory.empty((n, MIB // 4), F32) for n in (1, 2, 3, 4)]
    places = [address(array) for array in arrays]
    while arrays:
        del arrays[0]
    assert cache.free_bytes == 7 * MIB  # 10 were returned; 1 and 2 had to go
    assert [address(_memory.empty((n, MIB // 4), F32)) == places[n - 1] for n in (3, 4)] == [True, True]
    _memory.empty((9, MIB // 4), F32)
    assert cache.free_bytes <= 8 * MIB


def test_small_arrays_and_a_cache_of_nothing_leave_it_to_numpy(monkeypatch):
    monkeypatch.setattr(_memory, "cache", _memory._Cache(0))
    assert _memory.empty((1024, 1024), F32).flags.owndata
    monkeypatch.setattr(_memory, "cache", _memory._Cache(MIB))
    assert _memory.empty((4,), F32).flags.owndata and _memory.empty((0, 1 << 30), F32).size == 0


def test_threads_never_share_memory(cache):
    wrong = []

    def work(number):
        for _ in range(200):
            array = _memory.empty((MIB // 4,), F32)
            array[::4096] = number
            if not (array[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_results_of_calls_are_apart_while_they_live_and_reuse_memory_afterwards(client, cache, rng):
    given = [rng.standard_normal((3, 1, 2, 2048, 64)).astype(np.float32) for _ in range(3)]
    results = [client.forward(*tensors, causal="top_left").out for tensors in given]
    again = [client.forward(*tensors, causal="top_left").out for tensors in given]
    for one, other in zip(results, again):
        np.testing.assert_array_equal(one, other)
    places = {address(array) for array in again}
    assert len(places | {address(array) for array in results}) == 6
    del again, one, other
    assert address(client.forward(*given[0]).out) in places


def test_results_of_modules_reuse_memory(client, cache, rng):
    layout = Layout(256)
    block = layout.block()
    block.norm(0, "rms", block.parameter("weight", 256))
    layout.layer(block, "")
    module = attnd.register(layout, client, name="reused.results", optimizer=attnd.SGD(), max_rows=2048)
    module.put({"weight": np.ones(256, np.float32)})
    x = rng.standard_normal((1, 2048, 256)).astype(np.float32)
    y, activations = module.forward(x, keep=True)
    dx = module.backward(x, activations)
    kept, places = y.copy(), {address(y), address(dx)}
    del dx
    other = module.forward(2 * x)
    assert np.array_equal(y, kept) and address(other) in places - {address(y)}
    del y, other
    assert {address(module.forward(x)) for _ in range(4)} <= places
    module.release()


def test_torch_results_reuse_memory(client, cache):
    torch = pytest.importorskip("torch")
    import attnd.torch
    attnd.torch.connect(client)
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(1, 4, 2048, 128).to(dtype)
        out = attnd.torch.scaled_dot_product_attention(q, q, q)
        kept, at = out.clone(), out.data_ptr()
        second = attnd.torch.scaled_dot_product_attention(q + 1, q, q)
        assert torch.equal(out, kept) and second.data_ptr() != at
        del out
        assert attnd.torch.scaled_dot_product_attention(q, q, q).data_ptr() == at
        assert torch.equal(attnd.torch.scaled_dot_product_attention(q, q, q), kept)


def test_fork_while_a_thread_holds_the_lock(native_library):
    program = """
import os, sys
import numpy as np
from attnd import _memory
_memory.cache._lock.acquire()
if os.fork() == 0:
    first = _memory.empty((1024, 1024), np.dtype("f4")); del first
    os._exit(0 if _memory.cache.free_bytes == 4 << 20 else 1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_size_is_told_by_the_environment(native_library):
    program = "from attnd import _memory; print(_memory.cache.most_bytes)"
    for text, expected in (("3", f"{3 * MIB}"), ("0", "0"), ("many", "ATTND_CACHE_MIB: expected a number of MiB")):
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "ATTND_CACHE_MIB": text},
                              capture_output=True, text=True, timeout=60)
        assert expected in done.stdout + done.stderr


def test_failed_calls_give_their_memory_back(cache, rng):
    cache.most_bytes = 64 * MIB
    q = rng.standard_normal((1, 4, 2048, 128)).astype(np.float32)
    with attnd.connect("127.0.0.1:1", timeout=5, retries=0) as nobody:
        for _ in range(6):
            try:
                nobody.forward(q, q, q)
            except attnd.Unavailable:
                pass
    assert cache.free_bytes == 4 * MIB  # without a garbage collection
