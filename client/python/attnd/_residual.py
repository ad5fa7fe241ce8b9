"""Residuals: servers keep tensors of a forward call for its backward."""
from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Optional

from . import _native
from .errors import wrong_type

if TYPE_CHECKING:
    from ._wire import Wire


class NativeResidual:
    """The C library's handle, which a forward call fills. Freed with its last reference, without blocking, and only in
    the process that made it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.pointer = ctypes.c_void_p()
        self._library, self.generation = library, _native.generation()

    @property
    def bytes_held(self) -> int:
        return int(self._library.attnd_residual_bytes(self.pointer))

    def __del__(self) -> None:
        if self.pointer and self.generation == _native.generation():
            self._library.attnd_residual_free(self.pointer)


class Residual:
    """Names what servers keep of one forward call (q, k, v, mask, bias, o, lse), so that its backward sends dout alone.

    Client.backward(dout, r) uses that of r, and its long form takes it with the same arrays and options; it may be used
    again, by any thread. Servers may evict it at any time: backward then sends everything, and its result is bitwise the
    same. The memory is freed with the object or by release(); neither blocks. In a forked child it holds nothing.
    """

    __slots__ = ("wire", "_native", "__weakref__")

    def __init__(self, native: NativeResidual, wire: Wire) -> None:
        self.wire, self._native = wire, native  # type: Wire, Optional[NativeResidual]

    def native(self) -> Optional[NativeResidual]:
        """The handle, if it can be used in this process."""
        found = self._native
        return found if found is not None and found.generation == _native.generation() else None

    @property
    def bytes_held(self) -> int:
        """Bytes that servers hold for it, as far as is known here."""
        found = self.native()
        return 0 if found is None else found.bytes_held

    def release(self) -> None:
        """Frees the servers' memory once running backward calls have ended."""
        self._native = None

    def __reduce__(self) -> Any:
        raise wrong_type("residual", "one that stays in its process; backward elsewhere sends the arrays", self)

    def __repr__(self) -> str:
        return f"<attnd.Residual of {self.bytes_held} bytes>"
