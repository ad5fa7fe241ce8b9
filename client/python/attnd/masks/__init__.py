"""Masks by description: small values that say which keys a row sees, without an array of all scores.

    import attnd.masks as m
    mask = (m.window(255, 255) | m.global_(rows=[(0, 64)], cols=[(0, 64)]) | m.random_blocks(64, 3, seed=7)) & m.causal()
    r = client.forward(q, k, v, mask=mask)

Row i's query position is i + offset, where the call's `align` says what the offset is; keys and rows count from 0. docs/
MASKS.md has the semantics, limits and examples. Every function raises InvalidArgument or InvalidType naming the argument.
"""
from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np

from .. import _checks
from .._arrays import Array
from ..errors import wrong, wrong_type
from .dense import count as _count
from .importers import from_bsr, from_csr, from_deepspeed, from_endpoints, from_flashmask, from_slices
from .nodes import (BOTH, COLUMNS, ROWS, SHAPES, All, Bits, Blocks, BlockWindow, Dilated, Documents, Global, Grid,
                          Groups, Mask, Prefix, RandomBlocks, Rectangles, RowIntervals, RowRuns, Stride,
                          StrideColumns, Window, as_masks, check_mask)
from .nodes import grid_of as _grid_of
from .recognise import from_dense
from .values import MAX_INT, MAX_LENGTH, Numbers, bools, integers

__all__ = ["Mask", "all_", "bits", "block_window", "blocks", "causal", "count", "dilated", "documents", "from_block_mask",
           "from_bsr", "from_csr", "from_deepspeed", "from_dense", "from_endpoints", "from_flashmask", "from_mask_mod",
           "from_slices", "global_", "groups", "intervals", "per_batch", "per_head", "prefix", "random_blocks", "rectangles",
           "runs", "stride", "stride_columns", "window"]

_Side = Optional[int]
_Span = Union[int, Tuple[int, int], Sequence[int]]


def all_() -> Mask:
    """Every key."""
    return All()


def causal() -> Mask:
    """Keys up to the query's own position."""
    return Window(-1, 0)


def window(left: _Side, right: _Side) -> Mask:
    """Keys from `left` before to `right` after the query's position, inclusive; -1 or None: no bound on that side."""
    return Window(_side("window left", left), _side("window right", right))


def dilated(step: int, left: _Side, right: _Side) -> Mask:
    """Every step-th key around the query's position: up to `left` before it and `right` after it, counted in steps."""
    return Dilated(_integer("dilated step", step, 1), _side("dilated left", left), _side("dilated right", right))


def stride(p: int, phase: int = 0) -> Mask:
    """Keys whose distance before the query's position is phase modulo p."""
    return Stride(_integer("stride p", p, 1), _integer("stride phase", phase, 0))


def stride_columns(p: int, lo: int, hi: int) -> Mask:
    """Keys j with lo <= j mod p < hi."""
    return StrideColumns(_integer("stride_columns p", p, 1), _integer("stride_columns lo", lo, 0),
                         _integer("stride_columns hi", hi, 0))


def block_window(p: int, lo: int = 0, hi: int = 0, shift: object = None) -> Mask:
    """Keys of the query's own block of p positions (0) and of those from lo to hi blocks away.

    shift: where blocks begin: position j lies in block (j + shift) // p; an int, or one for each batch entry.
    """
    shifts = np.zeros(0, np.int32) if shift is None else integers("block_window shift", shift, -MAX_INT).reshape(-1)
    return BlockWindow(_integer("block_window p", p, 1), _integer("block_window lo", lo, -MAX_INT),
                       _integer("block_window hi", hi, -MAX_INT), Numbers(shifts))


def global_(rows: Sequence[_Span] = (), cols: Sequence[_Span] = ()) -> Mask:
    """Rows that see every key, and keys (cols) that every row sees: positions, or intervals (start, end) of them."""
    row, column = _intervals("global_ rows", rows), _intervals("global_ cols", cols)
    if row == column:
        return Global(row, BOTH)
    found = [Global(spans, direction) for spans, direction in ((row, ROWS), (column, COLUMNS)) if spans]
    return found[0] | found[1] if len(found) > 1 else found[0]


