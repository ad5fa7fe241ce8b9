"""PyTorch's own layers as blocks: what a module computes, op by op, and the parameters that each op reads.

A describer gets a Maker over an empty block and the module, and returns how calls of the module bring their arguments.
Unsupported options raise TypeError here, when a module is wrapped, and name the option.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple, Type, cast

import torch
from torch import nn

from .adapters import adapted, is_adapted
from .layout import Block, Heads, Rotary
from .refusal import refuse

__all__ = ["Described", "Describer", "Maker", "Variant", "refuse", "torch_describer"]


class Variant(NamedTuple):
    """The part of a layout that depends on how the stack is called."""

    causal: bool = False
    dropout: str = "all"  # "none": eval(), though gradients are wanted; "own": of modules that are in train() alone
    frozen: Tuple[str, ...] = ()  # parameters that are not trained, by whole name


class Described(NamedTuple):
    """One layer: its block, and its parameters in the block's order with their names in the module."""

    block: Block
    names: Tuple[str, ...]
    call: str  # how it is called: "tensor", "encoder", "attention", or a model's class
    width: int
    windows: Optional[Tuple[int, int]] = None  # of its attention, for masks that say the same
    causal: bool = False
    attention_scale: Tuple[float, ...] = ()
    memory_width: int = 0
    training: FrozenSet[bool] = frozenset()  # train() or eval(), of the modules that drop
    rotary: Optional[Rotary] = None


class Maker:
    """Adds ops to a block, with parameters by their names in the module."""

    def __init__(self, module: nn.Module, dropout: str = "all") -> None:
        self.module, self.block, self.prefix, self.own = module, Block(dropout == "none"), "", dropout == "own"
        self.names: List[str] = []
        self.training: Set[bool] = set()
        self.unused: Set[str] = set()  # parameters of adapters that are not active

    def within(self, prefix: str) -> Maker:
        """The same block; names below `prefix`."""
        inner = Maker.__new__(Maker)
        inner.module, inner.block, inner.names, inner.prefix = self.module, self.block, self.names, prefix
        inner.own, inner.training, inner.unused = self.own, self.training, self.unused
        return inner

    def parameter(self, name: str) -> int:
        whole = self.prefix + name
        tensor = self._tensor(whole)
        assert tensor is not None
        self.names.append(whole)
        return self.block.parameter(whole, *tensor.shape)

    def _tensor(self, whole: str) -> Optional[nn.Parameter]:
        owner, _, last = whole.rpartition(".")
        tensor = getattr(self.module.get_submodule(owner), last)
        if tensor is not None and not isinstance(tensor, nn.Parameter):
            refuse(self.module, f"{whole} is computed from other parameters, as by weight_norm or pruning: make it "
                                "a parameter (remove_weight_norm, remove_spectral_norm, prune.remove)")
        return tensor

    def rows(self, name: str, counts: Tuple[int, ...]) -> Tuple[Optional[int], ...]:
        """A parameter cut into parts of so many rows, in order; Nones where the module has none."""
        whole = self.prefix + name
        tensor = self._tensor(whole)
        if tensor is None:
            return (None,) * len(counts)
        self.names += [whole] * len(counts)
        return tuple(self.block.parameter(whole if len(counts) == 1 else f"{whole}.{part}", rows, *tensor.shape[1:])
                     for part, rows in enumerate(counts))

    def maybe(self, name: str) -> Optional[int]:
        """None where the module has no such parameter."""
        return None if self._tensor(self.prefix + name) is None else self.parameter(name)

    def linear(self, value: int, name: str, *, transposed: bool = False) -> int:
        """name: "": of what has the maker's prefix."""
        module = self.module.get_submodule((self.prefix + name).rstrip("."))
        stem = f"{name}." if name else ""
        if is_adapted(module):
            return adapted(self, value, module, stem, transposed)
        if not (type(module).__name__ == "Conv1D" if transposed else _is(module, nn.Linear)):
            refuse(module, f"in the place of {self.prefix + name}: expected {'a Conv1D' if transposed else 'an nn.Linear'}")
        weight = self.parameter(stem + "weight")
        return self.block.linear(value, weight, self.maybe(stem + "bias"), transposed=transposed)

    def layer_norm(self, value: int, name: str) -> int:
        norm: Any = self.module.get_submodule(self.prefix + name)
        if not _is(norm, nn.LayerNorm):
            refuse(norm, f"in the place of {self.prefix + name}: expected an nn.LayerNorm")
        if len(norm.normalized_shape) != 1:
            refuse(norm, f"normalized_shape has to be the last dimension alone, got {tuple(norm.normalized_shape)}")
        weight = self.maybe(name + ".weight")
        return self.block.norm(value, "layer", weight, self.maybe(name + ".bias"), epsilon=norm.eps)

    def dropout(self, value: int, name: str) -> int:
        return self.drop(value, self.module.get_submodule(self.prefix + name))

    def drop(self, value: int, module: nn.Module) -> int:
        return self.block.dropout(value, self.chance(module, dropout_p(module)))

    def chance(self, module: nn.Module, p: float) -> float:
        """p of a dropout that the module's training decides."""
        p = checked_p(module, p)
        if p:
            self.training.add(module.training)
        return p if module.training or not self.own else 0.0


