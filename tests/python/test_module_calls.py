"""A caller of the service Modules with the .proto files, protoc and grpcio and nothing of attnd's own clients: it trains,
and goes on bitwise as if nothing had happened when the daemon is killed at any moment."""
import importlib
import os
import random
import shutil
import subprocess
import threading
import types

import numpy as np
import pytest
from conftest import ROOT, Daemon

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")
PLUGIN = shutil.which("grpc_python_plugin") or pytest.skip("no grpc_python_plugin", allow_module_level=True)
WIDTH, ROWS, MICRO_BATCHES, STEPS = 64, 32, 2, 60
KILLS = int(os.environ.get("ATTND_TEST_KILLS", "4"))
CHANGED = int(os.environ.get("ATTND_TEST_MESSAGES", "1500"))
X, Y, DY, DX = 20, 21, 25, 27


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    made = tmp_path_factory.mktemp("generated")
    protos = [f"attnd/v1/{name}.proto" for name in ("module", "attention", "capture", "mask")]
    subprocess.run(["protoc", "-I.", f"--python_out={made}", f"--grpc_out={made}", f"--plugin=protoc-gen-grpc={PLUGIN}",
                    *protos], cwd=os.path.join(ROOT, "proto"), check=True)
    import attnd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnd, "__path__", [*attnd.__path__, os.path.join(made, "attnd")])
        yield types.SimpleNamespace(pb2=importlib.import_module("attnd.v1.module_pb2"),
                                    pb2_grpc=importlib.import_module("attnd.v1.module_pb2_grpc"),
                                    attention=importlib.import_module("attnd.v1.attention_pb2"))


def numbers(*seed, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32).tobytes()


