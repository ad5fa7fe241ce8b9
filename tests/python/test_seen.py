"""Operators see: one trace from a caller's span to a daemon's stages in an OTLP collector, what clients had to do, and
few series of a daemon that nobody uses."""
import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from conftest import ATTNCTL, EMULATED, ROOT, Daemon
from test_haproxy import wait_until
from test_modules import small_layout

import attnd
from attnd import metrics

sys.path.append(os.path.join(ROOT, ".deps/observability"))  # where `./dev test` puts it
import prometheus_client  # noqa: E402
from opentelemetry.sdk import metrics as otel_metrics  # noqa: E402
from opentelemetry.sdk import trace as otel_trace  # noqa: E402
from opentelemetry.sdk.metrics import export  # noqa: E402
from opentelemetry.sdk.trace import sampling  # noqa: E402

Q = np.ones((1, 1, 4, 8), np.float32)
STAGES = ["receive", "queue", "upload", "kernel", "download", "send"]


class Collector:
    """Takes OTLP over HTTP as JSON."""

    def __init__(self):
        spans = self.spans = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/json")
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in document["resourceSpans"]:
                    attributes = {one["key"]: one["value"]["stringValue"] for one in resource["resource"]["attributes"]}
                    assert attributes["service.name"] == "attnd"
                    spans.extend(span for scope in resource["scopeSpans"] for span in scope["spans"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, trace_id):
        return [span for span in self.spans if span["traceId"] == trace_id]

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


def check_stages(collector, root, expected=STAGES):
    """They follow one another within the call."""
    stages = [one for one in collector.of(root["traceId"]) if one["parentSpanId"] == root["spanId"]]
    assert [one["name"] for one in stages] == expected
    times = [int(one[name]) for one in stages for name in ("startTimeUnixNano", "endTimeUnixNano")]
    times = [int(root["startTimeUnixNano"]), *times, int(root["endTimeUnixNano"])]
    assert times == sorted(times)


@contextlib.contextmanager
def daemon_with(*flags):
    made = Daemon(*flags)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def tracer():
    """By a sampler that takes every trace whose root is named "sampled"."""
    class ByName(sampling.Sampler):
        def should_sample(self, parent_context, trace_id, name, *_, **__):
            taken = sampling.Decision.RECORD_AND_SAMPLE if name == "sampled" else sampling.Decision.DROP
            return sampling.SamplingResult(taken)

        def get_description(self):
            return "by name"
    return otel_trace.TracerProvider(sampler=ByName()).get_tracer("test")


def test_one_trace_reaches_from_the_callers_span_to_the_kernel(tracer):
    collector = Collector()
    with daemon_with("--otlp_endpoint", collector.url, "--log_level", "debug") as daemon, \
            attnd.connect(daemon.address) as client:
        with tracer.start_as_current_span("dropped") as span:
            dropped = client.forward(Q, Q, Q).receipt.trace_id
            assert dropped == f"{span.get_span_context().trace_id:032x}"
        with tracer.start_as_current_span("sampled") as span:
            result = client.forward(Q, Q, Q)
            client.backward(Q, result)
            parent = f"{span.get_span_context().span_id:016x}"
        assert client.forward(Q, Q, Q).receipt.trace_id == ""
        trace = result.receipt.trace_id
        wait_until(lambda: len(collector.of(trace)) >= 14, 30)
        roots = {span["name"]: span for span in collector.of(trace)
                 if span["parentSpanId"] == parent}
        assert set(roots) == {"attnd.v1.Attention/Forward", "attnd.v1.Attention/Backward"}
        for root in roots.values():
            check_stages(collector, root)
        assert not collector.of(dropped)
        assert f"trace_id={dropped}" in daemon.read_log() and f"trace_id={trace}" in daemon.read_log()
        assert daemon.metric("attnd_spans_dropped_total") == 0
    collector.stop()


def test_the_stages_of_a_modules_calls_are_in_the_trace(tracer, tmp_path):
    collector = Collector()
    with daemon_with("--otlp_endpoint", collector.url, "--module_state_dir", str(tmp_path)) as daemon, \
            attnd.connect(daemon.address) as client:
        with tracer.start_as_current_span("sampled") as span:
            module = attnd.register(small_layout(), client, name="traced", optimizer=attnd.AdamW(), max_rows=64,
                                    kept_rows=64)
            module.put({p.name: np.ones(p.shape, np.float32) for p in module.layout.parameters})
            y, kept = module.forward(np.ones((2, 5, 16), np.float32), keep=True)
            module.backward(y, kept)
            module.step(lr=1e-3)
            module.get()
            module.release()
            trace = f"{span.get_span_context().trace_id:032x}"

        def roots():
            return {one["name"].rpartition("/")[2]: one for one in collector.of(trace) if "/" in one["name"]}
        wait_until(lambda: "Release" in roots(), 30)
        for name in ("Forward", "Backward", "GetTensors"):
            check_stages(collector, roots()[name])
        for name in ("PutTensors", "Step"):
            check_stages(collector, roots()[name], [*STAGES[:-1], "save", "send"])
        for name in ("Register", "Release"):
            check_stages(collector, roots()[name], [])
    collector.stop()


@pytest.mark.rare("observability")
def test_uploads_and_downloads_of_a_module_on_a_gpu_have_times(tracer):
    collector = Collector()
    daemon = Daemon("--otlp_endpoint", collector.url, program=EMULATED, backend="cuda")
    try:
        with attnd.connect(daemon.address, timeout=120) as client, tracer.start_as_current_span("sampled"):
            module = attnd.register(small_layout(layers=1, element="f16"), client, name="traced", max_rows=64)
            module.put({p.name: np.ones(p.shape, np.float32) for p in module.layout.parameters})
            module.forward(np.ones((2, 5, 16), np.float16))
        forwards = []

        def has_come():
            forwards[:] = [one for one in collector.spans if one["name"].endswith("/Forward")]
            return forwards
        wait_until(has_come, 30)
        (root,) = forwards
        check_stages(collector, root)
        took = {one["name"]: int(one["endTimeUnixNano"]) - int(one["startTimeUnixNano"]) for one in collector.spans
                if one["parentSpanId"] == root["spanId"]}
        assert took["upload"] > 0 and took["download"] > 0 and took["kernel"] > took["upload"]
    finally:
        daemon.stop()
        collector.stop()


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.rare("observability"))])
def test_no_call_waits_for_a_collector_that_is_gone_or_silent(answers, tracer):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers:
            silent.listen()
        with daemon_with("--drain_delay", "0", "--otlp_endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}") as daemon, \
                attnd.connect(daemon.address) as client:
            begin = time.monotonic()
            with tracer.start_as_current_span("sampled"):
                for _ in range(50):
                    client.forward(Q, Q, Q, timeout=10)
            assert time.monotonic() - begin < 10
            wait_until(lambda: daemon.metric("attnd_spans_dropped_total") == 50, 30)
            assert daemon.metric("attnd_spans_exported_total") == 0
            begin = time.monotonic()
            assert daemon.kill(signal.SIGTERM) == 0 and time.monotonic() - begin < 15


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "https://127.0.0.1:4318", "http://127.0.0.1", "http://:4318",
                                      "http://a:70000", "http://a:4318/v1/traces"])
