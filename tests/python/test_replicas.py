"""offload(layers, group=, replicas=): four ranks under torchrun train two copies of a stack, on two daemons, beside one
process that adds up the same gradients in the documented order."""
import os
import re
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, Daemon

torch = pytest.importorskip("torch")
from test_groups import check_same, environment  # noqa: E402

pytestmark = pytest.mark.rare("ranks")
WORKER = os.path.join(ROOT, "tests/python/replica_worker.py")


@pytest.fixture(scope="module")
def daemons():
    """Some of the tests kill them."""
    made = [Daemon(), Daemon()]
    yield made
    for one in made:
        one.stop()


class Restarts(threading.Thread):
    """Kills the daemon whose number a rank writes into the file, and starts it again; the file is gone then."""

    def __init__(self, daemons, path):
        super().__init__()
        self._daemons, self._path, self._ended, self.count = daemons, path, threading.Event(), 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.join()

    def run(self):
        while not self._ended.wait(0.01):
            if os.path.exists(self._path) and os.path.getsize(self._path):
                one = self._daemons[int(open(self._path).read())]
                one.kill()
                one.start()
                self.count += 1
                os.remove(self._path)


def run_ranks(daemons, tmp_path, case, ranks=4, moments=(), **variables):
    """Returns what each rank wrote. variables: of its environment."""
    path = str(tmp_path / case)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", WORKER,
               ",".join(one.address for one in daemons), path, case, *moments]
    with Restarts(daemons, f"{path}.kill") as restarts:
        done = subprocess.run(command, env={**environment(), **variables}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    assert restarts.count == len(moments)
    return [torch.load(f"{path}.{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module")
def expected(daemons, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("alone") / "alone")
    subprocess.run([sys.executable, WORKER, daemons[0].address, path, "alone"], env=environment(), check=True, timeout=300)
    return torch.load(f"{path}.0")


def test_replicas_have_the_bits_of_the_documented_sum(daemons, tmp_path, expected):
    """Two micro-batches a rank and step, dropout, AdamW with two groups, clipping, a GradScaler and an infinite gradient."""
    for found in run_ranks(daemons, tmp_path, "train"):
        check_same(found, expected)
    assert expected["norms"][0] == "nan" and float(expected["norms"][1]) > 0


@pytest.mark.parametrize("moments", [["1 begun 1", "0 computed 0 2", "3 computed 1 3"], ["0 clipped 3", "2 begun 4"]])
def test_a_daemon_that_is_killed_takes_the_state_of_the_other(daemons, tmp_path, expected, moments):
    for found in run_ranks(daemons, tmp_path, "train", moments=moments):
        check_same(found, expected)


@pytest.mark.parametrize("ranks, moment", [(4, "2 computed 0 1"), (2, "1 computed 0 1")])
def test_ranks_that_wait_for_each_other_in_backward_recover(daemons, tmp_path, ranks, moment):
    quiet = run_ranks(daemons, tmp_path, "ddp", ranks)
    for found in run_ranks(daemons, tmp_path, "ddp", ranks, moments=[moment]):
        check_same(found, quiet[0])


def test_what_nothing_brings_back_is_said_and_a_checkpoint_goes_on(daemons, tmp_path):
    moments = ["1 computed 2", "0 saved 4", "1 saved 4"]
    one, other = run_ranks(daemons, tmp_path, "losses", ranks=2, moments=moments)
    for found in (one, other):
        assert re.search("rank 1, of replica 1 at .*, has lost the gradients of this step", found["gradients"])
        assert "has lost its state, and no other replica gives its own" in found["state"]
    check_same(one["end"], other["end"])
    assert not torch.equal(one["end"]["layers.0.linear1.weight"], one["saved"]["layers.0.linear1.weight"])


def test_what_does_not_fit_is_refused_by_name(daemons, tmp_path):
    for found in run_ranks(daemons, tmp_path, "refusals", ranks=2):
        assert "replicas: expected group= beside it" in found["alone"] and "group=None" in found["alone"]
        assert "replicas: expected no servers beside it" in found["servers"]
        assert f"replicas: expected each daemon once, got {daemons[0].address} twice" in found["twice"]
        assert "replicas: expected at most one daemon for each of the 2 ranks of the group, got 4" in found["many"]
        assert "replicas: expected a list of addresses" in found["word"]
        assert 'durability: expected "process" with replicas' in found["durability"]
        assert re.search(r"of one kind, .* got cpu \w+ of attnd 0\.0\.0 at .* and cpu \w+ of attnd 0\.1\.0 at",
                         found["versions"])
        for case in ("order", "none"):
            assert "ranks of the group disagree: replicas is [" in found[case] and "on rank 1" in found[case]
        assert "the number of backwards since the last step is 2 on rank 0 and 1 on rank 1" in found["counts"]
        assert re.search(r"rates and multipliers of digest \w+ on rank 0 and .* of digest \w+ on rank 1", found["rates"])
