"""attnd.register: a stack of layers on a daemon, from NumPy."""
import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ATTNCTL, Daemon

import attnd
from attnd.modules import Heads, Layout, Module


def small_layout(width=16, layers=2, element="f32"):
    layout = Layout(width, element)
    block = layout.block()
    packed = block.linear(0, block.parameter("in.weight", 3 * width, width), block.parameter("in.bias", 3 * width))
    q, k, v = [Heads(packed, 2, width // 2, n * width) for n in range(3)]
    made = block.linear(block.attention(q, k, v, causal=True), block.parameter("out.weight", width, width))
    block.norm(block.add(0, made), "layer", block.parameter("norm.weight", width), block.parameter("norm.bias", width))
    for n in range(layers):
        layout.layer(block, f"{n}.")
    return layout


@pytest.fixture
def made(client, rng, request):
    name = "".join(c if c.isalnum() else "." for c in request.node.name)
    module = attnd.register(small_layout(), client, name=name, optimizer=attnd.AdamW(), max_rows=64, kept_rows=128)
    yield module
    module.release()


def draw(module, rng):
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in module.layout.parameters}
    module.put(weights)
    return weights


def test_weights_come_back_as_they_were_put(made, rng):
    weights = draw(made, rng)
    found = made.get()
    assert set(found) == set(weights) and made.sequence == 1
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array)


def test_gradient_is_the_difference_quotients(made, rng):
    weights = draw(made, rng)
    x, dy = np.float32(rng.normal(size=(2, 5, 16))), np.float32(rng.normal(size=(2, 5, 16)))
    y, act = made.forward(x, keep=True)
    dx = made.backward(dy, act)
    gradient = made.get(["1.out.weight"], kind="gradient")["1.out.weight"]
    direction = np.float32(rng.normal(size=(16, 16)))
    made.discard()
    values = []
    for sign in (1, -1):
        made.put({"1.out.weight": weights["1.out.weight"] + np.float32(sign * 2.5e-3) * direction})
        values.append(np.vdot(np.float64(made.forward(x)), dy))
    np.testing.assert_allclose(np.vdot(gradient, direction), (values[0] - values[1]) / 5e-3, rtol=2e-2, atol=2e-3)
    assert dx.shape == x.shape and np.isfinite(dx).all() and y.dtype == np.float32


def test_micro_batches_add_up_and_steps_count(made, rng):
    draw(made, rng)
    x, dy = np.float32(rng.normal(size=(2, 4, 5, 16)))[:, :2], np.float32(rng.normal(size=(2, 2, 5, 16)))
    for n in range(2):
        made.backward(dy[n], made.forward(x[n], keep=True)[1])
    assert made.micro_batches == 2
    squared, finite = made.gradient_stats()
    result = made.step(lr=1e-3, weight_decay=0.1)
    assert finite and result.applied and result.optimizer_step == 1 and made.micro_batches == 0
    np.testing.assert_allclose(result.norm ** 2, squared, rtol=1e-12)
    assert made.sequence == result.sequence == 2


def test_turns_are_refused_where_they_order_nothing_and_end_where_they_are_given_up(made, rng):
    draw(made, rng)
    x = np.float32(rng.normal(size=(1, 5, 16)))
    _, kept = made.forward(x, keep=True)
    with pytest.raises(attnd.InvalidArgument, match="turn: expected 0 with no_weight_gradients"):
        made.backward(x, kept, weight_gradients=False, turn=made.reserve_turn())
    turns = [made.reserve_turn() for _ in range(3)]
    made.give_up_turn(turns[1])
    for turn in turns[1:]:
        with pytest.raises(attnd.FailedPrecondition, match="turn: expected one that was reserved"):
            made.backward(x, kept, turn=turn)
    made.backward(x, kept, turn=turns[0])
    assert made.micro_batches == 1


