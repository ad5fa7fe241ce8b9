"""Bool masks that no option says, as lists of blocks, where a list takes less than a quarter of the bits' bytes.

A list travels once for each server and lets engines skip what it hides; bits travel with every call.
"""
from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._arrays import Array
from .block_bits import block_list, classify, wire_bytes
from .nodes import Mask, simplified
from .recognise import is_readable
from .values import MAX_PATTERNS

_LEAST_BYTES = 1 << 15  # of bits: below, a call's fixed costs are more


class _Found(NamedTuple):
    """mask: None where the bits are as good; bits, version: of the tensor that was read."""

    mask: Optional[Mask]
    bits: Array
    version: int


_Key = Tuple[int, Tuple[int, ...], Tuple[int, ...], Tuple[int, int, int, int]]
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # one mask serves all layers of a model


def as_blocks(mask: Tensor, scores: Tuple[int, int, int, int]) -> Optional[Mask]:
    """The list of a bool mask that should broadcast to scores = [batch, heads, q_len, kv_len], if it is worth it.

    Made once as long as the tensor lives and says the same: on the host its bits are compared each time, elsewhere
    torch's count of its changes.
    """
    four = _distinct(mask, scores) if is_readable(mask) and mask.dim() <= 4 else None
    if four is None or four.numel() < _LEAST_BYTES * 8 or four.shape[0] * four.shape[1] > MAX_PATTERNS:
        return None
    base = mask if mask._base is None else mask._base
    kept: Dict[_Key, _Found] = _known.setdefault(base, {})  # type: ignore[no-untyped-call]
    key: _Key = (int(mask.storage_offset()), tuple(mask.shape), tuple(mask.stride()), scores)
    version = -1 if mask.is_inference() else mask._version
    found = kept.get(key)
    if found is not None and mask.device.type != "cpu" and found.version == version != -1:
        return found.mask
    bits = np.packbits(four.cpu().numpy(), axis=-1, bitorder="little")
    if found is None or not np.array_equal(found.bits, bits):
        if len(kept) >= 8:
            kept.clear()
        found = kept[key] = _Found(_list_of(bits, scores[3]), bits, version)
    return found.mask


def _distinct(mask: Tensor, scores: Tuple[int, int, int, int]) -> Optional[Tensor]:
    """[batch or 1, heads or 1, q_len, kv_len] without what is only repeated; None where rows or keys are."""
    four = mask[(None,) * (4 - mask.dim())]
    fits = all(size in (1, most) for size, most in zip(four.shape, scores)) and four.shape[2:] == scores[2:]
    if not fits or 0 in four.stride()[2:]:
        return None
    return four[:1 if four.stride(0) == 0 else None, :1 if four.stride(1) == 0 else None]


def _list_of(bits: Array, keys: int) -> Optional[Mask]:
    """Of uint8 [batch, heads, rows, bytes]."""
    most, size = bits.nbytes // 4, 0
    made: List[Tuple[Mask, ...]] = []
    for entry in bits:
        parts = [classify(head, keys) for head in entry]
        if 4 * sum(int(part.seen.sum()) for part in parts) > most:
            return None
        lists = [block_list([part], bits.shape[2], keys) for part in parts]
        size += wire_bytes(lists)
        if size > most:
            return None
        made.append(tuple(lists))
    return simplified(tuple(made))
