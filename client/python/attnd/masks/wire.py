"""A mask as the bytes of an attnd.v1.MaskSpec. Field numbers are those of attnd/v1/mask.proto."""
from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np

from .._arrays import Array
from .._protobuf import message, number, numbers, present, signed, zigzag
from ..errors import wrong
from .nodes import (BOTH, COLUMNS, ROWS, All, AllOf, AnyOf, Bits, Blocks, BlockWindow, ColumnRuns, Dilated, Documents,
                          Global, Grid, Groups, Mask, Not, Prefix, RandomBlocks, Rectangles, RowIntervals, RowRuns, Stride,
                          StrideColumns, Window, pick)
from .sizes import Sizes, resolve
from .values import MAX_DEPTH, MAX_NODES, MAX_PATTERNS, Numbers

_LISTS = (Blocks, ColumnRuns, RowRuns, RowIntervals, Rectangles, Bits)


def serialize(mask: Mask, sizes: Sizes, sized: bool = True) -> bytes:
    """The MaskSpec for a problem of these sizes. Raises InvalidArgument where the mask does not fit it. Not sized: rows and
    keys are the call's."""
    whole, patterns = resolve(mask, sizes), _Patterns()
    grid = whole.mask.masks if isinstance(whole.mask, Grid) else ((whole.mask,),)
    batch, heads = len(grid), max(map(len, grid))
    if batch > 1:
        heads = sizes.q_heads
    pattern_of = [patterns.add(pick(grid, b, h)) for b in range(batch) for h in range(heads)]
    origin = number(1, whole.row) + number(2, whole.key)
    extents = number(3, whole.rows) + number(4, whole.keys)
    return b"".join([number(1, 1), *[message(4, pattern) for pattern in patterns.encoded], numbers(5, pattern_of),
                     number(7, int(whole.reject_empty_rows)), message(9, origin) if origin else b"",
                     message(10, extents) if sized else b""])


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
            kind = message(1, expression)
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
            return message(2, _blocks(mask)), 0, 0
        if isinstance(mask, ColumnRuns):
            runs = number(1, mask.start.array.shape[1]) + _array(2, mask.start) + _array(3, mask.end)
            if mask.base is None:
                return message(3, runs), 0, 0
            base, nodes, depth = self._expression(mask.base, 2)
            return message(3, runs + message(4, base)), nodes, depth
        if isinstance(mask, RowRuns):
            return message(4, number(1, mask.first.array.shape[1]) + _array(2, mask.first) + _array(3, mask.stride)
                            + _array(4, mask.count)), 0, 0
        if isinstance(mask, RowIntervals):
            return message(6, number(1, mask.begin.array.shape[1]) + _array(2, mask.begin) + _array(3, mask.end)), 0, 0
        if isinstance(mask, Bits):
            return message(5, number(1, (mask.keys + 7) // 8 * 8) + message(2, mask.data)), 0, 0
        assert isinstance(mask, Rectangles)
        return message(7, b"".join(
            message(1, b"".join(number(n + 1, value) for n, value in enumerate([*edges, shape])))
            for edges, shape in zip(mask.edges.array.tolist(), mask.shapes.array.tolist()))), 0, 0

    def _expression(self, mask: Mask, depth: int) -> Tuple[bytes, int, int]:
        """The Expr message, its nodes and its deepest depth, both with what it refers to."""
        if depth > MAX_DEPTH:  # before it recurses any further
            self._check(0, depth)
        if isinstance(mask, _LISTS):
            index = self.add(mask)
            nodes, below = self._sizes[index]
            self._nodes += 1
            return present(14, index), nodes + 1, depth + below
        self._nodes += 1
        if isinstance(mask, (AllOf, AnyOf)):
            parts = [self._expression(part, depth + 1) for part in mask.of]
            body = b"".join(message(1, part[0]) for part in parts)
            nodes, deepest = 1 + sum(part[1] for part in parts), max([depth, *(part[2] for part in parts)])
            return message(11 if isinstance(mask, AllOf) else 12, body), nodes, deepest
        if isinstance(mask, Not):
            body, nodes, deepest = self._expression(mask.of, depth + 1)
            return message(13, body), nodes + 1, deepest
        if isinstance(mask, RandomBlocks):
            body = number(1, mask.block) + number(2, mask.per_row) + number(3, mask.seed) + number(4, mask.per_head)
            if mask.exclude is None:
                return message(10, body), 1, depth
            exclude, nodes, deepest = self._expression(mask.exclude, depth + 1)
            return message(10, body + message(5, exclude)), nodes + 1, deepest
        return _leaf(mask), 1, depth


def _leaf(mask: Mask) -> bytes:
    if isinstance(mask, All):
        return message(1, b"")
    if isinstance(mask, Window):
        return message(2, signed(1, mask.left) + signed(2, mask.right))
    if isinstance(mask, Dilated):
        return message(3, number(1, mask.step) + signed(2, mask.left) + signed(3, mask.right))
    if isinstance(mask, Stride):
        return message(4, number(1, mask.p) + number(2, mask.phase))
    if isinstance(mask, StrideColumns):
        return message(5, number(1, mask.p) + number(2, mask.lo) + number(3, mask.hi))
    if isinstance(mask, BlockWindow):
        shift = numbers(4, (zigzag(value) for value in mask.shift.array.tolist()))
        return message(6, number(1, mask.p) + signed(2, mask.lo) + signed(3, mask.hi) + shift)
    if isinstance(mask, Global):
        starts, ends = [[interval[n] for interval in mask.intervals] for n in (0, 1)]
        return message(7, numbers(1, starts) + numbers(2, ends)
                        + number(3, {BOTH: 0, ROWS: 1, COLUMNS: 2}[mask.direction]))
    if isinstance(mask, Prefix):
        return message(8, numbers(1, mask.lengths.array.tolist()))
    if isinstance(mask, Documents):
        return message(9, numbers(1, mask.cu_seqlens.array.tolist()))
    assert isinstance(mask, Groups), mask
    return message(15, _array(1, mask.row) + _array(2, mask.key) + number(3, int(mask.row.array.ndim == 2)))


def _blocks(mask: Blocks) -> bytes:
    parts = [number(1, mask.bq), number(2, mask.bk), _array(3, mask.indptr), _array(4, mask.indices)]
    if mask.kind:
        parts += [message(5, mask.kind), message(6, mask.bitmaps), _array(9, mask.bitmap_of)]
    return b"".join(parts)


def _array(field: int, array: Numbers) -> bytes:
    """A MaskArray: little-endian numbers, as narrow as the largest allows."""
    values: Array = array.array.reshape(-1)
    if not values.size:
        return b""
    most = int(values.max())
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4
    return message(field, message(2, values.astype(np.dtype(f"<u{width}")).tobytes()) + number(3, width))
