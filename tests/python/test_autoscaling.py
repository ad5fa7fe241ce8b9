"""Series that scale a fleet: those of the chart's autoscalers rise and fall with a load of training alone, as they stand and
as a real Prometheus answers the chart's own queries."""
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
from conftest import ROOT, unused_port
from test_haproxy import wait_until
from test_modules import small_layout

import attnd

sys.path.append(os.path.join(ROOT, "deploy"))
from manifests import helm_documents  # noqa: E402

PROMETHEUS = os.path.join(ROOT, ".deps/prometheus/usr/bin/prometheus")  # where `./dev test` unpacks it
LABELS = {"job": "attnd", "namespace": "attnd", "pod": "attnd-7c9f8d6b54-x2x9q"}


def autoscaler(kind):
    documents = helm_documents({"autoscaling": {"kind": kind}}, name="attnd")
    (spec,) = [d["spec"] for d in documents if d["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    return spec


def targets_of_hpa():
    """{series: the value of a pod that is aimed at}"""
    pods = [one["pods"] for one in autoscaler("hpa")["metrics"]]
    return {one["metric"]["name"]: int(one["target"]["averageValue"].rstrip("m")) / 1000 for one in pods}


class Training:
    """Workers that train, each a module of its own, one call at a time."""

    def __init__(self, address, workers):
        self._address, self._going, self._errors = address, True, []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(workers)]
        self._ready = threading.Barrier(workers + 1)

    def _run(self, number):
        try:
            x = np.ones((4, 64, 128), np.float32)
            with attnd.connect(self._address, timeout=120) as client:
                module = attnd.register(small_layout(width=128), client, name=f"worker{number}", optimizer=attnd.AdamW(),
                                        max_rows=256, kept_rows=256)
                module.put({p.name: np.full(p.shape, 0.01, np.float32) for p in module.layout.parameters})
                self._ready.wait(120)
                while self._going:
                    y, kept = module.forward(x, keep=True)
                    module.backward(y, kept)
                    module.step(lr=1e-4)
                module.release()
        except BaseException as error:
            self._errors.append(error)
            self._ready.abort()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):  # __exit__ tells of the errors
            self._ready.wait(120)
        if self._errors:
            self.__exit__()
        return self

    def __exit__(self, *_):
        self._going = False
        for thread in self._threads:
            thread.join()
        assert not self._errors, self._errors


def mean_queue(daemon, seconds):
    end, values = time.monotonic() + seconds, []
    while time.monotonic() < end:
        values.append(daemon.metric("attnd_queue_estimated_seconds"))
    return np.mean(values)


def test_series_of_the_autoscaler_rise_and_fall_with_training_alone(own_daemon):
    assert set(targets_of_hpa()) == {"attnd_queue_estimated_seconds", "attnd_busy_ratio"}
    assert all(own_daemon.metric(name) == 0 for name in targets_of_hpa())
    queues = []
    for workers in (1, 6):
        with Training(own_daemon.address, workers):
            mean_queue(own_daemon, 0.5)  # until calls have told how long they take
            queues.append(mean_queue(own_daemon, 1))
    busy = own_daemon.metric("attnd_busy_ratio")
    print(f"queues {queues}, busy {busy}")
    assert queues[1] > 2 * queues[0] and busy > 0
    assert own_daemon.metric("attnd_queue_estimated_seconds") == 0
    wait_until(lambda: own_daemon.metric("attnd_busy_ratio") < 0.9 * busy)


# ---- As a cluster reads them.

@contextlib.contextmanager
def prometheus_of(daemon, folder):
    """A function that evaluates a query: its only value, None without one."""
    port = unused_port()
    target = {"targets": [f"127.0.0.1:{daemon.metrics_port}"], "labels": {k: v for k, v in LABELS.items() if k != "job"}}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [
        {"job_name": LABELS["job"], "scrape_interval": "1s", "static_configs": [target]}]}))
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    def query(text):
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        try:
            found = json.load(urllib.request.urlopen(url, timeout=10))["data"]["result"]
        except OSError:
            return None
        return float(found[0]["value"][1]) if found else None
    try:
        wait_until(lambda: query("up") == 1, 60)
        yield query
    finally:
        process.kill()
        process.wait()


def adapted(series):
    """The query of prometheus-adapter, as the rule in the component `autoscaling` makes it."""
    with open(os.path.join(ROOT, "deploy/kubernetes/components/autoscaling/kustomization.yaml")) as file:
        (rule,) = [line for line in file if "metricsQuery" in line]
    labels = f'namespace="{LABELS["namespace"]}",pod="{LABELS["pod"]}"'
    text = rule.split("'")[1]
    return text.replace("<<.GroupBy>>", "pod").replace("<<.Series>>", series).replace("<<.LabelMatchers>>", labels)


@pytest.mark.rare("autoscaling")
def test_both_autoscalers_want_more_pods_while_workers_train_and_not_afterwards(own_daemon, tmp_path):
    triggers = [trigger["metadata"] for trigger in autoscaler("keda")["triggers"]]
    wishes = {"hpa": [(adapted(name), target) for name, target in targets_of_hpa().items()],
              "keda": [(one["query"], float(one["threshold"])) for one in triggers]}
    with prometheus_of(own_daemon, tmp_path) as query:
        def pods(kind):
            """As Kubernetes' horizontal pod autoscaler reckons, of one pod: by the metric that wants most."""
            values = [(query(text), target) for text, target in wishes[kind]]
            assert all(value is not None for value, _ in values), "each series is there"
            return max(max(1, math.ceil(value / target)) for value, target in values)
        assert {kind: pods(kind) for kind in wishes} == {"hpa": 1, "keda": 1}
        with Training(own_daemon.address, 6):
            for kind in wishes:
                wait_until(lambda kind=kind: pods(kind) > 1, 90)
        for kind in wishes:
            wait_until(lambda kind=kind: pods(kind) == 1, 90)
