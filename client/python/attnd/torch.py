"""Attention of PyTorch tensors on a remote daemon, with autograd.

    import attnd.torch
    attnd.torch.connect("127.0.0.1:7070")
    out = attnd.torch.scaled_dot_product_attention(q, k, v, is_causal=True)   # PyTorch's signature and semantics
    out = attnd.torch.attention(q, k, v, causal="top_left", window=(511, 0))  # everything that attnd can do
    attnd.torch.replace()       # torch.nn.functional.scaled_dot_product_attention is ours from here on

The work is two custom operators, attnd::forward and attnd::backward, opaque to torch.compile. Elements are float16,
bfloat16 and float32. Dropout's seeds are drawn from torch's generator, so that torch.manual_seed and activation
checkpointing repeat them. CUDA tensors travel through pinned host memory. Where a backward may follow, servers are asked
to keep its tensors, so that it sends the gradient of the output alone; of CUDA tensors the host's copies are then kept as
well, so that nothing else leaves the device either. Needs torch 2.4 or later.
"""
from __future__ import annotations

import functools
import math
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Literal, NamedTuple, Optional, Sequence, Tuple, Type, Union

import numpy as np
import torch
from torch import Tensor

from . import _checks
from ._arrays import Tensor as Bits
from ._arrays import lift
from ._capture import note, wished
from ._connection import Connection
from ._connection import torch_connections as _connections
from ._operator_options import (ELEMENTS, LAYOUTS, Numbers, Words, check_precision, check_tensor, check_tensors,
                                check_transforms, described_first, described_mask, diagonal, layout_of, numbers, seed_tensor,
                                unpack, wire_type)
from ._problem import Causal, Layout, Precision, resolve_window
from ._replacement import Replacement
from ._residual import Residual
from ._transfer import Transfer, cast, empty, largest, raised, send
from .client import Client, ConnectOptions, ConnectPrecision
from .client import connect as _connect
from .errors import InvalidArgument, Unimplemented, brief, reworded, wrong
from .masks.nodes import Mask
from .masks.tensors import Options, as_blocks, as_options
from .modules.interface import assign_, clip_grad_norm_, fetch, local_gradients, local_weights, offload, optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["assign_", "attention", "client", "clip_grad_norm_", "connect", "disconnect", "fetch", "flex_attention",
           "local_gradients", "local_weights", "offload", "optimizer", "replace", "scaled_dot_product_attention"]


def __dir__() -> List[str]:
    return list(__all__)


@brief
def connect(address: Union[None, str, Sequence[str], Client] = None, *, name: str = "", keep: bool = True,
            precision: ConnectPrecision = None, **options: Unpack[ConnectOptions]) -> Client:
    """Connects this module: attnd.connect's arguments, or a Client that exists. Connecting again replaces.

    name: several connections can exist beside each other; functions here take it as `server`.
    keep: where a backward may follow, ask the servers to keep its tensors until autograd frees the graph; backward
        then sends a fifth of the bytes, and everything where a server could not keep them. Same results.
    precision: "f16" or "bf16": float32 tensors travel and are computed in 16 bits, results are float32. "auto": as
        attnd.connect's, for engines without float32.
    """
    made = address if isinstance(address, Client) else _connect(address, **options)
    _connections.put(name, Connection(made, keep, made.choose_precision(precision)))
    return made


def disconnect(name: str = "") -> None:
    """Forgets a connection; its Client is closed once calls that run have ended."""
    found = _connections.take(name)
    if found is not None:
        found.client.close()


@brief
def client(name: str = "") -> Client:
    """The Client of a connection."""
    return _connections.client(name)


