"""Errors of the cuda engine and of PyTorch's float16 attention against float64, on one GPU.

    bazel build //server:attnd //client/c:libattnd_client.so
    PYTHONPATH=client/python ATTND_CLIENT_LIBRARY=bazel-bin/client/c/libattnd_client.so \\
        python3 tests/conformance/gpu_accuracy.py [--largest N] [--head_dims 64 128 256] [--accumulate f32 f16]

The grid is SparkAttention's: head_dim 64 and 128 (and 256 beside it), 512 to 16384 tokens, causal
and not, inputs from N(0,1) and U(0,1), dO from N(0,1). Prints one row a case: relative error (mean
|x - exact| over mean |exact|; a mean of quotients means nothing where exact numbers cross zero), mean
absolute error, PyTorch's beside them, and what float16 alone costs: float64 throughout, but O (which
backward reads) and the gradients rounded to float16. Then the grid's means, which are held to the
paper's figures, while each case is held to twice PyTorch's own error in the same run. Exits with 1
where a bound is missed. Needs torch with CUDA.
"""

import argparse
import itertools
import json
import os
import pathlib
import sys

import attnd
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools", "benchmarks"))
from running_daemon import RunningDaemon  # noqa: E402

FORWARD_BOUND = {"f32": (3.5e-4, 1.9e-5), "f16": (7.6e-3, 1e-4)}
BACKWARD_BOUND = (2.3e-3, 2.2e-5)
NO_BOUND = (float("inf"), float("inf"))


def exact(q, k, v, d_o, causal, stored_o=None):
    """Forward and gradients in float64, in blocks of rows; delta from `stored_o` if given."""
    q, k, v, d_o = (t.double() for t in (q, k, v, d_o))
    o, d_q = torch.empty_like(q), torch.empty_like(q)
    d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
    scale, length = q.shape[-1] ** -0.5, q.shape[2]
    columns = torch.arange(length, device=q.device)
    for begin in range(0, length, 1024):
        rows = slice(begin, min(begin + 1024, length))
        s = scale * q[:, :, rows] @ k.transpose(-1, -2)
        if causal:
            s.masked_fill_(columns[None, :] > columns[rows, None], float("-inf"))
        p = torch.softmax(s, -1)
        o[:, :, rows] = p @ v
        d_v += p.transpose(-1, -2) @ d_o[:, :, rows]
        d_p = d_o[:, :, rows] @ v.transpose(-1, -2)
        delta_o = o if stored_o is None else stored_o.double()
        d_s = p * (d_p - (d_o[:, :, rows] * delta_o[:, :, rows]).sum(-1, keepdim=True)) * scale
        d_q[:, :, rows] = d_s @ k
        d_k += d_s.transpose(-1, -2) @ q[:, :, rows]
    return o, d_q, d_k, d_v


def errors(got, want):
    difference = (got.double() - want).abs().mean()
    return (difference / want.abs().mean()).item(), difference.item()


def torch_results(q, k, v, d_o, causal):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    o.backward(d_o)
    return o.detach(), *(t.grad for t in leaves)


def engine_results(client, q, k, v, d_o, causal, accumulate):
    arrays = [t.cpu().numpy() for t in (q, k, v, d_o)]
    forward = client.forward(*arrays[:3], causal="top_left" if causal else None, accumulate=accumulate)
    gradients = client.backward(arrays[3], forward)
    return tuple(torch.from_numpy(x).to(q.device)
                 for x in (forward.out, gradients.dq, gradients.dk, gradients.dv))


def draw(shape, distribution, generator):
    random = torch.randn if distribution == "N(0,1)" else torch.rand
    return random(shape, generator=generator, device="cuda").half()


