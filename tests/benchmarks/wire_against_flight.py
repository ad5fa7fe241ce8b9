"""An 8 MiB tensor each way over loopback: attnd's Forward against pyarrow Flight's DoExchange, in turns.

Both sides move one float32 tensor of --mib there and one of the same size back, over --connections TCP connections with
one call in flight on each, server and client as two processes on the same machine. For attnd that is a Forward with
kv_len = 1: O has Q's bytes, K and V have one row, and the arithmetic is 0.4 ns a byte. Flight echoes record batches with
one column. The two take turns, so that a busy machine slows both; the ratio of a round compares neighbours.

    python3 -m venv /tmp/flight && /tmp/flight/bin/pip install pyarrow numpy
    bazel build //server:attnd //client:attnctl
    /tmp/flight/bin/python tests/benchmarks/wire_against_flight.py
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def serve_flight(port_file):
    """The server's process: echoes every batch of a DoExchange."""
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
    with open(port_file + ".new", "w") as file:
        file.write(str(server.port))
    os.rename(port_file + ".new", port_file)
    server.serve()


def flight_rate(port, mib, connections, seconds):
    """GB/s each way of Flight echoes in a closed loop."""
    import numpy
    import pyarrow
    import pyarrow.flight as flight

    values = numpy.random.default_rng(1).standard_normal(mib << 18, dtype=numpy.float32)
    batch = pyarrow.record_batch([pyarrow.array(values)], names=["tensor"])
    echoes = [0] * connections
    start = time.monotonic() + 0.5  # the first half second is not counted
    end = start + seconds

    def echo(n):
        # Distinct arguments keep gRPC from sharing one connection between the clients.
        client = flight.connect(f"grpc://127.0.0.1:{port}", generic_options=[("attnd.connection", n)])
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""))
        writer.begin(batch.schema)
        while time.monotonic() < end:
            writer.write_batch(batch)
            back = reader.read_chunk().data
            assert back.num_rows == batch.num_rows
            if start <= time.monotonic() < end:
                echoes[n] += 1
        writer.close()
        client.close()

    threads = [threading.Thread(target=echo, args=(n,)) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(echoes) * (mib << 20) / seconds / 1e9


def attnd_rate(attnctl, port, mib, connections, seconds):
    """GB/s each way of attnd's forwards in a closed loop."""
    rows = (mib << 20) // (4 * 256)
    out = subprocess.run([attnctl, "--address", f"127.0.0.1:{port}", "--channels", str(connections), "-o", "json", "bench",
                          "--shape", f"1,1,{rows},256", "--kv-len", "1", "--concurrency-range", str(connections),
                          "--warmup", "0.5", "--duration", str(seconds)], check=True, capture_output=True, text=True)
    row = json.loads(out.stdout)["rows"][0]
    assert row["last_receipt"]["bytes_received"] == mib << 20
    return row["received_bytes_per_second"] / 1e9


def wait_for(path):
    for _ in range(300):
        if os.path.exists(path):
            with open(path) as file:
                return int(file.read().split()[0])
        time.sleep(0.1)
    raise SystemExit(f"{path}: no server wrote its port")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attnd", default=os.path.join(ROOT, "bazel-bin/server/attnd"))
    parser.add_argument("--attnctl", default=os.path.join(ROOT, "bazel-bin/client/attnctl"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--serve-flight", metavar="PORT_FILE", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve_flight:
        return serve_flight(flags.serve_flight)

    import pyarrow
    with tempfile.TemporaryDirectory() as folder:
        attnd_file, flight_file = os.path.join(folder, "attnd"), os.path.join(folder, "flight")
        servers = [subprocess.Popen([flags.attnd, "--backend", "cpu", "--listen", "127.0.0.1:0", "--port_file", attnd_file,
                                     "--metrics_listen", "127.0.0.1:0", "--drain_delay", "0",
                                     "--max_message_mib", str(flags.mib + 1)],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
                   subprocess.Popen([sys.executable, os.path.abspath(__file__), "--serve-flight", flight_file])]
        try:
            attnd_port, flight_port = wait_for(attnd_file), wait_for(flight_file)
            rounds = []
            print(f"{flags.mib} MiB each way, {flags.connections} connections, pyarrow {pyarrow.__version__}; GB/s each way")
            print("round  flight   attnd  ratio")
            for n in range(flags.rounds):
                one = flight_rate(flight_port, flags.mib, flags.connections, flags.seconds)
                two = attnd_rate(flags.attnctl, attnd_port, flags.mib, flags.connections, flags.seconds)
                rounds.append((one, two, two / one))
                print(f"{n + 1:5}  {one:6.3f}  {two:6.3f}  {two / one:5.2f}", flush=True)
            middle = [statistics.median(column) for column in zip(*rounds)]
            print(f"median {middle[0]:6.3f}  {middle[1]:6.3f}  {middle[2]:5.2f}")
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait()


if __name__ == "__main__":
    main()
