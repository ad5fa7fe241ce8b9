"""A caller with the .proto files, protoc and grpcio and nothing of attnd's own clients: streamed calls by the book, every
way to break their order, and calls that are cancelled at each state."""
import importlib
import os
import shutil
import subprocess
import threading
import time
import types

import numpy as np
import pytest
from conftest import ROOT, Daemon

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")
PLUGIN = shutil.which("grpc_python_plugin") or pytest.skip("no grpc_python_plugin", allow_module_level=True)

ORDER = "CHUNK_ORDER"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MIB = 1 << 20
# The payloads of a request, in the order in which they travel, by field number.
FORWARD = {"k": 20, "v": 21, "q": 22}
BACKWARD = {"k": 20, "v": 21, "q": 22, "lse": 23, "o": 24, "d_o": 25, "d_lse": 26}


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    """Runs protoc on the interface, beside the package attnd as docs/numpy.md says."""
    made = tmp_path_factory.mktemp("generated")
    protos = ["attnd/v1/attention.proto", "attnd/v1/capture.proto", "attnd/v1/mask.proto", "google/rpc/status.proto",
              "google/rpc/error_details.proto"]
    subprocess.run(["protoc", "-I.", f"--python_out={made}", f"--grpc_out={made}", f"--plugin=protoc-gen-grpc={PLUGIN}",
                    *protos], cwd=os.path.join(ROOT, "proto"), check=True)
    import attnd
    modules = ("attnd.v1.attention_pb2", "attnd.v1.attention_pb2_grpc", "google.rpc.status_pb2",
               "google.rpc.error_details_pb2")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made)
        patch.setattr(attnd, "__path__", [*attnd.__path__, os.path.join(made, "attnd")])
        yield types.SimpleNamespace(**{name.split(".")[-1].replace("attention_", ""): importlib.import_module(name)
                                       for name in modules})


@pytest.fixture
def stub(wire, daemon):
    with grpc.insecure_channel(daemon.address) as channel:
        yield wire.pb2_grpc.AttentionStub(channel)


class Call:
    """One problem with its tensors, float32 and bhld, and the messages that ask for it."""

    def __init__(self, wire, direction, rng, q_len=7, kv_len=5, heads=3, dim=3, v_dim=5):
        self.wire, self.direction = wire, direction
        self.request = getattr(wire.pb2, f"{direction}StreamRequest")
        self.problem = wire.pb2.Problem(
            batch=1, q_heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len, qk_head_dim=dim, v_head_dim=v_dim,
            element=wire.pb2.ELEMENT_FLOAT32, layout=wire.pb2.LAYOUT_BHLD)
        shapes = {"k": (heads, kv_len, dim), "v": (heads, kv_len, v_dim), "q": (heads, q_len, dim)}
        self.tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        self.fields = FORWARD if direction == "Forward" else BACKWARD
        self.expected = self._attention(rng)

    def _attention(self, rng):
        """The call's outputs in float64; for a backward also its further inputs."""
        k, v, q = (self.tensors[name].astype(np.float64) for name in "kvq")
        scale = q.shape[-1]**-0.5
        scores = scale * q @ k.swapaxes(1, 2)
        lse = np.log(np.exp(scores).sum(-1))
        p = np.exp(scores - lse[..., None])
        o = p @ v
        if self.direction == "Forward":
            return {"lse": lse, "o": o}
        d_o, d_lse = rng.standard_normal(o.shape), rng.standard_normal(lse.shape)
        for name, tensor in (("lse", lse), ("o", o), ("d_o", d_o), ("d_lse", d_lse)):
            self.tensors[name] = tensor.astype(np.float32)
        d_s = p * (d_o @ v.swapaxes(1, 2) - (d_o * o).sum(-1, keepdims=True) + d_lse[..., None])
        return {"d_k": scale * d_s.swapaxes(1, 2) @ q, "d_v": p.swapaxes(1, 2) @ d_o, "d_q": scale * d_s @ k}

    def header(self, **more):
        made = self.request()
        made.header.problem.CopyFrom(self.problem)
        if self.direction == "Forward":
            made.header.want_lse = True
        else:
            made.header.d_lse_follows = True
        for name, value in more.items():
            setattr(made.header, name, value)
        return made

    def chunk(self, name, offset, data):
        return self.request(chunk=self.wire.pb2.PayloadChunk(tensor=self.fields.get(name, name), offset=offset, data=data))

    def bytes_of(self, name):
        return self.tensors[name].tobytes()

    def chunks(self, size, names=None):
        for name in names or self.fields:
            data = self.bytes_of(name)
            for offset in range(0, len(data), size):
                yield self.chunk(name, offset, data[offset:offset + size])

    def start(self, stub, messages, **options):
        return getattr(stub, f"{self.direction}Stream")(iter(messages), timeout=60, **options)

    def unary(self, stub):
        message = getattr(self.wire.pb2, f"{self.direction}Request")(
            problem=self.problem, **{name: self.bytes_of(name) for name in self.fields})
        if self.direction == "Forward":
            message.want_lse = True
        return getattr(stub, self.direction)(message, timeout=60)


