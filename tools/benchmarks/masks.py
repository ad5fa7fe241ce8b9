"""The CPU engine under masks, against its own dense call and against PyTorch on the same machine, threads and tensors:
scaled_dot_product_attention with the bool array as attn_mask and, with --flex, compiled flex_attention (forward
alone).

The masks are STOF's, SPLAT's, Longformer's, BigBird's and the Sparse Transformer's, and patterns with the sizes that
SAT publishes: symmetric, a share of 32 x 32 blocks (N 1024). Results are compared before anything is printed. E is
(dense time / masked time) · density, 1 where skipping is free. Order and medians as in cpu_against_pytorch.py; the
last table has the losses first.

Run:   python3 tools/benchmarks/masks.py [--lengths 1024 4096 16384] [--dims 32 64 128] [--masks bigbird] [--flex] ...
"""
import argparse
import ctypes
import functools
import json
import math
import os
import statistics
import sys
import time

import numpy as np
import torch

from cpu_against_pytorch import ELEMENTS, LIBRARY, Case, Engine, check, seconds

# Described in words, as attnctl takes them; all others by their bits.
DESCRIBED = {"strided 64": "stride(64)", "strided 64 causal": "stride(64) & causal", "dilated": "dilated(4,16,16)"}
# Blocks of 1024 that SAT's published patterns keep.
SAT_BLOCKS = {"SAT image": 51, "SAT nature": 39, "SAT news": 81}


