"""fetch, assign_, local_weights and local_gradients: numbers of parameters on a daemon and of their gradients, read, written
and lent to any code."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..errors import FailedPrecondition, brief, wrong
from .owning import become, refuse_lent
from .parameters import RemoteGradient, stack_of
from .stack import RemoteStack

__all__ = ["assign_", "fetch", "local_gradients", "local_weights"]


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
    its end. Layers cannot be called in it. Gradients stay on the daemon: fetch(p.grad) gives their numbers.

        with attnd.torch.local_weights(model):
            model.apply(initialise)
    """
    stacks = _stacks(models)
    if any(stack.lends_gradients for stack in stacks):
        raise FailedPrecondition("local_weights: expected a block that is not in one of local_gradients: in it "
                                 "attnd.torch.fetch(p.grad) gives the numbers of a gradient")
    lent: List[Tuple[RemoteStack, str, Any, Any, Tensor, Optional[Tensor]]] = []
    for stack, weights in [(stack, stack.weights()) for stack in stacks]:  # all have come before anything changes
        for name, tensor in stack._tensors().items():
            owner: Any = stack.get_submodule(name.rpartition(".")[0])
            number = weights[name].to(tensor.dtype)
            now = nn.Parameter(number.clone(), tensor.requires_grad)
            gradient = now.grad = _gradient_beside(stack, name, now)
            lent.append((stack, name, owner, tensor, number, gradient))
            owner._parameters[name.rpartition(".")[2]] = now
        stack._local = True
    try:
        yield
    finally:
        changed: Dict[int, Dict[str, Tensor]] = {}
        graded, wrongly, forgotten = [], [], []
        for stack, name, owner, tensor, number, gradient in lent:  # in the module that has it, wherever that is by now
            last = name.rpartition(".")[2]
            now = owner._parameters.get(last)
            owner._parameters[last] = tensor
            if now is None or now.shape != number.shape:
                wrongly.append((name, number))
                continue
            if now.grad is None and gradient is not None:
                forgotten.append((stack, name))
            elif now.grad is not gradient:
                graded.append(name)
            now.grad = None
            if now.requires_grad != tensor.requires_grad:
                tensor.requires_grad_(now.requires_grad)
            if not _same_bits(now.detach().cpu(), number):
                changed.setdefault(id(stack), {})[name] = now.detach()
            become(now, tensor)
        for stack in stacks:
            stack._local = False
        for stack, name in forgotten:
            stack.forget([name])
        written = [stack for stack in stacks if id(stack) in changed]
        for stack in written:
            stack.check_assign("local_weights")
        with contextlib.ExitStack() as assigns:  # one that fails keeps none from the others
            for stack in written:
                assigns.callback(stack.assign, changed[id(stack)], "local_weights")
    for name, number in wrongly:
        raise FailedPrecondition(f"local_weights: expected {name} of shape {tuple(number.shape)} at the block's end")
    if graded:
        raise FailedPrecondition(f"local_weights: {graded[0]} got a gradient in this block, which is lost: run what makes "
                                 "gradients outside of it")


@contextlib.contextmanager
def local_gradients(*models: nn.Module) -> Iterator[None]:
    """In this block, between backward and step, gradients of the models' parameters on daemons are ordinary tensors; what
    has changed goes back at its end, and the next step uses it: None is none, 0 is 0. Neither backward nor step in it.

        loss.backward()
        with attnd.torch.local_gradients(model):
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
        opt.step()
    """
    refuse_lent(models)
    stacks = [stack for stack in _stacks(models) if not stack.lends_gradients]
    with contextlib.ExitStack() as lent:
        for stack in stacks:
            stack.lend_gradients()
            lent.callback(stack.take_gradients)
        yield


def _gradient_beside(stack: RemoteStack, name: str, now: nn.Parameter) -> Optional[Tensor]:
    """The gradient on the daemon, as that of an ordinary parameter."""
    state = stack.gradient_state(name)
    return None if state is None else RemoteGradient.of(stack, name, state, now.shape, now)


def _stacks(models: Iterable[nn.Module]) -> List[RemoteStack]:
    """Those that have parameters of the models on daemons, with their layers as they are now."""
    found = [stack_of(parameter) for model in models for parameter in model.parameters()]
    stacks = list({id(at[0]): at[0] for at in found if at is not None}.values())
    for stack in stacks:
        stack.refresh()
    return stacks


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    words = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(words), other.contiguous().view(words))
