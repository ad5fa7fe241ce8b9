"""attnd: exact multi-head attention, forward and backward, computed by a remote daemon.

    import attnd
    client = attnd.connect("127.0.0.1:7070")
    r = client.forward(q, k, v, causal="top_left")             # r.out, r.lse
    g = client.backward(dout, r)                               # g.dq, g.dk, g.dv

attnd.torch, attnd.transformers and attnd.jax bring it into those libraries; attnd.local computes the same here, and
attnd.serve() starts a daemon here, attnd.ray several on a Ray cluster.
What is here, NumPy included, is loaded when it is first used.
"""
from typing import TYPE_CHECKING, Any, List

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import errors, local, metrics
    from ._call import Progress
    from ._problem import Options
    from ._residual import Residual
    from .client import TLS, Client, connect
    from .daemon import Daemon, serve
    from .errors import (AttndError, Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, Internal,
                         InvalidArgument, InvalidType, NotFound, OutOfRange, PermissionDenied, ResourceExhausted,
                         Unauthenticated, Unavailable, Unimplemented)
    from .modules import SGD, AdamW, register
    from .results import Device, ForwardResult, Gradients, MaskReport, Receipt, ServerInfo

__all__ = ["AdamW", "AttndError", "Cancelled", "Client", "Daemon", "DataLoss", "DeadlineExceeded", "Device",
           "FailedPrecondition", "ForwardResult", "Gradients", "Internal", "InvalidArgument", "InvalidType", "MaskReport",
           "NotFound", "Options", "OutOfRange", "PermissionDenied", "Progress", "Receipt", "Residual", "ResourceExhausted",
           "SGD", "ServerInfo", "TLS", "Unauthenticated", "Unavailable", "Unimplemented", "connect", "errors", "local",
           "metrics", "modules", "register", "serve"]

_HOMES = {"Progress": "_call", "Options": "_problem", "Residual": "_residual", "TLS": "client", "Client": "client",
          "connect": "client", "Daemon": "daemon", "serve": "daemon", "Device": "results", "ForwardResult": "results",
          "Gradients": "results", "MaskReport": "results", "Receipt": "results", "ServerInfo": "results",
          "AdamW": "modules", "SGD": "modules", "register": "modules"}  # the rest are errors
_MODULES = ("client", "daemon", "errors", "local", "metrics", "modules", "results")


def __getattr__(name: str) -> Any:
    from importlib import import_module
    if name in _MODULES:
        return import_module("." + name, __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("." + _HOMES.get(name, "errors"), __name__), name)
    return value


def __dir__() -> List[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
