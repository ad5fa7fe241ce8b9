"""A Problem as the native library takes it: contiguous arrays in one layout, and the C structures over them.

Nothing is copied that already lies in a layout of the contract: a transposed view of [batch, length, heads, dim] goes
out as it lies. Of several tensors that disagree, those with the fewest bytes are copied.
"""
from __future__ import annotations

import ctypes
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _arrays, _memory, _native
from ._arrays import Array, Tensor
from ._problem import BackwardInputs, Problem
from .masks.native import native_mask

_ORDERS: Dict[int, Dict[str, Tuple[int, ...]]] = {  # by number of dimensions
    4: {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3)}, 3: {"htd": (0, 1, 2), "thd": (1, 0, 2)}}


_HEADS_FIRST = ("bhld", "htd")


class Wire(NamedTuple):
    """The order in memory of q, k, v, o and their gradients; `axes` turn heads-first arrays into it and back."""

    layout: str
    axes: Tuple[int, ...]

    def pack(self, array: Array) -> Array:
        """Contiguous in this layout; the array itself where it already is."""
        if self.layout in _HEADS_FIRST:
            return array if array.flags.c_contiguous else np.ascontiguousarray(array)
        packed: Array = np.ascontiguousarray(array.transpose(self.axes))
        return packed

    def fits(self, array: Array) -> bool:
        return bool(array.transpose(self.axes).flags.c_contiguous)

    def empty(self, shape: Sequence[int], element: str) -> Array:
        """A new heads-first array whose memory is in this layout."""
        if self.layout in _HEADS_FIRST:
            return _memory.empty(shape, _arrays.bits_dtype(element))
        inner = _memory.empty([shape[axis] for axis in self.axes], _arrays.bits_dtype(element))
        outer: Array = inner.transpose(self.axes)
        return outer


def choose(problem: Problem, arrays: Sequence[Array]) -> Wire:
    """The layout in which the fewest bytes of these heads-first arrays have to be copied; a tie is the caller's."""
    if len(arrays) > 3:  # more than the problem's own
        return _choose(problem, arrays)
    found: Optional[Wire] = problem.memo.get("wire")
    if found is None:
        found = problem.memo["wire"] = _choose(problem, arrays)
    return found


def _choose(problem: Problem, arrays: Sequence[Array]) -> Wire:
    orders = _ORDERS[problem.q.bits.ndim]
    wires = sorted((Wire(*item) for item in orders.items()), key=lambda wire: wire.layout != problem.layout)
    return min(wires, key=lambda wire: sum(a.nbytes for a in arrays if not wire.fits(a)))


class Packed(NamedTuple):
    """The C problem, what it points to, and the arrays that every call sends."""

    problem: _native.Problem
    q: Array
    k: Array
    v: Array
    mask_bits: Optional[Array]
    bias: Optional[Array]
    keep: List[object]  # memory that the C structure points to


def pack(problem: Problem, wire: Wire, bias_gradient: bool) -> Packed:
    structure, keep = problem.memo.get(wire.layout) or structure_of(problem, wire.layout, bias_gradient)
    if not keep and problem.mask is None and problem.bias is None:
        problem.memo[wire.layout] = structure, keep
    mask_bits = None if problem.mask is None else _arrays.packed_bits(problem.mask)
    bias = None if problem.bias is None else np.ascontiguousarray(problem.bias.bits)
    return Packed(structure, wire.pack(problem.q.bits), wire.pack(problem.k.bits), wire.pack(problem.v.bits),
                  mask_bits, bias, keep)


