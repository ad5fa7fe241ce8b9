"""The contract of attention in NumPy, in float64: what the tests compare results with. It shares no rule with the engines.

Memory is O(length) beside inputs and outputs: scores exist for a block of rows at a time. Options and shapes are those of
Client.forward and Client.backward, and so are the types of the results.
"""
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import numpy as np
from dropout_bytes import dropout_bytes

from attnd import _arrays
from attnd._arrays import Array, Tensor
from attnd._pairing import pair
from attnd._problem import Problem, Sequence1, resolve
from attnd.masks.dense import Evaluation
from attnd.results import ForwardResult, Gradients, Receipt

_BLOCK_SCORES = 1 << 21  # scores of one block of rows, over all heads
_RECEIPT = Receipt("oracle")


def forward(q, k, v, **options) -> ForwardResult:
    """O and lse, rounded once."""
    problem = resolve(q, k, v, **options)
    o, lse = forward_arrays(problem)
    out = _arrays.cast(_arrays.cast(Tensor(o, "f32"), problem.element), problem.result_element)
    return ForwardResult(_arrays.give(Tensor(problem.in_callers_order(out.bits), out.element)), lse, _RECEIPT)


def backward(dout, q, k=None, v=None, o=None, lse=None, *, dlse=None, bias_grad=False, **options) -> Gradients:
    """dQ, dK, dV and, where they apply, dbias and dsink, rounded once."""
    problem, inputs, _ = pair(dout, q, k, v, o, lse, dlse, bias_grad, options)
    gradients = backward_arrays(problem, inputs.o, inputs.lse, inputs.d_o, inputs.d_lse)

    def give(array: Array) -> Array:
        tensor = _arrays.cast(_arrays.cast(Tensor(array, "f32"), problem.element), problem.result_element)
        return _arrays.give(Tensor(problem.in_callers_order(tensor.bits), tensor.element))

    return Gradients(give(gradients.d_q), give(gradients.d_k), give(gradients.d_v),
                     gradients.d_bias.reshape(problem.bias_shape) if bias_grad else None, gradients.d_sink, _RECEIPT)


class GradientArrays(NamedTuple):
    """float32, heads before length; d_bias has 4 dimensions and is empty without a bias."""

    d_q: Array
    d_k: Array
    d_v: Array
    d_bias: Array
    d_sink: Optional[Array]


