"""jax.nn.dot_product_attention on a remote daemon, differentiable, inside jit and vmap.

    import attnd.jax
    attnd.jax.connect("127.0.0.1:7070")
    out = attnd.jax.dot_product_attention(q, k, v, is_causal=True)

The call leaves the program through jax.pure_callback. An eager call that fails raises. Out of a compiled program nothing
may be raised: its result is NaN, and the next attnd.jax call, or attnd.jax.check(), raises its error.
"""
from __future__ import annotations

import functools
import logging
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np

from . import _checks
from ._connection import Connection
from ._connection import jax_connections as _connections
from ._problem import resolve
from .client import Client
from .client import connect as _connect
from .errors import InvalidArgument, reworded, wrong, wrong_type
from .masks.nodes import Mask

__all__ = ["check", "connect", "dot_product_attention"]

_result: Any = jax.ShapeDtypeStruct
_wait: Any = jax.block_until_ready
_errors: Dict[str, BaseException] = {}
_lock = threading.Lock()


def connect(address: Union[None, str, Sequence[str], Client] = None, *, name: str = "", **options: Any) -> Client:
    """Connects this module: attnd.connect's arguments, or a Client that exists. `name` is dot_product_attention's
    `server`. Connecting again replaces, and forgets the errors of calls before."""
    made = address if isinstance(address, Client) else _connect(address, **options)
    _connections.put(name, Connection(made))
    with _lock:
        _errors.pop(name, None)
    return made


def check(server: str = "") -> None:
    """Raises the error of a call that has failed since the last check, if any."""
    with _lock:
        error = _errors.pop(server, None)
    if error is not None:
        raise error


def dot_product_attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *,
                          scale: Optional[float] = None, is_causal: bool = False, query_seq_lengths: Any = None,
                          key_value_seq_lengths: Any = None,
                          local_window_size: Union[None, int, Tuple[int, int]] = None,
                          implementation: Optional[str] = None, return_residual: bool = False,
                          server: str = "") -> Any:
    """As jax.nn.dot_product_attention.

    query [batch, q_len, q_heads, dim], key and value [batch, kv_len, kv_heads, dim], or all without batch; bias (with
    gradient) and mask (True = attend) broadcast to [batch, q_heads, q_len, kv_len]; mask may be an attnd.masks.Mask.
    Returns an array like query, and with return_residual the log-sum-exp, float32 [batch, q_len, q_heads], which is
    differentiable too. Rows beyond query_seq_lengths are 0, and so are rows that may attend to nothing (JAX averages
    there). float16, bfloat16 or float32. implementation says nothing here: the daemon's is used. Without a connection it
    raises at once, while tracing too.
    """
    check(server)
    _connections.client(server)  # raises where there is none
    query, key, value = [_array(*x) for x in (("query", query), ("key", key), ("value", value))]
    if not {query.ndim, key.ndim, value.ndim} <= {3, 4}:
        raise wrong("query, key, value", "3 or 4 dimensions each", [x.shape for x in (query, key, value)])
    if implementation is not None:
        _checks.word("implementation", implementation, ("xla", "cudnn"), 'None, "xla" or "cudnn"')
    shape, return_residual = query.shape, _checks.flag("return_residual", return_residual)
    query, key, value = [x[None] if x.ndim == 3 else x for x in (query, key, value)]
    window: Any = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    for side, size in zip(("left", "right"), window if isinstance(window, (tuple, list)) else ()):
        if isinstance(size, int) and size < 0:  # to JAX a bound on the other side of the diagonal, to attnd none
            raise wrong(f"local_window_size {side}", "0..2147483647", size)
    described, mask = (mask, None) if isinstance(mask, Mask) else (None, mask)
    statics = _Statics(_checks.number("scale", scale, None), _checks.flag("is_causal", is_causal),
                       tuple(window) if isinstance(window, list) else window, described, server)
    lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, len(query), key.shape[1])
    rows = _lengths("query_seq_lengths", query_seq_lengths, len(query), query.shape[1])
    four = [None if x is None else x[(None,) * (4 - x.ndim)] for x in (_array("bias", bias), _array("mask", mask))]
    if 0 in (*query.shape[:2], key.shape[1]):
        _check_uncomputed(statics, query, key, value, *four)
        out, lse = jnp.zeros((*shape[:-1], value.shape[-1]), query.dtype), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
        return (out, lse) if return_residual else out
    _check(statics, query, key, value, *four)
    seen = None if rows is None else jnp.arange(query.shape[1])[None, None, :, None] < rows[:, None, None, None]
    if seen is not None and described is None:
        four[1] = seen if four[1] is None else jnp.logical_and(four[1], seen)
    out, lse = _attend(statics, query, key, value, four[0], four[1], lengths)
    if seen is not None and described is not None:  # a description stands alone: what lies beyond goes out of its result
        out, lse = jnp.where(seen[:, 0, :, :, None], out, 0), jnp.where(seen[..., 0], lse, -jnp.inf)
    out, residual = out.reshape(*shape[:-1], value.shape[-1]), jnp.swapaxes(lse, 1, 2).reshape(shape[:-1])
    return (out, residual) if return_residual else out


def _array(name: str, value: Any) -> Any:
    """None, or what jnp.asarray makes of it."""
    try:
        return value if value is None and name in ("bias", "mask") else jnp.asarray(value)
    except (TypeError, ValueError):
        raise wrong_type(name, "an array", value) from None


