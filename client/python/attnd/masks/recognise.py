"""Bool masks that say no more than options do: causal, windows, key lengths, padding, packed sequences.

As options they cost no bytes, and engines skip what they hide; a mask's bits hide nothing from an engine before it has
read them. A pattern is read from each row's first and last key, and counts only if the mask that it describes equals the
given one everywhere. Padding on the left, or with holes, is options and a mask of one row for all. All else stays masks.
"""
from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple, Union, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._arrays import Array


class Pattern(NamedTuple):
    """Row i of batch entry b sees keys j < kv_lengths[b] with i + offsets[b] - left <= j <= i + offsets[b] + right, -1
    unbounded, that are in keys; or, with cu_seqlens, the keys up to its own of its sequence."""

    kv_lengths: Optional[Tensor] = None
    offsets: Optional[Tensor] = None  # int32, on the host
    window: Optional[Tuple[int, int]] = None
    cu_seqlens: Optional[Tensor] = None
    keys: Optional[Tensor] = None  # bool [batch or 1, 1, 1, kv_len], where the mask is


_Seen = Union[Tensor, Array]  # a mask as it is compared: on a device itself, on the host its bits, packed


class _Found(NamedTuple):
    """pattern and the mask that it describes, None where there is none; version: of the mask that was read."""

    pattern: Optional[Pattern]
    described: Optional[_Seen]
    version: int


_Key = Tuple[int, Tuple[int, ...], Tuple[int, ...], Tuple[int, int, int, int]]
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # one mask serves all layers of a model


def recognise(mask: Tensor, scores: Tuple[int, int, int, int]) -> Optional[Pattern]:
    """What the mask, which should broadcast to scores = [batch, heads, q_len, kv_len], says, if options can.

    What was found is remembered as long as the tensor lives, and compared with it each time.
    """
    rows = _rows_of(mask, scores) if is_readable(mask) else None
    if rows is None:
        return None
    base = mask if mask._base is None else mask._base
    kept: Dict[_Key, _Found] = _known.setdefault(base, {})  # type: ignore[no-untyped-call]
    key: _Key = (int(mask.storage_offset()), tuple(mask.shape), tuple(mask.stride()), scores)
    version = -1 if mask.is_inference() else mask._version
    found = kept.get(key)
    if found is not None and found.described is not None and _same(found.described, _seen(rows)):
        return found.pattern
    if found is None or found.described is not None or found.version != version or version == -1:
        if len(kept) >= 8:
            kept.clear()
        found = kept[key] = _Found(*_recognise(rows, scores[0], scores[2]), version)
    return found.pattern


def is_readable(mask: Tensor) -> bool:
    """Whether it has numbers to look at: neither torch.compile nor vmap shows them."""
    if torch.compiler.is_compiling() or type(mask) is not Tensor or mask.is_meta or mask.numel() == 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def _rows_of(mask: Tensor, scores: Tuple[int, int, int, int]) -> Optional[Tensor]:
    """[batch or 1, q_len or 1, kv_len] of a mask that is the same for all heads."""
    if mask.dim() > 4:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    fits = all(size in (1, most) for size, most in zip(mask.shape, scores)) and mask.shape[3] == scores[3]
    if not fits or (mask.shape[1] > 1 and mask.stride(1) != 0):
        return None
    rows = mask[:, 0]
    return rows[:1 if rows.stride(0) == 0 else None, :1 if rows.stride(1) == 0 else None]


def _recognise(rows: Tensor, batch: int, q_len: int) -> Tuple[Optional[Pattern], Optional[_Seen]]:
    seen = _seen(rows)
    first, last, some = _bounds(seen, rows.shape[2])
    for find in (_from_bounds, _from_columns):
        pattern = find(first, last, some, rows, q_len)
        described = None if pattern is None else _seen(_mask_of(pattern, rows).expand(rows.shape))
        if pattern is not None and described is not None and _same(described, seen):
            lengths, offsets = [None if t is None else t.expand(batch).contiguous() for t in pattern[:2]]
            return pattern._replace(kv_lengths=lengths, offsets=offsets), described
    if batch == 1 and rows.shape[1:] == (q_len, q_len):
        return _packed(rows, seen, first, last, some)
    return None, None


def _seen(rows: Tensor) -> _Seen:
    return np.packbits(rows.numpy(), axis=-1) if rows.device.type == "cpu" else rows


def _same(one: _Seen, other: _Seen) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return np.array_equal(cast(Array, one), cast(Array, other))