@pytest.fixture(params=["Forward", "Backward"])
def direction(request):
    return request.param


def whole(replies):
    """A streamed reply put together: one header, then each payload in the order of its number, without gap or overlap."""
    header, *chunks = list(replies)
    assert header.WhichOneof("part") == "header"
    result, names, last = header.header, {}, 0
    for message in chunks:
        assert message.WhichOneof("part") == "chunk" and 0 < len(message.chunk.data) <= 4 * MIB
        field = result.DESCRIPTOR.fields_by_number[message.chunk.tensor]
        before = getattr(result, field.name)
        assert message.chunk.tensor >= last and message.chunk.offset == len(before)
        last = message.chunk.tensor
        setattr(result, field.name, before + message.chunk.data)
    return result


def check(call, result, scale=1.0):
    for name, expected in call.expected.items():
        got = np.frombuffer(getattr(result, name), np.float32).reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=scale * 1e-4)


@pytest.mark.parametrize("size", [1, 17, 4097])
def test_any_chunks_give_what_a_unary_call_gives(wire, stub, rng, direction, size):
    call = Call(wire, direction, rng)
    result = whole(call.start(stub, [call.header(), *call.chunks(size)]))
    check(call, result)
    assert result.receipt.backend
    alone = call.unary(stub)
    for name in call.expected:
        assert getattr(result, name) == getattr(alone, name), name


def test_each_answer_tells_its_daemons_queue(wire, stub, rng, direction):
    """In seconds. gRPC keeps the ORCA report that comes with it to itself."""
    started = Call(wire, direction, rng)
    replies = started.start(stub, [started.header(), *started.chunks(100)])
    list(replies)
    _, asked = stub.GetServerInfo.with_call(wire.pb2.GetServerInfoRequest())
    for answer in (replies, asked):
        assert 0 <= float(dict(answer.trailing_metadata())["attnd-queue-seconds"]) < 60


@pytest.mark.parametrize("size", [MIB, 4 * MIB, 3 * MIB + 1])
def test_tensors_above_a_message_travel_in_large_chunks(wire, stub, rng, direction, size):
    call = Call(wire, direction, rng, q_len=90001, kv_len=3, heads=1, dim=13, v_dim=61)  # o: 21 MiB
    check(call, whole(call.start(stub, [call.header(), *call.chunks(size)])), scale=300)


