"""Layers of Hugging Face transformers as blocks, by the names of their classes."""
from __future__ import annotations

import sys
from typing import Any, Dict, Optional, Tuple

import torch

from .layers import Described, Describer, Maker, Variant, activation, refuse
from .layout import Heads, Rotary

__all__ = ["MODELS"]


# ---- BERT and RoBERTa: normalised after each addition.

def _bert(make: Maker, layer: Any, variant: Variant) -> Described:
    attention = layer.attention.self
    if getattr(layer, "add_cross_attention", False):
        refuse(layer, "config.add_cross_attention=True")
    if getattr(attention, "position_embedding_type", "absolute") not in (None, "absolute"):
        refuse(layer, f"position_embedding_type={attention.position_embedding_type!r}")
    block, heads, dim = make.block, attention.num_attention_heads, attention.attention_head_size
    q, k, v = [Heads(make.linear(0, f"attention.self.{name}"), heads, dim) for name in ("query", "key", "value")]
    made = block.attention(q, k, v, causal=bool(layer.is_decoder), dropout_p=make.chance(attention, attention.dropout.p))

    def output(value: int, residual: int, name: str) -> int:
        value = make.dropout(make.linear(value, f"{name}.dense"), f"{name}.dropout")
        return make.layer_norm(block.add(value, residual), f"{name}.LayerNorm")
    attended = output(made, 0, "attention.output")
    inner = block.activation(make.linear(attended, "intermediate.dense"),
                             activation(layer, layer.intermediate.intermediate_act_fn))
    output(inner, attended, "output")
    return Described(block, tuple(make.names), type(layer).__name__, heads * dim, causal=bool(layer.is_decoder))


# ---- GPT-2: weights of Conv1D are stored transposed.

def _gpt2(make: Maker, layer: Any, variant: Variant) -> Described:
    attention = layer.attn
    if hasattr(layer, "crossattention"):
        refuse(layer, "config.add_cross_attention=True")
    if getattr(attention, "pruned_heads", None):
        refuse(layer, "heads were pruned")
    block, width, heads, dim = make.block, attention.embed_dim, attention.num_heads, attention.head_dim
    packed = make.linear(make.layer_norm(0, "ln_1"), "attn.c_attn", transposed=True)
    q, k, v = [Heads(packed, heads, dim, part * width) for part in range(3)]
    scale = dim ** -0.5 if attention.scale_attn_weights else 1.0
    by_layer = attention.scale_attn_by_inverse_layer_idx
    made = block.attention(q, k, v, causal=True, scale=scale, dropout_p=make.chance(attention, attention.attn_dropout.p))
    made = make.dropout(make.linear(made, "attn.c_proj", transposed=True), "attn.resid_dropout")
    attended = block.add(made, 0)
    made = make.linear(make.layer_norm(attended, "ln_2"), "mlp.c_fc", transposed=True)
    made = make.linear(block.activation(made, activation(layer, layer.mlp.act)), "mlp.c_proj", transposed=True)
    block.add(attended, make.dropout(made, "mlp.dropout"))
    scales = (scale / (attention.layer_idx + 1),) if by_layer else ()
    return Described(block, tuple(make.names), "GPT2Block", width, causal=True, attention_scale=scales)


# ---- Llama and its relatives: RMS norms, rotary positions, grouped heads, gated feed-forward.

def _llama(make: Maker, layer: Any, variant: Variant) -> Described:
    return _decoder(make, layer)


def _gemma(make: Maker, layer: Any, variant: Variant) -> Described:
    return _decoder(make, layer, weight_offset=1.0)


def _gemma2(make: Maker, layer: Any, variant: Variant) -> Described:
    return _decoder(make, layer, weight_offset=1.0, four_norms=True)


