"""attnd.register's modules while their daemon is killed at random moments, in forward, backward, step, put and the copy of
the state: the bits of the quiet run, soon after each restart. The whole figure: ATTND_TEST_KILLS=30."""
import os
import random
import threading
import time

import numpy as np
import pytest
from conftest import Daemon
from cut_link import CutLink
from test_modules import small_layout

import attnd

KILLS = int(os.environ.get("ATTND_TEST_KILLS", "4"))
WIDTH, LENGTH, MICRO_BATCHES, PUT_EVERY = 128, 64, 2, 5
MOST_SECONDS = 2.0  # beside the replay


def numbers(*seed, shape=(2, LENGTH, WIDTH)):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


class Killer(threading.Thread):
    """Kills the daemon and starts it again, each time after some answered calls, in the midst of another."""

    def __init__(self, daemon):
        super().__init__()
        self._daemon, self._chance, self._answered = daemon, random.Random(7), threading.Event()
        self.began = []  # when the daemon served again
        self.took = []  # from then on, until a call was answered

    def answered(self):
        if len(self.took) < len(self.began):
            self.took.append(time.monotonic() - self.began[-1])
        self._answered.set()

    def run(self):
        for _ in range(KILLS):
            for _ in range(self._chance.randint(1, 12)):
                self._answered.wait()
                self._answered.clear()
            time.sleep(self._chance.uniform(0, 0.03))
            self._daemon.kill()
            self._answered.clear()
            self._daemon.start()
            self.began.append(time.monotonic())


def train(module, goes_on, answered=lambda: None):
    """Steps while goes_on(step); the tensors, and how often it stepped."""
    step = 0
    while goes_on(step):
        for n in range(MICRO_BATCHES):
            act = module.forward(numbers(1, step, n), keep=True, seed=step, offset=n)[1]
            answered()
            module.backward(numbers(2, step, n), act)
            answered()
        module.step(lr=1e-3, weight_decay=0.1)
        answered()
        step += 1
        if step % PUT_EVERY == 0:
            module.put({"0.norm.bias": numbers(3, step, shape=(WIDTH,))})
            answered()
    return module.get_kinds(["weight", "moment1", "moment2"]), step


@pytest.mark.parametrize("durability", ["process", "host", "disk"])
def test_a_daemon_that_is_killed_at_any_moment_leaves_the_bits_of_the_quiet_run(daemon, rng, tmp_path, durability):
    layout = small_layout(WIDTH)
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.1) for p in layout.parameters}
    own = Daemon() if durability == "process" else Daemon("--module_state_dir", str(tmp_path))

    def registered(client, **options):
        module = attnd.register(layout, client, name="killed", optimizer=attnd.AdamW(), max_rows=2 * LENGTH, **options)
        module.put(weights)
        return module
    try:
        killer = Killer(own)
        with attnd.connect(own.address, wait_for_ready=True, timeout=60) as client:
            module = registered(client, durability=durability)
            killer.start()
            found, steps = train(module, lambda step: killer.is_alive(), killer.answered)
            module.release()
        killer.join()
        with attnd.connect(daemon.address, timeout=60) as client:
            module, begin = registered(client), time.monotonic()
            expected, _ = train(module, lambda step: step < steps)
            whole = time.monotonic() - begin  # of what a replay may have to do, and drawing its numbers
            module.release()
    finally:
        own.stop()
    print(f"{durability}: {len(killer.took)} kills in {steps} steps of {whole / steps * 1e3:.0f} ms; answered again within "
          f"{max(killer.took):.2f} s, median {np.median(killer.took):.2f}")
    assert len(killer.took) == KILLS and max(killer.took) <= MOST_SECONDS + whole
    for kind, tensors in expected.items():
        for name, array in tensors.items():
            np.testing.assert_array_equal(found[kind][name], array, err_msg=f"{kind} {name}")


@pytest.mark.parametrize("ends_by", ["discard", "put"])
def test_after_a_backward_that_was_added_or_not_gradients_have_to_be_cleared(own_daemon, rng, ends_by):
    """Its answer comes too late. Nothing else would tell whether another backward is the same again; and what a restart
    replays has to be what has been done."""
    layout = small_layout()
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.1) for p in layout.parameters}
    x, link = numbers(1, shape=(2, 5, 16)), CutLink(own_daemon.address)
    try:
        with attnd.connect(link.address, wait_for_ready=True, timeout=60) as client:
            module = attnd.register(layout, client, name="unsure", optimizer=attnd.AdamW(), max_rows=64, kept_rows=256)
            module.put(weights)
            kept = [module.forward(x, keep=True)[1] for _ in range(3)]
            module.backward(x, kept[0])
            with link.mute(), pytest.raises(attnd.DeadlineExceeded):
                module.backward(x, kept[1], timeout=1)
            for call in (lambda: module.backward(x, kept[2]), module.gradient_stats, lambda: module.step(lr=0.1),
                         lambda: module.get(kind="gradient"), lambda: module.put_gradients(weights)):
                with pytest.raises(attnd.FailedPrecondition, match="clear them") as error:
                    call()
                assert error.value.reason == "GRADIENT_INCOMPLETE"
            own_daemon.kill()
            own_daemon.start()
            module.discard() if ends_by == "discard" else module.put(weights)
            module.backward(x, module.forward(x, keep=True)[1])
            module.step(lr=0.1)
            before = module.get()
            own_daemon.kill()
            own_daemon.start()
            after = module.get()
    finally:
        link.cut()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


def test_a_module_that_was_released_is_not_registered_again_by_a_late_call(daemon):
    layout = small_layout(WIDTH)
    weights = {p.name: np.zeros(p.shape, np.float32) for p in layout.parameters}
    with attnd.connect(daemon.address, timeout=60) as client:
        old = attnd.register(layout, client, name="released", max_rows=2 * LENGTH)
        old.put(weights)
        old.release()
        new = attnd.register(layout, client, name="released", max_rows=2 * LENGTH)
        new.put(weights)
        for call in (old.status, lambda: old.put(weights), lambda: old.forward(numbers(1))):
            with pytest.raises(attnd.FailedPrecondition, match="one that was released"):
                call()
        old.release()
        new.forward(numbers(1))
        new.release()
