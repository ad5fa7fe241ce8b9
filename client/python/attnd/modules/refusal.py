"""The refusal of a module that cannot be offloaded."""
from __future__ import annotations

from typing import NoReturn

from torch import nn

__all__ = ["refuse"]


def refuse(module: nn.Module, reason: str) -> NoReturn:
    raise TypeError(f"{type(module).__name__} cannot be offloaded: {reason}")
