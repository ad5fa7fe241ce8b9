"""client/python/examples/train_fleet.py, which `./dev demo-fleet` runs: workers, and daemons that are drained, frozen and
killed."""
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SERVER

pytest.importorskip("torch")

EXAMPLES = os.path.join(ROOT, "client/python/examples")
ENVOY = os.path.join(ROOT, ".deps/cluster/envoy/_bin/envoy")
sys.path.insert(0, EXAMPLES)


@pytest.mark.rare("demos")
def test_workers_outlive_what_happens_to_a_fleet(tmp_path):
    done = subprocess.run([sys.executable, os.path.join(EXAMPLES, "train_fleet.py"), "--daemon", SERVER, "--envoy", ENVOY,
                           "--steps", "45", "--plot", str(tmp_path / "fleet.png")],
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for trouble in ("the daemon is drained", "the daemon is frozen", "the daemon is killed", "a worker is killed"):
        assert re.search(rf"step \d+: {trouble}; the next step came \d+\.\d s later", done.stdout)
    assert re.search(r"losses differ by \S+ at most; \d+ of 45 steps were done again", done.stdout)


def test_troubles_are_drawn_where_matplotlib_is_installed(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    import train_fleet
    seen = [{"step": n, "loss": 3 - n / 10, "time": 100.0 + n} for n in range(10)]
    widths = []
    for troubles in ({}, {"the daemon is killed": (103.0, 4.0)}):
        assert train_fleet.plot(str(tmp_path / "fleet.png"), {"here": [1, 2], "there": [1, 2]}, seen, troubles)
        pixels = image.imread(tmp_path / "fleet.png")[..., :3]
        widths.append((abs(pixels - pixels[2, 2]).sum(-1) > 0.05).mean())
    assert widths[1] > widths[0] + 0.05
