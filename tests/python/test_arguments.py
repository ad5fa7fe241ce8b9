"""A caller's mistake raises before a byte is sent, naming the argument, what was expected and what it was.

The client's address has no listener: a call that got as far as the wire would be Unavailable instead.
"""
import subprocess

import numpy as np
import pytest

import attnd

Q, K, V = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 2, 7, 8), np.float32), np.zeros((2, 2, 7, 6), np.float32)
OUT, LSE = np.zeros((2, 4, 5, 6), np.float32), np.zeros((2, 4, 5), np.float32)


@pytest.fixture(scope="module")
def nowhere(native_library):
    with attnd.connect("127.0.0.1:1", timeout=5, retries=0) as client:
        yield client


# name: (q, k, v, options, field, what the message says)
FORWARD = {
    "list": ([[1.0]], K, V, {}, "q", "an array of float16"),
    "float64": (Q.astype(np.float64), K, V, {}, "q", "got an array of float64"),
    "int": (Q, K.astype(np.int32), V, {}, "k", "got an array of int32"),
    "big endian": (Q.astype(">f4"), K, V, {}, "q", "endian"),
    "three dimensions": (Q[0], K, V, {}, "q", "expected 4 dimensions (bhld), got shape (4, 5, 8)"),
    "mixed elements": (Q, K.astype(np.float16), V, {}, "k", "expected float32, as q is, got float16"),
    "batch": (Q[:1], K, V, {}, "k", "expected batch 1, as q has, got 2"),
    "dim": (Q[..., :4], K, V, {}, "k", "expected dim 4, as q has, got 8"),
    "v length": (Q, K, V[:, :, :5], {}, "v", "expected length 7, as k has, got 5"),
    "v heads": (Q, K, V[:, :1], {}, "v", "expected heads 2, as k has, got 1"),
    "heads do not divide": (Q[:, :3], K, V, {}, "k", "expected heads that divide q's 3, got 2"),
    "empty": (Q[:, :, :0], K, V, {}, "q", "expected length 1..1048576"),
    "head dim": (np.zeros((1, 1, 2, 257), np.float32),) + (np.zeros((1, 1, 2, 257), np.float32),) * 2
                + ({}, "q", "expected dim 1..256 (layout bhld), got 257"),
    "layout": (Q, K, V, {"layout": "bdlh"}, "layout", "\"bhld\" or \"blhd\" without cu_seqlens, got 'bdlh'"),
    "causal": (Q, K, V, {"causal": "diagonal"}, "causal", "got 'diagonal'"),
    "causal without align": (Q, K, V, {"causal": True}, "align", "lengths of queries and keys differ, got None"),
    "window without align": (Q, K, V, {"window": (1, 1)}, "align", "lengths of queries and keys differ"),
    "causal against align": (Q, K, V, {"causal": "top_left", "align": 1}, "align", 'None or "top_left"'),
    "align": (Q, K, V, {"align": "left"}, "align", "got 'left'"),
    "align count": (Q, K, V, {"align": [1, 2, 3]}, "align", "expected 1 or 2 entries, got 3"),
    "align float": (Q, K, V, {"align": 1.5}, "align", "expected integers"),
    "window": (Q, K, V, {"window": 3, "align": 0}, "window", "expected (left, right), got 3"),
    "window side": (Q, K, V, {"window": (-2, 0), "align": 0}, "window left", "expected -1..2147483647, got -2"),
    "float mask": (Q, K, V, {"mask": np.zeros((5, 7), np.float32)}, "mask", "floats belong into bias"),
    "mask shape": (Q, K, V, {"mask": np.ones((5, 6), bool)}, "mask", "broadcasts to (2, 4, 5, 7)"),
    "bias shape": (Q, K, V, {"bias": np.ones((3, 5, 7), np.float32)}, "bias", "got (3, 5, 7)"),
    "bias element": (Q, K, V, {"bias": np.ones((5, 7))}, "bias", "got an array of float64"),
    "scale": (Q, K, V, {"scale": float("nan")}, "scale", "expected a finite float32, got nan"),
    "scale type": (Q, K, V, {"scale": "big"}, "scale", "expected a finite number, got str"),
    "softcap": (Q, K, V, {"softcap": -1}, "softcap", "expected 0 or above, got -1.0"),
    "dropout": (Q, K, V, {"dropout_p": 1.0}, "dropout_p", "expected 0 <= p < 1, got 1.0"),
    "dropout rounding": (Q, K, V, {"dropout_p": 0.999}, "dropout_p", "255/256"),
    "dropout without a seed": (Q, K, V, {"dropout_p": 0.1}, "seed", "beside dropout_p, another for each forward, got None"),
    "seed": (Q, K, V, {"seed": -1}, "seed", "expected 0..2**64-1, got -1"),
    "seed type": (Q, K, V, {"seed": 0.5}, "seed", "expected an int, got float"),
    "accumulate": (Q, K, V, {"accumulate": "f64"}, "accumulate", "got 'f64'"),
    "precision": (Q, K, V, {"precision": "int8"}, "precision", "got 'int8'"),
    "precision of 16 bits": (Q.astype(np.float16), K.astype(np.float16), V.astype(np.float16),
                             {"precision": "bf16"}, "precision", "expected None for float16 tensors"),
    "lengths": (Q, K, V, {"kv_lengths": [7, 8]}, "kv_lengths", "expected 0..7, got 8"),
    "length count": (Q, K, V, {"kv_lengths": [7]}, "kv_lengths", "expected shape (2,), got (1,)"),
    "one cu_seqlens": (Q, K, V, {"cu_seqlens_q": [0, 5]}, "cu_seqlens_k", "together"),
    "cu_seqlens end": (Q[0].swapaxes(0, 1), K[0].swapaxes(0, 1), V[0].swapaxes(0, 1),
                       {"cu_seqlens_q": [0, 4], "cu_seqlens_k": [0, 7]}, "cu_seqlens_q", "to the total length 5"),
    "cu_seqlens count": (Q[0].swapaxes(0, 1), K[0].swapaxes(0, 1), V[0].swapaxes(0, 1),
                         {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 3, 7]}, "cu_seqlens_k", "expected 2 entries"),
    "slopes": (Q, K, V, {"alibi_slopes": [1, 2], "align": 0}, "alibi_slopes", "expected shape (4,) or (2, 4)"),
    "sink": (Q, K, V, {"sink": [1.0, float("inf"), 0, 0]}, "sink", "expected finite numbers, got inf"),
    "sink and rest": (Q, K, V, {"sink": [0.0] * 4, "zero_rest": True}, "zero_rest", "expected False beside sink"),
    "unknown": (Q, K, V, {"is_casual": True}, "is_casual", "no such option"),
    "misspelt": (Q, K, V, {"dropout": 0.1}, "dropout", "did you mean dropout_p?"),
    "out shape": (Q, K, V, {"out": np.zeros((2, 4, 5, 8), np.float32)}, "out", "expected shape (2, 4, 5, 6)"),
    "out element": (Q, K, V, {"out": OUT.astype(np.float16)}, "out", "expected float32, as q is, got float16"),
    "out read-only": (Q, K, V, {"out": np.broadcast_to(np.float32(0), (2, 4, 5, 6))}, "out", "writable"),
    "timeout": (Q, K, V, {"timeout": 0}, "timeout", "expected a number of seconds above 0, got 0"),
    "priority": (Q, K, V, {"priority": "urgent"}, "priority", "got 'urgent'"),
    "request id type": (Q, K, V, {"request_id": 5}, "request_id", "expected a string, got int"),
    "request id of nothing": (Q, K, V, {"request_id": ""}, "request_id", "expected 1 to 64 bytes, got 0"),
    "request id cut short": (Q, K, V, {"request_id": "a\0b"}, "request_id", "expected printable text"),
    "priority type": (Q, K, V, {"priority": []}, "priority", '"low", "normal" or "high", got list'),
    "progress": (Q, K, V, {"progress": 5}, "progress", "a function of attnd.Progress, got int"),
    "keep": (Q, K, V, {"keep": "yes"}, "keep", "expected True or False, got str"),
    "return_lse": (Q, K, V, {"return_lse": 1}, "return_lse", "expected True or False, got int"),
    "layout type": (Q, K, V, {"layout": np.array(["bhld", "blhd"])}, "layout", "got ndarray"),
    "causal type": (Q, K, V, {"causal": np.array([1, 0])}, "causal", "got ndarray"),
    "align ragged": (Q, K, V, {"align": [[1, 2], [3]]}, "align", "an array of integers, got list"),
    "number as text": (Q, K, V, {"scale": "0.5"}, "scale", "expected a finite number, got str"),
    "request id": (Q, K, V, {"request_id": "x" * 65}, "request_id", "expected 1 to 64 bytes, got 65"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_names_the_argument(nowhere, name):
    q, k, v, options, field, text = FORWARD[name]
    with pytest.raises(attnd.InvalidArgument) as caught:
        nowhere.forward(q, k, v, **options)
    assert caught.value.field == field
    assert str(caught.value).startswith(field + ": expected ") and text in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_correct_call_gets_as_far_as_the_wire(nowhere):
    with pytest.raises(attnd.Unavailable) as caught:
        nowhere.forward(Q, K, V)
    assert "127.0.0.1:1" in str(caught.value) and isinstance(caught.value, ConnectionError)


def test_a_wrong_type_is_found_after_the_right_one_that_compares_equal(nowhere):
    for good, bad in (({"causal": True}, {"causal": 1}), ({"zero_rest": False}, {"zero_rest": 0}),
                      ({"seed": 1}, {"seed": 1.0})):
        for _ in range(2):
            with pytest.raises(attnd.Unavailable):
                nowhere.forward(Q, Q, Q, **good)
        with pytest.raises(attnd.InvalidArgument):
            nowhere.forward(Q, Q, Q, **bad)


def test_another_program_or_an_older_server_is_called_that(nowhere, monkeypatch):
    from attnd import client as module

    def unknown(*arguments):
        raise attnd.Unimplemented("")
    monkeypatch.setattr(module.Call, "run", unknown)
    says = "does not know this call: it is another program, or an attnd of another version"
    with pytest.raises(attnd.Unimplemented, match=says):
        nowhere.forward(Q, K, V)


@pytest.mark.parametrize("changed, field, text", [
    ({"dout": OUT[..., :3]}, "dout", "expected shape (2, 4, 5, 6)"),
    ({"o": OUT.astype(np.float16)}, "o", "expected float32, as q is, got float16"),
    ({"lse": LSE.astype(np.float16)}, "lse", "expected float32, got float16"),
    ({"lse": LSE[:1]}, "lse", "expected shape (2, 4, 5), got (1, 4, 5)"),
    ({"dlse": None, "bias_grad": True}, "bias_grad", "expected False without a bias"),
    ({"out": (OUT, OUT)}, "out", "three arrays"),
    ({"residual": 5}, "residual", "that of a forward call's result, got int"),
    ({"bias_grad": "yes"}, "bias_grad", "expected True or False, got str"),
    ({"out": (Q.copy(), K.copy(), V[..., :2].copy())}, "out[2]", "expected shape (2, 2, 7, 6)"),
])
def test_backward_names_the_argument(nowhere, changed, field, text):
    given = {"dout": OUT, "q": Q, "k": K, "v": V, "o": OUT, "lse": LSE, **changed}
    with pytest.raises(attnd.InvalidArgument) as caught:
        nowhere.backward(**given)
    assert caught.value.field == field and text in str(caught.value)


@pytest.mark.parametrize("arguments, field", [
    ({"address": "localhost"}, "address"), ({"address": []}, "address"), ({"address": 7070}, "address"),
    ({"address": "host:99999"}, "address"), ({"channels": 0}, "channels"), ({"channels": True}, "channels"),
    ({"timeout": -1}, "timeout"), ({"timeout": "1"}, "timeout"), ({"retries": -1}, "retries"),
    ({"fallback": "cpu"}, "fallback"), ({"tls": 5}, "tls"), ({"tls": attnd.TLS(cert="c.pem")}, "tls"),
    ({"token": 3}, "token"), ({"token": "a\nb"}, "token"), ({"token": ""}, "token"),
    ({"token": "t", "address": "10.0.0.1:1"}, "token"), ({"address": "http://host:1"}, "address"),
    ({"address": "a b:1"}, "address"), ({"address": "a:1,b:1"}, "address"), ({"address": "unix:"}, "address"),
    ({"address": "unix:/" + "x" * 107}, "address"), ({"address": "ipv4:127.0.0.1"}, "address"),
    ({"fallback": []}, "fallback"),
    ({"wait_for_ready": "no"}, "wait_for_ready"), ({"merge_partial_results": 1}, "merge_partial_results"),
    ({"tls": attnd.TLS(ca=5)}, "tls"),
])
def test_connect_names_the_argument(native_library, arguments, field):
    with pytest.raises(attnd.InvalidArgument) as caught:
        attnd.connect(**{"address": "127.0.0.1:7070", **arguments})
    assert caught.value.field == field


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """Two certificates with their keys, and a file of something else."""
    folder = tmp_path_factory.mktemp("pem")
    for name in "ab":
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
                        f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"], check=True,
                       capture_output=True)
    (folder / "text").write_text("no PEM")
    return lambda *names: [None if name is None else str(folder / name) for name in names]


