"""deploy/envoy/envoy.yaml as shipped, run by Envoy in front of two daemons: calls, frozen and drained daemons, and modules,
each of which stays at one daemon."""
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request

import numpy as np
import oracle
import pytest
import yaml
from conftest import ROOT, Daemon, close
from test_haproxy import aged, certificates, channel_of, wait_until  # noqa: F401
from test_haproxy import check_header_spreads, check_is_told_not_sticky, check_trains_without_replay
from test_modules import small_layout

import attnd

pytestmark = pytest.mark.rare("envoy")
ENVOY = os.path.join(ROOT, ".deps/cluster/envoy/_bin/envoy")


def configuration(folder, daemons, ports, change=None):
    """The shipped file, with what a site sets."""
    with open(os.path.join(ROOT, "deploy/envoy/envoy.yaml")) as file:
        text = file.read().replace("/etc/envoy/attnd/", f"{folder}/")
    made = yaml.safe_load(text)
    made["admin"]["address"]["socket_address"]["port_value"] = ports[0]
    made["static_resources"]["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": ports[1]}
    endpoints = []
    for daemon in daemons:
        host, port = daemon.address.split(":")
        endpoints.append({"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}})
    for cluster in made["static_resources"]["clusters"]:
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    if change is not None:
        change(made["static_resources"])
    return made


class Envoy:
    def __init__(self, certificates, folder, daemons, change=None):  # noqa: F811
        self.folder = certificates
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.admin, port = (listener.getsockname()[1] for listener in listeners)
        for listener in listeners:
            listener.close()
        path = folder / "envoy.yaml"
        path.write_text(yaml.safe_dump(configuration(certificates, daemons, (self.admin, port), change)))
        self.address, self._log = f"localhost:{port}", folder / "log"
        with open(self._log, "w") as log:
            self.process = subprocess.Popen([ENVOY, "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(lambda: self.process.poll() is not None or self.healthy() == len(daemons))
        assert self.process.poll() is None, self._log.read_text()

    def healthy(self, cluster="calls"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/clusters", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0
        return sum(line.startswith(f"{cluster}::127.") and line.endswith("health_flags::healthy")
                   for line in text.splitlines())

    def weights(self):
        """{port: weight} of the daemons, for attention."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/clusters", timeout=5) as answer:
            found = re.findall(r"^calls::127\.0\.0\.1:(\d+)::weight::(\d+)$", answer.read().decode(), re.M)
        return {int(port): int(weight) for port, weight in found}

    def connect(self, **options):
        c = self.folder
        tls = attnd.TLS(ca=f"{c}/clients.pem", cert=f"{c}/trainer.crt", key=f"{c}/trainer.key")
        return attnd.connect(self.address, **{"tls": tls, "timeout": 30, **options})

    def channel(self):
        return channel_of(self.address, self.folder)

    def stop(self):
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def daemons():
    made = [Daemon("--memory_limit_mib", "256", "--drain_delay", "3") for _ in range(2)]
    yield made
    for one in made:
        one.stop()


@pytest.fixture
def envoy(certificates, tmp_path, daemons):  # noqa: F811
    made = Envoy(certificates, tmp_path, daemons)
    yield made
    made.stop()


def calls(client, rng, count):
    for _ in range(count):
        q, k, v = np.float32(rng.normal(size=(3, 1, 2, 16, 32)))
        close(client.forward(q, k, v).out, oracle.forward(q, k, v).out)


def test_configuration_is_valid_as_shipped(certificates, tmp_path):  # noqa: F811
    with open(os.path.join(ROOT, "deploy/envoy/envoy.yaml")) as file:
        (tmp_path / "envoy.yaml").write_text(file.read().replace("/etc/envoy/attnd/", f"{certificates}/"))
    done = subprocess.run([ENVOY, "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")], capture_output=True, text=True)
    assert done.returncode == 0 and "deprecated" not in done.stderr, done.stderr


def test_calls_go_to_both_daemons_and_not_to_one_that_is_frozen_or_drains(envoy, daemons, rng):
    with envoy.connect() as client:
        calls(client, rng, 12)
        assert all(one.metric("attnd_requests_total") > 0 for one in daemons)
        daemons[0].pause()
        wait_until(lambda: envoy.healthy() == 1, 20)
        begun = time.monotonic()
        calls(client, rng, 6)
        assert time.monotonic() - begun < 10
        daemons[0].process.send_signal(signal.SIGCONT)
        wait_until(lambda: envoy.healthy() == 2, 20)
        daemons[1].process.send_signal(signal.SIGTERM)
        while daemons[1].process.poll() is None:
            calls(client, rng, 1)
        calls(client, rng, 3)


def test_each_daemon_gets_as_much_as_it_can_do(certificates, tmp_path):  # noqa: F811
    """By the weights that Envoy makes of their load reports: one has an engine that is many times slower."""
    daemons = [Daemon("--memory_limit_mib", "256", backend=backend) for backend in ("cpu", "reference")]
    ports = [int(one.address.rpartition(":")[2]) for one in daemons]
    made = Envoy(certificates, tmp_path, daemons)
    q = np.ones((1, 4, 128, 64), np.float32)
    try:
        with made.connect() as client:
            assert set(made.weights().values()) == {1}

            def is_weighed():
                client.forward(q, q, q)
                fast, slow = (made.weights()[port] for port in ports)
                return fast > 4 * slow
            wait_until(is_weighed, 60)
            forwards = r'attnd_requests_total\{code="OK",method="Forward"\}'
            before = [one.metric(forwards) for one in daemons]
            for _ in range(60):
                client.forward(q, q, q)
            fast, slow = (one.metric(forwards) - then for one, then in zip(daemons, before))
            print(f"weights {made.weights()}, {fast:.0f} and {slow:.0f} calls")
            assert fast > 3 * slow
    finally:
        made.stop()
        for one in daemons:
            one.stop()


def test_a_client_without_a_certificate_is_refused(envoy, rng):
    with attnd.connect(envoy.address, tls=attnd.TLS(ca=f"{envoy.folder}/clients.pem"), timeout=5, retries=0) as client:
        with pytest.raises(attnd.AttndError):
            calls(client, rng, 1)


def test_a_module_is_at_one_daemon_however_many_connections_lead_there(envoy, daemons):
    layout = small_layout()
    for _ in range(3):
        with envoy.connect(channels=4) as client:
            module = attnd.register(layout, client, name="one", optimizer=attnd.AdamW(), max_rows=64)
            assert module.status()
    assert sorted(one.metric("attnd_modules") for one in daemons) == [0, 1]


def test_the_header_spreads_modules_over_daemons_and_keeps_each_at_one(envoy, daemons):
    check_header_spreads(envoy, daemons)


def test_a_module_without_replay_trains_while_connections_end(certificates, tmp_path, aged):  # noqa: F811
    def age(parts):
        (chain,) = parts["listeners"][0]["filter_chains"]
        chain["filters"][0]["typed_config"]["common_http_protocol_options"]["max_connection_duration"] = "2s"
    made = Envoy(certificates, tmp_path, aged, age)
    check_trains_without_replay(made, aged)
    made.stop()


def test_a_module_without_replay_is_refused_where_the_proxy_keeps_it_nowhere(certificates, tmp_path, daemons):  # noqa: F811
    def scatter(parts):
        (cluster,) = (one for one in parts["clusters"] if one["name"] == "modules")
        del cluster["ring_hash_lb_config"]
        cluster["lb_policy"] = "ROUND_ROBIN"
    made = Envoy(certificates, tmp_path, daemons, scatter)
    check_is_told_not_sticky(made, daemons)
    made.stop()
