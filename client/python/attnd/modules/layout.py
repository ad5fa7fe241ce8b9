"""Layout and Block: a stack of layers as the daemon knows it, blocks of ops whose values are numbered as they come.

    layout = attnd.Layout(width=64)
    block = layout.block()
    x = block.norm(0, "layer", weight=block.parameter("norm.weight", 64), bias=block.parameter("norm.bias", 64))
    x = block.linear(x, block.parameter("fc.weight", 64, 64))
    block.add(0, x)
    layout.layer(block, "0."); layout.layer(block, "1.")

Value 0 is a block's input, 1 the memory of cross-attention. The server checks layouts whole and names what is wrong.
"""
from __future__ import annotations

import operator
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from .. import _protobuf as wire
from ..errors import wrong, wrong_type
from ..masks import wire as mask_wire
from ..masks.nodes import Mask
from ..masks.sizes import Sizes

_ELEMENTS = {"f16": 1, "bf16": 2, "f32": 3}
NORMS = {"layer": 1, "rms": 2}
ACTIVATIONS = {"relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "quick_gelu": 5, "tanh": 6}


class Parameter(NamedTuple):
    """A parameter of a layer: its whole name and its shape."""

    name: str
    shape: Tuple[int, ...]
    trained: bool


class Heads(NamedTuple):
    """Columns [first, first + heads · dim) of a value as [rows, heads, dim]."""

    value: int
    heads: int
    dim: int
    first: int = 0

    def encode(self) -> bytes:
        return (wire.number(1, self.value) + wire.number(2, self.first) + wire.number(3, self.heads)
                + wire.number(4, self.dim))


class Rotary(NamedTuple):
    """q and k turned by position · inverse_frequency."""

    inverse_frequency: Tuple[float, ...]
    attention_factor: float = 1.0
    interleaved: bool = False

    def encode(self) -> bytes:
        factor = 0.0 if self.attention_factor == 1 else self.attention_factor
        return (wire.floats(1, self.inverse_frequency) + wire.float32(2, factor) + wire.number(3, int(self.interleaved)))


def _alignment(align: Union[str, int]) -> bytes:
    if not isinstance(align, str):
        return wire.message(3, wire.numbers(1, [wire.zigzag(operator.index(align))]))
    return wire.number(_word("align", align, {"top_left": 1, "bottom_right": 2}), 1)


def _mask(mask: Mask, heads: int, lengths: Optional[Tuple[int, int]]) -> bytes:
    if not isinstance(mask, Mask):
        raise wrong_type("mask", "an attnd.masks.Mask", mask)
    return mask_wire.serialize(mask, Sizes(1, heads, *(lengths or (1, 1))), sized=lengths is not None)


class Block:
    """One layer's parameters and ops. Each op gives the number of its output. keeps_all: dropout is left out."""

    def __init__(self, keeps_all: bool = False) -> None:
        self._keeps_all = keeps_all
        self.parameters: List[Tuple[str, Tuple[int, ...]]] = []
        self._ops: List[bytes] = []
        self.drops = False  # some op has dropout

    def parameter(self, name: str, *shape: int) -> int:
        """A new parameter; [out, in] or [length]."""
        self.parameters.append((name, tuple(shape)))
        return len(self.parameters) - 1

    def linear(self, value: int, weight: int, bias: Optional[int] = None, *, transposed: bool = False) -> int:
        """value · Wᵀ + bias; transposed: W is stored [in, out]."""
        return self._op(1, wire.number(1, value) + wire.number(2, weight) + wire.maybe(3, bias)
                        + wire.number(4, int(transposed)))

    def norm(self, value: int, kind: str, weight: Optional[int] = None, bias: Optional[int] = None, *,
             epsilon: float = 1e-5, weight_offset: float = 0.0, round_before_weight: bool = False) -> int:
        """kind: "layer" or "rms"."""
        return self._op(2, wire.number(1, value) + wire.number(2, _word("kind", kind, NORMS)) + wire.float32(3, epsilon)
                        + wire.maybe(4, weight) + wire.maybe(5, bias) + wire.float32(6, weight_offset)
                        + wire.number(7, int(round_before_weight)))

    def attention(self, q: Heads, k: Heads, v: Heads, *, causal: bool = False, scale: Optional[float] = None,
                  softcap: float = 0.0, window: Optional[Tuple[int, int]] = None, dropout_p: float = 0.0,
                  align: Union[str, int] = "top_left", mask: Optional[Mask] = None,
                  mask_lengths: Optional[Tuple[int, int]] = None, alibi_slopes: Sequence[float] = (),
                  sink: Sequence[float] = (), zero_rest: bool = False, rotary: Optional[Rotary] = None,
                  q_norm: Optional[int] = None, k_norm: Optional[int] = None,
                  qk_norm_epsilon: float = 0.0, qk_norm_weight_offset: float = 0.0,
                  qk_norm_round_before_weight: bool = False) -> int:
        """Output [rows, q.heads · v.dim]. Options as attnd.attention's, the same for all calls.

        window: keys (before, after), −1: unbounded. align: "top_left", "bottom_right" or an offset. mask_lengths: rows
        and keys of the mask's longest sequence; None: it has no size of its own. alibi_slopes, sink: a number a head.
        """
        dropout_p = 0.0 if self._keeps_all else dropout_p
        self.drops |= dropout_p > 0
        options = b"" if scale is None else wire.some_float32(10, scale)
        options += wire.float32(11, softcap)
        if causal or window is not None or alibi_slopes:
            options += wire.message(12, _alignment(align)) + wire.number(13, int(causal))
        if window is not None:
            options += wire.message(14, wire.signed(1, window[0]) + wire.signed(2, window[1]))
        if mask is not None:
            options += wire.message(16, _mask(mask, q.heads, mask_lengths))
        if alibi_slopes:
            options += wire.message(18, wire.floats(1, alibi_slopes))
        if dropout_p:
            options += wire.message(19, wire.float32(1, dropout_p))
        if sink and zero_rest:
            raise wrong("zero_rest", "False beside sink", True)
        if sink or zero_rest:
            options += wire.message(20, wire.message(3, wire.floats(1, sink)) if sink else wire.message(2, b""))
        body = b"".join(wire.message(n, heads.encode()) for n, heads in ((1, q), (2, k), (3, v)))
        body += b"" if rotary is None else wire.message(4, rotary.encode())
        body += wire.message(5, options) if options else b""
        body += wire.maybe(7, q_norm) + wire.maybe(8, k_norm) + wire.float32(9, qk_norm_epsilon)
        body += wire.float32(10, qk_norm_weight_offset) + wire.number(11, int(qk_norm_round_before_weight))
        return self._op(3, body)

    def activation(self, value: int, kind: str) -> int:
        """kind: "relu", "gelu" (by erf), "gelu_tanh", "silu", "quick_gelu" or "tanh"."""
        return self._op(4, wire.number(1, value) + wire.number(2, _word("kind", kind, ACTIVATIONS)))

    def add(self, a: int, b: int, *, b_scale: float = 1.0) -> int:
        return self._binary(1, a, b, b_scale)

    def multiply(self, a: int, b: int) -> int:
        return self._binary(2, a, b, 1.0)

    def dropout(self, value: int, p: float) -> int:
        """value itself where p is 0."""
        if p == 0 or self._keeps_all:
            return value
        self.drops = True
        return self._op(6, wire.number(1, value) + wire.float32(2, p))

    def _binary(self, kind: int, a: int, b: int, b_scale: float) -> int:
        return self._op(5, wire.number(1, kind) + wire.number(2, a) + wire.number(3, b)
                        + wire.float32(4, 0.0 if b_scale == 1 else b_scale))

    def _op(self, field: int, body: bytes) -> int:
        self._ops.append(wire.message(field, body))
        return len(self._ops) + 1

    def encode(self) -> bytes:
        made = b"".join(wire.message(1, wire.text(1, name) + wire.numbers(2, shape)) for name, shape in self.parameters)
        return made + b"".join(wire.message(2, op) for op in self._ops)


class Layer(NamedTuple):
    block: Block
    prefix: str
    frozen: Tuple[int, ...]
    attention_scale: Tuple[float, ...]


class Layout:
    """Layers of blocks, first to last, each on the output of the one before.

    width: columns of x and y. element: "f32", "f16" or "bf16", of x, y, products and what is kept; parameters and their
    gradients are float32. memory_width: columns of the second input, 0: none.
    """

    def __init__(self, width: int, element: str = "f32", memory_width: int = 0) -> None:
        self.width, self.memory_width = width, memory_width
        _word("element", element, _ELEMENTS)
        self.element = element
        self.layers: List[Layer] = []

    def block(self) -> Block:
        return Block()

    def layer(self, block: Block, prefix: str, *, frozen: Sequence[int] = (),
              attention_scale: Sequence[float] = ()) -> None:
        """Appends a layer whose parameters' names begin with prefix. frozen: parameters that are not trained."""
        self.layers.append(Layer(block, prefix, tuple(sorted(frozen)), tuple(attention_scale)))

    @property
    def drops(self) -> bool:
        """Whether some op has dropout."""
        return any(layer.block.drops for layer in self.layers)

    @property
    def parameters(self) -> List[Parameter]:
        """Parameters of all layers, in the order in which the server counts them."""
        return [Parameter(layer.prefix + name, shape, n not in layer.frozen) for layer in self.layers
                for n, (name, shape) in enumerate(layer.block.parameters)]

    def serialize(self) -> bytes:
        """An attnd.v1.ModuleLayout. Equal blocks are sent once."""
        blocks: Dict[bytes, int] = {}
        layers = []
        for layer in self.layers:
            block = blocks.setdefault(layer.block.encode(), len(blocks))
            layers.append(wire.number(1, block) + wire.text(2, layer.prefix) + wire.numbers(3, layer.frozen)
                          + wire.floats(4, layer.attention_scale))
        return (wire.number(1, 1) + wire.number(2, self.width) + b"".join(wire.message(3, block) for block in blocks)
                + b"".join(wire.message(4, layer) for layer in layers) + wire.number(5, _ELEMENTS[self.element])
                + wire.number(7, _ELEMENTS["f32"]) + wire.number(8, self.memory_width))


def _word(field: str, value: str, words: Dict[str, int]) -> int:
    if value not in words:
        raise wrong(field, " or ".join(f'"{word}"' for word in words), repr(value))
    return words[value]
