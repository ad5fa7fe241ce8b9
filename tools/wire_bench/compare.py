"""A tensor there and back over loopback: attnd beside pyarrow Flight, python-grpcio, gRPC's generated stub, plain sockets.

Each way moves --mib there and as much back over --connections TCP connections with --depth calls in flight on each, server
and client as two processes on this machine. They take turns, so that a busy machine slows all; ratios compare the rows of
one round. attnd's daemon computes nothing (null_attnd); "attnd, cpu engine" is attnd itself with one key, so that q goes
there, o comes back, and there is hardly any attention. CPU seconds are for 1e9 bytes there and back together, both ends.

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install pyarrow numpy grpcio
    bazel build //server:attnd //tools/benchmarks:null_attnd //tools/wire_bench:all
    /tmp/peers/bin/python tools/wire_bench/compare.py

What is not installed is left out of the table.
"""
import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WARM_UP = 0.5  # seconds that are not counted


def publish(port_file, port):
    with open(port_file + ".new", "w") as file:
        file.write(str(port))
    os.rename(port_file + ".new", port_file)


def closed_loop(call, threads, seconds, bytes_each):
    """GB/s of `call(thread)` in a closed loop."""
    counts = [0] * threads
    begin = time.monotonic() + WARM_UP
    end = begin + seconds

    def loop(n):
        once = call(n)
        while time.monotonic() < end:
            once()
            if begin <= time.monotonic() < end:
                counts[n] += 1

    workers = [threading.Thread(target=loop, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) * bytes_each / seconds / 1e9


# ---- Flight.

def serve_flight(port_file):
    import pyarrow.flight as flight

    class Echo(flight.FlightServerBase):
        def do_exchange(self, context, descriptor, reader, writer):
            started = False
            for chunk in reader:
                if not started:
                    writer.begin(chunk.data.schema)
                    started = True
                writer.write_batch(chunk.data)

    server = Echo("grpc://127.0.0.1:0")
    publish(port_file, server.port)
    server.serve()


def call_flight(port, flags):
    import numpy
    import pyarrow
    import pyarrow.flight as flight

    values = numpy.random.default_rng(1).standard_normal(flags.mib << 18, dtype=numpy.float32)
    batch = pyarrow.record_batch([pyarrow.array(values)], names=["tensor"])
    # Distinct arguments keep gRPC from sharing one connection between the clients.
    clients = [flight.connect(f"grpc://127.0.0.1:{port}", generic_options=[("attnd.connection", n)])
               for n in range(flags.connections)]

    def exchange(n):
        writer, reader = clients[n % flags.connections].do_exchange(flight.FlightDescriptor.for_command(b""))
        writer.begin(batch.schema)

        def once():
            writer.write_batch(batch)
            assert reader.read_chunk().data.num_rows == batch.num_rows
        return once

    return closed_loop(exchange, flags.connections * flags.depth, flags.seconds, flags.mib << 20)


# ---- python-grpcio.

GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1)]


def serve_grpcio(port_file):
    import concurrent.futures
    import grpc

    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    handler = grpc.method_handlers_generic_handler("Peer", {"Echo": echo})
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(32), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    publish(port_file, port)
    server.wait_for_termination()


def call_grpcio(port, flags):
    import grpc

    tensor = os.urandom(flags.mib << 20)
    channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS) for _ in range(flags.connections)]

    def stub(n):
        echo = channels[n % flags.connections].unary_unary("/Peer/Echo")
        return lambda: echo(tensor)

    return closed_loop(stub, flags.connections * flags.depth, flags.seconds, flags.mib << 20)


# ---- The ways, as pairs of commands. A client prints GB/s each way and its CPU seconds.

def python_peer(name):
    here = [sys.executable, os.path.abspath(__file__)]
    return (lambda f, port_file: here + ["--serve", name, port_file],
            lambda f, port: here + ["--call", name, str(port), "--mib", str(f.mib), "--connections", str(f.connections),
                                    "--depth", str(f.depth), "--seconds", str(f.seconds)])


def echo_peer(kind):
    def binary(f):
        return os.path.join(f.bin, "tools/wire_bench/peer_echo")
    return (lambda f, port_file: [binary(f), kind, "serve", port_file],
            lambda f, port: [binary(f), kind, "call", str(port), str(f.mib), str(f.connections), str(f.depth),
                             str(f.seconds)])


