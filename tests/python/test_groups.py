"""offload(layers, group=): ranks under torchrun train one module together, beside one process that computes their
micro-batches in turn."""
import functools
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ROOT
from test_modules import small_layout

import attnd
from attnd.modules.module import Module, Registration

torch = pytest.importorskip("torch")
from attnd.modules.group import GroupModule, Ranks  # noqa: E402

WORKER = os.path.join(ROOT, "tests/python/group_worker.py")


def environment():
    # Without the second, torchrun would give ranks that it starts again the addresses of those that have died.
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run_ranks(daemon, tmp_path, ranks, case, each=1, restarts=0, others=()):
    """Returns what each rank wrote. others: daemons of ranks 1, 2, ..."""
    path = str(tmp_path / f"{case}{ranks}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               f"--max-restarts={restarts}", WORKER,
               ",".join(one.address for one in (daemon, *others)), path, case, str(each)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(f"{path}.{rank}") for rank in range(ranks)]


@functools.lru_cache(maxsize=None)
def alone(address, folder, case, each):
    path = str(folder / f"alone_{case}{each}")
    subprocess.run([sys.executable, WORKER, address, path, f"alone_{case}", str(each)], env=environment(), check=True,
                   timeout=300)
    return torch.load(f"{path}.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


def check_same(found, expected):
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            check_same(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


# 4 micro-batches a step, clipping and a GradScaler; AdamW.
@pytest.mark.parametrize("ranks, each", [(2, 2), pytest.param(4, 1, marks=pytest.mark.rare("ranks"))])
def test_ranks_train_a_stack_to_the_bits_of_one_process(daemon, tmp_path, folder, ranks, each):
    expected = alone(daemon.address, folder, "stack", ranks * each)
    for found in run_ranks(daemon, tmp_path, ranks, "stack", each):
        check_same(found, expected)


@pytest.mark.rare("ranks")
def test_dropout_is_that_of_the_micro_batch(daemon, tmp_path, folder):
    expected = alone(daemon.address, folder, "dropout", 2)
    for found in run_ranks(daemon, tmp_path, 2, "dropout"):
        check_same(found, expected)


@pytest.mark.rare("ranks")
def test_ddp_takes_what_is_here_and_leaves_what_is_on_the_daemon(daemon, tmp_path, folder):
    """Both means of two are exact."""
    expected = alone(daemon.address, folder, "ddp", 2)
    for found in run_ranks(daemon, tmp_path, 2, "ddp"):
        check_same(found, expected)


@pytest.mark.rare("ranks")
def test_a_rank_that_dies_is_started_again_and_all_go_on_from_the_checkpoint(daemon, tmp_path, folder):
    """torchrun starts both; the module of the first lives is taken over."""
    expected = alone(daemon.address, folder, "restarts", 2)["state"]
    for found in run_ranks(daemon, tmp_path, 2, "restarts", restarts=1):
        assert found["first"] == 3
        check_same(found["state"], expected)


@pytest.mark.rare("training loops of others")
def test_fsdp_shards_what_is_here_and_is_told_to_leave_out_the_rest(daemon, tmp_path):
    for found in run_ranks(daemon, tmp_path, 2, "fsdp"):
        assert found["fsdp1"] == found["fsdp2"] == found["ddp"]
        assert found["refused"].startswith("Unimplemented: FSDP: ") and "ignored_params" in found["refused"]


@pytest.mark.rare("training loops of others")
def test_trainer_and_accelerate_train_a_stack_of_all_ranks_unchanged(daemon, tmp_path):
    pytest.importorskip("accelerate")
    for found in run_ranks(daemon, tmp_path, 2, "loops"):
        for here, there in found.values():
            assert len(here) >= 2
            torch.testing.assert_close(torch.tensor(there), torch.tensor(here), rtol=1e-4, atol=0)


ENDS = """
import torch
import torch.distributed as dist
from attnd.modules.group import Ranks

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = Ranks(dist.group.WORLD)
for _ in range(100):
    dist.all_reduce(torch.ones(1), async_op=True)  # more than Gloo's threads have done at the end
"""


def test_python_ends_after_the_threads_of_its_groups():
    done = subprocess.run([sys.executable, "-c", ENDS], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("terminate called")) == (0, 0), done.stderr


# Ranks as threads, without torch.distributed.

@pytest.fixture
def members(daemon):
    """register(rank, ranks, like=None) → a rank of a module, of the group of `like`."""
    clients, made = [], []

    def register(rank, ranks, like=None):
        clients.append(attnd.connect(daemon.address, timeout=60))
        wanted = Registration(small_layout(), "members", attnd.AdamW(), (), 64, 64, "process", 600.0, 0,
                              0 if like is None else like.owner_epoch)
        module = Module(clients[-1], wanted, 0)
        module._run("attnd_module_join", rank, ranks)
        made.append(module)
        return module
    yield register
    made[-1].release()
    for client in clients:
        client.close()


class Threads(Ranks):
    """A rank that is a thread: all of them have the list and the barrier."""

    def __init__(self, rank, told, barrier):
        self.rank, self.size, self._told, self._barrier = rank, len(told), told, barrier

    def gather(self, value):
        self._told[self.rank] = value
        self._barrier.wait(60)
        found = list(self._told)
        self._barrier.wait(60)
        return found


def test_a_rank_knows_a_state_of_its_sequence_that_was_made_anew(own_daemon):
    """No step has been done, so that both states have sequence 1."""
    told, barrier = [None, None], threading.Barrier(2)
    wanted = Registration(small_layout(), "anew", attnd.AdamW(), (), 64, 64, "process", 600.0)
    x = np.ones((1, 4, 16), np.float32)
    with attnd.connect(own_daemon.address, timeout=60) as client, ThreadPoolExecutor(2) as ranks:
        first, second = both = list(ranks.map(
            lambda rank: GroupModule.make(client, Threads(rank, told, barrier), wanted, None), range(2)))

        def put(number):
            weights = {p.name: np.full(p.shape, number, np.float32) for p in wanted.layout.parameters}
            list(ranks.map(lambda one: one.put_kinds({"weight": weights}), both))
            assert [one.sequence for one in both] == [1, 1]
        put(1)
        _, of_old_weights = second.forward(x, keep=True)
        own_daemon.kill()
        own_daemon.start()
        with pytest.raises(attnd.FailedPrecondition) as error:
            first.forward(x)
        assert error.value.reason == "STATE_LOST"  # of which the second has heard nothing
        put(2)
        with pytest.raises(attnd.InvalidArgument, match="activations: expected those of a forward of this module"):
            second.backward(x, of_old_weights, timeout=10)
        list(ranks.map(backward, both))
        assert [one.sequence for one in ranks.map(lambda one: one.step(lr=0.1), both)] == [2, 2]


def backward(module, number=0):
    x = np.full((1, 4, 16), 1 + number, np.float32)
    module.backward(x, module.forward(x, keep=True)[1])


@pytest.mark.rare("ranks")
def test_a_rank_too_many_too_late_or_twice_is_told_so(members):
    first = members(0, 2)
    first.put({p.name: np.ones(p.shape, np.float32) for p in first.layout.parameters})
    second = members(1, 2, like=first)
    with pytest.raises(attnd.InvalidArgument, match="rank: expected one below ranks, .* got 2 of 2"):
        second._run("attnd_module_join", 2, 2)
    second._run("attnd_module_follow")

    backward(first)
    with pytest.raises(attnd.AttndError, match="micro_batches: expected 2, got 1; missing: 1") as error:
        first.step(lr=0.1, timeout=5)  # the other one is late
    assert error.value.reason == "GRADIENT_INCOMPLETE"

    twice = members(0, 2, like=first)
    twice._run("attnd_module_follow")
    with pytest.raises(attnd.FailedPrecondition, match="micro_batch: another one of number 0 was added") as error:
        backward(twice, 1)
    assert error.value.reason == "MICRO_BATCH_CONFLICT"
    backward(second)
    with ThreadPoolExecutor(2) as ranks:
        assert [one.sequence for one in ranks.map(lambda one: one.step(lr=0.1), [first, second])] == [2, 2]

    again = members(0, 2)  # the group was started again; a rank of the one before is left over
    with pytest.raises(attnd.FailedPrecondition, match=f"owner epoch {again.owner_epoch}, got {first.owner_epoch}"):
        backward(second)
    with pytest.raises(attnd.FailedPrecondition, match=f"owner epoch {again.owner_epoch}, got {first.owner_epoch}"):
        members(1, 2, like=first)


def test_a_rank_of_a_module_that_was_given_up_is_told_so(members):
    first = members(0, 2)
    first.put({p.name: np.ones(p.shape, np.float32) for p in first.layout.parameters})
    second = members(1, 2, like=first)
    second._run("attnd_module_follow")
    backward(first)
    first.release()
    with pytest.raises(attnd.AttndError) as error:
        backward(second)
    assert error.value.reason == "STATE_LOST"
    late = members(1, 2, like=first)  # an epoch from before
    with pytest.raises(attnd.FailedPrecondition, match="weights"):
        backward(late)


@pytest.mark.rare("ranks")
def test_ranks_that_disagree_are_told_who_and_what(daemon, tmp_path):
    for found in run_ranks(daemon, tmp_path, 2, "refusals"):
        assert found["ddp"].startswith("TypeError: DistributedDataParallel: encoder.layers was offloaded for one process")
        assert "group" in found["local"]
        assert "ranks of the group disagree: the layers" in found["layers"] and "on rank 1" in found["layers"]
        assert "durability is process on rank 0 and host on rank 1" in found["durability"]
        assert re.search(r"the optimizer is AdamW\(.*\) on rank 0 and SGD\(.*\) on rank 1", found["optimizer"])
        assert re.search(r"step: .* the digest of rates and multipliers is \w+ on rank 0 and \w+ on rank 1", found["rates"])
        assert "max_rows" in found["rows"]
    for found in run_ranks(daemon, tmp_path, 2, "counts"):
        assert "the number of backwards since the last step is 2 on rank 0 and 1 on rank 1" in found["counts"]


@pytest.mark.rare("ranks")
def test_ranks_that_reach_different_daemons_are_told_so(daemon, own_daemon, tmp_path):
    for found in run_ranks(daemon, tmp_path, 2, "split", others=[own_daemon]):
        assert "where they reach the same daemon, is 1 on rank 0 and 0 on rank 1" in found["split"]
