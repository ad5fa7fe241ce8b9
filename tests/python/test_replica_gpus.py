"""Replicas on emulated GPUs, whose daemons exchange gradients by a stand-in for NCCL: the bits of the exchange through
workers, which test_replicas.py compares with the documented sum, whatever ends in the middle."""
import os
import threading

import pytest
from conftest import EMULATED, ROOT, Daemon

torch = pytest.importorskip("torch")
from test_groups import check_same  # noqa: E402
from test_replicas import run_ranks  # noqa: E402

pytestmark = pytest.mark.rare("ranks")
NCCL = os.path.join(ROOT, "bazel-bin/tests/fakes/libfake_nccl.so")
OPTIONS = {"PRECISION": "f16", "RANKS": "2"}
STEPS, GROUPS = 5, 1


def calls(daemon, method, code="OK"):
    return daemon.metric(f'attnd_module_calls_total{{code="{code}",method="{method}"}}')


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """One daemon has no NCCL."""
    daemons = [Daemon(*flags, program=EMULATED, backend="cuda")
               for flags in (["--nccl_library", NCCL], ["--nccl_library", "libnccl_that_is_not_there.so.2"])]
    found = run_ranks(daemons, tmp_path_factory.mktemp("workers"), "train", ranks=2, **OPTIONS)
    assert calls(daemons[0], "SumGradients") == 0 and calls(daemons[0], "PutTensors") == 1 + STEPS  # weights, and sums
    for daemon in daemons:
        daemon.stop()
    return found[0]


@pytest.fixture
def start(monkeypatch):
    """Starts a daemon. stalls: the file that tells that its NCCL stands still in an exchange."""
    made = []

    def one(stalls=""):
        if stalls:
            monkeypatch.setenv("FAKE_NCCL_STALL", stalls)
        made.append(Daemon("--nccl_library", NCCL, program=EMULATED, backend="cuda"))
        monkeypatch.delenv("FAKE_NCCL_STALL", raising=False)
        return made[-1]
    yield one
    for daemon in made:
        daemon.stop()


def test_daemons_sum_gradients_to_the_bits_of_their_workers(start, tmp_path, expected):
    daemons = [start(), start()]
    for found in run_ranks(daemons, tmp_path, "train", ranks=2, **OPTIONS):
        check_same(found, expected)
    for daemon in daemons:
        assert calls(daemon, "SumGradients") == GROUPS + STEPS
        assert calls(daemon, "PutTensors") == 1


def test_a_daemon_that_is_killed_between_exchanges_is_in_a_new_group(start, tmp_path, expected):
    daemons = [start(), start()]
    moments = ["0 computed 0 1", "1 clipped 3", "0 begun 4"]  # the second once gradients have been summed
    for found in run_ranks(daemons, tmp_path, "train", ranks=2, moments=moments, **OPTIONS):
        check_same(found, expected)
    for daemon in daemons:
        assert calls(daemon, "SumGradients") >= 1


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
        for found in run_ranks(daemons, tmp_path, "train", ranks=2, **OPTIONS):
            check_same(found, expected)
    assert os.path.exists(path)
    assert calls(daemons[killed], "SumGradients") == GROUPS + STEPS  # since it was started again
    assert calls(daemons[1 - killed], "SumGradients") == 2 * GROUPS + STEPS
    assert calls(daemons[1 - killed], "SumGradients", "FAILED_PRECONDITION") == 1


def test_an_exchange_that_hangs_ends_at_its_deadline_and_goes_through_the_workers(start, tmp_path, expected):
    path = str(tmp_path / "stalled")
    daemons = [start(), start(stalls=path)]
    for found in run_ranks(daemons, tmp_path, "train", ranks=2, **OPTIONS, EXCHANGE_SECONDS="2"):
        check_same(found, expected)
    assert os.path.exists(path)
    for daemon in daemons:
        assert calls(daemon, "SumGradients", "FAILED_PRECONDITION") == 1
        assert calls(daemon, "SumGradients") == 2 * GROUPS + STEPS - 1
        assert calls(daemon, "PutTensors") == 2
