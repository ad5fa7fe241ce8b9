"""state_dict() and load_state_dict() of modules whose parameters are on a daemon, whole stacks and what is inside."""
from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..errors import FailedPrecondition, Unimplemented
from .parameters import RemoteParameter, stack_of

__all__ = ["Copies", "Loads", "add_inner_hooks", "add_stack_hooks", "after_state_dict", "before_state_dict",
           "drop_inner_hooks", "end_load", "take_state_dict"]

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
            with torch.inference_mode(False):
                state_dict[key] = weight.to(tensor.dtype, copy=True)
            stack.copies.add(found[1], state_dict[key])


class Loads:
    """Collects what a load_state_dict() copies into parameters on a daemon, after all hooks have seen it. The module that it
    began with sends it at once."""

    def __init__(self) -> None:
        self._module: Any = None  # which has begun
        self._tensors: Dict[str, Tensor] = {}

    @property
    def is_open(self) -> bool:
        return self._module is not None

    def begin(self, module: nn.Module) -> None:
        if not self.is_open:
            self._module = module

    def add(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor

    def end(self, stack: RemoteStack, module: Optional[nn.Module] = None) -> None:
        """module: None: whichever has begun, and has failed since."""
        if self.is_open and module in (None, self._module):
            tensors, self._tensors, self._module = self._tensors, {}, None
            stack.assign(tensors, "load_state_dict")


class _Take:
    """Has copies into a module inside a layer collected, and sends them where the load began with it."""

    def __init__(self, stack: RemoteStack, module: nn.Module) -> None:
        self.stack, self.module = weakref.ref(stack), weakref.ref(module)

    def __call__(self, *arguments: Any) -> None:
        stack, module = self.stack(), self.module()
        if stack is None or module is None:
            return
        if len(arguments) == 2:  # the module, and keys that do not fit: it has been loaded
            stack.loads.end(stack, module)
            return
        state_dict, prefix, metadata = arguments[:3]
        _begin(stack, module, state_dict, metadata, [
            prefix + last for last, tensor in module._parameters.items()
            for found in [stack_of(tensor)] if found is not None and found[0] is stack])


def _begin(stack: RemoteStack, module: nn.Module, state_dict: Dict[str, Any], metadata: Dict[str, Any], keys: Iterable[str]
           ) -> None:
    if not any(key in state_dict for key in keys):
        return
    if metadata.get("assign_to_params_buffers"):
        raise Unimplemented("load_state_dict: expected assign=False for parameters on a daemon, which stay the objects that "
                            "optimizers know", field="assign")
    stack.check_assign("load_state_dict")
    stack.loads.begin(module)


def add_inner_hooks(stack: RemoteStack, layer: nn.Module) -> None:
    if not stack._options.server_optimizer:
        return
    for module in layer.modules():
        mine: Any = module
        if module._parameters and not any(isinstance(hook, _Fill) and hook.stack() is stack
                                          for hook in mine._state_dict_hooks.values()):
            mine._register_state_dict_hook(_Fill(stack))
            mine._register_load_state_dict_pre_hook(_Take(stack, module))
            mine.register_load_state_dict_post_hook(_Take(stack, module))


def drop_inner_hooks(layer: nn.Module) -> None:
    for module in layer.modules():
        mine: Any = module
        for hooks in (mine._state_dict_hooks, mine._load_state_dict_pre_hooks, mine._load_state_dict_post_hooks):
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
    """Has copies into the layers' parameters collected, until end_load."""
    if stack._options.single:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}0.{key[len(prefix):]}"] = state_dict.pop(key)
    if stack.is_remote:
        stack.refresh()
        _begin(stack, stack, state_dict, metadata, [prefix + name for name in stack._tensors()])


def end_load(stack: RemoteStack, _: Any) -> None:
    stack.loads.end(stack, stack)


def add_stack_hooks(stack: RemoteStack) -> None:
    mine: Any = stack
    mine.register_state_dict_pre_hook(before_state_dict)
    mine._register_state_dict_hook(after_state_dict)
    mine._register_load_state_dict_pre_hook(take_state_dict, with_module=True)
    mine.register_load_state_dict_post_hook(end_load)
