"""A daemon with TLS, certificates of callers, and tokens: who is let in, and what everybody else is told."""
import subprocess

import numpy as np
import pytest
from conftest import Daemon

import attnd

Q = np.ones((1, 1, 4, 8), np.float32)


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An authority, a server's and a caller's certificate of it, another authority, and tokens."""
    folder = tmp_path_factory.mktemp("tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        openssl(folder, "req", "-x509", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt")
    (folder / "san").write_text("subjectAltName=DNS:attnd.test,IP:127.0.0.1")
    for name in ("server", "caller"):
        openssl(folder, "req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                "-extfile", "san", "-out", f"{name}.crt")
    (folder / "tokens").write_text("someone 0123456789abcdef0123456789abcdef\n")
    (folder / "tokens").chmod(0o600)
    return lambda name: str(folder / name)


@pytest.fixture(scope="module")
def mutual(files):
    made = Daemon("--tls_cert", files("server.crt"), "--tls_key", files("server.key"), "--tls_client_ca", files("ca.crt"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def with_tokens(files):
    made = Daemon("--tls_cert", files("server.crt"), "--tls_key", files("server.key"), "--token_file", files("tokens"))
    yield made
    made.stop()


def test_caller_with_a_certificate_is_served(mutual, files):
    tls = attnd.TLS(files("ca.crt"), files("caller.crt"), files("caller.key"))
    with attnd.connect(mutual.address, tls=tls) as client:
        assert (client.forward(Q, Q, Q).out == 1).all() and client.serving()
    with attnd.connect(mutual.address, tls=tls._replace(server_name="attnd.test")) as client:
        assert (client.forward(Q, Q, Q).out == 1).all()


@pytest.mark.parametrize("changed", [{"ca": "other.crt"}, {"server_name": "elsewhere"}, {"cert": None, "key": None},
                                     {"cert": "other.crt", "key": "other.key"}])
def test_whoever_does_not_fit_is_told_in_time(mutual, files, changed):
    given = {"ca": "ca.crt", "cert": "caller.crt", "key": "caller.key", **changed}
    tls = attnd.TLS(**{k: v if v is None or k == "server_name" else files(v) for k, v in given.items()})
    with attnd.connect(mutual.address, tls=tls, timeout=10, retries=0) as client:
        with pytest.raises(attnd.Unavailable, match=f"no attnd server at {mutual.address}: .*with TLS"):
            client.forward(Q, Q, Q)


def test_plaintext_to_a_port_of_tls_is_told(mutual):
    with attnd.connect(mutual.address, timeout=10, retries=0) as client:
        with pytest.raises(attnd.Unavailable, match="is attnd running there, without TLS. Pass tls="):
            client.forward(Q, Q, Q)


def test_token_lets_in_and_its_lack_is_named(with_tokens, files):
    def call(token):
        with attnd.connect(with_tokens.address, tls=files("ca.crt"), token=token, timeout=10) as client:
            return client.forward(Q, Q, Q).out

    assert (call("0123456789abcdef0123456789abcdef") == 1).all()
    for token in (None, "f" * 32):
        with pytest.raises(attnd.Unauthenticated) as caught:
            call(token)
        assert isinstance(caught.value, PermissionError)
        assert "connect(token=...)" in str(caught.value) and "ff" not in str(caught.value)
