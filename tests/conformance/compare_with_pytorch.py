"""The error of attnd's CPU engine beside PyTorch's own, both against float64 on the same stored inputs.

For O, dQ, dK and dV of each case: the largest absolute error of both, their ratio, and the mean absolute and mean
relative error (Σ|error| / Σ|exact|) of attnd. "eager" is PyTorch's softmax(QKᵀ)V in the same element type, "SDPA" its
scaled_dot_product_attention. Exits 1 when attnd's largest error exceeds twice SDPA's anywhere.

Needs: torch and bazel build //tools/benchmarks:libattention.so.
Run:   python3 tests/conformance/compare_with_pytorch.py [--lengths 512 2048] [--dims 64 128] [--seeds 1 2 3]
"""
import argparse
import itertools
import os
import sys

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools", "benchmarks"))
from cpu_against_pytorch import ELEMENTS, LIBRARY, BenchmarkProblem, Engine  # noqa: E402

TENSORS = ("O", "dQ", "dK", "dV")
VALUES = {"normal": torch.randn, "uniform": torch.rand}


def eager(q, k, v, causal):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def sdpa(q, k, v, causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def with_gradients(function, inputs, d_o, causal):
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves, causal)
    out.backward(d_o)
    return [out.detach()] + [leaf.grad for leaf in leaves]


def by_attnd(engine, element, inputs, d_o, causal):
    batch, heads, length, dim = d_o.shape
    problem = BenchmarkProblem(batch, heads, heads, length, length, dim, ELEMENTS[element][0], int(causal), 0, 0)
    o, d_q, d_k, d_v = (torch.empty_like(d_o) for _ in range(4))
    lse = torch.empty(d_o.shape[:3])
    engine.call("forward", problem, *inputs, o, lse)
    engine.call("backward", problem, *inputs, o, lse, d_o, d_q, d_k, d_v)
    return [o, d_q, d_k, d_v]


def largest(result, exact):
    return (result.double() - exact).abs().max().item()


class Row:
    """One tensor of one case: the errors of the three, and attnd's to SDPA's."""

    def __init__(self, exact, ours, theirs, plain):
        error = (ours.double() - exact).abs()
        self.attnd, self.sdpa, self.eager = error.max().item(), largest(theirs, exact), largest(plain, exact)
        self.ratio = self.attnd / self.sdpa
        self.mean, self.relative = error.mean().item(), (error.sum() / exact.abs().sum()).item()

    def cells(self):
        return (f"{self.attnd:.2e} | {self.sdpa:.2e} | {self.eager:.2e} | {self.ratio:.2f} | "
                f"{self.mean:.1e} | {100 * self.relative:.4f} %")


def measure(engine, element, values, length, dim, causal, heads):
    """{tensor: Row} of one case."""
    tensors = [VALUES[values](1, heads, length, dim).to(ELEMENTS[element][1]) for _ in range(4)]
    inputs, d_o = tensors[:3], tensors[3]
    exact = with_gradients(eager, [t.double() for t in inputs], d_o.double(), causal)
    results = (by_attnd(engine, element, inputs, d_o, causal), with_gradients(sdpa, inputs, d_o, causal),
               with_gradients(eager, inputs, d_o, causal))
    return {name: Row(*errors) for name, *errors in zip(TENSORS, exact, *results)}


def print_summary(rows):
    """The largest of each column over shapes and masks."""
    print("\n| element | values | tensor | attnd max | SDPA max | eager max | largest attnd / SDPA | attnd mean abs |")
    print("|---|---|---|---|---|---|---|---|")
    for key in dict.fromkeys(key for key, _ in rows):
        group = [row for other, row in rows if other == key]
        most = {name: max(getattr(row, name) for row in group) for name in vars(group[0])}
        print(f"| {' | '.join(key)} | {most['attnd']:.2e} | {most['sdpa']:.2e} | {most['eager']:.2e} | "
              f"{most['ratio']:.2f} | {most['mean']:.1e} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--elements", choices=ELEMENTS, nargs="+", default=list(ELEMENTS))
    parser.add_argument("--values", choices=VALUES, nargs="+", default=list(VALUES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--library", default=LIBRARY)
    args = parser.parse_args()
    engine = Engine(args.library, os.cpu_count())
    print(f"PyTorch {torch.__version__}, attnd {engine.architecture()}, {args.heads} heads, seeds {args.seeds}\n")
    print("| element | values | N | D | mask | tensor | attnd max | SDPA max | eager max | attnd / SDPA | "
          "attnd mean abs | attnd mean rel |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for seed, element, values, length, dim, causal in itertools.product(
            args.seeds, args.elements, args.values, args.lengths, args.dims, (False, True)):
        torch.manual_seed(seed)
        for name, row in measure(engine, element, values, length, dim, causal, args.heads).items():
            print(f"| {element} | {values} | {length} | {dim} | {'causal' if causal else 'full'} | {name} | "
                  f"{row.cells()} |", flush=True)
            rows.append(((element, values, name), row))
    print_summary(rows)
    worst = max(row.ratio for _, row in rows)
    print(f"\nlargest attnd / SDPA: {worst:.2f}")
    sys.exit(worst > 2)


if __name__ == "__main__":
    main()
