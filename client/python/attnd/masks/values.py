"""Masks consist of these: arrays of integers as values, their limits, and what they must say of each other."""
from __future__ import annotations

from typing import Any

import numpy as np

from .. import _arrays, _checks
from .._arrays import Array
from ..errors import wrong

MAX_LENGTH, MAX_INT = 1 << 20, (1 << 31) - 1
MAX_PATTERNS, MAX_NODES, MAX_DEPTH, MAX_RECTANGLES = 4096, 4096, 16, 65536


class Numbers:
    """An array of integers as a value: read-only, compared and hashed by content."""

    __slots__ = ("array", "_hash")

    def __init__(self, array: Any) -> None:
        self.array: Array = np.array(array)
        self.array.flags.writeable = False
        self._hash = hash((self.array.shape, self.array.tobytes()))

    def __len__(self) -> int:
        return int(self.array.size)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Numbers) and self._hash == other._hash
                                 and np.array_equal(self.array, other.array))

    def __reduce__(self) -> Any:
        return Numbers, (self.array,)

    def __repr__(self) -> str:
        return f"Numbers({self.array.tolist()})" if self.array.size <= 16 else f"<{self.array.size} numbers>"


def integers(field: str, value: object, low: int = 0, high: int = MAX_INT) -> Array:
    """Integers of any shape, each within low..high, as int32."""
    return _arrays.integers(field, value, low, high)


def bools(field: str, value: object) -> Array:
    """bool of 2 to 4 dimensions; integers 0 and 1 too."""
    array = _arrays.host(field, value)
    if array.dtype.kind not in "biu":
        raise wrong(field, "a bool array (True = attend), or integers 0 and 1", f"an array of {array.dtype}")
    if array.dtype != np.bool_:
        array = integers(field, array, 0, 1).astype(np.bool_)
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise wrong(field, "2 to 4 dimensions without 0", f"shape {array.shape}")
    return array


def check_sides(kind: str, left: int, right: int) -> None:
    for name, side in (("left", left), ("right", right)):
        _checks.integer(f"{kind} {name}", side, -1, MAX_INT)


def check_rising(field: str, values: Array) -> None:
    """From 0, never falling."""
    if values.ndim != 1 or values.size == 0:
        raise wrong(field, "one dimension of at least 1 entry", f"shape {values.shape}")
    if values[0] != 0:
        raise wrong(field, "0 at its beginning", values[0])
    falls = np.flatnonzero(values[1:] < values[:-1])
    if falls.size:
        raise wrong(field, f"never falling: at least {values[falls[0]]}", values[falls[0] + 1])


def check_pair(one_name: str, one: Array, other_name: str, other: Array) -> None:
    if one.ndim != 2 or 0 in one.shape:
        raise wrong(one_name, "1 or 2 dimensions without 0", one.shape)
    if one.shape != other.shape:
        raise wrong(other_name, f"shape {one.shape}, as {one_name} has", other.shape)


def check_last(field: str, last: int, keys: int) -> None:
    if last > (keys or MAX_LENGTH):
        raise wrong(field, f"keys below {keys or MAX_LENGTH}", last - 1)


def check_indices(indptr: Array, indices: Array, columns: int) -> None:
    inside = np.ones(len(indices), np.bool_)
    inside[indptr[:-1][indptr[:-1] < len(indices)]] = False  # first of their rows
    falls = np.flatnonzero(inside[1:] & (indices[1:] <= indices[:-1]))
    if falls.size:
        raise wrong("blocks indices", f"ascending in each row: above {indices[falls[0]]}", indices[falls[0] + 1])
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < columns:
        raise wrong("blocks indices", f"0..{columns - 1}", indices[(indices < 0) | (indices >= columns)][0])
