#!/usr/bin/env python3
"""Trains one model by several workers, whose layers are on a fleet that is troubled on purpose.

    python3 client/python/examples/train_fleet.py --daemon bazel-bin/server/attnd --envoy envoy [--plot fleet.png]

torchrun starts the workers; two daemons stand behind Envoy, which keeps a module at one of them by its name. The one that
has the module is drained, then frozen (SIGSTOP), then killed (SIGKILL), and last a worker is killed; torchrun starts the
workers again each time, and they go on from the last checkpoint. Prints the losses beside those of one process without a
daemon, and how long each trouble held the training up. Exit status 0 when the curves agree within 1e-4.
"""
import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import attnd.torch
from train_gpt import Daemon, default_text, progress, show
from train_modules import Model, Settings, batches

WORKERS, SAVE_EVERY, TIMEOUT = 4, 2, 15.0
TROUBLES = ("the daemon is drained", "the daemon is frozen", "the daemon is killed", "a worker is killed")


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train_here(settings, text):
    """The loss of each step, of one process."""
    torch.manual_seed(settings.seed)
    model = Model(settings, len(set(text)), True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), settings.learning_rate), []
    for tokens, targets in batches(settings, text, True):
        loss = loss_of(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def work(settings, text, folder, address):
    """One worker: a part of each batch. Starts at the last checkpoint."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with open(f"{folder}/pid{rank}", "w") as file:
        file.write(str(os.getpid()))
    attnd.torch.connect(address, wait_for_ready=True, timeout=TIMEOUT)
    torch.manual_seed(settings.seed)
    model, each = Model(settings, len(set(text)), True), settings.batch // ranks
    model.encoder.layers = attnd.torch.offload(model.encoder.layers, group=dist.group.WORLD, timeout=TIMEOUT)
    trained = nn.parallel.DistributedDataParallel(model)
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(trained.parameters(), settings.learning_rate))
    saved, first = f"{folder}/checkpoint", 0
    if os.path.exists(saved):
        found = torch.load(saved)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    for step, (tokens, targets) in enumerate(batches(settings, text, True)):
        if step < first:
            continue
        if rank == 0 and step % SAVE_EVERY == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved + ".part")
            os.replace(saved + ".part", saved)
        mine = slice(rank * each, (rank + 1) * each)
        loss = loss_of(trained, tokens[mine], targets[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            with open(f"{folder}/losses", "a") as file:
                file.write(json.dumps({"step": step, "loss": mean.item(), "time": time.time()}) + "\n")
    dist.destroy_process_group()


class Envoy:
    """In front of daemons: asks each for its health, and spreads modules by their names."""

    def __init__(self, program, daemons, folder):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        path = os.path.join(folder, "envoy.json")
        with open(path, "w") as file:
            json.dump(self.configuration(port, [daemon.address for daemon in daemons]), file)
        with open(os.path.join(folder, "envoy.log"), "w") as log:
            self._process = subprocess.Popen([program, "-c", path, "--concurrency", "1", "--use-dynamic-base-id"],
                                             stdout=log, stderr=log)

    def configuration(self, port, daemons):
        http = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
        router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
        options = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        route = {"match": {"prefix": "/"}, "route": {"cluster": "daemons", "timeout": "0s", "hash_policy": [
            {"header": {"header_name": "attnd-module"}}]}}
        manager = {"@type": http, "stat_prefix": "attnd", "codec_type": "HTTP2",
                   "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": router}}],
                   "route_config": {"virtual_hosts": [{"name": "attnd", "domains": ["*"], "routes": [route]}]}}
        return {"static_resources": {
            "listeners": [{"name": "attnd", "address": self.socket("127.0.0.1", port), "filter_chains": [{"filters": [
                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]}],
            "clusters": [{
                "name": "daemons", "type": "STATIC", "connect_timeout": "2s", "lb_policy": "RING_HASH",
                "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
                "close_connections_on_host_health_failure": True,
                "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": options, "explicit_http_config": {"http2_protocol_options": {}}}},
                "health_checks": [{"timeout": "1s", "interval": "1s", "no_traffic_interval": "1s", "unhealthy_threshold": 1,
                                   "healthy_threshold": 1, "grpc_health_check": {}}],
                "load_assignment": {"cluster_name": "daemons", "endpoints": [{"lb_endpoints": [
                    {"endpoint": {"address": self.socket(*address.split(":"))}} for address in daemons]}]}}]}}

    @staticmethod
    def socket(host, port):
        return {"socket_address": {"address": host, "port_value": int(port)}}

    def stop(self):
        self._process.terminate()
        self._process.wait()


def has_module(daemon):
    """Whether the workers' module is there now: it has had calls since the last time."""
    try:
        with open(daemon.metrics_port_file) as file:
            text = urllib.request.urlopen(f"http://127.0.0.1:{file.read().strip()}/metrics", timeout=2).read().decode()
    except (OSError, ValueError):
        return False
    seen = sum(float(line.split()[-1]) for line in text.split("\n") if line.startswith("attnd_module_calls_total"))
    before, daemon.calls = getattr(daemon, "calls", 0), seen
    return seen > before


class Run:
    """The workers, and what is done to them and to their daemons."""

    def __init__(self, chosen, settings, folder):
        self.folder, self.steps = folder, settings.steps
        self.daemons = [Daemon(chosen.daemon, "cpu") for _ in range(2)]
        self.envoy = Envoy(chosen.envoy, self.daemons, folder)
        options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(settings).items()]
        self._log = open(os.path.join(folder, "workers.log"), "w")
        self.workers = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}",
             "--max-restarts=20", "--monitor-interval=0.1", os.path.abspath(__file__), "--work", folder, "--address",
             self.envoy.address, *options], stdout=self._log, stderr=self._log,
            # Without the second, torchrun gives ranks that it starts again the addresses of those that have died.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def seen(self):
        """(step, loss, time) of each step that was done, also of those that were done again."""
        try:
            with open(os.path.join(self.folder, "losses")) as file:
                return [json.loads(line) for line in file.read().split("\n")[:-1]]
        except FileNotFoundError:
            return []

    def wait_for(self, step):
        """Until that step has been done after now; when it was."""
        begun = len(self.seen())
        while True:
            for one in self.seen()[begun:]:
                if one["step"] >= step:
                    return one["time"]
            if self.workers.poll() is not None:
                with open(self._log.name) as file:
                    raise SystemExit(f"the workers ended with {self.workers.returncode}:\n{file.read()[-4000:]}")
            time.sleep(0.05)

    def trouble(self, what, at):
        """At that step; when, and how long no further step was done."""
        self.wait_for(at)
        for daemon in self.daemons:
            has_module(daemon)
        self.wait_for(at + 1)
        home = next(daemon for daemon in self.daemons if has_module(daemon))
        last = self.seen()[-1]["step"]
        begun = time.time()
        if what == TROUBLES[0]:
            ended = threading.Thread(target=lambda: (home.stop(), home.start()))
            ended.start()
        elif what == TROUBLES[1]:
            home._process.send_signal(signal.SIGSTOP)
        elif what == TROUBLES[2]:
            home.kill_and_restart()
        else:
            with open(os.path.join(self.folder, "pid1")) as file:
                os.kill(int(file.read()), signal.SIGKILL)
        ended_at = self.wait_for(last + 2)
        if what == TROUBLES[0]:
            ended.join()
        home._process.send_signal(signal.SIGCONT)
        return begun, ended_at - begun

    def stop(self):
        if self.workers.poll() is None:
            self.workers.terminate()
            self.workers.wait()
        self.envoy.stop()
        for daemon in self.daemons:
            daemon._process.send_signal(signal.SIGCONT)
            daemon.stop(signal.SIGKILL)


