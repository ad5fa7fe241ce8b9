#!/usr/bin/env python3
"""Trains a small GPT on one text with attention here and again with attention in a daemon, and compares.

    python3 client/python/examples/train_gpt.py --daemon bazel-bin/server/attnd [--kill-at 150] [--plot loss.png]
    python3 client/python/examples/train_gpt.py --address 127.0.0.1:7070

Plain PyTorch modules; the only line that differs is attnd.torch.replace(). --daemon starts daemons of its own on free
ports: one with the CPU engine and, where attnd finds a GPU, one with that (--backend chooses one). With --kill-at each is
killed (SIGKILL) at that step and started again, and the run goes on. --device cuda puts the model on this machine's GPU;
--precision f16 lets its float32 tensors travel and be computed in 16 bits, as the daemon's cuda engine always does here,
for speed. Exit status 0 when the final losses agree within 1e-4, 1e-2 with 16 bits (without dropout).
"""
import argparse
import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import attnd.torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


@dataclass
class Settings:
    steps: int = 300
    layers: int = 3
    heads: int = 4
    dim: int = 64
    length: int = 64
    batch: int = 8
    dropout: float = 0.0
    learning_rate: float = 1e-3
    seed: int = 1
    device: str = "cpu"


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.norm1, self.norm2 = nn.LayerNorm(settings.dim), nn.LayerNorm(settings.dim)
        self.qkv, self.out = nn.Linear(settings.dim, 3 * settings.dim), nn.Linear(settings.dim, settings.dim)
        self.mlp = nn.Sequential(nn.Linear(settings.dim, 4 * settings.dim), nn.GELU(),
                                 nn.Linear(4 * settings.dim, settings.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.settings.heads, -1).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                           dropout_p=self.settings.dropout if self.training else 0.0)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, settings: Settings, alphabet: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(alphabet, settings.dim), nn.Embedding(settings.length, settings.dim)
        self.blocks = nn.Sequential(*[Block(settings) for _ in range(settings.layers)])
        self.norm, self.head = nn.LayerNorm(settings.dim), nn.Linear(settings.dim, alphabet)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[:tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def default_text() -> str:
    """This repository's own documents."""
    paths = sorted(glob.glob(os.path.join(ROOT, "docs/*.md"))) + [os.path.join(ROOT, "LICENSE")]
    return "\n".join(open(path, encoding="utf-8").read() for path in paths)


def train(settings: Settings, text: str, at_step=lambda step: None) -> np.ndarray:
    """The loss of each step. The same settings and text give the same initial model and the same batches."""
    alphabet = sorted(set(text))
    numbers = {character: n for n, character in enumerate(alphabet)}
    data = torch.tensor([numbers[character] for character in text]).to(settings.device)
    torch.manual_seed(settings.seed)
    model = GPT(settings, len(alphabet)).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
    batches = np.random.default_rng(settings.seed)
    losses = []
    for step in range(settings.steps):
        at_step(step)
        starts = batches.integers(0, len(data) - settings.length - 1, settings.batch)
        rows = torch.stack([data[start:start + settings.length + 1] for start in starts])
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


class Daemon:
    """An attnd of our own, which keeps its port when it is started again."""

    def __init__(self, program: str, backend: str = "auto") -> None:
        self._program, self._backend = program, backend
        self._folder = tempfile.TemporaryDirectory()
        self.metrics_port_file = os.path.join(self._folder.name, "metrics_port")
        self.address, self.kills = "127.0.0.1:0", 0
        self.start()

    def start(self) -> None:
        port_file = os.path.join(self._folder.name, "port")
        if os.path.exists(port_file):
            os.remove(port_file)
        with open(os.path.join(self._folder.name, "log"), "a") as log:
            self._process = subprocess.Popen(
                [self._program, "--listen", self.address, "--port_file", port_file, "--metrics_listen", "127.0.0.1:0",
                 "--metrics_port_file", self.metrics_port_file, "--drain_delay", "0", "--backend", self._backend],
                stdout=log, stderr=log)
        while not (os.path.exists(port_file) and open(port_file).read().endswith("\n")):
            if self._process.poll() is not None:
                raise SystemExit("attnd did not start:\n" + open(os.path.join(self._folder.name, "log")).read())
            time.sleep(0.01)
        self.address = "127.0.0.1:" + open(port_file).read().split()[0]

    def stop(self, how: int = signal.SIGTERM) -> None:
        self._process.send_signal(how)
        self._process.wait()

    def kill_and_restart(self) -> None:
        self.stop(signal.SIGKILL)
        self.kills += 1
        self.start()


def train_remotely(settings: Settings, text: str, address: str, at_step=lambda step: None, precision=None) -> np.ndarray:
    """The same training with attention in the daemon; outlives the daemon's restart."""
    client = attnd.torch.connect(address, wait_for_ready=True, timeout=120, precision=precision)
    with client, attnd.torch.replace():
        return train(settings, text, at_step)


def show(curves, every: int) -> None:
    print("step  " + "  ".join(f"{name:>22}" for name in curves))
    steps = len(next(iter(curves.values())))
    for step in [*range(0, steps - 1, every), steps - 1]:
        print(f"{step:4}  " + "  ".join(f"{losses[step]:22.6f}" for losses in curves.values()))


def plot(path: str, curves, kill_at: Optional[int] = None, window: int = 1) -> bool:
    """Draws {name: losses} over the step, as means of `window` steps, and where daemons were killed; False without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = Figure(figsize=(8, 4.8), layout="constrained").subplots()
    axes.set(xlabel="step", ylabel="loss" if window == 1 else f"loss (mean of {window} steps)")
    axes.grid(alpha=0.3)
    for n, (name, losses) in enumerate(curves.items()):  # wide below narrow: curves that coincide are all seen
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        axes.plot(np.arange(window - 1, len(losses)), smooth, label=name, linewidth=1.4 * (len(curves) - n))
    if kill_at is not None:
        axes.axvline(kill_at, color="black", linestyle=":", label=f"step {kill_at}: daemon killed, started again")
    axes.legend()
    axes.figure.savefig(path)
    return True


def progress(name: str, steps: int):
    """Shows a bar on a terminal."""
    def at_step(step: int) -> None:
        if sys.stderr.isatty():
            filled = 40 * (step + 1) // steps
            sys.stderr.write(f"\r{name:22} [{'#' * filled}{'.' * (40 - filled)}] {step + 1}/{steps}"
                             + ("\n" if step + 1 == steps else ""))
    return at_step


def starts(program: str, backend: str) -> bool:
    """Whether attnd runs with this engine here; the cuda engine says no where there is no GPU for it."""
    try:
        Daemon(program, backend).stop()
    except SystemExit:
        return False
    return True


class Engine(NamedTuple):
    """Where attention is computed. No backend: in a daemon that runs already."""

    name: str
    backend: Optional[str]
    precision: Optional[str]


def engines(program: str, backend: Optional[str], precision: Optional[str]) -> list:
    """The one that was chosen, else the CPU's, and a GPU's where attnd finds one."""
    backends = [backend] if backend else ["cpu", "cuda"] if starts(program, "cuda") else ["cpu"]
    return [Engine(f"attnd, {name} engine", name, precision or ("f16" if name == "cuda" else None)) for name in backends]


def train_with(engine: Engine, chosen: argparse.Namespace, settings: Settings, text: str) -> np.ndarray:
    """The loss of each step with attention there; a daemon of our own is killed and started again where asked."""
    daemon = Daemon(chosen.daemon, engine.backend) if engine.backend else None
    bar = progress(engine.name, settings.steps)

    def at_step(step: int) -> None:
        bar(step)
        if daemon is not None and step == chosen.kill_at:
            daemon.kill_and_restart()

    losses = train_remotely(settings, text, daemon.address if daemon else chosen.address, at_step, engine.precision)
    if daemon is not None:
        daemon.stop()
    if daemon is not None and daemon.kills:
        print(f"{engine.name}: the daemon was killed before step {chosen.kill_at} and started again; the run went on")
    return losses


def compare(chosen: argparse.Namespace, settings: Settings, text: str) -> bool:
    """Trains here and on each engine, prints and plots the curves; whether they end alike."""
    there = ([Engine("attnd", None, chosen.precision)] if chosen.address else
             engines(chosen.daemon, chosen.backend, chosen.precision))
    begin = time.perf_counter()
    curves = {"attention here": train(settings, text, progress("attention here", settings.steps))}
    seconds = {"attention here": time.perf_counter() - begin}
    for engine in there:
        begin = time.perf_counter()
        curves[engine.name] = train_with(engine, chosen, settings, text)
        seconds[engine.name] = time.perf_counter() - begin
    show(curves, max(1, settings.steps // 10))
    alike, here = True, curves["attention here"][-1]
    print(f"attention here: {settings.steps} steps in {seconds['attention here']:.1f} s")
    for engine in there:
        difference = abs(curves[engine.name][-1] - here) / here
        alike = alike and (settings.dropout > 0 or difference <= (1e-2 if engine.precision else 1e-4))
        print(f"{engine.name}: final losses differ by {difference:.1e}; {settings.steps} steps in "
              f"{seconds[engine.name]:.1f} s" + (f", tensors as {engine.precision}" if engine.precision else ""))
    if chosen.plot:
        plotted = plot(chosen.plot, curves, chosen.kill_at)
        print(f"curves: {chosen.plot}" if plotted else f"no {chosen.plot}: matplotlib is not installed")
    return alike


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--address", help="of a daemon that runs already")
    parser.add_argument("--daemon", help="program to start: bazel-bin/server/attnd")
    parser.add_argument("--backend", help="of --daemon (default: cpu, then cuda where there is a GPU)")
    parser.add_argument("--precision", choices=["f16", "bf16"], help="of the tensors on the wire and the daemon's work")
    parser.add_argument("--kill-at", type=int, help="step at which --daemon is killed and started again")
    parser.add_argument("--text", help="file to train on (default: this repository's documents)")
    parser.add_argument("--plot", help="image to write (needs matplotlib)")
    for name, value in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    chosen = parser.parse_args()
    if bool(chosen.address) == bool(chosen.daemon):
        parser.error("one of --address and --daemon")
    settings = Settings(**{name: getattr(chosen, name) for name in vars(Settings())})
    text = open(chosen.text, encoding="utf-8").read() if chosen.text else default_text()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the next line asks of CUDA
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # a model this small is no faster with more, and very slow where others want the cores
    return 0 if compare(chosen, settings, text) else 1


if __name__ == "__main__":
    sys.exit(main())
