"""RemoteOptimizer: one torch.optim.Optimizer over parameters here and parameters on daemons.

The optimizer that it is made of steps with the parameters that are here; each remote stack is sent the rates and decays of
its groups and steps there. Both read the same param_groups, so that schedulers change both.

torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler see remote gradients by one number a stack (RemoteParameter).
"""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import brief, wrong, wrong_type
from .module import SGD, AdamW, GroupRates
from .stack import RemoteStack, stack_of

__all__ = ["RemoteOptimizer", "clip_grad_norm_"]

_MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2_max", "momentum_buffer": "moment1"}
_MOST_GROUPS = 63  # and one for parameters that no group names


class RemoteOptimizer(torch.optim.Optimizer):
    """Made by attnd.torch.optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.__dict__.update({name: value for name, value in inner.__dict__.items() if name != "step"})  # hooks and groups
        self._inner = inner
        self._remote: Dict[int, Tuple[RemoteStack, str]] = {}
        self.stacks: List[RemoteStack] = []
        groups: Dict[int, Dict[str, int]] = {}
        for n, group in enumerate(inner.param_groups):
            for parameter in group["params"]:
                found = stack_of(parameter)
                if found is None:
                    continue
                self._remote[id(parameter)] = found
                if found[0] not in self.stacks:
                    self.stacks.append(found[0])
                groups.setdefault(id(found[0]), {})[found[1]] = n
        if len(inner.param_groups) > _MOST_GROUPS:
            raise wrong("optimizer", f"at most {_MOST_GROUPS} parameter groups", len(inner.param_groups))
        self._layout = _layout_of(inner, [group for n, group in enumerate(inner.param_groups)
                                          if any(n in found.values() for found in groups.values())])
        for stack in self.stacks:
            stack.set_optimizer(self._layout, groups[id(stack)], len(inner.param_groups), self.stacks)
        self._patch_step_function()
        self._step_supports_amp_scaling = True

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        inverse = 1.0 if scale is None else 1.0 / float(scale)
        if found is not None and bool(found.item()):
            for stack in self.stacks:
                stack.discard()
        else:
            rates = [GroupRates(float(group["lr"]), float(group.get("weight_decay", 0.0))) for group in self.param_groups]
            factors = [stack.factor() for stack in self.stacks]  # all, before one of them steps
            for stack, factor in zip(self.stacks, factors):
                stack.step([*rates, GroupRates(0.0)], factor * inverse)
            self._step_here(inverse)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        with self._hidden():
            self._inner.zero_grad(set_to_none)
        for stack in self.stacks:
            stack.discard()

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if any(stack_of(parameter) is not None for parameter in _listed(param_group["params"])):
            raise wrong("param_group", "parameters that are here; remote ones belong to the groups from the beginning",
                        "remote ones")
        self._inner.add_param_group(param_group)

    def state_dict(self) -> Dict[str, Any]:
        """As the optimizer alone would have it, with the daemons' moments."""
        packed = self._inner.state_dict()
        state = dict(packed["state"])
        held = {id(stack): stack.state(self._layout.moments) for stack in self.stacks}
        names = {kind: word for word, kind in _MOMENTS.items()
                 if (word == "momentum_buffer") == isinstance(self._layout, SGD)}
        for number, parameter in enumerate(self._listed()):
            found = self._remote.get(id(parameter))
            if found is None:
                continue
            moments, step = held[id(found[0])]
            entry: Dict[str, Any] = {names[kind]: tensors[found[1]] for kind, tensors in moments.items()
                                     if found[1] in tensors}
            if entry and step:
                state[number] = entry if isinstance(self._layout, SGD) else {"step": torch.tensor(float(step)), **entry}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Of this class, or of the optimizer alone over a model that was never offloaded."""
        listed = self._listed()
        local = {number: value for number, value in state_dict["state"].items() if id(listed[number]) not in self._remote}
        self._inner.load_state_dict({**state_dict, "state": local})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for stack in self.stacks:
            moments: Dict[str, Dict[str, Tensor]] = {}
            steps = set()
            for new, value in state_dict["state"].items():
                found = self._remote.get(id(listed[new]))
                if found is None or found[0] is not stack:
                    continue
                steps.add(int(value.get("step", 1)))
                for word, tensor in value.items():
                    if word in _MOMENTS and tensor is not None:
                        moments.setdefault(_MOMENTS[word], {})[found[1]] = tensor
            if len(steps) > 1:
                raise wrong("state_dict", "one number of steps for all of a stack's parameters", sorted(steps))
            if moments:
                stack.discard()
                stack.put_moments(moments, steps.pop())

    def __repr__(self) -> str:
        return f"attnd.torch.optimizer of {self._inner!r}, with {len(self.stacks)} remote stacks"

    def _listed(self) -> List[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Nobody sees the stacks' gradients."""
        for stack in self.stacks:
            stack.hides = True
        try:
            yield
        finally:
            for stack in self.stacks:
                stack.hides = False

    def _step_here(self, inverse: float) -> None:
        with self._hidden():
            if inverse != 1.0:
                for parameter in self._listed():
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse)
            self._inner.step()


def _listed(parameters: Union[Tensor, Iterable[Any]]) -> List[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _layout_of(inner: torch.optim.Optimizer, groups: Sequence[Dict[str, Any]]) -> Union[AdamW, SGD]:
    """The arithmetic of the groups with remote parameters."""
    kind = type(inner)
    if kind not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise TypeError(f"optimizer: expected torch.optim.AdamW, Adam or SGD, got {kind.__name__}; with "
                        'attnd.torch.offload(..., optimizer="local") it can be any')
    found: List[Union[AdamW, SGD]] = []
    for group in groups:
        if group.get("maximize"):
            raise TypeError("optimizer: expected maximize=False for parameters on a daemon")
        if kind is torch.optim.SGD:
            found.append(SGD(float(group["momentum"]), float(group["dampening"]), bool(group["nesterov"])))
        else:
            coupled = not group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
            beta1, beta2 = [float(beta) for beta in group["betas"]]
            found.append(AdamW(beta1, beta2, float(group["eps"]), coupled, bool(group["amsgrad"])))
    if any(one != found[0] for one in found):
        raise TypeError("optimizer: expected the same options but lr and weight_decay in all groups with parameters on a "
                        f"daemon, got {sorted(set(map(str, found)))}")
    return found[0] if found else AdamW()


@brief
def clip_grad_norm_(model: Union[nn.Module, Tensor, Iterable[Tensor]], max_norm: float, *, scaler: Any = None,
                    optimizer: Optional[torch.optim.Optimizer] = None) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, which spans gradients here and on daemons. Gives the norm before clipping.

    scaler, optimizer: with a GradScaler both; it unscales the gradients first, if it has not yet.
    """
    if scaler is not None:
        if optimizer is None:
            raise wrong_type("optimizer", "the one that the scaler steps, beside scaler=", optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        if getattr(state["stage"], "name", "READY") == "READY":
            scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(list(model.parameters()) if isinstance(model, nn.Module) else model, max_norm)


def _refuse_others(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before any optimizer's step: one that does not know of daemons would leave the parameters there as they are."""
    if isinstance(optimizer, RemoteOptimizer):
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        found = stack_of(parameter)
        if found is not None and not found[0].hides:
            raise TypeError(f"optimizer: expected attnd.torch.optimizer({type(optimizer).__name__}(...)), since {found[1]} "
                            f"and others are on a daemon, got {type(optimizer).__name__}")


register_optimizer_step_pre_hook(_refuse_others)
