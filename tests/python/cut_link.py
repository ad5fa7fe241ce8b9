"""A TCP proxy before a daemon: it counts what goes there, holds answers back, and ends all connections."""
import contextlib
import socket
import threading


class CutLink:
    """`sent`: bytes towards the daemon. on_sent(link): called by other threads after each piece of them."""

    def __init__(self, address):
        self._host, _, port = address.rpartition(":")
        self._port, self._sockets, self._answers = int(port), [], threading.Event()
        self._answers.set()
        self.sent, self.on_sent = 0, lambda link: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @contextlib.contextmanager
    def mute(self):
        """No answer comes back in this block; they come after it."""
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()

    def cut(self):
        """Ends it: connections, and whoever would connect, get nothing any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._answers.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    there = socket.create_connection((self._host, self._port))
                    self._sockets += [here, there]
                    threading.Thread(target=self._pass, args=(here, there, True), daemon=True).start()
                    threading.Thread(target=self._pass, args=(there, here, False), daemon=True).start()
                    continue
                here.close()

    def _pass(self, source, target, is_request):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not is_request:
                    self._answers.wait()
                target.sendall(data)
                if is_request:
                    self.sent += len(data)
                    self.on_sent(self)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