@brief
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor,
                                 attn_mask: Union[None, Tensor, Mask] = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: Optional[float] = None,
                                 enable_gqa: bool = False, *, server: str = "") -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention on a daemon.

    query [..., q_heads, q_len, dim], key [..., kv_heads, kv_len, dim], value [..., kv_heads, kv_len, v_dim] of at
    least 2 dimensions; leading dimensions broadcast. attn_mask: bool (True = attend) or float (added, with gradient),
    broadcastable to [..., q_heads, q_len, kv_len], or an attnd.masks.Mask. That and is_causal are aligned to the top left.
    dropout_p is applied always, rounded to 256ths. A row that may attend to nothing gives 0, and so does dropout_p=1.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if check_tensor(name, tensor).dim() < 2:
            raise wrong(name, "at least 2 dimensions", f"shape {tuple(tensor.shape)}")
    if _checks.flag("is_causal", is_causal) and attn_mask is not None:
        raise wrong("attn_mask", "None when is_causal=True", "a mask")
    described = attn_mask if isinstance(attn_mask, Mask) else None
    attn_mask = None if isinstance(attn_mask, Mask) else attn_mask
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    q, k, v, lead = _four_dimensions(query, key, value, enable_gqa)
    mask: Union[None, Tensor, Mask] = described
    bias = None
    if attn_mask is not None:
        scores = (*lead, query.shape[-2], key.shape[-2])
        shaped = _mask_dimensions(check_tensor("attn_mask", attn_mask), scores)
        mask, bias = (shaped, None) if attn_mask.dtype == torch.bool else (None, shaped)
    try:
        if dropout_p == 1 or 0 in (*q.shape[:3], k.shape[2], v.shape[3]):
            _check_uncomputed(q, k, v, bias, attn_mask if bias is None else None, scale, dropout_p)
            return _zeros((*lead, query.shape[-2], value.shape[-1]), q, k, v, bias)
        out = attention(q, k, v, causal="top_left" if is_causal else None, mask=mask, bias=bias, scale=scale,
                        align=None if described is None else "top_left", dropout_p=dropout_p, server=server)
    except InvalidArgument as error:
        raise reworded(error, _NAMES) from None
    assert isinstance(out, Tensor)
    return out.reshape(*lead, query.shape[-2], value.shape[-1])


_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask"}


