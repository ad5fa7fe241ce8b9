"""BERT-large trains on a GPU whose pool is capped to what a V100 of 16 GB has left: 24 layers of 1024, 16,384 tokens a
step, float16 with a GradScaler, AdamW. Prints the plan, what the pool held beside it, and the time of a step. Exits with 1
where the loss does not fall or memory is not as planned.

Needs: torch; bazel build //server:attnd //client/c:libattnd_client.so (ATTND_CLIENT_LIBRARY names the library).
Run:   PYTHONPATH=client/python python3 tools/benchmarks/module_in_capped_memory.py [--pool-gb 14.5] [--module-mib 12288]
"""
import argparse
import statistics
import subprocess
import sys
import time
import urllib.request

import torch
from running_daemon import RunningDaemon

import attnd.torch


def fraction_for(pool_bytes):
    """--hbm_fraction that leaves the daemon so much of GPU 0."""
    free = subprocess.run(["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True, check=True).stdout
    return pool_bytes / (int(free.split()[0]) << 20)


def metric(daemon, name):
    lines = urllib.request.urlopen(daemon.metrics).read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def train(args):
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(args.width, args.width // 64, 4 * args.width, 0.1, "gelu", batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
    rows = args.batch * args.length
    stack.layers = attnd.torch.offload(stack.layers, precision="f16", max_rows=rows, kept_rows=rows)
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(stack.parameters(), lr=3e-4))
    scaler, times = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14), []
    x, target = torch.randn(2, args.batch, args.length, args.width)
    losses = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(stack(x), target)
        scaler.scale(loss).backward()
        attnd.torch.clip_grad_norm_(stack, 1.0, scaler=scaler, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return stack, losses, statistics.median(times[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--server", help="another binary than bazel-bin's, with the pool that it takes")
    parser.add_argument("--pool-gb", type=float, default=14.5)
    parser.add_argument("--module-mib", type=int, default=12288, help="--module_memory_mib")
    for name, value in (("layers", 24), ("width", 1024), ("batch", 32), ("length", 512), ("steps", 12)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    flags = ["--backend", args.backend, "--memory_limit_mib", "4096", "--module_memory_mib", str(args.module_mib)]
    if args.backend == "cuda" and not args.server:
        flags += ["--devices", "0", "--hbm_fraction", f"{fraction_for(args.pool_gb * 1e9):.4f}"]
    with RunningDaemon(args.server or "bazel-bin/server/attnd", *flags) as daemon:
        with attnd.torch.connect(daemon.address, wait_for_ready=True, timeout=600):
            stack, losses, seconds = train(args)
            plan, on_gpu = stack.layers.module.plan, int(stack.layers.module.status()["hbm_bytes"])
            pool, peak = [metric(daemon, f"attnd_hbm_pool_{name}_bytes") for name in ("reserved", "peak_used")]
    parts = {key[:-6]: int(plan[key]) for key in plan if key.endswith("_bytes")}
    print(f"{args.layers} layers of {args.width}, {args.batch * args.length} tokens, {plan['engine']}, {plan['recompute']}; "
          "planned in GB: " + ", ".join(f"{name} {size / 1e9:.3f}" for name, size in parts.items()))
    print(f"a step {seconds * 1e3:.0f} ms; loss {losses[0]:.4f} to {losses[-1]:.4f}")
    if plan["engine"] == "cuda":
        print(f"on the GPU {on_gpu / 1e9:.3f} GB; its pool {pool / 1e9:.3f}, of which at most {peak / 1e9:.3f} were used")
        if not (on_gpu <= 1.05 * peak and peak <= pool <= 1.01e9 * args.pool_gb):
            return 1
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
