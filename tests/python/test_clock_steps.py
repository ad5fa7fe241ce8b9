"""Steps of the system's clock, by days in either direction, break no call and expire nothing."""
import os
import subprocess
import sys

import pytest
from conftest import Daemon

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture
def moved_clock(tmp_path):
    """The environment of processes whose clock a file moves, and the file."""
    library, moved = tmp_path / "moved_clock.so", tmp_path / "moved"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, os.path.join(HERE, "moved_clock.c")], check=True)
    moved.write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(moved)}, str(moved)


def test_no_call_fails_and_nothing_expires(moved_clock, monkeypatch):
    environment, moved = moved_clock
    with monkeypatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        daemon = Daemon()
    try:
        run = subprocess.run([sys.executable, os.path.join(HERE, "clock_caller.py"), daemon.address, moved],
                             env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0 and run.stdout == "done\n", run.stdout + run.stderr + daemon.read_log()
    finally:
        daemon.stop()
