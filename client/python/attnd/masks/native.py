"""Masks by description as the C library has them."""
from __future__ import annotations

from typing import Optional

from .. import _native
from .._call import Call, CallOptions
from .nodes import Mask
from .sizes import Sizes, remember
from .wire import serialize


class NativeMask:
    """A mask by description as the library has it, for problems of some sizes. Freed as a Handle is."""

    def __init__(self, mask: Mask, sizes: Sizes) -> None:
        self.pointer = None  # first, for __del__
        self._library, self._generation = _native.library(), _native.generation()
        spec, call = serialize(mask, sizes), Call(self._library, CallOptions())
        self.pointer = self._library.attnd_mask_new(spec, len(spec), *sizes, call.pointer)
        if not self.pointer:
            raise call.error()

    def __del__(self) -> None:
        if self.pointer and self._generation == _native.generation():
            self._library.attnd_mask_free(self.pointer)


def native_mask(mask: Mask, sizes: Sizes) -> NativeMask:
    """Made once for a mask and sizes in a process, so that a further call costs nothing."""
    key = _native.generation(), sizes
    found: Optional[NativeMask] = mask.memo.get(key)
    if found is None:
        found = NativeMask(mask, sizes)
        remember(mask, key, found)
    return found
