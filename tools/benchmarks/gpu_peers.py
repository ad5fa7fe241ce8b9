"""The cuda engine against PyTorch's attention on the same GPU: cuDNN, flash, unfused eager and, under masks,
FlexAttention. Of float32: memory-efficient, PyTorch's math backend and eager, with the errors of all against float64.

Every figure is the time that a call's kernels take on the GPU, launches and transfers left out, by torch.profiler
(CUPTI): the median of several runs after a rest. Zeroing dQ's sums, which attnd's engine does while tensors travel,
counts. They take turns, cell by cell. Before a cell is timed, attnd's results are compared with the peers' (without
dropout; with it each draws its own, and the conformance tests check attnd's). FLOPs are 4·B·H·N²·D forward and
10·B·H·N²·D backward, half of it if causal; B·N = --tokens, H·D = --hidden.
Masks count milliseconds. Rows stand in the order of attnd's speed over that of the best peer, losses first.
With --ways there are no peers: each mask's call as attnd chooses its kernel beside the same with each way forced
(listed tiles, small ones, residue classes), the least happy choices first.

Needs: torch with CUDA, and bazel build //tools/benchmarks:libattention.so.
Run:   python3 tools/benchmarks/gpu_peers.py [--lengths 2048 4096] [--dropouts 0] [--masks] [--json F] [--plot F] ...
"""
import argparse
import ctypes
import json
import math
import statistics
import sys
import time

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from cpu_against_pytorch import ELEMENTS, LIBRARY, BenchmarkProblem, Engine
from masks import DESCRIBED, dense, makers

sdpa = torch.nn.functional.scaled_dot_product_attention
REST = 0.05  # seconds before each measurement: boost clocks fall under load
SEVEN = ("causal", "window 256", "band", "longformer", "bigbird", "strided 64", "document")
WAYS = ("listed", "small", "residue")


def median_ms(function, repeats):
    """Measures the kernels and memsets of a call."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        time.sleep(REST)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            function()
            torch.cuda.synchronize()
        times.append(busy_us([event.time_range for event in trace.events()
                              if event.device_type == DeviceType.CUDA and "Memcpy" not in event.name]) / 1e3)
    return statistics.median(times)


def busy_us(ranges):
    """While one of them runs: kernels may overlap."""
    busy, end = 0, -math.inf
    for at in sorted(ranges, key=lambda at: at.start):
        busy += max(0, at.end - max(at.start, end))
        end = max(end, at.end)
    return busy


def distance(a, b):
    """Relative, in the Frobenius norm."""
    a, b = a.detach().cpu().float(), b.detach().cpu().float()
    return ((a - b).norm() / b.norm()).item()


def errors(results, exact):
    """The largest of o, dQ, dK and dV, of the heads that `exact` has."""
    batch, heads = exact[0].shape[:2]
    return max((r[:batch, :heads].detach().cpu().double() - e).norm().item() / e.norm().item()
               for r, e in zip(results, exact))


class Cell:
    """One shape on both sides: device tensors for the peers, the same numbers in host memory for attnd."""

    def __init__(self, args, length, dim, causal, dropout):
        self.args, self.length, self.dim, self.causal, self.dropout = args, length, dim, causal, dropout
        number, self.dtype = ELEMENTS[args.element]
        batch, heads = max(1, args.tokens // length), args.hidden // dim
        shape = (batch, heads, length, dim)
        torch.manual_seed(length + dim)
        self.device = [torch.randn(shape, device="cuda", dtype=self.dtype) for _ in range(4)]
        self.host = [t.cpu() for t in self.device]
        self.out, *self.slopes = [torch.zeros_like(self.host[0]) for _ in range(4)]
        self.lse = torch.zeros(shape[:3])
        self.problem = BenchmarkProblem(batch, heads, heads, length, length, dim, number, int(causal),
                                        round(256 * dropout), 0)
        self.flops = 4 * batch * heads * length * length * dim * (0.5 if causal else 1)

    def exact(self):
        """o, dQ, dK and dV in float64, of two heads of the first batch entry."""
        leaves = [t[:1, :2].double().requires_grad_() for t in self.device[:3]]
        with sdpa_kernel(SDPBackend.MATH):
            out = sdpa(*leaves, is_causal=self.causal)
        slopes = torch.autograd.grad(out, leaves, self.device[3][:1, :2].double())
        return [t.detach().cpu() for t in (out, *slopes)]

    def leaves(self):
        return [t.clone().requires_grad_() for t in self.device[:3]]

    def forward(self, engine):
        engine.call("forward", self.problem, *self.host[:3], self.out, self.lse)

    def backward(self, engine):
        engine.call("backward", self.problem, *self.host[:3], self.out, self.lse, self.host[3], *self.slopes)

    def ours(self, engine, what):
        """(kernels' names, median ms)"""
        self.problem.nondeterministic = int(what == "backward, atomics")
        call = self.forward if what == "forward" else self.backward
        ms = median_ms(lambda: call(engine), self.args.repeats)
        return engine.kernel()[0], ms

    def peer(self, function, exact):
        """{forward, backward: ms} of function(q, k, v), and how far its results are from attnd's last ones (and from
        `exact`, if there is one)."""
        leaves = self.leaves()
        out = function(*leaves)
        slopes = torch.autograd.grad(out, leaves, self.device[3], retain_graph=True)
        apart = max(map(distance, [out, *slopes], [self.out, *self.slopes]))
        error = errors([out, *slopes], exact) if exact else math.nan
        with torch.no_grad():
            forward = median_ms(lambda: function(*leaves), self.args.repeats)
        backward = median_ms(lambda: torch.autograd.grad(out, leaves, self.device[3], retain_graph=True),
                             self.args.repeats)
        return {"forward": forward, "backward": backward, "apart": apart, "error": error}


def eager(cell):
    """matmul, softmax, dropout, matmul."""
    hidden = []  # of the causal mask, once it is used: of long rows it finds no room

    def run(q, k, v):
        scores = q @ k.transpose(-1, -2) * cell.dim**-0.5
        if cell.causal:
            if not hidden:
                hidden.append(torch.full(scores.shape[-2:], -math.inf, device="cuda", dtype=cell.dtype).triu(1))
            scores = scores + hidden[0]
        return torch.dropout(torch.softmax(scores, -1), cell.dropout, True) @ v

    return run


def fused(cell, backend):
    def run(q, k, v):
        with sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=cell.causal, dropout_p=cell.dropout)
    return run