class Trainer:
    """Linear, GELU, linear. Sends the calls of a step again whenever one fails, from the state that the server has."""

    def __init__(self, wire, address, durability):
        self.wire, self.pb, self.address, self.connected = wire, wire.pb2, address, threading.Event()
        pb, f32 = self.pb, wire.attention.ELEMENT_FLOAT32
        layout = pb.ModuleLayout(version=1, width=WIDTH, element=f32, parameter_element=f32)
        block = layout.block.add()
        self.names = ["w1", "w2"]
        for name in self.names:
            block.parameter.add(name=name, shape=[WIDTH, WIDTH])
        block.op.add(linear=pb.Linear(input=0, weight=0))
        block.op.add(activation=pb.Activation(input=2, kind=pb.ACTIVATION_KIND_GELU))
        block.op.add(linear=pb.Linear(input=3, weight=1))
        layout.layer.add(prefix="l.")
        adamw = pb.AdamW(beta1=0.9, beta2=0.999, epsilon=1e-8)
        self.registration = pb.RegisterModuleRequest(
            name="run", layout=layout, optimizer=pb.OptimizerLayout(adamw=adamw), durability=durability,
            limits=pb.ModuleLimits(max_rows=ROWS, kept_rows=ROWS))

    def connect(self):
        options = {"use_local_subchannel_pool": 1, "initial_reconnect_backoff_ms": 20, "max_reconnect_backoff_ms": 50,
                   "min_reconnect_backoff_ms": 20}
        self.channel = grpc.insecure_channel(self.address, [(f"grpc.{name}", value) for name, value in options.items()])
        self.stub = self.wire.pb2_grpc.ModulesStub(self.channel)
        answer = self.stub.Register(self.registration, wait_for_ready=True, timeout=20)
        self.token = answer.token
        self.connected.set()
        return answer.status.sequence

    def put(self):
        def messages():
            yield self.pb.PutTensorsRequest(header=self.pb.PutTensorsHeader(token=self.token))
            for n, name in enumerate(self.names):
                yield self.pb.PutTensorsRequest(tensor=self.pb.TensorHeader(
                    kind=self.pb.TENSOR_KIND_WEIGHT, name=f"l.{name}", shape=[WIDTH, WIDTH],
                    element=self.wire.attention.ELEMENT_FLOAT32))
                yield self.pb.PutTensorsRequest(chunk=self.wire.attention.PayloadChunk(data=numbers(n, rows=WIDTH)))
            yield self.pb.PutTensorsRequest(commit=self.pb.PutTensorsCommit(complete=True))
        self.stub.PutTensors(messages(), timeout=20)

    def exchange(self, method, request, header, payloads):
        header.payload.extend(self.pb.PayloadSize(tensor=field, bytes=len(data)) for field, data in payloads)
        chunks = [request(chunk=self.wire.attention.PayloadChunk(tensor=field, data=data)) for field, data in payloads]
        answers = list(method(iter([request(header=header), *chunks]), timeout=20))
        return answers[0].header, {answer.chunk.tensor: answer.chunk.data for answer in answers[1:]}

    def step(self, sequence):
        for n in range(MICRO_BATCHES):
            forward = self.pb.ModuleForwardHeader(token=self.token, sequence=sequence, training=True,
                                                  rows=self.pb.Rows(batch=1, length=ROWS))
            made, out = self.exchange(self.stub.Forward, self.pb.ModuleForwardRequest, forward,
                                      [(X, numbers(7, sequence, n))])
            assert len(out[Y]) == ROWS * WIDTH * 4
            assert [stage.name for stage in made.receipt.stage] == ["receive", "queue", "h2d", "kernel", "d2h"]
            backward = self.pb.ModuleBackwardHeader(token=self.token, sequence=sequence, micro_batch=n, want_dx=True,
                                                    activations=made.activations.token)
            _, out = self.exchange(self.stub.Backward, self.pb.ModuleBackwardRequest, backward,
                                   [(DY, numbers(8, sequence, n))])
            assert len(out[DX]) == ROWS * WIDTH * 4
        return self.stub.Step(self.pb.StepRequest(token=self.token, sequence=sequence, micro_batches=MICRO_BATCHES,
                                                  group=[self.pb.GroupValues(learning_rate=1e-3, weight_decay=0.01)]),
                              timeout=20)

    def train(self, steps):
        """The tensors after so many steps, and how often it began again; a failed call leads to what the server has."""
        restarts, sequence = 0, None
        while True:
            try:
                if sequence is None:
                    sequence = self.connect()
                elif sequence == 0:
                    self.put()
                    sequence = 1
                elif sequence <= steps:
                    sequence = self.step(sequence).sequence
                else:
                    return self.tensors(), restarts
            except grpc.RpcError:
                restarts, sequence = restarts + 1, None
                self.channel.close()

    def tensors(self):
        kinds = [self.pb.TENSOR_KIND_WEIGHT, self.pb.TENSOR_KIND_MOMENT1, self.pb.TENSOR_KIND_MOMENT2]
        answers = self.stub.GetTensors(self.pb.GetTensorsRequest(token=self.token, kind=kinds), timeout=20)
        return b"".join(answer.chunk.data for answer in answers)


def test_a_daemon_that_is_killed_at_any_moment_leaves_the_weights_of_the_quiet_run(wire, daemon, tmp_path):
    quiet, _ = Trainer(wire, daemon.address, wire.pb2.DURABILITY_PROCESS).train(STEPS)
    assert len(quiet) == 3 * 2 * WIDTH * WIDTH * 4
    own = Daemon("--module_state_dir", str(tmp_path))
    try:
        chance, done = random.Random(5), threading.Event()
        trainer = Trainer(wire, own.address, wire.pb2.DURABILITY_HOST)

        def kill_while_it_trains():
            for _ in range(KILLS):
                trainer.connected.wait()
                trainer.connected.clear()
                if done.wait(chance.uniform(0, 0.05)):
                    return
                own.kill()
                own.start()
        killer = threading.Thread(target=kill_while_it_trains)
        killer.start()
        noisy, restarts = trainer.train(STEPS)
        done.set()
        trainer.connected.set()
        killer.join()
        assert restarts > 0 and noisy == quiet
    finally:
        done.set()
        own.stop()