def violations(direction):
    """Name → (messages of a call, reason, field)."""
    first, second, *_, last = FORWARD if direction == "Forward" else BACKWARD

    def size(c, name):
        return len(c.bytes_of(name))

    def all_but_last(c):
        return [c.header(), *c.chunks(100, list(c.fields)[:-1])]

    return {
        "nothing": (lambda c: [], ORDER, "header"),
        "a chunk first": (lambda c: [*c.chunks(100)], ORDER, "header"),
        "a header again": (lambda c: [c.header(), c.header()], ORDER, "header"),
        "a header between": (lambda c: [c.header(), c.chunk(first, 0, b"1234"), c.header()], ORDER, "header"),
        "a header after all": (lambda c: [c.header(), *c.chunks(100), c.header()], ORDER, "header"),
        "neither": (lambda c: [c.request()], "BAD_FIELD", "part"),
        "neither between": (lambda c: [c.header(), c.request()], "BAD_FIELD", "part"),
        "payload in the header": (lambda c: [c.header(q=c.bytes_of("q"))], "BAD_FIELD", "q"),
        "another's turn": (lambda c: [c.header(), *c.chunks(100, [second])], ORDER, "chunk.tensor"),
        "back to the first": (lambda c: [c.header(), *c.chunks(100, [first, second, first])], ORDER, "chunk.tensor"),
        "unknown payload": (lambda c: [c.header(), c.chunk(99, 0, b"1234")], ORDER, "chunk.tensor"),
        "no payload's number": (lambda c: [c.header(), c.chunk(0, 0, b"1234")], ORDER, "chunk.tensor"),
        "a gap": (lambda c: [c.header(), c.chunk(first, 0, b"1234"), c.chunk(first, 5, b"1")], ORDER, "chunk.offset"),
        "an overlap": (lambda c: [c.header(), c.chunk(first, 0, b"1234"), c.chunk(first, 3, b"1")], ORDER, "chunk.offset"),
        "not from its beginning": (lambda c: [c.header(), c.chunk(first, 1, b"1")], ORDER, "chunk.offset"),
        "an offset without end": (lambda c: [c.header(), c.chunk(first, 2**64 - 1, b"1")], ORDER, "chunk.offset"),
        "excess": (lambda c: [c.header(), c.chunk(first, 0, bytes(size(c, first) + 1))], ORDER, "chunk.data"),
        "excess of the last": (
            lambda c: [*all_but_last(c), c.chunk(last, 0, bytes(size(c, last) + 1))], ORDER, "chunk.data"),
        "a byte after the last": (
            lambda c: [c.header(), *c.chunks(100), c.chunk(last, size(c, last), b"1")], ORDER, "chunk"),
        "no data": (lambda c: [c.header(), c.chunk(first, 0, b"")], "BAD_FIELD", "chunk.data"),
        "above 4 MiB": (lambda c: [c.header(), c.chunk(first, 0, bytes(4 * MIB + 1))], "BAD_FIELD", "chunk.data"),
        "end after the header": (lambda c: [c.header()], ORDER, first),
        "end within a payload": (lambda c: [c.header(), c.chunk(first, 0, b"1234")], ORDER, first),
        "end between payloads": (lambda c: [c.header(), *c.chunks(100, [first])], ORDER, second),
        "end before the last": (all_but_last, ORDER, last),
        "a wrong problem": (lambda c: [c.request(header={"problem": {}})], "BAD_DTYPE", "problem.element"),
    }


def error_of(wire, call):
    """Code, ErrorInfo and the names of all details of a call that fails."""
    with pytest.raises(grpc.RpcError) as failed:
        whole(call)
    status = wire.status_pb2.Status()
    packed = dict(failed.value.trailing_metadata()).get("grpc-status-details-bin")
    assert packed is not None, failed.value
    status.ParseFromString(packed)
    assert status.code == failed.value.code().value[0] and status.message == failed.value.details()
    info = wire.error_details_pb2.ErrorInfo()
    assert [detail.Unpack(info) for detail in status.details].count(True) == 1
    assert info.domain == "attnd"
    return failed.value.code(), info, [detail.type_url.split(".")[-1] for detail in status.details]


@pytest.mark.parametrize("name", violations("Forward"))
def test_each_violation_is_named(wire, stub, rng, direction, name):
    call = Call(wire, direction, rng)
    messages, reason, field = violations(direction)[name]
    code, info, details = error_of(wire, call.start(stub, messages(call)))
    assert (code, info.reason, info.metadata["field"]) == (INVALID, reason, field)
    assert info.metadata["expected"] and info.metadata["got"] and "BadRequest" in details
    check(call, whole(call.start(stub, [call.header(), *call.chunks(100)])))  # the connection goes on


class Sender:
    """Messages that are sent as far as a test says, without half-close."""

    def __init__(self, messages):
        self._messages, self._over = messages, threading.Event()

    def __iter__(self):
        yield from self._messages
        self._over.wait()

    def end(self):
        self._over.set()


def wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until


@pytest.fixture(scope="module")
def counted():
    """A daemon that nobody else calls."""
    made = Daemon()
    yield made
    made.stop()


def wait_until_nothing_is_held(daemon):
    wait_until(lambda: not any(daemon.metric(name) for name in (
        "attnd_staging_pool_used_bytes", "attnd_admitted_bytes", "attnd_requests_in_flight", "attnd_queue_depth")))


@pytest.mark.parametrize("state", ["begun", "header", "within a payload", "between payloads", "all but half-close",
                                   "half-closed", "answered"])
def test_a_call_cancelled_at_any_state_leaves_nothing(wire, counted, rng, direction, state):
    call = Call(wire, direction, rng, q_len=40001, kv_len=3, heads=1, dim=13, v_dim=13)
    everything, first = [call.header(), *call.chunks(MIB)], list(call.fields)[0]
    sent = {"begun": [], "header": everything[:1], "within a payload": [call.header(), call.chunk(first, 0, b"1234")],
            "between payloads": everything[:2]}.get(state, everything)
    with grpc.insecure_channel(counted.address) as channel:
        stub = wire.pb2_grpc.AttentionStub(channel)
        sender = Sender(sent)
        if state in ("half-closed", "answered"):
            sender.end()
        replies = call.start(stub, sender)
        if state == "answered":
            assert next(replies).WhichOneof("part") == "header"
        elif state == "begun":
            wait_until(lambda: counted.metric("attnd_requests_in_flight") == 1)
        elif state != "half-closed":
            wait_until(lambda: counted.metric("attnd_staging_pool_used_bytes") > 0)
        replies.cancel()
        sender.end()
        with pytest.raises(grpc.RpcError) as failed:
            list(replies)
        assert failed.value.code() == grpc.StatusCode.CANCELLED
        wait_until_nothing_is_held(counted)
        check(call, whole(call.start(stub, everything)), scale=300)


def test_a_channel_that_goes_leaves_nothing(wire, counted, rng, direction):
    call = Call(wire, direction, rng, q_len=4001)
    sender = Sender([call.header(), *call.chunks(MIB)])
    with grpc.insecure_channel(counted.address) as channel:
        replies = call.start(wire.pb2_grpc.AttentionStub(channel), sender)
        wait_until(lambda: counted.metric("attnd_staging_pool_used_bytes") > 0)
    sender.end()
    assert replies.code() == grpc.StatusCode.CANCELLED
    wait_until_nothing_is_held(counted)


def test_a_refusal_comes_on_the_header_alone(wire, stub, rng, direction):
    call = Call(wire, direction, rng)
    call.problem.q_len = call.problem.q_heads = 1 << 16
    call.problem.kv_heads = 1
    sender = Sender([call.header()])
    code, info, _ = error_of(wire, call.start(stub, sender))
    sender.end()
    assert (code, info.reason) == (grpc.StatusCode.OUT_OF_RANGE, "TOO_LARGE_FOR_DEVICE") and int(info.metadata["limit"]) > 0


@pytest.fixture(scope="module")
def impatient():
    made = Daemon("--stream_idle_seconds", "0.3")
    yield made
    made.stop()


@pytest.mark.parametrize("messages", range(3))
def test_who_falls_silent_is_told(wire, impatient, rng, direction, messages):
    call = Call(wire, direction, rng)
    sender = Sender([call.header(), *call.chunks(MIB)][:messages])
    with grpc.insecure_channel(impatient.address) as channel:
        code, info, _ = error_of(wire, call.start(wire.pb2_grpc.AttentionStub(channel), sender))
    sender.end()
    assert (code, info.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STREAM_IDLE")
    assert info.metadata["limit_seconds"] == "0.3"


def test_compressed_messages_are_refused(wire, stub, rng, direction):
    call = Call(wire, direction, rng)
    replies = call.start(stub, [call.header(), *call.chunks(MIB)], compression=grpc.Compression.Gzip)
    with pytest.raises(grpc.RpcError) as failed:
        list(replies)
    assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
