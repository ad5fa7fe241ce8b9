"""Measures what wire.json and latency.json hold, on this machine: bytes a second over connections and how long calls take.

    bazel build //server:attnd //tools/benchmarks:null_attnd //tools/wire_bench
    PYTHONPATH=client/python python3 tools/benchmarks/measure_plots.py --machine "two cores of Zen 5, 2026-11-26"
    ./dev plots

Needs the client's library as tests/python have it (./dev test makes .build/python/native).
"""
import argparse
import json
import os
import re
import subprocess
import threading
import time

import numpy as np
from running_daemon import ROOT, RunningDaemon

RESULTS = os.path.join(ROOT, "tools/benchmarks/results")
SHARES = [round(n / 100, 2) for n in range(100)] + [0.995, 0.999]


def measure_wire(connections, rounds):
    """{name: median GB/s for each number of connections}"""
    speeds = {}
    with RunningDaemon("bazel-bin/tools/benchmarks/null_attnd") as daemon:
        for _ in range(rounds):
            rows = json.loads(subprocess.run(
                [os.path.join(ROOT, "bazel-bin/tools/wire_bench/wire_bench"), "--address", daemon.address, "-o", "json",
                 "--mode", "stream", "--traffic", "echo,forward", "--connections", ",".join(map(str, connections)),
                 "--duration", "0.6"], check=True, capture_output=True, text=True).stdout)["rows"]
            for row in rows:
                assert row["errors"] == 0, row
                for name, traffic, way in (("echo, each way", "echo", "up"), ("forward, up", "forward", "up"),
                                           ("forward, down", "forward", "down")):
                    if traffic == row["traffic"]:
                        speeds.setdefault(name, {}).setdefault(row["channels"], []).append(row[way + "_bytes_per_second"])
    return {name: [round(float(np.median(of[n])) / 1e9, 3) for n in connections] for name, of in speeds.items()}


def measure_latency(calls):
    """{name: seconds of calls of 4 KiB}: alone, and beside a caller of long ones."""
    import attnd
    q = np.zeros((1, 1, 4, 256), np.float32)
    k = np.zeros((1, 1, 1, 256), np.float32)
    big = np.zeros((1, 8, 1024, 64), np.float32)
    found = {}
    with RunningDaemon("bazel-bin/server/attnd") as daemon, attnd.connect(daemon.address) as client, \
            attnd.connect(daemon.address) as other:
        def timed(make):
            seconds = []
            for n in range(calls + 200):
                begin = time.perf_counter()
                make()
                seconds.append(time.perf_counter() - begin)
            return seconds[200:]
        found["4 KiB, idle daemon"] = timed(lambda: client.forward(q, k, k))
        found["1 head, N = 128, idle"] = timed(lambda: client.forward(*[big[:, :1, :128].copy()] * 3))
        ended = threading.Event()

        def load():
            while not ended.is_set():
                other.forward(big, big, big, causal="top_left")
        beside = threading.Thread(target=load)
        beside.start()
        found["4 KiB beside long calls"] = timed(lambda: client.forward(q, k, k))
        ended.set()
        beside.join()
    return found


def write(name, result):
    with open(os.path.join(RESULTS, name + ".json"), "w") as file:
        file.write(re.sub(r"\[[^][]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(result, indent=1)) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--machine", required=True, help="what and when, for the plots' titles")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=2000)
    chosen = parser.parse_args()
    latency = measure_latency(chosen.calls)
    write("latency", {"title": f"Calls over TCP loopback: {chosen.machine}", "shares": SHARES,
                      "series": {name: [round(1e3 * float(np.quantile(seconds, share)), 4) for share in SHARES]
                                 for name, seconds in latency.items()}})
    connections = [1, 2, 4, 8, 12]
    write("wire", {"title": f"8 MiB tensors over TCP loopback: {chosen.machine}", "connections": connections,
                   "series": measure_wire(connections, chosen.rounds)})


if __name__ == "__main__":
    main()
