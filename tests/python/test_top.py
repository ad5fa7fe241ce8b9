"""attnctl top on a terminal: its screen, keys and widths; https with a token; and a real daemon's callers."""
import fcntl
import http.server
import json
import os
import pty
import re
import select
import signal
import ssl
import struct
import subprocess
import termios
import threading
import time

import numpy as np
import pytest
from conftest import ATTNCTL, Daemon
from test_tls import files  # noqa: F401: a fixture

import attnd

TOKEN = "0123456789abcdef0123456789abcdef"
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
GONE = "~" * 200  # longer than any screen is wide


class Metrics(http.server.BaseHTTPRequestHandler):
    """Counters that grow with each look. `server.token`: which it asks for."""
    looks = 0

    def do_GET(self):
        Metrics.looks += 1
        given = self.headers.get("Authorization")
        self.server.given = given
        wanted = self.server.token and f"Bearer {self.server.token}"
        self.send_response(200 if given == wanted else 401)
        self.end_headers()
        n = 1000 * Metrics.looks
        self.wfile.write(f"""attnd_ready 1
attnd_requests_total{{method="Forward",code="OK"}} {n}
attnd_requests_total{{method="Backward",code="OK"}} 7
attnd_gpu_up{{device="gpu0"}} 1
attnd_hbm_pool_reserved_bytes{{device="gpu0"}} 7e10
attnd_hbm_pool_used_bytes{{device="gpu0",purpose="input"}} 3e10
attnd_caller_requests_total{{caller="{GONE}",result="ok"}} {n}
attnd_caller_compute_seconds_total{{caller="{GONE}"}} {n}
""".encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metrics():
    with serve() as server:
        yield server


class serve:
    def __init__(self, token=None, certificate=None, key=None):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
        self.server.token = token
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        scheme = "https" if certificate else "http"
        self.server.url = f"{scheme}://127.0.0.1:{self.server.server_port}/metrics"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self.server

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Terminal:
    """attnctl top on a pseudo-terminal of its own."""

    def __init__(self, url, columns=80, rows=24):
        self.outer, self.inner = pty.openpty()
        self.before = termios.tcgetattr(self.inner)
        self.resize(columns, rows)
        self.output = b""
        self.process = subprocess.Popen(
            [ATTNCTL, "top", "--interval", "0.1", "--metrics", url], stdin=self.inner, stdout=self.inner,
            stderr=self.inner, env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))

    def resize(self, columns, rows=24):
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, found):
        deadline = time.monotonic() + 30
        while not found(self.output):
            assert time.monotonic() < deadline, self.output
            if select.select([self.outer], [], [], 0.05)[0]:
                self.output += os.read(self.outer, 65536)
        return self.output

    def frames(self):
        """The lines of each whole frame."""
        parts = re.split(rb"\x1b\[H", self.output)[1:]
        return [re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", part.split(b"\x1b[J")[0].decode()).split("\r\n")
                for part in parts if b"\x1b[J" in part]

    def send(self, keys):
        os.write(self.outer, keys)

    def end(self):
        code = self.process.wait(timeout=30)
        self.read_until(lambda output: LEAVE in output)
        after = termios.tcgetattr(self.inner)
        os.close(self.inner)
        os.close(self.outer)
        assert after == self.before
        return code


def shows_calls(output):
    return b"Forward" in output


@pytest.mark.parametrize("keys,code", [(b"q", 0), (b"\x1b", 0), (b"\x03", 130)], ids=["q", "Esc", "Ctrl-C"])
def test_a_key_ends_it_and_the_former_screen_is_back(metrics, keys, code):
    terminal = Terminal(metrics.url)
    output = terminal.read_until(shows_calls)
    assert output.index(ENTER) < output.index(b"Forward")
    terminal.send(keys)
    assert terminal.end() == code
    assert terminal.output.rindex(LEAVE) > terminal.output.rindex(b"Forward")
    assert b"q" not in terminal.output[terminal.output.rindex(LEAVE):]


def test_a_signal_ends_it_and_other_keys_do_not(metrics):
    terminal = Terminal(metrics.url)
    terminal.read_until(shows_calls)
    terminal.send(b"\x1b[A\x1a x")  # an arrow, Ctrl-Z
    shown = len(terminal.frames())
    terminal.read_until(lambda _: len(terminal.frames()) > shown + 2)
    assert terminal.process.poll() is None
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize("columns,rows", [(60, 24), (70, 12), (132, 40)])
def test_frames_fit_the_screen_and_leave_out_what_is_idle(metrics, columns, rows):
    terminal = Terminal(metrics.url, columns, rows)
    terminal.read_until(shows_calls)
    terminal.send(b"q")
    terminal.end()
    lines = terminal.frames()[-1]
    assert len(lines) <= rows and max(map(len, lines)) <= columns, lines
    assert not any("Backward" in line for line in lines)
    if rows >= 24:
        assert any(re.search(r"~…\s+[\d.k]+ .*\[#+\] 100%", line) for line in lines), lines
        assert any(re.search(r"hbm +\[#+\.+\] 27.9 GiB of 65.2 GiB", line) for line in lines), lines


def test_a_frame_follows_the_size_of_the_screen(metrics):
    terminal = Terminal(metrics.url, 132)
    terminal.read_until(shows_calls)
    terminal.resize(60)
    shown = len(terminal.frames())
    terminal.read_until(lambda _: len(terminal.frames()) > shown + 2)
    terminal.send(b"q")
    terminal.end()
    assert max(map(len, terminal.frames()[-1])) <= 60


def top(url, *arguments):
    return subprocess.run([ATTNCTL, "top", "--once", "--interval", "0.05", "-o", "json", "--metrics", url, *arguments],
                          capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=60)


def test_https_is_checked_and_gets_the_token(files, tmp_path):  # noqa: F811
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with serve(TOKEN, files("server.crt"), files("server.key")) as server:
        done = top(server.url, "--tls-ca", files("ca.crt"), "--token-file", str(token))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ready"]
        for arguments, said in ((("--tls-ca", files("ca.crt")), "401"), (("--tls-ca", files("other.crt")), "not trusted"),
                                ((), "not trusted")):
            done = top(server.url, *arguments)
            assert done.returncode == 3 and said in done.stderr, done.stderr
        done = top(server.url.replace("127.0.0.1", "localhost"), "--tls-ca", files("ca.crt"))
        assert done.returncode == 3 and "not trusted: hostname mismatch" in done.stderr, done.stderr


def test_a_token_does_not_travel_in_the_clear(metrics, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    assert top(metrics.url, "--token-file", str(token)).returncode == 0
    assert metrics.given is None


def test_two_tokens_are_two_callers(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("alice " + "a" * 16 + "\nbob " + "b" * 16 + "\n")
    tokens.chmod(0o600)
    daemon = Daemon("--token_file", str(tokens))
    try:
        q = np.ones((1, 2, 64, 32), np.float32)
        for token, calls in ("a" * 16, 2), ("b" * 16, 1):
            with attnd.connect(daemon.address, token=token) as client:
                for _ in range(calls):
                    client.forward(q, q, q)
        port = daemon.metrics_port
        callers = {row["caller"] for row in json.loads(top(f"127.0.0.1:{port}").stdout)["callers"]}
        assert callers == {"alice", "bob"}
        assert daemon.metric('attnd_caller_requests_total{caller="alice",result="ok"}') == 2
        assert daemon.metric('attnd_caller_compute_seconds_total{caller="bob"}') > 0
        assert daemon.metric('attnd_caller_bytes_total{caller="bob",direction="received"}') >= 3 * q.nbytes
    finally:
        daemon.stop()