def attnd_peer(daemon, mode):
    def serve(f, port_file):
        return [os.path.join(f.bin, daemon), "--backend", "cpu", "--listen", "127.0.0.1:0", "--port_file", port_file,
                "--metrics_listen", "", "--drain_delay", "0", "--max_message_mib", str(f.mib + 1)]

    def call(f, port):
        return [os.path.join(f.bin, "tools/wire_bench/wire_bench"), "--address", f"127.0.0.1:{port}", "-o", "json",
                "--traffic", "echo", "--mode", mode, "--connections", str(f.connections), "--depth", str(f.depth),
                "--mib", str(f.mib), "--warmup", str(WARM_UP), "--duration", str(f.seconds)]
    return serve, call


PEERS = {
    "plain sockets": echo_peer("raw"),
    "gRPC generated stub, bytes": echo_peer("stub"),
    "python-grpcio": python_peer("grpcio"),
    "pyarrow Flight": python_peer("flight"),
    "attnd, unary": attnd_peer("tools/benchmarks/null_attnd", "unary"),
    "attnd, stream": attnd_peer("tools/benchmarks/null_attnd", "stream"),
    "attnd, cpu engine, unary": attnd_peer("server/attnd", "unary"),
    "attnd, cpu engine, stream": attnd_peer("server/attnd", "stream"),
}
NEEDS = {"python-grpcio": "grpc", "pyarrow Flight": "pyarrow"}


def wait_for(path, process):
    for _ in range(600):
        if os.path.exists(path):
            with open(path) as file:
                text = file.read().split()
            if text:
                return int(text[0])
        assert process.poll() is None, f"the server of {path} has ended"
        time.sleep(0.05)
    raise TimeoutError(path)


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rate_of(output):
    """GB/s each way, from either kind of client's output."""
    if output.lstrip().startswith("{"):
        row = json.loads(output)["rows"][0]
        assert row["errors"] == 0
        return row["down_bytes_per_second"] / 1e9
    return float(output.split()[0])


def measure(name, flags, folder):
    """(GB/s each way, server's CPU seconds a GB, client's)."""
    serve, call = PEERS[name]
    port_file = os.path.join(folder, "port")
    if os.path.exists(port_file):
        os.remove(port_file)
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(serve(flags, port_file), stdout=quiet, stderr=quiet)
    try:
        port = wait_for(port_file, server)
        server_before, client_before = cpu_seconds(server.pid), resource.getrusage(resource.RUSAGE_CHILDREN)
        client = subprocess.run(call(flags, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                timeout=10 * flags.seconds + 20)
        if client.returncode != 0:
            raise RuntimeError(f"its client ended with {client.returncode}: {client.stdout[-500:]}")
        rate = rate_of(client.stdout)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        gigabytes = max(rate * 2 * (flags.seconds + WARM_UP), 1e-9)
        client_cpu = after.ru_utime + after.ru_stime - client_before.ru_utime - client_before.ru_stime
        return rate, (cpu_seconds(server.pid) - server_before) / gigabytes, client_cpu / gigabytes
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=os.path.join(ROOT, "bazel-bin"), help="where the binaries lie, as in bazel-bin")
    parser.add_argument("--only", nargs="*", choices=sorted(PEERS), help="these ways alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--call", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        return {"flight": serve_flight, "grpcio": serve_grpcio}[flags.serve[0]](flags.serve[1])
    if flags.call:
        rate = {"flight": call_flight, "grpcio": call_grpcio}[flags.call[0]](int(flags.call[1]), flags)
        print(rate, flush=True)
        os._exit(0)  # without waiting for the libraries' threads

    names = [name for name in (flags.only or PEERS)
             if name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None]
    results = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(flags.rounds):
            for name in names:
                try:
                    results[name].append(measure(name, flags, folder))
                    print(f"{name}: {results[name][-1][0]:.2f} GB/s", file=sys.stderr, flush=True)
                except (RuntimeError, OSError, AssertionError, subprocess.TimeoutExpired) as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
    print(f"{flags.mib} MiB each way, {flags.connections} connections, {flags.depth} in flight on each, "
          f"{os.cpu_count()} cores, medians of {flags.rounds}")
    results = {name: runs for name, runs in results.items() if len(runs) == flags.rounds}
    flight = results.get("pyarrow Flight")
    print(f"{'way':28} {'GB/s each way':>14} {'least':>6} {'most':>6} {'server':>7} {'client':>7} {'CPU-s/GB':>9}  "
          "of Flight's rate")
    for name in results:
        rates, server, client = (list(column) for column in zip(*results[name]))
        ratio = "-"
        if flight:
            ratio = f"{statistics.median(mine / theirs[0] for mine, theirs in zip(rates, flight)):.2f}"
        both = statistics.median(s + c for s, c in zip(server, client))
        print(f"{name:28} {statistics.median(rates):14.2f} {min(rates):6.2f} {max(rates):6.2f} "
              f"{statistics.median(server):7.3f} {statistics.median(client):7.3f} {both:9.3f}  {ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