def _is(module: nn.Module, kind: Type[nn.Module]) -> bool:
    """One of that class, or of one that computes the same."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def dropout_p(module: nn.Module) -> float:
    if not _is(module, nn.Dropout) and not _is(module, nn.Identity):
        refuse(module, "expected nn.Dropout")
    return checked_p(module, getattr(module, "p", 0.0))


def checked_p(module: nn.Module, p: float) -> float:
    if not 0 <= p or round(p * 256) >= 256:
        refuse(module, f"dropout has to be 0 <= p < 1, got {p}")
    return float(p) if round(p * 256) else 0.0


# ---- torch.nn

_FUNCTIONS: Dict[Any, str] = {nn.functional.relu: "relu", torch.relu: "relu", nn.functional.gelu: "gelu",
                              nn.functional.silu: "silu", torch.tanh: "tanh", nn.functional.tanh: "tanh"}


def activation(module: nn.Module, function: Any) -> str:
    """The word for an activation, a module or a function."""
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    for kind, word in ((nn.ReLU, "relu"), (nn.SiLU, "silu"), (nn.Tanh, "tanh")):
        if isinstance(function, kind):
            return word
    name = type(function).__name__  # transformers has its own
    found = {"GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh",
             "PytorchGELUTanh": "gelu_tanh", "FastGELUActivation": "gelu_tanh", "QuickGELUActivation": "quick_gelu",
             "SiLUActivation": "silu"}.get(name) or _FUNCTIONS.get(function)
    if found is None:
        refuse(module, f"activation {getattr(function, '__name__', name)} is not one of relu, gelu, gelu with tanh, silu, "
                       "quick_gelu, tanh")
    return found


def _multihead(make: Maker, name: str, value: int, variant: Variant, memory: Optional[int] = None) -> int:
    """nn.MultiheadAttention of a value to itself, or to the memory, with its output projection."""
    attention: Any = make.module.get_submodule((make.prefix + name).rstrip("."))
    if not _is(attention, nn.MultiheadAttention):
        refuse(attention, f"in the place of {make.prefix + name}: expected an nn.MultiheadAttention")
    if is_adapted(attention.out_proj):
        refuse(attention, "an adapter of its out_proj, which PyTorch does not call: leave it out of target_modules")
    for option in ("bias_k", "bias_v"):
        if getattr(attention, option) is not None:
            refuse(attention, "add_bias_kv=True adds a learned key, which no layout has")
    if attention.add_zero_attn:
        refuse(attention, "add_zero_attn=True adds a key of zeros, which no layout has")
    width, heads, dim = attention.embed_dim, attention.num_heads, attention.head_dim
    p = make.chance(attention, attention.dropout)
    if not attention._qkv_same_embed_dim:
        refuse(attention, "kdim and vdim other than embed_dim are cross-attention, which needs a layout of your own "
                          "(attnd.modules.Layout)")
    rows = (3 * width,) if memory is None else (width, 2 * width)
    weights, biases = make.rows(name + "in_proj_weight", rows), make.rows(name + "in_proj_bias", rows)
    if memory is None:
        packed = make.block.linear(value, cast(int, weights[0]), biases[0])
        q, k, v = [Heads(packed, heads, dim, part * width) for part in range(3)]
    else:
        q = Heads(make.block.linear(value, cast(int, weights[0]), biases[0]), heads, dim)
        packed = make.block.linear(memory, cast(int, weights[1]), biases[1])
        k, v = Heads(packed, heads, dim), Heads(packed, heads, dim, width)
    out = make.block.attention(q, k, v, causal=variant.causal and memory is None, dropout_p=p)
    return make.linear(out, name + "out_proj")


def _transformer_layer(make: Maker, layer: Any, variant: Variant, memory: Optional[int]) -> Described:
    """PyTorch's encoder layer or, with a memory, its decoder layer."""
    block, norm_first = make.block, layer.norm_first

    def sublayer(value: int, norm: str, inner: Callable[[int], int], dropout: str) -> int:
        made = make.dropout(inner(make.layer_norm(value, norm) if norm_first else value), dropout)
        made = block.add(value, made)
        return made if norm_first else make.layer_norm(made, norm)

    def feed_forward(value: int) -> int:
        made = block.activation(make.linear(value, "linear1"), activation(layer, layer.activation))
        return make.linear(make.dropout(made, "dropout"), "linear2")
    width = layer.self_attn.embed_dim
    value = sublayer(0, "norm1", lambda v: _multihead(make, "self_attn.", v, variant), "dropout1")
    if memory is None:
        sublayer(value, "norm2", feed_forward, "dropout2")
        return Described(block, tuple(make.names), "encoder", width, causal=variant.causal)
    value = sublayer(value, "norm2", lambda v: _multihead(make, "multihead_attn.", v, variant, memory), "dropout2")
    sublayer(value, "norm3", feed_forward, "dropout3")
    return Described(block, tuple(make.names), "decoder", width, causal=variant.causal, memory_width=width)


