"""Compares a mask's own size with the problem's: which rows and keys it has as a whole, and which batches and
heads it fits. What is wrong raises InvalidArgument here, before a byte is sent."""
from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Optional, Tuple

from .. import _checks
from ..errors import wrong
from .nodes import (Bits, Blocks, BlockWindow, ColumnRuns, Grid, Groups, Mask, Placed, Prefix, Rectangles,
                          RowIntervals, RowRuns, walk)
from .values import MAX_LENGTH


class Sizes(NamedTuple):
    """The sizes of a problem: batch entries or packed sequences, and the longest one's rows and keys."""

    batch: int
    q_heads: int
    rows: int
    keys: int


class Whole(NamedTuple):
    """A mask resolved for a problem: the mask, where the problem lies in it, and its rows and keys."""

    mask: Mask
    row: int
    key: int
    rows: int
    keys: int
    reject_empty_rows: bool


class _Bound(NamedTuple):
    """One part's bound: field and the sizes that it fits, low..high."""

    field: str
    low: int
    high: int


def resolve(mask: Mask, sizes: Sizes) -> Whole:
    """The mask for a problem of these sizes: lists may be longer than it, never shorter."""
    found: Optional[Whole] = mask.memo.get(sizes)
    if found is None:
        _check_count(mask, "batch", sizes.batch)
        _check_count(mask, "heads", sizes.q_heads)
        placed = mask if isinstance(mask, Placed) else Placed(mask)
        rows = _length(mask, "rows", placed.row, sizes.rows, placed.rows)
        keys = _length(mask, "keys", placed.key, sizes.keys, placed.keys)
        found = Whole(placed.mask, placed.row, placed.key, rows, keys, placed.reject_empty_rows)
        remember(mask, sizes, found)
    return found


def remember(mask: Mask, key: Any, value: Any) -> None:
    """For the next call of the same sizes; a mask forgets all when there are many."""
    if len(mask.memo) >= 64:
        mask.memo.clear()
    mask.memo[key] = value


def _length(mask: Mask, what: str, begin: int, size: int, said: int) -> int:
    need, bounds = begin + size, [bound for part in walk(mask) for bound in _bounds(part, what)]
    if said:
        bounds.append(_Bound(f"at {what}", said, said))
    whole = max([need, *(bound.low for bound in bounds)])
    for bound in bounds:
        if whole > bound.high:
            beyond = "" if whole == need else f", as another list of the mask has {whole}"
            at = f" from {begin}" if begin else ""
            raise wrong(f"mask {bound.field}", f"at least {whole} {what}, for the problem's {size}{at}{beyond}", bound.high)
    return _checks.integer(f"mask {what}", whole, 1, MAX_LENGTH)


def _bounds(part: Mask, what: str) -> Iterator[_Bound]:
    rows = what == "rows"
    if isinstance(part, Blocks):
        size, count = (part.bq, len(part.indptr) - 1) if rows else (part.bk, part.columns)
        said = part.rows if rows else part.keys
        yield _Bound("blocks", said or (count - 1) * size + 1, said or count * size)
    elif isinstance(part, Rectangles):
        yield _Bound("rectangles", int(part.edges.array[:, 1 if rows else 3].max(initial=0)), MAX_LENGTH)
    elif isinstance(part, (RowRuns, RowIntervals)) and not rows and not part.keys:
        yield _Bound("runs", part.last, MAX_LENGTH)
    else:
        field, length = _exactly(part, rows)
        if field:
            yield _Bound(field, length, length)


def _exactly(part: Mask, rows: bool) -> Tuple[str, int]:
    """The bound of lists with an entry for each row or key; "" of others."""
    if isinstance(part, Groups):
        array = part.row.array if rows else part.key.array
        return f"groups {'row' if rows else 'key'}_ids", array.shape[-1]
    if isinstance(part, Bits):
        return "bits", part.rows if rows else part.keys
    if isinstance(part, ColumnRuns) and not rows:
        return "column runs", len(part.start.array)
    if isinstance(part, RowRuns):
        return "runs", len(part.first.array) if rows else part.keys
    if isinstance(part, RowIntervals):
        return "intervals", len(part.begin.array) if rows else part.keys
    return "", 0


def _check_count(mask: Mask, what: str, count: int) -> None:
    """Checks that parts which differ by batch entry or head are as many as the problem has."""
    for part in walk(mask):
        field, got = _count(part, what)
        if got not in (1, count):
            name = "batch entries" if what == "batch" else "query heads"
            raise wrong(f"mask {field}", f"1 or {count}, the problem's {name}", got)


def _count(part: Mask, what: str) -> Tuple[str, int]:
    if isinstance(part, Grid):
        return (f"per_{what}", len(part.masks)) if what == "batch" else ("per_head", len(part.masks[0]))
    if what == "batch":
        if isinstance(part, Prefix):
            return "prefix lengths", len(part.lengths)
        if isinstance(part, BlockWindow) and len(part.shift):
            return "block_window shift", len(part.shift)
        if isinstance(part, Groups) and part.row.array.ndim == 2:
            return "groups row_ids", len(part.row.array)
    return "", 1
