"""Owning: which parameters are a remote stack's. Those of its layers that are still here are taken; those that have moved in
the layers, or have other names, keep their numbers; those in whose place there is another, or none, are let go."""
from __future__ import annotations

import bisect
import gc
import threading
import weakref
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import torch
import torch.utils.weak
from torch import Tensor, nn

from ..errors import FailedPrecondition
from .module import Module
from .numbers import own
from .parameters import GradientState, RemoteParameter, stack_of

__all__ = ["Owning", "become", "optimizers", "refuse_lent", "replaced", "take_new"]

# Parameters that offload could not change in place (weak references hold them), and where their stacks have them.
replaced: Any = torch.utils.weak.WeakIdKeyDictionary()
# All of this process.
_stacks: Any = weakref.WeakSet()
optimizers: Any = weakref.WeakSet()


class Owning:
    """A part of RemoteStack, which has what is declared here."""

    steps: Dict[str, int]
    ranks: Any
    owned: Dict[str, Tuple[Any, str]]
    _lock: threading.RLock
    _module: Optional[Module]
    _held: List[Module]
    _needs: Any
    _options: Any
    _cached: Dict[str, nn.Parameter]
    _weights: Dict[str, Tensor]
    _parked: Dict[str, Dict[str, Tensor]]
    _maxed: Set[str]
    _sent: Dict[str, int]
    _owners: Dict[str, Any]
    _grads: Dict[str, GradientState]
    _stale: Set[str]

    def _join(self) -> None:
        """Once."""
        _stacks.add(self)

    @torch.inference_mode(False)  # in which a layer may be called first: its parameters are ordinary ones
    def take(self, cached: Dict[str, nn.Parameter]) -> bool:
        """Those that are still here. Whether there are any."""
        mine: Any = self
        swap: Any = torch.utils.swap_tensors
        here = {name: tensor for name, tensor in cached.items()
                if not (isinstance(tensor, RemoteParameter) and stack_of(tensor) == (self, name))}
        for name, tensor in here.items():
            if isinstance(tensor, RemoteParameter):
                raise TypeError(f"offload: {name} is another stack's parameter already: layers share nothing on a daemon: "
                                "give each a parameter of its own")
            if tensor.is_meta:
                raise TypeError(f"offload: {name} is a meta tensor, without numbers: load its weights before")
            if tensor.grad is not None:
                raise FailedPrecondition(f"offload: {name} has a gradient, which would stay here: call zero_grad() before")
        _refuse_other_owners(mine, here)
        if here and self._module is not None:
            mine._refuse_live("offload", besides=here)
        swapped = {name for name, tensor in here.items() if self._cached.get(name) is tensor}  # torch.utils.swap_tensors
        had_gradients = {name for name in here if self._grads.pop(name, None) is not None}
        taken = {name: own(tensor) for name, tensor in here.items()}
        if taken and self._module is not None:
            mine.assign(taken, "offload")  # while they are here still: where it fails, the next call tries it again
        for name, tensor in here.items():
            old = self._cached.get(name)
            if isinstance(old, RemoteParameter) and stack_of(old) == (self, name):
                old.owner = None  # nobody's: another has taken its place
                old.had_gradient = name in had_gradients
            owner, _, last = name.rpartition(".")
            meta = RemoteParameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad)
            meta.owner = self.owned[name] = weakref.ref(self), name
            try:
                swap(tensor, meta)  # so that it is the same object for optimizers and other owners
            except RuntimeError:  # see _held
                mine.get_submodule(owner)._parameters[last] = meta
                replaced[tensor] = weakref.ref(meta)
                cached[name] = meta
        if self._module is None:
            self._weights.update(taken)
        elif taken:
            others = {name: tensor for name, tensor in taken.items() if name not in swapped}
            for name in others:
                self.steps.pop(name, None)
                self._owners.pop(name, None)
            mine._begin_moments(others)
        return bool(taken)

    @torch.inference_mode(False)
    def rearrange(self, cached: Dict[str, nn.Parameter]) -> None:
        """Parameters have come, gone or other names: the next call registers a module of those that there are, with the
        weights and moments of those that stay."""
        mine: Any = self
        if self._module is not None and self.ranks is not None:
            raise FailedPrecondition("offload: a parameter of these layers has come or gone, which needs another module, "
                                     "and a group cannot have one after the other: change the layers before offload")
        mine._refuse_live("offload")
        weights, moments = (mine.weights(), mine.moments()) if mine.is_remote else ({}, {})
        if self._module is not None:
            mine.run_pending()
            self._module.release(timeout=self._options.timeout)
            self._module, self._needs, self._sent, self._held[:] = None, None, {}, []
        names: Dict[str, str] = {}  # by the old ones
        for name, tensor in cached.items():
            found = stack_of(tensor)
            if found is not None and found[0] is self:
                names[found[1]] = name
        for name, old in self._cached.items():
            if name not in names and isinstance(old, RemoteParameter):
                self._let_go(name, old, weights, moments)
        self.owned.clear()
        for name in names.values():
            remote: Any = cached[name]
            remote.owner = self.owned[name] = weakref.ref(self), name
        for state in self._grads.values():
            state.tensor = None  # which has the old name

        def renamed(values: Dict[str, Any]) -> Dict[str, Any]:
            return {names[name]: value for name, value in values.items() if name in names}
        self._weights, self._parked = renamed(weights), {kind: renamed(tensors) for kind, tensors in moments.items()}
        self._maxed = {names[name] for name in self._maxed if name in names}
        self.steps, self._owners, self._grads = renamed(self.steps), renamed(self._owners), renamed(self._grads)

    def _let_go(self, name: str, old: RemoteParameter, weights: Dict[str, Tensor],
                moments: Dict[str, Dict[str, Tensor]]) -> None:
        """It is no layer's any more; one in a layer still, of an adapter that is not active, has its numbers here."""
        mine: Any = self
        optimizer = mine.owner(name)
        had_gradient = name in self._grads
        old.owner = None
        if not any(tensor is old for tensor in mine.parameters()):
            old.had_gradient = had_gradient
            return
        plain = nn.Parameter(weights[name].to(old.dtype), old.requires_grad)
        swap: Any = torch.utils.swap_tensors
        swap(old, plain)  # now `old` is an ordinary one
        if optimizer is not None and self.steps.get(name):
            optimizer.take_back(old, self.steps[name], {kind: tensors[name] for kind, tensors in moments.items()
                                                        if name in tensors})


