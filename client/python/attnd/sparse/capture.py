"""Captured attention maps, and block patterns built from them. Needs NumPy alone."""
from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Literal, Optional, Tuple, TypeVar, Union

import numpy as np

from .. import _checks, _native, masks
from .._arrays import Array
from .._call import Call, CallOptions, Handle
from .._protobuf import float64, message, number
from ..errors import FailedPrecondition, brief, wrong, wrong_type
from ..masks.nodes import Mask

if TYPE_CHECKING:
    from ..client import Client

_MAX_BLOCK = 65536
_MAX_BLOCKS = 4096  # rows of blocks of a pattern
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
    """What Client.forward's `capture` asks for. The forward's results are the same with and without; it takes about
    half as long again.

    block: rows and keys of a block of the pooled map. keep: keep the map on the server, at most 4096 rows and keys, for
    the next one's distance and for build_pattern. previous: an earlier result, kept, of this client: the new one has its
    distance from it. Raises FailedPrecondition CAPTURE_LOST where the server has it no longer.
    """

    block: int
    keep: bool = False
    previous: Optional[Captured] = None

    def __post_init__(self) -> None:
        _checks.integer("capture block", self.block, 1, _MAX_BLOCK)
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
    """What the operator's forward shall capture."""
    wish: Optional[Capture] = getattr(_wished, "wish", None)
    return wish


def note(captured: Optional[Captured]) -> None:
    _wished.captured = captured


def capturing(wish: Capture, call: Callable[[], _T]) -> Tuple[_T, Captured]:
    """What `call` gives, which makes one forward call in this thread, and that forward's map."""
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


# ---- Patterns.

@brief
def build_pattern(source: Union[Captured, Array], *, rule: Literal["flood", "top_k"], block: Optional[int] = None,
                  quantile: Optional[float] = None, density: Optional[float] = None, diagonals: bool = False,
                  force_diagonal: bool = False, min_blocks_per_row: int = 0) -> Mask:
    """The blocks of attention that matter, as a mask for every head and batch entry.

    source: a Captured, or float32 [n, n] averages or scores of blocks. block: rows and keys of a block; None: that of the
        capture.
    rule: "flood": SPION's walk from every block of the first row and column to the largest of the next, which keeps blocks
        above the `quantile` of the map (torch.quantile's, linear). "top_k": int(density * n * n) largest blocks, with
        force_diagonal int(density * n * n - n) and the diagonal; of equal ones the first in row-major order.
    diagonals: of a map that is kept: average it after SPION's convolution with the 31 x 31 identity.
    force_diagonal: keep the diagonal's blocks, as SPION's rules do. min_blocks_per_row: rows of blocks with fewer get their
        largest ones too.

    Raises InvalidArgument naming the argument, FailedPrecondition CAPTURE_LOST where the server has the map no longer.
    """
    size = block if block is not None or not isinstance(source, Captured) else source.block
    layout = pattern_layout(source, rule=rule, block=size, quantile=quantile, density=density, diagonals=diagonals,
                            force_diagonal=force_diagonal, min_blocks_per_row=min_blocks_per_row)
    return masks.blocks(layout, _checks.integer("block", size, 1, _MAX_BLOCK))


def pattern_layout(source: Union[Captured, Array], *, rule: str, block: Optional[int], quantile: Optional[float] = None,
                   density: Optional[float] = None, diagonals: bool = False, force_diagonal: bool = False,
                   min_blocks_per_row: int = 0) -> Array:
    """build_pattern's blocks, bool [n, n]."""
    _checks.word("rule", rule, ("flood", "top_k"), '"flood" or "top_k"')
    captured = source if isinstance(source, Captured) else None
    kept = captured if diagonals else None
    if diagonals and (captured is None or not captured.kept):
        raise wrong("diagonals", "False, or a map that the server keeps (keep=True)", "True")
    size = _checks.integer("block", block, 1, _MAX_BLOCK)
    if captured is not None and kept is None and size != captured.block:
        raise wrong("block", f"{captured.block}, as captured", str(size))
    pooled = np.ascontiguousarray(source if captured is None else captured.pooled, np.float32)
    if pooled.ndim != 2 or pooled.shape[0] != pooled.shape[1]:
        raise wrong("source", "[n, n] averages of blocks", str(list(pooled.shape)))
    request = number(3, size) + number(6, diagonals) + number(7, _checks.flag("force_diagonal", force_diagonal)) + \
        number(8, _checks.integer("min_blocks_per_row", min_blocks_per_row, 0, _MAX_BLOCKS))
    if rule == "flood":
        request += message(4, float64(1, _needed("quantile", quantile, "flood")))
        _unwanted("density", density, "flood")
    else:
        request += message(5, float64(1, _needed("density", density, "top_k")))
        _unwanted("quantile", quantile, "top_k")
    if kept is None:
        request += message(2, pooled.tobytes())
    return _layout_of(_build(request, kept))


def _needed(name: str, value: Optional[float], rule: str) -> float:
    found = _checks.number(name, value, None)
    if found is None:
        raise wrong(name, f'a number beside rule="{rule}"', "None")
    return found


def _unwanted(name: str, value: Optional[float], rule: str) -> None:
    if value is not None:
        raise wrong(name, f'None beside rule="{rule}"', str(value))


def _build(request: bytes, kept: Optional[Captured]) -> Dict[str, Any]:
    library, pointer, token = _native.library(), None, None
    if kept is not None:
        handle = kept.handle()
        if handle is None:
            raise FailedPrecondition("source: a map of another process is not kept for this one", reason="CAPTURE_LOST")
        library, pointer, token = handle.library, handle.pointer, kept.token.encode()
    call = Call(library, CallOptions())
    call.run(library.attnd_build_pattern, pointer, request, len(request), token)
    return call.result()


def _layout_of(built: Dict[str, Any]) -> Array:
    rows = len(built["indptr"]) - 1
    layout = np.zeros((rows, rows), bool)
    for row, (begin, end) in enumerate(_pairs(built["indptr"])):
        layout[row, built["indices"][begin:end]] = True
    return layout


def _pairs(bounds: List[int]) -> Iterator[Tuple[int, int]]:
    return zip(bounds[:-1], bounds[1:])
