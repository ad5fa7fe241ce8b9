"""Which description says what a bool mask shows: options of a call, lists, or bits where nothing is smaller.

- options (options_of): causal, windows, key lengths, padding, packed sequences. They cost no bytes, and engines skip what
  they hide; a mask's bits hide nothing from an engine before it has read them.
- lists of blocks (blocks_of): a list travels once for each server and lets engines skip what it hides; bits travel with
  every call.
- windows, runs or steps of keys, blocks, bits (from_dense, smallest), by their bytes.

Needs NumPy alone; tensors.py reads torch's tensors for it.
"""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Protocol, Tuple, cast

import numpy as np

from .._arrays import Array, packed_bits
from .nodes import Bits, Blocks, Mask, RowIntervals, RowRuns, Window, grid_of, simplified
from .values import Numbers, bools


# ---- Options.

class Pattern(NamedTuple):
    """Row i of batch entry b sees keys j < kv_lengths[b] with i + offsets[b] - left <= j <= i + offsets[b] + right, -1
    unbounded, that are in keys; or, with cu_seqlens, the keys up to its own of its sequence."""

    kv_lengths: Optional[Array] = None  # int32, as offsets and cu_seqlens are
    offsets: Optional[Array] = None
    window: Optional[Tuple[int, int]] = None
    cu_seqlens: Optional[Array] = None
    keys: Optional[Array] = None  # bool [batch or 1, 1, 1, kv_len]


class Rows(Protocol):
    """A bool mask [batch or 1, rows or 1, keys] that is the same for all heads, wherever its numbers lie."""

    shape: Tuple[int, int, int]

    def bounds(self) -> Tuple[Array, Array, Array]:
        """Each row's first and last key, and whether it has any: [batch or 1, rows or 1]."""

    def columns(self) -> Array:
        """Keys that some row sees: bool [batch or 1, keys]."""

    def between(self, begin: Array, end: Array, keys: Optional[Array]) -> Any:
        """The mask of this shape whose rows see [begin, end), [batch or 1, rows or 1], of `keys`, [batch or 1, 1, keys]."""

    def equals(self, mask: Any) -> bool:
        """Whether this is what `between` gave."""


class HostRows:
    """A mask in NumPy's memory, compared by its bits."""

    def __init__(self, rows: Array) -> None:
        self.shape = cast(Tuple[int, int, int], rows.shape)
        self.bits: Array = packed_bits(rows)

    def bounds(self) -> Tuple[Array, Array, Array]:
        filled = self.bits != 0
        first_byte, from_last = filled.argmax(-1), filled[..., ::-1].argmax(-1)
        last_byte = self.bits.shape[-1] - 1 - from_last
        first_bits = np.take_along_axis(self.bits, first_byte[..., None], -1)[..., 0]
        last_bits = np.take_along_axis(self.bits, last_byte[..., None], -1)[..., 0]
        return first_byte * 8 + _FIRST_BIT[first_bits], last_byte * 8 + _LAST_BIT[last_bits], first_bits != 0

    def columns(self) -> Array:
        seen = np.bitwise_or.reduce(self.bits, axis=1)
        return np.unpackbits(seen, axis=-1, count=self.shape[2], bitorder="little").astype(np.bool_)

    def between(self, begin: Array, end: Array, keys: Optional[Array]) -> Array:
        key = np.arange(self.shape[2], dtype=np.int32)
        seen = (key >= begin[..., None]) & (key < end[..., None])
        return np.broadcast_to(packed_bits(seen if keys is None else seen & keys), self.bits.shape)

    def equals(self, mask: Any) -> bool:
        return np.array_equal(mask, self.bits)


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=-1, bitorder="little")  # of each byte
_FIRST_BIT, _LAST_BIT = _BITS.argmax(-1), 7 - _BITS[:, ::-1].argmax(-1)


