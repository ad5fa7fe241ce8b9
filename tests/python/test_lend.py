"""attnd --lend on an emulated GPU, whose other users a stand-in for NVML tells: taken when idle, given back when the owner
comes, without a failed call or a lost step."""
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import EMULATED, ROOT, Daemon, unused_port
from test_haproxy import wait_until
from test_modules import small_layout, train
from test_serve import ends, is_alive

import attnd

NVML = os.path.join(ROOT, "bazel-bin/tests/fakes/libfake_cuda.so")
OWNER = 4_194_305  # a process id beyond those of this host
MOST_SECONDS = 2.0  # until the memory is free


class Lender:
    """attnd --lend; its GPU's users are written to a file."""

    def __init__(self, folder, *flags):
        os.symlink(NVML, folder / "libnvidia-ml.so.1")
        self.use, self._log, self.address = folder / "use", folder / "log", f"127.0.0.1:{unused_port()}"
        self.metrics = f"127.0.0.1:{unused_port()}"
        self.set_use(90, OWNER)
        self.process = subprocess.Popen(
            [EMULATED, "--lend", "--lend_after_seconds", "0.2", "--listen", self.address, "--metrics_listen", self.metrics,
             "--devices", "0", "--drain_delay", "0", *flags], stderr=open(self._log, "w"),
            env={**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_NVML_USE": str(self.use)})

    def set_use(self, percent, *processes):
        whole = self.use.with_suffix(".new")
        whole.write_text(" ".join(map(str, (percent, *processes))))
        whole.rename(self.use)

    def log(self):
        return self._log.read_text()

    def lend(self):
        """The owner has gone; the process that serves from now on, which NVML shows."""
        before = self.log().count("event=lent ")
        self.set_use(0)
        wait_until(lambda: self.log().count("event=lent ") > before)
        daemon = int(re.findall(r"event=lent process=(\d+)", self.log())[-1])
        self.set_use(99, daemon)
        wait_until(lambda: self.page("healthz") == 200, 60)
        return daemon

    def claim(self, daemon):
        """The owner's process appears; the seconds until the daemon's is gone, and with it its memory."""
        begin = time.monotonic()
        self.set_use(100, daemon, OWNER)
        assert ends(daemon)
        return time.monotonic() - begin

    def page(self, name):
        try:
            return urllib.request.urlopen(f"http://{self.metrics}/{name}", timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def metric(self, name):
        text = urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10).read().decode()
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)[1])

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def lender(tmp_path):
    made = Lender(tmp_path)
    yield made
    made.stop()


def waits(lender):
    return lender.page("healthz") == 503


def test_gpu_is_lent_while_it_is_idle_and_given_back_to_its_owner(lender):
    wait_until(lambda: waits(lender))
    time.sleep(0.4)  # twice the idleness that it asks for
    assert "event=lent " not in lender.log(), "its owner uses it"
    assert (lender.page("healthz"), lender.page("livez"), lender.metric("attnd_lent")) == (503, 200, 0)
    with Calls(lender.address) as calls:
        daemon = lender.lend()
        assert lender.metric("attnd_lent") == 1
        calls.wait_for_some()
        seconds = lender.claim(daemon)
        print(f"given back within {seconds:.2f} s")
        assert seconds <= MOST_SECONDS
        wait_until(lambda: waits(lender))
        assert lender.metric('attnd_given_back_total{how="drained"}') == 1, lender.log()
        lender.lend()
        calls.wait_for_some()
    assert lender.metric('attnd_given_back_total{how="killed"}') == 0
    lender.process.send_signal(signal.SIGTERM)
    assert lender.process.wait(60) == 0


class Calls:
    """A caller that waits for a daemon, on a thread: none of its calls may fail."""

    def __init__(self, *addresses):
        self._addresses, self._going, self._done, self._error = addresses, True, 0, None
        self._thread = threading.Thread(target=self._call)

    def _call(self):
        q = np.ones((1, 1, 4, 16), np.float16)
        with attnd.connect(list(self._addresses), wait_for_ready=True, timeout=120) as client:
            try:
                while self._going:
                    assert (client.forward(q, q, q).out == 1).all()
                    self._done += 1
            except BaseException as error:
                self._error = error

    def wait_for_some(self):
        before = self._done
        wait_until(lambda: self._done > before + 3 or self._error, 60)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._going = False
        self._thread.join()
        assert self._error is None, self._error


