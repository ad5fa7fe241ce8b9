"""Arrays in memory that the client shares with a daemon on its host: the same results, and ordinary memory elsewhere."""
import gc

import numpy as np
import pytest
from conftest import Daemon

import attnd
from attnd.modules import Layout

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


def test_results_of_modules_may_lie_there(unix_daemon, rng):
    layout = Layout(64)
    block = layout.block()
    block.norm(0, "rms", block.parameter("weight", 64))
    layout.layer(block, "")
    x = rng.standard_normal((2, 200, 64)).astype(np.float32)  # 100 KiB
    with attnd.connect(unix_daemon.unix) as client:
        module = attnd.register(layout, client, name="shared.results", optimizer=attnd.SGD(), max_rows=400)
        module.put({"weight": rng.standard_normal(64).astype(np.float32)})
        wanted, activations = module.forward(x, keep=True)
        wanted_dx = module.backward(x, activations)
        y, dx = client.empty(x.shape), client.empty(x.shape)
        again, activations = module.forward(x, keep=True, out=y)
        assert again is y and np.array_equal(y, wanted)
        assert module.backward(x, activations, out=dx) is dx and np.array_equal(dx, wanted_dx)
        read_only = np.empty(x.shape, np.float32)
        read_only.flags.writeable = False
        for out, expected in [(np.empty((400, 64), np.float32), "shape"), (np.empty(x.shape, np.float16), "element"),
                              (np.empty((*x.shape, 2), np.float32)[..., 0], "contiguous"), (read_only, "written")]:
            with pytest.raises(attnd.InvalidArgument, match=f"^out: .*{expected}"):
                module.forward(x, out=out)
        with pytest.raises(attnd.InvalidType, match="^out: expected a NumPy array"):
            module.forward(x, out=x.tolist())
        _, activations = module.forward(x, keep=True)
        with pytest.raises(attnd.InvalidArgument, match="^out: expected None with want_dx=False"):
            module.backward(x, activations, want_dx=False, out=dx)
        module.release()


def test_ordinary_memory_where_nothing_is_shared(daemon, rng):
    with attnd.connect(daemon.address) as client:
        q, k, v = (filled(client, rng) for _ in range(3))
        assert np.array_equal(client.forward(q, k, v).out, client.forward(q.copy(), k, v).out)
