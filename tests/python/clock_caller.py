"""Calls of attention and of a module while the system's clock moves: test_clock_steps.py runs it with that clock.

Arguments: the daemon's address, and the file by which its clock and this one's move.
"""
import struct
import sys
import threading
import time

import numpy as np

import attnd
from attnd.modules import Layout

DAY = 86400


def move(seconds):
    with open(sys.argv[2], "r+b") as file:
        file.write(struct.pack("=q", seconds))


def registered(client):
    """A module of one linear layer, whose activations are kept."""
    layout = Layout(16, "f32")
    block = layout.block()
    block.linear(0, block.parameter("weight", 16, 16))
    layout.layer(block, "0.")
    module = attnd.register(layout, client, name="clock", optimizer=attnd.AdamW(), max_rows=8, replay_mib=0)
    module.put({"0.weight": np.eye(16, dtype=np.float32)})
    return module


def main():
    before = time.time()
    move(DAY)
    assert time.time() - before > DAY / 2, "the clock does not move"
    move(0)
    small = np.ones((1, 1, 8, 16), np.float32)
    large = np.random.default_rng(1).standard_normal((1, 4, 4096, 64), dtype=np.float32)
    with attnd.connect(sys.argv[1], timeout=60) as client:
        forward = client.forward(small, small, small, keep=True)
        expected = client.forward(large, large, large).out
        module = registered(client)
        x = np.ones((1, 8, 16), np.float32)
        for seconds in (2 * DAY, -2 * DAY, 0):
            found = []

            def call(found=found):
                found.append(client.forward(large, large, large).out)
            calls = [threading.Thread(target=call) for _ in range(3)]
            for thread in calls:
                thread.start()
            time.sleep(0.1)  # some are on their way, or wait
            y, activations = module.forward(x, keep=True)
            move(seconds)
            for thread in calls:
                thread.join()
            assert len(found) == 3 and all(np.array_equal(one, expected) for one in found), seconds
            kept = client.backward(small, small, small, small, forward.out, forward.lse, residual=forward.residual)
            assert kept.receipt.leased == 1, seconds  # it has not expired
            time.sleep(1.2)  # longer than the daemon takes to see what has
            module.backward(np.ones_like(y), activations)
            module.step(1e-3)
    print("done")


if __name__ == "__main__":
    main()