def run_case(client, head_dim, length, causal, distribution, accumulate):
    generator = torch.Generator("cuda").manual_seed(length * 4 + head_dim + causal)
    tensors = [draw((1, 2, length, head_dim), distribution, generator) for _ in range(3)]
    tensors.append(draw((1, 2, length, head_dim), "N(0,1)", generator))
    wanted = exact(*tensors, causal)
    rounded = [x.half() for x in exact(*tensors, causal, stored_o=wanted[0].half())]
    names = ("o", "d_q", "d_k", "d_v")
    row = {"head_dim": head_dim, "length": length, "causal": causal, "inputs": distribution,
           "accumulate": accumulate}
    for who, got in (("attnd", engine_results(client, *tensors, causal, accumulate)),
                     ("torch", torch_results(*tensors, causal)), ("format", rounded)):
        row[who] = {name: errors(x, want) for name, x, want in zip(names, got, wanted)}
        backward = [row[who][name] for name in names[1:]]
        row[who]["backward"] = [sum(e[i] for e in backward) / 3 for i in range(2)]
    return row


def misses(row):
    """Errors of float32 accumulation beyond twice PyTorch's."""
    if row["accumulate"] == "f16":
        return []  # PyTorch accumulates in float32
    return [f"{part} {row['attnd'][part][1]:.3g} > 2x torch {row['torch'][part][1]:.3g}"
            for part in ("o", "d_q", "d_k", "d_v")
            if row["attnd"][part][1] > 2 * row["torch"][part][1]]


def mean_errors(rows, part):
    return {who: [sum(r[who][part][i] for r in rows) / len(rows) for i in range(2)]
            for who in ("attnd", "torch", "format")}


def summarize(rows):
    """Means by accumulator and distribution, head_dim 256 apart; what is beyond the paper's figures."""
    beyond = []
    for accumulate, distribution, wide in itertools.product(
            ("f32", "f16"), ("N(0,1)", "U(0,1)"), (False, True)):
        group = [r for r in rows if (r["accumulate"], r["inputs"], r["head_dim"] > 128) ==
                 (accumulate, distribution, wide)]
        for part, bound in (("o", FORWARD_BOUND[accumulate]), ("backward", BACKWARD_BOUND)):
            if group:
                name = f"{accumulate}, {distribution}, {'D 256, ' if wide else ''}{part}"
                beyond += report(group, name, part, NO_BOUND if wide else bound)
    return beyond


def report(group, name, part, bound):
    """Beyond is what exceeds the paper's figure although float16 alone would not."""
    mean = mean_errors(group, part)
    words = []
    for kind, got, torch_error, floor, limit in zip(
            ("relative", "absolute"), mean["attnd"], mean["torch"], mean["format"], bound):
        verdict = "ok" if got <= limit else "format" if floor > limit else "BEYOND"
        words.append(f"{kind} {got:.2e} (torch {torch_error:.2e}, float16 alone {floor:.2e}, "
                     f"paper {limit:.1e}: {verdict})")
    print(f"mean of {len(group)} cases, {name}: {', '.join(words)}")
    return [w for w in words if "BEYOND" in w]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=16384)
    parser.add_argument("--head_dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--accumulate", nargs="+", default=["f32", "f16"])
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    rows = []
    with RunningDaemon("bazel-bin/server/attnd", "--backend", "cuda", "--hbm_fraction", "0.05") as daemon:
        client = attnd.connect(daemon.address)
        for accumulate, head_dim in itertools.product(options.accumulate, options.head_dims):
            length = 512
            while length <= options.largest:
                for causal, distribution in itertools.product((False, True), ("N(0,1)", "U(0,1)")):
                    rows.append(run_case(client, head_dim, length, causal, distribution, accumulate))
                    show(rows[-1])
                length *= 2
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))
    beyond = summarize(rows)
    return 1 if beyond or any(misses(row) for row in rows) else 0


def show(row):
    pair = lambda who, part: "{:.2e} {:.2e}".format(*row[who][part])  # noqa: E731
    print(row["accumulate"], row["head_dim"], row["length"], "causal" if row["causal"] else "full",
          row["inputs"], "| o", pair("attnd", "o"), "torch", pair("torch", "o"), "| grads",
          pair("attnd", "backward"), "torch", pair("torch", "backward"), "| float16 alone",
          pair("format", "o"), pair("format", "backward"), "|",
          "; ".join(misses(row)) or "ok", flush=True)


if __name__ == "__main__":
    sys.exit(main())
