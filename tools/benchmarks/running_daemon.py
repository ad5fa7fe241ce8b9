"""A daemon of a benchmark's own, for a `with`."""
import os
import subprocess
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class RunningDaemon:
    """A program that takes attnd's flags; listens on a free port of 127.0.0.1, `shared`: on a unix socket.

    address: as attnd.connect takes it. metrics: the address of /metrics.
    """

    def __init__(self, program, *flags, shared=False):
        self._folder = tempfile.TemporaryDirectory()
        port, metrics = (os.path.join(self._folder.name, name) for name in ("port", "metrics"))
        listen = f"unix:{self._folder.name}/socket" if shared else "127.0.0.1:0"
        self.process = subprocess.Popen(
            [os.path.join(ROOT, program), "--listen", listen, "--port_file", port, "--metrics_listen", "127.0.0.1:0",
             "--metrics_port_file", metrics, "--drain_delay", "0", "--log_level", "error", *flags])
        self.address = listen if shared else f"127.0.0.1:{self._number(port)}"
        self.metrics = f"http://127.0.0.1:{self._number(metrics)}/metrics"

    def _number(self, path):
        while not (os.path.exists(path) and open(path).read().endswith("\n")):
            if self.process.poll() is not None:
                raise SystemExit(f"{self.process.args[0]} did not start")
            time.sleep(0.01)
        return open(path).read().split()[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self._folder.cleanup()
