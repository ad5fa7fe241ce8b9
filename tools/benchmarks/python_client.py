"""Measures what Python costs: attnd's Python client beside the C++ client under it, and beside python-grpcio.

One process calls a daemon of its own over TCP on the loopback device, all ways in turns, so that a busy machine slows them
alike. "C++" is the C++ client through its C interface, with everything prepared beforehand and results in memory that was
used before: what is left of a call that is not Python's. grpcio is an echo of as many bytes by generic handlers, which
neither parse nor compute: one message with default settings but for the limits, pieces of 2 MiB in one stream, and pieces of
2 MiB as unary calls, four at a time.

    small     1 head, 16 rows, head dim 64, float16: microseconds of a call
    64 MiB    q of 64 MiB there, o of 64 MiB back, one key, so that there is hardly any attention

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install numpy grpcio
    ./dev wheel && /tmp/peers/bin/pip install dist/attnd-*.whl
    bazel build //server:attnd
    /tmp/peers/bin/python tools/benchmarks/python_client.py [--daemon PROGRAM] [--turns N]
"""
import argparse
import collections
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import attnd
from attnd import _call, _native, _problem, _wire

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PIECE = 2 << 20
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Direct:
    """The C++ client's forward, with every argument of the C call prepared."""

    def __init__(self, client, q, k, v):
        problem = _problem.resolve(q, k, v, causal="top_left")
        self._packed = _wire.pack(problem, _wire.choose(problem, [q, k, v]), False)
        self._out, self._lse = np.zeros_like(q), np.zeros(problem.lse_shape, np.float32)
        self._tensors = _native.ForwardTensors.of(*[_wire.address(x) for x in (q, k, v)], None, None,
                                                  _wire.address(self._out), _wire.address(self._lse))
        self._handle, self._call = client._handle(), _call.Call(_native.library(), _call.CallOptions())
        self._arguments = (self._handle.pointer, ctypes.byref(self._packed.problem), ctypes.byref(self._tensors),
                           self._call.pointer)

    def __call__(self):
        if self._handle.library.attnd_forward(*self._arguments) != 0:
            raise self._call.error()


def serve_grpcio(port_file):
    """Runs in a process of its own: echoes."""
    import grpc
    from concurrent import futures
    server = grpc.server(futures.ThreadPoolExecutor(8), options=UNLIMITED)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("echo", {
        "unary": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
        "stream": grpc.stream_stream_rpc_method_handler(lambda requests, _: requests)})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open(port_file + ".new", "w") as file:
        file.write(f"{port}\n")
    os.rename(port_file + ".new", port_file)
    server.wait_for_termination()


