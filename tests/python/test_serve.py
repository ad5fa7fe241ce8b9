"""attnd.serve: a daemon as a child of this process, from its start to its end."""
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import SERVER

import attnd


def serve(*arguments, **flags):
    return attnd.serve(*arguments, program=SERVER, **{"backend": "cpu", **flags})


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between open and read
        return False


def ends(process, seconds=20):
    deadline = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(process)


def expect_served(address):
    q = np.ones((1, 1, 4, 8), np.float32)
    with attnd.connect(address, timeout=20) as client:
        assert (client.forward(q, q, q).out == 1).all()


def test_serves_until_it_is_stopped(tmp_path):
    listen = ["0.0.0.0:0", f"unix:{tmp_path}/attnd.sock", "127.0.0.1:0"]
    with serve(listen, insecure=True, log=str(tmp_path / "log")) as daemon:
        assert daemon.addresses[1] == listen[1] and len(set(daemon.addresses)) == 3 and daemon.running
        for address in daemon.addresses:
            expect_served(address)
        assert socket.create_connection(daemon.metrics_address.split(":")).close() is None
        assert daemon.address in repr(daemon) and str(daemon.pid) in repr(daemon)
    assert not daemon.running and not is_alive(daemon.pid)
    assert "event=stopped" in (tmp_path / "log").read_text()
    daemon.stop()
    with serve(metrics_listen="") as other:
        assert other.metrics_address is None
        folder = os.path.dirname(other.log)
    assert not os.path.exists(folder)


PROGRAM = """
import os, sys, time, attnd
daemon = attnd.serve(program=sys.argv[1], backend="cpu")
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert daemon.running
print(daemon.pid, daemon.address, flush=True)
{end}
"""


SERVING = pytest.mark.rare("serving")


@pytest.mark.parametrize("end, code", [pytest.param("", 0, marks=SERVING), pytest.param("1 / 0", 1, marks=SERVING),
                                       pytest.param("os._exit(3)", 3, marks=SERVING), ("os.kill(os.getpid(), 9)", -9)])
def test_ends_with_its_process_however_that_ends(end, code):
    """And not with a fork of it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end), SERVER], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == code, done.stderr
    process = int(done.stdout.split()[0])
    assert ends(process)


@SERVING
def test_ctrl_c_in_a_terminal_does_not_reach_it():
    program = PROGRAM.format(end="time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", program, SERVER], stdout=subprocess.PIPE, text=True,
                              start_new_session=True)
    process, address = parent.stdout.readline().split()
    assert os.getpgid(int(process)) != parent.pid
    expect_served(address)
    parent.kill()
    parent.wait()
    assert ends(int(process))


def test_what_is_wrong_is_named(tmp_path, monkeypatch):
    for flags, error, words in (
            ({"max_calls": 0}, attnd.InvalidArgument, "max_calls: expected 1..1048576, got 0"),
            ({"no_such_flag": 1}, attnd.InvalidArgument, "--no_such_flag=1"),
            ({"port_file": "x"}, attnd.InvalidArgument, "port_file: expected to be left to serve()"),
            ({"listen": []}, attnd.InvalidType, "listen: expected"),
            ({"devices": {}}, attnd.InvalidType, "devices: expected"),
            ({"listen": "0.0.0.0:0"}, attnd.InvalidArgument, "--insecure"),
            ({"token_file": str(tmp_path / "none")}, attnd.NotFound, "token_file"),
            ({"timeout": 1e-9}, attnd.DeadlineExceeded, "did not serve within")):
        with pytest.raises(error) as raised:
            serve(**flags)
        assert words in str(raised.value), raised.value
    with pytest.raises(attnd.NotFound, match="cannot start attnd"):
        attnd.serve(program=str(tmp_path / "attnd"))
    with pytest.raises(attnd.PermissionDenied):
        attnd.serve(program=str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(attnd.NotFound, match="pip install the wheel attnd_server"):
        attnd.serve()


@pytest.mark.parametrize("log_format", ["text", pytest.param("json", marks=SERVING)])
def test_what_the_daemon_says_is_the_error(log_format):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(attnd.Unavailable, match=r"attnd did not start: .*\d+"):
            serve(f"127.0.0.1:{taken.getsockname()[1]}", log_format=log_format)
