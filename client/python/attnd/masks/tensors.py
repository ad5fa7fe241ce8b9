"""Bool masks of torch, read and remembered: what recognise.py finds holds as long as the tensor lives and says the same."""
from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._arrays import Array, packed_bits
from . import recognise
from .nodes import Mask
from .values import MAX_PATTERNS

_LEAST_BYTES = 1 << 15  # of bits: below, a call's fixed costs are more than a list saves

Scores = Tuple[int, int, int, int]  # [batch, heads, q_len, kv_len], to which a mask should broadcast


class Options(NamedTuple):
    """A recognise.Pattern in tensors, on the host but for keys, which are where the mask is."""

    kv_lengths: Optional[Tensor] = None
    offsets: Optional[Tensor] = None
    window: Optional[Tuple[int, int]] = None
    cu_seqlens: Optional[Tensor] = None
    keys: Optional[Tensor] = None


class _Known:
    """Remembers what a tensor was found to say. options: None where none say it; described: the mask that they describe, as
    Rows compare it. blocks: None where bits are as good. The versions are torch's counts of changes when each was read, -1:
    unknown."""

    def __init__(self) -> None:
        self.options: Optional[Options] = None
        self.described: Any = None
        self.options_version: Optional[int] = None  # None: not read
        self.blocks: Optional[Mask] = None
        self.bits: Optional[Array] = None
        self.blocks_version: Optional[int] = None


_Key = Tuple[int, Tuple[int, ...], Tuple[int, ...], Scores]
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # one mask serves all layers of a model


def as_options(mask: Tensor, scores: Scores) -> Optional[Options]:
    """The options that say what the mask says, if there are such. What was found is compared with the mask each time."""
    four = _four(mask, scores)
    if four is None or four.shape[1] > 1:
        return None
    shown = four[:, 0]
    known, version = _known_of(mask, scores), _version(mask)
    if known.described is None and known.options_version == version != -1:
        return None
    rows = _rows(shown[:, :1] if shown.stride(1) == 0 else shown)
    if known.described is None or not rows.equals(known.described):
        pattern, known.described = recognise.options_of(rows, scores[0], scores[2])
        known.options = None if pattern is None else _in_tensors(pattern, mask.device)
        known.options_version = version
    return known.options


def as_blocks(mask: Tensor, scores: Scores) -> Optional[Mask]:
    """The list that shows what the mask shows, if it is worth it. On the host the mask's bits are compared each time,
    elsewhere torch's count of its changes."""
    four = _four(mask, scores)
    if four is None or four.shape[2:] != scores[2:] or 0 in four.stride()[2:]:
        return None
    if four.numel() < _LEAST_BYTES * 8 or four.shape[0] * four.shape[1] > MAX_PATTERNS:
        return None
    known, version = _known_of(mask, scores), _version(mask)
    if mask.device.type != "cpu" and known.blocks_version == version != -1:
        return known.blocks
    bits = packed_bits(four.cpu().numpy())
    if known.bits is None or not np.array_equal(known.bits, bits):
        known.blocks, known.bits, known.blocks_version = recognise.blocks_of(bits, scores[3]), bits, version
    return known.blocks


def _four(mask: Tensor, scores: Scores) -> Optional[Tensor]:
    """[batch or 1, heads or 1, q_len or 1, kv_len] without batch entries and heads that are only repeated; None of a mask
    that cannot be read, or does not fit."""
    if not _is_readable(mask) or mask.dim() > 4:
        return None
    four = mask[(None,) * (4 - mask.dim())]
    if any(size not in (1, most) for size, most in zip(four.shape, scores)) or four.shape[3] != scores[3]:
        return None
    return four[:1 if four.stride(0) == 0 else None, :1 if four.stride(1) == 0 else None]


def _is_readable(mask: Tensor) -> bool:
    """Whether it has numbers to look at: neither torch.compile nor vmap shows them."""
    if torch.compiler.is_compiling() or type(mask) is not Tensor or mask.is_meta or mask.numel() == 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def _known_of(mask: Tensor, scores: Scores) -> _Known:
    base = mask if mask._base is None else mask._base
    kept: Dict[_Key, _Known] = _known.setdefault(base, {})  # type: ignore[no-untyped-call]
    key: _Key = (int(mask.storage_offset()), tuple(mask.shape), tuple(mask.stride()), scores)
    if key not in kept:
        if len(kept) >= 8:
            kept.clear()
        kept[key] = _Known()
    return kept[key]


def _version(mask: Tensor) -> int:
    return -1 if mask.is_inference() else mask._version


def _rows(rows: Tensor) -> recognise.Rows:
    return recognise.HostRows(rows.numpy()) if rows.device.type == "cpu" else DeviceRows(rows)


class DeviceRows:
    """A mask where no byte of it is to be fetched: recognise.Rows of what torch computes there."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.shape = rows, (rows.shape[0], rows.shape[1], rows.shape[2])

    def bounds(self) -> Tuple[Array, Array, Array]:
        numbers = self._rows.to(torch.uint8)
        last = self.shape[2] - 1 - numbers.flip(-1).argmax(-1)
        return numbers.argmax(-1).cpu().numpy(), last.cpu().numpy(), self._rows.any(-1).cpu().numpy()

    def columns(self) -> Array:
        found: Array = self._rows.any(1).cpu().numpy()
        return found

    def between(self, begin: Array, end: Array, keys: Optional[Array]) -> Tensor:
        device = self._rows.device
        key = torch.arange(self.shape[2], dtype=torch.int32, device=device)
        first, past = [torch.from_numpy(bound).to(device)[..., None] for bound in (begin, end)]
        seen = (key >= first) & (key < past)
        return (seen if keys is None else seen & torch.from_numpy(keys).to(device)).expand(self.shape)

    def equals(self, mask: Any) -> bool:
        return torch.equal(mask, self._rows)


def _in_tensors(pattern: recognise.Pattern, device: torch.device) -> Options:
    lengths, offsets, cu_seqlens, keys = [None if found is None else torch.from_numpy(found) for found in (
        pattern.kv_lengths, pattern.offsets, pattern.cu_seqlens, pattern.keys)]
    return Options(lengths, offsets, pattern.window, cu_seqlens, None if keys is None else keys.to(device))