def plot(path, curves, seen, troubles):
    """Losses over the steps, and steps over time with the troubles; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    left, right = Figure(figsize=(11, 4.4), layout="constrained").subplots(1, 2)
    for n, (name, losses) in enumerate(curves.items()):
        left.plot(losses, label=name, linewidth=1.6 * (len(curves) - n))
    left.set(xlabel="step", ylabel="loss")
    begun = seen[0]["time"]
    right.plot([one["time"] - begun for one in seen], [one["step"] for one in seen], color="tab:orange")
    for n, (what, (at, took)) in enumerate(troubles.items()):
        right.axvspan(at - begun, at - begun + took, alpha=0.25, color=f"C{n + 2}", label=what)
    right.set(xlabel="seconds", ylabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    left.figure.savefig(path)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--daemon", help="program to start: bazel-bin/server/attnd")
    parser.add_argument("--envoy", help="program to start: Envoy 1.30 or later")
    parser.add_argument("--plot", help="image to write (needs matplotlib)")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # in this folder, as one of the workers
    parser.add_argument("--address", help=argparse.SUPPRESS)
    for name, value in vars(Settings(steps=48, batch=8)).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    chosen = parser.parse_args()
    settings = Settings(**{name: getattr(chosen, name) for name in vars(Settings())})
    torch.set_num_threads(1)
    text = default_text()
    if chosen.work:
        work(settings, text, chosen.work, chosen.address)
        return 0
    curves, troubles = {"one process": train_here(settings, text)}, {}
    bar = progress("workers", settings.steps)
    with tempfile.TemporaryDirectory(prefix="attnd-fleet-") as folder:
        run = Run(chosen, settings, folder)
        try:
            for n, what in enumerate(TROUBLES):
                at = (n + 1) * settings.steps // (len(TROUBLES) + 1)
                troubles[what] = run.trouble(what, at)
                bar(at)
                print(f"step {at}: {what}; the next step came {troubles[what][1]:.1f} s later", flush=True)
            if run.workers.wait() != 0:
                raise SystemExit("the workers failed")
            bar(settings.steps - 1)
            seen = run.seen()
        finally:
            run.stop()
    last = {one["step"]: one["loss"] for one in seen}
    curves[f"{WORKERS} workers, troubled"] = np.array([last[step] for step in range(settings.steps)])
    show(curves, max(1, settings.steps // 10))
    here, there = curves.values()
    difference = np.abs(there / here - 1).max()
    again = len(seen) - settings.steps
    print(f"losses differ by {difference:.1e} at most; {again} of {settings.steps} steps were done again")
    if chosen.plot:
        plotted = plot(chosen.plot, curves, seen, troubles)
        print(f"curves: {chosen.plot}" if plotted else f"no {chosen.plot}: matplotlib is not installed")
    return 0 if difference <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