def dense_peers(cell):
    if cell.dtype == torch.float32:  # the others refuse it
        return {"efficient": fused(cell, SDPBackend.EFFICIENT_ATTENTION), "math": fused(cell, SDPBackend.MATH),
                "eager": eager(cell)}
    return {"cudnn": fused(cell, SDPBackend.CUDNN_ATTENTION), "flash": fused(cell, SDPBackend.FLASH_ATTENTION),
            "eager": eager(cell)}


def mask_peers(mask):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    length, there = mask.shape[0], mask.cuda()
    block_mask = create_block_mask(lambda b, h, i, j: there[i, j], None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return {"flex": lambda q, k, v: compiled(q, k, v, block_mask=block_mask)}


def measure(cell, engine, peers, name):
    """A row for each direction."""
    cell.forward(engine)
    cell.backward(engine)
    theirs, exact = {}, cell.exact() if cell.dtype == torch.float32 and cell.dropout == 0 else None
    error = errors([cell.out, *cell.slopes], exact) if exact else math.nan
    for peer, function in peers.items():
        try:
            theirs[peer] = cell.peer(function, exact)
        except (torch.cuda.OutOfMemoryError, RuntimeError) as refused:
            print(f"{name}: {peer}: {str(refused).splitlines()[0][:90]}", file=sys.stderr)
        torch.cuda.empty_cache()
    apart = max((t["apart"] for t in theirs.values()), default=math.nan)
    if cell.dropout == 0 and apart > cell.args.tolerance:
        raise RuntimeError(f"{name}: results are {apart:.1e} apart")
    for what in ("forward", "backward", "backward, atomics"):
        kernel, ms = cell.ours(engine, what)
        of = {peer: t[what.split(",")[0]] for peer, t in theirs.items()}
        best = min((t for peer, t in of.items() if peer != "eager"), default=math.nan)
        yield {"cell": name, "N": cell.length, "D": cell.dim, "causal": cell.causal, "dropout": cell.dropout,
               "what": what, "kernel": kernel, "ms": ms, "peers": of, "ratio": best / ms, "apart": apart,
               "error": error, "errors": {peer: t["error"] for peer, t in theirs.items()},
               "flops": cell.flops * (1 if what == "forward" else 2.5)}


def cells(args):
    """(cell, its mask as bool [N, N] or None, name)"""
    for dim in args.dims:
        for length in args.lengths:
            if args.masks or args.ways:
                made = makers(length)
                for name in args.only or (made if args.ways else SEVEN):
                    yield Cell(args, length, dim, False, 0.0), dense(made[name](), length), name
                continue
            for causal in (False, True):
                for dropout in args.dropouts:
                    yield Cell(args, length, dim, causal, dropout), None, "causal" if causal else "full"


def select(engine, problem, mask, name):
    """The mask of later calls: by its words where it has some."""
    if mask is not None and name in DESCRIBED:
        done = engine.library.attnd_benchmark_mask_text(engine.handle, problem, DESCRIBED[name].encode())
    else:
        bits = None if mask is None else np.packbits(mask.numpy(), axis=1, bitorder="little")
        pointer = None if mask is None else ctypes.c_void_p(bits.ctypes.data)
        done = engine.library.attnd_benchmark_mask(engine.handle, problem, pointer, 0)
    if done != 0:
        raise RuntimeError("attnd_benchmark_mask failed")


def run(args, engine):
    for cell, mask, name in cells(args):
        select(engine, ctypes.byref(cell.problem), mask, name)
        for row in measure(cell, engine, dense_peers(cell) if mask is None else mask_peers(mask), name):
            print(line(row, args.masks), flush=True)
            yield row


def choices(args, engine):
    """A row for each direction of each mask: {way: ms}, "chosen" among them; of ways that cannot run nothing."""
    engines = {"chosen": engine} | {way: Engine(args.library, 0, f"cuda {way}") for way in WAYS}
    for cell, mask, name in cells(args):
        for what in ("forward", "backward"):
            times, kernel = {}, ""
            for way, of in engines.items():
                try:
                    select(of, ctypes.byref(cell.problem), mask, name)
                    names, times[way] = cell.ours(of, what)
                    kernel = kernel or names
                except RuntimeError:
                    if way == "chosen":
                        raise
            best = min(ms for way, ms in times.items() if way != "chosen")
            yield {"cell": name, "N": cell.length, "D": cell.dim, "what": what, "kernel": kernel, "ms": times,
                   "over_best": times["chosen"] / best, "density": mask.float().mean().item()}


def print_choices(rows):
    print("\n| over the best way | what | head_dim | length | mask | density | " + " | ".join(("chosen", *WAYS)) +
          " | kernel |\n|" + "---|" * (8 + len(WAYS)))
    for row in sorted(rows, key=lambda row: -row["over_best"]):
        times = " | ".join(f"{row['ms'][way]:.3f}" if way in row["ms"] else "" for way in ("chosen", *WAYS))
        print(f"| {row['over_best']:.2f} | {row['what']} | D {row['D']} | N {row['N']} | {row['cell']} | "
              f"{row['density']:.3f} | {times} | {row['kernel'].split(':')[0]} |")
    near = sum(row["over_best"] <= 1.05 for row in rows)
    print(f"within 5 % of the best way: {near} of {len(rows)}, worst {max(row['over_best'] for row in rows):.3f}")


def line(row, masks):
    def speed(ms):
        return f"{ms:.3f} ms" if masks else f"{row['flops'] / ms / 1e9:.0f}"
    peers = ", ".join(f"{peer} {speed(ms)}" for peer, ms in row["peers"].items())
    if row["error"] == row["error"]:  # error (attnd's over that peer's)
        peers += "; error " + f"{row['error']:.1e}, " + ", ".join(
            f"{peer} {error:.1e} ({row['error'] / error:.2f})" for peer, error in row["errors"].items())
    return (f"| {row['ratio']:.2f} | {row['what']} | D {row['D']} | N {row['N']} | {row['cell']} | {row['dropout']} | "
            f"{speed(row['ms'])} | {peers} |")


def plot(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward")):
        for dim in sorted({row["D"] for row in rows}):
            for cell in sorted({row["cell"] for row in rows}):
                of = sorted((row["N"], row["ratio"]) for row in rows
                            if (row["what"], row["D"], row["cell"], row["dropout"]) == (direction, dim, cell, 0.0))
                axis.plot(*zip(*of), marker="o", label=f"D {dim}, {cell}") if of else None
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(title=direction, xlabel="N", xscale="log", ylabel="speed over the best peer's")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--element", choices=ELEMENTS, default="float16")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--masks", action="store_true", help="seven masks against FlexAttention instead")
    parser.add_argument("--ways", action="store_true", help="masks: the kernel chosen beside each forced")
    parser.add_argument("--only", nargs="+", help="these masks (tools/benchmarks/masks.py)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tolerance", type=float, default=5e-3, help="relative, between results")
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--json", help="where to write all rows")
    parser.add_argument("--plot", help="where to draw the ratios (matplotlib)")
    args = parser.parse_args()
    engine = Engine(args.library, 0, "cuda")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, attnd {engine.architecture()}, {args.element}")
    if args.ways:
        return print_choices(list(choices(args, engine)))
    rows = list(run(args, engine))
    print("\n| of the best peer | what | head_dim | length | mask | dropout | attnd | peers |\n|" + "---|" * 8)
    for row in sorted(rows, key=lambda row: row["ratio"]):
        print(line(row, args.masks))
    ratios = [row["ratio"] for row in rows if row["ratio"] > 0]
    print(f"geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}, worst {min(ratios):.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
