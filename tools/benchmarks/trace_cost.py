#!/usr/bin/env python3
"""Measures what tracing costs: small calls within OpenTelemetry's spans, of which 1 % are sampled and go to a collector
(Rotel, of .deps/collector), beside calls whose caller makes as many spans that attnd does not see, in turns of 200.

    tools/benchmarks/trace_cost.py [ROUNDS]        after ./dev test tests/python/test_collector.py

Prints the processor time of the daemon and of the caller, and the wall time, a call: of the turn that is faster than nine
tenths of its kind, which others on the machine disturb least.
"""
import os
import socket
import statistics
import subprocess
import sys
import time

import numpy as np
from running_daemon import ROOT, RunningDaemon

CALLS, SAMPLED = 200, 0.01
sys.path[:0] = [os.path.join(ROOT, "client/python")]
sys.path += [os.path.join(ROOT, ".deps/observability"), os.path.join(ROOT, ".deps/collector")]
os.environ.setdefault("ATTND_CLIENT_LIBRARY", os.path.join(ROOT, ".build/python/native/libattnd_client-attnd0.so"))
import attnd  # noqa: E402
from opentelemetry.context import Context, attach, detach  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased  # noqa: E402


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as made:
        return made.getsockname()[1]


def processor_seconds(process):
    """Sums all its threads, to the nanosecond; they live as long as the process."""
    total = 0
    for thread in os.listdir(f"/proc/{process}/task"):
        with open(f"/proc/{process}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    port = free_port()
    rotel = subprocess.Popen([os.path.join(ROOT, ".deps/collector/rotel/rotel-agent"), "start", "--otlp-http-endpoint",
                              f"127.0.0.1:{port}", "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}", "--exporter",
                              "blackhole"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tracer = TracerProvider(sampler=TraceIdRatioBased(SAMPLED)).get_tracer("benchmark")
    q = np.ones((1, 1, 128, 64), np.float32)
    took = {False: [], True: []}
    with RunningDaemon("bazel-bin/server/attnd", "--backend", "cpu", "--otlp_endpoint", f"http://127.0.0.1:{port}") as daemon, \
            attnd.connect(daemon.address) as client:
        for turn in range(-4, 2 * rounds):
            traced = turn % 2 == 1
            before = processor_seconds(daemon.process.pid), time.process_time(), time.perf_counter()
            for _ in range(CALLS):
                with tracer.start_as_current_span("step"):
                    if not traced:
                        token = attach(Context())  # of no span
                    client.forward(q, q, q)
                    if not traced:
                        detach(token)
            after = processor_seconds(daemon.process.pid), time.process_time(), time.perf_counter()
            if turn >= 0:
                took[traced].append([1e6 * (now - then) / CALLS for now, then in zip(after, before)])
    rotel.kill()
    rotel.wait()
    for n, what in enumerate(("daemon, processor", "caller, processor", "wall")):
        plain, traced = (statistics.quantiles([turn[n] for turn in took[key]], n=10)[0] for key in (False, True))
        print(f"{what}: {plain:.1f} µs a call, {traced:.1f} traced")


main()
