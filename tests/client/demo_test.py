"""Runs what `./dev demo` runs after the build, with a short training (pytest)."""
import os
import re
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run_demo(*arguments):
    return subprocess.run(["client/demo/demo.sh", *arguments], cwd=ROOT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=300)


@pytest.mark.rare("demos")
def test_demo_trains_checks_measures_and_drains():
    done = run_demo("--steps", "8", "--batch", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Loss in nats a character: .*: it fell", done.stdout)
    assert "the curves agree" in done.stdout
    assert re.search(r'^attnd_requests_total\{code="OK",method="Backward"\} [1-9]', done.stdout, re.M)
    assert done.stdout.endswith("attnd exited with status 0\n")


@pytest.mark.rare("demos")
def test_demo_fails_when_the_curves_differ_and_leaves_no_daemon():
    done = run_demo("--steps", "2", "--batch", "2", "--tolerance", "0")
    assert done.returncode == 1 and "THEY DIFFER" in done.stdout, done.stdout
    assert "event=serving" in done.stderr  # the log is shown
    port = re.search(r"goes to (127\.0\.0\.1:\d+)", done.stdout).group(1)
    health = subprocess.run(["bazel-bin/client/attnctl", "--address", port, "health"], cwd=ROOT, capture_output=True)
    assert health.returncode == 3