@pytest.mark.parametrize("change", ["step", "put", "skipped step", "discard"])
def test_a_backward_is_of_the_weights_of_its_forward(made, rng, change):
    weights = draw(made, rng)
    x = np.float32(rng.normal(size=(1, 5, 16)))
    made.backward(x, made.forward(x, keep=True)[1])
    _, kept = made.forward(x, keep=True)
    if change == "step":
        assert made.step(lr=1e-3).applied
    elif change == "put":
        made.put({"0.in.weight": weights["0.in.weight"]})
    elif change == "discard":
        made.discard()
    else:
        made.discard()
        made.backward(np.full_like(x, np.inf), made.forward(x, keep=True)[1])
        assert not made.step(lr=1e-3, skip_unless_finite=True).applied
    if change in ("step", "put"):
        with pytest.raises(attnd.FailedPrecondition, match="activations: expected those of a forward with the present"):
            made.backward(x, kept)
        assert made.micro_batches == 0
    else:
        _, same = made.forward(x, keep=True)
        np.testing.assert_array_equal(made.backward(x, kept), made.backward(x, same))


def test_discard_changes_nothing_but_the_sequence(made, rng):
    weights = draw(made, rng)
    made.backward(np.ones((1, 5, 16), np.float32), made.forward(np.ones((1, 5, 16), np.float32), keep=True)[1])
    assert not made.discard().applied and made.sequence == 2
    np.testing.assert_array_equal(made.get()["0.in.weight"], weights["0.in.weight"])


def test_plan_and_status_say_what_is_held(made):
    status = made.status()
    assert int(made.plan["weight_bytes"]) > 0 and not status["weights_complete"] and int(status["sequence"]) == 0


def test_lengths_and_masks_hide_the_same_keys(made, rng):
    draw(made, rng)
    x = np.float32(rng.normal(size=(2, 5, 16)))
    keys = np.arange(5) < np.array([3, 5])[:, None]
    by_length = made.forward(x, kv_lengths=[3, 5])
    by_mask = made.forward(x, mask=keys[:, None, None, :])
    np.testing.assert_allclose(by_length, by_mask, rtol=0, atol=1e-6)
    assert np.abs(by_length - made.forward(x))[0].max() > 1e-4


