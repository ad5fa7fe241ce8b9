"""Leases of modules without a name: short, and renewed while the process that registered them lives, so that what a killed
one leaves is given back within minutes."""
from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Optional, Tuple

from ..errors import AttndError
from .module import Module

__all__ = ["renew"]

RemoteStack = Any  # stack.RemoteStack

_modules: Any = weakref.WeakKeyDictionary()  # by stack: its module's weak reference
_thread: Optional[Tuple[int, threading.Thread]] = None  # of this process
_lock = threading.Lock()


def renew(stack: RemoteStack, module: Module, lease: float) -> None:
    """Until the stack or the module is gone."""
    global _thread
    with _lock:
        _modules[stack] = weakref.ref(module)
        if _thread is None or _thread[0] != os.getpid():
            thread = threading.Thread(target=_run, args=(lease / 3,), name="attnd-leases", daemon=True)
            _thread = os.getpid(), thread
            thread.start()


def _run(seconds: float) -> None:
    wake = threading.Event()
    while not wake.wait(seconds):
        with _lock:
            found = [reference() for reference in _modules.values()]
        for module in found:
            if module is not None:
                try:
                    module.status(timeout=1.0)  # no longer: a daemon that drains waits for modules in use
                except (AttndError, OSError):
                    pass  # its next call says why