@brief
def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Optional[Callable[..., Tensor]] = None,
                   block_mask: Any = None, scale: Optional[float] = None, enable_gqa: bool = False,
                   return_lse: bool = False, kernel_options: Optional[Dict[str, Any]] = None, *, server: str = ""
                   ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """torch.nn.attention.flex_attention.flex_attention on a daemon, forward and backward, on any device.

    query [batch, q_heads, q_len, dim], key and value [batch, kv_heads, kv_len, ...]. block_mask: a BlockMask or an
    attnd.masks.Mask. A BlockMask becomes a description at its first call, which is kept as long as it lives: what its
    mask_mod captures must not change. score_mod: None. kernel_options say nothing here. Rows that see no key give 0.
    """
    if score_mod is not None:
        raise Unimplemented("score_mod: expected None, got a function, which a server cannot run: say it by bias=, softcap= "
                            "or alibi_slopes= of attnd.torch.attention", field="score_mod")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if check_tensor(name, tensor).dim() != 4:
            raise wrong(name, "4 dimensions", f"shape {tuple(tensor.shape)}")
    if not _checks.flag("enable_gqa", enable_gqa) and query.shape[1] != key.shape[1]:
        raise wrong("key", f"{query.shape[1]} heads, as query has, or enable_gqa=True", key.shape[1])
    q, k, v, _ = _four_dimensions(query, key, value, enable_gqa)
    mask = block_mask
    if not (block_mask is None or isinstance(block_mask, Mask)):
        from .masks.block_masks import described_block_mask  # which needs torch 2.5
        mask = described_block_mask(block_mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    try:
        return attention(q, k, v, mask=mask, align=None if mask is None else "top_left", scale=scale,
                         return_lse=_checks.flag("return_lse", return_lse), server=server)
    except InvalidArgument as error:
        raise reworded(error, {**_NAMES, "mask": "block_mask"}) from None


@brief
def attention(q: Tensor, k: Tensor, v: Tensor, *, layout: Optional[Layout] = None, causal: Causal = None,
              align: Union[None, str, int, Numbers] = None,
              window: Optional[Sequence[Optional[int]]] = None, mask: Union[None, Tensor, Mask] = None,
              bias: Optional[Tensor] = None, scale: Optional[float] = None, softcap: float = 0.0,
              dropout_p: float = 0.0, seed: Union[None, int, Tensor] = None, offset: int = 0,
              sink: Optional[Numbers] = None, zero_rest: bool = False, kv_lengths: Optional[Numbers] = None,
              cu_seqlens_q: Optional[Numbers] = None, cu_seqlens_k: Optional[Numbers] = None,
              alibi_slopes: Optional[Numbers] = None, accumulate: Literal["f32", "f16"] = "f32",
              precision: Optional[Precision] = None, allow_nondeterministic: bool = False,
              return_lse: bool = False, server: str = ""
              ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Attention with every option of attnd.Options, differentiable in q, k, v, bias, sink and through lse.

    mask: a bool tensor, or an attnd.masks.Mask, which torch.compile takes as a constant.
    q [batch, q_heads, q_len, dim] (layout "bhld"), or as `layout` says. seed: an int, or an int64 tensor of one number;
    None: drawn from torch's generator when dropout_p > 0. sink, kv_lengths, cu_seqlens_q, cu_seqlens_k, alibi_slopes and
    several offsets in align are tensors or lists. Returns out, or (out, lse) with lse float32 [batch, q_heads, q_len].
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    q, k, v, bias = _autocast(q, k, v, bias)
    check_tensors(q, k, v, bias, mask)
    check_transforms(q, k, v, bias, sink)
    if layout is None:
        if cu_seqlens_q is None:
            layout = "bhld"
        else:
            layout = "thd"
    _checks.word("layout", layout, LAYOUTS, '"bhld" or "blhd", with cu_seqlens "thd" or "htd"')
    others = (causal or None, align, window, kv_lengths, cu_seqlens_q, alibi_slopes, zero_rest or None)
    described = mask if isinstance(mask, Mask) else None
    mask = None if isinstance(mask, Mask) else mask
    scores = _scores(q, k, layout)
    if mask is not None and scores is not None and all(x is None for x in others):
        pattern = as_options(mask, scores)
        if pattern is not None and pattern.cu_seqlens is None:
            mask, kv_lengths = pattern.keys, pattern.kv_lengths
            causal, align, window = _diagonal_of(pattern)
        elif pattern is not None and bias is None and dropout_p == 0:
            found = attention(q[0], k[0], v[0], layout="htd" if layout == "bhld" else "thd", causal="top_left",
                              scale=scale, softcap=softcap, sink=sink, cu_seqlens_q=pattern.cu_seqlens,
                              cu_seqlens_k=pattern.cu_seqlens, accumulate=accumulate, precision=precision,
                              allow_nondeterministic=allow_nondeterministic, return_lse=return_lse, server=server)
            return found[None] if isinstance(found, Tensor) else (found[0][None], found[1][None])
    dropout_p = _checks.number("dropout_p", dropout_p, 0.0) or 0.0
    sink_tensor = numbers("sink", sink)
    offsets = None
    if not (align is None or isinstance(align, (str, int))):
        align, offsets = None, numbers("align", align)
    precision = check_precision(precision or _connections.precision(server)) if q.dtype == torch.float32 else None
    left, right = (None, None) if window is None else resolve_window(window)
    options = Words(layout, diagonal("causal", causal), diagonal("align", align), left, right,
                    _checks.flag("zero_rest", zero_rest),
                    _checks.word("accumulate", accumulate, ("f32", "f16"), '"f32" or "f16"'), precision,
                    _wish(q, k, v, bias, sink_tensor, server), _checks.uint64("offset", offset),
                    _checks.flag("allow_nondeterministic", allow_nondeterministic), "", server)
    rest = (sink_tensor, numbers("alibi_slopes", alibi_slopes), numbers("kv_lengths", kv_lengths),
            numbers("cu_seqlens_q", cu_seqlens_q), numbers("cu_seqlens_k", cu_seqlens_k), offsets,
            seed_tensor(seed, dropout_p), _checks.number("scale", scale, None),
            _checks.number("softcap", softcap, 0.0) or 0.0, dropout_p)

    def call(mask: Optional[Tensor], described: Optional[Mask]) -> Tuple[Tensor, Tensor, Tensor]:
        said = options if described is None else options._replace(described=described.token)
        found: Tuple[Tensor, Tensor, Tensor] = torch.ops.attnd.forward(q, k, v, bias, mask, *rest, said.pack())
        return found
    listed = None if mask is None or scores is None else as_blocks(mask, scores)
    if listed is None:
        out, lse, _ = call(mask, described)
    else:
        out, lse, _ = described_first(client(server), lambda: call(None, listed), lambda: call(mask, None))
    return (out, lse) if return_lse else out


def _scores(q: Tensor, k: Tensor, layout: str) -> Optional[Tuple[int, int, int, int]]:
    """[batch, q_heads, q_len, kv_len]; None for packed sequences."""
    if not q.dim() == k.dim() == 4 or layout[0] != "b":
        return None
    heads, length = layout.index("h"), layout.index("l")
    return q.shape[0], q.shape[heads], q.shape[length], k.shape[length]


def _diagonal_of(pattern: Options) -> Tuple[Optional[bool], Union[None, int, Tensor], Optional[Tuple[int, int]]]:
    """causal, align and window that say what a pattern says."""
    if pattern.window is None or pattern.offsets is None:
        return None, None, None
    one = bool((pattern.offsets == pattern.offsets[0]).all())
    align = int(pattern.offsets[0]) if one else pattern.offsets
    left, right = pattern.window
    return (True, align, None if left < 0 else (left, -1)) if right == 0 else (None, align, (left, right))


def _wish(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sink: Optional[Tensor], server: str) -> str:
    """Says what servers shall keep tensors for: "" nothing, "keep" a backward, "bias" one that wants the bias's gradient."""
    if not torch.is_grad_enabled() or not _connections.keeps(server):
        return ""
    if bias is not None and bias.requires_grad:
        return "bias"
    return "keep" if any(t is not None and t.requires_grad for t in (q, k, v, sink)) else ""


class replace:
    """Puts scaled_dot_product_attention in place of torch.nn.functional's; as a context manager, for its block.

        attnd.torch.replace()            # from here on; .restore() of the result ends it
        with attnd.torch.replace(): ...  # here

    Modules that imported the function by its name get this one, and PyTorch's fast path is off meanwhile, so that
    nn.MultiheadAttention and nn.TransformerEncoder come here without gradients too. What stays with PyTorch warns once:
    need_weights=True, and holders of the function under another name.

    covers: the names that are the daemon's now.
    """

    def __init__(self, server: str = "") -> None:
        @functools.wraps(scaled_dot_product_attention)
        def named(*arguments: Any, **keywords: Any) -> Tensor:
            return scaled_dot_product_attention(*arguments, **{"server": server, **keywords})
        self._replacement = Replacement(named)
        self.covers = (*self._replacement.names, "torch.nn.MultiheadAttention(need_weights=False)",
                       "torch.nn.TransformerEncoderLayer", "torch.nn.TransformerDecoderLayer")

    def restore(self) -> None:
        self._replacement.undo()

    def __enter__(self) -> replace:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<attnd.torch.replace: {', '.join(self.covers)}>"


# ---- Shapes of scaled_dot_product_attention.

def _check_uncomputed(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], mask: Optional[Tensor],
                      scale: Optional[float], dropout_p: float) -> None:
    """Raises what Client.forward would, of a call that gives zeros without it."""
    check_tensors(q, k, v, bias, mask)
    if k.shape[3] != q.shape[3]:
        raise wrong("k", f"dim {q.shape[3]}, as q has", k.shape[3])
    if v.shape[2] != k.shape[2]:
        raise wrong("v", f"length {k.shape[2]}, as k has", v.shape[2])
    _checks.number("scale", scale, None)
    if not 0 <= (_checks.number("dropout_p", dropout_p, 0.0) or 0.0) <= 1:
        raise wrong("dropout_p", "0 <= p <= 1", dropout_p)


def _zeros(shape: Sequence[int], *inputs: Optional[Tensor]) -> Tensor:
    """The sum of nothing; its gradients are zeros too."""
    given = [tensor for tensor in inputs if tensor is not None]
    return sum((tensor.flatten()[:0].sum().to(given[0].dtype) for tensor in given), given[0].new_zeros(tuple(shape)))


def _autocast(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor]
              ) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    device = query.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return query, key, value, mask
    to = torch.get_autocast_dtype(device)
    return _cast(query, to), _cast(key, to), _cast(value, to), None if mask is None else _cast(mask, to)


