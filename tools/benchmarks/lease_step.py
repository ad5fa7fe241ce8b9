"""A training step's attention with residual leases beside one without: time, and bytes on the wire.

A step is a forward of each layer in turn, then a backward of each in reverse order, on one thread, as autograd does it.
Steps with and without leases take turns, so that a busy machine slows both; figures are medians. Bytes are counted
twice: by the daemon (attnd_received_bytes_total) and by the loopback device (/proc/net/dev), which has all of TCP/IP
and whatever else runs on the machine; those over PCIe by the daemon (attnd_h2d_bytes_total, attnd_d2h_bytes_total). The
engine's time is that of the receipts, kernels alone, without what it waits for.

    bazel build //server:attnd //tools/benchmarks:null_attnd //client/c:libattnd_client.so
    PYTHONPATH=client/python ATTND_CLIENT_LIBRARY=bazel-bin/client/c/libattnd_client.so \
        python3 tools/benchmarks/lease_step.py                # --null: an engine that computes nothing, the wire alone
"""
import argparse
import statistics
import time
import urllib.request

import attnd
import numpy as np
from running_daemon import RunningDaemon


def daemon_bytes(metrics):
    """Reads the bytes that the daemon has received, and those that went to the GPU and back (0: there is none)."""
    text = urllib.request.urlopen(metrics).read().decode()
    names = ("attnd_received_bytes_total", "attnd_h2d_bytes_total", "attnd_d2h_bytes_total")
    return np.array([sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)) for name in names])


def loopback_bytes():
    line = next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def dtype_of(name):
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes
    return np.dtype(ml_dtypes.bfloat16)


class Layer:
    """One attention layer: inputs, and arrays for all results, touched once."""

    def __init__(self, a, rng, client):
        shape, kv_shape = (a.batch, a.heads, a.length, a.dim), (a.batch, a.kv_heads, a.length, a.dim)
        dtype = dtype_of(a.dtype)

        def array(of, fill):
            made = client.empty(of, dtype)  # shared with the daemon where its socket is the address
            made[...] = fill(of)
            return made
        self.q, self.dout = [array(shape, rng.standard_normal) for _ in range(2)]
        self.k, self.v = [array(kv_shape, rng.standard_normal) for _ in range(2)]
        self.out, self.dq = [array(shape, np.ones) for _ in range(2)]
        self.dk, self.dv = [array(kv_shape, np.ones) for _ in range(2)]
        self.causal = None if a.full else "top_left"

    def forward(self, client, keep):
        self.result = client.forward(self.q, self.k, self.v, causal=self.causal, keep=keep, out=self.out)
        return self.result.receipt

    def backward(self, client):
        result = client.backward(self.dout, self.q, self.k, self.v, self.out, self.result.lse, causal=self.causal,
                                 residual=self.result.residual, out=(self.dq, self.dk, self.dv))
        self.result = None  # as autograd frees the graph
        return result.receipt


def step(client, layers, keep, metrics):
    """Seconds of forward and backward, bytes of backward at the daemon, on the wire and up and down PCIe, the same of
    forward up and down PCIe, share of leased shards, the engine's seconds."""
    first = daemon_bytes(metrics)
    begin = time.perf_counter()
    ahead = [layer.forward(client, keep) for layer in layers]
    middle = time.perf_counter()
    received, device = daemon_bytes(metrics), loopback_bytes()
    start = time.perf_counter()
    receipts = [layer.backward(client) for layer in reversed(layers)]
    end = time.perf_counter()
    device = loopback_bytes() - device
    forward, backward = received - first, daemon_bytes(metrics) - received
    leased = sum(r.leased for r in receipts) / sum(r.shards for r in receipts)
    engine = sum(receipt.stages.get("kernel", 0) for receipt in ahead + receipts)
    return middle - begin, end - start, backward[0], device, leased, engine, *forward[1:], *backward[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--null", action="store_true", help="an engine that computes nothing")
    parser.add_argument("--server", help="another binary than bazel-bin's")
    parser.add_argument("--backend", default="auto", help="cuda: residuals stay on the GPU")
    for name, default in (("batch", 2), ("heads", 16), ("kv_heads", 16), ("length", 1024), ("dim", 64), ("layers", 4),
                          ("steps", 9)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--shared", action="store_true", help="by unix socket, tensors in memory shared with the daemon")
    a = parser.parse_args()
    server = a.server or ("bazel-bin/tools/benchmarks/null_attnd" if a.null else "bazel-bin/server/attnd")
    rng, found = np.random.default_rng(1), {False: [], True: []}
    with RunningDaemon(server, "--memory_limit_mib", "2048", "--backend", a.backend, shared=a.shared) as daemon, \
            attnd.connect(daemon.address, timeout=300, wait_for_ready=True) as client:
        layers = [Layer(a, rng, client) for _ in range(a.layers)]
        for number in range(a.steps + 1):
            for keep in (False, True):
                measured = step(client, layers, keep, daemon.metrics)
                if number > 0:  # the first warms up
                    found[keep].append(measured)
    print(f"{'null' if a.null else a.backend} engine, {a.layers} layers of batch {a.batch}, {a.heads} heads on "
          f"{a.kv_heads}, N {a.length}, D {a.dim}, {a.dtype}, {'full' if a.full else 'causal'}; medians of {a.steps} steps")
    print("            forward ms  backward ms  step ms  engine ms   backward upload MB: daemon  device (both ways)  leased")
    for keep, name in ((False, "stateless"), (True, "leases")):
        f, b, received, device, leased, engine, *pcie = [statistics.median(column) for column in zip(*found[keep])]
        print(f"{name:10s} {f * 1e3:11.1f} {b * 1e3:12.1f} {(f + b) * 1e3:8.1f} {engine * 1e3:10.1f} "
              f"{received / 1e6:27.2f} {device / 1e6:19.2f} {leased:7.2f}")
        if any(pcie):
            print("           PCIe MB: forward {:.2f} up, {:.2f} down; backward {:.2f} up, {:.2f} down".format(
                *[count / 1e6 for count in pcie]))
    def less(column):
        without, leased = (statistics.median([step[column] for step in found[keep]]) for keep in (False, True))
        return f"{without / leased:.2f} times smaller" if leased else "none"  # shared memory sends nothing
    pairs = statistics.median([(x[0] + x[1]) / (y[0] + y[1]) for x, y in zip(found[False], found[True])])
    print(f"upload of backward {less(2)}, device bytes {less(3)}; step {pairs:.2f} times faster (median over neighbours)")


if __name__ == "__main__":
    main()
