"""Mask, and the kinds of masks: immutable values whose fields are those of the wire's messages (attnd/v1/mask.proto).

A mask is a set of (batch entry, query head, row, key). I and J are a row and a key of it, Q = I + the diagonal's offset the
query position; mod and division round down. What a kind shows stands at each class, docs/MASKS.md has examples. Arguments
are checked here, against each other; against a problem's sizes in sizes.py.
"""
from __future__ import annotations

import dataclasses
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, NoReturn, Optional, Sequence, Tuple, Type, TypeVar

import numpy as np

from .. import _checks
from .._arrays import Array
from ..errors import wrong, wrong_type
from .values import (MAX_INT, MAX_LENGTH, MAX_RECTANGLES, Numbers, check_indices, check_last, check_pair, check_rising,
                           check_sides)

_T = TypeVar("_T")
_tokens = itertools.count()
_by_token: weakref.WeakValueDictionary[str, Mask] = weakref.WeakValueDictionary()


class Mask:
    """Which keys a row sees, as a small immutable value: made by attnd.masks' functions, combined by & | ~.

    Hashable, picklable, safe in any thread. It fits any problem of its sizes; `mask=` takes it.
    """

    __array_ufunc__ = None  # so that `array & mask` comes here

    def __post_init__(self) -> None:
        object.__setattr__(self, "_memo", {})  # of what is derived from it; no part of the value
        object.__setattr__(self, "_token", str(next(_tokens)))
        _by_token[self.token] = self

    def __and__(self, other: object) -> Mask:
        return combine(AllOf, self, other)

    def __or__(self, other: object) -> Mask:
        return combine(AnyOf, self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Mask:
        """The mask of what this one hides, among the rows and keys that exist."""
        return on_each(lambda mask: mask.of if isinstance(mask, Not) else Not(mask), self)

    def __bool__(self) -> NoReturn:
        raise TypeError("mask: expected & for and, | for or, ~ for not, and `is None`: a mask is neither true nor false")

    def at(self, row: int = 0, key: int = 0, rows: Optional[int] = None, keys: Optional[int] = None) -> Mask:
        """The part of this mask that begins at (row, key). rows, keys: the whole mask's size; None: as its lists say, or
        up to the end of the problem."""
        placed = self if isinstance(self, Placed) else Placed(self)
        return dataclasses.replace(placed, row=row, key=key, rows=rows or 0, keys=keys or 0)

    def require_keys(self) -> Mask:
        """The same mask, but a row that sees no key is an InvalidArgument, reason EMPTY_ROW, instead of zeros."""
        placed = self if isinstance(self, Placed) else Placed(self)
        return dataclasses.replace(placed, reject_empty_rows=True)

    def to_dense(self, batch: int, heads: int, rows: int, keys: int, align: object = None) -> Array:
        """bool [batch, heads, rows, keys], True = visible; for people and tests, since it is as large as it says.

        align: where the diagonal lies, as for Client.forward: needed where rows and keys differ and the mask is relative.
        """
        dense: Array = _methods["to_dense"](self, batch, heads, rows, keys, align)
        return dense

    def show(self, rows: int, keys: Optional[int] = None, *, batch: int = 0, head: int = 0, align: object = None,
             axes: Any = None) -> Any:
        """Draws one head of one batch entry with matplotlib, and returns the Axes."""
        return _methods["show"](self, rows, keys, batch, head, align, axes)

    @property
    def token(self) -> str:
        """A name that no other object of this process has had; by_token finds it while it lives."""
        return self._token  # type: ignore[attr-defined,no-any-return]

    @property
    def memo(self) -> Dict[Any, Any]:
        return self._memo  # type: ignore[attr-defined,no-any-return]

    @property
    def children(self) -> Tuple[Mask, ...]:
        return ()

    @property
    def relative(self) -> bool:
        """Whether it counts query positions, so that a call whose lengths differ has to say where its diagonal lies."""
        return any(child.relative for child in self.children)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]


