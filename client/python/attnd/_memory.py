"""Memory of large results, reused after the last reference is gone.

A fresh array of 64 MiB costs its page faults at every call, an eighth of a call's time on the same host. Memory of an array
that has died is therefore kept for the next of its size, up to ATTND_CACHE_MIB (256) of it; 0 keeps none. Any thread.
"""
from __future__ import annotations

import collections
import os
import threading
from typing import Any, Deque, Dict, List, Sequence

import numpy as np

from ._arrays import Array
from .errors import wrong

LEAST_BYTES = 1 << 20  # smaller arrays come from malloc's own lists
_ALIGNMENT = 64


class _Cache:
    """Free memory by size, that of longest ago first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.free_bytes = 0
        self._free: Dict[int, List[Array]] = {}  # sizes in the order of their last return
        self._returned: Deque[Array] = collections.deque()  # by destructors, which may run in the midst of anything
        self._lock = threading.Lock()

    def take(self, size: int) -> Array:
        """`size` bytes, and what makes their begin aligned."""
        with self._lock:
            self._sort_in()
            found = self._free.get(size)
            if found:
                self.free_bytes -= size
                return found.pop()
        return np.empty(size + _ALIGNMENT, np.uint8)

    def give_back(self, memory: Array) -> None:
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            size = memory.nbytes - _ALIGNMENT
            self._free[size] = [*self._free.pop(size, []), memory]
            self.free_bytes += size
            while self.free_bytes > self.most_bytes:
                oldest = next(iter(self._free))
                if self._free[oldest]:
                    self._free[oldest].pop(0)
                    self.free_bytes -= oldest
                if not self._free[oldest]:
                    del self._free[oldest]


class _Owner:
    """Owns an array's memory: gives it back when the last view of it is gone."""

    def __init__(self, memory: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        begin = int(memory.__array_interface__["data"][0])
        self._memory, self._cache = memory, cache
        self.__array_interface__ = {"shape": tuple(shape), "typestr": dtype.str, "version": 3,
                                    "data": (begin + -begin % _ALIGNMENT, False)}

    def __del__(self) -> None:
        self._cache.give_back(self._memory)


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """A new array, not initialised."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    if size < LEAST_BYTES or cache.most_bytes == 0:
        return np.empty(tuple(shape), dtype)
    return np.asarray(_Owner(cache.take(size), shape, dtype))


def _new_cache() -> _Cache:
    """Also after a fork: a lock of the parent's may be held for ever, and its pages are shared."""
    global cache
    text = os.environ.get("ATTND_CACHE_MIB", "256")
    if not text.isdecimal():
        raise wrong("ATTND_CACHE_MIB", "a number of MiB", repr(text))
    cache = _Cache(int(text) << 20)
    return cache


cache = _new_cache()
os.register_at_fork(after_in_child=_new_cache)