def _encoder_layer(make: Maker, layer: Any, variant: Variant) -> Described:
    return _transformer_layer(make, layer, variant, None)


def _decoder_layer(make: Maker, layer: Any, variant: Variant) -> Described:
    return _transformer_layer(make, layer, variant, 1)


def _attention_alone(make: Maker, attention: Any, variant: Variant) -> Described:
    _multihead(make, "", 0, variant)
    return Described(make.block, tuple(make.names), "attention", attention.embed_dim, causal=variant.causal)


_Pieces = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)


def _sequential(make: Maker, module: nn.Module, variant: Variant) -> Described:
    """A piece, or an nn.Sequential of pieces, as one layer."""
    pieces = list(_flat("", module))
    if not any(isinstance(piece, (nn.Linear, nn.LayerNorm, nn.RMSNorm)) or is_adapted(piece) for _, piece in pieces):
        refuse(module, "a layer without parameters says nothing of its width")
    value, width, first = 0, 0, 0
    for name, piece in pieces:
        dotted = name.rstrip(".")
        inner, outer = _widths(piece)
        if width and inner and inner != width:
            refuse(module, f"{dotted or 'it'} takes {inner} columns, and gets {width}")
        first, width = first or inner, outer or width
        if value == 0 and getattr(piece, "inplace", False):
            refuse(piece, f"{dotted or 'it'} would write into the layer's input, which its caller has too: expected "
                          "inplace=False")
        value = _piece(make.within(name), piece, value)
    if value == 0 or first != width:
        refuse(module, f"a layer's output has its input's columns, {first}; got {width}")
    return Described(make.block, tuple(make.names), "tensor", width)


def _flat(prefix: str, module: Optional[nn.Module]) -> Any:
    if not isinstance(module, nn.Sequential):
        yield prefix, module
        return
    for name, child in module._modules.items():  # also one that is there twice
        yield from _flat(f"{prefix}{name}.", child)


def _widths(piece: Any) -> Tuple[int, int]:
    if isinstance(piece, nn.Linear) or is_adapted(piece):
        return piece.in_features, piece.out_features
    if isinstance(piece, (nn.LayerNorm, nn.RMSNorm)):
        return piece.normalized_shape[-1], piece.normalized_shape[-1]
    return 0, 0


def _piece(make: Maker, piece: Any, value: int) -> int:
    block = make.block
    if isinstance(piece, nn.Linear) or is_adapted(piece):
        return make.linear(value, "")
    if isinstance(piece, nn.LayerNorm):
        if len(piece.normalized_shape) != 1:
            refuse(piece, f"normalized_shape has to be the last dimension alone, got {tuple(piece.normalized_shape)}")
        return block.norm(value, "layer", make.maybe("weight"), make.maybe("bias"), epsilon=piece.eps)
    if isinstance(piece, nn.RMSNorm):
        epsilon = piece.eps if piece.eps is not None else torch.finfo(torch.float32).eps
        return block.norm(value, "rms", make.maybe("weight"), epsilon=epsilon)
    if isinstance(piece, nn.Dropout):
        return make.drop(value, piece)
    if isinstance(piece, nn.Identity):
        return value
    return block.activation(value, activation(piece, piece))


# ---- By class.

Describer = Callable[[Maker, Any, Variant], Described]


def torch_describer(module: nn.Module) -> Optional[Describer]:
    """None for a class that is not PyTorch's own."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return _exact(module, nn.TransformerEncoderLayer, _encoder_layer)
    if isinstance(module, nn.TransformerDecoderLayer):
        return _exact(module, nn.TransformerDecoderLayer, _decoder_layer)
    if isinstance(module, nn.MultiheadAttention):
        return _exact(module, nn.MultiheadAttention, _attention_alone)
    if isinstance(module, (nn.Sequential, *_Pieces)):
        for _, piece in _flat("", module):
            if type(piece) not in _Pieces and not is_adapted(piece):
                refuse(piece, f"in a Sequential there can be {', '.join(kind.__name__ for kind in _Pieces)}")
        return _sequential
    return None


def _exact(module: nn.Module, kind: Type[nn.Module], found: Describer) -> Describer:
    if type(module).forward is not kind.forward:
        refuse(module, f"its class has a forward of its own, not {kind.__name__}'s")
    return found