def train_at(addresses, xs, dys, weights, between=lambda step: None):
    """The weights after the steps; what a V100 computes."""
    with attnd.connect(addresses, wait_for_ready=True, timeout=120) as client:
        module = attnd.register(small_layout(layers=1, element="f16"), client, name="lent", optimizer=attnd.AdamW(),
                                max_rows=64)
        module.put(weights)
        found = train(module, xs, dys, len(xs), between)
        module.release()
        return found


@pytest.mark.rare("lending")
def test_training_loses_no_step_when_its_gpu_is_given_back(lender, gpu_daemon, rng):
    """Its module goes on at another daemon of the same kind, to the bits of the quiet run."""
    xs, dys = np.float16(rng.normal(size=(2, 4, 2, 2, 5, 16)))
    layout = small_layout(layers=1, element="f16")
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in layout.parameters}
    expected = train_at(gpu_daemon.address, xs, dys, weights)
    other = Daemon(program=EMULATED, backend="cuda")
    try:
        daemon, given_back = lender.lend(), []

        def claim(step):
            if step == 2 and not given_back:
                given_back.append(lender.metric("attnd_modules"))
                given_back.append(lender.claim(daemon))
        with attnd.connect(other.address) as client:  # the other one has more, so the module goes to the lent one
            attnd.register(layout, client, name="more", max_rows=64)
            found = train_at([lender.address, other.address], xs, dys, weights, claim)
    finally:
        other.stop()
    print(f"of {given_back[0]:.0f} modules, given back within {given_back[1]:.2f} s")
    assert given_back[0] == 1 and given_back[1] <= MOST_SECONDS
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.rare("lending")
def test_what_does_not_end_in_time_is_killed(tmp_path):
    lender = Lender(tmp_path, "--lend_within_seconds", "0.5")
    try:
        daemon = lender.lend()
        os.kill(daemon, signal.SIGSTOP)
        assert lender.claim(daemon) <= MOST_SECONDS
        wait_until(lambda: waits(lender))
        assert lender.metric('attnd_given_back_total{how="killed"}') == 1
        daemon = lender.lend()  # and counts on
        assert lender.metric('attnd_given_back_total{how="killed"}') == 1
        lender.process.kill()
        assert ends(daemon), "a lender that dies leaves no daemon"
    finally:
        lender.stop()


@pytest.mark.rare("lending")
def test_a_daemon_that_ends_by_itself_ends_its_lender(lender):
    daemon = lender.lend()
    os.kill(daemon, signal.SIGTERM)  # as attnctl drain
    assert lender.process.wait(60) == 0 and not is_alive(daemon)


@pytest.mark.parametrize("environment, flags, code, words", [
    ({}, [], 1, "no NVML"),
    ({"LD_LIBRARY_PATH": "{folder}", "CUDA_VISIBLE_DEVICES": "MIG-1"}, [], 1, "ordinals or UUIDs of whole GPUs"),
    ({"LD_LIBRARY_PATH": "{folder}"}, ["--devices", "7"], 1, "devices: expected 0..1, got 7"),
    ({}, ["--backend", "cpu"], 2, "lend: expected the backend cuda or auto, got cpu"),
    ({}, ["--lend_within_seconds", "0"], 2, "lend_within_seconds: expected 0.5..3600, got 0")])
def test_what_cannot_be_lent_is_said(tmp_path, environment, flags, code, words):
    os.symlink(NVML, tmp_path / "libnvidia-ml.so.1")
    variables = {name: text.format(folder=tmp_path) for name, text in environment.items()}
    done = subprocess.run([EMULATED, "--lend", *flags], env={**os.environ, "LD_LIBRARY_PATH": "", **variables},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == code and words in done.stderr, done.stderr


@pytest.mark.rare("lending")
def test_nvml_that_shows_other_process_ids_is_not_trusted(lender):
    """As in a container: the daemon would look like its own GPU's owner for ever."""
    for _ in range(2):
        before = lender.log().count("event=lent ")
        lender.set_use(0)
        wait_until(lambda: lender.log().count("event=lent ") > before)
        lender.set_use(99, OWNER)
        time.sleep(0.3)
    assert lender.process.wait(60) == 1
    assert "NVML does not show the daemon as process" in lender.log()
