"""Bits as lists of blocks of 64 × 64 scores, where a row of a block is one word."""
from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Tuple

import numpy as np

from .._arrays import Array
from .nodes import Blocks
from .values import Numbers

BLOCK = 64  # rows and keys


class Classified(NamedTuple):
    """Rows of blocks: which blocks show anything, and which not all; the bits of the latter, uint8 [their number, 512]."""

    seen: Array  # bool [row blocks, key blocks]
    partial: Array  # the same
    bits: Array


def classify(bits: Array, keys: int) -> Classified:
    """Of uint8 [rows, bytes], little-endian in each byte; bits beyond `keys` are 0."""
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
    """Of consecutive rows of blocks."""
    seen, partial, bits = [np.concatenate(arrays) for arrays in zip(*parts)]
    starts = np.concatenate([[0], np.cumsum(seen.sum(1))]).astype(np.int32)
    common = (BLOCK, BLOCK, seen.shape[1], Numbers(starts), Numbers(np.nonzero(seen)[1].astype(np.int32)))
    return partial_blocks(common, partial[seen], bits, rows, keys)


def wire_bytes(masks: List[Blocks]) -> int:
    """About as many as they have on the wire."""
    return sum(5 * len(mask.indices) + len(mask.bitmaps) + 4 * len(mask.bitmap_of) for mask in masks)


def partial_blocks(common: Tuple[int, int, int, Numbers, Numbers], partial: Array, bits: Array, rows: int, keys: int
                   ) -> Blocks:
    """Blocks of which some show a bitmap, uint8 [their number, bytes]; equal bitmaps are kept once."""
    distinct: Dict[bytes, int] = {}
    of = [distinct.setdefault(one.tobytes(), len(distinct)) for one in bits]
    return Blocks(*common, kind=partial.astype(np.uint8).tobytes(), bitmaps=b"".join(distinct),
                  bitmap_of=Numbers(np.array(of, np.int32)), rows=rows, keys=keys)
