"""Attention of a training run that becomes sparse, through the daemon, beside its dense twin.

A step is a forward and a backward of one layer, 2 heads of 32, float32, with residual leases. The run has a dense phase
with kept captures (retrieval three, image one a step, as SPION and SAT have them), a switch that builds SPION's pattern
from the last map, and sparse steps with zero-rest. Each of its steps is followed by one of the twin, so that a busy machine
slows both. The measured run is dense for 5 % of its steps. "At the authors' counts" has the medians, and as many steps of
each kind as SAT's image had, which switched at step 189 of 10,000, and as SPION's retrieval has at the least: it can switch
at its third capture, 600 of 40,000. "engine" is the receipts' kernel time, of which shards that run at once each count
theirs; a step's rest is transfer, packing and waiting.

    bazel build //server:attnd //client/c:libattnd_client.so
    PYTHONPATH=client/python ATTND_CLIENT_LIBRARY=bazel-bin/client/c/libattnd_client.so \
        python3 tests/benchmarks/sparse_run.py --task retrieval     # image; --shared: unix socket and shared memory
"""
import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections import namedtuple

import attnd
import numpy as np
from attnd import masks
from attnd.sparse import Capture, spion
from attnd.sparse.capture import pattern_layout
from lease_step import ROOT, read_port

Task = namedtuple("Task", "batch length block density steps switch every")
TASKS = {"retrieval": Task(4, 4096, 64, 0.021, 40_000, 600, 200), "image": Task(16, 1024, 32, 0.05, 10_000, 189, 1)}


class Layer:
    """Inputs, and arrays for all results, touched once."""

    def __init__(self, client, task):
        shape, rng = (task.batch, 2, task.length, 32), np.random.default_rng(1)
        arrays = [client.empty(shape) for _ in range(8)]  # shared with the daemon where its socket is the address
        for array in arrays:
            array[...] = rng.standard_normal(shape)
        self.q, self.k, self.v, self.dout, self.out, *self.gradients = arrays

    def step(self, client, mask=None, capture=None):
        """Seconds of the step and of the engine, and what was captured."""
        chosen, begin = {} if mask is None else {"mask": mask, "zero_rest": True}, time.perf_counter()
        ahead = client.forward(self.q, self.k, self.v, keep=True, out=self.out, capture=capture, **chosen)
        back = client.backward(self.dout, self.q, self.k, self.v, self.out, ahead.lse, residual=ahead.residual,
                               out=tuple(self.gradients), **chosen)
        seconds = time.perf_counter() - begin
        return seconds, sum(result.receipt.stages.get("kernel", 0) for result in (ahead, back)), ahead.captured


def measure(client, task, steps):
    """Seconds and engine's seconds of each step by phase, the twin's seconds, those of the switch, and the density."""
    layer, twin, found = Layer(client, task), [], {"dense": [], "captured": [], "sparse": []}
    dense, mask, previous = max(3, steps // 20), None, None
    every = 1 if task.every == 1 else dense // 3
    for _ in range(2):
        layer.step(client)  # warms up
    for step in range(steps):
        captures = step < dense and (step + 1) % every == 0
        taken = layer.step(client, mask, Capture(task.block, True, previous) if captures else None)
        found["captured" if captures else "sparse" if mask is not None else "dense"].append(taken[:2])
        twin.append(layer.step(client)[0])
        begin = time.perf_counter()
        if captures:
            if previous is not None:
                previous.release()
            previous = taken[2]
        if step + 1 == dense:
            layout = pattern_layout(previous, block=task.block, **spion(task.block, density=task.density).builder)
            mask = masks.blocks(layout, task.block)
            previous.release()
            layer.step(client, mask)  # sends the pattern
            switch = time.perf_counter() - begin
    return found, twin, switch, layout.mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="retrieval")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--shared", action="store_true", help="by unix socket, tensors in memory shared with the daemon")
    a = parser.parse_args()
    task = TASKS[a.task]
    with tempfile.TemporaryDirectory() as folder:
        port_file = os.path.join(folder, "port")
        listen = f"unix:{folder}/socket" if a.shared else "127.0.0.1:0"
        process = subprocess.Popen([os.path.join(ROOT, "bazel-bin/server/attnd"), "--listen", listen,
                                    "--port_file", port_file, "--metrics_listen", "127.0.0.1:0", "--backend", "cpu",
                                    "--drain_delay", "0", "--memory_limit_mib", "2048", "--log_level", "error"])
        try:
            address = listen if a.shared else "127.0.0.1:" + read_port(port_file)
            with attnd.connect(address, timeout=300, wait_for_ready=True) as client:
                found, twin, switch, density = measure(client, task, a.steps)
        finally:
            process.terminate()
            process.wait()
    dense_step = statistics.median(twin)
    print(f"{a.task}: {task.batch} x 2 x {task.length} x 32, blocks of {task.block}, density {density:.4f}, "
          f"{'shared memory' if a.shared else 'loopback TCP'}, {a.steps} steps; medians")
    print("phase      steps   step ms  engine ms   rest ms  times faster")
    medians = {"dense": dense_step}
    for phase, steps in found.items():
        if steps:
            seconds, engine = [statistics.median(column) for column in zip(*steps)]
            medians[phase] = seconds
            print(f"{phase:9} {len(steps):6d} {seconds * 1e3:9.1f} {engine * 1e3:10.1f} {(seconds - engine) * 1e3:9.1f} "
                  f"{dense_step / seconds:13.2f}")
    print(f"twin      {len(twin):6d} {dense_step * 1e3:9.1f}")
    run = sum(seconds for steps in found.values() for seconds, _ in steps) + switch
    print(f"switch {switch * 1e3:.1f} ms; whole run {run:.2f} s, twin {sum(twin):.2f} s: {sum(twin) / run:.2f} times faster")
    captured = task.switch // task.every
    whole = (medians["dense"] * (task.switch - captured) + medians["captured"] * captured + switch
             + medians["sparse"] * (task.steps - task.switch))
    print(f"at the authors' counts ({task.switch} of {task.steps} steps dense, {captured} captured): "
          f"{medians['dense'] * task.steps / whole:.2f} times faster")


if __name__ == "__main__":
    main()
