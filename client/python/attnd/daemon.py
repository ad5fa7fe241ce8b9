"""serve(): a daemon on this machine, as a child of this process.

The program is that of the package attnd-server, or the attnd on the PATH.
"""
from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from types import TracebackType
from typing import IO, List, Optional, Sequence, Type, Union

from . import _checks, errors
from .errors import AttndError, DeadlineExceeded, Internal, InvalidArgument, NotFound, brief, wrong, wrong_type

Flag = Union[bool, int, float, str, Sequence[Union[int, str]]]

_OWN_FLAGS = ("port_file", "metrics_port_file", "stop_at_eof", "check_config", "help", "version")
_WRONG_OPTIONS, _WRONG_ANSWER = 2, 3  # exit codes of attnd


@brief
def serve(listen: Union[str, Sequence[str]] = "127.0.0.1:0", *, program: Optional[str] = None, log: Optional[str] = None,
          timeout: float = 120.0, **flags: Flag) -> Daemon:
    """Starts a daemon and returns once it serves. It stops with this process, however that ends.

    listen: "host:port", port 0 for any that is free, or "unix:/path"; or several.
    program: the path of attnd. None: that of the package attnd-server, else the one on the PATH.
    log: a file that the daemon's log is added to. None: a temporary one, Daemon.log, which goes with the daemon.
    timeout: seconds until it serves.
    flags: those of attnd by their names: backend="cpu", memory_limit_mib=4096, insecure=True, devices=[0, 1].
        metrics_listen is "127.0.0.1:0" and drain_delay 0 if they are not given.

    Ctrl-C in a terminal reaches this process alone. Processes that are forked from this one and outlive it keep the daemon.

    Raises InvalidArgument for a flag, NotFound without a program, DeadlineExceeded, else what the daemon says.
    """
    addresses = [listen] if isinstance(listen, str) else list(listen)
    if not addresses or not all(isinstance(address, str) for address in addresses):
        raise wrong_type("listen", 'a str, "host:port" or "unix:/path", or several', listen)
    return Daemon(addresses, _program(program), log, _checks.seconds("timeout", timeout), _arguments(flags))


class Daemon:
    """A daemon that attnd.serve has started. As a context it stops at the end.

    Attributes:
        address: for attnd.connect; the first of `addresses`, which are those of `listen` with their ports.
        metrics_address: "host:port" of the metrics and the status page; None where there are none.
        pid: of the process.
        log: the file of its log.
    """

    def __init__(self, listen: Sequence[str], program: str, log: Optional[str], timeout: float,
                 arguments: Sequence[str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="attnd-")
        self.log = log or os.path.join(self._folder, "log")
        ports, metrics_port = (os.path.join(self._folder, name) for name in ("ports", "metrics_port"))
        try:
            with open(self.log, "ab") as output:
                self._log_begin = output.tell()
                self._process = subprocess.Popen(
                    [program, *arguments, "--listen", ",".join(listen), "--port_file", ports, "--metrics_port_file",
                     metrics_port, "--stop_at_eof"],
                    stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            shutil.rmtree(self._folder)
            kind = NotFound if isinstance(error, FileNotFoundError) else errors.PermissionDenied
            raise kind(f"cannot start attnd: {error}") from None
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self._folder, os.getpid(), 10.0)
        try:
            self._wait_until_it_serves(metrics_port, timeout)  # the file that is written last
        except BaseException:
            self._end()
            raise
        self.addresses = _addresses(listen, _lines(ports))
        self.address = self.addresses[0]
        port, = _lines(metrics_port)
        self.metrics_address = None if port == "0" else f"127.0.0.1:{port}"

    def _wait_until_it_serves(self, path: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not os.path.exists(path):
            code = self._process.poll()
            if code is not None:
                raise _why_not(code, self._said())
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"attnd did not serve within {timeout} seconds; it said: {self._said()}")
            time.sleep(0.01)

    def _said(self) -> str:
        """The end of what it has logged."""
        with open(self.log, "rb") as file:
            file.seek(self._log_begin)
            return file.read()[-4000:].decode(errors="replace").strip()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout: float = 10.0) -> None:
        """Ends it: running calls finish, for `timeout` seconds at most. It may have ended already."""
        _terminate(self._process, _checks.seconds("timeout", timeout))
        self._end()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<attnd.Daemon at {', '.join(self.addresses)}, process {self.pid}>"


def _terminate(process: subprocess.Popen[bytes], timeout: float) -> None:
    """SIGTERM drains, a second one stops at once."""
    for how, seconds in ((signal.SIGTERM, timeout), (signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        process.send_signal(how)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass


def _end(process: subprocess.Popen[bytes], folder: str, owner: int, timeout: float) -> None:
    if os.getpid() != owner:  # a fork's copy
        return
    _terminate(process, timeout)
    pipe: Optional[IO[bytes]] = process.stdin
    if pipe is not None:
        pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


def _program(given: Optional[str]) -> str:
    if given is not None:
        return given
    try:
        return str(importlib.import_module("attnd_server").PROGRAM)
    except ImportError:
        found = shutil.which("attnd")
    if found is None:
        raise NotFound("no attnd on this machine: pip install the wheel attnd_server-*.whl, or name it by program=",
                       reason="NO_PROGRAM")
    return found


def _arguments(flags: dict[str, Flag]) -> List[str]:
    for name in _OWN_FLAGS:
        if name in flags:
            raise wrong(name, "to be left to serve()", repr(flags[name]))
    given: dict[str, Flag] = {"metrics_listen": "127.0.0.1:0", "drain_delay": 0, **flags}
    return [f"--{name}={_text(name, value)}" for name, value in given.items()]


def _text(name: str, value: Flag) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    raise wrong_type(name, "a number, a str, a bool or a list of them", value)


def _lines(path: str) -> List[str]:
    with open(path) as file:
        return file.read().split()


def _addresses(listen: Sequence[str], ports: List[str]) -> List[str]:
    """Where this process reaches what the daemon listens on: each TCP address has the next port."""
    left = iter(ports)
    return [address if address.startswith("unix:") else f"{_reachable(address.rpartition(':')[0])}:{next(left)}"
            for address in listen]


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)


def _why_not(code: int, said: str) -> AttndError:
    """The exception for a daemon that has ended with this code before it served."""
    last = said.splitlines()[-1] if said else ""
    if code == _WRONG_OPTIONS:
        return InvalidArgument(last.partition("attnd: ")[2] or last)
    if code == _WRONG_ANSWER:
        return Internal(f"attnd gave a wrong answer in its check: {last}")
    failed = re.search(r'event=start_failed code=(\w+) message="?(.*?)"?$|"code":"(\w+)","message":"(.*)"}$', last)
    if failed is None:
        return Internal(f"attnd ended with code {code} before it served: {said}")
    name, message = failed[1] or failed[3], failed[2] or failed[4]
    return errors.by_name(name, f"attnd did not start: {message}")
