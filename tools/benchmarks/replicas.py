"""Steps of a BERT-large-like stack on one GPU, and of its replicas on two, whose gradients go from GPU to GPU by NCCL or
through the workers.

24 layers of width 1024, 16 heads, feed-forward 4096, in float16; a step has 65,536 tokens in micro-batches of 8,192 rows,
and ends with AdamW. Each daemon has a GPU and listens on a unix socket; each has one worker process, whose tensors pass in
shared memory. "one daemon": one worker computes all tokens. The time of a step is the slowest rank's, the median of
several after two. "exchange and step": from the last backward to the end of the step, the same way.

The last column says whether the weights of both replicas are bitwise equal at the end. The line below the table compares
them with those of the other way.

Needs: two GPUs, torch, libnccl.so.2 (PyTorch's wheels bring it), bazel build //server:attnd, and the Python package.
Run:   python3 tools/benchmarks/replicas.py [--steps 8] [--nccl PATH] [--server PATH] [--backend cpu]
"""
import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WARM_UP = 2


def parse():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--steps", type=int, default=8, help="that are measured")
    add("--tokens", type=int, default=65536, help="of a step, on all daemons together")
    add("--rows", type=int, default=8192, help="of a micro-batch")
    add("--length", type=int, default=512, help="of a sequence")
    add("--layers", type=int, default=24)
    add("--width", type=int, default=1024)
    add("--server", default=os.path.join(ROOT, "bazel-bin/server/attnd"))
    add("--backend", default="cuda")
    add("--nccl", default=None, help="libnccl.so.2; default: that of the wheel nvidia-nccl")
    add("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def nccl_library():
    """Where the wheel that PyTorch needs has put it."""
    found = importlib.util.find_spec("nvidia.nccl")
    places = list(found.submodule_search_locations) if found else []
    paths = [os.path.join(place, "lib/libnccl.so.2") for place in places]
    return next(filter(os.path.exists, paths), "libnccl.so.2")


# ---- One rank.

def train(args, addresses):
    import torch
    import torch.distributed as dist
    from torch import nn

    import attnd.torch

    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // (2 * len(addresses))))
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    attnd.torch.connect(addresses[rank], timeout=600, wait_for_ready=True, precision="f16")
    layers = nn.ModuleList([nn.TransformerEncoderLayer(args.width, args.width // 64, 4 * args.width, 0.0, "gelu",
                                                       batch_first=True) for _ in range(args.layers)])
    options = dict(group=dist.group.WORLD, replicas=addresses) if ranks > 1 else {}
    stack = nn.Sequential(*attnd.torch.offload(layers, max_rows=args.rows, kept_rows=args.rows, **options))
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(stack.parameters(), lr=1e-4))
    each = args.tokens // args.rows // ranks
    batch = args.rows // args.length
    inputs = []
    for k in range(each):
        generator = torch.Generator().manual_seed(k * ranks + rank)
        x, dy = (torch.randn(batch, args.length, args.width, generator=generator) for _ in range(2))
        inputs.append((x.half(), (dy / 1024).half()))
    times, ends = [], []
    for step in range(WARM_UP + args.steps):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        for x, dy in inputs:
            stack(x).backward(dy)
        computed = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        if step >= WARM_UP:
            times.append(end - begin)
            ends.append(end - computed)
    digest = hashlib.sha256()
    for tensor in stack.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    found = [None] * ranks
    dist.all_gather_object(found, (times, ends, digest.hexdigest()[:16]))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# ---- All of them.

def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def daemons(args, count, nccl):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses, ports = [], []
        for number in range(count):
            addresses.append(f"unix:{folder}/{number}.socket")
            flags = ["--listen", addresses[-1], "--metrics_listen", "127.0.0.1:0", "--metrics_port_file",
                     f"{folder}/{number}.port", "--backend", args.backend, "--drain_delay", "0", "--nccl_library", nccl]
            process = subprocess.Popen([args.server, *flags], env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number)})
            stack.callback(process.wait)
            stack.callback(process.terminate)
            ports.append(f"{folder}/{number}.port")
            while not (os.path.exists(ports[-1]) and open(ports[-1]).read().endswith("\n")):
                if process.poll() is not None:
                    raise SystemExit(f"{args.server} did not start")
                time.sleep(0.05)
        yield addresses, [f"http://127.0.0.1:{open(port).read().split()[0]}/metrics" for port in ports]


def exchanges(url):
    """That the daemon has had with others."""
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    return sum(int(line.split()[-1]) for line in text.splitlines()
               if line.startswith("attnd_module_calls_total") and '"SumGradients"' in line and '"OK"' in line)


def measure(args, count, nccl=""):
    """Times of the slowest rank in each step, from the last backward on, each replica's weights, exchanges by NCCL."""
    with daemons(args, count, nccl) as (addresses, metrics):
        port = str(unused_port())
        workers = []
        for rank in range(count):
            variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank),
                         "WORLD_SIZE": str(count), "CUDA_VISIBLE_DEVICES": ""}
            workers.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--worker",
                                             ",".join(addresses)], env=variables, stdout=subprocess.PIPE, text=True))
        outputs = [worker.communicate()[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise SystemExit("a worker has failed")
        calls = exchanges(metrics[0])
    found = json.loads(outputs[0])
    slowest, ends = ([max(step) for step in zip(*(one[part] for one in found))] for part in range(2))
    return statistics.median(slowest), statistics.median(ends), [one[2] for one in found], calls


def main():
    args = parse()
    if args.worker:
        return train(args, args.worker.split(","))
    nccl = args.nccl or nccl_library()
    print(f"{args.layers} layers of width {args.width}, {args.tokens} tokens a step in micro-batches of {args.rows}; NCCL: "
          f"{nccl}\n")
    print("| | ms a step | exchange and step, ms | tokens/s | to one daemon | calls of SumGradients | replicas equal |\n"
          "|---|---|---|---|---|---|---|")
    alone, digests = None, []
    for name, count, library in (("one daemon", 1, ""), ("two daemons, NCCL", 2, nccl), ("two daemons, workers", 2, "")):
        took, end, weights, calls = measure(args, count, library)
        alone = alone or took
        equal = "" if count == 1 else str(len(set(weights)) == 1)
        digests.append(weights[0])
        print(f"| {name} | {1e3 * took:.0f} | {1e3 * end:.0f} | {args.tokens / took:.0f} | {alone / took:.2f} | {calls} | "
              f"{equal} |", flush=True)
    print(f"\nweights by NCCL and through the workers are {'equal' if digests[1] == digests[2] else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
