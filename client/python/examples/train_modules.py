#!/usr/bin/env python3
"""Trains a BERT-like and a GPT-like model twice each: layers here, and layers on a daemon that is killed in mid-run.

    python3 client/python/examples/train_modules.py --daemon bazel-bin/server/attnd [--kill-at 20] [--plot modules.png]

The models' encoders are nn.TransformerEncoder; the only lines that differ are attnd.torch.offload and attnd.torch.optimizer.
Prints both loss curves, the time of a step here and there, and the bytes that a step sent and received, beside those that
its attention calls alone would (3 + 1 tensors forward, 1 + 3 backward, a layer). Exit status 0 when final losses agree
within 1e-4.
"""
import argparse
import sys
import time
import urllib.request
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import attnd.torch
from train_gpt import Daemon, default_text, plot, progress, show


@dataclass
class Settings:
    steps: int = 60
    layers: int = 2
    heads: int = 2
    dim: int = 32
    length: int = 32
    batch: int = 4
    learning_rate: float = 3e-3
    seed: int = 1


class Model(nn.Module):
    """Characters to characters. causal: each from those before it (GPT); else hidden ones from all others (BERT)."""

    def __init__(self, settings: Settings, alphabet: int, causal: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(alphabet + 1, settings.dim), nn.Embedding(settings.length, settings.dim)
        layer = nn.TransformerEncoderLayer(settings.dim, settings.heads, 4 * settings.dim, 0.0, "gelu", batch_first=True,
                                           norm_first=causal)
        self.encoder = nn.TransformerEncoder(layer, settings.layers, nn.LayerNorm(settings.dim), enable_nested_tensor=False)
        self.head, self.causal = nn.Linear(settings.dim, alphabet), causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, length = self.tokens(tokens) + self.places.weight[:tokens.shape[1]], tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        return self.head(self.encoder(x, mask=mask, is_causal=self.causal))


def batches(settings: Settings, text: str, causal: bool):
    """Tokens and targets of each step; −100: no target."""
    alphabet = sorted(set(text))
    numbers = {character: n for n, character in enumerate(alphabet)}
    data, random = np.array([numbers[character] for character in text]), np.random.default_rng(settings.seed)
    for _ in range(settings.steps):
        starts = random.integers(0, len(data) - settings.length - 1, settings.batch)
        rows = np.stack([data[start:start + settings.length + 1] for start in starts])
        if causal:
            yield torch.tensor(rows[:, :-1]), torch.tensor(rows[:, 1:])
            continue
        rows, hidden = rows[:, :-1], random.random(rows[:, :-1].shape) < 0.15
        yield torch.tensor(np.where(hidden, len(alphabet), rows)), torch.tensor(np.where(hidden, rows, -100))


def train(settings: Settings, text: str, causal: bool, remote: bool, at_step=lambda step: None):
    """The loss of each step, and the seconds of a step."""
    torch.manual_seed(settings.seed)
    model = Model(settings, len(set(text)), causal)
    if remote:
        model.encoder.layers = attnd.torch.offload(model.encoder.layers)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
    if remote:
        optimizer = attnd.torch.optimizer(optimizer)
    losses, seconds = [], []
    for step, (tokens, targets) in enumerate(batches(settings, text, causal)):
        at_step(step)
        begin = time.perf_counter()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return np.array(losses), float(np.median(seconds))


def moved_bytes(daemon: Daemon) -> float:
    """That it has received and sent since it was started."""
    with open(daemon.metrics_port_file) as file:
        text = urllib.request.urlopen(f"http://127.0.0.1:{file.read().strip()}/metrics").read().decode()
    return sum(float(line.split()[-1]) for line in text.split("\n")
               if line.startswith(("attnd_received_bytes_total", "attnd_sent_bytes_total")))


def train_there(settings: Settings, text: str, causal: bool, daemon: Daemon, kill_at, name: str):
    """As train, and the bytes of a step."""
    bar, marks = progress(name, settings.steps), {}

    def at_step(step: int) -> None:
        bar(step)
        if step == kill_at:
            daemon.kill_and_restart()
        if step in (2, 7) and step < settings.steps and (kill_at is None or not 2 <= kill_at < 7):
            marks[step] = moved_bytes(daemon)
    with attnd.torch.connect(daemon.address, wait_for_ready=True, timeout=120):
        losses, seconds = train(settings, text, causal, True, at_step)
    return losses, seconds, (marks[7] - marks[2]) / 5 if len(marks) == 2 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--daemon", required=True, help="program to start: bazel-bin/server/attnd")
    parser.add_argument("--kill-at", type=int, help="step at which the daemon is killed and started again")
    parser.add_argument("--plot", help="image to write (needs matplotlib)")
    for name, value in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    chosen = parser.parse_args()
    settings = Settings(**{name: getattr(chosen, name) for name in vars(Settings())})
    torch.set_num_threads(1)
    text, curves, lines, alike = default_text(), {}, [], True
    tensor = settings.batch * settings.length * settings.dim * 4
    for causal, name in ((False, "BERT-like"), (True, "GPT-like")):
        here, here_seconds = train(settings, text, causal, False, progress(f"{name} here", settings.steps))
        daemon = Daemon(chosen.daemon, "cpu")
        there, seconds, sent = train_there(settings, text, causal, daemon, chosen.kill_at, f"{name} on attnd")
        daemon.stop()
        if daemon.kills:
            print(f"{name}: the daemon was killed before step {chosen.kill_at} and started again; the run went on")
        curves.update({f"{name} here": here, f"{name} on attnd": there})
        difference = abs(there[-1] - here[-1]) / here[-1]
        alike = alike and difference <= 1e-4
        lines.append(f"{name}: final losses differ by {difference:.1e}; a step takes {here_seconds * 1e3:.1f} ms here, "
                     f"{seconds * 1e3:.1f} ms on attnd"
                     + ("" if sent is None else f" and {sent / 1024:.0f} KiB (the stack's input, output and their gradients "
                        f"{4 * tensor / 1024:.0f}; its attention calls alone {12 * settings.layers * tensor / 1024:.0f})"))
    show(curves, max(1, settings.steps // 10))
    print("\n".join(lines))
    print("Layers this small are slower on a daemon of the same host: it has no faster processor, and tensors travel.")
    if chosen.plot:
        plotted = plot(chosen.plot, curves, chosen.kill_at, window=5)
        print(f"curves: {chosen.plot}" if plotted else f"no {chosen.plot}: matplotlib is not installed")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
