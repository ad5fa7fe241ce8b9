"""A PyTorch BlockMask as a mask by description.

A BlockMask lists, for each row of blocks, the partial and the full blocks of keys, up to a count; what follows a count is
not defined. Partial blocks are those where its mask_mod decides, which is called here for their scores alone.
"""
from __future__ import annotations

import weakref
from typing import Any, Dict, List, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from .._arrays import Array
from ..errors import wrong, wrong_type
from .nodes import Mask, simplified
from .recognise import partial_blocks
from .values import Numbers

_MOST_SCORES = 1 << 22  # of one call of mask_mod


def from_block_mask(block_mask: Any) -> Mask:
    """attnd.masks.from_block_mask."""
    if not isinstance(block_mask, BlockMask):
        raise wrong_type("block_mask", "a torch.nn.attention.flex_attention.BlockMask", block_mask)
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    bq, bk = block_mask.BLOCK_SIZE
    rows, keys = getattr(block_mask, "seq_lengths", block_mask.shape[-2:])
    block_rows, block_keys = block_mask.kv_num_blocks.shape[2], -(-keys // bk)
    if block_rows != -(-rows // bq):
        raise wrong("block_mask", f"{-(-rows // bq)} rows of blocks for {rows} rows", block_rows)
    bits = _evaluate(block_mask, np.argwhere(partial), (bq, bk), (rows, keys))
    which = np.cumsum(partial.reshape(-1)).reshape(partial.shape) - 1  # of bits, for each partial block
    made: List[Tuple[Mask, ...]] = []
    for b in range(batch):
        row: List[Mask] = []
        for h in range(heads):
            if (partial[b, h] & full[b, h]).any():
                raise wrong("block_mask", "blocks that are either partial or full", "one that is both")
            seen = partial[b, h] | full[b, h]
            starts = np.concatenate([[0], np.cumsum(seen.sum(1))]).astype(np.int32)
            common = (bq, bk, block_keys, Numbers(starts), Numbers(np.nonzero(seen)[1].astype(np.int32)))
            row.append(partial_blocks(common, partial[b, h][seen], bits[which[b, h][partial[b, h]]], rows, keys))
        made.append(tuple(row))
    return simplified(tuple(made))


_known: weakref.WeakKeyDictionary[Any, Dict[Tuple[int, int, int, int], Mask]] = weakref.WeakKeyDictionary()


def described_block_mask(block_mask: Any, scores: Tuple[int, int, int, int]) -> Mask:
    """The mask of a BlockMask for scores = [batch, q_heads, q_len, kv_len]; the same object while the BlockMask lives."""
    if not isinstance(block_mask, BlockMask):
        raise wrong_type("block_mask", "None, a BlockMask, or a Mask made by attnd.masks", block_mask)
    known = _known.setdefault(block_mask, {})
    if scores not in known:
        lengths = tuple(getattr(block_mask, "seq_lengths", block_mask.shape[-2:]))
        counts = block_mask.kv_num_blocks.shape[:2]
        if lengths != scores[2:]:
            raise wrong("block_mask", f"one of {scores[2]} rows and {scores[3]} keys", f"{lengths[0]} and {lengths[1]}")
        for name, got, count in zip(("B", "H"), counts, scores):
            if got not in (1, count):
                raise wrong("block_mask", f"{name} = 1 or {count}", got)
        _check_alike(block_mask, scores)
        mask = next(iter(known.values())) if known else from_block_mask(block_mask)
        known[scores] = mask
    return known[scores]


def _check_alike(block_mask: BlockMask, scores: Tuple[int, int, int, int]) -> None:
    """Checks that B = 1 or H = 1 is one mask for all: at random points, mask_mod must say so too."""
    batch, heads = [1 if got > 1 else count for got, count in zip(block_mask.kv_num_blocks.shape[:2], scores)]
    if batch == heads == 1:
        return
    random, device = torch.Generator().manual_seed(0), block_mask.kv_num_blocks.device
    b, h, q, k = [torch.randint(0, most, (512,), generator=random).to(device) for most in (batch, heads, *scores[2:])]

    def differs(n: Tensor, _: Tensor, __: Tensor, ___: Tensor) -> Tensor:
        one: Tensor = block_mask.mask_mod(b[n], h[n], q[n], k[n])
        return one ^ block_mask.mask_mod(torch.zeros_like(b[n]), torch.zeros_like(h[n]), q[n], k[n])
    with torch.no_grad():
        if bool(create_mask(differs, len(b), 1, 1, 1, device=str(device)).any()):
            raise wrong("block_mask", f"one made with B={scores[0]}, H={scores[1]}, since its mask_mod depends on them",
                        "one for all")


def _listed(counts: Any, indices: Any) -> Array:
    """bool [B, H, rows of blocks, columns of blocks] of lists up to their counts."""
    count, index = counts.cpu().numpy(), indices.cpu().numpy()
    found = np.zeros(index.shape, np.bool_)
    b, h, r, n = np.nonzero(np.arange(index.shape[3]) < count[..., None])
    found[b, h, r, index[b, h, r, n]] = True
    return found


def _evaluate(block_mask: BlockMask, at: Array, block: Tuple[int, int], length: Tuple[int, int]) -> Array:
    """mask_mod on blocks (b, h, row, column) [n, 4], as bits [n, bytes]; beyond the last row and key 0."""
    (bq, bk), (rows, keys) = block, length
    device = block_mask.kv_num_blocks.device
    found = [np.zeros((0, (bq * bk + 7) // 8), np.uint8)]
    step = max(1, _MOST_SCORES // (bq * bk))
    for begin in range(0, len(at), step):
        part = torch.from_numpy(np.ascontiguousarray(at[begin:begin + step])).to(device)
        b_at, h_at, q_at, k_at = part[:, 0], part[:, 1], part[:, 2] * bq, part[:, 3] * bk

        def one(n: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row, key = (q_at[n] + q).clamp(max=rows - 1), (k_at[n] + k).clamp(max=keys - 1)  # captured arrays end there
            seen: Tensor = block_mask.mask_mod(b_at[n], h_at[n], row, key)
            return seen & (q_at[n] + q < rows) & (k_at[n] + k < keys)
        with torch.no_grad():
            seen = create_mask(one, len(part), 1, bq, bk, device=str(device))
        found.append(np.packbits(seen.reshape(len(part), -1).cpu().numpy(), axis=1, bitorder="little"))
    return np.concatenate(found)