def blocks_of(n, size, share, seed):
    """This share of size x size blocks."""
    chosen = torch.rand(-(-n // size), -(-n // size), generator=torch.Generator().manual_seed(seed)) < share
    return lambda i, j: chosen[i // size, j // size]


def symmetric_blocks(n, kept, seed):
    """The diagonal's 32 x 32 blocks and pairs of others, `kept` of 1024 together."""
    side = n // 32
    pairs = torch.randperm(side * (side - 1) // 2, generator=torch.Generator().manual_seed(seed))
    rows, columns = torch.tril_indices(side, side, -1)[:, pairs[:max(0, kept * side * side // 1024 - side) // 2]]
    chosen = torch.eye(side, dtype=torch.bool)
    chosen[rows, columns] = chosen[columns, rows] = True
    return lambda i, j: chosen[i // 32, j // 32]


def random_scores(n, share):
    chosen = torch.rand(n, n, generator=torch.Generator().manual_seed(8)) < share
    return lambda i, j: chosen[i, j]


def either(one, other):
    return lambda i, j: one(i, j) | other(i, j)


def makers(n):
    """{name: function that makes sees(i, j), whether row i sees key j}."""
    root = round(math.sqrt(n))

    def longformer(i, j):
        return ((i - j).abs() <= root) | (i < root) | (j < root)

    closed = {
        "causal": lambda i, j: i >= j,
        "window 256": lambda i, j: (i >= j) & (i - j <= 256),
        "band": lambda i, j: (i - j).abs() <= root,
        "longformer": longformer,
        "strided 64": lambda i, j: i % 64 == j % 64,
        "document": lambda i, j: (i >= j) & (i * 8 // n == j * 8 // n),
        "blocked": lambda i, j: (i // 64 == j // 64) | (i // 64 == j // 64 + 1),
        "strided 64 causal": lambda i, j: (i % 64 == j % 64) & (i >= j),
        "dilated": lambda i, j: ((i - j) % 4 == 0) & ((i - j).abs() <= 64),
        "prefix": lambda i, j: (i >= j) | (j < n // 4),
        "sparse strided": lambda i, j: (i >= j) & ((i - j < root) | ((i - j) % root == 0)),
        "sparse fixed": lambda i, j: (i >= j) & ((i // 64 == j // 64) | (j % 64 >= 56)),
    }
    drawn = {
        "bigbird": lambda: either(longformer, blocks_of(n, 64, 0.1, 7)),
        "random 30 %": lambda: random_scores(n, 0.3),
        "STOF bigbird": lambda: either(longformer, blocks_of(n, 32, 0.1, 7)),
        "random 32s, 5 %": lambda: blocks_of(n, 32, 0.05, 9),
        "random 60 %": lambda: random_scores(n, 0.6),
    }
    masks = {**{name: functools.partial(lambda sees: sees, sees) for name, sees in closed.items()}, **drawn}
    if n == 1024:
        for name, kept in SAT_BLOCKS.items():
            masks[name] = functools.partial(symmetric_blocks, n, kept, 3)
    return masks


def dense(sees, n):
    """bool [n, n]."""
    return sees(torch.arange(n)[:, None], torch.arange(n)[None, :])


class MaskedCase(Case):
    """One shape under one mask."""

    def __init__(self, engine, args, length, dim, name, sees):
        super().__init__(engine, args, length, dim, False)
        self.sees, self.mask = sees, dense(sees, length)
        self.bits = np.packbits(self.mask.numpy(), axis=1, bitorder="little")
        self.text = DESCRIBED.get(name)
        self.flex = None

    def select(self, kind):
        """Selects the form of attnd's next calls: "described", "array" or "dense"."""
        library, problem = self.engine.library, ctypes.byref(self.problem)
        if kind == "described" and self.text:
            done = library.attnd_benchmark_mask_text(self.engine.handle, problem, self.text.encode())
        else:
            bits = None if kind == "dense" else ctypes.c_void_p(self.bits.ctypes.data)
            done = library.attnd_benchmark_mask(self.engine.handle, problem, bits, int(kind == "array"))
        if done != 0:
            raise RuntimeError("attnd_benchmark_mask failed")

    def torch_forward(self):
        self.leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        self.out = torch.nn.functional.scaled_dot_product_attention(*self.leaves, attn_mask=self.mask)

    def flex_forward(self):
        if self.flex is None:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention
            sees, length = self.sees, self.mask.shape[0]
            block_mask = create_block_mask(lambda b, h, i, j: sees(i, j), None, None, length, length, device="cpu")
            torch._dynamo.reset()  # or the ninth mask would run uncompiled
            compiled = torch.compile(flex_attention)
            self.flex = lambda: compiled(self.q, self.k, self.v, block_mask=block_mask)
        with torch.no_grad():
            self.flex_out = self.flex()


def kinds(args):
    return ["torch"] * (not args.alone) + ["described", "dense"] + ["array"] * args.array


def measure(case, args, clock):
    """({(what, direction): [seconds of each repeat]}, attnd's kernel), in turn."""
    times, kernel = {}, ""
    for repeat in range(args.repeats + 1):
        for kind in kinds(args):
            if kind != "torch":
                case.select(kind)
            for direction in ("forward", "backward"):
                side = "torch" if kind == "torch" else "attnd"
                spent = seconds(getattr(case, f"{side}_{direction}"), clock)
                if repeat > 0:
                    times.setdefault((kind, direction), []).append(spent)
            if kind == "described":
                kernel = case.engine.kernel()[0].removeprefix("cpu_backward_")
            if kind in ("described", "array") and repeat == 0 and not args.alone and check(case) > args.tolerance:
                raise RuntimeError(f"{kind}: results differ by {check(case)}")
        if args.flex:
            spent = seconds(case.flex_forward, clock)
            if repeat > 0:
                times.setdefault(("flex", "forward"), []).append(spent)
            elif (case.flex_out - case.out).abs().max() > args.tolerance:
                raise RuntimeError("flex_attention's results differ")
    return times, kernel


def rows(times, density):
    """A row's figures for each direction and both together."""
    for direction in ("forward", "backward", "both"):
        def of(kind):
            if direction != "both":
                return times.get((kind, direction), [math.nan])
            return [a + b for a, b in zip(times.get((kind, "forward"), [math.nan]),
                                          times.get((kind, "backward"), [math.nan]))]

        def ratio(a, b):
            return statistics.median(x / y for x, y in zip(of(a), of(b)))

        yield {"direction": direction, "ms": 1e3 * min(of("described")), "dense ms": 1e3 * min(of("dense")),
               "of dense": ratio("dense", "described"), "E": ratio("dense", "described") * density,
               "of PyTorch": ratio("torch", "described"), "of the array": ratio("array", "described"),
               "of flex": ratio("flex", "described")}


COLUMNS = ("N", "D", "mask", "density", "kernel", "direction", "ms", "dense ms", "of dense", "E", "of PyTorch", "of flex",
           "of the array")


def line(row):
    return "| " + " | ".join(f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in COLUMNS) + " |"


def run(args, engine, clock):
    for length in args.lengths:
        for name, make in makers(length).items():
            if args.masks and name not in args.masks:
                continue
            sees = make()
            density = dense(sees, length).count_nonzero().item() / length ** 2
            for dim in args.dims:
                times, kernel = measure(MaskedCase(engine, args, length, dim, name, sees), args, clock)
                for row in rows(times, density):
                    yield {"N": length, "D": dim, "mask": name, "density": density, "kernel": kernel, **row}


def losses_first(row):
    return min(x for x in (row["of PyTorch"], row["of flex"], row["of dense"]) if not math.isnan(x))


def plot(table, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward")):
        for length in sorted({row["N"] for row in table}):
            of = sorted((row["density"], row["E"]) for row in table
                        if (row["direction"], row["N"]) == (direction, length))
            axis.plot(*zip(*of), marker="o", linestyle="", label=f"N {length}")
        axis.set(title=direction, xlabel="density", xscale="log", ylabel="E")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--masks", nargs="+")
    parser.add_argument("--element", choices=ELEMENTS, default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="between the results of both sides")
    parser.add_argument("--alone", action="store_true", help="without PyTorch, whose N² arrays and time grow")
    parser.add_argument("--array", action="store_true", help="attnd with the bool array too")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--processor_time", action="store_true", help="as in cpu_against_pytorch.py")
    parser.add_argument("--json", help="where to write all rows")
    parser.add_argument("--plot", help="where to draw E (matplotlib)")
    args = parser.parse_args()
    args.dropout = 0.0
    clock = time.process_time if args.processor_time else time.perf_counter
    torch.set_num_threads(args.threads)
    engine = Engine(args.library, args.threads)
    print(f"PyTorch {torch.__version__}, attnd {engine.architecture()}, {args.threads} threads, batch {args.batch}, "
          f"{args.heads} heads, {args.element}", flush=True)
    table = []
    for row in run(args, engine, clock):
        print(line(row), file=sys.stderr, flush=True)
        table.append(row)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in sorted(table, key=losses_first):
        print(line(row))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(table, file, indent=1)
    if args.plot:
        plot(table, args.plot)


if __name__ == "__main__":
    main()