def _lengths(name: str, lengths: Any, batch: int, most: int) -> Any:
    """int32 [batch], those beyond `most` as `most`, which is all that there is."""
    if lengths is None:
        return None
    lengths = _array(name, lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise wrong(name, "integers", f"an array of {lengths.dtype}")
    if lengths.shape != (batch,):
        raise wrong(name, f"shape {(batch,)}", lengths.shape)
    return jnp.clip(lengths, 0, most).astype(jnp.int32)


_NAMES = {"q": "query", "k": "key", "v": "value", "window": "local_window_size"}


def _check(statics: _Statics, *arrays: Any) -> None:
    """Raises here, while tracing, what Client.forward would raise of these shapes, types and options."""
    q, k, v, bias, mask = [None if x is None else np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in arrays]
    try:
        resolve(q, k, v, **{"bias": bias, "mask": mask, **statics.options()})
    except InvalidArgument as error:
        raise reworded(error, _NAMES) from None


def _check_uncomputed(statics: _Statics, q: Any, k: Any, v: Any, *scores: Any) -> None:
    """The same of a call that gives zeros without a server, as it has no batch, queries or keys."""
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    for name, x in (("key", k), ("value", v)):
        if len(x) != len(q):
            raise wrong(name, f"batch {len(q)}, as query has", len(x))
    if v.shape[1] != k.shape[1]:
        raise wrong("value", f"length {k.shape[1]}, as key has", v.shape[1])
    for name, x in zip(("bias", "mask"), scores):
        if x is not None and (x.ndim > 4 or any(size not in (1, most) for size, most in zip(x.shape, full))):
            raise wrong(name, f"a shape that broadcasts to {full} = [batch, q_heads, q_len, kv_len]", x.shape)
    _check(statics, *[_result((1, 1, *x.shape[2:]), x.dtype) for x in (q, k, v)],
           *[None if x is None else _result((1,) * 4, x.dtype) for x in scores])


class _Statics(NamedTuple):
    """Options that are known while tracing."""

    scale: Optional[float]
    is_causal: bool
    window: Optional[Tuple[int, int]]
    described: Optional[Mask]
    server: str

    def options(self) -> Dict[str, Any]:
        said: Dict[str, Any] = {"layout": "blhd", "scale": self.scale, "causal": self.is_causal, "align": "top_left",
                                "window": self.window}
        return said if self.described is None else {**said, "mask": self.described}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(statics: _Statics, q: Any, k: Any, v: Any, bias: Any, mask: Any, lengths: Any) -> Tuple[Any, Any]:
    batch, q_len, heads = q.shape[:3]
    shapes = (_result((*q.shape[:3], v.shape[3]), q.dtype),
              _result((batch, heads, q_len), jnp.float32))

    def run(client: Client, q: Any, k: Any, v: Any, bias: Any, mask: Any, lengths: Any) -> Tuple[Any, ...]:
        r = client.forward(q, k, v, **{"bias": bias, "mask": mask, "kv_lengths": lengths, **statics.options()})
        return r.out, r.lse

    out, lse = _call(statics, run, shapes, q, k, v, bias, mask, lengths)
    return out, lse


def _attend_forward(statics: _Statics, *arguments: Any) -> Tuple[Any, Any]:
    out, lse = _attend(statics, *arguments)
    return (out, lse), (*arguments, out, lse)


def _attend_backward(statics: _Statics, saved: Any, cotangents: Any) -> Tuple[Any, ...]:
    q, k, v, bias, mask, lengths, o, lse = saved
    shapes = [_result(x.shape, x.dtype) for x in (q, k, v)]
    shapes.append(_result((0,) if bias is None else bias.shape, jnp.float32))

    def run(client: Client, q: Any, k: Any, v: Any, bias: Any, mask: Any, lengths: Any, o: Any, lse: Any, d_o: Any,
            d_lse: Any) -> Tuple[Any, ...]:
        g = client.backward(d_o, q, k, v, o, lse, dlse=d_lse, bias_grad=bias is not None,
                            **{"bias": bias, "mask": mask, "kv_lengths": lengths, **statics.options()})
        return g.dq, g.dk, g.dv, np.zeros((len(q), 0), np.float32) if g.dbias is None else g.dbias

    dq, dk, dv, d_bias = _call(statics, run, shapes, *saved, *cotangents)
    return dq, dk, dv, None if bias is None else d_bias.astype(bias.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _call(statics: _Statics, run: Callable[..., Tuple[Any, ...]], shapes: Sequence[Any], *arguments: Any
          ) -> Sequence[Any]:
    """`run` on the host. Under vmap the arguments come with one more leading dimension each, one call for each entry."""
    eager = not any(isinstance(x, jax.core.Tracer) for x in arguments)
    raised: List[Exception] = []

    def on_host(*arguments: Any) -> Tuple[Any, ...]:
        given = [None if x is None else np.asarray(x) for x in arguments]
        lead = np.asarray(given[0]).shape[:-4]
        results = [np.full((*lead, *shape.shape), np.nan, shape.dtype) for shape in shapes]
        try:
            client = _connections.client(statics.server)
            for index in np.ndindex(lead):
                for result, part in zip(results, run(client, *[None if x is None else x[index] for x in given])):
                    if result.size:
                        result[index] = part
        except Exception as error:
            if eager:
                raised.append(error)
            else:
                _keep_error(statics.server, error)
            return tuple(np.full_like(result, np.nan) for result in results)
        return tuple(results)

    results: Sequence[Any] = jax.pure_callback(on_host, tuple(shapes), *arguments, vmap_method="broadcast_all")
    if eager:
        _wait(results)
        if raised:
            raise raised[0]
    return tuple(results)


def _keep_error(server: str, error: Exception) -> None:
    """For the next call, or check(), to raise."""
    logging.getLogger("attnd.jax").error("a call failed and gave NaN: %s", error)
    with _lock:
        _errors.setdefault(server, error)