_methods: Dict[str, Callable[..., Any]] = {}


def method_of_masks(function: Callable[..., _T]) -> Callable[..., _T]:
    """Makes a function, which knows what each kind shows, the body of Mask's method of its name."""
    _methods[function.__name__] = function
    return function


def by_token(token: str) -> Optional[Mask]:
    return _by_token.get(token)


def walk(mask: Mask) -> Iterator[Mask]:
    """The mask and all that it consists of, each occurrence."""
    yield mask
    for child in mask.children:
        yield from walk(child)


class Relative(Mask):
    """A kind that counts query positions."""

    @property
    def relative(self) -> bool:
        return True


def check_mask(field: str, value: object) -> Mask:
    if not isinstance(value, Mask):
        raise wrong_type(field, "a Mask, made by attnd.masks", value)
    return value


def combine(kind: Type[Any], one: Mask, other: object) -> Mask:
    """Both, or either, per head and batch entry where one of them differs there. Nested ones of a kind become one."""
    other = check_mask("mask", other)
    for mask in (one, other):
        if isinstance(mask, Placed):
            raise wrong("mask", "masks combined first, and .at() and .require_keys() last", "a mask that has a place")
    if not isinstance(one, Grid) and not isinstance(other, Grid):
        parts = [part for mask in (one, other) for part in (mask.of if isinstance(mask, kind) else (mask,))]
        made: Mask = kind(tuple(parts))
        return made
    left, right = [mask.masks if isinstance(mask, Grid) else ((mask,),) for mask in (one, other)]
    batch = _common("batch", len(left), len(right))
    heads = _common("heads", len(left[0]), len(right[0]))
    return Grid(tuple(tuple(combine(kind, pick(left, b, h), pick(right, b, h)) for h in range(heads))
                      for b in range(batch)))


def pick(grid: Sequence[Sequence[_T]], b: int, h: int) -> _T:
    """Picks an entry of [batch or 1][heads or 1]."""
    row = grid[b if len(grid) > 1 else 0]
    return row[h if len(row) > 1 else 0]


def _common(what: str, one: int, other: int) -> int:
    if one != other and 1 not in (one, other):
        raise wrong("mask", f"masks for the same number of {what}", f"{one} and {other}")
    return max(one, other)


def on_each(change: Callable[[Mask], Mask], mask: Mask) -> Mask:
    if isinstance(mask, Placed):
        raise wrong("mask", "~ first, and .at() and .require_keys() last", "a mask that has a place")
    if isinstance(mask, Grid):
        return Grid(tuple(tuple(map(change, row)) for row in mask.masks))
    return change(mask)


def as_masks(field: str, value: object) -> Tuple[Mask, ...]:
    if isinstance(value, Mask) or not hasattr(value, "__iter__"):
        raise wrong_type(field, "several masks", value)
    masks = tuple(check_mask(f"{field}[{n}]", mask) for n, mask in enumerate(value))
    if not masks:
        raise wrong(field, "at least one mask", "none")
    return masks


# ---- Expressions: on query position Q and key J.

@dataclass(frozen=True)
class All(Mask):
    """Every key."""


@dataclass(frozen=True)
class Window(Relative):
    """Q - left <= J <= Q + right; -1: no bound on that side."""

    left: int
    right: int

    def __post_init__(self) -> None:
        check_sides("window", self.left, self.right)
        super().__post_init__()


@dataclass(frozen=True)
class Dilated(Relative):
    """(Q - J) mod step = 0 and -left·step <= J - Q <= right·step; -1: no bound."""

    step: int
    left: int
    right: int

    def __post_init__(self) -> None:
        _checks.integer("dilated step", self.step, 1, MAX_INT)
        check_sides("dilated", self.left, self.right)
        super().__post_init__()


