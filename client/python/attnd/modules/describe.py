"""A module as a layer: by the describer of its class, PyTorch's own (layers.py) or a model's (models.py)."""
from __future__ import annotations

import torch
from torch import nn

from .layers import Described, Describer, Maker, Variant, refuse, torch_describer
from .models import MODELS

__all__ = ["describe"]


def describe(module: nn.Module, variant: Variant) -> Described:
    """The module as a layer."""
    tensors = [tensor for _, tensor in module.named_parameters()]
    if any(tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) for tensor in tensors):
        refuse(module, f"parameters have to be float32, float16 or bfloat16, got {tensors[0].dtype}")
    for name, tensor in module.named_parameters():
        if not isinstance(tensor, nn.Parameter):
            refuse(module, f"{name} is a tensor in a parameter's place, as torch.func.functional_call gives it: "
                           "attnd.torch.assign_(p, tensor) writes a parameter on a daemon")
    for name, inner in module.named_modules():
        if hasattr(inner, "parametrizations"):
            refuse(module, f"{name or 'it'} has parametrizations")
        if not name:
            continue  # what is put around a whole layer runs
        source = getattr(type(inner).forward, "__module__", "")
        if source.partition(".")[0] not in ("torch", "transformers", "peft"):
            refuse(module, f"{name} is a {type(inner).__name__} with a forward of its own, of {source}")
        if "forward" in inner.__dict__:
            refuse(module, f"{name} has a forward of its own, put in place of its class's")
        if inner._forward_pre_hooks or inner._forward_hooks or inner._backward_hooks or inner._backward_pre_hooks:
            refuse(module, f"hooks do not run inside a remote layer, and {name} has some")
    make = Maker(module, variant.dropout)
    found = _describer(module)(make, module, variant)
    missing = sorted({name for name, _ in module.named_parameters()} - set(found.names) - make.unused)
    if missing:
        refuse(module, f"parameters that it does not use here: {', '.join(missing)}")
    return found._replace(training=frozenset(make.training))


def _describer(module: nn.Module) -> Describer:
    """Raises TypeError for a class that has none."""
    found = torch_describer(module) or MODELS.get(type(module).__name__)
    if found is None:
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                refuse(module, f"offload its layers: model.{name} = attnd.torch.offload(model.{name})")
        refuse(module, "expected nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention, "
                       f"nn.Linear, nn.LayerNorm, an nn.Sequential of such pieces, or transformers' {', '.join(MODELS)}")
    return found
