"""The named connections of attnd.torch and attnd.jax: what their functions take as `server`."""
from __future__ import annotations

import threading
from typing import Dict, NamedTuple, Optional

from ._problem import Precision
from .client import Client
from .errors import not_connected


class Connection(NamedTuple):
    """keep: whether servers are asked to keep tensors for backward. precision: of calls that name none."""

    client: Client
    keep: bool = False
    precision: Optional[Precision] = None


class Connections:
    """Connections of one module of attnd, by name. Any thread may call any method."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._by_name: Dict[str, Connection] = {}
        self._lock = threading.Lock()

    def put(self, name: str, connection: Connection) -> None:
        """Replaces one of that name."""
        with self._lock:
            self._by_name[name] = connection

    def take(self, name: str) -> Optional[Connection]:
        """Forgets it."""
        with self._lock:
            return self._by_name.pop(name, None)

    def client(self, name: str) -> Client:
        """Raises Unavailable, NOT_CONNECTED, where there is none of that name."""
        found = self._by_name.get(name)
        if found is None:
            raise not_connected(self._module, name)
        return found.client

    def precision(self, name: str) -> Optional[Precision]:
        """None too where there is no connection."""
        found = self._by_name.get(name)
        return None if found is None else found.precision

    def keeps(self, name: str) -> bool:
        found = self._by_name.get(name)
        return found is not None and found.keep


torch_connections = Connections("attnd.torch")
jax_connections = Connections("attnd.jax")