@dataclass(frozen=True)
class Stride(Relative):
    """(Q - J) mod p = phase."""

    p: int
    phase: int

    def __post_init__(self) -> None:
        _checks.integer("stride p", self.p, 1, MAX_INT)
        _checks.integer("stride phase", self.phase, 0, self.p - 1)
        super().__post_init__()


@dataclass(frozen=True)
class StrideColumns(Mask):
    """lo <= J mod p < hi."""

    p: int
    lo: int
    hi: int

    def __post_init__(self) -> None:
        _checks.integer("stride_columns p", self.p, 1, MAX_INT)
        _checks.integer("stride_columns hi", self.hi, 0, self.p)
        _checks.integer("stride_columns lo", self.lo, 0, self.hi)
        super().__post_init__()


@dataclass(frozen=True)
class BlockWindow(Relative):
    """lo <= floor((J + shift)/p) - floor((Q + shift)/p) <= hi; shift: none, one, or one for each batch entry."""

    p: int
    lo: int
    hi: int
    shift: Numbers

    def __post_init__(self) -> None:
        _checks.integer("block_window p", self.p, 1, MAX_INT)
        _checks.integer("block_window hi", self.hi, -MAX_INT, MAX_INT)
        _checks.integer("block_window lo", self.lo, -MAX_INT, self.hi)
        super().__post_init__()


ROWS, COLUMNS, BOTH = "rows", "columns", "both"


@dataclass(frozen=True)
class Global(Mask):
    """Q (rows), J (columns) or either (both) lies in one of the intervals [start, end)."""

    intervals: Tuple[Tuple[int, int], ...]
    direction: str

    @property
    def relative(self) -> bool:
        return self.direction != COLUMNS


@dataclass(frozen=True)
class Prefix(Mask):
    """J < length; one, or one for each batch entry."""

    lengths: Numbers


@dataclass(frozen=True)
class Documents(Relative):
    """Q and J in the same [cu[n], cu[n + 1])."""

    cu_seqlens: Numbers

    def __post_init__(self) -> None:
        check_rising("documents cu_seqlens", self.cu_seqlens.array)
        super().__post_init__()


@dataclass(frozen=True)
class Groups(Mask):
    """row[I] = key[J] != 0: [rows] and [keys], or [batch, rows] and [batch, keys]."""

    row: Numbers
    key: Numbers

    def __post_init__(self) -> None:
        row, key = self.row.array, self.key.array
        if row.ndim not in (1, 2) or 0 in row.shape:
            raise wrong("groups row_ids", "shape [rows] or [batch, rows]", row.shape)
        if key.ndim != row.ndim or key.shape[:-1] != row.shape[:-1] or 0 in key.shape:
            raise wrong("groups key_ids", f"shape {[*row.shape[:-1], 'keys']}, as row_ids has", key.shape)
        super().__post_init__()


@dataclass(frozen=True)
class RandomBlocks(Relative):
    """In each row of blocks per_row key blocks, drawn without replacement (wire: RandomBlocks says how)."""

    block: int
    per_row: int
    seed: int
    per_head: bool
    exclude: Optional[Mask]

    def __post_init__(self) -> None:
        _checks.integer("random_blocks block", self.block, 1, MAX_INT)
        _checks.integer("random_blocks per_row", self.per_row, 0, MAX_INT)
        _checks.uint64("random_blocks seed", self.seed)
        _checks.flag("random_blocks per_head", self.per_head)
        if isinstance(self.exclude, (Grid, Placed)):
            raise wrong("random_blocks exclude", "one mask for all heads, without a place", type(self.exclude).__name__)
        super().__post_init__()

    @property
    def children(self) -> Tuple[Mask, ...]:
        return () if self.exclude is None else (self.exclude,)


@dataclass(frozen=True)
class AllOf(Mask):
    of: Tuple[Mask, ...]

    @property
    def children(self) -> Tuple[Mask, ...]:
        return self.of


@dataclass(frozen=True)
class AnyOf(Mask):
    of: Tuple[Mask, ...]

    @property
    def children(self) -> Tuple[Mask, ...]:
        return self.of


