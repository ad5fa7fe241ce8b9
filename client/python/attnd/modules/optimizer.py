"""RemoteOptimizer: one torch.optim.Optimizer over parameters here and parameters on daemons.

The optimizer that it is made of steps with the parameters that are here. Parameters on a daemon step there, each with the
options of its group as they stand at the step, a count of steps and moments of its own: as they would here.

torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler see remote gradients (parameters.RemoteGradient).
"""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, MutableMapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import FailedPrecondition, Unimplemented, brief, wrong, wrong_type
from .module import SGD, AdamW, StepValues
from .owning import optimizers, replaced, take_new
from .parameters import RemoteParameter
from .remote_call import uncompiled
from .stack import RemoteStack, stack_of
from .states import Copies

__all__ = ["RemoteOptimizer", "clip_grad_norm_"]

_MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2_max", "momentum_buffer": "moment1"}
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
          "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
_MOST_GROUPS = 64
_KINDS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


class State(MutableMapping[Any, Any]):
    """RemoteOptimizer.state: the inner optimizer's of parameters here. It tells which parameters on daemons have one, and
    refuses to give it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def __getitem__(self, parameter: Any) -> Any:
        return self._here(parameter)[parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self._here(parameter)[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._here(parameter)[parameter]

    def __contains__(self, parameter: Any) -> bool:
        found = stack_of(parameter)
        return parameter in self._inner.state if found is None else bool(found[0].steps.get(found[1]))

    def __iter__(self) -> Iterator[Any]:
        there = [parameter for group in self._inner.param_groups for parameter in group["params"]
                 if stack_of(parameter) is not None and parameter in self]
        return iter([*self._inner.state, *there])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def clear(self) -> None:
        for parameter in self:
            self._here(parameter)
        self._inner.state.clear()

    def _here(self, parameter: Any) -> Any:
        found = stack_of(parameter)
        if found is not None:
            raise Unimplemented(f"state: what the optimizer has of {found[1]} is on a daemon: optimizer.state_dict() copies "
                                "it, and load_state_dict() writes it, or forgets it where \"state\" is empty",
                                field="state")
        return self._inner.state


class RemoteOptimizer(torch.optim.Optimizer):
    """Made by attnd.torch.optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.__dict__.update({name: value for name, value in inner.__dict__.items()  # its hooks, too
                              if name not in ("step", "state", "param_groups")})
        self._inner, self._kind = inner, type(inner)
        if self._kind not in _KINDS:
            raise TypeError(f"optimizer: expected torch.optim.AdamW, Adam or SGD, got {self._kind.__name__}; with "
                            'attnd.torch.offload(..., optimizer="local") it can be any')
        take_replaced(inner)
        self._check_groups()
        self._claim(self._names(self.param_groups), self._held_here())
        self._patch_step_function()
        self._step_supports_amp_scaling = True
        mine: Any = inner
        mine.state_dict, mine.load_state_dict = self.state_dict, self.load_state_dict  # its own know nothing of daemons
        self._copies = Copies()
        optimizers.add(self)

    @property
    def param_groups(self) -> Any:
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self._inner.param_groups = value

    @property
    def state(self) -> Any:
        return State(self._inner)

    @state.setter
    def state(self, value: Any) -> None:
        for parameter in self.state:
            self.state[parameter]  # raises, where it is on a daemon
        self._inner.state = value

    @property
    def stacks(self) -> List[RemoteStack]:
        """With parameters of it."""
        return list({id(found[0]): found[0] for found in map(stack_of, self._listed()) if found is not None}.values())

    @property
    def spec(self) -> Union[AdamW, SGD]:
        """The optimizer that a module needs for all of its groups with remote parameters."""
        specs = [_spec_of(self._kind, group) for group in self.param_groups if any(map(stack_of, group["params"]))]
        return max(specs or [_spec_of(self._kind, self.defaults)], key=lambda spec: len(spec.moments))

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(self._step)(closure)
        return self._step(closure)

    def _step(self, closure: Optional[Callable[[], Any]]) -> Any:
        self._hear()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        inverse = 1.0 if scale is None else 1.0 / float(scale)
        if found is None or not float(found):
            steps = self._steps()
            for checked in (False, True):  # all, before one of them steps
                for stack, values in steps:
                    stack.stage(self, values, inverse, checked)
            self._step_here(inverse)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        (uncompiled(self._zero_grad) if torch.compiler.is_dynamo_compiling() else self._zero_grad)(set_to_none)

    def _zero_grad(self, set_to_none: bool) -> None:
        self._hear()
        for parameter in self._listed():
            if isinstance(parameter, RemoteParameter) and stack_of(parameter) is None:
                parameter.grad = None
        with self._hidden():
            type(self._inner).zero_grad(self._inner, set_to_none)
        for stack, names in self._names(self.param_groups):
            if set_to_none:
                stack.forget(names)
            else:
                stack.zero(names)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        self._hear()
        self._inner.add_param_group(param_group)
        try:
            take_new(self.param_groups[-1]["params"])
            self._check_groups()
            self._claim(self._names(self.param_groups[-1:]))
        except BaseException:
            self.param_groups.pop()
            raise

    def take_back(self, parameter: nn.Parameter, step: int, moments: Dict[str, Tensor]) -> None:
        """A parameter has come back from its daemon, with what the optimizer has of it."""
        is_sgd = self._kind is torch.optim.SGD
        words = {kind: word for word, kind in _MOMENTS.items() if (word == "momentum_buffer") == is_sgd}
        held = {words[kind]: tensor.to(parameter.dtype) for kind, tensor in moments.items() if kind in words}
        self._inner.state[parameter] = held if is_sgd else {"step": torch.tensor(float(step)), **held}

    def adopt(self, stack: RemoteStack) -> None:
        """The stack has taken parameters: what the optimizer has of them goes with them."""
        found = [(parameter, stack_of(parameter)) for parameter in self._listed() if parameter in self._inner.state]
        names = [at[1] for _, at in found if at is not None and at[0] is stack]
        if names:
            self._claim([(stack, names)], self._held_here())

    def state_dict(self) -> Dict[str, Any]:
        """As the optimizer alone would have it, with the daemons' moments."""
        self._hear()
        take_new(self._listed())
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with self._unhooked():
            packed = type(self._inner).state_dict(self._inner)
        state = dict(packed["state"])
        held = {id(stack): stack.moments() for stack in self.stacks}
        is_sgd = self._kind is torch.optim.SGD
        names = {kind: word for word, kind in _MOMENTS.items() if (word == "momentum_buffer") == is_sgd}
        for number, parameter in enumerate(self._listed()):
            found = stack_of(parameter)
            step = 0 if found is None else found[0].steps.get(found[1], 0)
            if found is None or not step:
                continue
            entry: Dict[str, Any] = {names[kind]: tensors[found[1]] for kind, tensors in held[id(found[0])].items()
                                     if found[1] in tensors and kind in names}
            with torch.inference_mode(False):
                state[number] = entry if is_sgd else {"step": torch.tensor(float(step)), **entry}
            for word, tensor in state[number].items():
                self._copies.add(f"{word} of {found[1]}", tensor)
        made = {**packed, "state": dict(sorted(state.items()))}
        for after in self._optimizer_state_dict_post_hooks.values():
            made = after(self, made) or made
        return made

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state of this class, or of the optimizer alone over a model that was never offloaded."""
        self._copies = Copies()
        self._hear()
        take_new(self._listed())
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        listed = self._listed()
        local = {number: value for number, value in state_dict["state"].items() if stack_of(listed[number]) is None}
        remote = {id(listed[number]): value for number, value in state_dict["state"].items() if number not in local}
        was = self._inner.param_groups, self._inner.state
        try:
            with self._unhooked():
                type(self._inner).load_state_dict(self._inner, {**state_dict, "state": local})
            self._check_groups()
            self._claim(self._names(self.param_groups), remote, is_whole=True)
        except BaseException:
            self._inner.param_groups, self._inner.state = was
            raise
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return f"attnd.torch.optimizer of {self._inner!r}, with {len(self.stacks)} remote stacks"

    def __getstate__(self) -> Dict[str, Any]:
        raise TypeError("pickle: expected the optimizer's state_dict(), since parts of its state are on a daemon")

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        raise TypeError("copy.deepcopy: expected the optimizer's state_dict(), since parts of its state are on a daemon")

    def _hear(self) -> None:
        self._copies.check()
        self._copies.let_go()
        for stack in self.stacks:
            stack.hear(self)

    def _listed(self) -> List[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _names(self, groups: Sequence[Dict[str, Any]]) -> List[Tuple[RemoteStack, List[str]]]:
        made: Dict[int, Tuple[RemoteStack, List[str]]] = {}
        for group in groups:
            for parameter in group["params"]:
                found = stack_of(parameter)
                if found is not None:
                    made.setdefault(id(found[0]), (found[0], []))[1].append(found[1])
        return list(made.values())

    def _check_groups(self) -> None:
        if len(self.param_groups) > _MOST_GROUPS:
            raise wrong("optimizer", f"at most {_MOST_GROUPS} parameter groups", len(self.param_groups))

    def _claim(self, claims: Sequence[Tuple[RemoteStack, List[str]]], state: Optional[Dict[int, Dict[str, Any]]] = None,
               is_whole: bool = False) -> None:
        """Makes these parameters the optimizer's, with state by parameter; on all stacks, or on none where one refuses.
        is_whole: what state has nothing of has none from now on."""
        state = state or {}
        spec, puts = self.spec, self._puts(state, is_whole)
        for checked in (False, True):
            for stack, names in claims:
                stack.claim(self, spec, names, checked)
            for stack, moments, steps in puts:
                stack.put_moments(moments, steps, checked)
        for parameter in self._listed():
            if id(parameter) in state and not is_whole:
                self._inner.state.pop(parameter)

    def _steps(self) -> List[Tuple[RemoteStack, Dict[str, Tuple[StepValues, float]]]]:
        """Lists each parameter's step, and what its gradient is multiplied by."""
        made: Dict[int, Tuple[RemoteStack, Dict[str, Tuple[StepValues, float]]]] = {}
        for group in self.param_groups:
            values: Optional[StepValues] = None
            for parameter in group["params"]:
                found = stack_of(parameter)
                if found is None and isinstance(parameter, RemoteParameter):
                    parameter.grad  # raises, where one is lost
                if found is not None:
                    values = values or _values_of(self._kind, group)
                    sign = -1.0 if group.get("maximize") else 1.0
                    made.setdefault(id(found[0]), (found[0], {}))[1][found[1]] = values, sign
        joined = [(stack, [name for name in names if stack.owner(name) is None]) for stack, names in made.values()]
        self._claim([one for one in joined if one[1]])  # layers in the place of others, groups that were written by hand
        return list(made.values())

    def _held_here(self) -> Dict[int, Dict[str, Any]]:
        """The state that the optimizer had of these parameters before they were offloaded, by their ids."""
        held = self._inner.state
        remote = {id(parameter): held[parameter] for parameter in self._listed()
                  if stack_of(parameter) is not None and parameter in held}
        for value in remote.values():
            if any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in value.values()):
                raise FailedPrecondition("optimizer: expected load_state_dict of attnd.torch.optimizer(...), which knows "
                                         "where moments belong, got a state that was loaded into the inner optimizer")
        return remote

    def _puts(self, state: Dict[int, Dict[str, Any]], is_whole: bool
              ) -> List[Tuple[RemoteStack, Dict[str, Dict[str, Tensor]], Dict[str, int]]]:
        """Gives what put_moments of each stack takes."""
        made = []
        for stack, _ in self._names(self.param_groups):
            moments: Dict[str, Dict[str, Tensor]] = {}
            steps: Dict[str, int] = {}
            for parameter in self._listed():
                found = stack_of(parameter)
                if found is None or found[0] is not stack:
                    continue
                name, value = found[1], state.get(id(parameter))
                if value is None:
                    if is_whole and stack.steps.get(name):
                        steps[name] = 0
                        for kind in self.spec.moments:
                            moments.setdefault(kind, {})[name] = torch.zeros(parameter.shape)
                    continue
                given = {word: tensor for word, tensor in value.items() if word in _MOMENTS and tensor is not None}
                steps[name] = int(value.get("step", 1 if given else 0))
                for word, tensor in given.items():
                    moments.setdefault(_MOMENTS[word], {})[name] = tensor
            if steps:
                made.append((stack, moments, steps))
        return made

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Nobody sees the stacks' gradients."""
        stacks = self.stacks
        for stack in stacks:
            stack.hides = True
        try:
            yield
        finally:
            for stack in stacks:
                stack.hides = False

    @contextlib.contextmanager
    def _unhooked(self) -> Iterator[None]:
        """The inner optimizer's state has no hooks: they see the whole one."""
        inner: Any = self._inner.__dict__
        hooks = {name: inner.pop(name) for name in _HOOKS}
        inner.update(dict.fromkeys(_HOOKS, {}))
        try:
            yield
        finally:
            inner.update(hooks)

    def _step_here(self, inverse: float) -> None:
        with self._hidden():
            if inverse != 1.0:
                for parameter in self._listed():
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse)
            inner: Any = self._inner
            inner._opt_called = True  # as a schedule that was made before this looks at it
            type(inner).step.__wrapped__(inner)  # without hooks, which run around this step