def test_endpoints_that_are_none_are_refused(endpoint):
    with pytest.raises(RuntimeError, match="otlp_endpoint: expected http://host:port of a collector"):
        Daemon("--otlp_endpoint", endpoint)


# ---- What clients had to do.

def since(before):
    return attnd.metrics.Counters(*(now - then for now, then in zip(metrics.totals(), before)))


@pytest.mark.rare("observability")
def test_clients_count_retries_failovers_and_lost_leases():
    before, one, other = metrics.totals(), Daemon(), Daemon()
    try:
        with attnd.connect([one.address, other.address], timeout=30) as client:
            kept = [client.forward(Q, Q, Q, keep=True) for _ in range(4)]
            assert since(before) == metrics.Counters(calls=4)
            one.kill()
            other.kill(signal.SIGTERM)
            one.start()
            for result in kept:
                client.backward(Q, result)
            for _ in range(8):
                client.forward(Q, Q, Q)
        found = since(before)
        assert found.calls == 16 and found.failed_calls == 0 and found.retries > 0 and found.failovers > 0, found
        assert found.leases_lost > 0 and found.seconds_waiting >= 0 and found.replays == 0, found
        one.kill()
        with attnd.connect(one.address, retries=0) as client, pytest.raises(attnd.Unavailable):
            client.forward(Q, Q, Q)
        assert since(before).failed_calls == 1 and since(before).calls == 17, "of clients that are gone, too"
    finally:
        one.stop()
        other.stop()


