"""Masks of other libraries: column runs, endpoints, slices, block-sparse and sparse rows, DeepSpeed's layouts."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from .. import _arrays, _checks
from .._arrays import Array
from ..errors import Unimplemented, wrong, wrong_type
from .nodes import SHAPES, Blocks, ColumnRuns, Mask, Rectangles, RowIntervals, Window, grid_of
from .recognise import partial_blocks, smallest
from .values import MAX_LENGTH, Numbers, check_rising, integers


def from_flashmask(startend_row_indices: object, causal: bool, q_heads: Optional[int] = None) -> Mask:
    """FlashMask's rows that each key is hidden from, int [batch, 1 or kv_heads, keys, n] or [keys, n].

    causal: n = 1: from a row on; n = 2: [start, end). Else n = 2: from a row on, and before a row; n = 4: two intervals
    [start, end), the lower one first. q_heads: needed where key heads differ, each of which serves q_heads / kv_heads.
    """
    array = integers("startend_row_indices", startend_row_indices, 0, MAX_LENGTH)
    counts = (1, 2) if _checks.flag("causal", causal) else (2, 4)
    if array.ndim not in (2, 4) or array.shape[-1] not in counts or 0 in array.shape:
        raise wrong("startend_row_indices", f"shape [batch, heads, keys, {counts[0]} or {counts[1]}] as causal={causal}",
                    array.shape)
    if array.ndim == 4 and array.shape[1] > 1:
        if q_heads is None or _checks.integer("q_heads", q_heads, 1, 1 << 16) % array.shape[1]:
            raise wrong("q_heads", f"a multiple of the {array.shape[1]} heads of startend_row_indices", q_heads)
        array = array.repeat(q_heads // array.shape[1], axis=1)

    def make(columns: Array) -> Mask:
        first, last = np.zeros_like(columns[:, :1]), np.full_like(columns[:, :1], MAX_LENGTH)
        if columns.shape[1] == 1:
            edges = [columns, last]
        elif causal:
            edges = [columns[:, :1], columns[:, 1:]]
        elif columns.shape[1] == 2:
            edges = [np.hstack([columns[:, :1], first]), np.hstack([last, columns[:, 1:]])]
        else:
            edges = [columns[:, 0::2], columns[:, 1::2]]
        return ColumnRuns(Numbers(edges[0]), Numbers(np.maximum(edges[0], edges[1])), Window(-1, 0) if causal else None)
    return grid_of(make, array)


def from_endpoints(mask_func: object, cu_seqlens: object = None) -> Mask:
    """cuDNN's endpoints, int [heads or 1, n, rows], n odd: row i sees keys [0, F0), [F1, F2), ... up to F(n-1).

    cu_seqlens: where packed sequences begin in rows, and their total; keys count inside a sequence.
    """
    array = integers("mask_func", mask_func, 0, MAX_LENGTH)
    if array.ndim != 3 or array.shape[1] % 2 == 0 or 0 in array.shape:
        raise wrong("mask_func", "shape [heads or 1, an odd number, rows]", array.shape)
    ends = np.concatenate([np.zeros_like(array[:, :1]), array], axis=1).transpose(0, 2, 1)  # [heads, rows, n + 1]
    if cu_seqlens is None:
        return grid_of(_row_intervals, ends)
    cu = integers("cu_seqlens", cu_seqlens, 0, MAX_LENGTH)
    check_rising("cu_seqlens", cu)
    if len(cu) < 2 or cu[-1] != array.shape[2]:
        raise wrong("cu_seqlens", f"at least 2 entries, to mask_func's {array.shape[2]} rows", cu.tolist()[-8:])
    lengths = np.diff(cu)
    whole = np.zeros((len(lengths), len(ends), int(lengths.max()), ends.shape[2]), np.int32)
    for n, (begin, length) in enumerate(zip(cu[:-1], lengths)):
        whole[n, :, :length] = ends[:, begin:begin + length]
    return grid_of(_row_intervals, whole)


def _row_intervals(ends: Array) -> Mask:
    return RowIntervals(Numbers(ends[:, 0::2]), Numbers(ends[:, 1::2]))


def from_slices(q_ranges: object, k_ranges: object, types: Optional[Sequence[object]] = None) -> Mask:
    """MagiAttention's slices: rows q_ranges [n, 2] see keys k_ranges [n, 2], all (type 0 or "full"), below a diagonal that
    ends in the lower right corner (1, "causal"), above one that begins in the upper left (2, "inv_causal"), or between them
    (3, "bi_causal"). Slices that overlap count once."""
    edges = [integers(name, ranges, 0, MAX_LENGTH) for name, ranges in (("q_ranges", q_ranges), ("k_ranges", k_ranges))]
    for name, found in zip(("q_ranges", "k_ranges"), edges):
        if found.ndim != 2 or found.shape[1] != 2 or len(found) != len(edges[0]):
            raise wrong(name, f"shape ({len(edges[0])}, 2)", found.shape)
    names: Dict[object, int] = {"full": 0, "causal": 1, "inv_causal": 2, "bi_causal": 3}
    shapes: List[int] = []
    for n, kind in enumerate([0] * len(edges[0]) if types is None else types):
        number = names.get(kind, kind) if isinstance(kind, str) else kind
        shapes.append(_checks.integer(f"types[{n}]", number, 0, len(SHAPES) - 1))
    if len(shapes) != len(edges[0]):
        raise wrong("types", f"{len(edges[0])} entries, as q_ranges has", len(shapes))
    return Rectangles(Numbers(np.hstack(edges)), Numbers(np.array(shapes, np.int32)))


def from_bsr(indptr: object, indices: object, R: int, C: int, keys: int, mask: object = None) -> Mask:
    """FlashInfer's block-sparse rows: blocks of R rows × C keys, row r of blocks has indices[indptr[r]:indptr[r + 1]].

    keys: of the problem. mask: bool [blocks, R, C], which scores of each block are seen; None: all.
    """
    R, C = [_checks.integer(name, size, 1, MAX_LENGTH) for name, size in (("R", R), ("C", C))]
    starts, columns = integers("indptr", indptr), integers("indices", indices).reshape(-1)
    check_rising("indptr", starts)
    if len(starts) < 2 or starts[-1] != len(columns):
        raise wrong("indptr", f"at least 2 entries, {len(columns)} at its end, the number of indices", starts[-1])
    order = np.lexsort((columns, np.repeat(np.arange(len(starts) - 1), np.diff(starts))))
    count = -(-_checks.integer("keys", keys, 1, MAX_LENGTH) // C)
    common = (R, C, count, Numbers(starts), Numbers(columns[order]))
    if mask is None:
        return Blocks(*common, keys=keys)
    seen = _arrays.host("mask", mask)
    if seen.dtype != np.bool_ or seen.size != len(columns) * R * C:
        raise wrong("mask", f"bool of shape {(len(columns), R, C)}", f"{seen.dtype} of shape {seen.shape}")
    packed = np.packbits(seen.reshape(len(columns), R * C)[order], axis=1, bitorder="little")
    return partial_blocks(common, np.ones(len(columns), np.bool_), packed, 0, keys)


def from_csr(matrix: Any) -> Mask:
    """A sparse matrix of rows × keys, whose stored elements are seen, whatever their values: torch.sparse_csr, or anything
    with indptr, indices and shape, as SciPy has it. Becomes runs of keys, steps of keys or bits, whichever is smallest."""
    if hasattr(matrix, "crow_indices"):
        starts, columns = matrix.crow_indices(), matrix.col_indices()
    elif hasattr(matrix, "indptr") and hasattr(matrix, "indices"):
        starts, columns = matrix.indptr, matrix.indices
    else:
        raise wrong_type("matrix", "a sparse CSR matrix (torch.sparse_csr, scipy.sparse.csr_array)", matrix)
    if len(matrix.shape) != 2:
        raise wrong("matrix", "two dimensions; several heads by per_head", f"shape {tuple(matrix.shape)}")
    rows, keys = [_checks.integer("matrix shape", int(size), 1, MAX_LENGTH) for size in matrix.shape]
    starts, columns = integers("indptr", starts), integers("indices", columns, 0, keys - 1) if len(columns) else np.zeros(0)
    check_rising("indptr", starts)
    if len(starts) != rows + 1 or starts[-1] != len(columns):
        raise wrong("indptr", f"{rows + 1} entries up to {len(columns)}", f"{len(starts)} up to {starts[-1]}")
    row = np.repeat(np.arange(rows), np.diff(starts))
    pairs = np.unique(row * keys + columns.astype(np.int64))
    return smallest(rows, keys, pairs // keys, pairs % keys)


# ---- DeepSpeed (its tutorial "Sparse Attention" names the fields).

def from_deepspeed(config: Any, length: int) -> Mask:
    """DeepSpeed's sparsity configuration for sequences of `length`: an object with make_layout, or the dictionary of a
    DeepSpeed configuration file ("mode": "dense", "fixed", "variable", "bslongformer", "local_sliding_window").

    Blocks are seen as a whole: for a unidirectional configuration combine the result with causal(). A layout that is drawn
    at random needs the object, whose make_layout draws it.
    """
    length = _checks.integer("length", length, 1, MAX_LENGTH)
    if hasattr(config, "make_layout"):
        block = _checks.integer("config.block", config.block, 1, length)
        layout = integers("config.make_layout()", config.make_layout(length), 0, 1)
    elif isinstance(config, dict):
        block = _checks.integer("config block", config.get("block", 16), 1, length)
        if length % block:
            raise wrong("length", f"a multiple of the block {block}", length)
        layout = _deepspeed_layout(config, length // block)
    else:
        raise wrong_type("config", "a DeepSpeed SparsityConfig, or a dictionary with its fields", config)

    def make(layout: Array) -> Mask:
        counts = np.concatenate([[0], np.cumsum(layout.sum(1, dtype=np.int64))]).astype(np.int32)
        return Blocks(block, block, layout.shape[1], Numbers(counts), Numbers(np.nonzero(layout)[1].astype(np.int32)))
    return grid_of(make, layout.astype(np.bool_))


def _deepspeed_layout(config: Dict[str, Any], blocks: int) -> Array:
    """bool [heads or 1, blocks, blocks]."""
    mode, random = config.get("mode", "fixed"), config.get("num_random_blocks", 0)
    if mode == "bigbird" or random:
        raise Unimplemented("config: expected no random blocks, got some: give the SparsityConfig object itself, or use "
                            "random_blocks", field="config")
    _checks.word("config mode", mode, ("dense", "fixed", "variable", "bslongformer", "local_sliding_window"),
                 "dense, fixed, variable, bslongformer or local_sliding_window")
    attention = config.get("attention", "unidirectional" if mode == "local_sliding_window" else "bidirectional")
    _checks.word("config attention", attention, ("bidirectional", "unidirectional"), "bidirectional or unidirectional")
    one_way = attention == "unidirectional"
    row, column = np.ogrid[:blocks, :blocks]
    if mode == "dense":
        return np.ones((1, blocks, blocks), np.bool_)
    if mode in ("bslongformer", "local_sliding_window"):
        half = config.get("num_sliding_window_blocks", 3) // 2
        layout: Array = abs(row - column) <= half
        for begin, end in _deepspeed_globals(config, blocks) if mode == "bslongformer" else ():
            layout = layout | ((row >= begin) & (row < end)) | ((column >= begin) & (column < end))
        return (layout & (column <= row) if one_way else layout)[None]
    if mode == "variable":
        window = np.minimum(_windows(config.get("local_window_blocks", [4]), blocks), blocks)
        layout = (window[:, None] == window[None, :]) & ((column <= row) | (not one_way))
        for begin, end in _deepspeed_globals(config, blocks):
            layout = layout | ((column >= begin) & (column < end) & ((row >= begin) | (not one_way)))
            if config.get("horizontal_global_attention", False):
                layout = layout | ((row >= begin) & (row < end))
        return layout[None]
    patterns = config.get("num_different_global_patterns", 1) if config.get("different_layout_per_head", False) else 1
    heads = _checks.integer("config num_heads", config.get("num_heads"), 1, 1 << 16) if patterns > 1 else 1
    return np.stack([_fixed_layout(config, blocks, head % patterns, one_way) for head in range(heads)])


def _windows(sizes: Sequence[int], blocks: int) -> Array:
    """Which local window each block lies in; the last size repeats."""
    found: List[int] = []
    for number in range(blocks):
        found += [number] * (sizes[number] if number < len(sizes) else sizes[-1])
    return np.array(found[:blocks])


def _deepspeed_globals(config: Dict[str, Any], blocks: int) -> List[Tuple[int, int]]:
    begins = config.get("global_block_indices", [0])
    ends = config.get("global_block_end_indices") or [begin + 1 for begin in begins]
    return [(begin, min(end, blocks)) for begin, end in zip(begins, ends) if begin < blocks]


def _fixed_layout(config: Dict[str, Any], blocks: int, pattern: int, one_way: bool) -> Array:
    """Local windows, and of each window some blocks that all rows see (unidirectional: those from there on)."""
    local, wide = config.get("num_local_blocks", 4), config.get("num_global_blocks", 1)
    row, column = np.ogrid[:blocks, :blocks]
    layout: Array = (row // local == column // local) & ((column <= row) | (not one_way))
    first = local - (1 + pattern) * wide  # in a window
    whole = blocks - blocks % local
    begins = list(range(first, whole, local))
    if whole < blocks:
        begins.append(max(0, min(whole + first, blocks - wide)))
    for begin in begins:
        layout = layout | ((column >= begin) & (column < begin + wide) & ((row >= begin) | (not one_way)))
        if config.get("horizontal_global_attention", False):
            layout = layout | ((row >= begin) & (row < begin + wide))
    return layout
