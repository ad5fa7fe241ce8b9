"""offload(layers, group=): ranks under torchrun train one module together, beside one process that computes their
micro-batches in turn."""
import functools
import os
import subprocess
import sys

import pytest
from conftest import ROOT

torch = pytest.importorskip("torch")

WORKER = os.path.join(ROOT, "tests/python/group_worker.py")


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_ranks(daemon, tmp_path, ranks, case, each=1):
    """Returns what each rank wrote."""
    path = str(tmp_path / f"{case}{ranks}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", WORKER,
               daemon.address, path, case, str(each)]
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
@pytest.mark.parametrize("ranks, each", [(2, 2), (4, 1)])
def test_ranks_train_a_stack_to_the_bits_of_one_process(daemon, tmp_path, folder, ranks, each):
    expected = alone(daemon.address, folder, "stack", ranks * each)
    for found in run_ranks(daemon, tmp_path, ranks, "stack", each):
        check_same(found, expected)


def test_dropout_is_that_of_the_micro_batch(daemon, tmp_path, folder):
    expected = alone(daemon.address, folder, "dropout", 2)
    for found in run_ranks(daemon, tmp_path, 2, "dropout"):
        check_same(found, expected)


def test_ddp_takes_what_is_here_and_leaves_what_is_on_the_daemon(daemon, tmp_path, folder):
    """Both means of two are exact."""
    expected = alone(daemon.address, folder, "ddp", 2)
    for found in run_ranks(daemon, tmp_path, 2, "ddp"):
        check_same(found, expected)


def test_ranks_that_disagree_are_told_who_and_what(daemon, tmp_path):
    for found in run_ranks(daemon, tmp_path, 2, "refusals"):
        assert found["ddp"].startswith("TypeError: DistributedDataParallel: encoder.layers was offloaded for one process")
        assert "group" in found["local"]
        assert "ranks of the group disagree: the layers" in found["layers"] and "on rank 1" in found["layers"]
        assert "max_rows" in found["rows"]
    for found in run_ranks(daemon, tmp_path, 2, "counts"):
        assert "the number of backwards since the last step is 2 on rank 0 and 1 on rank 1" in found["counts"]
