"""state_dict() and load_state_dict() of modules whose parameters are on a daemon, whole stacks and what is inside."""
from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, List, Tuple

import torch
from torch import Tensor, nn

from ..errors import FailedPrecondition, Unimplemented
from .parameters import Loaded, RemoteParameter, stack_of

__all__ = ["Copies", "add_inner_hooks", "add_stack_hooks", "after_state_dict", "before_state_dict", "drop_inner_hooks",
           "take_state_dict"]

RemoteStack = Any  # stack.RemoteStack


class Copies:
    """Watches the tensors that state_dict() gave. In PyTorch they are the parameters' own numbers, here they are copies:
    what is written into one would be lost."""

    def __init__(self) -> None:
        self._given: List[Tuple[str, Any, int]] = []  # name, weak reference, version
        self._held: Dict[str, Tensor] = {}  # the last of each, until it has been looked at

    def add(self, name: str, tensor: Tensor) -> None:
        self._given.append((name, weakref.ref(tensor), tensor._version))
        self._held[name] = tensor

    def forget(self, names: Iterable[str]) -> None:
        """They have other numbers now."""
        gone = set(names)
        self._given = [one for one in self._given if one[0] not in gone]
        self._held = {name: tensor for name, tensor in self._held.items() if name not in gone}

    def check(self) -> None:
        """Raises where one of them was written."""
        for name, found, version in self._given:
            tensor = found()
            if tensor is not None and tensor._version != version:
                raise FailedPrecondition(f"state_dict: {name} was written in what state_dict() gave, which is a copy of the "
                                         "daemon's numbers: give that dictionary to load_state_dict")

    def let_go(self) -> None:
        """Has none live longer for it."""
        self._held.clear()
        self._given = [one for one in self._given if one[1]() is not None]


class _Fill:
    """The daemon's tensors in the place of meta tensors, for a module inside a layer."""

    def __init__(self, stack: RemoteStack) -> None:
        self.stack = weakref.ref(stack)

    def __call__(self, module: nn.Module, state_dict: Dict[str, Any], prefix: str, _: Any) -> None:
        stack = self.stack()
        for last, tensor in module._parameters.items():
            found = stack_of(tensor)
            key = prefix + last
            if found is None or found[0] is not stack or isinstance(state_dict.get(key), (RemoteParameter, type(None))):
                continue  # gone, or wanted as it is (keep_vars)
            weight = stack._fetched.get(found[1])
            if weight is None:
                weight = stack.weights([found[1]])[found[1]]
            assert tensor is not None
            state_dict[key] = weight.to(tensor.dtype, copy=True)
            stack.copies.add(found[1], state_dict[key])


class _Take:
    """Sends what is loaded into a module inside a layer to the daemon."""

    def __init__(self, stack: RemoteStack, module: nn.Module) -> None:
        self.stack, self.module = weakref.ref(stack), weakref.ref(module)

    def __call__(self, state_dict: Dict[str, Any], prefix: str, metadata: Dict[str, Any], *_: Any) -> None:
        stack, module = self.stack(), self.module()
        if stack is not None and module is not None:
            tensors = {prefix + last: (found[1], tensor.shape) for last, tensor in module._parameters.items()
                       for found in [stack_of(tensor)] if tensor is not None and found is not None and found[0] is stack}
            _give(stack, state_dict, metadata, tensors)


def _give(stack: RemoteStack, state_dict: Dict[str, Any], metadata: Dict[str, Any],
          tensors: Dict[str, Tuple[str, torch.Size]]) -> None:
    given = {key: name for key, (name, shape) in tensors.items() if isinstance(state_dict.get(key), Tensor)
             and not isinstance(state_dict[key], Loaded) and state_dict[key].shape == shape}
    if given and metadata.get("assign_to_params_buffers"):
        raise Unimplemented("load_state_dict: expected assign=False for parameters on a daemon, which stay the objects that "
                            "optimizers know", field="assign")
    stack.assign({name: state_dict[key] for key, name in given.items()}, "load_state_dict")
    for key in given:
        state_dict[key] = torch.empty(state_dict[key].shape, dtype=state_dict[key].dtype, device="meta").as_subclass(Loaded)


def add_inner_hooks(stack: RemoteStack, layer: nn.Module) -> None:
    if not stack._options.server_optimizer:
        return
    for module in layer.modules():
        mine: Any = module
        if module._parameters and not any(isinstance(hook, _Fill) and hook.stack() is stack
                                          for hook in mine._state_dict_hooks.values()):
            mine._register_state_dict_hook(_Fill(stack))
            mine._register_load_state_dict_pre_hook(_Take(stack, module))


def drop_inner_hooks(layer: nn.Module) -> None:
    for module in layer.modules():
        mine: Any = module
        for hooks in (mine._state_dict_hooks, mine._load_state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), (_Fill, _Take))]:
                del hooks[key]


def before_state_dict(stack: RemoteStack, prefix: str, keep_vars: bool) -> None:
    if stack.is_remote and not keep_vars:
        stack._fetched = stack.weights()


def after_state_dict(stack: RemoteStack, state_dict: Dict[str, Any], prefix: str, _: Any) -> None:
    stack._fetched = {}
    if stack._options.single:
        for key in [key for key in state_dict if key.startswith(f"{prefix}0.")]:
            state_dict[prefix + key[len(prefix) + 2:]] = state_dict.pop(key)


def take_state_dict(stack: RemoteStack, state_dict: Dict[str, Any], prefix: str, metadata: Dict[str, Any], *_: Any) -> None:
    """Sends what is loaded to the server at once; torch then finds what it need not copy."""
    if stack._options.single:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}0.{key[len(prefix):]}"] = state_dict.pop(key)
    if stack.is_remote:
        stack.refresh()
        every = {prefix + name: (name, tensor.shape) for name, tensor in stack._tensors().items()}
        _give(stack, state_dict, metadata, every)


def add_stack_hooks(stack: RemoteStack) -> None:
    mine: Any = stack
    mine.register_state_dict_pre_hook(before_state_dict)
    mine._register_state_dict_hook(after_state_dict)
    mine._register_load_state_dict_pre_hook(take_state_dict, with_module=True)