def _cast(tensor: Tensor, to: torch.dtype) -> Tensor:
    """As autocast does it: what is no float, or a float64, stays, and so does what is no tensor."""
    lossy = not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64
    return tensor if lossy else tensor.to(to)


def _four_dimensions(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
                     ) -> Tuple[Tensor, Tensor, Tensor, Tuple[int, ...]]:
    """q, k, v as [batch, heads, length, dim], and the leading dimensions of the output, heads included."""
    leads = [list(tensor.shape[:-2]) or [1] for tensor in (query, key, value)]
    width = max(len(lead) for lead in leads)
    leads = [[1] * (width - len(lead)) + lead for lead in leads]
    heads = [lead[-1] for lead in leads]
    if not enable_gqa:
        heads = _broadcast_heads(heads)
    elif any(count == 0 or heads[0] % count != 0 for count in heads[1:]):
        raise wrong("key, value", f"heads that divide query's {heads[0]}", f"{heads[1]} and {heads[2]}")
    elif heads[1] != heads[2]:
        key, value = [tensor.repeat_interleave(heads[0] // tensor.shape[-3], -3) for tensor in (key, value)]
        heads = heads[:1] * 3
    batch = _broadcast("leading dimensions", [lead[:-1] for lead in leads])
    shaped = []
    for tensor, count in zip((query, key, value), heads):
        whole = tensor.expand(*batch, count, *tensor.shape[-2:])
        shaped.append(whole.reshape(math.prod(batch), count, *tensor.shape[-2:]))
    lead = (*batch, heads[0])
    out_lead = lead if max(query.dim(), key.dim(), value.dim()) > 2 else ()
    return shaped[0], shaped[1], shaped[2], out_lead


def _broadcast_heads(heads: List[int]) -> List[int]:
    """Heads broadcast; one key head for all query heads needs no copies of it."""
    most = _broadcast("heads", [[count] for count in heads], ", or enable_gqa=True")[0]
    return [most, 1, 1] if heads[1] == heads[2] == 1 else [most, most, most]


def _broadcast(what: str, shapes: Sequence[Sequence[int]], cure: str = "") -> List[int]:
    result = []
    for sizes in zip(*shapes):
        others = {int(size) for size in sizes if size != 1}
        if len(others) > 1:
            raise wrong("query, key, value", f"{what} that broadcast{cure}", [list(shape) for shape in shapes])
        result.append(others.pop() if others else 1)
    return result


def _mask_dimensions(mask: Tensor, scores: Tuple[int, ...]) -> Tensor:
    """The mask with at most 4 dimensions; what it repeats stays unrepeated where a view can say so."""
    shape = (1,) * (len(scores) - mask.dim()) + tuple(mask.shape)
    if len(shape) != len(scores) or any(size not in (1, most) for size, most in zip(shape, scores)):
        raise wrong("attn_mask", f"a shape that broadcasts to {tuple(scores)}", tuple(mask.shape))
    batch = shape[:-3]
    if len(batch) <= 1:
        return mask if mask.dim() == len(shape) else mask.reshape(shape)
    if all(size == 1 for size in batch):
        return mask.reshape(1, *shape[-3:])
    return mask.expand(*scores[:-3], *shape[-3:]).reshape(-1, *shape[-3:])


# ---- The operators. Tensors are [batch, heads, length, dim] or as options' layout says.

@torch.library.custom_op("attnd::forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], mask: Optional[Tensor], sink: Optional[Tensor],
             alibi_slopes: Optional[Tensor], kv_lengths: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
             cu_seqlens_k: Optional[Tensor], offsets: Optional[Tensor], seed: Optional[Tensor],
             scale: Optional[float], softcap: float, dropout_p: float, options: str) -> Tuple[Tensor, Tensor, Tensor]:
    """o, lse, and a tensor that stands for what the servers keep."""
    transfer = Transfer()
    wire = wire_type(q, options)
    host = _fetch_inputs(transfer, wire, q, k, v, bias, mask)
    o = _empty_result(q, options, v.shape[-1])
    transfer.wait()
    chosen, keep, server = _options(options, host, sink, alibi_slopes, kv_lengths, cu_seqlens_q, cu_seqlens_k, offsets,
                                    seed, scale, softcap, dropout_p)
    result = client(server).forward(_bits("q", host.q), _bits("k", host.k), _bits("v", host.v), out=_bits("out", o),
                                    keep=keep != "", bias_grad=keep == "bias", capture=wished(), **chosen)
    note(result.captured)
    lse = torch.from_numpy(result.lse)
    copies = None if q.device.type == "cpu" else _Copies(host, o, lse)
    return cast(send(o, q.device), q.dtype), send(lse, q.device), _stand_in(result.residual, copies)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tuple[Tensor, Tensor, Tensor]:
    layout = layout_of(rest[-1])
    lse = q.new_empty(_lse_shape(q, layout), dtype=torch.float32)
    return _empty_like(q, layout, v.shape[-1]), lse, torch.empty(1, dtype=torch.uint8, device="cpu")


@torch.library.custom_op("attnd::backward", mutates_args=())
def _backward(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, residual: Tensor,
              want_bias_gradient: bool, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor],
              mask: Optional[Tensor], sink: Optional[Tensor],
              alibi_slopes: Optional[Tensor], kv_lengths: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
              cu_seqlens_k: Optional[Tensor], offsets: Optional[Tensor], seed: Optional[Tensor],
              scale: Optional[float], softcap: float, dropout_p: float, options: str
              ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kept, transfer, wire = _kept.get(residual.data_ptr()), Transfer(), wire_type(q, options)
    copies = None if kept is None else kept.copies
    if copies is None:
        inputs = _fetch_inputs(transfer, wire, q, k, v, bias, mask)
        copies = _Copies(inputs, transfer.fetch("o", o, wire), transfer.fetch("lse", lse))
    factor = 1.0
    if wire == torch.float16 and d_o.dtype == torch.float32 and d_o.numel():
        factor = lift(max(largest(d) for d in (d_o, d_lse) if d is not None))
        if factor != 1:
            d_o, d_lse = raised(d_o, factor), None if d_lse is None else d_lse * factor
    host_d_o, host_d_lse = transfer.fetch("dout", d_o, wire), transfer.fetch_if("dlse", d_lse)
    made = [_empty_result(tensor, options, tensor.shape[-1]) for tensor in (q, k, v)]
    transfer.wait()
    host = copies.inputs
    chosen, _, server = _options(options, host, sink, alibi_slopes, kv_lengths, cu_seqlens_q, cu_seqlens_k, offsets, seed,
                                 scale, softcap, dropout_p)
    out = tuple(_bits("out", tensor) for tensor in made)
    g = client(server).backward(_bits("dout", host_d_o), _bits("q", host.q), _bits("k", host.k), _bits("v", host.v),
                                _bits("o", copies.o), _bits("lse", copies.lse),
                                dlse=None if host_d_lse is None else _bits("dlse", host_d_lse),
                                bias_grad=want_bias_gradient, residual=None if kept is None else kept.residual,
                                out=(out[0], out[1], out[2]), **chosen)
    d_q, d_k, d_v = [cast(send(tensor, q.device), q.dtype) for tensor in made]
    d_bias, d_sink = _empty_gradients(q, bias if want_bias_gradient else None, sink)
    if g.dbias is not None and bias is not None:
        d_bias = send(torch.from_numpy(g.dbias), q.device).to(bias.dtype)
    if g.dsink is not None and sink is not None:
        d_sink = send(torch.from_numpy(g.dsink), q.device).to(sink.dtype)
    for gradient in (d_q, d_k, d_v, d_bias, d_sink) if factor != 1 else ():
        gradient.mul_(1 / factor)
    return d_q, d_k, d_v, d_bias, d_sink


@_backward.register_fake
def _(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, residual: Tensor, want_bias_gradient: bool,
      q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], mask: Optional[Tensor], sink: Optional[Tensor], *rest: Any
      ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = layout_of(rest[-1])
    d_q, d_k, d_v = [_empty_like(tensor, layout, tensor.shape[-1]) for tensor in (q, k, v)]
    d_bias, d_sink = _empty_gradients(q, bias if want_bias_gradient else None, sink)
    return d_q, d_k, d_v, d_bias, d_sink


def _setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.numbers = inputs[:12], inputs[12:]
    ctx.described = described_mask(inputs[-1])  # lives until backward
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor], _: Optional[Tensor]
                   ) -> Tuple[Optional[Tensor], ...]:
    o, lse, residual, *tensors = ctx.saved_tensors
    if d_o is None and d_lse is None:
        return (None,) * 16
    if d_o is None:
        d_o = torch.zeros_like(o)
    want_bias_gradient = bool(ctx.needs_input_grad[3])
    d_q, d_k, d_v, d_bias, d_sink = torch.ops.attnd.backward(d_o, d_lse, o, lse, residual, want_bias_gradient,
                                                             *tensors, *ctx.numbers)
    return (d_q, d_k, d_v, d_bias if want_bias_gradient else None, None, d_sink if tensors[5] is not None else None,
            *(None,) * 10)


