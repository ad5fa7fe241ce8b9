"""attnctl drain: ends a daemon behind a unix socket in peace, once, and waits for it."""
import subprocess
import time

from conftest import ATTNCTL, Daemon


def drain(address, *flags):
    return subprocess.run([ATTNCTL, "--address", address, "drain", *flags], capture_output=True, text=True, timeout=60)


def test_daemon_has_drained_when_the_command_returns(tmp_path):
    daemon = Daemon("--drain_delay", "0.5", listen=f"127.0.0.1:0,unix:{tmp_path}/socket")
    try:
        done = drain(f"unix:{tmp_path}/socket", "--wait", "30")
        assert done.returncode == 0 and done.stdout.endswith("has ended\n"), done.stdout + done.stderr
        assert daemon.process.wait(5) == 0 and "event=stopped" in daemon.read_log()
    finally:
        daemon.stop()


def test_a_drain_under_way_is_not_cut_short_and_a_wait_that_is_too_short_says_so(tmp_path):
    daemon = Daemon("--drain_delay", "4", listen=f"127.0.0.1:0,unix:{tmp_path}/socket")
    try:
        begun = time.monotonic()
        assert drain(f"unix:{tmp_path}/socket").returncode == 0
        done = drain(f"unix:{tmp_path}/socket", "--wait", "0.2")
        assert done.returncode == 1 and "still drains" in done.stderr and "already" in done.stdout
        assert drain(f"unix:{tmp_path}/socket", "--wait", "30").returncode == 0
        assert time.monotonic() - begun >= 4 and daemon.process.wait(5) == 0
    finally:
        daemon.stop()


def test_what_cannot_be_drained_is_refused(daemon, tmp_path):
    done = drain(daemon.address)
    assert done.returncode == 2 and "unix:PATH" in done.stderr
    done = drain(f"unix:{tmp_path}/nobody")
    assert done.returncode == 3 and "No such file" in done.stderr
    assert daemon.process.poll() is None