@pytest.mark.parametrize("names", [("text", None, None), (None, "a.crt", "b.key"), (None, "text", "a.key"),
                                   (None, "a.crt", "text")])
def test_connect_names_files_that_are_no_certificates(native_library, pem, names):
    attnd.connect("127.0.0.1:1", tls=attnd.TLS(*pem("a.crt", "a.crt", "a.key"))).close()
    with pytest.raises(attnd.InvalidArgument, match="^tls: expected PEM files.*" + next(filter(None, names))):
        attnd.connect("127.0.0.1:1", tls=attnd.TLS(*pem(*names)))


def test_connect_names_a_missing_certificate_file(native_library):
    with pytest.raises(attnd.AttndError) as caught:
        attnd.connect("127.0.0.1:7070", tls="/nonexistent/ca.pem")
    assert "/nonexistent/ca.pem" in str(caught.value)



def test_outputs_that_overlap_are_refused_and_interleaved_ones_are_not(nowhere):
    lse, tensors = LSE, [np.zeros((2, 4, 5, 8), np.float32) for _ in range(5)]
    same, packed = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 4, 5, 3, 8), np.float32)
    with pytest.raises(attnd.InvalidArgument, match=r"^out\[2\]: expected memory of its own, not out\[1\]'s"):
        nowhere.backward(*tensors, lse, out=(tensors[0].copy(), same, same))
    with pytest.raises(attnd.Unavailable):
        nowhere.backward(*tensors, lse, out=tuple(packed[:, :, :, n] for n in range(3)))


