"""Fixtures of the Python tests: the package from the source tree, its native library, and live daemons.

Needs patchelf, and of bazel-bin server/attnd, client/attnctl, client/c/libattnd_client.so, tests/fixtures/emulated_attnd and
forgetful_attnd, tests/fakes/libfake_cuda.so, which `./dev test` builds.
ATTND_TEST_BACKEND picks the daemon's engine (default: cpu).
"""
import contextlib
import fcntl
import gc
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SERVER = os.environ.get("ATTND_TEST_SERVER", os.path.join(ROOT, "bazel-bin/server/attnd"))
EMULATED = os.path.join(ROOT, "bazel-bin/tests/fixtures/emulated_attnd")  # its cuda engine needs no GPU
FORGETFUL = os.path.join(ROOT, "bazel-bin/tests/fixtures/forgetful_attnd")  # adds retried micro-batches again
LIBRARY = os.path.join(ROOT, "bazel-bin/client/c/libattnd_client.so")
NATIVE = os.path.join(ROOT, ".build/python/native")
SOURCE = os.path.join(ROOT, "client/python")
ATTNCTL = os.path.join(ROOT, "bazel-bin/client/attnctl")
BUNDLED = os.path.join(NATIVE, "libattnd_client-attnd0.so")

sys.path.insert(0, SOURCE)
os.environ["ATTND_CLIENT_LIBRARY"] = BUNDLED
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session", autouse=True)
def native_library():
    """The library as the wheel has it, made anew when the build is newer."""
    made = [BUNDLED, os.path.join(NATIVE, "attnctl")]
    os.makedirs(NATIVE, exist_ok=True)
    with open(NATIVE + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest may run in several processes
        if not all(os.path.exists(path) for path in made) or min(map(os.path.getmtime, made)) < max(
                map(os.path.getmtime, [LIBRARY, ATTNCTL])):
            subprocess.run([sys.executable, os.path.join(SOURCE, "build_native.py"), LIBRARY, NATIVE, ATTNCTL], check=True)
    return BUNDLED


def unused_port():
    """Below those that connections get (from 32768 on), which would take it while a daemon is down."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


class Daemon:
    """An attnd process. `start` after `kill` takes the same port again."""

    def __init__(self, *flags, backend=None, listen=None, program=SERVER):
        self._program, self._flags, self.process = program, flags, None
        self._listen = listen or f"127.0.0.1:{unused_port()}"
        self._backend = backend or os.environ.get("ATTND_TEST_BACKEND", "cpu")
        self._folder = tempfile.TemporaryDirectory(prefix="attnd-test-")
        self.address = None
        self._metrics_port_file = os.path.join(self._folder.name, "metrics_port")
        self.start()

    def start(self):
        port_file = os.path.join(self._folder.name, "port")
        for path in (port_file, self._metrics_port_file):
            if os.path.exists(path):
                os.remove(path)
        self.log = open(os.path.join(self._folder.name, "log"), "a+")
        self.process = subprocess.Popen(
            [self._program, "--listen", self.address or self._listen, "--port_file", port_file,
             "--metrics_listen", "127.0.0.1:0", "--metrics_port_file", self._metrics_port_file,
             "--backend", self._backend, *self._flags],
            stdout=self.log, stderr=subprocess.STDOUT)
        self.address = "127.0.0.1:" + self._port(port_file)

    def _port(self, path):
        """Reads the port from a file that the daemon writes while it starts, one after the other."""
        deadline = time.monotonic() + 60
        while not (os.path.exists(path) and open(path).read().endswith("\n")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"attnd did not start: {self.read_log()}")
            time.sleep(0.01)
        return open(path).read().split()[0]

    def read_log(self):
        self.log.seek(0)
        return self.log.read()

    @property
    def metrics_port(self):
        return self._port(self._metrics_port_file)

    def metric(self, name):
        """The sum of the samples of that name."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10).read().decode()
        values = [float(line.split()[-1]) for line in text.split("\n") if re.match(name + r"[ {]", line)]
        assert values, name
        return sum(values)

    def kill(self, how=signal.SIGKILL):
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=60)

    def pause(self):
        """SIGSTOP, and waits until every thread stands still: the signal alone is not at once."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def stop(self):
        self.process.send_signal(signal.SIGCONT)
        self.kill()
        self.log.close()
        self._folder.cleanup()


@pytest.fixture(scope="session")
def daemon():
    made = Daemon()
    yield made
    made.stop()


@pytest.fixture
def connected(daemon):
    """attnd.torch's connection is one to the shared daemon, and PyTorch's random numbers are the same each time."""
    import torch

    import attnd.torch
    attnd.torch.connect(daemon.address, timeout=60, wait_for_ready=True)
    torch.manual_seed(5)
    yield
    attnd.torch.disconnect()


@pytest.fixture(scope="module")
def two_daemons(daemon):
    """Layers go to the shared daemon, by its names "" and "a", and to another one, by "b"."""
    import attnd.torch
    other = Daemon()
    for name, address in (("", daemon.address), ("a", daemon.address), ("b", other.address)):
        attnd.torch.connect(address, name=name, timeout=60)
    yield
    for name in ("", "a", "b"):
        attnd.torch.disconnect(name)
    other.stop()


@pytest.fixture(scope="module")
def killed_daemon():
    """attnd.torch's connection is one to a daemon of these tests alone, since they kill it. What Python has before them is
    left out of its searches for garbage, and of offload's for other owners of weights, which are most of a small program's
    time."""
    import attnd.torch
    made = Daemon()
    attnd.torch.connect(made.address, timeout=60, wait_for_ready=True)
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()
    attnd.torch.disconnect()
    made.stop()


@pytest.fixture
def restart(killed_daemon):
    """Kills that daemon and starts it again."""
    def kill_and_start():
        killed_daemon.kill()
        killed_daemon.start()
    return kill_and_start


def check_same(found, expected):
    """Tensors by name have the same bits."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert tensor.equal(found[name]), name


@pytest.fixture(scope="session")
def gpu_daemon():
    """A daemon on an emulated V100: of float32 without captured maps, and very slow."""
    made = Daemon(program=EMULATED, backend="cuda")
    yield made
    made.stop()


@pytest.fixture
def own_daemon():
    """For tests that kill or stop it."""
    made = Daemon()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def client(daemon):
    import attnd
    with attnd.connect(daemon.address, timeout=60) as made:
        yield made


@pytest.fixture
def rng(request):
    """Random numbers whose seed a failure shows; ATTND_TEST_SEED repeats it."""
    seed = int(os.environ.get("ATTND_TEST_SEED", time.time_ns() % 2**32))
    print(f"ATTND_TEST_SEED={seed}")
    return np.random.default_rng(seed)


def close(got, expected, element="f32", scale=1.0):
    """Whether `got` differs from the float64 result by no more than its element's rounding and a float32 computation
    allow (docs/NUMERICS.md); NaN and infinities must agree. `element` is "f32", "f16" or "bf16"."""
    unit = {"f32": 2.0**-18, "f16": 2.0**-10, "bf16": 2.0**-7}[element]
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    largest = np.abs(expected[finite]).max(initial=0)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=2 * unit, atol=scale * unit * max(largest, 1e-3))
