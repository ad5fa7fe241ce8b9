"""Steps of a BERT-large-like stack on one daemon, and of its halves on two, which compute micro-batches at the same time.

24 layers of width 1024, 16 heads, feed-forward 4096, in float16; a step is a call of 65,536 tokens in sequences of 512, its
backward, and AdamW. Daemons listen on unix sockets, and tensors pass in shared memory. "one daemon": the better of one call
and of as many calls as there are micro-batches, in turn. Each time is the median of several steps after two.

Needs: two GPUs, torch, bazel build //server:attnd, and the Python package; with --backend cpu two cores.
Run:   python3 tools/benchmarks/micro_batches.py [--steps 8] [--micro_batches 8] [--timeline]
       python3 tools/benchmarks/micro_batches.py --backend cpu --precision f32 --layers 4 --width 512 --tokens 4096
"""
import argparse
import contextlib
import gc
import os
import statistics
import sys
import time

import torch
from running_daemon import ROOT, RunningDaemon
from torch import nn

sys.path.insert(0, os.path.join(ROOT, "client/python"))
import attnd.torch  # noqa: E402
from attnd.modules.module import Module  # noqa: E402

WARM_UP = 2


def parse():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--steps", type=int, default=8, help="of each way that are measured")
    add("--micro_batches", type=int, default=8)
    add("--tokens", type=int, default=65536, help="of a step")
    add("--length", type=int, default=512, help="of a sequence")
    add("--layers", type=int, default=24)
    add("--width", type=int, default=1024)
    add("--backend", default="cuda")
    add("--precision", default="f16", help="bf16, f16 or f32")
    add("--server", default="bazel-bin/server/attnd")
    add("--timeline", action="store_true", help="print when each call of the last step has begun and ended")
    return parser.parse_args()


def stack_of(args, **options):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.TransformerEncoderLayer(args.width, args.width // 64, 4 * args.width, 0.0, "gelu",
                                                       batch_first=True) for _ in range(args.layers)])
    stack = attnd.torch.offload(layers, max_rows=args.tokens, kept_rows=args.tokens, replay_mib=0, **options)
    return stack, attnd.torch.optimizer(torch.optim.AdamW(stack.parameters(), lr=1e-4))


def step(stack, optimizer, parts):
    begin = time.perf_counter()
    optimizer.zero_grad()
    for x, dy in parts:
        stack(x).backward(dy)
    optimizer.step()
    return time.perf_counter() - begin


@contextlib.contextmanager
def timeline(stacks, lines):
    """Has the calls of these stacks note what they were, and when."""
    names = {stack.module: number for number, stack in enumerate(stacks)}
    plain = {name: getattr(Module, name) for name in ("forward", "backward")}

    def noted(name):
        def call(self, *given, **options):
            begin = time.perf_counter()
            made = plain[name](self, *given, **options)
            lines.append((begin, time.perf_counter(), names.get(self), name))
            return made
        return call
    for name in plain:
        setattr(Module, name, noted(name))
    yield
    for name, call in plain.items():
        setattr(Module, name, call)


def main():
    args = parse()
    flags = ["--backend", args.backend, *(["--cpu_threads", "1"] if args.backend == "cpu" else [])]
    if args.backend == "cpu":
        torch.set_num_threads(1)  # daemons compute on the others
    with contextlib.ExitStack() as ended:
        for number, name in enumerate(("a", "b")):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
            daemon = ended.enter_context(RunningDaemon(args.server, *flags, shared=True))
            attnd.torch.connect(daemon.address, name=name, timeout=600,
                                precision=None if args.precision == "f32" else args.precision)
            ended.callback(attnd.torch.disconnect, name)
        generator = torch.Generator().manual_seed(1)
        x, dy = torch.randn(2, args.tokens // args.length, args.length, args.width, generator=generator)
        element = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[args.precision]
        x, dy = x.to(element), (dy / 1024).to(element)
        parts = list(zip(x.chunk(args.micro_batches), dy.chunk(args.micro_batches)))
        ways = {"one daemon, one call": (dict(server="a"), [(x, dy)]),
                "one daemon, calls in turn": (dict(server="a"), parts),
                "two daemons, one call": (dict(servers=["a", "b"]), [(x, dy)]),
                "two daemons, micro-batches": (dict(servers=["a", "b"], micro_batches=args.micro_batches), [(x, dy)])}
        times, lines = {}, []
        for name, (options, given) in ways.items():
            made = stack_of(args, **options)
            times[name] = [step(*made, given) for _ in range(WARM_UP + args.steps)]
            if args.timeline and "micro_batches" in options:
                with timeline(made[0].stacks, lines):
                    step(*made, given)
            del made
            gc.collect()  # its daemon has no room for the next one beside it
        medians = {name: statistics.median(each[WARM_UP:]) for name, each in times.items()}
        alone = min(took for name, took in medians.items() if name.startswith("one"))
        print(f"{args.layers} layers of width {args.width}, {args.precision}, {args.tokens} tokens a step in "
              f"{len(parts)} micro-batches\n\n| | ms a step | of one daemon's speed |\n|---|---|---|")
        for name, took in medians.items():
            print(f"| {name} | {1e3 * took:.1f} | {alone / took:.2f} |")
        for begin, end, daemon, name in sorted(lines):
            print(f"{1e3 * (begin - lines[0][0]):8.1f} to {1e3 * (end - lines[0][0]):8.1f} ms   "
                  f"{'                ' * daemon}{name} {'ab'[daemon]}")


if __name__ == "__main__":
    main()
