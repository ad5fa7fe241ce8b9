"""A mask as the bytes of an attnd.v1.MaskSpec: its own protobuf writer, since the package needs nothing but NumPy.

Field numbers are those of attnd/v1/mask.proto; proto3 leaves zeros out. (Protocol Buffers, "Encoding".)
"""
from __future__ import annotations

from typing import Dict, Iterable, List, Tuple

import numpy as np

from ._arrays import Array
from ._mask_nodes import (BOTH, COLUMNS, ROWS, All, AllOf, AnyOf, Bits, Blocks, BlockWindow, ColumnRuns, Dilated, Documents,
                          Global, Grid, Groups, Mask, Not, Prefix, RandomBlocks, Rectangles, RowIntervals, RowRuns, Stride,
                          StrideColumns, Window, pick)
from ._mask_sizes import Sizes, resolve
from ._mask_values import MAX_DEPTH, MAX_NODES, MAX_PATTERNS, Numbers
from .errors import wrong

_VARINT, _LENGTH = 0, 2  # wire types
_LISTS = (Blocks, ColumnRuns, RowRuns, RowIntervals, Rectangles, Bits)


def serialize(mask: Mask, sizes: Sizes) -> bytes:
    """The MaskSpec for a problem of these sizes. Raises InvalidArgument where the mask does not fit it."""
    whole, patterns = resolve(mask, sizes), _Patterns()
    grid = whole.mask.masks if isinstance(whole.mask, Grid) else ((whole.mask,),)
    batch, heads = len(grid), max(map(len, grid))
    if batch > 1:
        heads = sizes.q_heads
    pattern_of = [patterns.add(pick(grid, b, h)) for b in range(batch) for h in range(heads)]
    origin = _number(1, whole.row) + _number(2, whole.key)
    extents = _number(3, whole.rows) + _number(4, whole.keys)
    return b"".join([_number(1, 1), *[_message(4, pattern) for pattern in patterns.encoded], _packed(5, pattern_of),
                     _number(7, int(whole.reject_empty_rows)), _message(9, origin) if origin else b"",
                     _message(10, extents)])