def forward_arrays(problem: Problem, compute: Any = np.float64) -> Tuple[Array, Array]:
    """O and lse as float32, heads before length."""
    o = np.zeros(problem.o_shape, np.float32)
    lse = np.full(problem.lse_shape, -np.inf, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for entry in _entries(problem, compute):
            _forward_entry(entry, _rows_of(problem, entry, o), _lse_of(problem, entry, lse))
    return o, lse


def backward_arrays(problem: Problem, o: Tensor, lse: Array, d_o: Tensor, d_lse: Optional[Array],
                    compute: Any = np.float64) -> GradientArrays:
    """All gradients."""
    d_q, d_k, d_v = (np.zeros(t.bits.shape, np.float32) for t in (problem.q, problem.k, problem.v))
    d_bias = np.zeros((0,) if problem.bias is None else problem.bias.bits.shape, np.float64)
    d_sink = None if problem.sink is None else np.zeros(problem.q_heads, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for entry in _entries(problem, compute):
            pick = _EntryGradients(
                _floats(Tensor(_rows_of(problem, entry, o.bits), o.element), compute),
                _lse_of(problem, entry, lse).astype(compute),
                _floats(Tensor(_rows_of(problem, entry, d_o.bits), d_o.element), compute),
                None if d_lse is None else _lse_of(problem, entry, d_lse).astype(compute),
                _rows_of(problem, entry, d_q), _keys_of(problem, entry, d_k), _keys_of(problem, entry, d_v),
                d_bias, d_sink)
            _backward_entry(entry, pick)
    return GradientArrays(d_q, d_k, d_v, d_bias.astype(np.float32),
                          None if d_sink is None else d_sink.astype(np.float32))


class _Entry(NamedTuple):
    """One batch entry or packed sequence: q [Hq, rows, D], k and v [Hkv, keys, D]."""

    problem: Problem
    batch_index: int
    sequence: Sequence1
    q: Array
    k: Array
    v: Array


class _EntryGradients(NamedTuple):
    o: Array
    lse: Array
    d_o: Array
    d_lse: Optional[Array]
    d_q: Array
    d_k: Array
    d_v: Array
    d_bias: Array
    d_sink: Optional[Array]


class _Scores(NamedTuple):
    """A block of rows, [Hq, rows, keys]."""

    score: Array  # −inf where not visible
    visible: Array
    slope: Array  # d score / d product, 1 without softcap
    keep: Array  # dropout's factors, 1 without dropout


def _entries(problem: Problem, compute: Any) -> Iterator[_Entry]:
    for index, sequence in enumerate(problem.sequences()):
        entry = _Entry(problem, index, sequence, *[np.empty(0)] * 3)
        yield entry._replace(q=_floats(Tensor(_rows_of(problem, entry, problem.q.bits), problem.element), compute),
                             k=_floats(Tensor(_keys_of(problem, entry, problem.k.bits), problem.element), compute),
                             v=_floats(Tensor(_keys_of(problem, entry, problem.v.bits), problem.element), compute))


def _rows_of(problem: Problem, entry: _Entry, array: Array) -> Array:
    s = entry.sequence
    whole = array if problem.packed else array[entry.batch_index]
    return whole[:, s.q_begin:s.q_begin + s.q_len]


_lse_of = _rows_of


def _keys_of(problem: Problem, entry: _Entry, array: Array) -> Array:
    s = entry.sequence
    whole = array if problem.packed else array[entry.batch_index]
    return whole[:, s.kv_begin:s.kv_begin + s.kv_len]


def _floats(tensor: Tensor, compute: Any) -> Array:
    return _arrays.to_float32(tensor).astype(compute, copy=False)


def _row_blocks(entry: _Entry) -> Iterator[range]:
    count = max(1, _BLOCK_SCORES // max(1, entry.problem.q_heads * entry.sequence.kv_len))
    for begin in range(0, entry.sequence.q_len, count):
        yield range(begin, min(begin + count, entry.sequence.q_len))


def _forward_entry(entry: _Entry, o: Array, lse: Array) -> None:
    for rows in _row_blocks(entry):
        block = _scores(entry, rows)
        block_lse = _log_sum_exp(entry.problem, block)
        p = _probabilities(block, block_lse)
        v = _per_q_head(entry.problem, entry.v)
        o[:, rows.start:rows.stop] = _select_matmul(p * block.keep, v, block.visible)
        lse[:, rows.start:rows.stop] = block_lse


def _backward_entry(entry: _Entry, g: _EntryGradients) -> None:
    problem, group = entry.problem, entry.problem.q_heads // entry.problem.kv_heads
    scale = entry.q.dtype.type(problem.resolved_scale())
    k, v = _per_q_head(problem, entry.k), _per_q_head(problem, entry.v)
    for rows in _row_blocks(entry):
        at = slice(rows.start, rows.stop)
        block = _scores(entry, rows)
        p = _probabilities(block, g.lse[:, at])
        delta = (g.d_o[:, at] * g.o[:, at]).sum(-1)
        if g.d_lse is not None:
            delta = delta - g.d_lse[:, at]
        d_p = np.matmul(g.d_o[:, at], v.swapaxes(1, 2)) * block.keep
        d_s = np.where(block.visible, p * (d_p - delta[..., None]), 0)
        if g.d_bias.size:
            _add_bias_gradient(entry, rows, d_s, g.d_bias)
        if g.d_sink is not None:
            _add_sink_gradient(problem, block, g.lse[:, at], delta, g.d_sink)
        d_product = d_s * block.slope * scale
        visible_t = block.visible.swapaxes(1, 2)
        g.d_q[:, at] = _select_matmul(d_product, k, block.visible)
        d_k = _select_matmul(d_product.swapaxes(1, 2), entry.q[:, at], visible_t)
        d_v = _select_matmul((p * block.keep).swapaxes(1, 2), g.d_o[:, at], visible_t)
        g.d_k[...] += d_k.reshape(problem.kv_heads, group, *d_k.shape[1:]).sum(1)
        g.d_v[...] += d_v.reshape(problem.kv_heads, group, *d_v.shape[1:]).sum(1)


def _per_q_head(problem: Problem, array: Array) -> Array:
    return np.repeat(array, problem.q_heads // problem.kv_heads, axis=0)


def _select_matmul(weights: Array, values: Array, visible: Array) -> Array:
    """Σ over visible columns of weights · values: NaN and infinity in what is not visible never leak."""
    finite: Array = np.asarray(np.isfinite(values).all(-1))
    result: Array = np.matmul(weights, values if finite.all() else np.where(finite[..., None], values, 0))
    for head, column in np.argwhere(~finite):
        seen = visible[head, :, column]
        result[head, seen] += weights[head, seen, column, None] * values[head, column]
    return result


def _scores(entry: _Entry, rows: range) -> _Scores:
    problem, s = entry.problem, entry.sequence
    q, k = entry.q[:, rows.start:rows.stop], _per_q_head(problem, entry.k)
    product = np.matmul(q, k.swapaxes(1, 2)) * q.dtype.type(problem.resolved_scale())
    slope = np.ones((), q.dtype)
    if problem.softcap > 0:
        bent = np.tanh(product / q.dtype.type(problem.softcap))
        product, slope = bent * q.dtype.type(problem.softcap), 1 - bent * bent
    distance = np.arange(s.kv_len)[None, :] - (np.arange(rows.start, rows.stop)[:, None] + s.offset)
    visible: Array = np.broadcast_to(_bounds(problem, distance), product.shape)
    if problem.mask is not None:
        visible = visible & _window_of(entry, rows, problem.mask)
    if problem.described is not None:
        shown = Evaluation(problem.described, problem.mask_sizes)
        visible = visible & shown.rows(entry.batch_index, rows, s.kv_len, s.offset)
    if problem.bias is not None:
        bias = _floats(Tensor(_window_of(entry, rows, problem.bias.bits), problem.bias.element), q.dtype)
        visible, product = visible & (bias != -np.inf), product + bias
    if problem.alibi_slopes is not None:
        per_batch = problem.alibi_slopes.size != problem.q_heads
        slopes = problem.alibi_slopes.reshape(-1, problem.q_heads)[entry.batch_index if per_batch else 0]
        product = product - slopes.astype(q.dtype)[:, None, None] * np.abs(distance).astype(q.dtype)
    return _Scores(np.where(visible, product, -np.inf), visible, slope, _keep(entry, rows, q.dtype))


def _bounds(problem: Problem, distance: Array) -> Array:
    """Keys that causal and window leave; distance = j − i − offset."""
    left, right = problem.window
    visible = np.ones(distance.shape, np.bool_)
    if problem.causal:
        visible &= distance <= 0
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


def _window_of(entry: _Entry, rows: range, array: Array) -> Array:
    """Broadcasts a mask or bias of 4 dimensions to [Hq, rows, keys] for these rows."""
    part: Array = array[entry.batch_index if array.shape[0] > 1 else 0]
    if part.shape[1] > 1:
        part = part[:, rows.start:rows.stop]
    return part[:, :, :entry.sequence.kv_len] if part.shape[2] > 1 else part


def _keep(entry: _Entry, rows: range, compute: Any) -> Array:
    problem = entry.problem
    if problem.dropout_threshold == 0:
        return np.ones((), compute)
    heads = entry.batch_index * problem.q_heads + np.arange(problem.q_heads)
    deciding = dropout_bytes(problem.seed, problem.offset, heads, rows, entry.sequence.kv_len)
    kept = 256 / (256 - problem.dropout_threshold)
    return np.where(deciding < problem.dropout_threshold, 0, kept).astype(compute)


def _log_sum_exp(problem: Problem, block: _Scores) -> Array:
    """ln Σ exp(score) with what the denominator adds; −inf for rows without a visible key."""
    any_visible = block.visible.any(-1)
    most = np.max(block.score, axis=-1, initial=-np.inf)
    extra_count, extra_logit = _extra(problem, block)
    most = np.maximum(most, np.where(extra_count > 0, extra_logit, -np.inf))
    total = np.where(block.visible, np.exp(block.score - most[..., None]), 0).sum(-1)
    total = total + np.where(extra_count > 0, extra_count * np.exp(extra_logit - most), 0)
    with np.errstate(divide="ignore"):
        return np.where(any_visible, most + np.log(total), -np.inf).astype(block.score.dtype)


def _extra(problem: Problem, block: _Scores) -> Tuple[Array, Array]:
    """How many logits without a value the denominator adds to each row, and their height."""
    rows = block.score.shape[:-1]
    if problem.zero_rest:
        return (~block.visible).sum(-1), np.zeros(rows, block.score.dtype)
    if problem.sink is not None:
        return np.ones(rows, np.int64), np.broadcast_to(problem.sink.astype(block.score.dtype)[:, None], rows)
    return np.zeros(rows, np.int64), np.zeros(rows, block.score.dtype)


def _probabilities(block: _Scores, lse: Array) -> Array:
    return np.where(block.visible, np.exp(block.score - lse[..., None]), 0)


def _add_bias_gradient(entry: _Entry, rows: range, d_s: Array, d_bias: Array) -> None:
    part = d_bias[entry.batch_index if d_bias.shape[0] > 1 else 0]
    heads, row_count, columns = part.shape
    if heads == 1:
        d_s = d_s.sum(0, keepdims=True)
    if row_count == 1:
        d_s = d_s.sum(1, keepdims=True)
    if columns == 1:
        d_s = d_s.sum(2, keepdims=True)
    at = slice(rows.start, rows.stop) if row_count > 1 else slice(None)
    part[:, at, :d_s.shape[2]] += d_s


def _add_sink_gradient(problem: Problem, block: _Scores, lse: Array, delta: Array, d_sink: Array) -> None:
    assert problem.sink is not None
    logit = problem.sink.astype(lse.dtype)[:, None]
    p_sink = np.where(block.visible.any(-1), np.exp(logit - lse), 0)
    d_sink -= (p_sink * delta).sum(-1)
