"""One native call: starts it, waits so that Ctrl-C works, and turns its outcome into values or exceptions."""
from __future__ import annotations

import ctypes
import json
import re
import threading
from typing import Any, Callable, Dict, Generator, List, Literal, NamedTuple, Optional

from . import _checks, _native, _trace, metrics
from ._receipt import Receipt
from .errors import AttndError, from_status, wrong_type


class Progress(NamedTuple):
    """Payload bytes of a call so far; retried bytes count again."""

    shards_done: int
    shards_total: int
    bytes_sent: int
    bytes_received: int
    bytes_total: int


Priority = Literal["low", "normal", "high"]


class CallOptions(NamedTuple):
    """timeout: seconds for the whole call; None: the client's. progress: called several times a second."""

    timeout: Optional[float] = None
    priority: Priority = "normal"
    request_id: Optional[str] = None
    progress: Optional[Callable[[Progress], None]] = None


class Handle:
    """A native client, freed with its last reference, and only in the process that made it."""

    def __init__(self, options: _native.ClientOptions) -> None:
        self.pointer: Optional[int] = None  # first, for __del__
        self._library, self.generation = _native.library(), _native.generation()
        call = Call(self._library, CallOptions())
        self.pointer = self._library.attnd_client_new(ctypes.byref(options), call.pointer)
        if not self.pointer:
            raise call.error()
        metrics.watch(self)

    @property
    def library(self) -> ctypes.CDLL:
        return self._library

    def __del__(self) -> None:
        if self.pointer and self.generation == _native.generation():
            metrics.ended(self)
        pointer, self.pointer = self.pointer, None  # what a cycle's end frees later knows that it is gone
        if pointer and self.generation == _native.generation():
            self._library.attnd_client_free(pointer)


class Call:
    """One operation at a time on a Handle."""

    def __init__(self, library: ctypes.CDLL, options: CallOptions) -> None:
        self._library, self._progress, self.pointer = library, options.progress, None  # for __del__
        if self._progress is not None and not callable(self._progress):
            raise wrong_type("progress", "a function of attnd.Progress", self._progress)
        self.pointer = library.attnd_call_new(*_native_options(options))
        self._traceparent = _trace.traceparent()
        if self._traceparent is not None:
            library.attnd_call_set_traceparent(self.pointer, self._traceparent.encode())

    def __del__(self) -> None:
        if self.pointer:
            self._library.attnd_call_free(self.pointer)

    def run(self, operation: Callable[..., int], *arguments: Any) -> None:
        """Runs a function of the library, whose last argument is this call. What a signal's handler (Ctrl-C) or the
        progress function raises meanwhile cancels it and is raised here."""
        if self._progress is None and threading.current_thread() is not threading.main_thread():
            self._raise(operation(*arguments, self.pointer))
            return
        raised: List[BaseException] = []
        watch = self._watch(raised)
        next(watch)
        hook = _native.POLL_HOOK(watch.send)
        self._library.attnd_call_set_poll_hook(self.pointer, hook, None)
        code = operation(*arguments, self.pointer)
        if raised:
            raise raised[0].with_traceback(None)
        self._raise(code)
        if self._progress is not None:
            self._progress(self.progress())

    def _watch(self, raised: List[BaseException]) -> Generator[int, None, None]:
        """Is sent to, from within the operation, to look after signals and progress; gives 1 to cancel it.

        A generator, because Python runs signal handlers when it enters code, and a generator is entered where it stands:
        inside this try. A function would be entered before it, where what a handler raises is lost.
        """
        while True:
            try:
                while not raised:
                    yield 0
                    if self._progress is not None:
                        self._progress(self.progress())
                while True:
                    yield 1
            except GeneratorExit:
                return
            except BaseException as error:
                raised.append(error)

    def progress(self) -> Progress:
        now = _native.Progress()
        self._library.attnd_call_get_progress(self.pointer, ctypes.byref(now))
        return Progress(now.shards_done, now.shards_total, now.bytes_sent, now.bytes_received, now.bytes_total)

    def result(self) -> Dict[str, Any]:
        """The result of an operation that went well."""
        result: Dict[str, Any] = json.loads(self._library.attnd_call_result_json(self.pointer))
        return result

    def receipt(self) -> Receipt:
        """The receipt of a forward or backward that went well."""
        result = self.result()
        result.pop("captured", None)
        if self._traceparent is not None:
            result["trace_id"] = self._traceparent.split("-")[1]
        return Receipt(**result)

    def error(self) -> AttndError:
        """The error of an operation that has failed."""
        detail = json.loads(self._library.attnd_call_detail_json(self.pointer))
        message = self._library.attnd_call_message(self.pointer).decode("utf-8", "replace")
        message = re.sub(r"^bearer_token: ", "token: ", message)  # as connect's arguments are called
        message = re.sub(r"^addresses: ", "address: ", message)
        message = re.sub(r"^tls\.(ca|cert|key)(ificate)?_file: ", r"tls.\1: ", message)
        code = self._library.attnd_call_code(self.pointer)
        return from_status(code, message, reason=detail.get("reason", ""), metadata=detail.get("metadata"),
                           retry_after=detail.get("retry_after"))

    def _raise(self, code: int) -> None:
        if code != 0:
            raise self.error()


_NORMAL = CallOptions().priority


def _native_options(options: CallOptions) -> Any:
    if options.timeout is None and options.request_id is None and options.priority is _NORMAL:
        return None, -1.0, _native.PRIORITIES["normal"]
    timeout = -1.0 if options.timeout is None else _checks.seconds("timeout", options.timeout)
    priority = _checks.word("priority", options.priority, list(_native.PRIORITIES), '"low", "normal" or "high"')
    request_id = None if options.request_id is None else _checks.short_text("request_id", options.request_id, 64)
    return request_id, timeout, _native.PRIORITIES[priority]
