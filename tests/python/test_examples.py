"""examples/: each program runs as it stands on a live daemon, and what it prints says that it worked."""
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import NATIVE, ROOT

EXAMPLES = os.path.join(ROOT, "examples")
PROGRAMS = {  # the packages that each needs, and what its output must match
    "numpy_attention.py": ([], r"largest error of dV: \d"),
    "draw_masks.py": ([], r"26816 of 65536 .*\n.*array: 0\.0"),
    "pytorch_attention.py": (["torch"], r"step 0: loss [23]\.\d*\n(.*\n)*step 150: loss 0\.0"),
    "pytorch_offload.py": (["torch"], r"step 25: loss [12]\.\d*\n(.*\n)*step 100: loss 0\.0\d*\nsaved "),
    "data_parallel.py": (["torch"], r"(?s)(?=.*step 100: loss 0\.0).*add up to (\S+).*add up to \1"),
    "sparse_training.py": (["torch"], r"(.*dense\n)+switched to sparse attention\n(step.*sparse\n)+(?<=0\.00\d, sparse\n)"),
    "jax_attention.py": (["jax"], r"step 0: loss 0\.[2-9]\d*\n(.*\n)*step 200: loss 0\.00"),
    "transformers_trainer.py": (["torch", "transformers", "accelerate"],
                                r"loss: 0\.[67]\d* in the first 16 steps, 0\.[01]\d* in the last"),
}
RANKS = {  # of torchrun, two on two daemons
    "slow_links.py": r"(?s)(?=.*round 0: loss [12]\.)(?=.*round 9: loss 0\.[0-5]).*add up to (\S+).*add up to \1",
    "pipeline.py": r"(?s)step 0: loss [23]\..*step 100: loss 0\.0",
    "ring_attention.py": r"(?s)(.*causal (False|True): largest error of O, dQ, dK, dV: \d\.\de-0[67]\n){4}",
}


def environment(*daemons):
    addresses = ",".join(one.address for one in daemons)
    return {**os.environ, "ATTND_ADDRESS": addresses, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


def run(daemon, *words):
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment(daemon),
                          timeout=300)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def run_python(daemon, name, *arguments):
    return run(daemon, sys.executable, os.path.join(EXAMPLES, name), *arguments)


def test_examples_are_short_and_all_are_run_here():
    files = {name for name in os.listdir(EXAMPLES) if not name.startswith((".", "_"))}
    assert files == {*PROGRAMS, *RANKS, "attention.c", "attention.cc", "quickstart.ipynb", "BUILD"}
    for name in files - {"quickstart.ipynb", "BUILD"}:
        with open(os.path.join(EXAMPLES, name), encoding="utf-8") as file:
            assert 20 <= len(file.readlines()) <= 65, name


@pytest.mark.rare("examples")
@pytest.mark.parametrize("name", PROGRAMS)
def test_python_example_runs(name, daemon, tmp_path):
    packages, expected = PROGRAMS[name]
    for package in packages:
        pytest.importorskip(package)
    arguments = [str(tmp_path / "file")] if name == "pytorch_offload.py" else []
    printed = run_python(daemon, name, *arguments)
    assert re.search(expected, printed), printed
    if name == "pytorch_offload.py":
        assert re.match(r"resumed .* after 100 steps\nstep 125: loss 0\.0", run_python(daemon, name, *arguments))


def test_masks_example_draws(daemon, tmp_path):
    pytest.importorskip("matplotlib")
    run_python(daemon, "draw_masks.py", str(tmp_path / "mask.png"))
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.rare("examples")
@pytest.mark.parametrize("name", RANKS)
def test_example_of_several_ranks_runs(name, daemon, own_daemon):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                           os.path.join(EXAMPLES, name)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          env=environment(daemon, own_daemon), timeout=300)
    assert done.returncode == 0 and re.search(RANKS[name], done.stdout), (done.stdout, done.stderr)


@pytest.mark.parametrize("language", ["c99", "c++20"])
def test_c_example_runs(language, daemon, tmp_path):
    program = str(tmp_path / "attention")
    compiler, kind = ("cc", "c") if language == "c99" else ("c++", "c++")
    subprocess.run([compiler, "-x", kind, f"-std={language}", os.path.join(EXAMPLES, "attention.c"), "-x", "none",
                    f"-I{ROOT}/client/c", os.path.join(NATIVE, "libattnd_client-attnd0.so"), f"-Wl,-rpath,{NATIVE}", "-lm",
                    "-o", program], check=True)
    assert "row 3: O 1.500, expected 1.500; dV 0.250" in run(daemon, program, daemon.address)


def test_cpp_example_runs(daemon):
    program = os.path.join(ROOT, "bazel-bin/examples/attention")
    assert "row 3: O 1.500, expected 1.500; dV 0.250" in run(daemon, program, daemon.address)


def test_notebook_runs_cell_by_cell(daemon, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setenv("ATTND_ADDRESS", daemon.address)
    with open(os.path.join(EXAMPLES, "quickstart.ipynb"), encoding="utf-8") as file:
        notebook = json.load(file)
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert re.search(r"step 100: loss 0\.0", capsys.readouterr().out)
    names["attnd"].torch.disconnect()