BLOCKS = np.tri(3, dtype=bool) & ~np.tri(3, k=-2, dtype=bool)
ATTENTION = {  # options of a layout and of attnd.local
    "window": {"causal": True, "window": (2, 0)},
    "bottom_right": {"causal": True, "align": "bottom_right"},
    "offset": {"window": (3, 0), "align": -1},
    "alibi": {"alibi_slopes": (0.5, -0.25), "align": "top_left"},
    "sink": {"sink": (0.5, -1.0)},
    "zero_rest": {"zero_rest": True, "window": (1, 1), "align": "top_left"},
    "mask of any length": {"mask": attnd.masks.window(2, 1)},
    "mask with a length": {"mask": attnd.masks.blocks(BLOCKS, 4), "softcap": 2.0},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_a_layout_has_every_option(client, rng, name):
    options, lengths = ATTENTION[name], (12, 12) if name == "mask with a length" else None
    layout = Layout(16)
    block = layout.block()
    made = block.attention(*[Heads(0, 2, 8)] * 3, mask_lengths=lengths, **options)
    block.linear(made, block.parameter("weight", 16, 16))
    layout.layer(block, "0.")
    module = attnd.register(layout, client, name=f"options.{list(ATTENTION).index(name)}")
    module.put({"0.weight": np.eye(16, dtype=np.float32)})
    x = np.float32(rng.normal(size=(2, 12, 16)))
    found = module.forward(x).reshape(2, 12, 2, 8)
    module.release()
    expected = attnd.local.forward(*[x.reshape(2, 12, 2, 8)] * 3, layout="blhd", **options).out
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_wrong_options_of_a_layout_are_told():
    attention, heads = Layout(16).block().attention, [Heads(0, 2, 8)] * 3
    for options, told in (({"align": "middle", "causal": True}, "align: expected"),
                          ({"mask": np.ones((2, 2))}, "mask: expected"),
                          ({"sink": (1, 2), "zero_rest": True}, "zero_rest: expected"),
                          ({"mask": attnd.masks.blocks(BLOCKS, 4), "mask_lengths": (99, 12)}, "mask blocks: expected")):
        with pytest.raises((attnd.InvalidArgument, attnd.errors.InvalidType), match=told):
            attention(*heads, **options)


WRONG = {
    "width": (lambda m: m.forward(np.ones((1, 4, 8), np.float32)), attnd.InvalidArgument, "x: expected"),
    "rows": (lambda m: [m.put({p.name: np.zeros(p.shape, np.float32) for p in m.layout.parameters}),
                        m.forward(np.ones((1, 65, 16), np.float32))], attnd.AttndError, "rows"),
    "name": (lambda m: m.put({"2.in.weight": np.ones((48, 16), np.float32)}), attnd.InvalidArgument, "name: expected"),
    "shape": (lambda m: m.put({"0.in.weight": np.ones((4, 16), np.float32)}), attnd.InvalidArgument, "0.in.weight"),
    "incomplete": (lambda m: m.forward(np.ones((1, 4, 16), np.float32)), attnd.FailedPrecondition, ""),
    "activations": (lambda m: m.backward(np.ones((1, 4, 16), np.float32), None), attnd.errors.InvalidType,
                    r"forward\(x, keep=True\)"),
    "lr": (lambda m: m.step(lr="1e-3"), attnd.errors.InvalidType, "lr: expected"),
    "rates": (lambda m: m.step(rates=[attnd.modules.GroupRates(None)]), attnd.errors.InvalidType, "lr: expected"),
    "seed": (lambda m: m.forward(np.ones((1, 4, 16), np.float32), seed=1.5), attnd.errors.InvalidType, "seed: expected"),
    "optimizer": (lambda m: attnd.register(small_layout(layers=1), m.client, name="o", optimizer=np.float32),
                  attnd.errors.InvalidType, r"optimizer: expected attnd.AdamW\(\)"),
    "max_rows": (lambda m: attnd.register(small_layout(layers=1), m.client, name="o", max_rows=0), attnd.InvalidArgument,
                 "max_rows: expected"),
    "ttl": (lambda m: attnd.register(small_layout(layers=1), m.client, name="o", ttl=float("nan")), attnd.InvalidArgument,
            "ttl: expected"),
    "groups": (lambda m: attnd.register(small_layout(layers=1), m.client, name="o", groups=[-1]), attnd.InvalidArgument,
               "groups: expected"),
    "offset": (lambda m: m.forward(np.ones((1, 4, 16), np.float32), offset=-1), attnd.InvalidArgument, "offset: expected"),
    "max_norm": (lambda m: m.step(1e-3, max_norm="1"), attnd.errors.InvalidType, "max_norm: expected"),
    "pairs": (lambda m: m.step(rates=[(1e-3, 0.0)]), attnd.errors.InvalidType, "rates: expected"),
    "tensors": (lambda m: m.put([np.ones(1)]), attnd.errors.InvalidType, "tensors: expected"),
    "kind": (lambda m: m.get(kind="momentum"), attnd.InvalidArgument, "kind: expected"),
    "other layout": (lambda m: attnd.register(small_layout(layers=1), m.client, name=m.registration.name),
                     attnd.FailedPrecondition, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_told(made, name):
    call, kind, told = WRONG[name]
    with pytest.raises(kind, match=told):
        call(made)


def train(module, xs, dys, steps, between=lambda step: None):
    for step in range(steps):
        for n in range(2):
            module.backward(dys[step, n], module.forward(xs[step, n], keep=True)[1])
            between(step)
        module.step(lr=1e-3, weight_decay=0.1)
    return module.get()


def test_killed_and_restarted_daemon_gives_the_same_bits(own_daemon, daemon, rng):
    xs, dys = np.float32(rng.normal(size=(2, 6, 2, 2, 5, 16)))
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in small_layout().parameters}
    found = []
    for where in (daemon, own_daemon):
        with attnd.connect(where.address, wait_for_ready=True, timeout=60) as client:
            module = attnd.register(small_layout(), client, name="killed", optimizer=attnd.AdamW(), max_rows=64)
            module.put(weights)

            def kill(step):
                if where is own_daemon and step in (1, 4):
                    own_daemon.kill()
                    own_daemon.start()
            found.append(train(module, xs, dys, 6, kill))
            assert isinstance(module, Module) and module.sequence == 7
            module.release()
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)


def test_a_restart_of_the_only_daemon_is_waited_for(daemon, rng):
    """As an upgrade does it: calls meet a daemon that drains, one that ends, nobody, and one that is new."""
    xs, dys = np.float32(rng.normal(size=(2, 40, 2, 2, 5, 16)))
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in small_layout().parameters}
    restarted, found = Daemon("--drain_delay", "1"), []

    def start_again():
        restarted.process.wait(60)
        restarted.start()
    starter = threading.Thread(target=start_again)

    def stop(step):
        if where is restarted and step == 1 and starter.ident is None:
            restarted.process.send_signal(signal.SIGTERM)
            starter.start()
        if where is restarted and 1 < step < 39 and starter.is_alive():
            time.sleep(0.02)  # so that it drains while steps are still to come
    for where in (daemon, restarted):
        with attnd.connect(where.address, wait_for_ready=True, timeout=60) as client:
            module = attnd.register(small_layout(), client, name="restarted", optimizer=attnd.AdamW(), max_rows=64)
            module.put(weights)
            found.append(train(module, xs, dys, 40, stop))
            module.release()
    starter.join()
    restarted.stop()
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)