def structure_of(problem: Problem, layout: str, bias_gradient: bool) -> Tuple[_native.Problem, List[object]]:
    """The C problem and the arrays that it points to."""
    keep: List[object] = []
    structure = _native.Problem(
        batch=problem.batch, q_heads=problem.q_heads, kv_heads=problem.kv_heads, q_len=problem.q_len,
        kv_len=problem.kv_len, qk_head_dim=problem.qk_head_dim, v_head_dim=problem.v_head_dim,
        element=_native.ELEMENTS[problem.element], layout=_native.LAYOUTS[layout],
        has_scale=problem.scale is not None, scale=problem.scale or 0.0, softcap=problem.softcap,
        alignment=_native.ALIGNMENTS[problem.alignment], causal=problem.causal, has_window=1,
        window_left=problem.window[0], window_right=problem.window[1],
        dropout_seed=problem.seed, dropout_offset=problem.offset, dropout_threshold=problem.dropout_threshold,
        denominator=_denominator(problem), accumulate_float16=problem.accumulate == "f16",
        allow_nondeterministic=problem.allow_nondeterministic)
    for name, numbers in (("offsets", problem.offsets), ("kv_lengths", problem.kv_lengths),
                          ("cu_seqlens_q", problem.cu_seqlens_q), ("cu_seqlens_k", problem.cu_seqlens_k),
                          ("alibi_slopes", problem.alibi_slopes), ("sink_logits", problem.sink)):
        if numbers is not None:
            setattr(structure, name, _native.NumberArray(address(numbers), numbers.size))
            keep.append(numbers)
    if problem.mask is not None:
        structure.has_bool_mask, structure.bool_mask_shape = 1, _shape4(problem.mask)
    if problem.described is not None:
        mask = native_mask(problem.described, problem.mask_sizes)
        structure.mask = mask.pointer
        keep.append(mask)
    if problem.bias is not None:
        structure.has_bias, structure.bias_shape = 1, _shape4(problem.bias.bits)
        structure.bias_element = _native.ELEMENTS[problem.bias.element]
        structure.bias_want_gradient = bias_gradient
    return structure, keep


class Plan(NamedTuple):
    """A forward of small arrays that go out as they lie: all of it but the numbers. Kept for the next call that differs in
    these alone, since a small call's time is what Python does around it."""

    structure: _native.Problem
    o_shape: Tuple[int, ...]  # as it lies in memory
    o_axes: Optional[Tuple[int, ...]]  # to the caller's order; None: it is that
    o_dtype: np.dtype[Any]
    lse_shape: Tuple[int, ...]


def remember(problem: Problem, wire: Wire, packed: Packed) -> None:
    """Makes the Plan for calls of the same shapes and options, if they can have one."""
    size = math.prod(problem.o_shape) * _arrays.bits_dtype(problem.element).itemsize
    direct = all(wire.fits(tensor.bits) for tensor in (problem.q, problem.k, problem.v))
    plain = problem.element == problem.result_element != "bf16" and not packed.keep
    if plain and direct and size < _memory.LEAST_BYTES and problem.mask is None and problem.bias is None:
        shape = tuple(problem.o_shape[axis] for axis in wire.axes)
        axes = None if wire.layout == problem.layout else (0, 2, 1, 3)  # a packed problem has arrays and no plan
        problem.memo["plan"] = Plan(packed.problem, shape, axes, _arrays.bits_dtype(problem.element), problem.lse_shape)


def address(array: Optional[Array]) -> Optional[int]:
    """The address of the first number; None for None."""
    if array is None:
        return None
    try:
        return ctypes.addressof(_first_byte(array))  # type: ignore[arg-type]  # a sixth of the general way's time
    except (TypeError, ValueError, BufferError):  # read-only, not in C's order, or empty
        return int(array.__array_interface__["data"][0])


_first_byte = ctypes.c_char.from_buffer


