"""Captured attention maps: what a forward is asked for, and what it brings. Needs NumPy alone."""
from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional, Tuple, TypeVar

import numpy as np

from . import _checks, _native
from ._arrays import Array
from ._call import Call, CallOptions, Handle
from .errors import FailedPrecondition, wrong, wrong_type

MAX_BLOCK = 65536
_T = TypeVar("_T")


@dataclass(frozen=True)
class Captured:
    """A forward's attention map, averaged over batch entries and heads: A[i, j] = mean of exp(S - lse), before dropout.

    pooled: float32, the average of each block. mean, variance, skewness: of all entries of A; skewness is NaN where all
    are equal. distance: the Frobenius norm of the difference from the map before; None where none was named.
    kept: whether the server keeps A itself.
    """

    pooled: Array
    block: int
    shape: Tuple[int, int]
    mean: float
    variance: float
    skewness: float
    distance: Optional[float] = None
    token: str = field(default="", repr=False)
    _handle: Optional[Handle] = field(default=None, repr=False, compare=False)

    @property
    def kept(self) -> bool:
        return self.token != ""

    def release(self) -> None:
        """Frees the map that the server keeps. Twice is fine; a server that is away frees it by itself, later."""
        handle = self.handle()
        if self.token and handle is not None:
            call = Call(handle.library, CallOptions(timeout=2.0))
            call.run(handle.library.attnd_release_capture, handle.pointer, self.token.encode())

    def handle(self) -> Optional[Handle]:
        """The native client that captured it; None in another process."""
        found = self._handle
        return found if found is not None and found.generation == _native.generation() else None

    def __reduce__(self) -> Any:
        return Captured, (self.pooled, self.block, self.shape, self.mean, self.variance, self.skewness, self.distance)


@dataclass(frozen=True)
class Capture:
    """Asks Client.forward to capture its attention map, as the argument `capture`. The forward's results are the same with
    and without; it takes about half as long again.

    block: rows and keys of a block of the pooled map. keep: keep the map on the server, at most 4096 rows and keys, for
    the next one's distance and for build_pattern. previous: an earlier result, kept, of this client: the new one has its
    distance from it. Raises FailedPrecondition CAPTURE_LOST where the server has it no longer.
    """

    block: int
    keep: bool = False
    previous: Optional[Captured] = None

    def __post_init__(self) -> None:
        _checks.integer("capture block", self.block, 1, MAX_BLOCK)
        _checks.flag("capture keep", self.keep)
        if self.previous is None:
            return
        if not isinstance(self.previous, Captured):
            raise wrong_type("capture previous", "an attnd.sparse.Captured", self.previous)
        if not self.previous.kept:
            raise wrong("capture previous", "a map that the server keeps (keep=True)", "one that is not kept")


class NativeCapture:
    """The C library's structure of a Capture, with the array that it fills."""

    def __init__(self, wish: Capture, rows: int, keys: int, handle: Handle) -> None:
        self._wish, self._shape, self._handle = wish, (rows, keys), handle
        shape = (-(-rows // wish.block), -(-keys // wish.block))
        self._pooled = np.empty(shape, np.float32)
        previous = None
        if wish.previous is not None:
            if wish.previous.handle() is None:  # of another process
                raise FailedPrecondition("capture previous: a map of another process is not kept for this one",
                                         reason="CAPTURE_LOST")
            previous = wish.previous.token.encode()
        self.structure = _native.Capture(block=wish.block, keep=wish.keep, previous=previous,
                                         pooled=self._pooled.ctypes.data)

    def result(self, told: Dict[str, Any]) -> Captured:
        """told: "captured" of the native call's result, where NaN is null."""
        mean, variance, skewness = [math.nan if told[name] is None else float(told[name])
                                    for name in ("mean", "variance", "skewness")]
        distance = None
        if self._wish.previous is not None:
            distance = math.nan if told["distance"] is None else float(told["distance"])
        return Captured(self._pooled, self._wish.block, self._shape, mean, variance, skewness, distance, told["token"],
                        self._handle)


# ---- Of the next attention call of this thread, for callers that cannot hand an argument through an operator.

_wished = threading.local()


def wished() -> Optional[Capture]:
    """Says what the operator's forward shall capture."""
    wish: Optional[Capture] = getattr(_wished, "wish", None)
    return wish


def note(captured: Optional[Captured]) -> None:
    _wished.captured = captured


def capturing(wish: Capture, call: Callable[[], _T]) -> Tuple[_T, Captured]:
    """Runs `call`, which makes one forward call in this thread; returns its result and that forward's map."""
    _wished.wish, _wished.captured = wish, None
    try:
        result = call()
    finally:
        _wished.wish = None
    captured: Optional[Captured] = _wished.captured
    _wished.captured = None
    if captured is None:
        raise wrong("capture", "a call that computes attention on a daemon", "one that does not")
    return result, captured
