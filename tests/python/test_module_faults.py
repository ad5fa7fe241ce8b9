"""Module calls over a network that loses, doubles, delays and reorders: weights are bitwise those of the quiet run."""
import os
import threading

import pytest

from conftest import FORGETFUL, Daemon

grpc = pytest.importorskip("grpc")
from faulty_proxy import FAULTS, FaultyProxy  # noqa: E402
from test_module_calls import DY, ROWS, X, Trainer, numbers, wire  # noqa: E402, F401

STEPS = int(os.environ.get("ATTND_TEST_STEPS", "12"))
MICRO_BATCHES = 4
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def until_answered(call):
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() not in AGAIN:
                raise


class Parallel(Trainer):
    """The micro-batches of a step at once, each call sent until it is answered."""

    def __init__(self, connected_to, name, address):
        super().__init__(connected_to, address, connected_to.pb2.DURABILITY_PROCESS)
        self.registration.name = name
        self.registration.limits.kept_rows = 64 * ROWS  # forwards that were doubled or lost keep theirs until the step
        self.added, self.replayed = 0, 0

    def micro_batch(self, sequence, n):
        def header():
            return self.pb.ModuleForwardHeader(token=self.token, sequence=sequence, training=True,
                                               rows=self.pb.Rows(batch=1, length=ROWS))

        def forward():
            return self.exchange(self.stub.Forward, self.pb.ModuleForwardRequest, header(), [(X, numbers(7, sequence, n))])
        activations = until_answered(forward)[0].activations.token

        def backward():
            made = self.pb.ModuleBackwardHeader(token=self.token, sequence=sequence, micro_batch=n, want_dx=True)
            payloads = [(DY, numbers(8, sequence, n))]
            if activations:
                made.activations = activations
            else:
                made.forward.CopyFrom(header())
                payloads.insert(0, (X, numbers(7, sequence, n)))
            return self.exchange(self.stub.Backward, self.pb.ModuleBackwardRequest, made, payloads)
        try:
            made = until_answered(backward)[0]
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION, error  # spent by a backward whose reply was lost
            activations = b""
            made = until_answered(backward)[0]
            assert not made.added
        self.added += made.added

    def step(self, sequence):
        calls = [threading.Thread(target=self.micro_batch, args=(sequence, n)) for n in reversed(range(MICRO_BATCHES))]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        request = self.pb.StepRequest(token=self.token, sequence=sequence, micro_batches=MICRO_BATCHES,
                                      group=[self.pb.GroupValues(learning_rate=1e-3, weight_decay=0.01)])
        made = until_answered(lambda: self.stub.Step(request, timeout=20))
        self.replayed += made.replayed
        assert made.sequence == sequence + 1
        return made

    def run(self, steps):
        assert self.connect() == 0
        until_answered(self.put)
        for sequence in range(1, steps + 1):
            self.step(sequence)
        tensors = until_answered(self.tensors)
        until_answered(lambda: self.stub.Release(self.pb.ReleaseModuleRequest(token=self.token), timeout=20))
        return tensors


def runs(wire, address):  # noqa: F811
    """Tensors after a quiet run and after one over a faulty network, the latter's trainer and the network."""
    quiet, proxy = Parallel(wire, "quiet", address).run(STEPS), FaultyProxy(address, seed=17)
    try:
        noisy = Parallel(wire, "noisy", proxy.address)
        noisy.connect = lambda: until_answered(lambda: Trainer.connect(noisy))
        return quiet, noisy.run(STEPS), noisy, proxy
    finally:
        proxy.close()


def test_calls_count_once_over_a_network_that_loses_doubles_delays_and_reorders(wire, daemon):  # noqa: F811
    quiet, found, noisy, proxy = runs(wire, daemon.address)
    assert found == quiet
    calls = sum(proxy.faults.values())
    print(f"{STEPS} steps: {calls} calls, {dict(proxy.faults)}; {noisy.replayed} steps were replayed, "
          f"{STEPS * MICRO_BATCHES - noisy.added} micro-batches had been added before")
    assert all(proxy.faults[fault] > calls / 10 for fault in FAULTS), proxy.faults
    assert noisy.replayed > 0 and noisy.added < STEPS * MICRO_BATCHES, (noisy.replayed, noisy.added)


def test_calls_that_counted_twice_would_be_seen(wire):  # noqa: F811
    forgetful = Daemon(program=FORGETFUL)
    try:
        quiet, found, _, _ = runs(wire, forgetful.address)
        assert found != quiet
    finally:
        forgetful.kill()
