"""Modules whose daemon ends: taken to another one while it drains, found again on a disk, all in their callers' shares."""
import ctypes
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from conftest import Daemon
from cut_link import CutLink
from test_modules import small_layout, train

import attnd
from attnd._native import ModuleBackward

MOVES = int(os.environ.get("ATTND_TEST_MOVES", "2"))
DRAIN = ("--drain_delay", "0.1", "--drain_timeout", "20")


def data(rng, steps):
    xs, dys = np.float32(rng.normal(size=(2, steps, 2, 2, 5, 16)))
    return xs, dys, {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in small_layout().parameters}


def run(where, xs, dys, weights, between=lambda module, step: None, **options):
    with attnd.connect(where, wait_for_ready=True, timeout=60) as client:
        module, seen = attnd.register(small_layout(), client, name="moved", optimizer=attnd.AdamW(), max_rows=64,
                                      **options), set()

        def once(step):  # after its first micro-batch
            if step not in seen:
                seen.add(step)
                between(module, step)
        module.put(weights)
        found = train(module, xs, dys, len(xs), once)
        status = module.status()
        module.release()
        return found, status


def check_same(found, expected):
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def home_of(daemons):
    """The one that has the module."""
    return next(one for one in daemons if one.metric("attnd_modules") > 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_module_is_made_anew_elsewhere_when_its_daemon_is_gone(daemon, rng, how):
    """In the middle of a step, by replay; the seconds that it takes are those in which the daemon is known to be gone."""
    xs, dys, weights = data(rng, 5)
    expected, _ = run(daemon.address, xs, dys, weights)
    daemons = [Daemon(), Daemon()]
    try:
        took = []

        def end(_, step):
            if step == 2:
                home_of(daemons).process.send_signal(how)
                took.append(time.monotonic())
            if step == 3:
                took.append(time.monotonic())
        found, _ = run([one.address for one in daemons], xs, dys, weights, end)
        check_same(found, expected)
        print(f"{how.name}: {took[1] - took[0]:.1f} s")
    finally:
        for one in daemons:
            one.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_module_goes_on_elsewhere_from_a_snapshot(daemon, rng, how):
    """With the calls of at most two steps computed again."""
    xs, dys, weights = data(rng, 7)
    expected, _ = run(daemon.address, xs, dys, weights)
    daemons, again = [Daemon(), Daemon()], []
    try:
        def end(module, step):
            if step == 5:
                home = home_of(daemons)
                daemons.remove(home)
                daemons.append(home)
                home.pause() if how == signal.SIGSTOP else home.kill()
            if step == 6:
                again.append(daemons[0].metric(r'attnd_module_calls_total\{[^}]*method="Backward"[^}]*\}'))
        found, _ = run([one.address for one in daemons], xs, dys, weights, end, snapshot_every=2)
        check_same(found, expected)
        assert 3 <= again[0] <= 2 * 2 + 3, "two of step 5, one of step 6, and those before"
    finally:
        for one in daemons:
            one.stop()


def test_a_copy_that_was_left_behind_is_never_gone_on_from(daemon, rng):
    """The module leaves a frozen daemon; that goes on, and the module comes back to it when the other one is killed. What
    the first one has under its name counts other calls."""
    xs, dys, weights = data(rng, 6)
    expected, _ = run(daemon.address, xs, dys, weights)
    daemons = [Daemon(), Daemon()]
    try:
        def end(module, step):
            if step == 2:
                first = home_of(daemons)
                daemons.remove(first)
                daemons.append(first)
                first.pause()
                module.forward(xs[0, 0])
                first.process.send_signal(signal.SIGCONT)
            if step == 4:
                assert daemons[1].metric("attnd_modules") == 1
                daemons[0].kill()
        found, _ = run([one.address for one in daemons], xs, dys, weights, end, snapshot_every=1)
        check_same(found, expected)
    finally:
        for one in daemons:
            one.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_module_goes_on_at_a_third_daemon_when_the_second_ends_too(daemon, rng, how):
    """The second one does in the midst of what makes the module anew there."""
    xs, dys, weights = data(rng, 5)
    expected, _ = run(daemon.address, xs, dys, weights)
    daemons = [Daemon() for _ in range(3)]
    links, ended = [CutLink(one.address) for one in daemons], []
    try:
        def end(module, step):
            if step != 3:
                return
            home = home_of(daemons)

            def end_too(link, before=[link.sent for link in links]):
                n = links.index(link)
                if not ended and daemons[n] is not home and link.sent > before[n] + 8000:
                    ended.append(n)
                    daemons[n].process.send_signal(how)
            for link in links:
                link.on_sent = end_too
            home.kill()
        found, _ = run([link.address for link in links], xs, dys, weights, end)
        check_same(found, expected)
        assert ended
    finally:
        for link in links:
            link.cut()
        for one in daemons:
            one.stop()


def test_a_module_moves_from_a_daemon_in_whose_place_another_address_is(rng, tmp_path):
    """As where a preempted node takes its file away while another node begins: the first one still drains, and no call of
    the module is kept."""
    xs, dys, weights = data(rng, 4)
    daemons = [Daemon("--drain_delay", "1"), Daemon()]
    addresses = tmp_path / "addresses"

    def tell(one):
        (tmp_path / "new").write_text(one.address + "\n")
        (tmp_path / "new").rename(addresses)
    try:
        found = []
        for drains in (False, True):
            tell(daemons[0])

            def leave(module, step):
                if drains and step == 2:
                    daemons[0].process.send_signal(signal.SIGTERM)
                    tell(daemons[1])
                    for _ in range(40):  # files are read every 2 s
                        module.forward(xs[0, 0])  # of a step that has begun
                        time.sleep(0.1)
            found.append(run(f"file:{addresses}", xs, dys, weights, leave, replay_mib=0)[0])
        check_same(found[1], found[0])
        assert daemons[0].process.wait(60) == 0
    finally:
        for one in daemons:
            one.stop()


def test_modules_are_spread_over_daemons_and_found_by_name(daemon):
    daemons = [Daemon(), Daemon(), Daemon()]
    clients = [attnd.connect([one.address for one in daemons]) for _ in range(6)]
    try:
        for n, client in enumerate(clients):
            attnd.register(small_layout(), client, name=f"m{n}", max_rows=64)
        assert [one.metric("attnd_modules") for one in daemons] == [2, 2, 2]
        for n, client in enumerate(reversed(clients)):
            attnd.register(small_layout(), client, name=f"m{n}", max_rows=64)
        assert [one.metric("attnd_modules") for one in daemons] == [2, 2, 2], "those that were there"
    finally:
        for client in clients:
            client.close()
        for one in daemons:
            one.stop()


def test_modules_of_a_daemon_that_drains_are_spread_over_the_others(rng):
    """40 on 4 daemons, then on 3; all that leave do so at the same time."""
    daemons = [Daemon(*DRAIN) for _ in range(4)]
    weights, x = data(rng, 1)[2], np.ones((1, 4, 16), np.float32)
    clients = [attnd.connect([one.address for one in daemons], timeout=60) for _ in range(40)]

    def counts(of):
        found = [int(one.metric("attnd_modules")) for one in of]
        print(found)
        assert max(found) <= 1.3 * 40 / len(of), found
        return found
    try:
        modules = [attnd.register(small_layout(), client, name=f"m{n}", max_rows=64) for n, client in enumerate(clients)]
        for module in modules:
            module.put(weights)
        assert sum(counts(daemons)) == 40
        daemons[0].process.send_signal(signal.SIGTERM)

        def leave(module):
            while daemons[0].process.poll() is None:
                module.forward(x)
                time.sleep(0.05)
        with ThreadPoolExecutor(len(modules)) as threads:
            list(threads.map(leave, modules))
        assert sum(counts(daemons[1:])) == 40
    finally:
        for client in clients:
            client.close()
        for one in daemons:
            one.stop()


def test_module_moves_to_another_daemon_while_its_own_drains(daemon, rng):
    """In the middle of steps, so that gradients move too; each daemon comes back before the next move."""
    xs, dys, weights = data(rng, 2 * MOVES + 1)
    expected, _ = run(daemon.address, xs, dys, weights)
    daemons = [Daemon(*DRAIN), Daemon(*DRAIN)]
    try:
        def end(module, step):
            if step % 2 == 0:
                return
            old = home_of(daemons)
            old.process.send_signal(signal.SIGTERM)
            while old.process.poll() is None:
                module.forward(xs[0, 0])  # one of these moves it, and the daemon ends
            assert old.process.returncode == 0
            old.start()
        found, _ = run([one.address for one in daemons], xs, dys, weights, end)
        check_same(found, expected)
    finally:
        for one in daemons:
            one.stop()


@pytest.mark.parametrize("after", ["a micro-batch", "a forward"])
def test_a_module_whose_calls_are_not_kept_moves_at_the_end_of_its_step(rng, after):
    """A daemon that drains serves the step that has begun, since nothing is kept to begin it anew elsewhere. The first
    backward of a step moves."""
    _, (x, other), weights = data(rng, 2)
    daemons, found = [Daemon("--drain_delay", "0", "--drain_timeout", "60") for _ in range(2)], []
    try:
        for drains in (False, True):
            with attnd.connect([one.address for one in daemons], timeout=60) as client:
                module = attnd.register(small_layout(), client, name="whole", optimizer=attnd.AdamW(), max_rows=64,
                                        replay_mib=0)
                module.put(weights)
                if after == "a micro-batch":
                    module.backward(x[0], module.forward(x[0], keep=True)[1])
                _, kept = module.forward(x[1], keep=True)
                if drains:
                    home = home_of(daemons)
                    home.process.send_signal(signal.SIGTERM)
                    while home.metric("attnd_draining") == 0:
                        time.sleep(0.01)
                module.backward(x[1], kept)
                module.step(lr=0.1)
                module.backward(other[0], module.forward(other[0], keep=True)[1])
                module.step(lr=0.1)
                found.append(module.get())
                if drains:
                    assert home.process.wait(60) == 0
                module.release()
        check_same(found[1], found[0])
    finally:
        for one in daemons:
            one.stop()


def test_a_backward_that_waits_for_another_holds_no_move_up(rng):
    """The daemon waits for the first one, which it has refused, when it begins to drain. Both come anew elsewhere."""
    _, dys, weights = data(rng, 1)
    daemons = [Daemon("--drain_delay", "0", "--drain_timeout", "60") for _ in range(2)]
    try:
        with attnd.connect([one.address for one in daemons], timeout=10) as client, ThreadPoolExecutor(1) as threads:
            module = attnd.register(small_layout(), client, name="held", max_rows=64, replay_mib=0)
            module.put(weights)
            home, (_, kept) = home_of(daemons), module.forward(dys[0, 0], keep=True)
            short = ModuleBackward(activations=kept.pointer, dy=dys.ctypes.data, dy_bytes=4)
            with pytest.raises(attnd.InvalidArgument):
                module._run("attnd_module_backward", ctypes.byref(short))
            waits = threads.submit(module.backward, dys[0, 0], kept, turn=module.reserve_turn())
            while module.micro_batches < 2:
                time.sleep(0.001)
            for _ in range(20):  # meanwhile it gets there
                module.forward(dys[0, 0])
            home.process.send_signal(signal.SIGTERM)
            while home.process.poll() is None:
                module.forward(dys[0, 0])  # one of these moves it, and the daemon ends
            assert home.process.returncode == 0 and not waits.done()
            with pytest.raises(attnd.DeadlineExceeded):
                waits.result()
    finally:
        for one in daemons:
            one.stop()


def test_state_on_a_disk_outlives_a_crash_and_a_drain(daemon, rng, tmp_path):
    xs, dys, weights = data(rng, 8)
    expected, _ = run(daemon.address, xs, dys, weights)
    durable = Daemon("--module_state_dir", str(tmp_path), *DRAIN)
    try:
        ends = {2: signal.SIGKILL, 4: signal.SIGTERM, 6: signal.SIGKILL}

        def end(_, step):
            how = ends.pop(step, None)
            if how is not None:
                durable.kill(how)
                durable.start()
        found, status = run(durable.address, xs, dys, weights, end, durability="disk")
        check_same(found, expected)
        assert 0 < int(status["durable_sequence"]) <= int(status["sequence"])
        assert durable.metric("attnd_state_recoveries_total") >= 1 and not os.listdir(tmp_path)
    finally:
        durable.stop()


def test_a_module_that_another_daemon_cannot_make_waits_for_its_own(daemon, rng, tmp_path):
    """Its state is on a disk, and calls before it are not kept; the daemon is away for longer than a few attempts take."""
    xs, dys, weights = data(rng, 6)
    expected, _ = run(daemon.address, xs, dys, weights)
    daemons = [Daemon("--module_state_dir", str(tmp_path), "--module_save_seconds", "1"), Daemon()]
    threads = []
    try:
        def end(module, step):
            if step != 4:
                return
            while not int(module.status()["durable_sequence"]):
                time.sleep(0.1)
            module.forward(xs[0, 0])
            daemons[0].kill()
            threads.append(threading.Timer(12, daemons[0].start))
            threads[0].start()
        found, _ = run([one.address for one in daemons], xs, dys, weights, end, durability="disk")
        check_same(found, expected)
    finally:
        for thread in threads:
            thread.join()
        for one in daemons:
            one.stop()


def test_a_module_outlives_a_standstill_of_its_daemon_that_is_longer_than_its_time(rng):
    """Nobody can use it meanwhile."""
    xs, _, weights = data(rng, 1)
    one = Daemon()
    try:
        with attnd.connect(one.address, timeout=30) as client:
            module = attnd.register(small_layout(), client, name="still", max_rows=64, ttl=2.0, replay_mib=0)
            module.put(weights)
            expected = module.forward(xs[0, 0])
            one.pause()
            time.sleep(5)
            one.process.send_signal(signal.SIGCONT)
            time.sleep(1.5)  # what has expired is ended within a second
            np.testing.assert_array_equal(module.forward(xs[0, 0]), expected)
            time.sleep(4)
            with pytest.raises(attnd.FailedPrecondition) as error:
                module.forward(xs[0, 0])
            assert error.value.reason == "STATE_LOST"
    finally:
        one.stop()


def test_states_that_cannot_be_made_are_told_in_one_line_a_minute(tmp_path):
    folder = tmp_path / "states"
    folder.mkdir(mode=0o700)
    one = Daemon("--module_state_dir", str(folder))
    try:
        folder.rmdir()
        with attnd.connect(one.address, timeout=1) as client:
            for _ in range(2):
                with pytest.raises(attnd.Unavailable, match="state: cannot make the folder"):
                    attnd.register(small_layout(), client, name="nowhere", max_rows=64, durability="host")
        assert one.read_log().count("event=module_state_unavailable") == 1
    finally:
        one.stop()


def test_disk_is_refused_where_there_is_none(client):
    with pytest.raises(attnd.Unimplemented, match="module_state_dir"):
        attnd.register(small_layout(), client, name="disk", durability="disk", max_rows=64)


def test_four_callers_fill_their_shares_and_train_in_what_was_planned(rng, tmp_path):
    names = ["ada", "ben", "cy", "di"]
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{name} {name * 12}\n" for name in names))
    tokens.chmod(0o600)
    full = Daemon("--token_file", str(tokens), "--module_memory_mib", "256", "--caller_module_mib", "64")
    try:
        def memory(what):
            return int(re.search(rf"{what}:\s+(\d+) kB", open(f"/proc/{full.process.pid}/status").read())[1]) << 10
        layout, held, failed = big_layout(), [], []
        before, planned = memory("VmRSS"), 0
        for name in names:
            client = attnd.connect(full.address, token=name * 12, timeout=120)
            modules = []
            with pytest.raises(attnd.ResourceExhausted, match="caller_module_mib"):
                while True:
                    modules.append(attnd.register(layout, client, name=f"m{len(modules)}", optimizer=attnd.AdamW(),
                                                  max_rows=512))
            assert modules
            planned += sum(int(m.plan[part]) for m in modules for part in m.plan if part.endswith("_bytes"))
            held.append(modules)

        def use(modules):
            try:
                for module in modules:
                    module.put({p.name: np.zeros(p.shape, np.float32) for p in layout.parameters})
                    for _ in range(2):
                        x = np.ones((1, 512, 256), np.float32)
                        module.backward(x, module.forward(x, keep=True)[1])
                        module.step(lr=1e-3)
            except attnd.AttndError as error:
                failed.append(error)
        callers = [threading.Thread(target=use, args=(modules,)) for modules in held]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        peak = memory("VmHWM") - before
        print(f"planned {planned >> 10} KiB, peak {peak >> 10} KiB beside {before >> 10} KiB at the start")
        assert not failed
        assert planned <= 1.05 * peak and full.process.poll() is None
    finally:
        full.stop()


def big_layout():
    layout = attnd.modules.Layout(256)
    block = layout.block()
    made = block.activation(block.linear(0, block.parameter("up", 1024, 256)), "gelu")
    block.add(0, block.linear(made, block.parameter("down", 256, 1024)))
    layout.layer(block, "0.")
    return layout


MOMENTS = int(os.environ.get("ATTND_TEST_MOMENTS", "3"))


def restart(one, random):
    one.process.wait(60)
    time.sleep(random.random() / 2)
    one.start()


def kill(one, random):
    one.kill()
    restart(one, random)


def drain(one, random):
    one.process.send_signal(signal.SIGTERM)
    restart(one, random)


def freeze(one, random):
    one.pause()
    time.sleep(3 * random.random())
    one.process.send_signal(signal.SIGCONT)


@pytest.mark.rare("modules")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("happens", [kill, freeze, drain])
def test_what_happens_at_a_random_moment_changes_no_bit(daemon, rng, happens, count):
    """Once to the daemon that has the module, then to any, while calls of all kinds are under way."""
    seed, steps = int(rng.integers(1 << 31)), 60
    random = Random(seed)
    xs, dys, weights = data(rng, steps)
    expected, _ = run(daemon.address, xs, dys, weights)
    longest = []
    for moment in range(MOMENTS):
        daemons = [Daemon("--drain_delay", "0.1") for _ in range(count)]
        try:
            last, ticks = time.monotonic(), []

            def happen():
                time.sleep(random.random() / 3)
                for one in (home_of(daemons), random.choice(daemons)):
                    happens(one, random)
                    time.sleep(random.random() / 3)
            thread = threading.Thread(target=happen)

            def between(_, step):
                if step == 0:
                    thread.start()
                if thread.is_alive():
                    time.sleep(0.005)
                ticks.append(time.monotonic())
            found, status = run([one.address for one in daemons], xs, dys, weights, between, snapshot_every=7)
            thread.join()
            check_same(found, expected)
            longest.append(max(b - a for a, b in zip([last, *ticks], ticks)))
        finally:
            for one in daemons:
                one.stop()
    print(f"{happens.__name__}, {count} daemons: {MOMENTS} moments, seed {seed}, longest step {max(longest):.1f} s, "
          f"median {sorted(longest)[len(longest) // 2]:.1f} s")