def _decoder(make: Maker, layer: Any, weight_offset: float = 0.0, four_norms: bool = False) -> Described:
    attention, block = layer.self_attn, make.block
    config, dim = attention.config, attention.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    causal = bool(getattr(attention, "is_causal", True))
    # Gemma multiplies by 1 + weight in float32; the others round x · rstd first.
    rounds = weight_offset == 0

    def norm(value: int, name: str) -> int:
        module = layer.get_submodule(name)
        if not type(module).__name__.endswith("RMSNorm") or type(module).__module__ != type(layer).__module__:
            refuse(layer, f"in the place of {name}: expected a {type(layer).__name__.replace('DecoderLayer', 'RMSNorm')}, "
                          f"got a {type(module).__name__}")
        return block.norm(value, "rms", make.parameter(name + ".weight"), epsilon=_epsilon(module),
                          weight_offset=weight_offset, round_before_weight=rounds)
    normed = norm(0, "input_layernorm")
    q, k, v = [Heads(make.linear(normed, f"self_attn.{name}_proj"), count, dim)
               for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))]
    options: Dict[str, Any] = {}
    if hasattr(attention, "q_norm"):
        if attention.q_norm.weight.shape != (dim,):
            refuse(layer, "q_norm over more than one head")
        options = dict(q_norm=make.parameter("self_attn.q_norm.weight"), k_norm=make.parameter("self_attn.k_norm.weight"),
                       qk_norm_epsilon=_epsilon(attention.q_norm), qk_norm_weight_offset=weight_offset,
                       qk_norm_round_before_weight=rounds)
    window, rotary = _window(attention, causal), _rotary(layer)
    made = block.attention(q, k, v, causal=causal, scale=float(attention.scaling), window=window,
                           softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
                           dropout_p=make.chance(attention, attention.attention_dropout), rotary=rotary, **options)
    made = make.linear(made, "self_attn.o_proj")
    made = norm(made, "post_attention_layernorm") if four_norms else made
    attended = block.add(0, made)
    normed = norm(attended, "pre_feedforward_layernorm" if four_norms else "post_attention_layernorm")
    gate = block.activation(make.linear(normed, "mlp.gate_proj"), activation(layer, layer.mlp.act_fn))
    made = make.linear(block.multiply(gate, make.linear(normed, "mlp.up_proj")), "mlp.down_proj")
    made = norm(made, "post_feedforward_layernorm") if four_norms else made
    block.add(attended, made)
    return Described(block, tuple(make.names), type(layer).__name__, config.hidden_size, windows=window, causal=causal,
                     rotary=rotary)


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _window(attention: Any, causal: bool) -> Optional[Tuple[int, int]]:
    """A row sees `sliding_window` keys, itself included."""
    size = getattr(attention, "sliding_window", None)
    if size is None and type(attention).__name__ == "MistralAttention":
        size = getattr(attention.config, "sliding_window", None)
    if size is None:
        return None
    if not causal:
        refuse(attention, "a sliding window without causal attention")
    return int(size) - 1, 0


def _rotary(layer: Any) -> Rotary:
    """The frequencies that the model's own rotary embedding has for this configuration."""
    config, name = layer.self_attn.config, type(layer).__name__.replace("DecoderLayer", "RotaryEmbedding")
    made = getattr(sys.modules[type(layer).__module__], name)(config)
    kind = getattr(layer.self_attn, "layer_type", None)
    frequencies = getattr(made, "inv_freq", None)
    factor, rope = getattr(made, "attention_scaling", 1.0), getattr(made, "rope_type", "default")
    if frequencies is None:  # one for each type of layer
        frequencies, factor = getattr(made, f"{kind}_inv_freq"), getattr(made, f"{kind}_attention_scaling")
        rope = made.rope_type[kind]
    if rope in ("dynamic", "longrope"):
        refuse(layer, f'rope_type "{rope}" changes with the length of a call')
    return Rotary(tuple(frequencies.to(torch.float32).tolist()), float(factor))


MODELS: Dict[str, Describer] = {
    "BertLayer": _bert, "RobertaLayer": _bert, "GPT2Block": _gpt2, "LlamaDecoderLayer": _llama,
    "MistralDecoderLayer": _llama, "Qwen2DecoderLayer": _llama, "Qwen3DecoderLayer": _llama, "GemmaDecoderLayer": _gemma,
    "Gemma2DecoderLayer": _gemma2, "Gemma3DecoderLayer": _gemma2}