def options_of(rows: Rows, batch: int, q_len: int) -> Tuple[Optional[Pattern], Any]:
    """The pattern that describes this mask of `batch` entries and q_len rows exactly, and the mask that it describes; None
    and None where options cannot say it.

    A pattern is read from each row's first and last key, and counts only if the mask that it describes equals the given one
    everywhere. Padding on the left, or with holes, is options and a mask of one row for all. All else stays masks.
    """
    bounds = rows.bounds()
    for find in (_from_bounds, _from_columns):
        pattern = find(*bounds, rows, q_len)
        described = None if pattern is None else described_by(pattern, rows)
        if pattern is not None and rows.equals(described):
            lengths, offsets = [None if t is None else np.broadcast_to(t, batch).copy() for t in pattern[:2]]
            return pattern._replace(kv_lengths=lengths, offsets=offsets), described
    if batch == 1 and rows.shape[1:] == (q_len, q_len):
        return _packed(rows, *bounds)
    return None, None


def described_by(pattern: Pattern, rows: Rows) -> Any:
    """The mask of these rows' shape that a pattern without cu_seqlens describes, as `between` gives it."""
    row = np.arange(rows.shape[1], dtype=np.int32)
    begin: Array = np.zeros((1, 1), np.int32)  # of what each row sees, [batch or 1, rows or 1]
    end = begin + rows.shape[2] if pattern.kv_lengths is None else pattern.kv_lengths[:, None]
    if pattern.window is not None and pattern.offsets is not None:
        centre = row + pattern.offsets[:, None]
        left, right = pattern.window
        begin = centre - left if left >= 0 else begin
        end = np.minimum(end, centre + right + 1) if right >= 0 else end
    return rows.between(begin, end, None if pattern.keys is None else pattern.keys[:, 0])


def _from_bounds(first: Array, last: Array, some: Array, rows: Rows, q_len: int) -> Optional[Pattern]:
    """The only pattern without `keys` that these could come from, or None."""
    kv_len = rows.shape[2]
    lengths = np.where(some, last + 1, 0).max(1)  # [batch]
    index = np.arange(first.shape[1])
    below_end = some & (last < lengths[:, None] - 1)
    after_start = some & (first > 0)
    kv_lengths = None if (lengths == kv_len).all() else lengths.astype(np.int32)
    if not (below_end | after_start).any():
        return Pattern(kv_lengths)
    if first.shape[1] != q_len:
        return None
    right = _diagonal(last - index, below_end)
    left = _diagonal(first - index, after_start)
    if right is None:  # bounded on the left alone
        return Pattern(kv_lengths, left, (0, -1))
    right = np.where(below_end.any(1), right, np.maximum(right, lengths - 1)).astype(np.int32)
    if (lengths >= np.minimum(index[-1] + right + 1, kv_len)).all():
        kv_lengths = None  # the diagonal alone ends there
    if left is None:
        return Pattern(kv_lengths, right, (-1, 0))
    width = int((right - left)[after_start.any(1)][0])
    return Pattern(kv_lengths, right, (width, 0)) if width >= 0 else None


def _from_columns(first: Array, last: Array, some: Array, rows: Rows, q_len: int) -> Optional[Pattern]:
    """A pattern of the keys that any row sees, and of the diagonal that each row's last and first key follow."""
    if rows.shape[1] == 1 or first.shape[1] != q_len:
        return None
    keys = rows.columns()[:, None, None]
    index, far = np.arange(q_len), rows.shape[2] + q_len
    first_key = np.where(some, first, far).min(1)[:, None]
    last_key = np.where(some, last, -far).max(1)[:, None]
    below_end, after_start = some & (last < last_key), some & (first > first_key)
    least = np.where(some, last_key - index, -far).max(1)  # with these all see, and none sees, what they should
    most = np.where(some, far, first_key - 1 - index).min(1)
    if not ((below_end | after_start).any() or (most < far).any()):
        return Pattern(keys=keys)
    ends, tells = np.where(below_end, last - index, -far).max(1), below_end.any(1)
    other = ends[tells][0] if tells.any() else least.max()
    right = np.where(tells, ends, np.minimum(np.maximum(other, least), most)).astype(np.int32)
    starts, told = np.where(after_start, first - index, far).min(1), after_start.any(1)
    width = int((right - starts)[told][0]) if told.any() else -1
    return Pattern(None, right, (width, 0), keys=keys) if width >= 0 or not told.any() else None


def _diagonal(distance: Array, told: Array) -> Optional[Array]:
    """Key minus row of a bound, [batch], from the first row that tells; None where none does. Entries of which no row
    tells take another's."""
    if not told.any():
        return None
    entries = told.any(1)
    found = np.take_along_axis(distance, told.argmax(1)[:, None], 1)[:, 0]
    return np.where(entries, found, found[entries][0]).astype(np.int32)