def prefix(lengths: object) -> Mask:
    """The first `lengths` keys: an int, or one for each batch entry."""
    found = integers("prefix lengths", lengths).reshape(-1)
    if not found.size:
        raise wrong("prefix lengths", "an int, or one for each batch entry", "none")
    return Prefix(Numbers(found))


def documents(cu_seqlens: object) -> Mask:
    """Keys of the query's own document: [cu_seqlens[n], cu_seqlens[n + 1]), from 0, never falling."""
    return Documents(Numbers(integers("documents cu_seqlens", cu_seqlens)))


def groups(row_ids: object, key_ids: object = None) -> Mask:
    """Keys with the row's own id, an int above 0; id 0 sees nothing and is seen by nothing.

    row_ids [rows] and key_ids [keys], or [batch, rows] and [batch, keys]; key_ids None: those of the rows.
    """
    rows = integers("groups row_ids", row_ids)
    return Groups(Numbers(rows), Numbers(rows if key_ids is None else integers("groups key_ids", key_ids)))


def random_blocks(block: int, per_row: int, seed: int, per_head: bool = False, exclude: Optional[Mask] = None) -> Mask:
    """In each row of blocks, per_row blocks of block × block, drawn without replacement: the same for the same seed.

    per_head: each head draws its own. exclude: blocks that it shows entirely are not drawn, so that per_row others are.
    """
    return RandomBlocks(_integer("random_blocks block", block, 1), _integer("random_blocks per_row", per_row, 0),
                        _checks.uint64("random_blocks seed", seed), _checks.flag("random_blocks per_head", per_head),
                        None if exclude is None else check_mask("random_blocks exclude", exclude))


def blocks(layout: object, size: Union[int, Tuple[int, int]]) -> Mask:
    """Blocks of scores that are seen: layout bool [row blocks, key blocks], [heads, ...] or [batch, heads, ...].

    size: of a block, rows and keys or one int for both. The last row and column of blocks may reach over the problem.
    """
    bq, bk = _pair("blocks size", size)
    array = bools("blocks layout", layout)

    def make(layout: Array) -> Mask:
        counts = np.concatenate([[0], np.cumsum(layout.sum(1, dtype=np.int64))])
        return Blocks(bq, bk, layout.shape[1], Numbers(counts.astype(np.int32)),
                      Numbers(np.nonzero(layout)[1].astype(np.int32)))
    return _grid_of(make, array)


def intervals(begin: object, end: object, keys: Optional[int] = None) -> Mask:
    """Each row sees keys [begin, end): [rows], or [rows, r] ascending and disjoint. keys: how many there are at most."""
    return RowIntervals(_columns("intervals begin", begin), _columns("intervals end", end), _keys("intervals keys", keys))


def runs(first: object, stride: object, count: object, keys: Optional[int] = None) -> Mask:
    """Each row sees keys first + stride·k, 0 <= k < count: [rows], or [rows, r]. keys: how many there are at most."""
    return RowRuns(_columns("runs first", first), _columns("runs stride", stride), _columns("runs count", count),
                   _keys("runs keys", keys))


def rectangles(of: Sequence[Sequence[Any]]) -> Mask:
    """The union of (row_begin, row_end, key_begin, key_end) or (..., shape).

    shape: "full" (default); "causal": a triangle whose diagonal ends in the lower right corner; "inverse_causal": one whose
    diagonal begins in the upper left corner; "band": both.
    """
    if isinstance(of, str) or not hasattr(of, "__iter__"):
        raise wrong_type("rectangles", "(row_begin, row_end, key_begin, key_end[, shape]) each", of)
    edges: List[Any] = []
    shapes: List[int] = []
    for n, one in enumerate(of):
        if isinstance(one, str) or not hasattr(one, "__len__") or len(one) not in (4, 5):
            raise wrong(f"rectangles[{n}]", "(row_begin, row_end, key_begin, key_end[, shape])", repr(one))
        shape = _checks.word(f"rectangles[{n}] shape", one[4] if len(one) == 5 else "full", SHAPES, " or ".join(SHAPES))
        edges.append(one[:4])
        shapes.append(SHAPES.index(shape))
    found = integers("rectangles", np.array(edges or np.zeros((0, 4), np.int32)), 0, MAX_LENGTH)
    return Rectangles(Numbers(found), Numbers(np.array(shapes, np.int32)))