def _bounds(seen: _Seen, kv_len: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Of each row, on the host: its first and its last key, and whether it has any."""
    if isinstance(seen, Tensor):
        numbers = seen.to(torch.uint8)
        last = kv_len - 1 - numbers.flip(-1).argmax(-1)
        return numbers.argmax(-1).cpu(), last.cpu(), seen.any(-1).cpu()
    filled = seen != 0
    first_byte, from_last = filled.argmax(-1), filled[..., ::-1].argmax(-1)
    last_byte = seen.shape[-1] - 1 - from_last
    first_bits = np.take_along_axis(seen, first_byte[..., None], -1)[..., 0]
    last_bits = np.take_along_axis(seen, last_byte[..., None], -1)[..., 0]
    first, last = first_byte * 8 + _FIRST_BIT[first_bits], last_byte * 8 + _LAST_BIT[last_bits]
    return torch.from_numpy(first), torch.from_numpy(last), torch.from_numpy(first_bits != 0)


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=-1)  # of each byte, the first key's first
_FIRST_BIT, _LAST_BIT = _BITS.argmax(-1), 7 - _BITS[:, ::-1].argmax(-1)


def _from_bounds(first: Tensor, last: Tensor, some: Tensor, rows: Tensor, q_len: int) -> Optional[Pattern]:
    """The only pattern without `keys` that these could come from, or None."""
    kv_len = rows.shape[2]
    lengths = torch.where(some, last + 1, 0).amax(1)  # [batch]
    index = torch.arange(first.shape[1], device="cpu")
    below_end = some & (last < lengths[:, None] - 1)
    after_start = some & (first > 0)
    kv_lengths = None if bool((lengths == kv_len).all()) else lengths.to(torch.int32)
    if not bool(below_end.any() | after_start.any()):
        return Pattern(kv_lengths)
    if first.shape[1] != q_len:
        return None
    right = _diagonal(last - index, below_end)
    left = _diagonal(first - index, after_start)
    if right is None:  # bounded on the left alone
        return Pattern(kv_lengths, left, (0, -1))
    right = torch.where(below_end.any(1), right, torch.maximum(right, lengths - 1)).to(torch.int32)
    if bool((lengths >= torch.clamp(index[-1] + right + 1, max=kv_len)).all()):
        kv_lengths = None  # the diagonal alone ends there
    if left is None:
        return Pattern(kv_lengths, right, (-1, 0))
    told = after_start.any(1)
    width = int((right - left)[told][0])
    return Pattern(kv_lengths, right, (width, 0)) if width >= 0 else None


def _from_columns(first: Tensor, last: Tensor, some: Tensor, rows: Tensor, q_len: int) -> Optional[Pattern]:
    """A pattern of the keys that any row sees, and of the diagonal that each row's last and first key follow."""
    keys = rows.any(1)[:, None, None]
    if rows.shape[1] == 1 or first.shape[1] != q_len:
        return None
    index, far = torch.arange(q_len, device="cpu"), rows.shape[2] + q_len
    first_key = torch.where(some, first, far).amin(1)[:, None]
    last_key = torch.where(some, last, -far).amax(1)[:, None]
    below_end, after_start = some & (last < last_key), some & (first > first_key)
    least = torch.where(some, last_key - index, -far).amax(1)  # with these all see, and none sees, what they should
    most = torch.where(some, far, first_key - 1 - index).amin(1)
    if not bool((below_end | after_start).any() | (most < far).any()):
        return Pattern(keys=keys)
    ends, tells = torch.where(below_end, last - index, -far).amax(1), below_end.any(1)
    other = ends[tells][0] if bool(tells.any()) else least.amax()
    right = torch.where(tells, ends, torch.minimum(torch.maximum(other.expand_as(least), least), most)).to(torch.int32)
    starts, told = torch.where(after_start, first - index, far).amin(1), after_start.any(1)
    width = int((right - starts)[told][0]) if bool(told.any()) else -1
    return Pattern(None, right, (width, 0), keys=keys) if width >= 0 or not bool(told.any()) else None


def _diagonal(distance: Tensor, told: Tensor) -> Optional[Tensor]:
    """Key minus row of a bound, [batch], from the first row that tells; None where none does. Entries of which no row
    tells take another's."""
    if not bool(told.any()):
        return None
    entries = told.any(1)
    found = distance.gather(1, told.to(torch.uint8).argmax(1, keepdim=True))[:, 0]
    return torch.where(entries, found, found[entries][0]).to(torch.int32)


def _mask_of(pattern: Pattern, rows: Tensor) -> Tensor:
    """The mask that a pattern describes, [batch or 1, rows or 1, kv_len]."""
    row = torch.arange(rows.shape[1], dtype=torch.int32, device="cpu")
    begin = torch.zeros(1, 1, dtype=torch.int32, device="cpu")  # of what each row sees, [batch or 1, rows or 1]
    end = begin + rows.shape[2] if pattern.kv_lengths is None else pattern.kv_lengths[:, None]
    if pattern.window is not None and pattern.offsets is not None:
        centre = row + pattern.offsets[:, None]
        left, right = pattern.window
        begin = centre - left if left >= 0 else begin
        end = torch.minimum(end, centre + right + 1) if right >= 0 else end
    described = _between(begin, end, rows)
    return described if pattern.keys is None else described & pattern.keys[:, 0]


def _between(begin: Tensor, end: Tensor, rows: Tensor) -> Tensor:
    key = torch.arange(rows.shape[2], dtype=torch.int32, device=rows.device)
    return (key >= begin.to(rows.device)[..., None]) & (key < end.to(rows.device)[..., None])


def _packed(rows: Tensor, seen: _Seen, first: Tensor, last: Tensor, some: Tensor
            ) -> Tuple[Optional[Pattern], Optional[_Seen]]:
    """Sequences one behind the other, each causal, of a batch of one."""
    length = rows.shape[1]
    index = torch.arange(length, device="cpu")
    if not bool(some.all()) or not torch.equal(last[0], index):
        return None, None
    starts = torch.unique(first[0])
    own = starts[torch.searchsorted(starts, index, right=True) - 1]
    described = _seen(_between(own.to(torch.int32)[None], (index + 1).to(torch.int32)[None], rows))
    if not _same(described, seen):
        return None, None
    return Pattern(cu_seqlens=torch.cat([starts, torch.tensor([length], device="cpu")]).to(torch.int32)), described
