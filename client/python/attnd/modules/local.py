"""fetch, assign_ and local_weights: numbers of parameters on a daemon, read, written and lent to any code."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch import Tensor, nn

from ..errors import FailedPrecondition, brief, wrong
from .parameters import RemoteGradient, RemoteNumbers, RemoteParameter, stack_of
from .stack import RemoteStack

__all__ = ["assign_", "fetch", "local_weights"]


@brief
def fetch(tensor: Tensor) -> Tensor:
    """A copy of a parameter's numbers, or of a gradient's as p.grad has it, wherever they are."""
    if isinstance(tensor, RemoteGradient):
        tensor._live()
        made: Tensor = tensor._stack.gradient(tensor._name)
        return made
    found = stack_of(tensor)
    if found is None:
        return tensor.detach().clone()
    made = found[0].weights([found[1]])[found[1]].to(tensor.dtype, copy=True)
    return made


@brief
def assign_(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Writes a parameter, wherever it is, with a tensor of its shape."""
    if tuple(tensor.shape) != tuple(parameter.shape):
        raise wrong("tensor", f"shape {tuple(parameter.shape)}", tuple(tensor.shape))
    found = stack_of(parameter)
    if found is not None:
        found[0].assign({found[1]: tensor}, "assign_")
    else:
        with torch.no_grad():
            parameter.copy_(tensor)
    return parameter


@contextlib.contextmanager
def local_weights(*models: nn.Module) -> Iterator[None]:
    """In this block, parameters of the models on daemons are ordinary ones with their numbers; what has changed goes back at
    its end. Layers cannot be called in it.

        with attnd.torch.local_weights(model):
            model.apply(initialise)
    """
    stacks = list({id(module): module for model in models for module in model.modules()
                   if isinstance(module, RemoteStack) and module.is_remote}.values())
    lent: List[Tuple[RemoteStack, str, Any, Tensor]] = []
    for stack in stacks:
        weights = stack.weights()
        for name, tensor in stack._tensors().items():
            owner, _, last = name.rpartition(".")
            number = weights[name].to(tensor.dtype)
            lent.append((stack, name, tensor, number))
            stack.get_submodule(owner)._parameters[last] = nn.Parameter(number.clone(), tensor.requires_grad)
        stack._local = True
    try:
        yield
    finally:
        changed: Dict[int, Dict[str, Tensor]] = {}
        graded = []
        for stack, name, tensor, number in lent:
            owner, _, last = name.rpartition(".")
            own = stack.get_submodule(owner)._parameters
            now = own.get(last)
            own[last] = tensor
            if now is None or now.shape != number.shape:
                raise FailedPrecondition(f"local_weights: expected {name} of shape {tuple(number.shape)} at the block's end")
            if now.grad is not None:
                graded.append(name)
            if now.requires_grad != tensor.requires_grad:
                tensor.requires_grad_(now.requires_grad)
            if not _same_bits(now.detach().cpu(), number):
                changed.setdefault(id(stack), {})[name] = now.detach()
        for stack in stacks:
            stack._local = False
            if id(stack) in changed:
                stack.assign(changed[id(stack)], "local_weights")
    if graded:
        raise FailedPrecondition(f"local_weights: {graded[0]} got a gradient in this block, which is lost: run what makes "
                                 "gradients outside of it")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    words = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(words), other.contiguous().view(words))
