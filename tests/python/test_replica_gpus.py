"""Replicas on two emulated GPUs, whose daemons exchange gradients by a stand-in for NCCL: the bits of one process that adds
them up, whatever ends in the middle of an exchange."""
import os
import subprocess
import sys
import threading

import pytest
from conftest import EMULATED, ROOT, Daemon

torch = pytest.importorskip("torch")
from test_groups import check_same, environment  # noqa: E402
from test_replicas import WORKER, run_ranks  # noqa: E402

NCCL = os.path.join(ROOT, "bazel-bin/tests/fakes/libfake_nccl.so")
OPTIONS = {"PRECISION": "f16", "STEPS": "4"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("alone") / "alone")
    daemon = Daemon(program=EMULATED, backend="cuda")
    subprocess.run([sys.executable, WORKER, daemon.address, path, "alone"], env={**environment(), **OPTIONS}, check=True,
                   timeout=300)
    daemon.stop()
    return torch.load(f"{path}.0")


@pytest.fixture
def start(monkeypatch):
    """Starts a daemon with this library; stalls: the file that tells that its NCCL stands still in an exchange."""
    made = []

    def one(library=NCCL, stalls=""):
        if stalls:
            monkeypatch.setenv("FAKE_NCCL_STALL", stalls)
        made.append(Daemon("--nccl_library", library, program=EMULATED, backend="cuda"))
        monkeypatch.delenv("FAKE_NCCL_STALL", raising=False)
        return made[-1]
    yield one
    for daemon in made:
        daemon.stop()


def calls(daemon, method, code="OK"):
    return daemon.metric(f'attnd_module_calls_total{{code="{code}",method="{method}"}}')


def test_daemons_sum_gradients_to_the_bits_of_one_process(start, tmp_path, expected):
    daemons = [start(), start()]
    for found in run_ranks(daemons, tmp_path, "train", **OPTIONS):
        check_same(found, expected)
    for daemon in daemons:
        assert calls(daemon, "SumGradients") >= 4  # and one for the group


def test_one_daemon_without_the_library_leaves_it_to_the_workers(start, tmp_path, expected):
    daemons = [start(), start("libnccl_that_is_not_there.so.2")]
    for found in run_ranks(daemons, tmp_path, "train", **OPTIONS):
        check_same(found, expected)
    assert calls(daemons[0], "SumGradients") == 0


def test_a_daemon_that_is_killed_between_exchanges_is_in_a_new_group(start, tmp_path, expected):
    daemons = [start(), start()]
    moments = ["0 computed 0 2", "2 begun 3"]  # and replica 1's after it has been summed
    for found in run_ranks(daemons, tmp_path, "train", moments=[*moments, "1 clipped 3"], **OPTIONS):
        check_same(found, expected)
    assert calls(daemons[1], "SumGradients") >= 1


class Killer(threading.Thread):
    """Starts the daemon anew once its NCCL stands still."""

    def __init__(self, daemon, path):
        super().__init__()
        self._daemon, self._path, self._ended = daemon, path, threading.Event()

    def __enter__(self):
        self.start()

    def __exit__(self, *_):
        self._ended.set()
        self.join()

    def run(self):
        while not self._ended.wait(0.01):
            if os.path.exists(self._path):
                self._daemon.kill()
                return self._daemon.start()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_daemon_that_is_killed_in_an_exchange_is_in_a_new_group(start, tmp_path, expected, killed):
    """Replica 0's has made the group."""
    path = str(tmp_path / "stalled")
    daemons = [start(stalls=path if number == killed else "") for number in range(2)]
    with Killer(daemons[killed], path):
        for found in run_ranks(daemons, tmp_path, "train", **OPTIONS):
            check_same(found, expected)
    assert os.path.exists(path)
    for daemon in daemons:
        assert calls(daemon, "SumGradients") >= 3
    assert calls(daemons[1 - killed], "SumGradients", "FAILED_PRECONDITION") == 1


def test_an_exchange_that_hangs_ends_at_its_deadline_and_goes_through_the_workers(start, tmp_path, expected):
    path = str(tmp_path / "stalled")
    daemons = [start(), start(stalls=path)]
    for found in run_ranks(daemons, tmp_path, "train", **OPTIONS, EXCHANGE_SECONDS="1"):
        check_same(found, expected)
    assert os.path.exists(path)
    for daemon in daemons:
        assert calls(daemon, "SumGradients", "FAILED_PRECONDITION") == 1
        assert calls(daemon, "SumGradients") >= 3
        assert calls(daemon, "PutTensors") >= 2  # weights, and sums