class Grpcio:
    """Ways of moving an array there and back into another."""

    def __init__(self, port, array):
        import grpc
        channels = [grpc.insecure_channel(f"127.0.0.1:{port}", UNLIMITED + [("grpc.use_local_subchannel_pool", 1)])
                    for _ in range(4)]
        self._unary = [channel.unary_unary("/echo/unary") for channel in channels]
        self._stream = channels[0].stream_stream("/echo/stream")
        self._bytes, self._back = array.reshape(-1).view(np.uint8), np.zeros(array.nbytes, np.uint8)

    def one_message(self):
        self._back[:] = np.frombuffer(self._unary[0](self._bytes.tobytes()), np.uint8)

    def stream_of_pieces(self):
        at = 0
        for piece in self._stream(self._bytes[n:n + PIECE].tobytes() for n in range(0, self._bytes.size, PIECE)):
            self._back[at:at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)

    def unary_pieces(self):
        waiting = collections.deque()
        for n in range(0, self._bytes.size, PIECE):
            if len(waiting) == 4:
                self._land(*waiting.popleft())
            waiting.append((n, self._unary[n // PIECE % 4].future(self._bytes[n:n + PIECE].tobytes())))
        while waiting:
            self._land(*waiting.popleft())

    def _land(self, at, future):
        piece = future.result()
        self._back[at:at + len(piece)] = np.frombuffer(piece, np.uint8)


def start(command, port_file):
    process = subprocess.Popen([*command, port_file])
    while not (os.path.exists(port_file) and open(port_file).read().endswith("\n")):
        if process.poll() is not None:
            raise SystemExit(f"{command[0]} did not start")
        time.sleep(0.01)
    return process, open(port_file).read().split()[0]


def take_turns(ways, turns, calls):
    """{name: median seconds of a call}, and each name's median ratio to the first's in the same turn."""
    medians = {name: [] for name in ways}
    for _ in range(turns + 1):
        for name, way in ways.items():
            times = []
            for _ in range(calls):
                begin = time.perf_counter()
                way()
                times.append(time.perf_counter() - begin)
            medians[name].append(statistics.median(times))
    first = next(iter(ways))
    return {name: (statistics.median(times[1:]), statistics.median(t - f for t, f in zip(times[1:], medians[first][1:])),
                   statistics.median(t / f for t, f in zip(times[1:], medians[first][1:])))
            for name, times in medians.items()}


def on_thread(function):
    """The function's result, computed on a thread that is not the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def small_calls(client, turns):
    q = np.random.default_rng(0).standard_normal((1, 1, 16, 64)).astype(np.float16)
    ways = {"C++": Direct(client, q, q, q), "attnd": lambda: client.forward(q, q, q, causal="top_left")}
    for where, run in (("main thread", lambda f: f()), ("another thread", on_thread)):
        found = run(lambda: take_turns(ways, turns, 50))
        print(f"small call, {where}: C++ {found['C++'][0] * 1e6:.0f} us, attnd {found['attnd'][0] * 1e6:.0f} us, "
              f"{found['attnd'][1] * 1e6:.0f} us more (aim: at most 60)", flush=True)


def large_calls(client, grpcio_port, turns):
    q = np.random.default_rng(0).standard_normal((1, 32, 8192, 128), np.float32).astype(np.float16)
    one, out = q[:, :, :1].copy(), np.zeros_like(q)
    ways = {"C++": Direct(client, q, one, one), "attnd": lambda: client.forward(q, one, one, causal="top_left"),
            "attnd, out=": lambda: client.forward(q, one, one, causal="top_left", out=out)}
    if grpcio_port:
        grpcio = Grpcio(grpcio_port, q)
        ways.update({"grpcio, one message": grpcio.one_message, "grpcio, a stream of 2 MiB": grpcio.stream_of_pieces,
                     "grpcio, 2 MiB calls, 4 at a time": grpcio.unary_pieces})
    found = take_turns(ways, turns, 2)
    print("64 MiB each way                        ms   GB/s each way   share of C++")
    for name, (seconds, _, ratio) in found.items():
        print(f"{name:36} {seconds * 1e3:6.1f}   {q.nbytes / seconds / 1e9:13.2f}   {1 / ratio:12.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--daemon", default=os.path.join(ROOT, "bazel-bin/server/attnd"))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--serve-grpcio", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve_grpcio:
        return serve_grpcio(chosen.serve_grpcio)
    with tempfile.TemporaryDirectory() as folder:
        processes = [start([chosen.daemon, "--listen", "127.0.0.1:0", "--metrics_listen", "", "--backend", "cpu",
                            "--log_level", "error", "--port_file"], os.path.join(folder, "attnd"))]
        try:
            import grpc  # noqa: F401
            processes.append(start([sys.executable, __file__, "--serve-grpcio"], os.path.join(folder, "grpcio")))
        except ImportError:
            print("python-grpcio is not installed: left out")
        try:
            with attnd.connect("127.0.0.1:" + processes[0][1], timeout=60) as client:
                small_calls(client, chosen.turns)
                large_calls(client, processes[1][1] if len(processes) > 1 else None, chosen.turns)
        finally:
            for process, _ in processes:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
