"""attn_implementation="attnd" for Hugging Face transformers: attention and mask, registered under one name.

    import attnd.transformers
    attnd.transformers.register("127.0.0.1:7070")
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnd")

What a model asks of its attention is done: grouped heads, sliding windows, softcap, sinks, position bias, padding on
either side, caches, packed positions. The masks that transformers' own functions describe travel as options and
descriptions, without an array of all scores; all others are its bool masks. Needs a transformers with
AttentionMaskInterface (4.53 or later).
"""
from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple, Union, cast

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from . import torch as remote
from ._connection import torch_connections
from ._operator_options import described_first
from .client import Client, ConnectOptions
from .errors import Unimplemented, wrong_type
from .masks.models import LazyMask, model_mask

if TYPE_CHECKING:
    from .modules.stack import RemoteStack

__all__ = ["offload", "register"]


def register(address: Union[None, str, Sequence[str], Client] = None, *, name: str = "attnd", **options: Any) -> Client:
    """Connects to a daemon (attnd.connect's arguments, or a Client) and registers attention and mask under `name`.

    Registering a name again replaces its connection. Several names may exist, each with its own daemon.
    """
    client = remote.connect(address, name=f"transformers:{name}", **options)
    AttentionInterface.register(name, _attention_of(f"transformers:{name}"))
    AttentionMaskInterface.register(name, model_mask)
    return client


def offload(model: torch.nn.Module, address: Union[None, str, Sequence[str], Client] = None, *, optimizer: str = "server",
            connection: Optional[Dict[str, Any]] = None, **options: Any) -> List[RemoteStack]:
    """Puts each stack of a model's layers (BertLayer, RobertaLayer, GPT2Block, LlamaDecoderLayer, MistralDecoderLayer,
    Qwen2 and Qwen3, Gemma) on the daemon at `address`: docs/MODULES.md. The model is changed, and used as before.

    options: attnd.torch.offload's, and attnd.connect's such as wait_for_ready. connection: more of attnd.connect's. The
    model's cache is switched off, since a stack keeps no keys and values; output_attentions raises. Raises TypeError where
    no layer can be offloaded.
    """
    from .modules.models import MODELS
    found = [(owner, name, child) for owner in model.modules() for name, child in owner.named_children()
             if isinstance(child, torch.nn.ModuleList) and len(child) and type(child[0]).__name__ in MODELS]
    if not found:
        raise TypeError(f"{type(model).__name__} cannot be offloaded: expected layers of class {', '.join(MODELS)}; "
                        "attnd.transformers.register sends a model's attention alone")
    server = f"transformers:offload:{id(model)}"
    of_connect = {name: options.pop(name) for name in ConnectOptions.__annotations__ if name in options}
    remote.connect(address, name=server, **{**of_connect, **(connection or {})})
    made = [cast("RemoteStack", remote.offload(child, optimizer=cast(Any, optimizer), server=server, **options))
            for _, _, child in found]
    for (owner, name, _), stack in zip(found, made):
        setattr(owner, name, stack)
    _switch_off_caches(model)
    model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
    return made


def _switch_off_caches(model: Any) -> None:
    """In all configurations of the model, but not in what save_pretrained writes."""
    configs: List[Any] = [getattr(inner, "config", None) for inner in model.modules()]
    configs.append(getattr(model, "generation_config", None))
    found = {id(config): config for config in configs if hasattr(config, "use_cache")}
    model._attnd_use_cache = [(config, config.use_cache) for config in found.values()]
    for config in found.values():
        config.use_cache = False
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = MethodType(_save_pretrained, model)  # a method, which copies of the model take with them


def _save_pretrained(model: Any, *arguments: Any, **keywords: Any) -> Any:
    for config, use_cache in model._attnd_use_cache:
        config.use_cache = use_cache
    try:
        return type(model).save_pretrained(model, *arguments, **keywords)
    finally:
        for config, _ in model._attnd_use_cache:
            config.use_cache = False


def _refuse_attentions(model: Any, _: Tuple[Any, ...], keywords: Dict[str, Any]) -> None:
    wanted = keywords.get("output_attentions")
    if wanted or (wanted is None and getattr(model.config, "output_attentions", False)):
        raise Unimplemented("output_attentions: expected False: what is inside a layer on a daemon stays there",
                            field="output_attentions")


def _attention_of(server: str) -> Callable[..., Tuple[Tensor, None]]:
    def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
               dropout: float = 0.0, scaling: Optional[float] = None, is_causal: Optional[bool] = None,
               softcap: Optional[float] = None, s_aux: Optional[Tensor] = None, position_bias: Optional[Tensor] = None,
               cache: Any = None, **others: Any) -> Tuple[Tensor, None]:
        """query [batch, q_heads, q_len, dim], key and value [batch, kv_heads, kv_len, dim] → [batch, q_len, q_heads,
        dim], as transformers' sdpa_attention_forward, with softcap and sinks besides."""
        if type(cache).__name__ == "PagedAttentionCache":
            raise Unimplemented("cache: expected none, got a PagedAttentionCache: continuous batching runs with "
                                'attn_implementation="sdpa_paged"', field="cache")
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            raise wrong_type("attention_mask", "a tensor as transformers.masking_utils.sdpa_mask makes", attention_mask)
        wanted = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        causal = bool(query.shape[2] > 1 and attention_mask is None and wanted)
        if causal and key.shape[2] > query.shape[2]:  # an empty static cache: no row sees what lies behind
            key, value = key[:, :, :query.shape[2]], value[:, :, :query.shape[2]]
            position_bias = None if position_bias is None else position_bias[..., :query.shape[2]]
        q, k, v, _ = remote._four_dimensions(query, key, value, enable_gqa=True)
        common: Dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0, sink=s_aux, dropout_p=dropout, server=server)

        def dense() -> Any:
            mask, bias = _mask_and_bias(attention_mask, position_bias, k.shape[2])
            return remote.attention(q, k, v, causal="top_left" if causal else None, mask=mask, bias=bias, **common)

        def described() -> Any:
            return remote.attention(q, k, v, bias=position_bias, **cast(LazyMask, attention_mask).options, **common)
        lazy = isinstance(attention_mask, LazyMask) and attention_mask.shape == (q.shape[0], 1, q.shape[2], k.shape[2])
        out = described_first(torch_connections.client(server), described, dense) if lazy else dense()
        return out.transpose(1, 2).contiguous(), None
    return attend


def _mask_and_bias(attention_mask: Optional[Tensor], position_bias: Optional[Tensor], kv_len: int
                   ) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    if attention_mask is None:
        return None, position_bias
    if attention_mask.shape[-1] != kv_len:
        attention_mask = attention_mask[..., :kv_len]
    if attention_mask.dtype == torch.bool:
        return attention_mask, position_bias
    return None, attention_mask if position_bias is None else attention_mask + position_bias