def become(parameter: nn.Parameter, remote: Any) -> None:
    """Whoever has the parameter, as an optimizer that was made with it, has the daemon's from now on."""
    other = RemoteParameter(torch.empty(remote.shape, dtype=remote.dtype, device="meta"), remote.requires_grad)
    other.owner = remote.owner
    swap: Any = torch.utils.swap_tensors
    try:
        swap(parameter, other)
    except RuntimeError:  # see _held
        replaced[parameter] = weakref.ref(remote)


def take_new(parameters: Iterable[Any]) -> None:
    """Has stacks look at layers that have got parameters which they do not know yet, where these are among them."""
    plain = {id(parameter) for parameter in parameters if not isinstance(parameter, RemoteParameter)}
    for stack in list(_stacks):
        if stack.is_remote and any(id(parameter) in plain for parameter in stack.parameters()):
            stack.refresh()


def refuse_lent(models: Iterable[nn.Module]) -> None:
    """Refuses models with parameters that attnd.torch.local_weights has lent: nothing tells whose those are."""
    parameters = {id(parameter) for model in models for parameter in model.parameters()}
    for stack in list(_stacks):
        if stack._local and any(id(parameter) in parameters for parameter in stack.parameters()):
            raise FailedPrecondition("local_gradients: expected a block that is not in one of local_weights: in that one "
                                     "attnd.torch.fetch(p.grad) gives the numbers of a gradient")


def _held(tensors: Iterable[nn.Parameter]) -> List[nn.Parameter]:
    """Those that cannot be changed in place, since something in C++, or a weak reference, holds them."""
    found, other = [], nn.Parameter(torch.empty(0))
    swap: Any = torch.utils.swap_tensors
    for tensor in tensors:
        try:
            swap(tensor, other)
        except RuntimeError:
            found.append(tensor)
        else:
            swap(tensor, other)  # back
    return found


def _span(tensor: Any) -> Tuple[int, int]:
    """Where its memory begins and ends; nowhere, if it has none of its own or gaps in it."""
    if tensor is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return 0, 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr() if extent == tensor.numel() else 0
    return begin, begin + extent * tensor.element_size() if begin else 0


def _refuse_other_owners(stack: Any, here: Dict[str, nn.Parameter]) -> None:
    """Refuses parameters that cannot be changed in place, where a module outside would keep the old ones, and those in whose
    memory another module or layer has a tensor of its own, which would no longer change with them."""
    if here and _other_owner(stack, here) is not None:
        gc.collect()  # of modules that are gone
        found = _other_owner(stack, here)
        if found is not None:
            raise TypeError(f"offload: {found[1]} is {found[0]} too, or has its memory, and layers share nothing with "
                            "others on a daemon: give each its own, or leave these layers here")


def _other_owner(stack: Any, here: Dict[str, nn.Parameter]) -> Optional[Tuple[str, str]]:
    """The first parameter that has one, and the other's name."""
    held, known = set(map(id, _held(here.values()))), set(map(id, here.values()))
    spans = sorted((*_span(tensor), name) for name, tensor in here.items())
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:]):
        if begin and begin < end:
            return name, other
    inside = set(map(id, stack.modules()))
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or "_parameters" not in vars(module) or id(module) in inside:
            continue
        for other, tensor in [*module._parameters.items(), *module._buffers.items()]:
            begin, end = _span(tensor)
            at = bisect.bisect_left(spans, (end,)) - 1  # the last one that begins before its end
            if id(tensor) in held or (id(tensor) not in known and end and at >= 0 and spans[at][1] > begin):
                return spans[at][2], f"{type(module).__name__}.{other} outside of these layers"
    return None
