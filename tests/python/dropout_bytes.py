"""Dropout's keep decisions: Philox4x32-7 on the logical coordinates (batch entry, head, row, key) of one score.

    key     = (seed_lo, seed_hi ^ offset_hi)
    counter = (offset_lo, (i >> 4)·32 + lane, b·q_heads + h, j >> 5),   lane = (i & 7)·4 + ((j & 7) >> 1)
    byte    = ((i >> 3) & 1)·8 + ((j >> 3) & 3)·2 + (j & 1)   of the 16 output bytes
A score is dropped iff its byte < threshold = round(256·p); a kept one is scaled by 256/(256 − threshold).
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""
from __future__ import annotations

from typing import Tuple

import numpy as np

from attnd._arrays import Array

_MASK = np.uint64(0xFFFFFFFF)


def philox4x32x7(counter: Tuple[Array, Array, Array, Array], key_lo: int, key_hi: int
                 ) -> Tuple[Array, Array, Array, Array]:
    """Seven rounds over four arrays of 32-bit words (held in uint64)."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    for _ in range(7):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = ((p1 >> np.uint64(32)) ^ c1 ^ np.uint64(key_lo), p1 & _MASK,
                          (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(key_hi), p0 & _MASK)
        key_lo = (key_lo + 0x9E3779B9) & 0xFFFFFFFF
        key_hi = (key_hi + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_bytes(seed: int, offset: int, heads: Array, rows: range, columns: int) -> Array:
    """The deciding bytes [len(heads), len(rows), columns]; `heads` holds b·q_heads + h of each head."""
    first, last = rows.start >> 4, (rows.stop + 15) >> 4
    blocks = np.arange(first, last, dtype=np.uint64)[:, None] * np.uint64(32)
    lanes = (blocks + np.arange(32, dtype=np.uint64))[None, :, :, None]
    wide = -(-columns // 32)
    columns32 = np.arange(wide, dtype=np.uint64)[None, None, None, :]
    shape = (len(heads), last - first, 32, wide)
    counter = (np.full(shape, offset & 0xFFFFFFFF, np.uint64), np.broadcast_to(lanes, shape),
               np.broadcast_to(heads.astype(np.uint64)[:, None, None, None], shape),
               np.broadcast_to(columns32, shape))
    words = philox4x32x7(counter, seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32))
    packed = np.stack([word.astype("<u4") for word in words], axis=-1).view(np.uint8)
    # [head, row block, i & 7, (j & 7) >> 1, j >> 5, (i >> 3) & 1, (j >> 3) & 3, j & 1]
    split = packed.reshape(len(heads), last - first, 8, 4, wide, 2, 4, 2)
    whole = split.transpose(0, 1, 5, 2, 4, 6, 3, 7).reshape(len(heads), (last - first) * 16, wide * 32)
    start = rows.start - first * 16
    wanted: Array = whole[:, start:start + len(rows), :columns]
    return wanted
