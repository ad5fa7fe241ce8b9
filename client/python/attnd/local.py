"""The same attention computed here, by the daemon's engine for processors: `connect(..., fallback="local")` uses it.

Options, shapes and errors are those of Client.forward and Client.backward. Results have the bits of a daemon on a CPU of
this kind. With compute="float64" inner numbers are float64, in plain loops on one thread: for comparisons. Any thread may
call any function; Ctrl-C ends a call.
"""
from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import _arrays, _native
from ._arrays import Array, Tensor
from ._call import Call, CallOptions
from ._pairing import pair, remember
from ._problem import BackwardInputs, Problem, resolve
from ._receipt import Receipt
from ._wire import BackwardBuffers, ForwardBuffers
from .errors import wrong
from .results import ForwardCall, ForwardResult, Gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._problem import Options


def forward(q: object, k: object, v: object, *, return_lse: bool = True, compute: str = "float32",
            **options: Unpack[Options]) -> ForwardResult:
    """O and lse. See attnd.Client.forward."""
    problem = resolve(q, k, v, **options)
    o, lse, receipt = run_forward(problem, None, compute)
    given = _arrays.give(Tensor(problem.in_callers_order(o.bits), o.element))
    return remember(ForwardResult(given, lse if return_lse else None, receipt), ForwardCall(q, k, v, options))


def backward(dout: object, q: object, k: object = None, v: object = None, o: object = None, lse: object = None, *,
             dlse: object = None, bias_grad: bool = False, compute: str = "float32",
             **options: Unpack[Options]) -> Gradients:
    """dQ, dK, dV and, where they apply, dbias and dsink. See attnd.Client.backward."""
    problem, inputs, _ = pair(dout, q, k, v, o, lse, dlse, bias_grad, options)
    found, d_bias, d_sink, receipt = run_backward(problem, inputs, (None, None, None), bias_grad, compute)
    d_q, d_k, d_v = [_arrays.give(Tensor(problem.in_callers_order(t.bits), t.element)) for t in found]
    return Gradients(d_q, d_k, d_v, None if d_bias is None else d_bias.reshape(problem.bias_shape), d_sink, receipt)


def run_forward(problem: Problem, callers: Optional[Tensor], compute: str = "float32"
                ) -> Tuple[Tensor, Optional[Array], Callable[[], Receipt]]:
    """O in the caller's element, heads first, and lse. callers: the array that receives O."""
    engine, buffers = _engine(compute), ForwardBuffers(problem, callers, True, False)
    call = engine.run("forward", buffers.packed.problem, buffers.tensors)
    return buffers.finish(), buffers.lse, call.receipt


def run_backward(problem: Problem, inputs: BackwardInputs, callers: Sequence[Optional[Tensor]], bias_grad: bool,
                 compute: str = "float32"
                 ) -> Tuple[List[Tensor], Optional[Array], Optional[Array], Callable[[], Receipt]]:
    """dQ, dK and dV as run_forward gives O, dbias in 4 dimensions, and dsink."""
    engine, buffers = _engine(compute), BackwardBuffers(problem, inputs, callers, bias_grad)
    call = engine.run("backward", buffers.packed.problem, buffers.tensors)
    return buffers.finish(), buffers.d_bias, buffers.d_sink, call.receipt


class _Engine:
    """The library's engine, with its threads. It lives as long as its process, which may end while a thread computes."""

    def __init__(self, compute: str) -> None:
        self._library = _native.library()
        self._pointer = self._library.attnd_local_new(0, int(compute == "float64"))

    def run(self, direction: str, problem: _native.Problem, tensors: Any) -> Call:
        call = Call(self._library, CallOptions())
        call.run(getattr(self._library, f"attnd_local_{direction}"), self._pointer, ctypes.byref(problem),
                 ctypes.byref(tensors))
        return call


_engines: Dict[Tuple[int, str], _Engine] = {}  # by the process's generation and `compute`


def _engine(compute: str) -> _Engine:
    """Made by the first call."""
    if compute not in ("float32", "float64"):
        raise wrong("compute", '"float32" or "float64"', repr(compute))
    with _native.lock():
        key = _native.generation(), compute
        if key not in _engines:
            _engines[key] = _Engine(compute)
        return _engines[key]