def _differentiate_twice(ctx: Any, *gradients: Optional[Tensor]) -> None:
    raise Unimplemented("attention has no second derivative (create_graph=True): its gradients are constants to autograd",
                        field="attention")


_forward.register_autograd(_differentiate, setup_context=_setup_context)
_backward.register_autograd(_differentiate_twice)


class _Inputs(NamedTuple):
    """A call's large tensors on the host."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Optional[Tensor]
    mask: Optional[Tensor]


def _fetch_inputs(transfer: Transfer, wire: torch.dtype, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor],
                  mask: Optional[Tensor]) -> _Inputs:
    return _Inputs(transfer.fetch("q", q, wire), transfer.fetch("k", k, wire), transfer.fetch("v", v, wire),
                   transfer.fetch_if("bias", bias), transfer.fetch_if("mask", mask))


class _Copies(NamedTuple):
    """Keeps on the host what backward needs of a forward of CUDA tensors."""

    inputs: _Inputs
    o: Tensor
    lse: Tensor


def _options(options: str, host: _Inputs, sink: Optional[Tensor], alibi_slopes: Optional[Tensor],
             kv_lengths: Optional[Tensor], cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor],
             offsets: Optional[Tensor], seed: Optional[Tensor], scale: Optional[float], softcap: float,
             dropout_p: float) -> Tuple[Dict[str, Any], str, str]:
    """Keywords for Client.forward, what _wish said, and the connection's name."""
    said = unpack(options)
    chosen: Dict[str, Any] = dict(
        said.contract(), bias=None if host.bias is None else _bits("bias", host.bias), sink=sink,
        mask=host.mask if host.mask is not None else described_mask(options),
        alibi_slopes=alibi_slopes, kv_lengths=kv_lengths, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        scale=scale, softcap=softcap, dropout_p=dropout_p, seed=0 if seed is None else int(seed) % (1 << 64))
    if offsets is not None:
        chosen["align"] = offsets
    return chosen, said.keep, said.server