def _packed(rows: Rows, first: Array, last: Array, some: Array) -> Tuple[Optional[Pattern], Any]:
    """Sequences one behind the other, each causal, of a batch of one."""
    index = np.arange(rows.shape[1], dtype=np.int32)
    if not some.all() or not np.array_equal(last[0], index):
        return None, None
    starts = np.unique(first[0]).astype(np.int32)
    own = starts[np.searchsorted(starts, index, side="right") - 1]
    described = rows.between(own[None], index[None] + 1, None)
    if not rows.equals(described):
        return None, None
    return Pattern(cu_seqlens=np.append(starts, np.int32(len(index)))), described


# ---- Lists of blocks of 64 × 64 scores, where a row of a block is one word.

BLOCK = 64  # rows and keys


class Classified(NamedTuple):
    """Rows of blocks: which blocks show anything, and which not all; the bits of the latter, uint8 [their number, 512]."""

    seen: Array  # bool [row blocks, key blocks]
    partial: Array  # the same
    bits: Array


def classify(bits: Array, keys: int) -> Classified:
    """Classifies uint8 [rows, bytes], little-endian in each byte; bits beyond `keys` are 0."""
    rows = len(bits)
    words = np.pad(bits, [(0, 0), (0, -bits.shape[1] % 8)]).view("<u8")
    beyond = np.packbits(np.arange(words.shape[1] * BLOCK) >= keys, bitorder="little").view("<u8")
    begins = np.arange(0, rows, BLOCK)
    seen = np.bitwise_or.reduceat(words, begins, axis=0) != 0
    partial = seen & (np.bitwise_and.reduceat(words | beyond, begins, axis=0) != ~np.uint64(0))
    blocks = np.pad(words, [(0, -rows % BLOCK), (0, 0)]).reshape(len(begins), BLOCK, -1)
    r, c = np.nonzero(partial)
    shown = np.ascontiguousarray(blocks[r, :, c]).view(np.uint8)
    return Classified(seen, partial, shown.reshape(len(r), BLOCK * BLOCK // 8))


def block_list(parts: Iterable[Classified], rows: int, keys: int) -> Blocks:
    """Joins consecutive rows of blocks."""
    seen, partial, bits = [np.concatenate(arrays) for arrays in zip(*parts)]
    starts = np.concatenate([[0], np.cumsum(seen.sum(1))]).astype(np.int32)
    common = (BLOCK, BLOCK, seen.shape[1], Numbers(starts), Numbers(np.nonzero(seen)[1].astype(np.int32)))
    return partial_blocks(common, partial[seen], bits, rows, keys)


def _wire_bytes(masks: List[Blocks]) -> int:
    """About as many as they have on the wire."""
    return sum(5 * len(mask.indices) + len(mask.bitmaps) + 4 * len(mask.bitmap_of) for mask in masks)


def partial_blocks(common: Tuple[int, int, int, Numbers, Numbers], partial: Array, bits: Array, rows: int, keys: int
                   ) -> Blocks:
    """Blocks of which some show a bitmap, uint8 [their number, bytes]; equal bitmaps are kept once."""
    distinct: Dict[bytes, int] = {}
    of = [distinct.setdefault(one.tobytes(), len(distinct)) for one in bits]
    return Blocks(*common, kind=partial.astype(np.uint8).tobytes(), bitmaps=b"".join(distinct),
                  bitmap_of=Numbers(np.array(of, np.int32)), rows=rows, keys=keys)


def blocks_of(bits: Array, keys: int) -> Optional[Mask]:
    """Lists for a mask's bits, uint8 [batch, heads, rows, bytes], little-endian in each byte; None where they take more than
    a quarter of the bits' bytes."""
    most, size = bits.nbytes // 4, 0
    made: List[Tuple[Mask, ...]] = []
    for entry in bits:
        parts = [classify(head, keys) for head in entry]
        if 4 * sum(int(part.seen.sum()) for part in parts) > most:
            return None
        lists = [block_list([part], bits.shape[2], keys) for part in parts]
        size += _wire_bytes(lists)
        if size > most:
            return None
        made.append(tuple(lists))
    return simplified(tuple(made))


# ---- Whatever is smallest.

def from_dense(dense: object) -> Mask:
    """Any mask, bool [rows, keys], [heads, rows, keys] or [batch, heads, rows, keys]: a window where a square array is one,
    else intervals, blocks of 64 or bits, whichever is smallest."""
    def make(dense: Array) -> Mask:
        rows, keys = dense.shape
        edges = np.diff(np.pad(dense.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        (row, begin), end = np.nonzero(edges == 1), np.nonzero(edges == -1)[1]
        most = max(1, int(np.bincount(row, minlength=1).max(initial=0)))
        window = _window(rows, keys, row, begin, end) if most == 1 and rows == keys else None
        if window is not None:
            return window
        packed = packed_bits(dense)
        blocks = block_list([classify(packed, keys)], rows, keys)
        least = min(_wire_bytes([blocks]), packed.nbytes)
        if most * 8 * rows < least:
            return _intervals(rows, keys, most, row, begin, end)
        return blocks if least < packed.nbytes else Bits(rows, keys, packed.tobytes())
    return grid_of(make, bools("from_dense", dense))


def _window(rows: int, keys: int, row: Array, begin: Array, end: Array) -> Optional[Mask]:
    """That shows the run [begin, end) of each of these rows and nothing of others."""
    above, below = begin > 0, end < keys
    left = int((row - begin)[above].max(initial=-1)) if above.any() else -1
    right = int((end - 1 - row)[below].max(initial=-1)) if below.any() else -1
    if (above.any() and left < 0) or (below.any() and right < 0):
        return None
    every = np.arange(rows)
    first = np.maximum(every - left, 0) if left >= 0 else np.zeros(rows, np.int64)
    last = np.minimum(every + right + 1, keys) if right >= 0 else np.full(rows, keys)
    full = np.flatnonzero(first < last)
    same = np.array_equal(full, row) and np.array_equal(first[full], begin) and np.array_equal(last[full], end)
    return Window(left, right) if same else None


def smallest(rows: int, keys: int, row: Array, key: Array) -> Mask:
    """Ascending pairs of row and key as runs of keys, steps of keys or bits, whichever is smallest."""
    counts = np.bincount(row, minlength=rows)
    first = np.concatenate([[0], np.cumsum(counts)])[:-1]
    begins = np.ones(len(key), np.bool_)
    begins[1:] = (row[1:] != row[:-1]) | (key[1:] != key[:-1] + 1)
    runs = np.bincount(row[begins], minlength=rows)
    most = max(1, int(runs.max(initial=0)))
    if most > 1:
        steps = _steps(rows, row, key, counts, first)
        if steps is not None:
            return RowRuns(*steps, keys=keys)
        if most * 8 * rows > rows * keys // 8:
            dense = np.zeros((rows, keys), np.bool_)
            dense[row, key] = True
            return Bits(rows, keys, np.packbits(dense, axis=1, bitorder="little").tobytes())
    ends = np.append(begins[1:], True) if len(key) else begins
    return _intervals(rows, keys, most, row[begins], key[begins], key[ends] + 1)


def _intervals(rows: int, keys: int, most: int, row: Array, begin: Array, end: Array) -> Mask:
    """Makes intervals of runs in ascending order, at most `most` in a row."""
    counts = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins, ends = np.zeros((rows, most), np.int32), np.zeros((rows, most), np.int32)
    begins[row, place], ends[row, place] = begin, end
    return RowIntervals(Numbers(begins), Numbers(ends), keys)


def _steps(rows: int, row: Array, key: Array, counts: Array, first: Array) -> Optional[Tuple[Numbers, Numbers, Numbers]]:
    """First key, step and count of each row, if each is one progression."""
    step = np.ones(rows, np.int64)
    several = np.flatnonzero(counts > 1)
    step[several] = key[first[several] + 1] - key[first[several]]
    start = np.zeros(rows, np.int64)
    start[counts > 0] = key[first[counts > 0]]
    expected = start[row] + step[row] * (np.arange(len(key)) - first[row])
    if not np.array_equal(expected, key):
        return None
    return tuple(Numbers(x.astype(np.int32)[:, None]) for x in (start, step, counts))  # type: ignore[return-value]
