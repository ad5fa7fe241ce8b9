"""The CPU engine under masks against PyTorch on the same machine, threads and tensors: scaled_dot_product_attention
with the bool array as attn_mask and, with --flex, compiled flex_attention (forward alone).

attnd runs each mask by description and as a bool array. Order and medians as in cpu_against_pytorch.py; results are
compared before anything is printed. E is (attnd's dense time / its masked time) · density, 1 where skipping is free.

Run:   python3 tests/benchmarks/cpu_masks_against_pytorch.py [--lengths 4096] [--dims 64] [--masks bigbird] [--flex] ...
"""
import argparse
import ctypes
import math
import os
import statistics
import time

import numpy as np
import torch

from cpu_against_pytorch import ELEMENTS, LIBRARY, Case, Engine, check, seconds


def by_name(n):
    """{name: whether row i sees key j}: the masks that FlexAttention's and STOF's authors measure."""
    root = round(math.sqrt(n))
    blocks = torch.rand(n // 64, n // 64, generator=torch.Generator().manual_seed(7)) < 0.1
    scores = torch.rand(n, n, generator=torch.Generator().manual_seed(8)) < 0.3

    def longformer(i, j):
        return ((i - j).abs() <= root) | (i < root) | (j < root)
    return {
        "causal": lambda i, j: i >= j,
        "window 256": lambda i, j: (i >= j) & (i - j <= 256),
        "band": lambda i, j: (i - j).abs() <= root,
        "longformer": longformer,
        "bigbird": lambda i, j: longformer(i, j) | blocks[i // 64, j // 64],
        "strided 64": lambda i, j: i % 64 == j % 64,
        "document": lambda i, j: (i >= j) & (i * 8 // n == j * 8 // n),
        "blocked": lambda i, j: (i // 64 == j // 64) | (i // 64 == j // 64 + 1),
        "random 30 %": lambda i, j: scores[i, j],
    }


class MaskedCase(Case):
    """One shape under one mask."""

    def __init__(self, engine, args, length, dim, sees):
        super().__init__(engine, args, length, dim, False)
        self.sees, self.mask = sees, sees(torch.arange(length)[:, None], torch.arange(length)[None, :])
        self.bits, self.flex = np.packbits(self.mask.numpy(), axis=1, bitorder="little"), None

    def select(self, kind):
        """Of attnd's next calls: "described", "array" or "dense"."""
        bits = None if kind == "dense" else ctypes.c_void_p(self.bits.ctypes.data)
        if self.engine.library.attnd_benchmark_mask(self.engine.handle, ctypes.byref(self.problem), bits,
                                                    int(kind == "array")) != 0:
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


def measure(case, args, clock):
    """{what: [seconds of each repeat]}, in turn."""
    times = {}
    for repeat in range(args.repeats + 1):
        for kind in ("torch", "described", "array", "dense"):
            if kind != "torch":
                case.select(kind)
            for direction in ("forward", "backward"):
                side = "torch" if kind == "torch" else "attnd"
                spent = seconds(getattr(case, f"{side}_{direction}"), clock)
                if repeat > 0:
                    times.setdefault((kind, direction), []).append(spent)
            if kind in ("described", "array") and repeat == 0 and check(case) > args.tolerance:
                raise RuntimeError(f"{kind}: results differ by {check(case)}")
        if args.flex:
            spent = seconds(case.flex_forward, clock)
            if repeat > 0:
                times.setdefault(("flex", "forward"), []).append(spent)
            elif (case.flex_out - case.out).abs().max() > args.tolerance:
                raise RuntimeError("flex_attention's results differ")
    return times


def rows(times, density):
    """(direction, PyTorch ms, attnd ms, of PyTorch, as an array, E, of flex) for forward and forward + backward."""
    for direction in ("forward", "both"):
        def of(kind):
            if direction == "forward":
                return times[kind, "forward"]
            return [a + b for a, b in zip(times[kind, "forward"], times[kind, "backward"])]

        def ratio(a, b):
            return statistics.median(x / y for x, y in zip(a, b))

        flex = ratio(times["flex", "forward"], of("described")) if direction == "forward" and \
            ("flex", "forward") in times else float("nan")
        yield (direction, min(of("torch")), min(of("described")), ratio(of("torch"), of("described")),
               ratio(of("torch"), of("array")), ratio(of("dense"), of("described")) * density, flex)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--dims", type=int, nargs="+", default=[64])
    parser.add_argument("--masks", nargs="+")
    parser.add_argument("--element", choices=ELEMENTS, default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="between the results of both sides")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--processor_time", action="store_true", help="as in cpu_against_pytorch.py")
    args = parser.parse_args()
    args.dropout = 0.0
    clock = time.process_time if args.processor_time else time.perf_counter
    torch.set_num_threads(args.threads)
    engine = Engine(args.library, args.threads)
    print(f"PyTorch {torch.__version__}, attnd {engine.architecture()}, {args.threads} threads, batch {args.batch}, "
          f"{args.heads} heads, {args.element}")
    print("| N | D | mask | density | direction | PyTorch ms | attnd ms | ratio | ratio, as array | E | flex ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for length in args.lengths:
        for dim in args.dims:
            for name, sees in by_name(length).items():
                if args.masks and name not in args.masks:
                    continue
                case = MaskedCase(engine, args, length, dim, sees)
                density, times = case.mask.float().mean().item(), measure(case, args, clock)
                for direction, theirs, ours, ratio, array, efficiency, flex in rows(times, density):
                    print(f"| {length} | {dim} | {name} | {density:.3f} | {direction} | {theirs * 1e3:.1f} | "
                          f"{ours * 1e3:.1f} | {ratio:.2f} | {array:.2f} | {efficiency:.2f} | {flex:.2f} |", flush=True)


if __name__ == "__main__":
    main()