def test_state_beyond_the_log_is_lost(own_daemon, rng):
    with attnd.connect(own_daemon.address, wait_for_ready=True, timeout=60) as client:
        module = attnd.register(small_layout(), client, name="lost", optimizer=attnd.AdamW(), max_rows=64, replay_mib=0)
        draw(module, rng)
        own_daemon.kill()
        own_daemon.start()
        for _ in range(2):
            with pytest.raises(attnd.FailedPrecondition) as error:
                module.forward(np.ones((1, 4, 16), np.float32))
            assert error.value.reason == "STATE_LOST"
        draw(module, rng)  # a checkpoint: it goes on from there
        module.forward(np.ones((1, 4, 16), np.float32))
        assert module.sequence == 1


def test_ranks_wait_for_one_that_is_late_however_many_they_are(daemon, rng):
    """The daemon holds twelve micro-batches that are early."""
    x, ranks = np.ones((1, 4, 16), np.float32), 20
    with attnd.connect(daemon.address, timeout=60) as client:
        first = attnd.register(small_layout(), client, name="late", optimizer=attnd.AdamW(), max_rows=64, kept_rows=640,
                               replay_mib=0)
        draw(first, rng)
        known = first.registration._replace(owner_epoch=first.owner_epoch)
        modules = [first, *(Module(client, known, 0) for _ in range(ranks - 1))]
        for rank, module in enumerate(modules):
            module._run("attnd_module_join", rank, ranks)
        kept = [module.forward(x, keep=True)[1] for module in modules]
        with ThreadPoolExecutor(ranks) as threads:
            calls = [threads.submit(module.backward, x, one) for module, one in zip(modules[1:], kept[1:])]
            time.sleep(1)
            assert not any(call.done() for call in calls)
            first.backward(x, kept[0])
            for call in calls:
                call.result()
        assert first.step(1e-3).applied
        first.release()


def test_who_could_lose_a_module_is_warned_once(daemon, rng):
    x = np.ones((64, 64, 16), np.float32)  # 256 KiB, twice a step

    def steps(**options):
        with attnd.connect(daemon.address) as client, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            module = attnd.register(small_layout(), client, name="warned", optimizer=attnd.AdamW(), max_rows=4096, **options)
            draw(module, rng)
            for _ in range(6):
                module.backward(x, module.forward(x, keep=True)[1])
                module.step(1e-3)
            module.release()
        return [str(warning.message) for warning in told]
    warned, = steps(replay_mib=1)
    assert "last 1 MiB of calls" in warned and "snapshot_every=10" in warned
    assert steps(replay_mib=1, snapshot_every=0) == steps(replay_mib=1, snapshot_every=2) == steps() == []


