"""Tensors of PyTorch as the numbers that a module takes and gives."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _native
from .._arrays import Tensor as Bits
from .._transfer import Transfer, cast, send

__all__ = ["bits_of", "digest", "host", "own", "tensor_of"]

_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def host(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def bits_of(tensor: Tensor, element: str) -> Bits:
    transfer = Transfer()
    host = transfer.fetch("x", tensor, _TYPES[element]).contiguous()
    transfer.wait()
    return Bits(host.view(torch.int16).numpy().view("u2") if element == "bf16" else host.numpy(), element)


def tensor_of(array: Any, element: str, to: torch.dtype, device: torch.device) -> Tensor:
    made = torch.from_numpy(array.view("i2")).view(torch.bfloat16) if element == "bf16" else torch.from_numpy(array)
    return cast(send(made, device), to)


@torch.inference_mode(False)
def own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def digest(tensor: Tensor) -> int:
    """Changes with the tensor's bits."""
    bits = tensor.detach()
    if bits.device.type != "cpu":
        words = bits.contiguous().view(torch.int32 if bits.element_size() == 4 else torch.int16).reshape(-1).to(torch.int64)
        places = torch.arange(1, 2 * words.numel(), 2, device=words.device)
        return hash((int(words.sum()), int((words * places * 0x9E3779B97F4A7C1).sum())))
    bits = bits.contiguous()
    return int(_native.library().attnd_digest(bits.data_ptr(), bits.numel() * bits.element_size()))
