"""StackLayer: a layer of a remote stack, as loops over it find them; Pending: what one gives to the next.

The last layer's call runs all of them, as one call of the daemon. What is between two layers does not exist here, so that
anything else done with it, or a layer left out, is refused.
"""
from __future__ import annotations

from typing import Any, Dict, NoReturn, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..errors import Unimplemented

__all__ = ["Pending", "StackLayer", "advance", "uncompiled"]

RemoteStack = Any  # stack.RemoteStack

_INSTEAD = ("; the layers of one stack run as one call. To look between them, offload those before and after as two stacks, "
            "or each layer alone: `for n in range(len(layers)): layers[n] = attnd.torch.offload(layers[n])` before")


def uncompiled(function: Any) -> Any:
    """As it is, in a function that torch.compile traces: a call of a daemon is nothing to compile."""
    import torch._dynamo
    disable: Any = torch._dynamo.disable
    return disable(function)


def _refuse(what: str) -> NoReturn:
    raise Unimplemented(what + _INSTEAD, field="layers")


_AS_X = {"shape", "dtype", "device", "layout", "ndim", "size", "dim", "numel", "is_nested", "is_cuda", "is_floating_point"}


class Pending:
    """The output of all layers before `following`, which nobody has computed."""

    __slots__ = ("stack", "arguments", "keywords", "following", "grad_enabled", "version", "used")

    def __init__(self, stack: RemoteStack, arguments: Tuple[Any, ...], keywords: Dict[str, Any], following: int) -> None:
        self.stack, self.arguments, self.keywords, self.following = stack, arguments, keywords, following
        self.grad_enabled, self.version, self.used = torch.is_grad_enabled(), _versions(arguments, keywords), False

    def refuse(self, what: str) -> NoReturn:
        _refuse(f"{what}: the output of layer {self.following - 1} of {len(self.stack)} offloaded layers can go into the "
                "next layer alone")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name in _AS_X:
            return getattr(self._x, name)
        self.refuse(name)

    @property
    def _x(self) -> Tensor:
        """What layer 0 got: the output has its shape, type and place."""
        given = [*self.arguments, *self.keywords.values()]
        return next(value for value in given if isinstance(value, Tensor))

    @property
    def requires_grad(self) -> bool:
        return self.grad_enabled and (self._x.requires_grad or any(p.requires_grad for p in self.stack.parameters()))

    def __repr__(self) -> str:
        return f"<output of layer {self.following - 1} of an offloaded stack>"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Any = None) -> Any:
        given = _flat([*arguments, *(keywords or {}).values()])
        next(value for value in given if isinstance(value, Pending)).refuse(getattr(function, "__name__", "a function"))


def _operator(name: str) -> Any:
    def refuse(self: Pending, *_: Any) -> NoReturn:
        self.refuse(name.strip("_"))
    return refuse


for _name in ("add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow rpow neg abs iadd isub imul itruediv lt le gt "
              "ge len iter getitem setitem bool float int index array").split():
    setattr(Pending, f"__{_name}__", _operator(f"__{_name}__"))


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _versions(arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Tuple[int, ...]:
    return tuple(value._version for value in [*arguments, *keywords.values()]
                 if isinstance(value, Tensor) and not value.is_inference() and not value.is_nested)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
                and bool(torch.equal(one, other)))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


def _restored(value: Any, first: Pending) -> Any:
    return first.arguments[0] if value is first and first.arguments else value


def advance(stack: RemoteStack, index: int, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
    """A call of one layer."""
    before = next((value for value in [*arguments, *keywords.values()] if isinstance(value, Pending)), None)
    count = len(stack)
    if before is None:
        if index != 0:
            _refuse(f"layers[{index}]: expected the output of layers[{index - 1}], got another tensor")
        before = Pending(stack, arguments, keywords, 0)
    else:
        if before.stack is not stack or before.following != index:
            _refuse(f"layers[{index}]: expected the output of layer {index - 1} of its own stack, got that of layer "
                    f"{before.following - 1}")
        if before.used:
            _refuse(f"layers[{index}]: the output of layer {index - 1} was used before, and can be used once")
        before.used = True
        if torch.is_grad_enabled() != before.grad_enabled:
            _refuse(f"layers[{index}]: gradients are switched on or off between layers, as checkpointing of each layer does")
        if _versions(before.arguments, before.keywords) != before.version:
            _refuse(f"layers[{index}]: an input of layer 0 was changed in place between layers")
        first = before.arguments[0] if before.arguments else None
        given = tuple(first if value is before else value for value in arguments)
        named = {name: before.keywords.get(name) if value is before else value for name, value in keywords.items()}
        if (len(given) != len(before.arguments) or set(named) != set(before.keywords)
                or not all(map(_same, given, before.arguments))
                or not stack.takes_alike(index, before.arguments, before.keywords, given, named, _same)):
            _refuse(f"layers[{index}]: expected the arguments that layer 0 got, got others")
    if index == count - 1:
        return stack.run(before.arguments, before.keywords)
    following = Pending(stack, before.arguments, before.keywords, index + 1)
    return (following, None) if stack.gives_pairs else following


class StackLayer(nn.Module):
    """A layer of the stack: its parameters, names, options and hooks are the layer's own; its call is the stack's."""

    _stack: RemoteStack
    _index: int
    _layer: Any

    def __init__(self, stack: RemoteStack, index: int, layer: nn.Module) -> None:
        super().__init__()
        own = self.__dict__
        for name in [name for name in own if name in layer.__dict__]:
            own[name] = layer.__dict__[name]
        own.update(_stack=stack, _index=index, _layer=layer)
        own.pop("training", None)

    @property
    def training(self) -> bool:
        return bool(self._layer.training) if "_layer" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_layer" in self.__dict__:
            self._layer.training = mode

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(advance)(self._stack, self._index, arguments, keywords)
        return advance(self._stack, self._index, arguments, keywords)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._layer) if "_layer" in self.__dict__ else StackLayer

    # Of a layer that is a Sequential.
    def __len__(self) -> int:
        return len(self._layer)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self._layer)

    def __getitem__(self, index: Any) -> Any:
        return self._layer[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._layer[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._layer[index]

    def _get_name(self) -> str:
        return f"{type(self._layer).__name__} on a daemon"

    def __getattr__(self, name: str) -> Any:
        if name in ("_stack", "_index", "_layer"):
            raise AttributeError(name)
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or "_layer" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._layer, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._layer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._stack.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Dict[int, Any]) -> nn.Module:
        made: nn.Module = self._stack.copy_of_layer(self._index, memo)
        return made