def test_results_do_not_go_to_arrays_that_may_not_be_written(nowhere):
    class Frozen:
        """As jax.Array: knows DLPack 1.0, and gives a capsule that does not say that it may be written."""

        def __init__(self, array):
            self._array = array

        def __dlpack__(self, *, max_version=None, stream=None):
            return self._array.__dlpack__()

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    with pytest.raises(attnd.InvalidArgument, match="^out: expected a writable array"):
        nowhere.forward(Q, K, V, out=Frozen(OUT.copy()))


@pytest.mark.parametrize("arguments, field", [(("x",), "shape"), ((-1,), "shape"), (([1.5],), "shape"),
                                              ((3, "x"), "dtype"), ((3, object), "dtype")])
def test_empty_names_the_argument(nowhere, arguments, field):
    with pytest.raises(attnd.InvalidArgument) as caught:
        nowhere.empty(*arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("shape", [1 << 60, (1 << 40, 1 << 40)])
def test_empty_says_that_there_is_no_memory(nowhere, shape):
    with pytest.raises(MemoryError, match=f"no memory for {4 * int(np.prod(shape, dtype=object))} bytes"):
        nowhere.empty(shape)


def test_closed_client_says_so(native_library):
    client = attnd.connect("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(attnd.InvalidArgument, match="closed"):
        client.forward(Q, K, V)


def test_client_cannot_be_pickled(nowhere):
    import pickle
    with pytest.raises(TypeError, match="connect"):
        pickle.dumps(nowhere)
