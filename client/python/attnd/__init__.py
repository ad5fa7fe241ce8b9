"""attnd: exact multi-head attention, forward and backward, computed by a remote daemon.

    import attnd
    client = attnd.connect("127.0.0.1:7070")
    r = client.forward(q, k, v, causal="top_left")             # r.out, r.lse
    g = client.backward(dout, q, k, v, r.out, r.lse, causal="top_left")  # g.dq, g.dk, g.dv

attnd.torch, attnd.transformers and attnd.jax bring it into those libraries; attnd.local computes the same in NumPy.
"""
from ._call import Progress
from ._problem import Options
from ._residual import Residual
from .client import TLS, Client, connect
from .errors import (AttndError, Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument,
                     InvalidType, NotFound, OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated,
                     Unavailable, Unimplemented)
from .results import Device, ForwardResult, Gradients, Receipt, ServerInfo

__version__ = "0.1.0"

__all__ = ["AttndError", "Cancelled", "Client", "DataLoss", "DeadlineExceeded", "Device", "FailedPrecondition",
           "ForwardResult", "Gradients", "Internal", "InvalidArgument", "InvalidType", "NotFound", "Options",
           "OutOfRange", "PermissionDenied", "Progress", "Receipt", "Residual", "ResourceExhausted", "ServerInfo",
           "TLS", "Unauthenticated", "Unavailable", "Unimplemented", "connect"]
