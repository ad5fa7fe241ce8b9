"""wire_bench and compare.py of tools/wire_bench measure what they say, however briefly (pytest)."""
import json
import os
import re
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.rare("wire bench")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WIRE_BENCH = os.path.join(ROOT, "bazel-bin", "tools", "wire_bench", "wire_bench")
PEER_ECHO = os.path.join(ROOT, "bazel-bin", "tools", "wire_bench", "peer_echo")
SENT_TO_RECEIVED = {"echo": 1, "forward": 3, "backward": 5 / 3}  # tensors of q's size


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """Addresses over TCP and a unix socket, and the URL of the metrics."""
    folder = tmp_path_factory.mktemp("daemon")
    port, metrics_port, path = folder / "port", folder / "metrics_port", f"/tmp/attnd_wire_bench_{os.getpid()}"
    process = subprocess.Popen([os.path.join(ROOT, "bazel-bin/server/attnd"), "--listen", f"127.0.0.1:0,unix:{path}",
                                "--port_file", port, "--metrics_listen", "127.0.0.1:0", "--metrics_port_file", metrics_port,
                                "--backend", "cpu", "--drain_delay", "0"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not (port.exists() and metrics_port.exists()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        yield {"tcp": f"127.0.0.1:{port.read_text().split()[0]}", "unix": f"unix:{path}",
               "metrics": f"http://127.0.0.1:{metrics_port.read_text().strip()}/metrics"}
    finally:
        process.terminate()
        process.communicate()


def bench(address, *arguments):
    done = subprocess.run([WIRE_BENCH, "--address", address, "-o", "json", "--duration", "0.4", "--warmup", "0.1",
                           *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["rows"]


def copies_of_each_byte(daemon, address, mode):
    rows = bench(daemon[address], "--traffic", "echo,forward,backward", "--mode", mode, "--connections", "1,3", "--mib",
                 "0.25", "--metrics", daemon["metrics"])
    assert [(row["traffic"], row["channels"]) for row in rows] == [(t, c) for t in SENT_TO_RECEIVED for c in (1, 3)]
    for row in rows:
        assert row["mode"] == mode and row["tensor_bytes"] == 256 << 10 and row["errors"] == 0
        ratio = row["up_bytes_per_second"] / row["down_bytes_per_second"]
        assert ratio == pytest.approx(SENT_TO_RECEIVED[row["traffic"]], rel=0.02)
        assert 0 < row["p50_seconds"] <= row["p99_seconds"]
        assert row["client_cpu_seconds_per_gb"] > 0 and row["daemon_cpu_seconds_per_gb"] > 0
    return [row["copies_per_received_byte"] for row in rows]


def test_a_message_is_copied_once(daemon):
    assert copies_of_each_byte(daemon, "tcp", "unary") == pytest.approx([1] * 6, abs=0.02)


def test_chunks_are_copied_once_at_most(daemon):
    assert all(0 <= copies <= 1.02 for copies in copies_of_each_byte(daemon, "tcp", "stream"))


def test_shared_memory_is_copied_by_the_caller_alone(daemon):
    assert copies_of_each_byte(daemon, "unix", "memfd") == pytest.approx([0] * 6, abs=0.02)


def test_small_calls_run_beside(daemon):
    row, = bench(daemon["tcp"], "--traffic", "echo", "--mode", "unary", "--connections", "2", "--small-calls", "--mib", "1")
    assert 0 < row["small_p50_seconds"] <= row["small_p99_seconds"]
    assert "copies_per_received_byte" not in row  # nobody named the metrics


def test_peers_are_compared_in_one_table():
    pytest.importorskip("grpc")
    ways = ["python-grpcio", "attnd, cpu engine, unary", "attnd, cpu engine, stream"]
    if os.path.exists(PEER_ECHO):
        ways += ["plain sockets", "gRPC generated stub, bytes"]
    done = subprocess.run([sys.executable, os.path.join(ROOT, "tools/wire_bench/compare.py"), "--rounds", "1",
                           "--seconds", "0.4", "--mib", "1", "--connections", "2", "--depth", "1", "--only", *ways],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^(\S.*?) {2,}(\d+\.\d+) ", done.stdout, re.M))
    assert set(rows) == set(ways), done.stdout + done.stderr
    assert all(float(rate) > 0 for rate in rows.values())
