"""The training example at a small size: the daemon's run follows the local one, through a kill and with dropout."""
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SERVER

torch = pytest.importorskip("torch")
EXAMPLES = os.path.join(ROOT, "client/python/examples")
sys.path.insert(0, EXAMPLES)
import attnd  # noqa: E402
import train_gpt  # noqa: E402

SMALL = dict(steps=30, layers=2, heads=2, dim=32, length=24, batch=4)
TEXT = open(os.path.join(ROOT, "LICENSE"), encoding="utf-8").read()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Small layers gain nothing from more, and lose much where other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.fixture
def killable():
    daemon = train_gpt.Daemon(SERVER, "cpu")
    yield daemon
    daemon.stop()


def test_daemon_killed_in_mid_run_ends_with_the_local_loss(killable, monkeypatch):
    settings, calls = train_gpt.Settings(**SMALL), []
    local = train_gpt.train(settings, TEXT)
    for name in ("forward", "backward"):
        method = getattr(attnd.Client, name)
        monkeypatch.setattr(attnd.Client, name, lambda *a, method=method, name=name, **o:
                            (calls.append(name), method(*a, **o))[1])
    remote = train_gpt.train_remotely(settings, TEXT, killable.address,
                                      lambda step: killable.kill_and_restart() if step == 12 else None)
    np.testing.assert_allclose(remote, local, rtol=1e-4)
    assert calls.count("forward") == calls.count("backward") == settings.steps * settings.layers
    assert local[-5:].mean() < local[:5].mean() - 0.3


def test_dropout_repeats_bitwise_with_the_same_seed_and_differs_with_another(daemon):
    curves = [train_gpt.train_remotely(train_gpt.Settings(**{**SMALL, "steps": 8}, dropout=0.2, seed=seed), TEXT,
                                       daemon.address) for seed in (1, 1, 2)]
    assert np.array_equal(curves[0], curves[1]) and not np.array_equal(curves[0], curves[2])


@pytest.mark.rare("demos")
def test_program_prints_and_plots_the_curves(tmp_path):
    sizes = [f"--{name}={value}" for name, value in {**SMALL, "steps": 6}.items()]
    done = subprocess.run([sys.executable, os.path.join(EXAMPLES, "train_gpt.py"), "--daemon", SERVER,
                           "--kill-at", "3", "--plot", str(tmp_path / "loss.png"), *sizes],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attnd, cpu engine: final losses differ by" in done.stdout
    assert "attnd, cpu engine: the daemon was killed before step 3 and started again; the run went on" in done.stdout
    if train_gpt.plot(str(tmp_path / "here.png"), CURVES):  # matplotlib may be there and not fit NumPy
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib is not installed" in done.stdout


def test_a_gpus_daemon_is_trained_with_beside_the_cpus_where_there_is_one(monkeypatch):
    assert train_gpt.starts(SERVER, "cpu") and not train_gpt.starts(SERVER, "none of attnd's")
    for gpu, expected in ((False, [("cpu", None)]), (True, [("cpu", None), ("cuda", "f16")])):
        monkeypatch.setattr(train_gpt, "starts", lambda program, backend, gpu=gpu: gpu and backend == "cuda")
        assert [engine[1:] for engine in train_gpt.engines(SERVER, None, None)] == expected
    assert [engine[1:] for engine in train_gpt.engines(SERVER, "reference", "bf16")] == [("reference", "bf16")]


CURVES = {"here": np.linspace(3, 1, 50), "daemon": np.linspace(3, 1, 50)}


def test_curves_are_plotted_where_matplotlib_is_installed(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    assert train_gpt.plot(str(tmp_path / "loss.png"), CURVES)
    pixels = image.imread(tmp_path / "loss.png")[..., :3]
    colours = {tuple(colour) for colour in np.round(pixels.reshape(-1, 3) * 255).astype(int)}
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # matplotlib's first two: curves that coincide are both seen


def test_a_kill_is_drawn(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    columns = []
    for kill_at in (None, 20):
        assert train_gpt.plot(str(tmp_path / "loss.png"), CURVES, kill_at)
        black = image.imread(tmp_path / "loss.png")[..., :3].sum(-1) < 1.5
        columns.append((black.sum(0) > 0.2 * len(black)).sum())  # besides the axes
    assert columns[1] > columns[0]


def test_nothing_is_plotted_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not train_gpt.plot(str(tmp_path / "loss.png"), CURVES)
    assert not os.listdir(tmp_path)
