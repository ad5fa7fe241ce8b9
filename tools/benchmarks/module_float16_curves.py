"""Curves in float16 with a GradScaler: layers on attnd beside torch's autocast, both beside torch in float32.

Three runs of a BERT-like and of a GPT-like model on the same batches: torch in float32, torch.autocast in float16, and the
layers on a daemon with precision="f16". By the contract attnd's difference from float32 is at most twice autocast's. A
single loss differs by chance, so differences are root mean squares over the last tenth of the steps and all seeds. Exits
with 1 where attnd's is more.

Needs: torch; bazel build //server:attnd //client/c:libattnd_client.so (ATTND_CLIENT_LIBRARY names the library).
Run:   PYTHONPATH=client/python python3 tools/benchmarks/module_float16_curves.py [--backend cuda] [--steps 300] [--seeds 3]
"""
import argparse
import copy
import os
import sys

import numpy as np
import torch
from running_daemon import ROOT, RunningDaemon

import attnd.torch

sys.path.insert(0, os.path.join(ROOT, "tests/python"))
from small_curve import Curve  # noqa: E402

RATE = 1e-3


class Run:
    """One model and its optimizer."""

    def __init__(self, curve, model, device, half=False, remote=False):
        self.curve, self.model, self.device, self.half = curve, model.to(device), device, half
        if remote:
            model["stack"].layers = attnd.torch.offload(model["stack"].layers, precision="f16", max_rows=1024)
        made = torch.optim.AdamW(model.parameters(), lr=RATE)
        self.optimizer = attnd.torch.optimizer(made) if remote else made
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 12, enabled=half or remote)
        self.losses = []

    def step(self, batch):
        batch = [one.to(self.device) for one in batch]
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.float16, enabled=self.half):
            loss = self.curve.loss(self.model, *batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(loss.item())


def curves(kind, seed, args):
    """Losses of float32, autocast and attnd."""
    curve = Curve(kind == "gpt", seed)
    models = [curve.model, *(copy.deepcopy(curve.model) for _ in range(2))]
    # The model beside the layers is where PyTorch is, so that all three differ by their layers alone.
    runs = [Run(curve, models[0], args.device), Run(curve, models[1], args.device, half=True),
            Run(curve, models[2], args.device, remote=True)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(args.steps):
        batch = curve.batch(generator)
        for run in runs:
            run.step(batch)
    return np.array([run.losses for run in runs])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", help="the daemon's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="PyTorch's")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    good, last = True, max(1, args.steps // 10)
    print(f"PyTorch {torch.__version__} on {args.device}, attnd on {args.backend}, {args.steps} steps, {args.seeds} seeds")
    print("| model | seed | loss at first | float32 | autocast differs by | attnd differs by |\n|---|---|---|---|---|---|")
    with RunningDaemon("bazel-bin/server/attnd", "--backend", args.backend) as daemon:
        attnd.torch.connect(daemon.address, wait_for_ready=True, timeout=120)
        for kind in ("bert", "gpt"):
            found = []
            for seed in range(args.seeds):
                losses = curves(kind, seed, args)
                differences = losses[1:, -last:] - losses[0, -last:]
                found.append(np.square(differences).mean(1))
                print(f"| {kind} | {seed} | {losses[0, 0]:.4f} | {losses[0, -1]:.4f} | {differences[0, -1]:+.1e} | "
                      f"{differences[1, -1]:+.1e} |", flush=True)
                good = good and losses[2, -1] < losses[2, 0]
            amp, ours = np.sqrt(np.mean(found, 0))
            good = good and ours <= 2 * amp
            print(f"{kind}: root mean squares {amp:.1e} and {ours:.1e}: {ours / amp:.2f} times autocast's")
        attnd.torch.disconnect()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
