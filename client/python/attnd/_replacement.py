"""attnd.torch.replace(): changes PyTorch, takes that back, and finds what it cannot change.

Changed: the name scaled_dot_product_attention wherever a module has PyTorch's function under it, and the fast path, by
which nn.MultiheadAttention and nn.TransformerEncoder would pass it by. Warned of, once each: other holders of PyTorch's
function (another name, an attribute, a closure) and attention that has to return its weights.
"""
from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
from types import CellType, ModuleType
from typing import Any, Callable, Iterator, List, Set, Tuple

import torch
from torch.nn import functional

_NAME = "scaled_dot_product_attention"
_warned: Set[str] = set()
_lock = threading.Lock()


class Replacement:
    """`function` in place of what torch.nn.functional has now, until undo(). Any thread; the change is the process's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._before = function, functional.scaled_dot_product_attention
        self._attend, self._fast = functional.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
        if _holders(self._before):
            gc.collect()  # some may be garbage
        for holder in sorted(_holders(self._before)):
            _warn(holder, f"{holder} holds PyTorch's {_NAME}, and its calls do not reach the daemon: let it take the "
                  "function from torch.nn.functional at each call")
        self.names = self._exchange(self._before, function)  # after warnings, which may be errors
        functional.multi_head_attention_forward = _telling_of_weights(self._attend)
        torch.backends.mha.set_fastpath_enabled(False)

    def undo(self) -> None:
        """Puts everything back, names too that modules have imported meanwhile."""
        self._exchange(self._function, self._before)
        functional.multi_head_attention_forward = self._attend
        torch.backends.mha.set_fastpath_enabled(self._fast)

    @staticmethod
    def _exchange(old: object, new: object) -> Tuple[str, ...]:
        """Gives modules that have `old` under the function's own name the other one; their names."""
        found = [module for module in _modules() if vars(module).get(_NAME) is old]
        for module in found:
            setattr(module, _NAME, new)
        return tuple(f"{module.__name__}.{_NAME}" for module in found)


def _modules() -> List[ModuleType]:
    """Those loaded, of PyTorch's the one that has the function for its users alone."""
    return [module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)
            and (name == functional.__name__ or name.partition(".")[0] not in ("torch", "attnd"))]


def _holders(function: object) -> Set[str]:
    """Finds what else keeps the function: names of modules, functions, and classes whose objects do."""
    found = {f"{module.__name__}.{name}" for module in _modules()
             for name, value in list(vars(module).items()) if value is function and name != _NAME}
    owners = gc.get_referrers(function)
    for _ in range(3):  # a default lies in a tuple, an attribute in a dict, a closure in a tuple of cells
        inner = [owner for owner in owners if isinstance(owner, (dict, tuple, CellType)) and not _is_modules(owner)]
        found.update(_names(owners))
        owners = gc.get_referrers(*inner) if inner else []
    return found


def _is_modules(owner: object) -> bool:
    return isinstance(owner, dict) and "__name__" in owner and "__spec__" in owner


def _names(owners: List[Any]) -> Iterator[str]:
    for owner in owners:
        module = None if isinstance(owner, (dict, tuple, CellType, ModuleType)) else getattr(owner, "__module__", None)
        if isinstance(module, str) and module.partition(".")[0] not in ("torch", "attnd", "functools", "builtins"):
            yield f"{module}.{getattr(owner, '__qualname__', type(owner).__qualname__)}"


def _telling_of_weights(attend: Callable[..., Any]) -> Callable[..., Any]:
    """multi_head_attention_forward that warns where it must compute the weights and therefore everything itself."""
    @functools.wraps(attend)
    def telling(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("need_weights", True):
            _warn_of_weights()
        return attend(*arguments, **keywords)
    return telling


# Runs while a caller is compiled.
@torch.compiler.assume_constant_result  # type: ignore[misc, untyped-decorator, unused-ignore]
def _warn_of_weights() -> bool:
    module = _caller()
    _warn(f"weights {module}", f"{module} runs torch.nn.MultiheadAttention with need_weights=True, whose weights no "
          "daemon returns, so PyTorch computes it here: pass need_weights=False")
    return True


def _caller() -> str:
    """The innermost module on the stack that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in ("torch", "attnd"):
            return name
        frame = frame.f_back
    return "__main__"


def _warn(key: str, text: str) -> None:
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(f"attnd.torch.replace: {text}", UserWarning, stacklevel=4)
