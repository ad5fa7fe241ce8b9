"""RemoteRanges: a ModuleList or Sequential whose layers run on several daemons, as one stack (stack.RemoteStack) on each.

    model.encoder.layers = attnd.torch.offload(model.encoder.layers, servers=["a", "b"])

The layers are its children under their names, so that state_dict(), loops and slices are those of one list. What one stack
gives, the next one takes: activations pass through this process.
"""
from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any, Dict, Iterator, List, NoReturn, Sequence, Tuple

import torch
from torch import nn

from .remote_call import uncompiled
from .stack import RemoteStack, part_of
from .states import after_state_dict, before_state_dict, end_load, take_state_dict

__all__ = ["RemoteRanges", "cut"]


def cut(layers: Sequence[nn.Module], count: int) -> List[int]:
    """Ends of `count` ranges of consecutive layers, of which the most expensive is as cheap as can be."""
    costs = _costs(layers)
    total = [*accumulate(costs, initial=0.0)]
    best: Dict[int, Tuple[float, Tuple[int, ...]]] = {0: (0.0, ())}  # by the end of the ranges so far
    for n in range(count):
        best = {end: min((max(most, total[end] - total[begin]), (*ends, end))
                         for begin, (most, ends) in best.items() if begin < end)
                for end in range(n + 1, len(layers) - count + n + 2)}
    return list(best[len(layers)][1])


def _costs(layers: Sequence[nn.Module]) -> List[float]:
    """Adds up, for each layer, its parts of all memory and of all operations."""
    memory, operations = [], []
    for layer in layers:
        parameters = list(layer.parameters())
        memory.append(sum(one.numel() * (4 if one.requires_grad else 1) for one in parameters))  # gradient, two moments
        operations.append(sum(one.numel() * (3 if one.requires_grad else 2) for one in parameters if one.dim() > 1))
    return [one / max(1, sum(memory)) + other / max(1, sum(operations)) for one, other in zip(memory, operations)]


class RemoteRanges(nn.Module):
    """Made by attnd.torch.offload(..., servers=)."""

    stacks: Tuple[RemoteStack, ...]  # first to last; no children, as their layers are

    def __init__(self, stacks: Sequence[RemoteStack]) -> None:
        super().__init__()
        self.stacks = tuple(stacks)
        for stack in stacks:
            for name, layer in stack.named_children():
                self.add_module(name, layer)
        self.training = stacks[0].training
        mine: Any = self
        mine.register_state_dict_pre_hook(_before_state_dict)
        mine._register_state_dict_hook(_after_state_dict)
        mine._register_load_state_dict_pre_hook(_take_state_dict, with_module=True)
        mine.register_load_state_dict_post_hook(_end_load)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __getitem__(self, index: Any) -> Any:
        return part_of(list(self.named_children()), index, self.stacks[0]._options.is_sequential)

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        name = list(self._modules)[index]
        owner = next(stack for stack in self.stacks if name in stack._modules)
        setattr(owner, name, layer)
        self._modules[name] = layer

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(self.run)(arguments, keywords)
        return self.run(arguments, keywords)

    def run(self, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
        """All layers. Those of the last stack have the others' computed, each micro-batch as it comes."""
        *others, last = self.stacks
        for stack in others:
            x = stack.run(arguments, keywords, is_now=False)
            arguments = (x[0] if isinstance(x, tuple) else x, *arguments[1:])
        return last.run(arguments, keywords)

    def extra_repr(self) -> str:
        return "; ".join(f"{len(stack)} layers {stack.extra_repr()}" for stack in self.stacks)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for stack in self.stacks:
            stack._apply(fn, recurse)
        return self

    def __deepcopy__(self, memo: Dict[int, Any]) -> RemoteRanges:
        made = RemoteRanges([copy.deepcopy(stack, memo) for stack in self.stacks])
        made.training = self.training
        memo[id(self)] = made
        return made

    def __prepare_scriptable__(self) -> NoReturn:
        self.stacks[0].__prepare_scriptable__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("pickle: expected the model's state_dict(), as in torch.save(model.state_dict(), path): layers on "
                        "daemons cannot be pickled; copy.deepcopy copies them")


def _before_state_dict(ranges: RemoteRanges, prefix: str, keep_vars: bool) -> None:
    for stack in ranges.stacks:
        before_state_dict(stack, prefix, keep_vars)


def _after_state_dict(ranges: RemoteRanges, state_dict: Dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
    for stack in ranges.stacks:
        after_state_dict(stack, state_dict, prefix, metadata)


def _take_state_dict(ranges: RemoteRanges, *arguments: Any) -> None:
    for stack in ranges.stacks:
        take_state_dict(stack, *arguments)


def _end_load(ranges: RemoteRanges, keys: Any) -> None:
    for stack in ranges.stacks:
        end_load(stack, keys)