def test_messages_of_random_bytes_are_refused_or_answered_and_nothing_else(wire, own_daemon):
    """Each method's messages, with a few bytes of one of them changed, of the state that the module has by then."""
    trainer, chance, codes = Trainer(wire, own_daemon.address, wire.pb2.DURABILITY_PROCESS), random.Random(11), {}
    trainer.connect()
    trainer.put()
    pb, data = trainer.pb, numbers(1, rows=4)
    methods = {"Register": "unary_unary", "GetModule": "unary_unary", "Renew": "unary_unary", "Step": "unary_unary",
               "GradientStats": "unary_unary", "SumGradients": "unary_unary", "Forward": "stream_stream",
               "Backward": "stream_stream", "PutTensors": "stream_unary", "GetTensors": "unary_stream"}
    raw = {name: getattr(trainer.channel, kind)(f"/attnd.v1.Modules/{name}") for name, kind in methods.items()}
    chunk = wire.attention.PayloadChunk

    def messages(name, sequence):
        token = trainer.token
        header = pb.ModuleForwardHeader(token=token, sequence=sequence, rows=pb.Rows(batch=1, length=4), training=True,
                                        payload=[pb.PayloadSize(tensor=X, bytes=len(data))])
        if name == "Forward":
            return [pb.ModuleForwardRequest(header=header), pb.ModuleForwardRequest(chunk=chunk(tensor=X, data=data))]
        if name == "Backward":
            backward = pb.ModuleBackwardHeader(token=token, sequence=sequence, forward=header, want_dx=True)
            backward.payload.extend(pb.PayloadSize(tensor=field, bytes=len(data)) for field in (X, DY))
            del backward.forward.payload[:]
            return [pb.ModuleBackwardRequest(header=backward)] + [
                pb.ModuleBackwardRequest(chunk=chunk(tensor=field, data=data)) for field in (X, DY)]
        if name == "PutTensors":
            tensor = pb.TensorHeader(kind=pb.TENSOR_KIND_WEIGHT, name="l.w1", shape=[WIDTH, WIDTH],
                                     element=wire.attention.ELEMENT_FLOAT32)
            return [pb.PutTensorsRequest(header=pb.PutTensorsHeader(token=token, sequence=sequence)),
                    pb.PutTensorsRequest(tensor=tensor),
                    pb.PutTensorsRequest(chunk=chunk(data=numbers(1, rows=WIDTH))),
                    pb.PutTensorsRequest(commit=pb.PutTensorsCommit(optimizer_step=3))]
        return [{"Register": trainer.registration, "GetModule": pb.GetModuleRequest(token=token),
                 "Renew": pb.RenewModuleRequest(token=token, ttl_ms=3600000),
                 "GradientStats": pb.GradientStatsRequest(token=token, sequence=sequence),
                 "SumGradients": pb.SumGradientsRequest(token=token, sequence=sequence, replicas=2),
                 "GetTensors": pb.GetTensorsRequest(token=token, sequence=sequence, shards=2),
                 "Step": pb.StepRequest(token=token, sequence=sequence, group=[pb.GroupValues()])}[name]]
    for _ in range(CHANGED):
        name = chance.choice(list(methods))
        sequence = trainer.stub.GetModule(pb.GetModuleRequest(token=trainer.token), timeout=20).status.sequence
        sent = [bytearray(message.SerializeToString()) for message in messages(name, sequence)]
        changed = chance.choice(sent)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(min(len(changed), 300))] = chance.randrange(256)
        try:
            asked = iter(map(bytes, sent)) if methods[name].startswith("stream") else bytes(sent[0])
            answer = raw[name](asked, timeout=20)
            if methods[name].endswith("stream"):
                list(answer)
        except grpc.RpcError as error:
            codes.setdefault(error.code().name, set()).add(name)
    known = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED", "OUT_OF_RANGE", "UNIMPLEMENTED",
             "RESOURCE_EXHAUSTED"}
    print(f"{CHANGED} messages: {codes}")
    assert own_daemon.process.poll() is None and codes["INVALID_ARGUMENT"] == set(methods)
    assert codes.pop("UNAVAILABLE", set()) <= {"Forward", "Backward"}  # no room for what they keep
    assert set(codes) <= known
