"""A module as a layer: by the describer of its class, PyTorch's own (layers.py) or a model's (models.py)."""
from __future__ import annotations

import inspect
from typing import Any, Optional, Tuple

import torch
from torch import nn

from .layers import Described, Describer, Maker, Variant, refuse, torch_describer
from .models import MODELS

__all__ = ["describe", "other_method"]


_LIBRARIES = ("torch", "transformers", "peft")
_WRAPPERS = ("attnd", "contextlib", "functools")  # whose functions stand in the place of a library's
_FOR_ALL = ("transformers.activations", "transformers.pytorch_utils")  # pieces of any model
_CALLING = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")  # of nn.Module's methods
# A class may have these of its own: no forward calls them.
_BESIDE = frozenset("""
    __init__ __repr__ extra_repr train eval reset_parameters _reset_parameters __setstate__ __getstate__
""".split())


def _root(name: Optional[str]) -> str:
    return (name or "").partition(".")[0]


def other_method(module: nn.Module) -> Optional[Tuple[str, str]]:
    """A method that a library's forward calls, in whose place there is another, and where that is from."""
    kind = type(module)
    for base in [base for base in kind.__mro__ if _root(base.__module__) in _LIBRARIES]:
        names = _CALLING if base is nn.Module else [name for name, own in vars(base).items() if inspect.isfunction(own)]
        for name in names:
            owner = next(one for one in kind.__mro__ if name in vars(one))
            written: Any = getattr(vars(owner)[name], "__globals__", {}).get("__name__", owner.__module__)
            if name not in _BESIDE and _root(owner.__module__) not in _LIBRARIES:
                return name, owner.__module__
            if name not in _BESIDE and _root(written) not in (*_LIBRARIES, *_WRAPPERS):
                return name, written
            if name in module.__dict__ and name not in ("forward", "__deepcopy__"):
                return name, "its own instance"
    return None


def _refuse_other_method(layer: nn.Module, name: str, inner: nn.Module) -> None:
    other = other_method(inner)
    if other is not None:
        refuse(layer, f"{name} is a {type(inner).__name__} with a {other[0]} of its own, of {other[1]}")


def describe(module: nn.Module, variant: Variant) -> Described:
    """The module as a layer."""
    tensors = [tensor for _, tensor in module.named_parameters()]
    if any(tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) for tensor in tensors):
        refuse(module, f"parameters have to be float32, float16 or bfloat16, got {tensors[0].dtype}")
    for name, tensor in module.named_parameters():
        if not isinstance(tensor, nn.Parameter):
            refuse(module, f"{name} is a tensor in a parameter's place, as torch.func.functional_call gives it: "
                           "attnd.torch.assign_(p, tensor) writes a parameter on a daemon")
    is_model = _root(type(module).__module__) == "transformers"
    for name, inner in module.named_modules():
        if hasattr(inner, "parametrizations"):
            refuse(module, f"{name or 'it'} has parametrizations")
        if not name:
            continue  # what is put around a whole layer runs
        _refuse_other_method(module, name, inner)
        source = type(inner).__module__
        if is_model and _root(source) == "transformers" and source not in (type(module).__module__, *_FOR_ALL):
            refuse(module, f"{name} is a {type(inner).__name__}, of another model ({source})")
        if "forward" in inner.__dict__:
            refuse(module, f"{name} has a forward of its own, put in place of its class's")
        if inner._forward_pre_hooks or inner._forward_hooks or inner._backward_hooks or inner._backward_pre_hooks:
            refuse(module, f"hooks do not run inside a remote layer, and {name} has some")
    make, describer = Maker(module, variant.dropout), _describer(module)
    _refuse_other_method(module, "it", module)
    found = describer(make, module, variant)
    missing = sorted({name for name, _ in module.named_parameters()} - set(found.names) - make.unused)
    if missing:
        refuse(module, f"parameters that it does not use here: {', '.join(missing)}")
    return found._replace(training=frozenset(make.training))


def _describer(module: nn.Module) -> Describer:
    """Raises TypeError for a class that has none."""
    is_model = _root(type(module).__module__) == "transformers"
    found = torch_describer(module) or (MODELS.get(type(module).__name__) if is_model else None)
    if found is None:
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                refuse(module, f"offload its layers: model.{name} = attnd.torch.offload(model.{name})")
        refuse(module, "expected nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention, "
                       f"nn.Linear, nn.LayerNorm, an nn.Sequential of such pieces, or transformers' {', '.join(MODELS)}")
    return found