def take_replaced(inner: torch.optim.Optimizer) -> None:
    """Parameters that offload had to exchange, in an optimizer that was made before."""
    for group in inner.param_groups:
        for n, parameter in enumerate(group["params"]):
            found = replaced.get(parameter)
            now = None if found is None else found()
            if now is not None:
                group["params"][n] = now
                if parameter in inner.state:
                    inner.state[now] = inner.state.pop(parameter)


def _spec_of(kind: type, group: Dict[str, Any]) -> Union[AdamW, SGD]:
    values = _values_of(kind, group)
    if kind is torch.optim.SGD:
        return SGD(values.momentum, values.dampening, values.nesterov)
    return AdamW(values.beta1, values.beta2, values.epsilon, values.coupled_decay, values.amsgrad)


def _values_of(kind: type, group: Dict[str, Any]) -> StepValues:
    """A group's options as they stand."""
    if group.get("differentiable"):
        raise TypeError("optimizer: expected differentiable=False for parameters on a daemon")
    lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    if kind is torch.optim.SGD:
        momentum = float(group["momentum"])
        return StepValues(lr, decay) if momentum == 0 else StepValues(
            lr, decay, momentum=momentum, dampening=float(group["dampening"]), nesterov=bool(group["nesterov"]))
    coupled = not group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    beta1, beta2 = [float(beta) for beta in group["betas"]]
    return StepValues(lr, decay, beta1=beta1, beta2=beta2, epsilon=float(group["eps"]), coupled_decay=coupled,
                      amsgrad=bool(group["amsgrad"]))


@brief
def clip_grad_norm_(model: Union[nn.Module, Tensor, Iterable[Tensor]], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, *, scaler: Any = None,
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
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else model
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def _refuse_others(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before any optimizer's step: one that does not know of daemons would leave the parameters there as they are."""
    if isinstance(optimizer, RemoteOptimizer):
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        found = stack_of(parameter)
        if (found is not None and not found[0].hides) or parameter in replaced:
            name, kind = found[1] if found is not None else "one of its parameters", type(optimizer)
            expected = f"attnd.torch.optimizer({kind.__name__}(...))" if kind in _KINDS else (
                "attnd.torch.optimizer of AdamW, Adam or SGD, or layers offloaded with optimizer=\"local\"")
            raise TypeError(f"optimizer: expected {expected}, since {name} and others are on a daemon, got {kind.__name__}")


register_optimizer_step_pre_hook(_refuse_others)