class _Kept(NamedTuple):
    """Keeps what is there of a forward for its backward."""

    residual: Residual
    copies: Optional[_Copies]  # of CUDA tensors; no more than the servers hold of them


_kept: Dict[int, _Kept] = {}  # by the address of the memory of the tensor that stands for it


def _stand_in(residual: Optional[Residual], copies: Optional[_Copies]) -> Tensor:
    """A tensor that autograd can save in the residual's place. The residual lives as long as its memory; a copy of it,
    as hooks on saved tensors make them, stands for nothing, and backward then sends everything."""
    memory = np.zeros(1, np.uint8)
    if residual is not None:
        address = int(memory.__array_interface__["data"][0])
        _kept[address] = _Kept(residual, copies)
        weakref.finalize(memory, _kept.pop, address, None).atexit = False
    return torch.from_numpy(memory)


def _bits(field: str, tensor: Tensor) -> Bits:
    """The memory of a tensor on the host, for the client."""
    element = ELEMENTS.get(tensor.dtype)
    if element is None:  # o, dout or a call of the operators themselves
        raise wrong(field, "a tensor of float16, bfloat16 or float32", f"one of {tensor.dtype}")
    if tensor.dtype == torch.bfloat16:
        return Bits(tensor.view(torch.int16).numpy().view("uint16"), element)
    return Bits(tensor.numpy(), element)