class _Patterns:
    """The distinct patterns in the order of the message: what one refers to stands before it."""

    def __init__(self) -> None:
        self.encoded: List[bytes] = []
        self._index: Dict[Mask, int] = {}
        self._sizes: List[Tuple[int, int]] = []  # of each: nodes and depth, with what it refers to
        self._nodes = 0  # of all, without what they refer to

    def add(self, mask: Mask) -> int:
        """Its place; that of an equal one, if there is one."""
        found = self._index.get(mask)
        if found is not None:
            return found
        if isinstance(mask, _LISTS):
            kind, nodes, depth = self._list(mask)
        else:
            expression, nodes, depth = self._expression(mask, 1)
            kind = _message(1, expression)
        self._check(nodes + 1, depth)
        if len(self.encoded) >= MAX_PATTERNS:
            raise wrong("mask", f"at most {MAX_PATTERNS} distinct patterns", "more")
        self.encoded.append(kind)
        self._sizes.append((nodes + 1, depth))
        self._index[mask] = len(self.encoded) - 1
        return self._index[mask]

    def _check(self, nodes: int, depth: int) -> None:
        if nodes > MAX_NODES or self._nodes > MAX_NODES:
            raise wrong("mask", f"at most {MAX_NODES} parts", max(nodes, self._nodes))
        if depth > MAX_DEPTH:
            raise wrong("mask", f"a depth of at most {MAX_DEPTH}", depth)

    def _list(self, mask: Mask) -> Tuple[bytes, int, int]:
        """The Pattern message of a list, and nodes and depth of the expression in it."""
        if isinstance(mask, Blocks):
            return _message(2, _blocks(mask)), 0, 0
        if isinstance(mask, ColumnRuns):
            runs = _number(1, mask.start.array.shape[1]) + _array(2, mask.start) + _array(3, mask.end)
            if mask.base is None:
                return _message(3, runs), 0, 0
            base, nodes, depth = self._expression(mask.base, 2)
            return _message(3, runs + _message(4, base)), nodes, depth
        if isinstance(mask, RowRuns):
            return _message(4, _number(1, mask.first.array.shape[1]) + _array(2, mask.first) + _array(3, mask.stride)
                            + _array(4, mask.count)), 0, 0
        if isinstance(mask, RowIntervals):
            return _message(6, _number(1, mask.begin.array.shape[1]) + _array(2, mask.begin) + _array(3, mask.end)), 0, 0
        if isinstance(mask, Bits):
            return _message(5, _number(1, (mask.keys + 7) // 8 * 8) + _message(2, mask.data)), 0, 0
        assert isinstance(mask, Rectangles)
        return _message(7, b"".join(
            _message(1, b"".join(_number(n + 1, value) for n, value in enumerate([*edges, shape])))
            for edges, shape in zip(mask.edges.array.tolist(), mask.shapes.array.tolist()))), 0, 0

    def _expression(self, mask: Mask, depth: int) -> Tuple[bytes, int, int]:
        """The Expr message, its nodes and its deepest depth, both with what it refers to."""
        if depth > MAX_DEPTH:  # before it recurses any further
            self._check(0, depth)
        if isinstance(mask, _LISTS):
            index = self.add(mask)
            nodes, below = self._sizes[index]
            self._nodes += 1
            return _varint(14 << 3 | _VARINT) + _varint(index), nodes + 1, depth + below
        self._nodes += 1
        if isinstance(mask, (AllOf, AnyOf)):
            parts = [self._expression(part, depth + 1) for part in mask.of]
            body = b"".join(_message(1, part[0]) for part in parts)
            nodes, deepest = 1 + sum(part[1] for part in parts), max([depth, *(part[2] for part in parts)])
            return _message(11 if isinstance(mask, AllOf) else 12, body), nodes, deepest
        if isinstance(mask, Not):
            body, nodes, deepest = self._expression(mask.of, depth + 1)
            return _message(13, body), nodes + 1, deepest
        if isinstance(mask, RandomBlocks):
            body = _number(1, mask.block) + _number(2, mask.per_row) + _number(3, mask.seed) + _number(4, mask.per_head)
            if mask.exclude is None:
                return _message(10, body), 1, depth
            exclude, nodes, deepest = self._expression(mask.exclude, depth + 1)
            return _message(10, body + _message(5, exclude)), nodes + 1, deepest
        return _leaf(mask), 1, depth


def _leaf(mask: Mask) -> bytes:
    if isinstance(mask, All):
        return _message(1, b"")
    if isinstance(mask, Window):
        return _message(2, _signed(1, mask.left) + _signed(2, mask.right))
    if isinstance(mask, Dilated):
        return _message(3, _number(1, mask.step) + _signed(2, mask.left) + _signed(3, mask.right))
    if isinstance(mask, Stride):
        return _message(4, _number(1, mask.p) + _number(2, mask.phase))
    if isinstance(mask, StrideColumns):
        return _message(5, _number(1, mask.p) + _number(2, mask.lo) + _number(3, mask.hi))
    if isinstance(mask, BlockWindow):
        shift = _packed(4, (_zigzag(value) for value in mask.shift.array.tolist()))
        return _message(6, _number(1, mask.p) + _signed(2, mask.lo) + _signed(3, mask.hi) + shift)
    if isinstance(mask, Global):
        starts, ends = [[interval[n] for interval in mask.intervals] for n in (0, 1)]
        return _message(7, _packed(1, starts) + _packed(2, ends)
                        + _number(3, {BOTH: 0, ROWS: 1, COLUMNS: 2}[mask.direction]))
    if isinstance(mask, Prefix):
        return _message(8, _packed(1, mask.lengths.array.tolist()))
    if isinstance(mask, Documents):
        return _message(9, _packed(1, mask.cu_seqlens.array.tolist()))
    assert isinstance(mask, Groups), mask
    return _message(15, _array(1, mask.row) + _array(2, mask.key) + _number(3, int(mask.row.array.ndim == 2)))


def _blocks(mask: Blocks) -> bytes:
    parts = [_number(1, mask.bq), _number(2, mask.bk), _array(3, mask.indptr), _array(4, mask.indices)]
    if mask.kind:
        parts += [_message(5, mask.kind), _message(6, mask.bitmaps), _array(9, mask.bitmap_of)]
    return b"".join(parts)


def _array(field: int, numbers: Numbers) -> bytes:
    """A MaskArray: little-endian numbers, as narrow as the largest allows."""
    values: Array = numbers.array.reshape(-1)
    if not values.size:
        return b""
    most = int(values.max())
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4
    return _message(field, _message(2, values.astype(np.dtype(f"<u{width}")).tobytes()) + _number(3, width))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else -value * 2 - 1


def _signed(field: int, value: int) -> bytes:
    """A sint32."""
    return _number(field, _zigzag(value))


def _packed(field: int, values: Iterable[int]) -> bytes:
    body = b"".join(map(_varint, values))
    return _message(field, body) if body else b""


def _message(field: int, body: bytes) -> bytes:
    """A message or bytes, also an empty one."""
    return _varint(field << 3 | _LENGTH) + _varint(len(body)) + body
