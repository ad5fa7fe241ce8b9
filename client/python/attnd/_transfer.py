"""Tensors of one call on their way between a CUDA device and the host.

Everything moves through page-locked memory of torch's own cache. Copies to the host are queued on the device's current
stream, one behind the other, and waited for once a call; copies back are queued and not waited for: what reads the
result is on the same stream. Tensors of the host pass through untouched.
"""
from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Set

import numpy as np
import torch
from torch import Tensor

from . import _memory
from .errors import wrong_type

_INTEGERS: Dict[int, np.dtype[Any]] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}  # by size, as torch has them too


class Transfer:
    """The copies of one call. One thread's."""

    def __init__(self) -> None:
        self._waiting_for: Set[torch.device] = set()

    def fetch(self, field: str, tensor: Tensor, to: Optional[torch.dtype] = None) -> Tensor:
        """The tensor on the host, to be read after wait(): itself, or a copy of the same strides. `to`: of this type."""
        if tensor.device.type == "cpu":
            return cast(tensor.detach().resolve_neg(), to or tensor.dtype)
        if tensor.device.type != "cuda":
            raise wrong_type(field, "a tensor on the CPU or a CUDA device", tensor)
        once = _without_broadcast(tensor.detach()).to(to or tensor.dtype)
        host = torch.empty_like(once, device="cpu", pin_memory=True)
        host.copy_(once, non_blocking=True)
        self._waiting_for.add(tensor.device)
        return host.expand(tensor.shape)

    def fetch_if(self, field: str, tensor: Optional[Tensor]) -> Optional[Tensor]:
        return None if tensor is None else self.fetch(field, tensor)

    def wait(self) -> None:
        """Returns when what was fetched is there."""
        for device in self._waiting_for:
            torch.cuda.current_stream(device).synchronize()
        self._waiting_for.clear()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the host for a result that goes to `device`."""
    if device.type == "cpu":
        bits = torch.from_numpy(_memory.empty(shape, _INTEGERS[dtype.itemsize]))
        return bits.view(dtype)
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)


def cast(tensor: Tensor, to: torch.dtype) -> Tensor:
    """The tensor, or on the host a copy of the same strides, of this type, in memory of results that are gone."""
    if tensor.dtype == to or tensor.device.type != "cpu" or not tensor.is_contiguous() or to.itemsize not in _INTEGERS:
        return tensor.to(to)
    return empty(tensor.shape, to, tensor.device).copy_(tensor)


def largest(tensor: Tensor) -> float:
    """The largest of its absolute numbers, of which there is one at least; NaN where one is. Tens of times as fast as
    torch's norm."""
    low, high = torch.aminmax(tensor.detach())
    return max(-float(low), float(high))


def raised(tensor: Tensor, power: float) -> Tensor:
    """The tensor times a power of two in float16, rounded once, without float32 between."""
    tensor = tensor.detach()
    if power == 1:
        return cast(tensor, torch.float16)
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    if tensor.device.type != "cpu":
        return torch.mul(tensor, power, out=torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device))
    return torch.mul(tensor, power, out=empty(tensor.shape, torch.float16, tensor.device))


def send(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on its device, in the order of that device's current stream. The host's memory must not be written any
    more; torch's cache holds it until the copy has ended."""
    if device.type == "cpu":
        return host
    if not host.is_pinned():
        host = empty(host.shape, host.dtype, device).copy_(host)
    return host.to(device, non_blocking=True)


def _without_broadcast(tensor: Tensor) -> Tensor:
    """With each dimension that a broadcast repeated (stride 0) cut to 1."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
