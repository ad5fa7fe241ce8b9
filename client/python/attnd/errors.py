"""attnd raises these errors. Each error carries a machine-readable `code`, `reason`, `field` and `metadata`.

AttndError is the base, and a RuntimeError, as PyTorch's own errors are. Every subclass is also the built-in exception
that Python programs already catch: a wrong argument is a ValueError (or TypeError), a daemon that cannot be reached a
ConnectionError, a call past its timeout a TimeoutError.
"""
from __future__ import annotations

import functools
import re
from typing import Any, Callable, Mapping, Optional, Type, TypeVar, cast

from ._cures import CURES

_Function = TypeVar("_Function", bound=Callable[..., Any])


def brief(function: _Function) -> _Function:
    """The function, whose AttndErrors show no frame below it: where they were found says nothing to a caller."""
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AttndError as error:
            raise error.with_traceback(None) from error.__cause__
    return cast(_Function, call)


class AttndError(RuntimeError):
    """Base of all errors of this package.

    Attributes:
        code: gRPC's name of the status, e.g. "INVALID_ARGUMENT".
        reason: what happened, for programs, e.g. "QUEUE_FULL"; "" when none was given.
        field: the argument or wire field that is wrong; "" when none is.
        metadata: further facts, e.g. {"expected": "1..256", "got": "300"}.
        retry_after: seconds after which the server says a retry may succeed, or None.
        what_to_do: a sentence for people, "" where the message says it. Python 3.11 and later print it with the reason
            below the message.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, reason: str = "", field: str = "",
                 metadata: Optional[Mapping[str, str]] = None, retry_after: Optional[float] = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.field = field or self.metadata.get("field", "")
        self.retry_after = retry_after
        self.what_to_do = CURES.get((self.code, reason), "")
        add_note = getattr(self, "add_note", None)
        if self.what_to_do and add_note is not None:
            add_note(f"{reason}: {self.what_to_do}")

    def __str__(self) -> str:
        return self.message


class InvalidArgument(AttndError, ValueError):
    """An argument has a wrong value: the message says which, what was expected, and what it was."""

    code = "INVALID_ARGUMENT"


class InvalidType(InvalidArgument, TypeError):
    """An argument has a wrong type."""


class OutOfRange(AttndError, ValueError):
    """The problem is larger than the server or a message can ever hold; the message names the limit."""

    code = "OUT_OF_RANGE"


class Unimplemented(AttndError, NotImplementedError):
    """This server cannot do what was asked; `field` names it."""

    code = "UNIMPLEMENTED"


class Unavailable(AttndError, ConnectionError):
    """No server could take the call: it is down, restarting, draining or full, and retries were used up."""

    code = "UNAVAILABLE"


class DeadlineExceeded(AttndError, TimeoutError):
    """The call did not end within its timeout."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(AttndError):
    """The call was cancelled."""

    code = "CANCELLED"


class ResourceExhausted(AttndError):
    """The caller's quota on the server is used up."""

    code = "RESOURCE_EXHAUSTED"


class PermissionDenied(AttndError, PermissionError):
    """The server knows the caller and refuses the call."""

    code = "PERMISSION_DENIED"


class Unauthenticated(AttndError, PermissionError):
    """The server wants a token or a client certificate."""

    code = "UNAUTHENTICATED"


class NotFound(AttndError, FileNotFoundError):
    """A file (TLS) or a server's object does not exist."""

    code = "NOT_FOUND"


class FailedPrecondition(AttndError):
    """The server's state does not allow the call, e.g. a lost lease."""

    code = "FAILED_PRECONDITION"


class Internal(AttndError):
    """A defect of the server or of this library. Please report it."""

    code = "INTERNAL"


class DataLoss(AttndError):
    """The server noticed corrupted data."""

    code = "DATA_LOSS"


# By gRPC's status code.
_BY_CODE: Mapping[int, Type[AttndError]] = {
    1: Cancelled, 3: InvalidArgument, 4: DeadlineExceeded, 5: NotFound, 7: PermissionDenied, 8: ResourceExhausted,
    9: FailedPrecondition, 11: OutOfRange, 12: Unimplemented, 13: Internal, 14: Unavailable, 15: DataLoss,
    16: Unauthenticated,
}


def from_status(code: int, message: str, *, reason: str, metadata: Optional[Mapping[str, str]],
                retry_after: Optional[float] = None) -> AttndError:
    """The exception of a gRPC status code. What a message says of a field is its metadata, if it came without."""
    kind, said = _BY_CODE.get(code, AttndError), re.fullmatch(r"(\w+): expected (.*), got (.*)", message)
    if kind is InvalidArgument and not metadata and said is not None:
        metadata = dict(zip(("field", "expected", "got"), said.groups()))
    return kind(message or kind.code, reason=reason, metadata=metadata, retry_after=retry_after)


def by_name(code: str, message: str) -> AttndError:
    """The exception of a status code's name, e.g. "UNAVAILABLE"."""
    kinds = {kind.code: kind for kind in _BY_CODE.values()}
    return kinds.get(code, AttndError)(message)


def reworded(error: InvalidArgument, names: Mapping[str, str]) -> InvalidArgument:
    """The error in the words of a function that has other names for these arguments."""
    told = re.compile(rf"\b({'|'.join(names)})\b")
    said = {key: error.metadata[key] if key == "got" else told.sub(lambda found: names[found[0]], error.metadata[key])
            for key in ("field", "expected", "got")}
    return type(error)(f"{said['field']}: expected {said['expected']}, got {said['got']}", reason=error.reason,
                       metadata={**error.metadata, **said})


def not_connected(module: str, name: str) -> Unavailable:
    """The exception for a module's connection of that name, of which there is none."""
    named = f', name="{name}"' if name else ""
    return Unavailable(f'not connected: call {module}.connect("host:port"{named}) first, in each process that was '
                       "spawned too (a DataLoader's worker_init_fn)", reason="NOT_CONNECTED")


def wrong(field: str, expected: object, got: object) -> InvalidArgument:
    """The exception for an argument with a wrong value."""
    return InvalidArgument(f"{field}: expected {expected}, got {got}", reason="INVALID_ARGUMENT", field=field,
                           metadata={"field": field, "expected": str(expected), "got": str(got)})


def wrong_type(field: str, expected: object, got: object) -> InvalidType:
    """The exception for an argument of a wrong type; `got` is the argument itself."""
    name = type(got).__name__
    return InvalidType(f"{field}: expected {expected}, got {name}", reason="INVALID_ARGUMENT", field=field,
                       metadata={"field": field, "expected": str(expected), "got": name})
