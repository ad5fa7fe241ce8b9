"""A backward call and the forward call that it belongs to: what it takes from there, and what must not contradict it.

A ForwardResult knows its call, and its `lse` is recognised while that array lives. Other options than forward's would
give wrong gradients without a word, so they are refused.
"""
from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Dict, List, NamedTuple, Optional, Tuple, cast

import numpy as np

from . import _arrays
from ._arrays import Array, Tensor
from ._problem import BackwardInputs, Options, Problem, resolve, resolve_gradients, resolve_lse, resolve_rows
from .errors import InvalidArgument, Unimplemented, wrong, wrong_type
from .masks.nodes import Mask
from .results import ForwardCall, ForwardResult

if TYPE_CHECKING:
    from ._residual import Residual


class Backward(NamedTuple):
    """A backward call, checked. residual: that of the forward result, if backward was given one."""

    problem: Problem
    inputs: BackwardInputs
    residual: Optional[Residual]


def remember(result: ForwardResult, call: ForwardCall) -> ForwardResult:
    """The result, from which backward can tell its call. Calls of this package's own operators, whose arrays are Tensors,
    keep their options themselves."""
    if type(call.q) is not Tensor:
        result.call = call
        if result.lse is not None:
            key = id(result.lse)
            _calls[key] = weakref.ref(result.lse, functools.partial(_forget, key)), call.options
    return result


def pair(dout: object, q: object, k: object, v: object, o: object, lse: object, dlse: object, bias_grad: bool,
         options: Options) -> Backward:
    """A call backward(dout, q, k, v, o, lse, ...), or backward(dout, r, ...) with r in the place of q."""
    residual: Optional[Residual] = None
    if isinstance(q, ForwardResult):
        _check_alone(k=k, v=v, o=o, lse=lse)
        o, lse, residual = _out_of(q), q.lse, q.residual
        q, k, v, before = _call_of(q)
        given, options = options, cast(Options, {**before, **options})
    else:
        before = given = options
        known = _calls.get(id(lse))
        if known is not None and known[0]() is lse:
            before = known[1]
            given = cast(Options, {**dict.fromkeys(before), **options})
    problem = resolve(q, k, v, bias_grad, **options)
    inputs = BackwardInputs(resolve_rows(problem, "o", o), resolve_lse(problem, "lse", lse),
                            *resolve_gradients(problem, dout, dlse))
    _refuse_flat_rows(problem, inputs)
    if not all(name in before and _alike(value, before.get(name)) for name, value in given.items()):
        _check_contradictions(problem, q, k, v, before, options)
    return Backward(problem, inputs, residual)


# Below it float32 has no digits left for ln n, so that backward could not tell the probabilities from lse.
_LOWEST_LSE = -5e5


def _refuse_flat_rows(problem: Problem, inputs: BackwardInputs) -> None:
    """Rows that a finite bias hides whole, where they have a gradient."""
    if problem.bias is None:
        return
    flat = (inputs.lse < _LOWEST_LSE) & np.isfinite(inputs.lse)
    if not flat.any():
        return
    d_o = inputs.d_o.bits[flat]
    has_gradient = np.any(d_o & 0x7fff) if inputs.d_o.element == "bf16" else np.any(d_o)
    if has_gradient or (inputs.d_lse is not None and np.any(inputs.d_lse[flat])):
        raise Unimplemented("bias: a row all of whose keys have a bias near the lowest number is an average whose gradient "
                            "is not computed: hide keys by -inf or a bool mask, or give the row's output no gradient "
                            "(out.masked_fill(rows, 0))", field="bias")


_calls: Dict[int, Tuple[weakref.ref[Array], Options]] = {}  # by the id of an lse that lives, the options of its call


def _forget(key: int, lse: weakref.ref[Array]) -> None:
    if key in _calls and _calls[key][0] is lse:
        del _calls[key]


def _check_alone(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise wrong_type(name, "nothing beside forward's result, which has it", value)


def _call_of(result: ForwardResult) -> ForwardCall:
    if result.call is None:
        raise wrong("q", "a result that forward gave in this process, or q, k, v, o and lse", "one without its inputs")
    if result.lse is None:
        raise wrong("lse", "that of forward, which return_lse=False has left out", None)
    return result.call


def _out_of(result: ForwardResult) -> object:
    """Bfloat16 without ml_dtypes is given as its bits."""
    return Tensor(result.out, "bf16") if result.out.dtype == np.uint16 else result.out


def _alike(one: object, other: object) -> bool:
    """Whether two values of an option say the same at the first look."""
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)


def _check_contradictions(problem: Problem, q: object, k: object, v: object, before: Options, options: Options) -> None:
    try:
        forward = resolve(q, k, v, **before)
    except InvalidArgument:
        raise wrong("q, k, v", "the arrays that forward had", "others") from None
    for name, same in _comparison(forward, problem):
        if not same:
            if name == "align" and before.get("align") is None and options.get("align") is None:
                name = "causal"  # which says the alignment too
            raise wrong(name, f"{_show(before.get(name), 'the array')}, as forward had",
                        _show(options.get(name), "another array"))


def _comparison(a: Problem, b: Problem) -> List[Tuple[str, bool]]:
    """By option, whether two problems of the same tensors have it alike. How a server computes, `accumulate` and
    `allow_nondeterministic`, may differ."""
    drops = a.dropout_threshold > 0
    return [
        ("layout", a.layout == b.layout), ("causal", a.causal == b.causal), ("window", a.window == b.window),
        ("align", _same_diagonal(a, b)), ("precision", a.element == b.element),
        ("scale", a.resolved_scale() == b.resolved_scale()), ("softcap", a.softcap == b.softcap),
        ("zero_rest", a.zero_rest == b.zero_rest), ("dropout_p", a.dropout_threshold == b.dropout_threshold),
        ("seed", a.seed == b.seed or not drops), ("offset", a.offset == b.offset or not drops),
        *[(name, _equal(getattr(a, name), getattr(b, name)))
          for name in ("kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sink")],
        ("mask", a.described == b.described and _equal(a.mask, b.mask)),
        ("bias", _equal(a.bias and _arrays.to_float32(a.bias), b.bias and _arrays.to_float32(b.bias))),
    ]


def _same_diagonal(a: Problem, b: Problem) -> bool:
    relative = a.described is not None and a.described.relative
    used = a.causal or a.window != (-1, -1) or a.alibi_slopes is not None or relative
    if not used or (a.alignment == b.alignment and _equal(a.offsets, b.offsets)):
        return True
    return all(one.offset == other.offset for one, other in zip(a.sequences(), b.sequences()))


def _equal(a: Optional[Array], b: Optional[Array]) -> bool:
    """Whether two arrays, which may repeat numbers by broadcasting, say the same."""
    if a is None or b is None:
        return a is b
    if a is b or a.ndim != b.ndim:
        return a is b
    one, other = np.broadcast_arrays(a, b)
    return bool(np.array_equal(one, other, equal_nan=a.dtype.kind == "f"))


def _show(value: object, array: str) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float, str, tuple, list, Mask)) else array