def test_a_second_owner_takes_a_module_and_the_first_is_told_so(daemon, rng):
    with attnd.connect(daemon.address) as one, attnd.connect(daemon.address) as other:
        first = attnd.register(small_layout(), one, name="owned", optimizer=attnd.AdamW(), max_rows=64)
        draw(first, rng)
        second = attnd.register(small_layout(), other, name="owned", optimizer=attnd.AdamW(), max_rows=64)
        assert second.owner_epoch > first.owner_epoch and second.sequence == 1
        second.forward(np.ones((1, 4, 16), np.float32))
        for _ in range(2):
            with pytest.raises(attnd.FailedPrecondition, match=f"owned .* by owner epoch {second.owner_epoch}") as error:
                first.forward(np.ones((1, 4, 16), np.float32))
            assert error.value.reason == "MODULE_TAKEN"
        second.release()


def test_what_a_cycle_holds_is_freed_in_any_order(daemon, rng):
    """As garbage collection does: first the client, or the module, then its activations."""
    for first in ("handle", "_native"):
        client = attnd.connect(daemon.address)
        module = attnd.register(small_layout(), client, name="cycle", max_rows=64)
        draw(module, rng)
        kept = module.forward(np.ones((1, 4, 16), np.float32), keep=True)[1]
        (module._native.handle if first == "handle" else module._native).__del__()
        kept.__del__()
        module._native.__del__()


class CuttingProxy:
    """Forwards TCP to a daemon and cuts each connection after a random number of the daemon's bytes, so that replies are
    lost of calls that were done. The cuts of a test stay below the ten retries of the client's budget."""

    def __init__(self, address, rng, least=4000, most=14000):
        host, port = address.split(":")
        self._to, self._rng, self._bytes, self.cuts, self.cutting = (host, int(port)), rng, (least, most), 0, True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(self._to)
            left = int(self._rng.integers(*self._bytes)) if self.cutting else None
            threading.Thread(target=self._copy, args=(here, there, None), daemon=True).start()
            threading.Thread(target=self._copy, args=(there, here, left), daemon=True).start()

    def _copy(self, source, sink, left):
        try:
            while left is None or left > 0:
                data = source.recv(65536 if left is None else min(left, 65536))
                if not data:
                    break
                sink.sendall(data)
                left = None if left is None else left - len(data)
            self.cuts += left == 0
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()


def test_each_call_counts_once_however_often_its_reply_is_lost(daemon, rng):
    xs, dys = np.float32(rng.normal(size=(2, 8, 2, 2, 5, 16)))
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in small_layout().parameters}
    proxy, found = CuttingProxy(daemon.address, rng), []

    def rest(step):
        proxy.cutting = not (found and step == 7)  # the weights' reply alone is longer than a connection lives
    for address in (daemon.address, proxy.address):
        with attnd.connect(address, timeout=60, retries=100, channels=1, wait_for_ready=True) as client:
            module = attnd.register(small_layout(), client, name="cut" if found else "quiet", optimizer=attnd.AdamW(),
                                    max_rows=64, kept_rows=640)
            module.put(weights)
            found.append(train(module, xs, dys, 8, rest))
            assert module.sequence == 9
            module.release()
    proxy.close()
    assert proxy.cuts >= 3, proxy.cuts
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)


def test_state_in_host_memory_outlives_the_process(daemon, rng, tmp_path):
    xs, dys = np.float32(rng.normal(size=(2, 6, 2, 2, 5, 16)))
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in small_layout().parameters}
    durable, found = Daemon("--module_state_dir", str(tmp_path)), []
    for where, durability in ((daemon, "process"), (durable, "host")):
        with attnd.connect(where.address, wait_for_ready=True, timeout=60) as client:
            module = attnd.register(small_layout(), client, name="durable", optimizer=attnd.AdamW(), max_rows=64,
                                    durability=durability)
            module.put(weights)

            def kill(step):
                if where is durable and step in (2, 4):
                    durable.kill()
                    durable.start()
            found.append(train(module, xs, dys, 6, kill))
            if where is durable:
                assert 0 < int(module.status()["durable_sequence"]) <= module.sequence
            module.release()
    durable.stop()
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)