@dataclass(frozen=True)
class Not(Mask):
    of: Mask

    @property
    def children(self) -> Tuple[Mask, ...]:
        return (self.of,)


# ---- Lists: of rows I and keys J, wherever the diagonal lies.

@dataclass(frozen=True)
class Blocks(Mask):
    """Blocks of bq × bk scores; row r of blocks has indices[indptr[r] .. indptr[r + 1]), ascending.

    kind: a byte for each block, 0 full, 1 partial; empty: all full. The n-th partial block shows bit r·bk + c, least
    significant first, of bitmap bitmap_of[n]. rows, keys: of the mask, 0: any that end in the last block.
    """

    bq: int
    bk: int
    columns: int
    indptr: Numbers
    indices: Numbers
    kind: bytes = b""
    bitmaps: bytes = b""
    bitmap_of: Numbers = Numbers(np.zeros(0, np.int32))
    rows: int = 0
    keys: int = 0

    def __post_init__(self) -> None:
        for name, size in (("bq", self.bq), ("bk", self.bk)):
            _checks.integer(f"blocks {name}", size, 1, MAX_LENGTH)
        check_rising("blocks indptr", self.indptr.array)
        if int(self.indptr.array[-1]) != len(self.indices):
            raise wrong("blocks indptr", f"{len(self.indices)} at its end, the number of indices", self.indptr.array[-1])
        check_indices(self.indptr.array, self.indices.array, self.columns)
        super().__post_init__()

    @property
    def bitmap_bytes(self) -> int:
        return (self.bq * self.bk + 7) // 8


@dataclass(frozen=True)
class ColumnRuns(Mask):
    """Key J is hidden from rows [start, end) of its m runs, [keys, m]; what is left of base, None: of all."""

    start: Numbers
    end: Numbers
    base: Optional[Mask]

    def __post_init__(self) -> None:
        check_pair("start", self.start.array, "end", self.end.array)
        outside = self.start.array > self.end.array
        if outside.any():
            raise wrong("start", f"at most its end {self.end.array[outside][0]}", self.start.array[outside][0])
        super().__post_init__()

    @property
    def children(self) -> Tuple[Mask, ...]:
        return () if self.base is None else (self.base,)


@dataclass(frozen=True)
class RowRuns(Mask):
    """Row I sees keys first + stride·k, 0 <= k < count, of its r runs, [rows, r]. keys: of the mask, 0: enough."""

    first: Numbers
    stride: Numbers
    count: Numbers
    keys: int = 0

    def __post_init__(self) -> None:
        check_pair("runs first", self.first.array, "runs stride", self.stride.array)
        check_pair("runs first", self.first.array, "runs count", self.count.array)
        if ((self.count.array > 1) & (self.stride.array == 0)).any():
            raise wrong("runs stride", "1 or above where count is above 1", 0)
        check_last("runs count", self.last, self.keys)
        super().__post_init__()

    @property
    def last(self) -> int:
        """One more than the last key."""
        end = self.first.array.astype(np.int64) + self.stride.array.astype(np.int64) * (self.count.array - 1) + 1
        return int(np.where(self.count.array > 0, end, 0).max(initial=0))


@dataclass(frozen=True)
class RowIntervals(Mask):
    """Row I sees keys [begin, end) of its r runs, [rows, r], ascending and disjoint. keys: of the mask, 0: enough."""

    begin: Numbers
    end: Numbers
    keys: int = 0

    def __post_init__(self) -> None:
        begin, end = self.begin.array, self.end.array
        check_pair("intervals begin", begin, "intervals end", end)
        if (begin > end).any():
            raise wrong("intervals begin", f"at most its end {end[begin > end][0]}", begin[begin > end][0])
        before = np.maximum.accumulate(np.where(begin < end, end, 0), axis=1)[:, :-1]  # of runs that are not empty
        overlap = (begin[:, 1:] < before) & (begin[:, 1:] < end[:, 1:])
        if overlap.any():
            raise wrong("intervals begin", f"at least the end before it, {before[overlap][0]}", begin[:, 1:][overlap][0])
        check_last("intervals end", self.last, self.keys)
        super().__post_init__()

    @property
    def last(self) -> int:
        return int(np.where(self.begin.array < self.end.array, self.end.array, 0).max(initial=0))


