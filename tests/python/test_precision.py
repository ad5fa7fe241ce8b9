"""connect(precision=...): what a client's float32 calls travel as; "auto" asks the daemon and says what it chose."""
import dataclasses
import warnings

import numpy as np
import oracle
import pytest

import attnd


def arrays(rng, dtype=np.float32):
    return [rng.standard_normal((1, 2, 16, 16)).astype(dtype) for _ in range(4)]


def test_a_gpu_says_what_it_can_do_beside_elements(gpu_daemon, client):
    with attnd.connect(gpu_daemon.address) as gpu:
        features = set(gpu.info().features)
    assert {"float16", "bfloat16", "float32", "causal", "window", "dropout", "packed"} <= features
    assert features - {"modules_on_cuda"} < {*client.info().features}


def test_a_volta_gpu_computes_float32_both_ways(gpu_daemon, rng):
    q, k, v, dout = arrays(rng)
    with attnd.connect(gpu_daemon.address, timeout=60, precision="auto") as gpu:
        r = gpu.forward(q, k, v, causal="top_left")
        g = gpu.backward(dout, r)
    assert r.receipt.backend == "cuda"
    expected = oracle.forward(q, k, v, causal="top_left")
    np.testing.assert_allclose(r.out, expected.out, rtol=1e-5, atol=1e-6)
    exact = oracle.backward(dout, q, k, v, expected.out, expected.lse, causal="top_left")
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(g, name), getattr(exact, name), rtol=1e-5, atol=3e-6)


@pytest.fixture
def no_float32(monkeypatch):
    """Makes daemons at these addresses say what older ones say of a Volta GPU: that they have no float32."""
    info, lacking = attnd.Client.info, []

    def told(self, index=0, **options):
        found = info(self, index, **options)
        if self.addresses[index] not in lacking:
            return found
        return dataclasses.replace(found, features=[f for f in found.features if f != "float32"])

    monkeypatch.setattr(attnd.Client, "info", told)
    return lacking.append


def test_auto_takes_float16_where_there_is_no_float32_and_warns_once(gpu_daemon, no_float32, rng):
    q, k, v, dout = arrays(rng)
    no_float32(gpu_daemon.address)
    with pytest.warns(UserWarning, match=f"{gpu_daemon.address} has no float32.*computed as float16") as caught:
        gpu = attnd.connect(gpu_daemon.address, timeout=60, precision="auto")
    assert len(caught) == 1 and caught[0].filename == __file__
    with gpu, warnings.catch_warnings():
        warnings.simplefilter("error")
        r = gpu.forward(q, k, v, causal="top_left")
        assert r.out.dtype == np.float32 and r.receipt.backend == "cuda"
        expected = oracle.forward(q, k, v, causal="top_left")
        np.testing.assert_allclose(r.out, expected.out, rtol=0.02, atol=0.005)
        short, long = gpu.backward(dout, r), gpu.backward(dout, q, k, v, r.out, r.lse, causal="top_left")
        np.testing.assert_array_equal(short.dq, long.dq)
        half = [x.astype(np.float16) for x in (q, k, v)]
        assert gpu.forward(*half).out.dtype == np.float16


def test_auto_leaves_float32_where_it_is(daemon, rng):
    q, k, v, _ = arrays(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attnd.connect(daemon.address, precision="auto") as client, attnd.connect(daemon.address) as plain:
            np.testing.assert_array_equal(client.forward(q, k, v).out, plain.forward(q, k, v).out)


def test_auto_asks_every_replica(daemon, gpu_daemon, no_float32):
    no_float32(gpu_daemon.address)
    with pytest.warns(UserWarning, match=f"engine at {gpu_daemon.address} has no float32"):
        attnd.connect([daemon.address, gpu_daemon.address], precision="auto").close()


def test_a_clients_precision_is_that_of_float32_calls_that_name_none(daemon, rng):
    q, k, v, _ = arrays(rng)
    with attnd.connect(daemon.address, precision="bf16") as client, attnd.connect(daemon.address) as plain:
        np.testing.assert_array_equal(client.forward(q, k, v).out, plain.forward(q, k, v, precision="bf16").out)
        np.testing.assert_array_equal(client.forward(q, k, v, precision="f16").out,
                                      plain.forward(q, k, v, precision="f16").out)
        half = [x.astype(np.float16) for x in (q, k, v)]
        np.testing.assert_array_equal(client.forward(*half).out, plain.forward(*half).out)
    with pytest.raises(attnd.InvalidArgument, match='^precision: expected None, "f16", "bf16" or "auto", got \'f8\''):
        attnd.connect(daemon.address, precision="f8")


def test_auto_needs_the_daemon_unless_it_may_fall_back(native_library, rng):
    with pytest.raises(attnd.Unavailable, match="no attnd server at 127.0.0.1:1"):
        attnd.connect("127.0.0.1:1", precision="auto", timeout=5)
    with pytest.warns(RuntimeWarning, match="computing locally"):
        client = attnd.connect("127.0.0.1:1", precision="auto", timeout=5, retries=0, fallback="local")
        with client:
            assert client.forward(*arrays(rng)[:3]).receipt.backend == "local"
