"""A real collector (Rotel) takes the spans of a worker, which OpenTelemetry's own exporter sends, and the daemon's: one
trace leads from the worker's step to the stages of a module's kernels."""
import contextlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, Daemon, unused_port
from test_haproxy import wait_until
from test_modules import small_layout

import attnd

sys.path += [os.path.join(ROOT, ".deps/observability"), os.path.join(ROOT, ".deps/collector")]  # where `./dev test` puts it
pytestmark = pytest.mark.rare("collector")
ROTEL = os.path.join(ROOT, ".deps/collector/rotel/rotel-agent")


class Collector:
    def __init__(self, folder):
        self._log, port = folder / "log", unused_port()
        self.url = f"http://127.0.0.1:{port}"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [ROTEL, "start", "--otlp-http-endpoint", f"127.0.0.1:{port}", "--otlp-grpc-endpoint",
                 f"127.0.0.1:{unused_port()}", "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity",
                 "detailed"], stdout=log, stderr=log)
        wait_until(lambda: "Starting Rotel" in self._log.read_text())

    def spans(self):
        """{id: (service, trace, parent's id, name)}, as it understood them."""
        found, service = {}, None
        for part in re.split(r"^(?=Span #|ResourceSpans #)", self._log.read_text(), flags=re.M):
            if match := re.search(r"-> service\.name: Str\((.*)\)", part):
                service = match[1]
            if part.startswith("Span #"):
                values = dict(re.findall(r"^ +(Trace ID|Parent ID|ID|Name) +: *(.*)$", part, re.M))
                if "Name" in values:  # else it is being written
                    found[values["ID"]] = (service, values["Trace ID"], values["Parent ID"], values["Name"])
        return found

    def stop(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def collector(tmp_path):
    if not os.access(ROTEL, os.X_OK):
        os.chmod(ROTEL, 0o755)
    made = Collector(tmp_path)
    yield made
    made.stop()


@contextlib.contextmanager
def step(endpoint):
    """A worker's span, sent when it is over."""
    from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    provider = TracerProvider(resource=Resource.create({"service.name": "worker"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")))
    with provider.get_tracer("worker").start_as_current_span("step") as span:
        yield f"{span.get_span_context().trace_id:032x}"
    provider.shutdown()


def test_one_trace_leads_from_a_workers_step_to_the_stages_of_kernels(collector):
    daemon = Daemon("--otlp_endpoint", collector.url)
    try:
        with attnd.connect(daemon.address) as client, step(collector.url) as trace:
            module = attnd.register(small_layout(), client, name="traced", optimizer=attnd.AdamW(), max_rows=64,
                                    kept_rows=64)
            module.put({p.name: np.ones(p.shape, np.float32) for p in module.layout.parameters})
            y, kept = module.forward(np.ones((2, 5, 16), np.float32), keep=True)
            module.backward(y, kept)
            q = np.ones((1, 1, 4, 8), np.float32)
            client.forward(q, q, q)

        def chains():
            """From each kernel's span up to its worker's."""
            spans, found = collector.spans(), set()
            for service, of_trace, parent, name in spans.values():
                call, top = spans.get(parent), None
                if name == "kernel" and call is not None:
                    top = spans.get(call[2])
                if top is not None and {of_trace, call[1], top[1]} == {trace}:
                    found.add((top[0], top[3], service, call[3]))
            return found
        calls = ("attnd.v1.Modules/Forward", "attnd.v1.Modules/Backward", "attnd.v1.Attention/Forward")
        wait_until(lambda: chains() >= {("worker", "step", "attnd", call) for call in calls}, 30)
        assert daemon.metric("attnd_spans_dropped_total") == 0
    finally:
        daemon.stop()