SHAPES = ("full", "causal", "inverse_causal", "band")


@dataclass(frozen=True)
class Rectangles(Mask):
    """The union of (row_begin, row_end, key_begin, key_end), [n, 4], of SHAPES[shape]: causal: key_end - J >= row_end - I;
    inverse_causal: J - key_begin >= I - row_begin; band: both."""

    edges: Numbers
    shapes: Numbers

    def __post_init__(self) -> None:
        edges = self.edges.array
        if len(edges) > MAX_RECTANGLES:
            raise wrong("rectangles", f"at most {MAX_RECTANGLES}", len(edges))
        for name, begin, end in (("row", 0, 1), ("key", 2, 3)):
            outside = edges[:, begin] > edges[:, end]
            if outside.any():
                raise wrong(f"rectangles {name}_begin", f"at most {name}_end {edges[outside][0, end]}",
                            edges[outside][0, begin])
        super().__post_init__()


@dataclass(frozen=True)
class Bits(Mask):
    """A bit for every row and key, least significant first, 1 = visible; rows of whole bytes."""

    rows: int
    keys: int
    data: bytes

    def __post_init__(self) -> None:
        for name, size in (("rows", self.rows), ("keys", self.keys)):
            _checks.integer(f"bits {name}", size, 1, MAX_LENGTH)
        super().__post_init__()


# ---- Around them.

@dataclass(frozen=True)
class Grid(Mask):
    """A mask for each query head, each batch entry, or each of both: [batch or 1][heads or 1]."""

    masks: Tuple[Tuple[Mask, ...], ...]

    def __post_init__(self) -> None:
        for row in self.masks:
            for mask in row:
                if isinstance(mask, (Grid, Placed)):
                    raise wrong("mask", "masks of single heads, without a place", type(mask).__name__)
        super().__post_init__()

    @property
    def children(self) -> Tuple[Mask, ...]:
        return tuple(mask for row in self.masks for mask in row)


@dataclass(frozen=True)
class Placed(Mask):
    """Where a problem lies in the mask, and what a row without keys is; rows, keys 0: not said."""

    mask: Mask
    row: int = 0
    key: int = 0
    rows: int = 0
    keys: int = 0
    reject_empty_rows: bool = False

    def __post_init__(self) -> None:
        for name in ("row", "key", "rows", "keys"):
            _checks.integer(f"at {name}", getattr(self, name), 0, MAX_LENGTH)
        super().__post_init__()

    @property
    def children(self) -> Tuple[Mask, ...]:
        return (self.mask,)


# ---- Arrays with leading dimensions for heads and batch entries.

def grid_of(make: Callable[[Array], Mask], array: Array) -> Mask:
    """make of array[b, h], or of the array where it has no dimensions beyond the last two; equal ones are one object."""
    if array.ndim == 2:
        return make(array)
    four = array[None] if array.ndim == 3 else array
    made: Dict[Mask, Mask] = {}
    rows = []
    for entry in four:
        masks = [make(one) for one in entry]
        rows.append(tuple(made.setdefault(mask, mask) for mask in masks))
    return simplified(tuple(rows))


def simplified(rows: Tuple[Tuple[Mask, ...], ...]) -> Mask:
    """A Grid without dimensions along which nothing differs."""
    if all(row == rows[0] for row in rows):
        rows = rows[:1]
    if all(mask == row[0] for row in rows for mask in row):
        rows = tuple(row[:1] for row in rows)
    return rows[0][0] if len(rows) == len(rows[0]) == 1 else Grid(rows)
