"""LoRA adapters of PEFT inside layers: W·x + b + Σ scaling · B·A·dropout(x), over the active ones, as ops of the block."""
from __future__ import annotations

from typing import Any, List, Tuple

from torch import nn

from .refusal import refuse

__all__ = ["adapted", "is_adapted", "state_of"]

Maker = Any  # layers.Maker


def is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and type(module).__module__.startswith("peft.")


def state_of(module: Any) -> Tuple[Any, ...]:
    """A copy of what decides which adapters count, and how: PEFT changes it in place."""
    return (list(module.active_adapters), bool(module.disable_adapters), list(module.merged_adapters),
            dict(getattr(module, "scaling", {})))


def adapted(make: Maker, value: int, module: Any, stem: str, transposed: bool) -> int:
    """The linear below `stem` and its adapters."""
    if type(module).__name__ != "Linear" or ".lora." not in type(module).__module__:
        refuse(module, "of PEFT's adapters LoRA of linear layers is built: merge others (model.merge_and_unload() under "
                       "attnd.torch.local_weights(model)), or keep these layers here")
    if module.disable_adapters:
        refuse(module, "its adapters are disabled: for the model without them offload a copy, made before get_peft_model")
    if module.merged_adapters:
        refuse(module, "its adapters are merged: call model.unmerge_adapter(), or model.merge_and_unload() for good, both "
                       "under `with attnd.torch.local_weights(model):`")
    active: List[str] = [one for one in module.active_adapters if one in module.lora_A]
    made = make.linear(value, f"{stem}base_layer", transposed=transposed)
    for one in active:
        if one in module.lora_variant:
            refuse(module, f"adapter {one} is {type(module.lora_variant[one]).__name__}: LoRA alone is built, without DoRA "
                           "or other variants")
        if not module.scaling[one]:
            refuse(module, f"adapter {one} is scaled by 0: set_adapter to the others instead")
        inner = make.linear(make.dropout(value, f"{stem}lora_dropout.{one}"), f"{stem}lora_A.{one}")
        made = make.block.add(made, make.linear(inner, f"{stem}lora_B.{one}"), b_scale=float(module.scaling[one]))
    make.unused.update(f"{make.prefix}{stem}{inner}" for inner, _ in module.named_parameters()
                       if inner.split(".")[0].startswith("lora_") and inner.split(".")[1] not in active)
    return int(made)
