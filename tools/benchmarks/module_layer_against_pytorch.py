"""One encoder layer on the CPU engine of modules against torch.nn.TransformerEncoderLayer, same threads and shapes.

Both take turns (PyTorch, attnd, PyTorch, ...), so that what else the machine does meets both, with a pause before each:
threads of a library may spin after its work. Each figure is the median of the ratios of neighbours, PyTorch's time over
attnd's; milliseconds are the medians. 4 sequences of 512 rows.

Needs: torch (pip install torch) and bazel build //kernels/layers/cpu:module_benchmark.
Run:   python3 tools/benchmarks/module_layer_against_pytorch.py [--rounds 9] [--threads 2]
"""
import argparse
import os
import statistics
import subprocess
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.join(ROOT, "bazel-bin/kernels/layers/cpu/module_benchmark")
BATCH, LENGTH = 4, 512
PAUSE = 0.3  # seconds


class TorchLayer:
    def __init__(self, width, dropout, element):
        dtype = getattr(torch, element)
        self.layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=dropout, activation="gelu",
                                                      batch_first=True).to(dtype).train()
        self.x = torch.randn(BATCH, LENGTH, width, dtype=dtype, requires_grad=True)
        self.dy = torch.randn(BATCH, LENGTH, width, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-4)

    def round(self):
        """Milliseconds of forward, backward, step."""
        times = [time.perf_counter()]
        y = self.layer(self.x)
        times.append(time.perf_counter())
        y.backward(self.dy)
        times.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in zip(times, times[1:])]


class AttndLayer:
    def __init__(self, width, dropout, element, threads):
        self.process = subprocess.Popen([PROGRAM, str(width), str(round(256 * dropout)), element, str(threads)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def round(self):
        self.process.stdin.write("\n")
        return [float(number) for number in self.process.stdout.readline().split()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(width, dropout, element, args):
    ours, theirs = AttndLayer(width, dropout, element, args.threads), TorchLayer(width, dropout, element)

    def turn(layer):
        time.sleep(PAUSE)
        return layer.round()

    turn(theirs), turn(ours)
    pairs = [(turn(theirs), turn(ours)) for _ in range(args.rounds)]
    ours.close()

    def median(of):
        return statistics.median(of(*pair) for pair in pairs)

    whole = median(lambda t, a: (t[0] + t[1]) / (a[0] + a[1]))
    parts = [median(lambda t, a, n=n: t[n] / a[n]) for n in range(3)]
    mine = [median(lambda t, a, n=n: a[n]) for n in range(3)]
    print(f"| {width} | {element} | {dropout:.1f} | " + " / ".join(f"{m:.0f}" for m in mine) + " | " +
          " / ".join(f"{p:.2f}" for p in parts) + f" | {whole:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1024])
    parser.add_argument("--elements", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"PyTorch {torch.__version__}, {args.threads} threads, {args.rounds} rounds")
    print("| width | element | p | attnd ms forward / backward / step | ratios | forward + backward |")
    print("|---|---|---|---|---|---|")
    for element in args.elements:
        for width in args.widths:
            for dropout in (0.0, 0.1):
                compare(width, dropout, element, args)


if __name__ == "__main__":
    main()
