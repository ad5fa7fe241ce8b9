"""Attention of a training run that becomes sparse, through the daemon, beside its dense twin.

A step is a forward and a backward of one layer, 2 heads of 32, float32, with residual leases. The run has a dense phase
with kept captures (retrieval some three, image one a step, as SPION and SAT have them), a switch that builds SPION's
pattern from the last map, and sparse steps with zero-rest. Each of its steps is followed by one of the twin, so that a busy
machine slows both. The measured run is dense for 5 % of its steps. "At the authors' counts" has the medians, and as many
steps of each kind as SAT's image had, which switched at step 189 of 10,000, and as SPION's retrieval has at the least: it
can switch at its third capture, 600 of 40,000. Processor times are of all threads: other work on the machine stretches them
little.

    bazel build //server:attnd //client/c:libattnd_client.so
    PYTHONPATH=client/python ATTND_CLIENT_LIBRARY=bazel-bin/client/c/libattnd_client.so \
        python3 tools/benchmarks/sparse_run.py --task retrieval     # image; --shared: unix socket and shared memory
"""
import argparse
import os
import time
from collections import namedtuple

import attnd
import numpy as np
from attnd import masks
from attnd.sparse import Capture, spion
from attnd.sparse.capture import pattern_layout
from running_daemon import RunningDaemon

Task = namedtuple("Task", "batch length block density steps switch every")
TASKS = {"retrieval": Task(4, 4096, 64, 0.021, 40_000, 600, 200), "image": Task(16, 1024, 32, 0.05, 10_000, 189, 1)}


def processor_seconds(process):
    """Adds up all threads of the daemon, and of this program."""
    folder = f"/proc/{process.pid}/task"
    daemon = sum(int(open(f"{folder}/{thread}/schedstat").read().split()[0]) for thread in os.listdir(folder))
    return np.array([daemon * 1e-9, time.process_time()])


class Layer:
    """Inputs, and arrays for all results, touched once."""

    def __init__(self, client, process, task):
        self.client, self.process = client, process
        shape, rng = (task.batch, 2, task.length, 32), np.random.default_rng(1)
        arrays = [client.empty(shape) for _ in range(8)]  # shared with the daemon where its socket is the address
        for array in arrays:
            array[...] = rng.standard_normal(shape)
        self.q, self.k, self.v, self.dout, self.out, *self.gradients = arrays

    def step(self, mask=None, capture=None):
        """Seconds of the step, of the daemon's and the client's processors, and what was captured."""
        chosen = {} if mask is None else {"mask": mask, "zero_rest": True}
        before, begin = processor_seconds(self.process), time.perf_counter()
        ahead = self.client.forward(self.q, self.k, self.v, keep=True, out=self.out, capture=capture, **chosen)
        self.client.backward(self.dout, self.q, self.k, self.v, self.out, ahead.lse, residual=ahead.residual,
                             out=tuple(self.gradients), **chosen)
        seconds = time.perf_counter() - begin
        return (seconds, *(processor_seconds(self.process) - before)), ahead.captured


def measure(layer, task, steps):
    """Layer.step's seconds by phase, the twin's, those of the switch, and the density."""
    twin, found = [], {"dense": [], "captured": [], "sparse": []}
    dense, mask, previous = max(3, steps // 20), None, None
    every = 1 if task.every == 1 else dense // 3
    for _ in range(2):
        layer.step()  # warms up
    for step in range(steps):
        captures = step < dense and (step + 1) % every == 0
        taken, map_taken = layer.step(mask, Capture(task.block, True, previous) if captures else None)
        found["captured" if captures else "sparse" if mask is not None else "dense"].append(taken)
        twin.append(layer.step()[0])
        begin = time.perf_counter()
        if captures:
            if previous is not None:
                previous.release()
            previous = map_taken
        if step + 1 == dense:
            layout = pattern_layout(previous, block=task.block, **spion(task.block, density=task.density).builder)
            mask = masks.blocks(layout, task.block)
            previous.release()
            layer.step(mask)  # sends the pattern
            switch = time.perf_counter() - begin
    return found, twin, switch, layout.mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="retrieval")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--shared", action="store_true", help="by unix socket, tensors in memory shared with the daemon")
    a = parser.parse_args()
    task = TASKS[a.task]
    with RunningDaemon("bazel-bin/server/attnd", "--backend", "cpu", "--memory_limit_mib", "2048",
                       shared=a.shared) as daemon, attnd.connect(daemon.address, timeout=300, wait_for_ready=True) as client:
        found, twin, switch, density = measure(Layer(client, daemon.process, task), task, a.steps)
    print(f"{a.task}: {task.batch} x 2 x {task.length} x 32, blocks of {task.block}, density {density:.4f}, "
          f"{'shared memory' if a.shared else 'loopback TCP'}, {a.steps} steps; medians")
    print("phase      steps   step ms  processor ms: daemon   client  times faster: step  processor")
    medians, of_twin = {}, np.median(twin, axis=0)
    for phase, steps in {"twin": twin, **found}.items():
        if steps:
            seconds, daemon, own = medians[phase] = np.median(steps, axis=0)
            print(f"{phase:9} {len(steps):6d} {seconds * 1e3:9.1f} {daemon * 1e3:21.1f} {own * 1e3:8.1f} "
                  f"{of_twin[0] / seconds:19.2f} {of_twin[1:].sum() / (daemon + own):10.2f}")
    run, dense = sum(step[0] for steps in found.values() for step in steps) + switch, sum(step[0] for step in twin)
    print(f"switch {switch * 1e3:.1f} ms; whole run {run:.2f} s, twin {dense:.2f} s: {dense / run:.2f} times faster")
    captured = task.switch // task.every
    whole = (medians["twin"] * (task.switch - captured) + medians["captured"] * captured
             + medians["sparse"] * (task.steps - task.switch))
    whole = np.array([whole[0] + switch, whole[1:].sum()])
    ratios = np.array([of_twin[0], of_twin[1:].sum()]) * task.steps / whole
    print(f"at the authors' counts ({task.switch} of {task.steps} steps dense, {captured} captured): {ratios[0]:.2f} times "
          f"faster, by processor time {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