def test_clients_count_replays_of_modules(own_daemon, rng):
    before = metrics.totals()
    with attnd.connect(own_daemon.address, wait_for_ready=True, timeout=60) as client:
        module = attnd.register(small_layout(), client, name="replayed", optimizer=attnd.AdamW(), max_rows=64)
        module.put({p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in small_layout().parameters})
        own_daemon.kill()
        own_daemon.start()
        module.forward(np.float32(rng.normal(size=(2, 5, 16))))
        module.release()
    assert since(before).replays >= 1


def test_prometheus_and_opentelemetry_take_the_counters(daemon):
    registry, reader = prometheus_client.CollectorRegistry(), export.InMemoryMetricReader()
    provider = otel_metrics.MeterProvider(metric_readers=[reader])
    metrics.to_prometheus(registry)
    metrics.to_opentelemetry(provider.get_meter("test"))
    with attnd.connect(daemon.address) as client:
        client.forward(Q, Q, Q)
    now = metrics.totals()
    text = prometheus_client.generate_latest(registry).decode()
    assert f"attnd_client_calls_total {float(now.calls)}" in text and "attnd_client_waiting_seconds_total" in text
    read = {one.name: one.data.data_points[0].value for resource in reader.get_metrics_data().resource_metrics
            for scope in resource.scope_metrics for one in scope.metrics}
    assert read["attnd.client.calls"] == now.calls and len(read) == len(now)


# ---- The daemon's own.

def test_a_daemon_that_nobody_uses_has_at_most_500_series(own_daemon):
    text = urllib.request.urlopen(f"http://127.0.0.1:{own_daemon.metrics_port}/metrics", timeout=10).read().decode()
    series = [line for line in text.splitlines() if not line.startswith("#")]
    print(f"{len(series)} series")
    assert len(series) <= 500


def test_modules_of_all_addresses_are_listed_and_released(own_daemon):
    other = Daemon()
    try:
        addresses, clients = f"{own_daemon.address},{other.address}", []
        for name, address in (("a", own_daemon.address), ("b", other.address)):
            clients.append(attnd.connect(address))
            attnd.register(small_layout(), clients[-1], name=name, max_rows=64)

        def attnctl(*arguments):
            return subprocess.run([ATTNCTL, "--address", addresses, "-o", "json", *arguments], capture_output=True,
                                  text=True, timeout=60)
        listed = json.loads(attnctl("module", "list").stdout)
        assert [(one["name"], one["address"]) for one in listed] == [("a", own_daemon.address), ("b", other.address)]
        assert attnctl("module", "release", "b").returncode == 0
        assert [one["name"] for one in json.loads(attnctl("module", "list").stdout)] == ["a"]
        missing = attnctl("module", "release", "b")
        assert missing.returncode == 4 and "NOT_FOUND" in missing.stderr, missing
        other.kill()
        listed = attnctl("module", "list")
        assert [one["name"] for one in json.loads(listed.stdout)] == ["a"] and listed.returncode == 3
        assert re.search(other.address, listed.stderr)
        for client in clients:
            client.close()
    finally:
        other.stop()
