"""Module, a stack of layers on a daemon, on NumPy arrays; how it is registered, and the arithmetic of its optimizers."""
from __future__ import annotations

import base64
import ctypes
import math
import warnings
from typing import Any, Dict, Iterable, List, Literal, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from .. import _arrays, _checks, _memory, _native
from .. import _protobuf as wire
from .._arrays import Array, ArrayLike, Tensor
from .._call import Call, CallOptions, Handle
from .._wire import address
from ..client import Client, connect
from ..errors import AttndError, FailedPrecondition, wrong, wrong_type
from .layout import Layout, Parameter

_ANSWER_SECONDS = 30.0  # in which the daemon says that an exchange has ended
KINDS = {"weight": 1, "gradient": 2, "moment1": 3, "moment2": 4, "moment2_max": 5}
DURABILITIES = {"process": 0, "host": 1, "disk": 2}
Durability = Literal["process", "host", "disk"]


class AdamW(NamedTuple):
    """torch.optim.AdamW's arithmetic, or Adam's with coupled_decay. Rates and decay come with each step."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    coupled_decay: bool = False
    amsgrad: bool = False

    @property
    def moments(self) -> Tuple[str, ...]:
        return ("moment1", "moment2", "moment2_max") if self.amsgrad else ("moment1", "moment2")

    def encode(self) -> bytes:
        return wire.message(2, wire.float64(1, self.beta1) + wire.float64(2, self.beta2) + wire.float64(3, self.epsilon)
                            + wire.number(4, int(self.coupled_decay)) + wire.number(5, int(self.amsgrad)))


class SGD(NamedTuple):
    """torch.optim.SGD's arithmetic."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    @property
    def moments(self) -> Tuple[str, ...]:
        return ("moment1",) if self.momentum else ()

    def encode(self) -> bytes:
        return wire.message(1, wire.float64(1, self.momentum) + wire.float64(2, self.dampening)
                            + wire.number(3, int(self.nesterov)))


Optimizer = Union[None, AdamW, SGD]