class Destination:
    """Where a result tensor is written: the caller's array where its memory fits, else new memory and a copy at the end."""

    def __init__(self, problem: Problem, wire: Wire, shape: Tuple[int, ...], callers: Optional[Tensor],
                 inputs: Sequence[Optional[Array]]) -> None:
        self._problem, self._callers = problem, callers
        direct = (callers is not None and callers.element == problem.element and wire.fits(callers.bits)
                  and not any(a is not None and np.may_share_memory(callers.bits, a) for a in inputs))
        if callers is not None and direct:
            self.array = callers.bits
        else:
            self.array = wire.empty(shape, problem.element)

    def finish(self) -> Tensor:
        """The result in the caller's element, heads first, in the caller's array if there is one."""
        result = _arrays.cast(Tensor(self.array, self._problem.element), self._problem.result_element)
        if self._callers is None:
            return result
        if self._callers.bits is not self.array:
            np.copyto(self._callers.bits, result.bits)
        return self._callers


def _shape4(array: Array) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 4)(*array.shape)


def _denominator(problem: Problem) -> int:
    if problem.sink is not None:
        return _native.SINK
    return _native.ZERO_REST if problem.zero_rest else _native.SOFTMAX


class ForwardBuffers:
    """A forward of the library reads and writes these. `finish` gives o in the caller's element, heads first."""

    def __init__(self, problem: Problem, callers: Optional[Tensor], return_lse: bool, bias_gradient: bool) -> None:
        self.wire = choose(problem, _present(problem.q.bits, problem.k.bits, problem.v.bits, callers and callers.bits))
        self.packed = pack(problem, self.wire, bias_gradient)
        inputs = self.packed.q, self.packed.k, self.packed.v, self.packed.bias
        self._o = Destination(problem, self.wire, problem.o_shape, callers, inputs)
        self.lse = np.empty(problem.lse_shape, np.float32) if return_lse else None
        self.tensors = _native.ForwardTensors.of(*[address(array) for array in (
            self.packed.q, self.packed.k, self.packed.v, self.packed.mask_bits, self.packed.bias, self._o.array, self.lse)])

    def finish(self) -> Tensor:
        return self._o.finish()


class BackwardBuffers:
    """A backward of the library reads and writes these. wire: the layout; None: the one that copies the fewest bytes."""

    def __init__(self, problem: Problem, inputs: BackwardInputs, callers: Sequence[Optional[Tensor]], bias_gradient: bool,
                 wire: Optional[Wire] = None) -> None:
        wire = wire or choose(problem, _present(problem.q.bits, problem.k.bits, problem.v.bits, inputs.o.bits,
                                                inputs.d_o.bits, *[c and c.bits for c in callers]))
        packed, self._factor = pack(problem, wire, bias_gradient), inputs.factor
        self.packed = packed
        o, d_o = wire.pack(inputs.o.bits), wire.pack(inputs.d_o.bits)
        self._read = o, d_o, inputs.lse, inputs.d_lse  # memory that the C structure points to
        sent = packed.q, packed.k, packed.v, packed.bias, o, d_o, inputs.lse, inputs.d_lse
        self._made = [Destination(problem, wire, tensor.bits.shape, caller, sent)
                      for tensor, caller in zip((problem.q, problem.k, problem.v), callers)]
        self.d_bias = np.empty(packed.bias.shape, np.float32) if packed.bias is not None and bias_gradient else None
        self._d_sink = None if problem.sink is None else np.empty((problem.batch, problem.q_heads), np.float32)
        self.tensors = _native.BackwardTensors.of(*[address(array) for array in (
            packed.q, packed.k, packed.v, packed.mask_bits, packed.bias, o, inputs.lse, d_o, inputs.d_lse,
            *[made.array for made in self._made], self.d_bias, self._d_sink)])

    def finish(self) -> List[Tensor]:
        """dQ, dK and dV in the caller's element, heads first. Once."""
        found = [made.finish() for made in self._made]
        if self._factor != 1.0:
            for array in [*[tensor.bits for tensor in found], self.d_bias, self._d_sink]:
                if array is not None:
                    array *= np.float32(1 / self._factor)
        return found

    @property
    def d_sink(self) -> Optional[Array]:
        """[q_heads], where there is a sink."""
        return None if self._d_sink is None else self._d_sink.sum(0)


def _present(*arrays: Optional[Array]) -> List[Array]:
    return [array for array in arrays if array is not None]
