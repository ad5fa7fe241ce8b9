"""HTTP proxies: none unless asked for, whatever the environment says; and errors name the one that was used."""
import os
import re
import select
import socket
import socketserver
import subprocess
import threading

import numpy as np
import pytest

import attnd
from conftest import ROOT

Q = np.ones((1, 1, 4, 8), np.float32)
DEAD = "http://127.0.0.1:1"


class Proxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy that knows CONNECT alone, and says `answer` to it; with 200 it passes bytes on."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, answer="200 OK"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.url = answer, [], f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.request.recv(4096)
        target = re.match(rb"CONNECT (\S+):(\d+) ", head).groups()
        self.server.asked.append(b":".join(target).decode())
        self.request.sendall(f"HTTP/1.1 {self.server.answer}\r\n\r\n".encode())
        if not self.server.answer.startswith("200"):
            return
        with socket.create_connection((target[0].decode(), int(target[1]))) as peer:
            ends = {self.request: peer, peer: self.request}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    ends[end].sendall(data)


@pytest.fixture
def proxy():
    with Proxy() as made:
        yield made
        made.shutdown()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def attnctl(daemon, *arguments, **environment):
    return subprocess.run([os.path.join(ROOT, "bazel-bin/client/attnctl"), "--address", daemon.address, *arguments],
                          env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_daemon_is_reached_whatever_the_environment_says(daemon, monkeypatch, variable):
    monkeypatch.setenv(variable, DEAD)
    with attnd.connect(daemon.address, timeout=20, retries=0) as client:
        assert client.forward(Q, Q, Q).out.shape == Q.shape
    done = attnctl(daemon, "info")
    assert done.returncode == 0, done.stderr


def test_a_proxy_that_is_asked_for_is_used(daemon, proxy, monkeypatch):
    with attnd.connect(daemon.address, timeout=20, proxy=proxy.url) as client:
        assert client.forward(Q, Q, Q).out.shape == Q.shape
    assert set(proxy.asked) == {daemon.address}
    proxy.asked.clear()
    monkeypatch.setenv("https_proxy", proxy.url)
    with attnd.connect(daemon.address, timeout=20, proxy="environment") as client:
        assert client.info().version.startswith(attnd.__version__)
    assert proxy.asked
    proxy.asked.clear()
    assert attnctl(daemon, "--proxy", "environment", "info").returncode == 0 and proxy.asked


def test_no_proxy_is_obeyed(daemon, monkeypatch):
    monkeypatch.setenv("http_proxy", DEAD)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with attnd.connect(daemon.address, timeout=20, proxy="environment", retries=0) as client:
        assert client.forward(Q, Q, Q).out.shape == Q.shape


def test_errors_name_the_proxy(daemon, monkeypatch):
    with Proxy("407 Proxy Authentication Required") as refusing:
        for url, shown in ((DEAD, DEAD), (refusing.url.replace("//", "//me:secret@"), refusing.url)):
            with attnd.connect(daemon.address, timeout=20, proxy=url, retries=0) as client:
                for call in (lambda: client.forward(Q, Q, Q), client.info):
                    with pytest.raises(attnd.Unavailable, match=f"through the proxy {shown}") as caught:
                        call()
                    assert "secret" not in str(caught.value)
        refusing.shutdown()
    monkeypatch.setenv("http_proxy", DEAD)
    with attnd.connect(daemon.address, timeout=20, proxy="environment", retries=0) as client:
        with pytest.raises(attnd.Unavailable, match=rf"through the proxy {DEAD} \(http_proxy\)"):
            client.forward(Q, Q, Q)
    done = attnctl(daemon, "--proxy", DEAD, "info")
    assert done.returncode == 3 and f"through the proxy {DEAD}" in done.stderr


@pytest.mark.parametrize("proxy", ["proxy:3128", "https://proxy:3128", "socks5://a:b@proxy:1", ""])
def test_what_is_no_proxy_is_refused(daemon, proxy):
    with pytest.raises(attnd.InvalidArgument, match="^proxy: expected ") as caught:
        attnd.connect(daemon.address, proxy=proxy)
    assert caught.value.field == "proxy" and "a:b" not in str(caught.value)
    done = attnctl(daemon, "--proxy", proxy or "proxy", "info")
    assert done.returncode != 0 and "proxy: expected http://host:port" in done.stderr
