"""One encoder layer in the engine, forward and forward with backward, beside PyTorch's on the same GPU in the same run.

PyTorch runs eager (scores in memory), by SDPA, and by SDPA under torch.compile. 24 cells: widths 768 to 2048, heads of 64
and 128 columns, lengths 512 to 4096, 16,384 tokens, float16, dropout 0 and 0.1 of attention and of both branches. PyTorch's
times are medians by CUDA events over some calls in a row; attnd's are a fourth of a stack of four, without transfers. Rows
stand in the order of attnd's speed over that of the faster of SDPA and torch.compile, losses first.

Needs: torch with CUDA, and bazel build //kernels/layers/cuda:layers_benchmark.
Run:   python3 tools/benchmarks/gpu_layer_peers.py [--dropouts 0 0.1] [--widths 768 ...] [--json F] [--benchmark PROGRAM]
"""
import argparse
import json
import re
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = 16384
SIZES = ((768, 12), (1024, 16), (2048, 32), (2048, 16))
LENGTHS = (512, 2048, 4096)
LINE = re.compile(r"encoder +(\d+) +(\d+) +(\d+) x +(\d+) +bound +forward +([\d.]+) +backward +([\d.]+)")


class Layer(nn.Module):
    """BERT's, as `BertLayers` of the engine has it."""

    def __init__(self, width, heads, dropout, is_fused):
        super().__init__()
        self.heads, self.dropout, self.is_fused = heads, dropout, is_fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attention(self, x):
        batch, length, width = x.shape
        dim = width // self.heads
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        else:
            o = F.dropout(torch.softmax(q @ k.transpose(-1, -2) * dim ** -0.5, -1), self.dropout) @ v
        return self.out(o.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = self.norm1(x + F.dropout(self.attention(x), self.dropout))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout))


def median_ms(function, repeats=7, in_a_row=5):
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(in_a_row):
            function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / in_a_row)
    return statistics.median(times)


def peer(width, heads, length, dropout, way):
    """Returns ms of forward, and of forward with backward."""
    torch.manual_seed(0)
    torch.compiler.reset()
    layer = Layer(width, heads, dropout, way != "eager").cuda().half()
    run = torch.compile(layer, dynamic=False) if way == "compile" else layer
    x = torch.randn(TOKENS // length, length, width, device="cuda", dtype=torch.float16, requires_grad=True)
    dy = torch.randn_like(x) * 1e-3
    inputs = [x, *layer.parameters()]
    return median_ms(lambda: run(x)), median_ms(lambda: torch.autograd.grad(run(x), inputs, dy))


def engine_cells(program, dropout):
    """Returns {(width, heads, length): ms of forward, and with backward}."""
    text = subprocess.run([program, "--fusion=bound", "--encoder", "float16", str(round(256 * dropout))], check=True,
                          capture_output=True, text=True).stdout
    cells = {}
    for width, heads, _, length, forward, backward in LINE.findall(text):
        cells[int(width), int(heads), int(length)] = float(forward), float(forward) + float(backward)
    return cells


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0, 0.1])
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1024, 2048])
    parser.add_argument("--json", help="where all figures go")
    parser.add_argument("--benchmark", default="bazel-bin/kernels/layers/cuda/layers_benchmark")
    args = parser.parse_args()
    rows = []
    for dropout in args.dropouts:
        cells = engine_cells(args.benchmark, dropout)
        for width, heads in SIZES:
            for length in LENGTHS if width in args.widths else ():
                row = {"width": width, "heads": heads, "length": length, "dropout": dropout,
                       "attnd": cells[width, heads, length]}
                for way in ("eager", "sdpa", "compile"):
                    row[way] = peer(width, heads, length, dropout, way)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    for n, what in enumerate(("forward", "forward with backward")):
        def speed(row):
            return min(row["sdpa"][n], row["compile"][n]) / row["attnd"][n]
        print(f"{what}: width heads length dropout | attnd eager sdpa compile, ms | over the better, over eager")
        for row in sorted(rows, key=speed):
            times = " ".join(f"{row[way][n]:7.3f}" for way in ("attnd", "eager", "sdpa", "compile"))
            print(f"  {row['width']:5} {row['heads']:3} {row['length']:5} {row['dropout']:4} | {times} | {speed(row):.2f} "
                  f"{row['eager'][n] / row['attnd'][n]:.2f}")
        over_eager = [row["eager"][n] / row["attnd"][n] for row in rows]
        print(f"  geometric mean {statistics.geometric_mean(map(speed, rows)):.3f}, worst {min(map(speed, rows)):.2f}; "
              f"over eager mean {statistics.fmean(over_eager):.2f}, worst {min(over_eager):.2f}")


if __name__ == "__main__":
    main()
