"""How calls of a layer's class bring their arguments: x, its mask, padding and positions, as a module's call has them."""
from __future__ import annotations

import inspect
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from ..errors import Unimplemented, wrong
from .layers import Described

__all__ = ["StackCall", "adapt", "check_rotary"]


class StackCall(NamedTuple):
    """One call of layers: x [batch, length, width]; what beside it the server needs; how x is brought and y goes back."""

    x: Tensor
    causal: bool = False
    mask: Optional[Tensor] = None  # bool [batch or 1, heads or 1, length or 1, length], True = attend
    kv_lengths: Optional[List[int]] = None
    positions: Optional[List[int]] = None
    cu_seqlens: Optional[Tensor] = None  # x [1, total, width] holds sequences end to end
    memory: Optional[Tensor] = None  # [batch, rows, width]
    memory_lengths: Optional[List[int]] = None
    batch_first: bool = True
    unbatched: bool = False
    as_tuple: bool = False  # the class returns (y, None)
    nested: bool = False
    sizes: Optional[List[int]] = None  # rows of each of a nested tensor of the older, strided layout
    shape: Optional[torch.Size] = None  # of x and y, where they are rows of no sequence
    before: int = 0  # sequences of the whole call, where this is a part of one

    @property
    def is_nested(self) -> bool:
        return self.nested or self.sizes is not None

    def enter(self, x: Tensor) -> Tensor:
        """[batch, length, width] of a tensor of x's dimensions; of a nested one its own, which x is."""
        if self.is_nested:
            return x
        if self.shape is not None:
            return x.reshape(1, -1, x.shape[-1])
        return x[None] if self.unbatched else x if self.batch_first else x.transpose(0, 1)

    def leave(self, y: Tensor) -> Tensor:
        """The opposite of enter."""
        if self.is_nested:
            return y
        if self.shape is not None:
            return y.reshape(self.shape)
        return y[0] if self.unbatched else y if self.batch_first else y.transpose(0, 1).contiguous()

    def split(self, count: int) -> List[int]:
        """Sequences of each of `count` consecutive parts, or 1 of each where there are fewer sequences. A packed or nested
        call, and one of rows of no sequence, is one part."""
        is_whole = self.is_nested or self.shape is not None or self.cu_seqlens is not None or self.x.numel() == 0
        batch = 1 if is_whole else self.x.shape[0]
        parts = min(count, batch)
        return [batch // parts + (n < batch % parts) for n in range(parts)]

    def cut(self, sizes: Sequence[int]) -> List[StackCall]:
        """The call's parts of so many sequences each, without x, which is [sequences, length, width] of each."""
        length, made, begin = self.x.shape[1], [], 0
        for size in sizes:
            end = begin + size
            made.append(self._replace(
                x=torch.empty(0), before=begin, batch_first=True,
                mask=self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[begin:end],
                kv_lengths=self.kv_lengths and self.kv_lengths[begin:end],
                positions=self.positions and self.positions[begin * length:end * length],
                memory=None if self.memory is None else self.memory[begin:end],
                memory_lengths=self.memory_lengths and self.memory_lengths[begin:end]))
            begin = end
        return made

    def among(self, others: Set[bool], causal: bool) -> StackCall:
        """The call, with its pattern as a mask where its layers are called with a causal one and without: a module is one
        or the other. others: the values that calls have had, and gets this one's. causal: the module's."""
        length = self.x.shape[1]
        if length == 1 or self.cu_seqlens is not None:
            return self._replace(causal=causal) if length == 1 else self
        others.add(self.causal)
        if len(others) == 1 or not self.causal:
            return self
        seen = _diagonal(length, None, self.x.device)[None, None]
        if self.kv_lengths is not None:
            lengths = torch.tensor(self.kv_lengths, device=seen.device)[:, None, None, None]
            seen = seen & (torch.arange(length, device=seen.device) < lengths)
        return self._replace(causal=False, kv_lengths=None, mask=seen if self.mask is None else seen & self.mask)

    def give(self, y: Tensor) -> Any:
        """Returns what `leave` gave, as the layer's class returns it."""
        if self.nested:
            return torch.nested.nested_tensor_from_jagged(y[0], self.cu_seqlens)
        if self.sizes is not None:
            return torch.nested.as_nested_tensor([one[:rows] for one, rows in zip(y, self.sizes)])
        return (y, None) if self.as_tuple else y


def adapt(layer: nn.Module, layers: Sequence[Described], arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> StackCall:
    """The call of the first layer of a stack."""
    kind = layers[0].call
    if kind == "tensor":
        if len(arguments) + len(keywords) != 1 or not keywords.keys() <= {"input"}:
            raise wrong("arguments", "one tensor", f"{len(arguments)} and keywords {sorted(keywords)}")
        return _plain(arguments[0] if arguments else keywords["input"])
    given = inspect.signature(type(layer).forward).bind(layer, *arguments, **keywords)
    given.apply_defaults()
    if kind == "decoder":
        return _decoder(layer, given.arguments)
    if kind == "encoder":
        return _encoder(layer, given.arguments)
    if kind == "attention":
        return _attention(layer, given.arguments)
    return _model_layer(layer, layers, given)


def _plain(x: Tensor) -> StackCall:
    if x.is_nested:
        return _nested(x)
    if x.dim() == 0:
        raise wrong("x", "at least 1 dimension", tuple(x.shape))
    return StackCall(x) if x.dim() == 3 else StackCall(x.reshape(1, -1, x.shape[-1]), shape=x.shape)


# ---- torch.nn

def _nested(x: Any) -> StackCall:
    """Sequences end to end, of torch.nested's jagged layout; padded ones of its strided layout, which nn.TransformerEncoder
    makes of a padding mask where no gradients are wanted."""
    if x.layout == torch.strided and x.dim() == 3 and not x.requires_grad:
        sizes = [one.shape[0] for one in x.unbind()]
        return StackCall(torch.nested.to_padded_tensor(x, 0.0), kv_lengths=sizes, sizes=sizes)
    if x.layout != torch.jagged or x.dim() != 3 or x._lengths is not None:
        raise Unimplemented("x: expected a nested tensor [batch, length, width] of layout=torch.jagged without holes",
                            field="x")
    return StackCall(x.values()[None], cu_seqlens=x.offsets(), nested=True)


def _batched(x: Tensor, batch_first: bool) -> StackCall:
    if x.is_nested:
        return _nested(x)
    if x.dim() == 2:
        return StackCall(x[None], unbatched=True)
    if x.dim() != 3:
        raise wrong("src", "2 or 3 dimensions", tuple(x.shape))
    return StackCall(x if batch_first else x.transpose(0, 1), batch_first=batch_first)


def _encoder(layer: Any, given: Dict[str, Any]) -> StackCall:
    call = _batched(given["src"], layer.self_attn.batch_first)
    return _masked(layer.self_attn, call, given["src_mask"], given["src_key_padding_mask"], given["is_causal"])


def _decoder(layer: Any, given: Dict[str, Any]) -> StackCall:
    call = _batched(given["tgt"], layer.self_attn.batch_first)
    memory = _batched(given["memory"], layer.self_attn.batch_first)
    if call.nested or memory.nested:
        raise Unimplemented("tgt, memory: expected tensors that are not nested: pad them (torch.nested.to_padded_tensor) "
                            "and give the key padding masks", field="tgt")
    if given["memory_mask"] is not None or given["memory_is_causal"]:
        raise Unimplemented("memory_mask: expected None: rows of a memory are hidden by memory_key_padding_mask alone",
                            field="memory_mask")
    if memory.x.shape[0] != call.x.shape[0]:
        raise wrong("memory", f"{call.x.shape[0]} sequences, as tgt has", memory.x.shape[0])
    call = call._replace(memory=memory.x)
    if given["memory_key_padding_mask"] is not None:
        seen = _padding("memory_key_padding_mask", memory, given["memory_key_padding_mask"])
        lengths = seen.sum(-1)
        if not torch.equal(seen, torch.arange(seen.shape[1], device=seen.device) < lengths[:, None]):
            raise Unimplemented("memory_key_padding_mask: expected padding at the end alone: move each memory's rows to the "
                                "front",
                                field="memory_key_padding_mask")
        call = call._replace(memory_lengths=lengths.tolist())
    return _masked(layer.self_attn, call, given["tgt_mask"], given["tgt_key_padding_mask"], given["tgt_is_causal"])


def _attention(layer: Any, given: Dict[str, Any]) -> StackCall:
    if given["key"] is not given["query"] or given["value"] is not given["query"]:
        raise Unimplemented("key, value: expected the query itself: cross-attention needs a layout of your own "
                            "(attnd.modules.Layout)", field="key")
    if given["need_weights"]:
        raise TypeError("need_weights: expected False, since the weights do not exist on the server")
    call = _batched(given["query"], layer.batch_first)._replace(as_tuple=True)
    return _masked(layer, call, given["attn_mask"], given["key_padding_mask"], given["is_causal"])


def _padding(name: str, call: StackCall, padding: Tensor) -> Tensor:
    """[batch, length] of a padding mask: True where there is a row."""
    shape = tuple(call.x.shape[1:2] if call.unbatched else call.x.shape[:2])
    if padding.shape != shape:  # one of another order would be taken for it
        raise wrong(name, f"shape {shape}", tuple(padding.shape))
    return _hidden(name, padding).logical_not().reshape(call.x.shape[:2])


def _masked(attention: Any, call: StackCall, mask: Optional[Tensor], padding: Optional[Tensor], is_causal: bool
            ) -> StackCall:
    """torch.nn's masks: True, or −inf, is what a row must not see."""
    if call.nested:
        return _nested_masked(call, mask, padding, is_causal)
    batch, length = call.x.shape[:2]
    keys = None if padding is None else _padding("key_padding_mask", call, padding)[:, None, None]
    if mask is None and is_causal:
        raise wrong("is_causal", "False, or the mask beside it, as PyTorch has it", True)
    if mask is None:
        if keys is not None and padding is not None:
            _refuse_low_rows("key_padding_mask", padding, keys)
        return _with_keys(call, keys)
    per_head = (batch * attention.num_heads, length, length)
    if mask.shape not in ((length, length), per_head):
        raise wrong("mask", f"shape {(length, length)} or {per_head}", tuple(mask.shape))
    seen = _hidden("mask", mask).logical_not()
    if seen.shape == (length, length) and torch.equal(seen, _diagonal(length, None, seen.device)):
        return _with_keys(call._replace(causal=True), keys)
    if is_causal and keys is None:
        raise wrong("is_causal", "False beside a mask that is not causal: PyTorch takes the one or the other", True)
    shaped = seen.reshape(1 if seen.dim() == 2 else batch, -1 if seen.dim() == 3 else 1, length, length)
    shaped = shaped if keys is None else shaped & keys
    _refuse_low_rows("mask", mask, shaped)
    return call._replace(mask=shaped)


def _nested_masked(call: StackCall, mask: Optional[Tensor], padding: Optional[Tensor], is_causal: bool) -> StackCall:
    """A causal mask of any length stands for that of each sequence; others do not fit all of them."""
    if padding is not None:
        raise wrong("key_padding_mask", "None: a nested tensor has no padding", "a mask")
    if mask is None and not is_causal:
        return call
    if mask is None or mask.dim() != 2 or not torch.equal(_hidden("mask", mask).logical_not(),
                                                          _diagonal(mask.shape[0], None, mask.device)):
        raise Unimplemented("mask: expected None or a causal one with a nested tensor: to use another, pad it "
                            "(torch.nested.to_padded_tensor)", field="mask")
    return call._replace(causal=True)


def _refuse_low_rows(name: str, mask: Tensor, seen: Tensor) -> None:
    """PyTorch gives a row that sees nothing 0 where it is of −inf, equal weights where it is of the lowest number."""
    if mask.is_floating_point() and not bool(seen.any(-1).all()) and bool((mask.isfinite() & (mask != 0)).any()):
        raise Unimplemented(f"{name}: expected True or −inf where a whole row is hidden, got the lowest number, by which "
                            "PyTorch weighs all keys alike: use −inf, or show the row something", field=name)


def _hidden(name: str, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise wrong(name, f"bool or floating numbers, as {name}.bool()", mask.dtype)
    low = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((low | (mask == 0)).all()):
        raise Unimplemented(f"{name}: expected True and False, or 0 and −inf, got other numbers, which would be a bias: "
                            "attnd.torch.replace() sends attention alone, which takes them", field=name)
    return low


def _with_keys(call: StackCall, keys: Optional[Tensor]) -> StackCall:
    """keys [batch or 1, 1, 1, length]: those that exist. As lengths where it is only the last ones that do not."""
    if keys is None or bool(keys.all()):
        return call
    batch, length = call.x.shape[:2]
    if keys.shape[1] == 1:
        flat = keys.reshape(-1, length).expand(batch, length)
        lengths = flat.sum(-1)
        if torch.equal(flat, torch.arange(length, device=flat.device) < lengths[:, None]):
            return call._replace(kv_lengths=lengths.tolist())
    return call._replace(mask=keys)


def _diagonal(length: int, window: Optional[Tuple[int, int]], device: torch.device) -> Tensor:
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(-window[0])


# ---- transformers

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
_ABSENT = ("encoder_hidden_states", "encoder_attention_mask", "head_mask")


def _model_layer(layer: nn.Module, layers: Sequence[Described], bound: inspect.BoundArguments) -> StackCall:
    given = dict(bound.arguments)
    for name, value in list(given.items()):
        if isinstance(value, dict) and bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name))
    for name in _ABSENT:
        if given.get(name) is not None:
            raise Unimplemented(f"{name}: expected None inside a remote stack; leave it out, or leave these layers here and "
                                "send their attention (attnd.transformers.register)", field=name)
    if given.get("output_attentions"):
        raise Unimplemented("output_attentions: expected False: what is inside a layer on a daemon stays there",
                            field="output_attentions")
    for name in _CACHES:
        if given.get(name) is not None:
            raise Unimplemented(f"{name}: expected None: a remote stack keeps no keys and values; call the model, or its "
                                "generate(), with use_cache=False", field=name)
    call = StackCall(given["hidden_states"], causal=layers[0].causal)
    check_rotary(layers[0], call.x, given.get("position_ids"), given.get("position_embeddings"))
    call = call._replace(positions=_positions(given.get("position_ids"), call.x))
    mask, starts = given.get("attention_mask"), given.get("cu_seq_lens_q")
    if starts is not None and mask is None and call.x.shape[0] == 1:  # as DataCollatorWithFlattening packs them
        return call._replace(cu_seqlens=starts.clone())
    return call if mask is None else _with_model_mask(call, mask, layers)


def check_rotary(layer: Described, x: Tensor, ids: Optional[Tensor], embeddings: Any) -> None:
    """Whether a model's rotary embeddings are those that the daemon makes: of the layer's configuration, at the positions.
    A model of 16 bits may have rounded its frequencies."""
    rotary = layer.rotary
    if rotary is None or embeddings is None:
        return
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        at = torch.arange(x.shape[1], device=x.device)[None] if ids is None else ids
        exact = torch.tensor(rotary.inverse_frequency, device=at.device)
        factor, near = rotary.attention_factor, 1e-3 if embeddings[0].dtype == torch.float32 else 2e-2

        def fits(frequencies: Tensor) -> bool:
            half = at[..., None].float() * frequencies
            angles = torch.cat([half, half], -1)
            return all(given.shape[-2:] == angles.shape[-2:] and bool(
                (given.float() - curve(angles) * factor).abs().max() < near)
                for given, curve in zip(embeddings, (torch.cos, torch.sin)))
        if not fits(exact) and not fits(exact.to(embeddings[0].dtype).float()):
            raise Unimplemented("position_embeddings: expected those of the layers' configuration at position_ids, which "
                                "the daemon makes by itself, got others: set rope_parameters of the configuration before "
                                "attnd.torch.offload, and give position_ids beside them", field="position_embeddings")


def _positions(ids: Optional[Tensor], x: Tensor) -> Optional[List[int]]:
    batch, length = x.shape[:2]
    if ids is None or torch.equal(ids, torch.arange(length, device=ids.device).expand(ids.shape)):
        return None
    found: List[int] = ids.expand(batch, length).reshape(-1).tolist()
    return found


def _with_model_mask(call: StackCall, mask: Tensor, layers: Sequence[Described]) -> StackCall:
    """Adds what the layout does not say of the mask already: the keys that exist, or all of it."""
    length = call.x.shape[1]
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise Unimplemented("attention_mask: expected a tensor of 4 dimensions, which attn_implementation sdpa and eager "
                            f"make, got {type(mask).__name__}", field="attention_mask")
    if mask.dim() == 2:
        return _with_keys(call, mask.bool()[:, None, None, :])
    seen = mask[..., :length].clone() if mask.dtype == torch.bool else ~_hidden("attention_mask", mask[..., :length])
    first = layers[0]
    pattern = _diagonal(length, first.windows, seen.device) if first.causal else torch.ones_like(seen[0, 0])
    keys = seen.any(-2, keepdim=True)
    if torch.equal((pattern & keys).expand(*seen.shape[:2], length, length), seen.expand(-1, -1, length, -1)):
        return _with_keys(call, keys)
    if any(layer.windows != first.windows for layer in layers) or bool((seen & ~pattern).any()):
        raise Unimplemented("attention_mask: expected the layers' own pattern and padding, got others: "
                            "attnd.transformers.register sends attention alone, which takes any mask",
                            field="attention_mask")
    return call._replace(mask=seen)
