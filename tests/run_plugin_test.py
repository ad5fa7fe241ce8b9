"""tests/run_plugin.py: which tests run, what is named as not run, and the lines of progress."""
import os
import re
import subprocess
import sys

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
SUITE = """
import time

import pytest


def test_short():
    pass


@pytest.mark.rare("links")
def test_long():
    time.sleep(1.2)
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest on SUITE, in two processes as `./dev test` does; returns what it printed."""
    (tmp_path / "test_suite.py").write_text(SUITE)

    def start(*arguments, period=30):
        code = f"import sys, pytest, run_plugin; run_plugin.PERIOD_SECONDS = {period}; sys.exit(pytest.main(sys.argv[1:]))"
        done = subprocess.run([sys.executable, "-B", "-c", code, "-q", "-p", "run_plugin", "-p", "no:cacheprovider",
                               "-n", "2",
                               *arguments, str(tmp_path)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": TESTS}, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    return start


def test_rare_tests_are_left_out_and_named_once(run, tmp_path):
    assert "1 passed" in run("--rare", "without", "--not-run", f"{tmp_path}/not_run")
    assert (tmp_path / "not_run").read_text() == "links: test_suite.py::test_long\n"


def test_the_rest_is_the_rare_tests_alone(run, tmp_path):
    assert "1 passed" in run("--rare", "only", "--not-run", f"{tmp_path}/not_run", "-k", "long")
    assert not (tmp_path / "not_run").exists()
    assert "2 passed" in run()


def test_progress_says_how_many_of_how_many_and_what_is_at_work(run):
    out = run(period=1)
    assert re.search(r"^\[1 / 2\] pytest, 1 s; at work: test_suite.py::test_long \(\d s\)$", out, re.M), out