def _empty_like(tensor: Tensor, layout: str, last: int) -> Tensor:
    """A new tensor of this shape but for its last dimension. Its memory has the order of the tensor's where that is
    another layout of the contract ([batch, length, heads, dim] seen as [batch, heads, length, dim]), else its own."""
    return _empty_in_order(tensor, layout, last, lambda shape: tensor.new_empty(shape))


def _empty_result(tensor: Tensor, options: str, last: int) -> Tensor:
    """The same on the host, for a result that comes from the wire and goes to the tensor's device."""
    wire = wire_type(tensor, options)
    return _empty_in_order(tensor, layout_of(options), last, lambda shape: empty(shape, wire, tensor.device))


def _empty_in_order(tensor: Tensor, layout: str, last: int, make: Callable[[List[int]], Tensor]) -> Tensor:
    first = 1 if len(layout) == 4 else 0  # of the two dimensions that the layouts exchange
    shape = [*tensor.shape[:-1], last]
    if tensor.is_contiguous() or not tensor.transpose(first, first + 1).is_contiguous():
        return make(shape)
    shape[first], shape[first + 1] = shape[first + 1], shape[first]
    return make(shape).transpose(first, first + 1)


def _lse_shape(q: Tensor, layout: str) -> List[int]:
    heads, length = layout.index("h"), max(layout.find("l"), layout.find("t"))
    return [*([q.shape[0]] if len(layout) == 4 else []), q.shape[heads], q.shape[length]]


def _empty_gradients(q: Tensor, bias: Optional[Tensor], sink: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """dbias and dsink; without numbers where there are none."""
    return (q.new_empty([0]) if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=q.device),
            q.new_empty([0]) if sink is None else torch.empty(sink.shape, dtype=sink.dtype, device=q.device))
