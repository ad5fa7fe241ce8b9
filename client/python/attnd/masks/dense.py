"""Computes what a mask shows, in NumPy and from each kind's definition: for people, for computation here, and as the tests'
oracle of the C++ library, with which it shares nothing."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from .. import _arrays, _checks
from .._arrays import Array
from ..errors import Unimplemented, wrong
from .nodes import (COLUMNS, ROWS, SHAPES, All, AllOf, AnyOf, Bits, Blocks, BlockWindow, ColumnRuns, Dilated,
                          Documents, Global, Grid, Groups, Mask, Not, Prefix, RandomBlocks, Rectangles, RowIntervals,
                          RowRuns, Stride, StrideColumns, Window, check_mask, method_of_masks, pick,
                    walk)
from .sizes import Sizes, Whole, resolve
from .values import MAX_LENGTH


class _Place(NamedTuple):
    """Which scores: rows I [r, 1] and keys J [1, k] of the mask, of one batch entry and head.

    shift: Q - I. rows, keys: of the whole mask. drawn: what random blocks have drawn, of this call.
    """

    row: Array
    key: Array
    batch: int
    head: int
    shift: int
    rows: int
    keys: int
    drawn: Dict[Any, Array]

    @property
    def query(self) -> Array:
        return self.row + self.shift


class Evaluation:
    """A mask of one problem, evaluated a few rows at a time."""

    def __init__(self, mask: Mask, sizes: Sizes) -> None:
        self._whole: Whole = resolve(mask, sizes)
        self._heads = sizes.q_heads
        self._by_head = any(isinstance(part, RandomBlocks) and part.per_head for part in walk(mask))
        self._drawn: Dict[Any, Array] = {}
        self.reject_empty_rows = self._whole.reject_empty_rows

    def rows(self, batch: int, rows: range, keys: int, offset: int) -> Array:
        """bool [q_heads, rows, keys], or [1, rows, keys] where heads are alike: rows of a batch entry whose diagonal's
        offset is this one."""
        whole = self._whole
        grid = whole.mask.masks if isinstance(whole.mask, Grid) else ((whole.mask,),)
        alike = len(grid[0]) == 1 and not self._by_head
        shown: Dict[Any, Array] = {}
        found: List[Array] = []
        for head in range(1 if alike else self._heads):
            mask = pick(grid, batch, head)
            known = shown.get(mask) if not self._by_head else None
            found.append(self._one(mask, batch, head, rows, keys, offset) if known is None else known)
            shown[mask] = found[-1]
        return np.stack(found)

    def _one(self, mask: Mask, batch: int, head: int, rows: range, keys: int, offset: int) -> Array:
        whole = self._whole
        row = np.arange(rows.start, rows.stop, dtype=np.int64)[:, None] + whole.row
        key = np.arange(keys, dtype=np.int64)[None, :] + whole.key
        place = _Place(row, key, batch, head, offset + whole.key - whole.row, whole.rows, whole.keys, self._drawn)
        return np.broadcast_to(_shows(mask, place), (len(row), keys))


@method_of_masks
def to_dense(mask: Mask, batch: int, heads: int, rows: int, keys: int, align: object) -> Array:
    """Mask.to_dense."""
    sizes = _sizes(batch, heads, rows, keys)
    evaluation, offsets = Evaluation(mask, sizes), _offsets(mask, sizes, align)
    out = np.empty((batch, heads, rows, keys), np.bool_)
    for b in range(batch):
        out[b] = evaluation.rows(b, range(rows), keys, offsets[b])
    return out


def count(mask: Mask, rows: int, keys: Optional[int], batch: int, heads: int, align: object) -> int:
    """masks.count: without an array of all scores."""
    sizes = _sizes(batch, heads, rows, rows if keys is None else keys)
    evaluation, offsets, visible = Evaluation(check_mask("mask", mask), sizes), _offsets(mask, sizes, align), 0
    step = max(1, (1 << 22) // (sizes.keys * sizes.q_heads))
    for b in range(batch):
        for begin in range(0, rows, step):
            found = evaluation.rows(b, range(begin, min(begin + step, rows)), sizes.keys, offsets[b])
            visible += int(np.count_nonzero(found)) * (heads // len(found))
    return visible


@method_of_masks
def show(mask: Mask, rows: int, keys: Optional[int], batch: int, head: int, align: object, axes: Any) -> Any:
    """Mask.show."""
    try:
        from matplotlib import pyplot  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise Unimplemented("show: expected matplotlib to be installed, got none: pip install matplotlib; to_dense gives "
                            "the same as an array", field="show") from None
    keys = rows if keys is None else keys
    grid = next((part.masks for part in walk(mask) if isinstance(part, Grid)), ((),))
    entries = max([len(grid), *(_batches(part) for part in walk(mask)), _checks.integer("batch", batch, 0, MAX_LENGTH) + 1])
    heads = max(len(grid[0]), _checks.integer("head", head, 0, MAX_LENGTH) + 1)
    sizes = _sizes(entries, heads, rows, keys)
    dense = Evaluation(mask, sizes).rows(batch, range(rows), keys, _offsets(mask, sizes, align)[batch])
    axes = pyplot.gca() if axes is None else axes
    axes.imshow(dense[min(head, len(dense) - 1)], cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    axes.set_xlabel("key")
    axes.set_ylabel("row")
    return axes


def _batches(part: Mask) -> int:
    if isinstance(part, Prefix):
        return len(part.lengths)
    if isinstance(part, BlockWindow):
        return len(part.shift)
    return len(part.row.array) if isinstance(part, Groups) and part.row.array.ndim == 2 else 1


def _sizes(batch: int, heads: int, rows: int, keys: int) -> Sizes:
    return Sizes(_checks.integer("batch", batch, 1, MAX_LENGTH), _checks.integer("heads", heads, 1, 1 << 16),
                 _checks.integer("rows", rows, 1, MAX_LENGTH), _checks.integer("keys", keys, 1, MAX_LENGTH))


def _offsets(mask: Mask, sizes: Sizes, align: object) -> List[int]:
    if align is None:
        if sizes.rows != sizes.keys and mask.relative:
            raise wrong("align", '"top_left", "bottom_right", an int or an int array [batch], since the mask depends on it '
                        "and rows and keys differ", None)
        align = 0
    if isinstance(align, str):
        word = _checks.word("align", align, ("top_left", "bottom_right"), '"top_left", "bottom_right", an int or an array')
        align = sizes.keys - sizes.rows if word == "bottom_right" else 0
    offsets = _arrays.integers("align", align, -MAX_LENGTH, MAX_LENGTH).reshape(-1).tolist()
    if len(offsets) not in (1, sizes.batch):
        raise wrong("align", f"1 or {sizes.batch} entries", len(offsets))
    return [int(offset) for offset in (offsets * sizes.batch if len(offsets) == 1 else offsets)]


# ---- Each kind by its definition; results broadcast to [r, k].

def _shows(mask: Mask, at: _Place) -> Array:
    if isinstance(mask, AllOf):
        return _fold(np.logical_and, True, mask.of, at)
    if isinstance(mask, AnyOf):
        return _fold(np.logical_or, False, mask.of, at)
    if isinstance(mask, Not):
        return ~_shows(mask.of, at)
    if isinstance(mask, RandomBlocks):
        return _shows_random(mask, at)
    if isinstance(mask, (Blocks, ColumnRuns, RowRuns, RowIntervals, Rectangles, Bits, Groups)):
        return _shows_list(mask, at)
    return _shows_relation(mask, at)


def _fold(combine: Any, empty: bool, masks: Tuple[Mask, ...], at: _Place) -> Array:
    found: Array = np.full((1, 1), empty)
    for mask in masks:
        found = combine(found, _shows(mask, at))
    return found


def _shows_relation(mask: Mask, at: _Place) -> Array:
    """Computes a relation of query positions and keys."""
    query, key = at.query, at.key
    if isinstance(mask, All):
        return np.ones((1, 1), np.bool_)
    if isinstance(mask, Window):
        return _between(key - query, mask.left, mask.right, 1)
    if isinstance(mask, Dilated):
        return np.asarray(_between(key - query, mask.left, mask.right, mask.step) & ((query - key) % mask.step == 0))
    if isinstance(mask, Stride):
        return np.asarray((query - key) % mask.p == mask.phase)
    if isinstance(mask, StrideColumns):
        return np.asarray((key % mask.p >= mask.lo) & (key % mask.p < mask.hi))
    if isinstance(mask, BlockWindow):
        shift = _of_batch(mask.shift.array, at.batch) if len(mask.shift) else 0
        blocks = (key + shift) // mask.p - (query + shift) // mask.p
        return np.asarray((blocks >= mask.lo) & (blocks <= mask.hi))
    if isinstance(mask, Global):
        rows = _inside(query, mask.intervals) if mask.direction != COLUMNS else np.zeros((1, 1), np.bool_)
        columns = _inside(key, mask.intervals) if mask.direction != ROWS else np.zeros((1, 1), np.bool_)
        return rows | columns
    if isinstance(mask, Prefix):
        return np.asarray(key < _of_batch(mask.lengths.array, at.batch))
    assert isinstance(mask, Documents), mask
    cu = mask.cu_seqlens.array
    query_document, key_document = [np.searchsorted(cu, x, side="right") for x in (query, key)]
    return np.asarray((query_document == key_document) & (query_document > 0) & (query_document < len(cu)))


def _between(distance: Array, left: int, right: int, step: int) -> Array:
    found = np.ones(distance.shape, np.bool_)
    if left >= 0:
        found &= distance >= -left * step
    if right >= 0:
        found &= distance <= right * step
    return found


def _inside(position: Array, intervals: Tuple[Tuple[int, int], ...]) -> Array:
    found = np.zeros(position.shape, np.bool_)
    for start, end in intervals:
        found |= (position >= start) & (position < end)
    return found


def _of_batch(numbers: Array, batch: int) -> int:
    return int(numbers[batch if len(numbers) > 1 else 0])


def _shows_list(mask: Mask, at: _Place) -> Array:
    """Computes a list of rows and keys."""
    row, key = at.row[:, 0], at.key[0]
    if isinstance(mask, Blocks):
        return _shows_blocks(mask, row, key)
    if isinstance(mask, ColumnRuns):
        hidden = np.zeros((len(row), len(key)), np.bool_)
        for start, end in zip(mask.start.array.T, mask.end.array.T):
            hidden |= (at.row >= start[key]) & (at.row < end[key])
        return ~hidden if mask.base is None else _shows(mask.base, at) & ~hidden
    if isinstance(mask, RowRuns):
        found = np.zeros((len(row), len(key)), np.bool_)
        for first, stride, count in zip(mask.first.array.T, mask.stride.array.T, mask.count.array.T):
            step, distance = np.maximum(stride[row], 1)[:, None].astype(np.int64), at.key - first[row][:, None]
            found |= (distance >= 0) & (distance % step == 0) & (distance // step < count[row][:, None])
        return found
    if isinstance(mask, RowIntervals):
        found = np.zeros((len(row), len(key)), np.bool_)
        for begin, end in zip(mask.begin.array.T, mask.end.array.T):
            found |= (at.key >= begin[row][:, None]) & (at.key < end[row][:, None])
        return found
    if isinstance(mask, Rectangles):
        return _shows_rectangles(mask, at)
    if isinstance(mask, Bits):
        bits = np.frombuffer(mask.data, np.uint8).reshape(mask.rows, -1)
        return np.unpackbits(bits[row], axis=1, count=mask.keys, bitorder="little")[:, key].astype(np.bool_)
    assert isinstance(mask, Groups)
    rows, keys = [ids.array[at.batch] if ids.array.ndim == 2 else ids.array for ids in (mask.row, mask.key)]
    return np.asarray((rows[row][:, None] == keys[key]) & (keys[key] != 0))


def _shows_blocks(mask: Blocks, row: Array, key: Array) -> Array:
    found = np.zeros((len(row), len(key)), np.bool_)
    indptr, indices = mask.indptr.array, mask.indices.array
    kind = np.frombuffer(mask.kind, np.uint8) if mask.kind else np.zeros(len(indices), np.uint8)
    partial = np.cumsum(kind) - 1  # which partial block each one is
    key_block = key // mask.bk
    for block in np.unique(row // mask.bq):
        own = row // mask.bq == block
        listed = np.full(mask.columns, -1, np.int64)
        at = np.arange(indptr[block], indptr[block + 1])
        listed[indices[at]] = at
        entry = listed[key_block]
        seen = np.broadcast_to(entry >= 0, (int(own.sum()), len(key))).copy()
        for n in at[kind[at] == 1]:
            columns = entry == n
            bits = _bitmap(mask, int(mask.bitmap_of.array[partial[n]]))
            seen[:, columns] = bits[row[own] % mask.bq][:, key[columns] % mask.bk]
        found[own] = seen
    return found


def _bitmap(mask: Blocks, number: int) -> Array:
    """bool [bq, bk]."""
    data = np.frombuffer(mask.bitmaps, np.uint8, mask.bitmap_bytes, number * mask.bitmap_bytes)
    bits: Array = np.unpackbits(data, count=mask.bq * mask.bk, bitorder="little").reshape(mask.bq, mask.bk)
    return bits.astype(np.bool_)


def _shows_rectangles(mask: Rectangles, at: _Place) -> Array:
    found = np.zeros((len(at.row), at.key.shape[1]), np.bool_)
    for edges, number in zip(mask.edges.array.tolist(), mask.shapes.array.tolist()):
        row_begin, row_end, key_begin, key_end = edges
        seen = (at.row >= row_begin) & (at.row < row_end) & (at.key >= key_begin) & (at.key < key_end)
        if SHAPES[number] in ("causal", "band"):
            seen = seen & (key_end - at.key >= row_end - at.row)
        if SHAPES[number] in ("inverse_causal", "band"):
            seen = seen & (at.key - key_begin >= at.row - row_begin)
        found |= seen
    return found


# ---- Random blocks.

def _shows_random(mask: RandomBlocks, at: _Place) -> Array:
    block_rows, index = np.unique(at.query[:, 0] // mask.block, return_inverse=True)
    table = np.zeros((len(block_rows), -(-at.keys // mask.block)), np.bool_)
    for n, block_row in enumerate(block_rows.tolist()):
        name = mask.token, at.batch, at.head, at.shift, block_row
        if name not in at.drawn:
            at.drawn[name] = _draw(mask, at, block_row)
        table[n, at.drawn[name]] = True
    return table[index.reshape(-1)][:, at.key[0] // mask.block]


def _draw(mask: RandomBlocks, at: _Place, block_row: int) -> Array:
    """The key blocks that a row of blocks sees."""
    key_blocks = -(-at.keys // mask.block)
    candidates = np.arange(key_blocks)
    if mask.exclude is not None:
        first = max(block_row * mask.block, at.shift)
        end = min((block_row + 1) * mask.block, at.rows + at.shift)
        rows = np.arange(first - at.shift, end - at.shift)[:, None]
        whole = at._replace(row=rows, key=np.arange(at.keys)[None, :])
        hidden = np.broadcast_to(_shows(mask.exclude, whole), (len(rows), at.keys)).all(0)
        candidates = candidates[~np.logical_and.reduceat(hidden, candidates * mask.block)]
    m = len(candidates)
    for n in range(min(mask.per_row, m)):
        words = _philox4x32x10((n // 4, block_row & 0xFFFFFFFF, at.head if mask.per_head else 0, 0x6D61736B), mask.seed)
        x = n + (words[n % 4] * (m - n) >> 32)
        candidates[[n, x]] = candidates[[x, n]]
    return candidates[:min(mask.per_row, m)]


def _philox4x32x10(counter: Tuple[int, int, int, int], seed: int) -> Tuple[int, int, int, int]:
    """Four 32-bit words. (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11)"""
    a, b, c, d = counter
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = two >> 32 ^ b ^ low, two & 0xFFFFFFFF, one >> 32 ^ d ^ high, one & 0xFFFFFFFF
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d
