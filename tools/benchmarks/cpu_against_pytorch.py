"""The CPU engine against PyTorch's scaled_dot_product_attention on the same machine, threads and tensors.

Both run in this process in turn (PyTorch, attnd, PyTorch, attnd, ...), so that what else the machine does meets
both. Each figure is the median of the ratios of neighbours; milliseconds are the fastest run of each.

Needs: torch (pip install torch) and bazel build //tools/benchmarks:libattention.so.
Run:   python3 tools/benchmarks/cpu_against_pytorch.py [--lengths 512 2048] [--element float32] [--dropout 0.1] ...
"""
import argparse
import ctypes
import os
import statistics
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY = os.path.join(ROOT, "bazel-bin/tools/benchmarks/libattention.so")
ELEMENTS = {"float16": (1, torch.float16), "bfloat16": (2, torch.bfloat16), "float32": (3, torch.float32)}


class BenchmarkProblem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "dim")] + \
               [(name, ctypes.c_int32) for name in ("element", "causal", "dropout_threshold", "nondeterministic")]


class Engine:
    """An engine of attnd's through the benchmark library."""

    def __init__(self, path, threads, backend="cpu"):
        self.library = ctypes.CDLL(path)
        self.library.attnd_benchmark_open.restype = ctypes.c_void_p
        self.library.attnd_benchmark_architecture.restype = ctypes.c_char_p
        self.library.attnd_benchmark_kernel.restype = ctypes.c_char_p
        self.library.attnd_benchmark_kernel_seconds.restype = ctypes.c_double
        self.library.attnd_benchmark_workspace_bytes.restype = ctypes.c_int64
        self.handle = ctypes.c_void_p(self.library.attnd_benchmark_open(backend.encode(), threads))
        if not self.handle:
            raise RuntimeError(f"no engine {backend}")

    def architecture(self):
        return self.library.attnd_benchmark_architecture(self.handle).decode()

    def kernel(self):
        """Returns the last call's kernels by name and their seconds, without transfers."""
        return (self.library.attnd_benchmark_kernel(self.handle).decode(),
                self.library.attnd_benchmark_kernel_seconds(self.handle))

    def workspace_bytes(self, problem, backward):
        return self.library.attnd_benchmark_workspace_bytes(self.handle, ctypes.byref(problem), int(backward))

    def call(self, name, problem, *tensors):
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        if getattr(self.library, "attnd_benchmark_" + name)(self.handle, ctypes.byref(problem), *pointers) != 0:
            raise RuntimeError(name + " failed")


class Case:
    """One shape: the tensors of both sides, and a function per side and direction."""

    def __init__(self, engine, args, length, dim, causal):
        self.engine, self.causal, self.dropout = engine, causal, args.dropout
        number, self.dtype = ELEMENTS[args.element]
        shape = (args.batch, args.heads, length, dim)
        self.q, self.k, self.v, self.d_o = (torch.randn(shape).to(self.dtype) for _ in range(4))
        self.o, self.d_q, self.d_k, self.d_v = (torch.empty(shape, dtype=self.dtype) for _ in range(4))
        self.lse = torch.empty(shape[:3])
        self.problem = BenchmarkProblem(args.batch, args.heads, args.heads, length, length, dim, number, int(causal),
                                        round(256 * args.dropout), 0)
        pairs = length * (length + 1) / 2 if causal else length * length
        self.flops = 4 * args.batch * args.heads * pairs * dim

    def torch_forward(self):
        self.leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        self.out = torch.nn.functional.scaled_dot_product_attention(*self.leaves, is_causal=self.causal,
                                                                    dropout_p=self.dropout)

    def torch_backward(self):
        self.out.backward(self.d_o)

    def attnd_forward(self):
        self.engine.call("forward", self.problem, self.q, self.k, self.v, self.o, self.lse)

    def attnd_backward(self):
        self.engine.call("backward", self.problem, self.q, self.k, self.v, self.o, self.lse, self.d_o, self.d_q,
                         self.d_k, self.d_v)


def seconds(function, clock):
    # PyTorch's OpenMP threads (libgomp) spin for about 6 ms after their last loop and would hold a core of ours.
    time.sleep(0.02)
    start = clock()
    function()
    return clock() - start


def compare(case, repeats, clock):
    """{direction: (PyTorch's best, attnd's best, median ratio)}"""
    times = {name: [] for name in ("torch_forward", "torch_backward", "attnd_forward", "attnd_backward")}
    for repeat in range(repeats + 1):
        for name in ("torch_forward", "attnd_forward", "torch_backward", "attnd_backward"):
            spent = seconds(getattr(case, name), clock)
            if repeat > 0:  # the first run warms up
                times[name].append(spent)
    result = {}
    for direction in ("forward", "backward"):
        theirs, ours = times["torch_" + direction], times["attnd_" + direction]
        ratio = statistics.median(a / b for a, b in zip(theirs, ours))
        result[direction] = (min(theirs), min(ours), ratio)
    return result


def check(case):
    """Largest difference between the two results: the same function must have been timed."""
    if case.dropout > 0:
        return float("nan")
    pairs = [(case.out, case.o)] + list(zip((leaf.grad for leaf in case.leaves), (case.d_q, case.d_k, case.d_v)))
    return max((a.detach().float() - b.float()).abs().max().item() for a, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--element", choices=ELEMENTS, default="float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--processor_time", action="store_true",
                        help="count processor time, not time that passes: for a busy machine, with --threads 1")
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    torch.set_num_threads(args.threads)
    engine = Engine(args.library, args.threads)
    print(f"PyTorch {torch.__version__}, attnd {engine.architecture()}, {args.threads} threads, batch {args.batch}, "
          f"{args.heads} heads, {args.element}, dropout {args.dropout}")
    print("| N | D | mask | direction | PyTorch ms | attnd ms | attnd GFLOP/s | ratio | largest difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for length in args.lengths:
        for dim in args.dims:
            for causal in (False, True):
                case = Case(engine, args, length, dim, causal)
                for direction, (theirs, ours, ratio) in compare(case, args.repeats, clock).items():
                    flops = case.flops * (2.5 if direction == "backward" else 1)
                    print(f"| {length} | {dim} | {'causal' if causal else 'full'} | {direction} | {theirs * 1e3:.2f} | "
                          f"{ours * 1e3:.2f} | {flops / ours / 1e9:.0f} | {ratio:.2f} | {check(case):.1e} |", flush=True)


if __name__ == "__main__":
    main()
