"""Arrays in memory that the client shares with a daemon on its host: the same results, and ordinary memory elsewhere."""
import gc

import numpy as np
import pytest
from conftest import Daemon

import attnd

SHAPE = (2, 4, 300, 64)  # batch, heads, length, dim: 600 KiB in float32


@pytest.fixture(scope="module")
def unix_daemon(native_library, tmp_path_factory):
    path = f"unix:{tmp_path_factory.mktemp('unix')}/attnd.sock"
    made = Daemon("--listen", path)
    made.unix = path
    yield made
    made.stop()


def filled(client, rng, shape=SHAPE, dtype=np.float32):
    array = client.empty(shape, dtype)
    array[...] = rng.standard_normal(shape)
    return array


def test_results_are_those_of_ordinary_arrays(unix_daemon, rng):
    with attnd.connect(unix_daemon.unix) as client:
        q, k, v, dout = (filled(client, rng) for _ in range(4))
        shared = client.forward(q, k, v, causal=True)
        copied = client.forward(*[x.copy() for x in (q, k, v)], causal=True)
        assert np.array_equal(shared.out, copied.out) and np.array_equal(shared.lse, copied.lse)
        ours = client.backward(dout, q, k, v, shared.out, shared.lse, causal=True)
        theirs = client.backward(*[x.copy() for x in (dout, q, k, v, copied.out, copied.lse)], causal=True)
        assert all(np.array_equal(getattr(ours, d), getattr(theirs, d)) for d in ("dq", "dk", "dv"))


def test_outputs_may_lie_there(unix_daemon, rng):
    with attnd.connect(unix_daemon.unix) as client:
        q, k, v = (filled(client, rng) for _ in range(3))
        out = client.empty(SHAPE)
        result = client.forward(q, k, v, out=out)
        assert result.out is out
        assert np.array_equal(out, client.forward(q, k, v).out)


def test_an_array_outlives_its_client(unix_daemon, rng):
    client = attnd.connect(unix_daemon.unix)
    array = filled(client, rng)
    total = array.sum()
    client.close()
    del client
    gc.collect()
    assert array[1:].base is not None and array.sum() == total


@pytest.mark.parametrize("shape", [(), (0, 3), 7, (3, 5)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shapes_and_types(unix_daemon, shape, dtype):
    with attnd.connect(unix_daemon.unix) as client:
        array = client.empty(shape, dtype)
    assert array.shape == np.empty(shape).shape and array.dtype == dtype and array.flags.writeable


def test_ordinary_memory_where_nothing_is_shared(daemon, rng):
    with attnd.connect(daemon.address) as client:
        q, k, v = (filled(client, rng) for _ in range(3))
        assert np.array_equal(client.forward(q, k, v).out, client.forward(q.copy(), k, v).out)