def test_a_gpu_trains_as_processors_do(daemon, gpu_daemon, rng):
    xs, dys = np.float16(rng.normal(size=(2, 3, 2, 2, 5, 16)))
    weights = {p.name: np.float32(rng.normal(size=p.shape) * 0.2) for p in small_layout().parameters}
    found = []
    for where, engine in ((daemon, "cpu"), (gpu_daemon, "cuda")):
        with attnd.connect(where.address, timeout=60) as client:
            assert f"modules_on_{engine}" in client.info().features
            module = attnd.register(small_layout(element="f16"), client, name="trains", optimizer=attnd.AdamW(), max_rows=64)
            assert module.plan["engine"] == engine
            module.put(weights)
            found.append(train(module, xs, dys, 3))
            module.release()
    for name, array in found[0].items():
        # A step moves a weight by 1e-3, in either direction where its gradient is nothing.
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=6e-3)
        assert np.median(np.abs(found[1][name] - array)) < 1e-4 < np.abs(array - weights[name] * 0.9997).max()


def test_a_gpu_says_what_it_cannot_compute(gpu_daemon):
    with attnd.connect(gpu_daemon.address, timeout=60) as client:
        for element in ("f32", "bf16"):
            with pytest.raises(attnd.Unimplemented, match=r"block\[0\].op\[1\].attention: element"):
                attnd.register(small_layout(element=element), client, name="refused", max_rows=64)


def attnctl(daemon, *words):
    done = subprocess.run([ATTNCTL, "-a", daemon.address, "-o", "json", *words], capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_attnctl_saves_and_releases_by_name(daemon, client, rng, tmp_path):
    module = attnd.register(small_layout(), client, name="by-name", optimizer=attnd.AdamW(), max_rows=64)
    weights = draw(module, rng)
    code, told = attnctl(daemon, "module", "save", "by-name", str(tmp_path / "saved"))
    assert code == 0 and told["sequence"] == 1 and [one.name for one in tmp_path.iterdir()] == ["saved"]
    data = (tmp_path / "saved").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    assert len(header) == 1 + 3 * len(weights) and header["__metadata__"]["module"] == "by-name"
    for name, array in weights.items():
        first, last = header[f"weight/{name}"]["data_offsets"]
        assert data[begin + first:begin + last] == array.tobytes()
    assert attnctl(daemon, "module", "release", "by-name")[0] == 0
    code, told = attnctl(daemon, "module", "save", "by-name", str(tmp_path / "none"))
    assert code == 4 and "attnctl module list shows, got by-name" in told and not (tmp_path / "none").exists()


def test_attnctl_measures_a_training_step(daemon):
    code, told = attnctl(daemon, "bench", "--module", "bert-base", "--layers", "1", "--rows", "1,8", "--duration", "0.1",
                         "--warmup", "0")
    assert code == 0 and told["rows"] == 8 and told["bytes_per_step"] == 4 * 8 * 768 * 4 and told["step"]["p50_seconds"] > 0
    assert not [one for one in attnctl(daemon, "module", "list")[1] if one["name"].startswith("attnctl-bench")]


def test_metrics_tell_memory_by_kind_and_layers_computed_again(rng):
    """A mebibyte has no room for what 1,500 rows of two layers make, but for each layer's input."""
    daemon = Daemon("--module_memory_mib", "1")
    try:
        client = attnd.connect(daemon.address)
        for kept_rows, again in ((64, 0), (1500, 2)):
            module = attnd.register(small_layout(), client, name=f"kept{kept_rows}", optimizer=attnd.AdamW(), max_rows=64,
                                    kept_rows=kept_rows)
            for kind in ("weight", "optimizer", "activation", "workspace"):
                found = daemon.metric(rf'attnd_module_bytes{{.*kind="{kind}".*}}')
                assert found == float(module.plan[f"{kind}_bytes"]) > 0, kind
            draw(module, rng)
            x = np.float32(rng.normal(size=(1, 5, 16)))
            before = daemon.metric("attnd_recomputed_layers_total")
            module.backward(x, module.forward(x, keep=True)[1])
            assert daemon.metric("attnd_recomputed_layers_total") == before + again
            module.release()
        assert daemon.metric("attnd_module_bytes") == 0
    finally:
        daemon.kill()