def bits(dense: object) -> Mask:
    """Any mask, one bit for each row and key: bool [rows, keys], [heads, rows, keys] or [batch, heads, rows, keys]."""
    def make(dense: Array) -> Mask:
        return Bits(dense.shape[0], dense.shape[1], np.packbits(dense, axis=1, bitorder="little").tobytes())
    return _grid_of(make, bools("bits", dense))


def per_head(masks: Sequence[Mask]) -> Mask:
    """A mask for each query head."""
    return Grid((as_masks("per_head", masks),))


def per_batch(masks: Sequence[Mask]) -> Mask:
    """A mask for each batch entry or packed sequence; each may be a per_head."""
    rows = [mask.masks[0] if isinstance(mask, Grid) and len(mask.masks) == 1 else (mask,)
            for mask in as_masks("per_batch", masks)]
    heads = max(map(len, rows))
    for n, row in enumerate(rows):
        if len(row) not in (1, heads):
            raise wrong(f"per_batch[{n}]", f"1 or {heads} heads, as another entry has", len(row))
    return Grid(tuple(row if len(row) == heads else row * heads for row in rows))


def count(mask: Mask, rows: int, keys: Optional[int] = None, *, batch: int = 1, heads: int = 1, align: object = None) -> int:
    """Visible pairs of row and key, over all batch entries and heads. keys None: as many as rows."""
    return _count(mask, rows, keys, batch, heads, align)


def from_block_mask(block_mask: Any) -> Mask:
    """The mask of a torch.nn.attention.flex_attention.BlockMask [B, H, rows, keys], B and H of 1 for all.

    Its mask_mod is called here, on its partial blocks alone; nothing of rows × keys is made.
    """
    from .block_masks import from_block_mask as convert
    return convert(block_mask)


def from_mask_mod(mask_mod: Any, rows: int, keys: int, *, batch: Optional[int] = None, heads: Optional[int] = None,
                  device: Any = "cpu") -> Mask:
    """The mask that FlexAttention's mask_mod(b, h, q, kv) shows; batch, heads: how many there are, where it depends on them.

    It is called here, on tensors of `device`. Comparisons of q and kv, of their quotients and remainders by constants, and
    of integers that captured tensors have for them become closed forms, compared with mask_mod at 4096 scores. Any other
    function is evaluated everywhere, 64 rows at a time, and becomes blocks.
    """
    from .trace import from_mask_mod as convert
    return convert(mask_mod, batch, heads, rows, keys, device)


# ---- Arguments.

def _integer(field: str, value: object, low: int) -> int:
    return _checks.integer(field, value, low, MAX_INT)


def _side(field: str, value: _Side) -> int:
    return -1 if value is None else _checks.integer(field, value, -1, MAX_INT)


def _keys(field: str, value: Optional[int]) -> int:
    return 0 if value is None else _checks.integer(field, value, 1, MAX_LENGTH)


def _pair(field: str, value: object) -> Tuple[int, int]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise wrong(field, "an int, or (rows, keys)", repr(value))
    bq, bk = [_checks.integer(field, size, 1, MAX_LENGTH) for size in pair]
    return bq, bk


def _columns(field: str, value: object) -> Numbers:
    """[rows, r] of [rows] or [rows, r]."""
    array = integers(field, value)
    if array.ndim not in (1, 2):
        raise wrong(field, "shape [rows] or [rows, r]", array.shape)
    return Numbers(array.reshape(len(array), -1) if array.size else array.reshape(0, 1))


def _intervals(field: str, spans: Sequence[_Span]) -> Tuple[Tuple[int, int], ...]:
    """Ascending and disjoint."""
    found: List[Tuple[int, int]] = []
    if isinstance(spans, (int, str)) or not hasattr(spans, "__iter__"):
        raise wrong_type(field, "positions, or intervals (start, end)", spans)
    pairs = [(span, span + 1) if isinstance(span, (int, np.integer)) else tuple(span) for span in spans]
    for pair in pairs:
        if len(pair) != 2:
            raise wrong(field, "positions, or intervals (start, end)", repr(pair))
    for start, end in sorted((_integer(field, a, 0), _integer(field, b, 0)) for a, b in pairs):
        if start > end:
            raise wrong(field, f"start at most end {end}", start)
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return tuple(found)
