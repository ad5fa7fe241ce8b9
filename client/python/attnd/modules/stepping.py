"""Stepping: what optimizers and gradients see of a remote stack. Parameters have owners, counts of steps and moments; steps
of several optimizers are done together, since one clears all of the daemon's gradients; gradients are there, multiplied, 0
or forgotten."""
from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
from torch import Tensor, nn

from ..errors import AttndError, FailedPrecondition, Unimplemented, wrong
from .micro_batches import Line
from .module import AdamW, GradientNorms, Module, ParameterStep, SGD, StepValues
from .numbers import digest, host, own
from .parameters import GradientState, RemoteGradient
from .parts import Parts
from .states import Copies, Loads

__all__ = ["Sent", "Stepping"]


class Sent(NamedTuple):
    """A step of the module."""

    staged: Dict[str, Tuple[StepValues, float]]
    values: List[StepValues]
    entries: List[ParameterStep]


class Stepping:
    """A part of RemoteStack, which has what is declared here."""

    copies: Copies
    loads: Loads
    written: Counter[str]  # how often each parameter was, on the daemon
    steps: Dict[str, int]  # of each parameter
    device: torch.device  # of the last backward
    hides: bool  # the gradients
    line: Line  # of calls in micro-batches
    _lock: threading.RLock
    _module: Optional[Module]
    _needs: Any
    _parts: Parts
    _cached: Dict[str, nn.Parameter]
    _options: Any
    _owners: Dict[str, Any]
    _spec: Union[None, AdamW, SGD]
    _parked: Dict[str, Dict[str, Tensor]]
    _maxed: Set[str]  # parameters that began with amsgrad, and have a third moment
    _staged: Dict[str, Tuple[StepValues, float]]
    _unsure: Optional[Sent]
    _failed: Any
    _grads: Dict[str, GradientState]
    _stale: Set[str]
    _norms: Optional[Dict[str, List[GradientNorms]]]
    _has_all_norms: bool
    _lent: Optional[Dict[str, Optional[Tensor]]]  # gradients, under attnd.torch.local_gradients
    _lent_bits: Dict[str, int]  # digests of them as they were lent
    _power: float  # of two: gradients on the daemon are multiplied by it
    ranks: Any

    def _register(self, variant: Any, max_rows: int, memory_rows: int) -> None:
        raise NotImplementedError

    def _refuse_other_module(self) -> None:
        raise NotImplementedError

    def run_pending(self) -> None:
        raise NotImplementedError

    def check_states(self) -> None:
        """Ends a load_state_dict that has failed. Raises where what state_dict() gave was written."""
        self.loads.end(self)
        self.copies.check()

    def versions(self) -> Dict[str, Any]:
        """Tells a change of each parameter since another call of this."""
        if self._options.server_optimizer:
            return dict(self.written)
        return {name: (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
                for name, tensor in self._cached.items()}

    # ---- Optimizers.

    def claim(self, optimizer: Any, spec: Union[AdamW, SGD], names: Iterable[str], checked: bool) -> None:
        """These parameters are the optimizer's from now on, with moments that begin anew; the module gets them when
        `meet` is called. With checked=False only looks whether they can be."""
        with self._lock:
            self.flush()
            names = list(names)
            others = {id(owner()): owner() for name, owner in self._owners.items() if owner() is not None
                      and owner() is not optimizer and name not in names}
            specs = [other.spec for other in others.values()]
            if any(type(other) is not type(spec) for other in specs):
                raise TypeError("optimizer: expected optimizers of one kind for the parameters of one stack, got "
                                f"{type(spec).__name__} beside {type(specs[0]).__name__}; offload its parts alone")
            again = [name for name in names if self.steps.get(name) and self.owner(name) is not optimizer]
            needed = _union([spec, *specs])
            is_other = needed != self._spec and self._module is not None
            if again or is_other:
                self._refuse_live("optimizer")
            if is_other:
                self._refuse_other_module()
            if not checked:
                return
            was: Sequence[str] = self._spec.moments if self._spec is not None else ()
            if type(needed) is not type(self._spec):
                self.steps.clear()
                self._parked.clear()
                was = ()
            for name in again:
                self.steps.pop(name, None)
            self._spec = needed
            self._begin_moments({name: self._cached[name] for name in again})
            there = self._module.registration.optimizer if self._module is not None else None
            if there is not None and type(there) is type(needed):  # its numbers may be of an optimizer before the last one
                zeros = {name: torch.zeros(parameter.shape) for name, parameter in self._cached.items()}
                self._put_moments({kind: zeros for kind in there.moments if kind in needed.moments and kind not in was})
            self._owners.update({name: weakref.ref(optimizer) for name in names})

    def meet(self) -> None:
        """Gives the module the optimizer and the moments that it shall have: before it adds to gradients, or steps."""
        if self._module is not None and self._module.registration.optimizer != self._spec:
            self._register(*self._needs)
        elif self._module is not None and self._parked:
            self._put_parked()

    def owner(self, name: str) -> Any:
        found = self._owners.get(name)
        return None if found is None else found()

    def stage(self, optimizer: Any, steps: Dict[str, Tuple[StepValues, float]], inverse: float,
              checked: bool = False) -> None:
        """Parameters' steps, and what their gradients are multiplied by. With checked=False only looks whether they can be
        done."""
        with self._lock:
            if self._lent is not None:
                raise FailedPrecondition("local_gradients: expected no step in this block: gradients go back to the daemon "
                                         "at its end")
            self.check_states()
            if self._grads:
                self.meet()
            if self._staged.keys() & steps.keys():
                self.flush(optimizer)
            made: Dict[str, Tuple[StepValues, float]] = {}
            live = any(not state.is_zero and not state.is_lost for state in self._grads.values())
            there = self.in_module() if any(state.is_zero for state in self._grads.values()) else set()
            for name, (values, sign) in steps.items():
                state = self._grads.get(name)
                if state is None:
                    continue
                if self.owner(name) is not optimizer:
                    raise FailedPrecondition(f"step: {name} belongs to an optimizer that was made later, which steps it")
                if state.is_lost:
                    raise FailedPrecondition("step: the daemon has cleared these gradients with the step before: call "
                                             "zero_grad() and backward() between two steps")
                if state.is_zero and self._module is not None and name not in there:
                    raise FailedPrecondition(f"step: {name} is frozen, and its gradient was set to 0, not to None, by which "
                                             "PyTorch would step it: call zero_grad(set_to_none=True)")
                if state.is_zero and live and not math.isfinite(self.gradient_norm(name, 2)):
                    raise FailedPrecondition(f"step: the gradient of {name} was set to 0 and is not finite on the daemon: "
                                             "call zero_grad() for all parameters")
                self._check_values(values)
                if values.amsgrad and self.steps.get(name) and name not in self._maxed:
                    raise _switched_on("amsgrad")
                made[name] = values, (0.0 if state.is_zero else state.factor) * inverse * sign
            if not checked:
                return
            self._staged.update(made)
            waiting = {name for name, state in self._grads.items() if not state.is_lost and name not in self._staged
                       and self.owner(name) not in (None, optimizer)}
            if self._staged and not waiting:
                self.flush(optimizer)

    def _check_values(self, values: StepValues) -> None:
        given = self._module.registration.optimizer if self._module is not None else None
        numbers = [value for value in values if not isinstance(value, bool)]
        if isinstance(given, AdamW) and not (0 <= values.beta1 < 1 and 0 <= values.beta2 < 1 and values.epsilon > 0):
            raise wrong("step", "betas of 0 or above and below 1, and eps above 0, for parameters on a daemon", values)
        if not all(map(math.isfinite, numbers)) or (values.nesterov and values.dampening):
            raise wrong("step", "finite options, and no dampening with nesterov, for parameters on a daemon", values)
        for word, has in (("momentum", not isinstance(given, SGD) or given.momentum > 0 or values.momentum == 0),
                          ("amsgrad", not isinstance(given, AdamW) or given.amsgrad or not values.amsgrad)):
            if not has:
                raise _switched_on(word)

    def hear(self, optimizer: Any) -> None:
        """Raises, once, what a step of the optimizer has failed with that waited for another's."""
        with self._lock:
            self._ask()
            error = self._failed.pop(optimizer, None)
        if error is not None:
            kind = type(error) if isinstance(error, AttndError) else FailedPrecondition
            raise kind("step: the last one of this optimizer waited for that of another one of these layers, and was not "
                       f"done: {error}", reason=getattr(error, "reason", "")) from error

    def flush(self, caller: Any = None) -> None:
        """Does the steps that wait. caller: the optimizer that asks for it."""
        with self._lock:
            self.line.finish()
            self._ask()
            if not self._staged or self._module is None:
                return
            self.run_pending()
            values: Dict[StepValues, int] = {}
            entries = []
            for name in self._parts.names:
                if name not in self._staged:
                    entries.append(ParameterStep())
                    continue
                of, multiplier = self._staged[name]
                entries.append(ParameterStep(values.setdefault(of, len(values)), self.steps.get(name, 0) + 1,
                                             multiplier / self._power))
            sent, self._staged = Sent(self._staged, list(values), entries), {}  # one that fails is no later call's
            try:
                self._send(sent)
            except BaseException as error:
                self._unsure = sent
                for owner in map(self.owner, sent.staged):
                    if owner not in (None, caller):
                        self._failed[owner] = error
                raise

    def _send(self, sent: Sent) -> None:
        assert self._module is not None
        self._module.step_parameters(sent.values, sent.entries, timeout=self._options.timeout)
        moved = isinstance(self._module.registration.optimizer, AdamW)
        self.written.update(sent.staged.keys())
        for name, (of, _) in sent.staged.items():
            if not self.steps.get(name):
                (self._maxed.add if of.amsgrad else self._maxed.discard)(name)
            if moved or of.momentum:
                self.steps[name] = self.steps.get(name, 0) + 1
        for state in self._grads.values():
            state.is_lost |= not state.is_zero
            if state.is_zero:
                state.zero()
        self._stale.clear()
        self._norms = None

    def _ask(self) -> None:
        """Whether the daemon has done a step whose reply was lost."""
        if self._unsure is None or self._module is None or self.ranks is not None:
            return
        try:
            found = self._module.status(timeout=self._options.timeout)
            if int(found["sequence"]) > self._module.sequence:
                self._send(self._unsure)  # again: it is known there
                self._failed.clear()
        except FailedPrecondition:
            pass  # what the daemon has is lost, or another's
        self._unsure = None

    @torch.inference_mode(False)  # what it gives is everybody's
    def moments(self) -> Dict[str, Dict[str, Tensor]]:
        """By kind and name, of parameters that have been stepped."""
        with self._lock:
            self.flush()
            found: Dict[str, Dict[str, Tensor]] = {kind: dict(tensors) for kind, tensors in self._parked.items()}
            given = None if self._module is None else self._module.registration.optimizer
            names = [name for name in self._cached if self.steps.get(name) and name not in self._parked.get("moment1", {})]
            if given is not None and names:
                assert self._module is not None
                got = self._parts.get(self._module, given.moments, names, timeout=self._options.timeout)
                for kind, tensors in got.items():
                    found.setdefault(kind, {}).update({name: torch.from_numpy(array) for name, array in tensors.items()})
            most = found.get("moment2_max", {})  # those of others are 0, in a module that has room for all
            return {**found, "moment2_max": {name: most[name] for name in most if name in self._maxed}}

    def put_moments(self, moments: Dict[str, Dict[str, Tensor]], steps: Dict[str, int], checked: bool) -> None:
        """Sets the moments of these parameters; the others' stay. With checked=False only looks whether it can."""
        with self._lock:
            self.flush()
            self._refuse_live("load_state_dict")
            for name, tensor in (one for tensors in moments.values() for one in tensors.items()):
                if tensor.shape != self._cached[name].shape:
                    raise wrong("load_state_dict", f"moments of shape {tuple(self._cached[name].shape)} of {name}",
                                tuple(tensor.shape))
            if not checked:
                return
            self._drop_parked(steps)
            self._put_moments({kind: {name: own(tensor) for name, tensor in tensors.items()}
                               for kind, tensors in moments.items()})
            self._maxed = (self._maxed - steps.keys()) | moments.get("moment2_max", {}).keys()
            self.steps.update(steps)
            for name in [name for name, step in self.steps.items() if not step]:
                self.steps.pop(name)

    def _begin_moments(self, parameters: Mapping[str, Tensor]) -> None:
        zeros = {name: torch.zeros(parameter.shape) for name, parameter in parameters.items()}
        self._drop_parked(zeros)
        self._put_moments({kind: zeros for kind in (self._spec.moments if self._spec else ())})

    def _drop_parked(self, names: Iterable[str]) -> None:
        for tensors in self._parked.values():
            for name in names:
                tensors.pop(name, None)

    def _put_moments(self, moments: Dict[str, Dict[str, Tensor]]) -> None:
        for kind, tensors in moments.items():
            self._parked.setdefault(kind, {}).update(tensors)

    def _put_parked(self) -> None:
        """Sends parked moments that the module has room for."""
        assert self._module is not None
        there, has = self.in_module(), self._module.registration.optimizer
        room = has.moments if has is not None else ()
        given = {kind: {name: host(tensor) for name, tensor in self._parked.get(kind, {}).items() if name in there}
                 for kind in room}
        if any(given.values()):
            self._parts.put(self._module, {kind: tensors for kind, tensors in given.items() if tensors},
                            timeout=self._options.timeout)
        kept = {kind: {name: tensor for name, tensor in tensors.items() if kind not in room or name not in there}
                for kind, tensors in self._parked.items()}
        self._parked = {kind: tensors for kind, tensors in kept.items() if tensors}

    def in_module(self) -> Set[str]:
        """Parameters whose moments the module has."""
        if self._module is None:
            return set()
        return {name for name, parameter in zip(self._parts.names, self._module.layout.parameters) if parameter.trained}

    # ---- Gradients.

    def _refuse_live(self, what: str, besides: Iterable[str] = ()) -> None:
        if any(not state.is_lost and not state.is_zero for name, state in self._grads.items() if name not in besides):
            raise FailedPrecondition(f"{what}: gradients since the last step would be lost: call step() or zero_grad()")
        if self._module is not None and self._module.micro_batches:
            self._module.discard(timeout=self._options.timeout)
        self._stale.clear()

    def gradient_state(self, name: str) -> Optional[GradientState]:
        return self._grads.get(name)

    def gradient_of(self, name: str) -> Optional[Tensor]:
        """RemoteParameter.grad."""
        state = self._grads.get(name)
        if self.hides:
            return None
        if self._lent is not None and name in self._lent:
            return self._lent[name]
        if state is None:
            return None
        mine: Any = self
        if state.tensor is None or state.tensor.device != self.device:
            state.tensor = RemoteGradient.of(mine, name, state, self._cached[name].shape)
        return state.tensor

    def gradient_norm(self, name: str, order: Any) -> float:
        """The norm of the gradient that the daemon has."""
        order = float(order)
        if order not in (1.0, 2.0, math.inf):
            raise Unimplemented(f"norm: expected order 1, 2 or inf for a gradient on a daemon, got {order}: any other under "
                                "`with attnd.torch.local_gradients(model):`", field="norm_type")
        with self._lock:
            wants_all = order != 2
            if self._norms is None or (wants_all and not self._has_all_norms):
                assert self._module is not None
                norms = self._module.parameter_stats(all_norms=wants_all, timeout=self._options.timeout)
                self._norms, self._has_all_norms = {}, wants_all
                for at, one in zip(self._parts.names, norms):
                    self._norms.setdefault(at, []).append(one)
            found = self._norms[name]
            if order == 2:
                made = math.sqrt(sum(one.squared for one in found))
            elif order == 1:
                made = sum(one.sum for one in found)
            else:
                made = math.nan if any(math.isnan(one.largest) for one in found) else max(one.largest for one in found)
            return made / self._power

    def forget(self, names: Iterable[str]) -> None:
        """Gradients set to None."""
        with self._lock:
            names = list(names)
            if not self._staged.keys().isdisjoint(names):
                self.flush()
            for name in names:
                if self.is_lent(name):
                    self._lent[name] = None  # type: ignore[index]
                    continue
                state = self._grads.pop(name, None)
                if state is not None and not state.is_lost:
                    self._stale.add(name)
            self.settle()

    def zero(self, names: Iterable[str]) -> None:
        with self._lock:
            self.flush()
            for name in names:
                lent = self._lent[name] if self._lent is not None and self.is_lent(name) else None
                if lent is not None:
                    lent.zero_()
                elif name in self._grads and not self.is_lent(name):
                    self.revive(name)
                    self._grads[name].zero()
            self.settle()

    def revive(self, name: str) -> None:
        self._grads[name].is_lost = False

    def discard(self) -> None:
        """Forgets all gradients."""
        self.forget(list(self._grads))

    def settle(self) -> None:
        """Clears what the daemon has where nobody wants any of it."""
        self.line.finish()
        if any(not state.is_lost and not state.is_zero for state in self._grads.values()):
            return
        self._norms = None
        self._stale.clear()
        if self._module is not None and self._module.micro_batches:
            self._module.discard(timeout=self._options.timeout)

    def before_backward(self, names: Iterable[str]) -> None:
        """The daemon adds to what it has: that is made what gradients are here. names: of the layers that it is of."""
        if self._lent is not None:
            raise FailedPrecondition("local_gradients: expected no backward in this block: run it before or after")
        self.flush()
        self._refuse_frozen(names)
        self.settle()
        live = {name: state for name, state in self._grads.items() if not state.is_lost and not state.is_zero}
        scaled = [name for name, state in live.items() if state.factor != 1]
        there = self.in_module() if live else set()
        zero = {name for name in there if live and (name in self._stale or (
            name in self._grads and self._grads[name].is_zero)) and not self._is_lost(name)}
        self._norms = None
        if not scaled and not zero:
            return
        if self.ranks is not None:
            raise FailedPrecondition("backward: expected a step or zero_grad since gradients of a group's module were "
                                     "clipped, unscaled, or set to None or 0")
        found = {name: tensor.numpy() for name, tensor in self._numbers(scaled).items()}
        self._put_gradients({**found, **{name: torch.zeros(self._cached[name].shape).numpy() for name in zero}})
        for name in scaled:
            live[name].factor = 1.0
        self._stale -= zero

    def _refuse_frozen(self, names: Iterable[str]) -> None:
        for name in self.in_module().intersection(names):
            state = self._grads.get(name)
            if not self._cached[name].requires_grad and state is not None and not state.is_lost and not state.is_zero:
                raise FailedPrecondition(f"backward: {name} was frozen after this forward, and has a gradient already, to "
                                         "which PyTorch would add nothing: freeze it before the forward, or after "
                                         "zero_grad()")

    def _is_lost(self, name: str) -> bool:
        state = self._grads.get(name)
        return state is not None and state.is_lost

    @torch.inference_mode(False)
    def _numbers(self, names: Sequence[str]) -> Dict[str, Tensor]:
        """Gradients as they are here, of what the daemon has and how that was multiplied."""
        if not names:
            return {}
        assert self._module is not None
        found = self._parts.get(self._module, ["gradient"], names, timeout=self._options.timeout)["gradient"]
        factors = {name: self._grads[name].factor / self._power for name in found}
        return {name: torch.from_numpy(array) if factors[name] == 1 else torch.from_numpy(array) * factors[name]
                for name, array in found.items()}

    def choose_power(self, largest: float, adds: bool, finish: Optional[Callable[[], None]] = None) -> float:
        """Returns what a dy of float16 is multiplied by, of numbers up to `largest`: that type has nothing below 6e-8
        or above 65504. adds: to the daemon's gradients, which have one power for all that they are the sum of. finish:
        waits for the backward that adds to them before, where one may be under way."""
        mine = 1.0
        if math.isfinite(largest) and largest > 0:
            mine = math.ldexp(1.0, max(-100, min(-math.frexp(largest)[1], 100)))
        if self.ranks is not None:
            return 1.0  # which ranks would have to agree on
        assert self._module is not None
        if not adds or (finish is None and not self._module.micro_batches):
            self._power = mine if adds else self._power
            return mine
        if mine != 1 and not 1 / 1024 < largest * self._power < 8192:
            if finish is not None:
                finish()
            names = [name for name, state in self._grads.items() if not state.is_lost and not state.is_zero]
            numbers, self._power = self._numbers(names), mine
            self._put_gradients({name: host(tensor) for name, tensor in numbers.items()})
            for name in names:
                self._grads[name].factor = 1.0
        return self._power

    def _put_gradients(self, tensors: Dict[str, Any]) -> None:
        assert self._module is not None
        self._norms = None
        try:
            if not self._module.micro_batches:
                self._power = 1.0
            if self._power != 1:
                tensors = {name: array * self._power for name, array in tensors.items()}
            self._parts.put_gradients(self._module, tensors, timeout=self._options.timeout)
        except BaseException:
            for name in tensors:  # nobody knows what the daemon has
                self._grads.setdefault(name, GradientState()).is_lost = True
            raise

    def after_backward(self, names: Iterable[str], is_empty: bool) -> None:
        """names: of the layers that it was of. is_empty: the call had no rows, and its gradients are 0."""
        for name in sorted(self.in_module().intersection(names)):
            state = self._grads.get(name)
            if not self._cached[name].requires_grad:  # frozen since the forward: it gets nothing
                if not is_empty:
                    self._stale.add(name)
            elif state is None:
                state = self._grads[name] = GradientState()
                state.is_zero = is_empty
            elif state.is_lost and not is_empty:
                self._stale.add(name)  # the daemon has this backward's alone
            elif state.is_zero and not is_empty:
                state.factor, state.is_zero = 1.0, False


    # ---- Gradients that are lent.

    @property
    def lends_gradients(self) -> bool:
        """Under attnd.torch.local_gradients."""
        return self._lent is not None

    def is_lent(self, name: str) -> bool:
        return self._lent is not None and name in self._lent

    def lend_gradients(self) -> None:
        """They are ordinary tensors from now on, but those that a step has cleared, or is about to use."""
        with self._lock:
            if self.ranks is not None:
                raise Unimplemented("local_gradients: expected layers of one process; those of a group have the sum over "
                                    "ranks on the daemon: scale or clip it there, or use optimizer=\"local\" under "
                                    "DistributedDataParallel", field="group")
            self.meet()
            names = [name for name in self._cached if name in self.in_module() and name not in self._staged
                     and not self._is_lost(name)]
            found = self._numbers([name for name in names if name in self._grads and not self._grads[name].is_zero])
            self._lent = {}
            for name in names:
                if name in found:
                    self._lent[name] = found[name].to(self.device)
                else:
                    self._lent[name] = torch.zeros(self._cached[name].shape, device=self.device) \
                        if name in self._grads else None
            self._lent_bits = {name: digest(tensor) for name, tensor in self._lent.items() if tensor is not None}

    def set_lent(self, name: str, tensor: Tensor) -> None:
        """RemoteParameter.grad = tensor."""
        shape = self._cached[name].shape
        if not self.is_lent(name):
            raise FailedPrecondition(f"grad: {name} cannot be given a gradient now: call the layers once before, with its "
                                     "requires_grad set, and do not step between backward and local_gradients")
        if tensor.shape != shape or not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_meta:
            raise wrong("grad", f"a dense tensor of shape {tuple(shape)}", f"{tensor.dtype} of {tuple(tensor.shape)}")
        assert self._lent is not None
        self._lent[name] = tensor

    def take_gradients(self) -> None:
        """Sends what has changed to the daemon."""
        with self._lock:
            lent, self._lent = self._lent or {}, None
            changed = {name: tensor for name, tensor in lent.items() if tensor is not None
                       and (self._is_lost(name) or digest(tensor) != self._lent_bits.get(name))}
            if changed:
                self._put_gradients({name: host(tensor) for name, tensor in changed.items()})
            for name in changed:
                state = self._grads.setdefault(name, GradientState())
                state.factor, state.is_zero, state.is_lost = 1.0, False, False
                self._stale.discard(name)
            gone = [name for name, tensor in lent.items() if tensor is None and name in self._grads]
            if gone:
                self.forget(gone)


def _union(specs: Sequence[Any]) -> Any:
    """Returns the one that has the moments that any of them needs."""
    most: Any = max(specs, key=lambda spec: len(spec.moments))
    return most


def _switched_on(word: str) -> FailedPrecondition:
    return FailedPrecondition(f"step: {word} was switched on, for which the daemon has no room: make "
                              "attnd.torch.optimizer(...) anew with it, between a step and the next backward")
