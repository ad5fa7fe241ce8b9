"""Watch: whether modules are still what they were when their layers were described. Told in some 30 µs for twelve layers,
so that it can be asked before each call. Hooks are refused where they are registered: inside a remote layer none would run.
"""
from __future__ import annotations

import collections
import operator
import sys
import weakref
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..errors import Unimplemented
from .adapters import is_adapted, state_of

__all__ = ["Watch", "has_hooks", "refuse_around", "refuse_captures", "refuse_hooks"]

_function_modes: Any = _get_current_function_mode_stack
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# transformers collects what modules give by hooks, which it puts into all that have something to collect.
_CAPTURING = "transformers.utils.output_capturing"
_captures: List[bool] = []  # whether it has put some where none run


def _collector() -> Any:
    return getattr(sys.modules.get(_CAPTURING), "_active_collector", None)


def refuse_captures() -> None:
    """In a call of a layer: of what is inside it."""
    wanted = (_collector().get() or {}) if _captures else {}
    for name in wanted:
        if "hidden_states" not in name:
            raise Unimplemented(f"output_{name}: expected False: what is inside a layer on a daemon stays there",
                                field=f"output_{name}")


def _global_hooks() -> Iterator[Any]:
    every: Any = nn.modules.module
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks",
                 "_global_backward_hooks"):
        yield from getattr(every, name).values()


def _tracks(hook: Any) -> bool:
    """A ModuleTracker's: it says in which module an operation runs, and no operation of a layer's inside runs here."""
    return type(getattr(hook, "__self__", None)).__module__ == "torch.utils.module_tracker"


def refuse_around() -> None:
    """In a call of a layer: of what PyTorch would do to each module inside it, or to each operation."""
    every: Any = nn.modules.module
    if every._has_any_global_hook() and not all(map(_tracks, _global_hooks())):
        raise Unimplemented("hook: expected no hook of all modules (torch.nn.modules.module.register_module_...): it would "
                            "not run inside layers on a daemon; register it on the layers, or on the modules around them",
                            field="hook")
    for mode in [*_get_current_dispatch_mode_stack(), *_function_modes()]:
        of = type(mode).__module__
        if of == "torch.utils.flop_counter":
            raise Unimplemented("FlopCounterMode: expected none around layers on a daemon, whose operations do not run here "
                                "and would count as 0: count the model before attnd.torch.offload", field="mode")
        if of.partition(".")[0] != "torch":
            raise Unimplemented(f"{type(mode).__name__}: expected no mode of torch.overrides or of "
                                "torch.utils._python_dispatch around layers on a daemon, whose operations it would not see: "
                                "end its block before they are called", field="mode")
    keys: Any = torch._C._TorchDispatchModeKey
    is_traced = any(torch._C._get_dispatch_mode(key) is not None
                    for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
    if is_traced or torch._C._get_tracing_state() is not None:
        raise Unimplemented("trace: expected a call with numbers, got one that is traced (torch.jit.trace, torch.export, "
                            "make_fx, FakeTensorMode), whose output would become a constant: trace the model before "
                            "attnd.torch.offload; torch.compile(model) works", field="trace")
    if torch._C._are_functorch_transforms_active():
        raise Unimplemented("torch.func: expected no transform (grad, vjp, jvp, vmap) of layers on a daemon: call them, and "
                            "then backward() or torch.autograd.grad of inputs", field="transform")


class _NoHooks(collections.OrderedDict):  # type: ignore[type-arg]
    """A module's empty dictionary of hooks, which stays so."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)

    def __setitem__(self, key: Any, value: Any) -> None:
        if _collector() is not None and getattr(value, "__module__", None) == _CAPTURING:
            _captures.append(True)  # transformers puts them everywhere, whatever is wanted: see refuse_captures
            return
        if isinstance(value, BasePruningMethod):  # so that it can put back the parameter that it was to prune
            vars(self._module()).pop(value._tensor_name, None)
        raise Unimplemented("hook: hooks inside layers that were offloaded do not run, since what is inside stays on the "
                            "daemon; register it on the layer, or on the model around it", field="hook")

    def __reduce__(self) -> Tuple[Any, ...]:
        return collections.OrderedDict, ()


def refuse_hooks(layers: Sequence[nn.Module]) -> None:
    """Refuses hooks of what is inside a layer. Those of the layer itself run."""
    for layer in layers:
        for module in layer.modules():
            for name in _HOOKS if module is not layer else ():
                if not getattr(module, name):
                    module.__dict__[name] = _NoHooks(module)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


def _options(module: nn.Module) -> Tuple[str, ...]:
    return tuple(name for name in module.__dict__ if not name.startswith("_"))


class Watch:
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._modules = list({id(module): module for layer in layers for module in layer.modules()}.values())
        self._dicts = [module.__dict__ for module in self._modules]
        self._getters = [(operator.itemgetter(*_options(module)), module.__dict__) for module in self._modules]
        # Those that are empty too: what comes into them later.
        self._inner: List[Dict[str, Any]] = [inner for module in self._modules
                                             for inner in (module._modules, module._parameters) if inner]
        self._empty: List[Dict[str, Any]] = [inner for module in self._modules
                                             for inner in (module._modules, module._parameters) if not inner]
        self._parameters = [tensor for module in self._modules for tensor in module._parameters.values()]
        self._adapted = [module for module in self._modules if is_adapted(module)]
        self._saved_inner = [dict(inner) for inner in self._inner]
        self._saved = self._look()

    def _look(self) -> Tuple[Any, ...]:
        return ([get(values) for get, values in self._getters], list(map(len, self._dicts)),
                [module.__class__ for module in self._modules], list(map(type, self._parameters)),
                [state_of(module) for module in self._adapted])

    def changed(self) -> bool:
        try:
            return (self._inner != self._saved_inner or any(self._empty) or self._look() != self._saved)
        except Exception:  # comparing a tensor with another, an option that is gone
            return True