class Registration(NamedTuple):
    """A module is registered with this: the same again gives the same module."""

    layout: Layout
    name: str
    optimizer: Optimizer
    groups: Tuple[int, ...]
    max_rows: int
    kept_rows: int
    durability: str
    ttl: float
    max_memory_rows: int = 0
    owner_epoch: int = 0  # 0: one above the owner's before

    def serialize(self, dry_run: bool = False) -> bytes:
        limits = wire.number(1, self.max_rows) + wire.number(2, self.kept_rows)
        calls = -(-self.kept_rows // self.max_rows)
        limits += wire.number(4, self.max_memory_rows) + wire.number(5, calls * self.max_memory_rows)
        optimizer = wire.message(3, b"") if self.optimizer is None else self.optimizer.encode()
        return (wire.text(1, self.name) + wire.message(2, self.layout.serialize())
                + wire.message(3, optimizer + wire.numbers(4, self.groups)) + wire.message(4, limits)
                + wire.number(5, round(self.ttl * 1000)) + wire.number(6, DURABILITIES[self.durability])
                + wire.number(7, int(dry_run)) + wire.fixed64(8, self.owner_epoch))


class GroupRates(NamedTuple):
    """Rates of one group of parameters, for one step."""

    lr: float
    weight_decay: float = 0.0


class StepValues(NamedTuple):
    """A step of the optimizer depends on these: fields of AdamW or of SGD, and rates. Others are not looked at."""

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    coupled_decay: bool = False
    amsgrad: bool = False

    def encode(self) -> bytes:
        return b"".join(wire.number(n, int(value)) if isinstance(value, bool) else wire.float64(n, value)
                        for n, value in enumerate(self, 1))


class ParameterStep(NamedTuple):
    """One parameter's step. step: its own t, this step included; 0: neither it nor its moments change."""

    values: int = 0  # index
    step: int = 0
    multiplier: float = 1.0

    def encode(self) -> bytes:
        return (wire.number(1, self.values) + wire.number(2, self.step)
                + (b"" if self.multiplier == 1 else wire.some_float64(3, self.multiplier)))


class GradientNorms(NamedTuple):
    """Norms of one parameter's gradient. sum and largest are of its absolute numbers, 0 where they were not asked for."""

    squared: float
    sum: float
    largest: float


class StepResult(NamedTuple):
    """applied: False where it was skipped. norm: of the gradients before multiplier and clipping."""

    applied: bool
    sequence: int
    durable_sequence: int
    optimizer_step: int
    norm: float
    finite: bool


class Activations:
    """Names what a forward left on the daemon for its backward. Given back with the last reference."""

    pointer: Any = None  # until there is one, which Ctrl-C may come before

    def __init__(self, module: _Native, shape: Tuple[int, ...], weights: int, memory: Optional[Array] = None) -> None:
        self.pointer, self.shape, self._module = ctypes.c_void_p(), shape, module
        self.weights: Optional[int] = weights  # how often they had changed; None: its owner looks after that
        self.memory_shape = None if memory is None else memory.shape

    def __del__(self) -> None:
        if self.pointer and self._module.alive():
            self._module.library.attnd_activations_free(self.pointer)


class _Native:
    """The library's module, freed with its last reference, before its client."""

    def __init__(self, handle: Handle, pointer: int) -> None:
        self.handle, self.library = handle, handle.library
        self.pointer: Optional[int] = pointer

    def alive(self) -> bool:
        is_there = self.pointer is not None and self.handle.pointer is not None  # the end of a cycle frees in any order
        return is_there and self.handle.generation == _native.generation()

    def __del__(self) -> None:
        if self.alive():
            self.library.attnd_module_free(self.pointer)
        self.pointer = None


def register(layout: Layout, client: Union[str, Client], *, name: str, optimizer: Optimizer = None,
             groups: Sequence[int] = (), max_rows: int = 16384, kept_rows: Optional[int] = None,
             max_memory_rows: Optional[int] = None, durability: Durability = "process", ttl: float = 3600.0,
             replay_mib: int = 512, snapshot_every: Optional[int] = None, timeout: Optional[float] = None) -> Module:
    """A module of that name on one of the client's daemons; a new one has no weights until they are put. Who had it before
    gets FailedPrecondition (MODULE_TAKEN) from now on.

    client: a Client, or the address of a daemon. optimizer: None: gradients are fetched, weights put. groups: of each of
    the layout's parameters, the index of its rates. max_rows: rows of one call; kept_rows: of all whose activations are
    kept at a time (None: max_rows). max_memory_rows: of the memory of one call, where the layout has one (None: max_rows).
    The daemon's memory is reserved for them. durability: what the daemon keeps through a restart:
    nothing ("process"), or the state as of a while ago. ttl: seconds that the daemon keeps it unused. replay_mib: of calls
    kept here, to be replayed where the daemon lost them. snapshot_every: after so many steps and puts the state is copied
    here, and calls before it need not be kept; 0: never; None: never, with one warning when a restart of the daemon would
    lose the module.
    """
    if not isinstance(layout, Layout):
        raise wrong_type("layout", "an attnd.modules.Layout", layout)
    if optimizer is not None and not isinstance(optimizer, (AdamW, SGD)):
        raise wrong_type("optimizer", "attnd.AdamW(), attnd.SGD() or None", optimizer)
    _checks.integer("max_rows", max_rows, 1, 1 << 32)
    for word, rows in (("kept_rows", kept_rows), ("max_memory_rows", max_memory_rows)):
        if rows is not None:
            _checks.integer(word, rows, 0, 1 << 32)
    for group in groups:
        _checks.integer("groups", group, 0, 1 << 16)
    made = client if isinstance(client, Client) else connect(client)
    most = 0 if not layout.memory_width else max_rows if max_memory_rows is None else max_memory_rows
    _checks.word("durability", durability, list(DURABILITIES), '"process", "host" or "disk"')
    return Module(made, Registration(layout, name, optimizer, tuple(groups), max_rows,
                                     max_rows if kept_rows is None else kept_rows, durability, _checks.seconds("ttl", ttl),
                                     most), replay_mib, timeout, snapshot_every)


class Module:
    """A stack of layers on a daemon. Made by attnd.register. Any thread may call any method."""

    def __init__(self, client: Client, registration: Registration, replay_mib: int = 512,
                 timeout: Optional[float] = None, snapshot_every: Optional[int] = None) -> None:
        if not isinstance(registration.layout, Layout):
            raise wrong_type("layout", "an attnd.modules.Layout", registration.layout)
        self.client, self.registration, self.layout = client, registration, registration.layout
        self._shapes = {parameter.name: parameter for parameter in self.layout.parameters}
        handle, request = client._handle(), registration.serialize()
        call = Call(handle.library, CallOptions(timeout))
        pointer: List[Optional[int]] = []

        def run(*arguments: Any) -> int:
            pointer.append(handle.library.attnd_module_register(*arguments))
            return int(handle.library.attnd_call_code(call.pointer))
        self._explained(call, run, handle.pointer, request, len(request), replay_mib << 20)
        self._native = _Native(handle, pointer[0] or 0)
        reply = call.result()
        if snapshot_every is not None and snapshot_every < 0:
            raise wrong("snapshot_every", "0 or above", snapshot_every)
        handle.library.attnd_module_keep_snapshots(self._native.pointer, snapshot_every or 0)
        self._replay_mib, self._warns_of_loss = replay_mib, snapshot_every is None and replay_mib > 0
        self.plan: Dict[str, Any] = reply["plan"]
        self.owner_epoch = int(reply["status"]["owner_epoch"])
        self.weights_complete = bool(reply["status"]["weights_complete"])
        self._changes = 0  # of weights

    def __repr__(self) -> str:
        return f"<attnd.Module {self.registration.name} at {self.client.addresses[0]}, sequence {self.sequence}>"

    @property
    def sequence(self) -> int:
        """How many steps and puts made the state that calls here name."""
        return int(self._native.library.attnd_module_sequence(self._native.pointer))

    @property
    def micro_batches(self) -> int:
        """How many backwards have been called since the last step."""
        return int(self._native.library.attnd_module_micro_batches(self._native.pointer))

    def forward(self, x: ArrayLike, *, keep: bool = False, training: Optional[bool] = None,
                kv_lengths: Optional[ArrayLike] = None, mask: Optional[Array] = None,
                positions: Optional[Sequence[int]] = None, cu_seqlens: Optional[ArrayLike] = None,
                memory: Optional[ArrayLike] = None, memory_lengths: Optional[ArrayLike] = None,
                memory_cu_seqlens: Optional[ArrayLike] = None, seed: int = 0, offset: int = 0,
                layers: Optional[Tuple[int, int]] = None, makes_room: bool = False, sequences_before: int = 0,
                out: Optional[Array] = None, timeout: Optional[float] = None) -> Any:
        """y of x [batch, length, width] (or [length, width]) in the layout's element; with keep, (y, activations).

        training: with dropout; None: keep. kv_lengths [batch]: rows beyond are padding. mask: bool [batch or 1, heads or 1,
        length or 1, length], True = attend. positions: of each row, for rotary. memory [batch, rows, memory_width], and
        memory_lengths as kv_lengths. cu_seqlens [batch + 1]: x [total, width] holds sequences end to end, the first row of
        each and the total; memory_cu_seqlens for memory [total, memory_width]. seed, offset: dropout's; offset numbers the
        micro-batch. layers: (first, end) of those to run, None: all; x is the first one's input, and a backward is of the
        same ones. makes_room: where activations that wait for their backward leave no room, the oldest are computed again
        then. sequences_before: of a larger x, of which this one, not packed, is a part; dropout is that of the larger one.
        out: a contiguous array of x's shape that receives y, and is what is returned; one of the client's empty() is not
        copied.
        """
        taken = self._array("x", x)
        shape = taken.shape if taken.ndim == 3 else (1, *taken.shape)
        if len(shape) != 3 or shape[2] != self.layout.width:
            raise wrong("x", f"[batch, length, {self.layout.width}]", taken.shape)
        training = keep if training is None else training
        rows, bits = self._rows(shape, kv_lengths, mask, positions, cu_seqlens)
        for word, value in (("offset", offset), ("sequences_before", sequences_before)):
            _checks.integer(word, value, 0, (1 << 64) - 1)
        rows += wire.number(6, sequences_before * shape[1]) + wire.number(9, sequences_before)
        second = None if memory is None else self._array("memory", memory)
        rows += self._memory_rows(shape, second, memory_lengths, memory_cu_seqlens, cu_seqlens is not None)
        header = (wire.message(3, rows) + wire.number(5, int(training)) + wire.fixed64(6, _seed(seed))
                  + wire.number(7, offset) + wire.number(13, int(makes_room)))
        if layers is not None:
            if not 0 <= layers[0] < layers[1] <= len(self.layout.layers):
                raise wrong("layers", f"(first, end) within 0 and {len(self.layout.layers)}", layers)
            header += wire.number(14, layers[0]) + wire.number(15, layers[1])
        y = self._result(out, taken)
        kept = Activations(self._native, taken.shape, self._changes, second)
        tensors = _native.ModuleForward(
            header=header, header_bytes=len(header), x=address(taken), x_bytes=taken.nbytes, memory=address(second),
            memory_bytes=0 if second is None else second.nbytes, mask_bits=address(bits),
            mask_bits_bytes=0 if bits is None else bits.nbytes, y=address(y),
            keep=ctypes.addressof(kept.pointer) if keep else None)
        self._run("attnd_module_forward", ctypes.byref(tensors), timeout=timeout)
        given = _arrays.give(Tensor(y, self.layout.element)) if out is None else out
        return (given, kept) if keep else given

    def backward(self, dy: ArrayLike, activations: Activations, *, want_dx: bool = True, weight_gradients: bool = True,
                 turn: int = 0, out: Optional[Array] = None, timeout: Optional[float] = None) -> Any:
        """dx, and the weights' gradients added to those since the last step; (dx, d_memory) where there was a memory.
        FailedPrecondition where a step or put has changed the weights since the activations' forward.
        want_dx=False gives None. turn: of reserve_turn(); 0: none, and not with weight_gradients=False. out: receives dx,
        as forward's receives y."""
        if not isinstance(activations, Activations):
            raise wrong_type("activations", "what forward(x, keep=True) gives beside y", activations)
        if activations.weights not in (None, self._changes):
            raise FailedPrecondition("activations: expected those of a forward with the present weights, got ones from "
                                     "before a step or put; call forward again")
        taken = self._array("dy", dy)
        if taken.shape != activations.shape:
            raise wrong("dy", f"shape {activations.shape}, as x has", taken.shape)
        if out is not None and not want_dx:
            raise wrong("out", "None with want_dx=False", "an array")
        dx = self._result(out, taken) if want_dx else None
        memory = None
        if want_dx and activations.memory_shape is not None:
            memory = _memory.empty(activations.memory_shape, taken.dtype)
        tensors = _native.ModuleBackward(activations=activations.pointer, dy=address(taken), dy_bytes=taken.nbytes,
                                         dx=address(dx), d_memory=address(memory),
                                         d_memory_bytes=0 if memory is None else memory.nbytes,
                                         no_weight_gradients=int(not weight_gradients), turn=turn)
        self._run("attnd_module_backward", ctypes.byref(tensors), timeout=timeout)
        found = [None if made is None else _arrays.give(Tensor(made, self.layout.element)) for made in (dx, memory)]
        if out is not None:
            found[0] = out
        return found[0] if memory is None else tuple(found)

    def reserve_turn(self) -> int:
        """For one backward, where threads call several at once: gradients are added in the order in which turns were
        reserved, not in that in which calls come. Where a backward fails, those of later turns raise FailedPrecondition
        at once."""
        return int(self._native.library.attnd_module_reserve_turn(self._native.pointer))

    def give_up_turn(self, turn: int) -> None:
        """No backward will take it, or the one that has taken it is to end: those of later turns wait no longer, and raise
        FailedPrecondition. Nothing happens where its backward has ended."""
        self._native.library.attnd_module_give_up_turn(self._native.pointer, turn)

    def gradient_stats(self, *, timeout: Optional[float] = None) -> Tuple[float, bool]:
        """The squared norm of the gradients, and whether they all are finite."""
        found = self._run("attnd_module_gradient_stats", timeout=timeout).result()
        return float(found["squared_norm"]), bool(found["finite"])

    def parameter_stats(self, *, all_norms: bool = False, timeout: Optional[float] = None) -> List[GradientNorms]:
        """Norms of each of the layout's parameters, in their order."""
        found = self._run("attnd_module_parameter_stats", int(all_norms), timeout=timeout).result()
        return [GradientNorms(float(one["squared_norm"]), float(one["sum"]), float(one["largest"]))
                for one in found["parameter"]]

    def step(self, lr: Optional[float] = None, weight_decay: float = 0.0, *, rates: Sequence[GroupRates] = (),
             multiplier: float = 1.0, max_norm: float = 0.0, skip_unless_finite: bool = False,
             timeout: Optional[float] = None) -> StepResult:
        """One step of the optimizer, with one rate or those of each group; the gradients are cleared.

        multiplier: of the gradients, before max_norm clips them. skip_unless_finite: nothing changes then but sequence.
        """
        count = max([0, *self.registration.groups]) + 1
        given = list(rates) if lr is None else [GroupRates(lr, weight_decay)] * count
        if not all(isinstance(rate, GroupRates) for rate in given):
            raise wrong_type("rates", "an attnd.modules.GroupRates of each group", given[0])
        groups = b"".join(wire.message(4, wire.float64(1, _rate("lr", rate.lr))
                                       + wire.float64(2, _rate("weight_decay", rate.weight_decay))) for rate in given)
        factor = b"" if multiplier == 1 else wire.some_float64(5, _rate("multiplier", multiplier))
        limits = wire.float64(6, _rate("max_norm", max_norm)) + wire.number(7, int(skip_unless_finite))
        return self._step(groups + factor + limits, timeout)

    def step_parameters(self, values: Sequence[StepValues], parameters: Sequence[ParameterStep], *,
                        timeout: Optional[float] = None) -> StepResult:
        """One step, in which each of the layout's parameters has numbers, a count and a multiplier of its own. The gradients
        are cleared, those of parameters that stay as they are too."""
        return self._step(b"".join(wire.message(9, one.encode()) for one in values)
                          + b"".join(wire.message(10, one.encode()) for one in parameters), timeout)

    def discard(self, *, timeout: Optional[float] = None) -> StepResult:
        """Clears the gradients without a step of the optimizer."""
        return self._step(wire.number(8, 1), timeout)

    def put(self, tensors: Mapping[str, ArrayLike], *, kind: str = "weight", optimizer_step: Optional[int] = None,
            complete: Optional[bool] = None, timeout: Optional[float] = None) -> None:
        """Writes weights, or moments, by the parameters' names: all of them or none. Gradients since the last step are
        cleared. kind="gradient": as put_gradients."""
        if kind == "gradient":
            return self.put_gradients(tensors, timeout=timeout)
        self.put_kinds({kind: tensors}, optimizer_step=optimizer_step, complete=complete, timeout=timeout)

    def put_kinds(self, kinds: Mapping[str, Mapping[str, ArrayLike]], *, optimizer_step: Optional[int] = None,
                  complete: Optional[bool] = None, timeout: Optional[float] = None) -> None:
        """As put, for several kinds at once: "weight", "moment1", "moment2", "moment2_max"."""
        if "gradient" in kinds:
            raise wrong("kinds", "weights and moments, which clear gradients: put_gradients puts those", "gradient")
        made, keep = self._sent(kinds)
        if complete is None:
            complete = set(kinds.get("weight", ())) == set(self._shapes)
        self._run("attnd_module_put", made, len(made), -1 if optimizer_step is None else optimizer_step, int(complete),
                  timeout=timeout)
        self.weights_complete |= complete
        self._changes += 1

    def put_gradients(self, tensors: Mapping[str, ArrayLike], *, timeout: Optional[float] = None) -> None:
        """Replaces these parameters' gradients since the last step; the others stay. It counts as a backward: what follows
        is added to them."""
        made, keep = self._sent({"gradient": tensors})
        self._run("attnd_module_put_gradients", made, len(made), timeout=timeout)

    def _sum_gradients_of(self, replica: int, replicas: int, group: bytes, seconds: float) -> bytes:
        """Replaces the gradients by the sums of `replicas` modules', whose daemons exchange them; each process of them calls
        this at once, with the group that an empty one gives replica 0."""
        request = (wire.number(4, replicas) + wire.number(5, replica) + wire.message(6, group)
                   + wire.number(7, round(seconds * 1000)))
        call = self._run("attnd_module_sum_gradients", request, len(request), timeout=seconds + _ANSWER_SECONDS)
        return base64.b64decode(call.result()["group"])

    def _sent(self, kinds: Mapping[str, Mapping[str, ArrayLike]]) -> Tuple[Any, List[Array]]:
        """Returns what the library takes, and the arrays that it reads."""
        made, keep = [], []
        for kind, tensors in kinds.items():
            if not isinstance(tensors, Mapping):
                raise wrong_type("tensors", "arrays by their parameters' names", tensors)
            for name, value in tensors.items():
                taken = _arrays.take(name, value)
                bits = np.ascontiguousarray(taken.bits)
                expected = self._parameter(name).shape
                if bits.shape != expected:
                    raise wrong(name, f"shape {expected}", bits.shape)
                keep.append(bits)
                made.append(_tensor(kind, name, bits, _native.ELEMENTS[taken.element]))
        return (_native.ModuleTensor * len(made))(*made), keep

    def get(self, names: Optional[Iterable[str]] = None, *, kind: str = "weight", timeout: Optional[float] = None
            ) -> Dict[str, Array]:
        """Weights, gradients or moments in float32, all of one state. names: None: of all parameters; gradients and moments
        are those of trained ones."""
        return self.get_kinds([kind], names, timeout=timeout)[kind]

    def get_kinds(self, kinds: Sequence[str], names: Optional[Iterable[str]] = None, *, timeout: Optional[float] = None
                  ) -> Dict[str, Dict[str, Array]]:
        """As get, for several kinds, all of one state."""
        wanted = list(self._shapes) if names is None else list(names)
        found: Dict[str, Dict[str, Array]] = {}
        for kind in kinds:
            found[kind] = {name: np.empty(self._parameter(name).shape, np.float32) for name in wanted
                           if kind == "weight" or self._parameter(name).trained}
        self._fill(found, timeout)
        return found

    def _fill(self, kinds: Mapping[str, Mapping[str, Array]], timeout: Optional[float] = None) -> None:
        """Writes tensors into these arrays, float32 and contiguous."""
        made = [_tensor(kind, name, array, 3) for kind, arrays in kinds.items() for name, array in arrays.items()]
        if made:
            self._run("attnd_module_get", (_native.ModuleTensor * len(made))(*made), len(made), timeout=timeout)

    def status(self, *, timeout: Optional[float] = None) -> Dict[str, Any]:
        """Asks the daemon about it; the names are those of attnd.v1.ModuleStatus."""
        return self._run("attnd_module_status", timeout=timeout).result()

    def release(self, *, timeout: Optional[float] = None) -> None:
        """Gives the daemon's memory back; the module is gone then."""
        self._run("attnd_module_release", timeout=timeout)

    # ---- One call.

    def check_process(self) -> None:
        if not self._native.alive():
            raise wrong("module", "one that was registered in this process", "one of the process that forked")

    def _run(self, name: str, *arguments: Any, timeout: Optional[float] = None) -> Call:
        self.check_process()
        call = Call(self._native.library, CallOptions(timeout))
        self._explained(call, getattr(self._native.library, name), self._native.pointer, *arguments, timeout=timeout)
        return call

    def _explained(self, call: Call, operation: Any, *arguments: Any, timeout: Optional[float] = None) -> None:
        try:
            call.run(operation, *arguments)
        except AttndError as error:
            raise self.client._explain(error, timeout, 0) from None

    def _step(self, request: bytes, timeout: Optional[float]) -> StepResult:
        found = self._run("attnd_module_step", request, len(request), timeout=timeout).result()
        self._changes += int(found["applied"])
        if self._warns_of_loss and not self._native.library.attnd_module_is_recoverable(self._native.pointer):
            self._warns_of_loss = False
            warnings.warn(f"attnd: a restart of the daemon would now lose the state of the module {self.registration.name}: "
                          f"the last {self._replay_mib} MiB of calls (replay_mib) do not reach back to a state that is "
                          "kept. Give snapshot_every=10, for example, to keep a copy here, or snapshot_every=0 if your own "
                          "checkpoints are enough.", RuntimeWarning, stacklevel=3)
        return StepResult(found["applied"], int(found["sequence"]), int(found["durable_sequence"]),
                          int(found["optimizer_step"]), math.sqrt(max(0.0, float(found["squared_norm"]))), found["finite"])

    def _array(self, field: str, value: ArrayLike) -> Array:
        taken = _arrays.cast(_arrays.take(field, value), self.layout.element)
        made: Array = np.ascontiguousarray(taken.bits)
        return made

    def _result(self, out: Optional[Array], like: Array) -> Array:
        """An array's bits, which receive a result of this shape and type: those of `out`, or new ones."""
        if out is None:
            return _memory.empty(like.shape, like.dtype)
        if not isinstance(out, np.ndarray):
            raise wrong_type("out", "a NumPy array", out)
        bits, element = _arrays.take("out", out)
        if bits.shape != like.shape:
            raise wrong("out", f"shape {like.shape}", bits.shape)
        if element != self.layout.element:
            raise wrong("out", f"the layout's element, {self.layout.element}", element)
        if not bits.flags.c_contiguous or not bits.flags.writeable:
            raise wrong("out", "a contiguous array that can be written", "another")
        return bits

    def _parameter(self, name: str) -> Parameter:
        found = self._shapes.get(name)
        if found is None:
            raise wrong("name", f"one of the layout's parameters, such as {next(iter(self._shapes))}", name)
        return found

    def _rows(self, shape: Tuple[int, ...], kv_lengths: Optional[ArrayLike], mask: Optional[Array],
              positions: Optional[Sequence[int]], cu_seqlens: Optional[ArrayLike]) -> Tuple[bytes, Optional[Array]]:
        """The message without its memory, and the mask's bits."""
        batch, length = shape[:2]
        if cu_seqlens is not None:
            if batch != 1 or kv_lengths is not None:
                raise wrong("cu_seqlens", "x of shape [total, width], and no kv_lengths", f"x of shape {shape}")
            starts = _starts("cu_seqlens", cu_seqlens, length)
            rows = wire.number(1, len(starts) - 1) + wire.message(3, wire.numbers(2, starts))
        else:
            rows = wire.number(1, batch) + wire.number(2, length)
        if kv_lengths is not None:
            lengths = _arrays.integers("kv_lengths", kv_lengths, 0, length, (batch,))
            rows += wire.message(3, wire.numbers(1, lengths.tolist()))
        bits = None
        if mask is not None:
            if mask.ndim != 4 or mask.dtype != np.bool_:
                raise wrong("mask", "a bool array of 4 dimensions", f"{mask.dtype} of shape {mask.shape}")
            bits = _arrays.packed_bits(mask)
            rows += wire.message(4, wire.numbers(1, mask.shape))
        if positions is not None:
            rows += wire.numbers(5, positions)
        return rows, bits

    def _memory_rows(self, shape: Tuple[int, ...], memory: Optional[Array], lengths: Optional[ArrayLike],
                     cu_seqlens: Optional[ArrayLike], is_packed: bool) -> bytes:
        width = self.layout.memory_width
        if memory is None:
            if width:
                raise wrong("memory", f"rows of {width} columns, which the layout reads", None)
            return b""
        if memory.ndim not in (2, 3) or memory.shape[-1] != width:
            raise wrong("memory", f"[batch, rows, {width}]" if width else "None: the layout has none", memory.shape)
        if (cu_seqlens is not None) != is_packed:
            raise wrong("memory_cu_seqlens", "an array iff cu_seqlens is one", cu_seqlens)
        if cu_seqlens is not None:
            return wire.message(8, wire.numbers(3, _starts("memory_cu_seqlens", cu_seqlens, memory.shape[0])))
        count, rows = memory.shape[:2] if memory.ndim == 3 else (1, memory.shape[0])
        if count != shape[0]:
            raise wrong("memory", f"{shape[0]} sequences, as x has", count)
        made = wire.number(7, rows)
        if lengths is not None:
            made += wire.message(8, wire.numbers(1, _arrays.integers("memory_lengths", lengths, 0, rows, (count,)).tolist()))
        return made


def _starts(name: str, value: ArrayLike, total: int) -> List[int]:
    """First rows and the total."""
    found = np.asarray(value)
    starts: List[int] = _arrays.integers(name, value, 0, total, (found.size,)).tolist()
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != total or sorted(starts) != starts:
        raise wrong(name, f"numbers from 0 to {total}, never falling", starts)
    return starts


def _rate(field: str, value: Any) -> float:
    found = _checks.number(field, value, None)
    if found is None:
        raise wrong_type(field, "a finite number", value)
    return found


def _seed(value: Any) -> int:
    """Any integer of 64 bits, with a sign or without."""
    return _checks.integer("seed", value, -(1 << 63), (1 << 64) - 1) % (1 << 64)


def _tensor(kind: str, name: str, array: Array, element: int) -> _native.ModuleTensor:
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    return _native.ModuleTensor(_checks_kind(kind), element, name.encode(), address(array), array.nbytes, shape, array.ndim)


def _checks_kind(kind: str) -> int:
    if kind not in KINDS:
        raise wrong("kind", " or ".join(f'"{word}"' for word in KINDS), repr(kind))
    return KINDS[kind]
