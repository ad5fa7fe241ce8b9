"""Lazy: a tensor whose numbers are not here yet; whatever needs them waits until they are. Deferred: one of them, the output
of an offloaded layer that nobody has computed yet, with its place in autograd's graph.
"""
from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import Unimplemented
from .parameters import called, refuse_memory

__all__ = ["Deferred", "Lazy"]

# These reach for the numbers past the dispatcher, where a tensor without storage has none.
_OF_STORAGE = frozenset("""
    numpy tolist __array__ data_ptr storage untyped_storage _typed_storage share_memory_ __dlpack__ __dlpack_device__
    __deepcopy__ __reduce_ex__ __repr__ __str__ __format__ apply_ map_ map2_
""".split())
# These look at the gradient that comes to this tensor.
_OF_GRADIENT = frozenset("""
    register_hook retain_grad register_post_accumulate_grad_hook grad_fn _backward_hooks retains_grad
""".split())


class Lazy(Tensor):
    _pending: Any  # result: gives the numbers; before_write: others may change them; is_kept: somebody will ask for them

    __hash__ = Tensor.__hash__

    @classmethod
    def of(cls, pending: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Lazy:
        make: Any = Tensor._make_wrapper_subclass
        made: Lazy = make(cls, shape, dtype=dtype, device=device)
        refuse_memory(made, "x: expected x.detach(), for C++ that reads or writes the memory of the output x of a layer on "
                            "a daemon")
        made._pending = pending
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Sequence[Any] = (),
                           keywords: Optional[Dict[str, Any]] = None) -> Any:
        name, how = called(function)
        keywords = keywords or {}
        with torch._C.DisableTorchFunctionSubclass():
            self = arguments[0] if arguments else None
            if isinstance(self, Lazy):
                if name in _OF_GRADIENT:
                    self._pending.is_kept = True
                elif name == "data" and how == "get":
                    return torch.ops.aten.alias.default(self).detach()
                elif name == "data":
                    raise TypeError("data: expected x = ... or x.copy_(...) for the output of a layer on a daemon")
            if name in _OF_STORAGE and not how:
                arguments = [torch.ops.aten.alias.default(one) if isinstance(one, Lazy) else one for one in arguments]
            return function(*arguments, **keywords)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Sequence[Any] = (),
                           keywords: Optional[Dict[str, Any]] = None) -> Any:
        of: Dict[int, Lazy] = {}
        name, schema = function.overloadpacket.__name__, function._schema
        if torch.Tag.inplace_view in function.tags and name != "detach_" and isinstance(arguments[0], Lazy):
            raise Unimplemented(f"{name}: expected x = x.{name[:-1]}(...) for a layer's output on a daemon, which keeps "
                                "its shape", field="x")
        if schema.is_mutable or any(given.alias_info is not None for given in schema.returns):
            tree_map(lambda given: isinstance(given, Lazy) and given._pending.before_write(), [arguments, keywords])

        def number(value: Any) -> Any:
            if not isinstance(value, Lazy):
                return value
            found = value._pending.result()
            of[id(found)] = value
            return found
        made = function(*tree_map(number, arguments), **tree_map(number, keywords or {}))
        return tree_map(lambda value: of.get(id(value), value), made)  # what was written in place is what it was


class Deferred(Lazy):
    """_pending is a chain.Pending."""
