"""Attention on remote daemons for asyncio.

    import attnd.aio
    async with await attnd.aio.connect("127.0.0.1:7070") as client:
        out, lse = await client.forward(q, k, v, causal="top_left")

Each call has a thread of the client while it runs; what takes time in it is native and holds no lock of Python.
"""
from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Type, TypeVar, Union

from . import _checks
from ._arrays import ArrayLike
from ._call import Progress
from .client import Client, ConnectOptions, ConnectPrecision
from .client import connect as _connect
from .masks.nodes import Mask
from .results import ForwardResult, Gradients, MaskReport, ServerInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncClient", "connect"]

_Found = TypeVar("_Found")


class _Gone(Exception):
    """Ends a call whose coroutine was cancelled."""


def __dir__() -> List[str]:
    return list(__all__)


async def connect(address: Union[None, str, Sequence[str]] = None, *, calls: int = 32,
                  precision: ConnectPrecision = None, **options: Unpack[ConnectOptions]) -> AsyncClient:
    """An AsyncClient by attnd.connect's arguments. calls: that run at a time, 1..1024; further ones wait."""
    threads = _checks.integer("calls", calls, 1, 1024)
    made = await asyncio.to_thread(functools.partial(_connect, address, precision=precision, **options))
    return AsyncClient(made, threads)


class AsyncClient:
    """attnd.Client's methods as coroutines, for one event loop at a time. Made by attnd.aio.connect.

    A coroutine that is cancelled cancels its call and ends once the call has: its arrays are then neither read nor
    written any more. A progress function is called in the call's thread.
    """

    def __init__(self, client: Client, calls: int) -> None:
        self.client = client
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="attnd.aio")

    async def forward(self, q: ArrayLike, k: ArrayLike, v: ArrayLike, **arguments: Any) -> ForwardResult:
        """Client.forward."""
        return await self._call(self.client.forward, q, k, v, **arguments)

    async def backward(self, dout: ArrayLike, *inputs: Any, **arguments: Any) -> Gradients:
        """Client.backward."""
        return await self._call(self.client.backward, dout, *inputs, **arguments)

    async def info(self, index: int = 0, *, timeout: Optional[float] = None) -> ServerInfo:
        """Client.info."""
        return await self._run(functools.partial(self.client.info, index, timeout=timeout))

    async def compile_mask(self, mask: Mask, /, **arguments: Any) -> MaskReport:
        """Client.compile_mask."""
        return await self._run(functools.partial(self.client.compile_mask, mask, **arguments))

    async def serving(self, index: int = 0, *, timeout: Optional[float] = None) -> bool:
        """Client.serving."""
        return await self._run(functools.partial(self.client.serving, index, timeout=timeout))

    async def close(self) -> None:
        """Disconnects once calls that still run have ended."""
        self.client.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                        traceback: Optional[TracebackType]) -> None:
        await self.close()

    async def _call(self, function: Callable[..., _Found], *inputs: Any,
                    progress: Optional[Callable[[Progress], None]] = None, **arguments: Any) -> _Found:
        gone = threading.Event()

        def watch(now: Progress) -> None:
            if gone.is_set():
                raise _Gone
            if progress is not None:
                progress(now)

        return await self._run(functools.partial(function, *inputs, progress=watch, **arguments), gone)

    async def _run(self, work: Callable[[], _Found], gone: Optional[threading.Event] = None) -> _Found:
        running = self._threads.submit(work)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if gone is not None:
                gone.set()
            if not running.cancel():  # it has begun
                await asyncio.wait([future])
                future.exception()  # of the call that was cancelled: nobody else asks for it
            raise
