"""attnd.ray: daemons as actors of a Ray cluster.

    with attnd.ray.pool(gpus=8, insecure=True) as pool:        # within Ray's network, which is trusted
        client = attnd.connect(pool.addresses)

Ray starts a daemon again, here or on another node, when it or its node fails. Each node needs attnd-server.
"""
from __future__ import annotations

import os
import threading
import time
from importlib import import_module
from types import TracebackType
from typing import Any, Dict, List, Optional, Type

from . import _checks
from .daemon import serve
from .errors import DeadlineExceeded, Unavailable, brief, wrong


@brief
def pool(gpus: int = 0, *, daemons: Optional[int] = None, resources: Optional[Dict[str, float]] = None,
         folder: Optional[str] = None, timeout: float = 300.0, **flags: Any) -> Pool:
    """Starts daemons as actors and returns once all of them serve. They end with the pool, or with this program.

    gpus: of all daemons together, each of which has a whole number of them. 0: daemons on CPUs.
    daemons: how many. None: one for each GPU.
    resources: of Ray that each daemon takes besides, such as {"V100": 1}.
    folder: on a file system that all nodes share: each daemon writes its address into a file there, anew after a
        restart, so that attnd.connect("dir:FOLDER") follows daemons to other nodes.
    timeout: seconds until they serve.
    flags: as attnd.serve's. Daemons listen at the address that Ray knows their node by, so that one of insecure=True, for
        a network that is trusted, or certificates is needed.

    Raises DeadlineExceeded where the cluster has no room for them, else Unavailable with what the daemon says.
    """
    count = gpus if daemons is None else daemons
    if count < 1:
        raise wrong("gpus", "1 or more, or daemons=", gpus)
    if gpus % count != 0:
        raise wrong("gpus", f"as many for each of {count} daemons", gpus)
    if gpus > 0:
        flags = {"backend": "cuda", **flags}
    ray = import_module("ray")
    actor = ray.remote(_Daemon).options(num_cpus=0, num_gpus=gpus // count, resources=resources, max_restarts=-1,
                                        max_task_retries=-1)
    made = Pool([actor.remote(f"attnd-{number}", folder, flags) for number in range(count)])
    try:
        made.wait(_checks.seconds("timeout", timeout))
    except BaseException:
        made.stop()
        raise
    return made


class Pool:
    """Daemons that attnd.ray.pool has started. As a context it stops them at its end."""

    def __init__(self, actors: List[Any]) -> None:
        self._actors = actors

    @property
    def addresses(self) -> List[str]:
        """Where they are now; waits for those that are being started again."""
        return self.wait(300.0)

    def wait(self, timeout: float) -> List[str]:
        """The addresses, once all serve."""
        ray = import_module("ray")
        try:
            addresses: List[str] = ray.get([actor.address.remote() for actor in self._actors], timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(f"{len(self._actors)} daemons did not serve within {timeout} seconds; Ray's cluster has "
                                   f"{ray.cluster_resources()}") from None
        except ray.exceptions.RayError as error:
            raise Unavailable(f"no daemon in Ray's cluster: {str(error).strip().splitlines()[-1]}") from None
        return addresses

    def stop(self, timeout: float = 10.0) -> None:
        """Ends them: running calls finish, for `timeout` seconds at most."""
        ray = import_module("ray")
        actors, self._actors = self._actors, []
        stops = [actor.stop.remote(timeout) for actor in actors]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=timeout + 10)
        for actor in actors:
            ray.kill(actor)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.stop()


class _Daemon:
    """The actor. It ends with its daemon, so that Ray makes it anew."""

    def __init__(self, name: str, folder: Optional[str], flags: Dict[str, Any]) -> None:
        host = import_module("ray").util.get_node_ip_address()
        self._daemon = serve(f"[{host}]:0" if ":" in host else f"{host}:0", **flags)
        self._file = None if folder is None else os.path.join(folder, f"{name}.addr")
        if self._file is not None:
            hidden = os.path.join(os.path.dirname(self._file), f".{name}.{os.getpid()}")
            with open(hidden, "w") as file:
                file.write(self._daemon.address + "\n")
            os.replace(hidden, self._file)
        self._stopping = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self._daemon.running:
            time.sleep(0.1)
        if not self._stopping:
            os._exit(1)

    def address(self) -> str:
        return self._daemon.address

    def stop(self, timeout: float) -> None:
        self._stopping = True
        if self._file is not None:
            os.remove(self._file)
        self._daemon.stop(timeout)
