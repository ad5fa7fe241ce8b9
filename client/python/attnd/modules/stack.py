"""RemoteStack: a ModuleList or Sequential whose layers run on a daemon as one module, under autograd.

The layers stay in it as they were, for their names, options and train(), and are described anew where those have changed;
with optimizer="server" their parameters are meta tensors; state_dict() and load_state_dict() read and write the daemon's.
The module is registered with the first forward, when its rows and the optimizer are known, and again, state and all, where a
later call needs another one.
"""
from __future__ import annotations

import collections
import copy
import threading
import uuid
import weakref
from typing import Any, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Set, Tuple, Union

import torch
from torch import Tensor, nn

from .._transfer import send
from ..client import Client
from ..errors import AttndError, FailedPrecondition, ResourceExhausted, Unimplemented
from .calls import StackCall, adapt, check_rotary
from .chain import LayerForward, call_layers, compute_others, input_of, same
from .describe import describe
from .group import GroupModule, Ranks
from .layers import Described, Variant, refuse
from .layout import Layout
from .leases import renew
from .micro_batches import Line
from .module import AdamW, GradientNorms, Module, Registration, SGD, StepValues
from .numbers import digest, host, own
from .owning import Owning, optimizers
from .parameters import GradientState, RemoteParameter, refuse_conversion, stack_of
from .parts import Parts
from .remote_call import make_anchor, uncompiled
from .replicas import ReplicaModule, Replicas
from .states import Copies, Loads, add_inner_hooks, add_stack_hooks, drop_inner_hooks
from .stepping import Sent, Stepping
from .watch import Watch, has_hooks, refuse_around, refuse_captures, refuse_hooks

__all__ = ["RemoteStack", "layout_of", "part_of", "stack_of"]

_LEASE, _NAMED_LEASE = 120.0, 3600.0  # seconds; the first is renewed while this process lives
# Arguments of a model's layers that are ignored: the layout says them, or they have been refused.
_IGNORED = {"position_embeddings", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}


class StackOptions(NamedTuple):
    """Options of attnd.torch.offload."""

    server_optimizer: bool
    single: bool  # one layer, which state_dict() knows without a number
    name: Optional[str]
    element: str
    max_rows: Optional[int]
    kept_rows: Optional[int]
    durability: str
    replay_mib: int
    snapshot_every: Optional[int]
    timeout: Optional[float]
    micro_batches: int = 1
    is_sequential: bool = False  # what was offloaded was one, and so is a slice


def part_of(layers: Sequence[Tuple[str, nn.Module]], index: Any, is_sequential: bool) -> Any:
    """layers[index], as a Sequential or a ModuleList where it is a slice."""
    if not isinstance(index, slice):
        return layers[index][1]
    if is_sequential:
        return nn.Sequential(collections.OrderedDict(layers[index]))
    return nn.ModuleList([layer for _, layer in layers[index]])


def describe_all(layers: Sequence[Tuple[Any, nn.Module]], variant: Variant) -> List[Described]:
    found = [describe(layer, variant) for _, layer in layers]
    if not found:
        raise TypeError("a stack cannot be offloaded: it has no layers")
    for (_, layer), described in zip(layers, found):
        if described.width != found[0].width:
            refuse(layer, f"it is {described.width} wide, the first layer {found[0].width}")
        if described.call != found[0].call and {described.call, found[0].call} != {"tensor", "encoder"}:
            refuse(layer, f"it is called unlike the first layer, {type(layers[0][1]).__name__}")
    return found


def describe_apart(layers: Sequence[Tuple[str, nn.Module]]) -> List[Described]:
    """As they are now; raises TypeError also where two of them share a parameter."""
    described = describe_all(layers, Variant())
    seen: Dict[int, str] = {}
    for name, layer in layers:
        for inner, tensor in layer.named_parameters(remove_duplicate=False):
            if id(tensor) in seen:
                refuse(layer, f"{name}.{inner} is {seen[id(tensor)]} too, and layers share nothing here")
            seen[id(tensor)] = f"{name}.{inner}"
    return described


def layout_of(layers: Sequence[Tuple[Any, nn.Module]], variant: Variant, element: str = "f32") -> Layout:
    """Named layers, first to last, as one layout. Raises TypeError for what cannot be one."""
    described = describe_all(layers, variant)
    layout = Layout(described[0].width, element, described[0].memory_width)
    for (name, _), layer in zip(layers, described):
        frozen = [n for n, inner in enumerate(layer.names) if f"{name}.{inner}" in variant.frozen]
        layout.layer(layer.block, f"{name}.", frozen=frozen, attention_scale=layer.attention_scale)
    return layout


class RemoteStack(Stepping, Owning, nn.Module):
    """Made by attnd.torch.offload."""

    _anchor: Tensor  # stands for the parameters in autograd's graph
    _anchor_node: Any

    def __init__(self, layers: Sequence[Tuple[str, nn.Module]], client: Client, options: StackOptions,
                 ranks: Optional[Ranks] = None) -> None:
        super().__init__()
        self.ranks = ranks  # that train it together
        described = describe_apart(layers)  # refuses before anything changes
        self._parts = Parts([f"{name}." for name, _ in layers], described)
        for name, layer in layers:
            self.add_module(name, layer)
        self.training = layers[0][1].training
        self._client, self._options, self.line = client, options, Line()
        self._name = options.name or f"stack-{uuid.uuid4().hex}"
        self._lock = threading.RLock()
        self._module: Optional[Module] = None
        self._held: List[Module] = []  # the same, for what is left when the stack goes
        self._needs: Optional[Tuple[Variant, int, int]] = None  # what the module was registered for
        self._weights: Dict[str, Tensor] = {}  # with optimizer="server", until there is a module
        self._fetched: Dict[str, Tensor] = {}  # while a state_dict is made
        self.copies, self.loads, self.written = Copies(), Loads(), collections.Counter()
        self.owned: Dict[str, Tuple[Any, str]] = {}  # owner of each parameter that has one
        self._local = False  # under attnd.torch.local_weights
        self._sent: Dict[str, int] = {}  # with "local", digests of what the server has
        self._causal: Set[bool] = set()  # how they have been called
        self.device = torch.device("cpu")  # of the last backward
        # ---- The optimizer's.
        self._owners: Dict[str, Any] = {}  # weak references to the RemoteOptimizers of parameters
        self._spec: Union[None, AdamW, SGD] = None
        self.steps: Dict[str, int] = {}  # of each parameter
        self._parked: Dict[str, Dict[str, Tensor]] = {}  # moments, by kind, that the module does not have
        self._maxed: Set[str] = set()
        self._staged: Dict[str, Tuple[StepValues, float]] = {}  # steps that wait for those of other optimizers
        self._unsure: Optional[Sent] = None  # a step that failed, and may have been done
        self._failed: Any = weakref.WeakKeyDictionary()  # what steps that waited failed with, by their optimizers
        # ---- Gradients.
        self.hides = False
        self._lent, self._lent_bits = None, {}
        self._power = 1.0
        self._grads: Dict[str, GradientState] = {}
        self._stale: Set[str] = set()  # on the daemon, though not what the gradient here is
        self._norms: Optional[Dict[str, List[GradientNorms]]] = None
        self._has_all_norms = False
        # ---- What the layers were when they were described.
        self.described: List[Described] = []
        self._names: List[List[str]] = []  # of parameters, of each layer
        self._trains: List[bool] = []
        self._pending: Any = weakref.WeakSet()  # calls of layers that may not have been computed
        self._cached: Dict[str, nn.Parameter] = {}
        self._watch: Optional[Watch] = None
        self._seen: List[Any] = []  # the layers
        self._forwards: Dict[int, nn.Module] = {}  # layers that have the stack's
        self._is_touched = False  # requires_grad of some parameter
        self._is_new = False  # the module was registered for layers that have changed since
        self._trained: Tuple[bool, ...] = ()
        refuse_hooks([layer for _, layer in layers])
        for name, value in zip(("_anchor", "_anchor_node"), make_anchor()):
            object.__setattr__(self, name, value)
        for _, layer in layers:
            add_inner_hooks(self, layer)
        add_stack_hooks(self)
        self._refresh()
        self._join()

    # ---- As the ModuleList or Sequential was.

    @property
    def first(self) -> nn.Module:
        return next(iter(self._modules.values()))  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._parts.prefixes)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for _, layer in self._layers()])

    def __getitem__(self, index: Any) -> Any:
        return part_of(self._layers(), index, self._options.is_sequential)

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        setattr(self, [name for name, _ in self._layers()][index], layer)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):  # a layer, called as one of these from now on
            self._put_forward([*self._modules].index(name), value)

    def __delitem__(self, index: Any) -> NoReturn:
        self._refuse_other_length()

    def _refuse_other_length(self, *_: Any) -> NoReturn:
        raise TypeError("offload: expected as many layers as were offloaded: change the list before attnd.torch.offload, or "
                        "leave a layer out in a loop")

    append = extend = insert = pop = __add__ = __iadd__ = _refuse_other_length

    @property
    def kind(self) -> str:
        """How its layers are called, as Described has it."""
        return self.described[0].call

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(self.run)(arguments, keywords)
        return self.run(arguments, keywords)

    def extra_repr(self) -> str:
        where = "server" if self._options.server_optimizer else "local"
        return f"on {self._client.addresses[0]} as {self._name}, optimizer={where}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        torch_module: Any = super()
        if not self._options.server_optimizer or self._local:
            return torch_module._apply(fn, recurse)
        for dtype in {tensor.dtype for tensor in self._tensors().values()}:
            if fn(torch.empty(0, dtype=dtype)).dtype != dtype:
                refuse_conversion()
        for module in [module for module in self.modules() if module is not self]:
            remote = {name: p for name, p in module._parameters.items() if isinstance(p, RemoteParameter)}
            module._parameters.update(dict.fromkeys(remote))
            try:
                module._apply(fn, False)  # type: ignore[no-untyped-call]
            finally:
                module._parameters.update(remote)  # wherever it was moved
        return self

    def __deepcopy__(self, memo: Dict[int, Any]) -> RemoteStack:
        """A stack with weights of its own, without gradients and an optimizer's moments."""
        self._fill_memo(memo)
        layers = [(name, _copied(layer, memo)) for name, layer in self._layers()]
        made = RemoteStack(layers, self._client, self._options._replace(name=None), self.ranks)
        made.training = self.training
        memo[id(self)] = made
        return made

    def copy_of_layer(self, index: int, memo: Dict[int, Any]) -> nn.Module:
        """An ordinary layer with the daemon's weights."""
        self._fill_memo(memo)
        return _copied(self._layers()[index][1], memo)

    def _fill_memo(self, memo: Dict[int, Any]) -> None:
        if not self._local:
            self.refresh()
        if self._options.server_optimizer and not self._local:
            weights = self.weights()
            for name, tensor in self._tensors().items():
                memo[id(tensor)] = nn.Parameter(weights[name].to(tensor.dtype, copy=True), tensor.requires_grad)

    def __prepare_scriptable__(self) -> NoReturn:
        raise Unimplemented("torch.jit.script: expected a model without layers on a daemon: script it before "
                            "attnd.torch.offload", field="script")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("pickle: expected the model's state_dict(), as in torch.save(model.state_dict(), path): a stack on "
                        "a daemon cannot be pickled; copy.deepcopy copies it")

    # ---- The module.

    @property
    def module(self) -> Optional[Module]:
        """The daemon's, once there is one."""
        return self._module

    @property
    def is_remote(self) -> bool:
        """Weights are the daemon's."""
        return self._options.server_optimizer and not self._local

    def touch(self) -> None:
        """requires_grad of a parameter has changed."""
        self._is_touched = True

    def weights(self, names: Optional[Sequence[str]] = None) -> Dict[str, Tensor]:
        """The daemon's, by name."""
        with self._lock:
            self.check_states()
            self.flush()
            if self._module is None:
                return {name: tensor for name, tensor in self._weights.items() if names is None or name in names}
            found = self._parts.get(self._module, ["weight"], names, timeout=self._options.timeout)["weight"]
            return {name: torch.from_numpy(array) for name, array in found.items()}

    def gradient(self, name: str) -> Tensor:
        """The daemon's numbers, as others have multiplied them."""
        with self._lock:
            if self._grads[name].is_zero:
                return torch.zeros(self._cached[name].shape)
            return self._numbers([name])[name]

    def check_assign(self, what: str) -> None:
        """Raises where weights cannot be written now."""
        with self._lock:
            self.flush()
            if self._module is not None:
                self._refuse_live(what)

    def assign(self, tensors: Dict[str, Tensor], what: str) -> None:
        """Writes weights."""
        with self._lock:
            self.flush()
            if self._module is None:
                self._weights.update({name: own(tensor) for name, tensor in tensors.items()})
            elif tensors:
                self._refuse_live(what)
                self.run_pending()
                self._parts.put(self._module, {"weight": {name: host(tensor) for name, tensor in tensors.items()}},
                                timeout=self._options.timeout)
                self._norms = None
            self.written.update(tensors.keys())
            self.copies.forget(tensors)

    # ---- Description.

    def _layers(self) -> List[Tuple[str, nn.Module]]:
        return [(name, layer) for name, layer in self._modules.items() if layer is not None]

    def _tensors(self) -> Dict[str, nn.Parameter]:
        """In the layout's order."""
        return self._cached

    def _frozen(self) -> Tuple[str, ...]:
        return tuple(name for name, trains in zip(self._cached, self._trained) if not trains)

    def _refresh(self) -> bool:
        """Looks at the layers where something about them has changed. Whether it has."""
        if self._watch is not None and self._seen == [*self._modules.values()] and not self._watch.changed():
            if not self.is_remote:  # of ordinary parameters nobody tells
                found = tuple(tensor.requires_grad for tensor in self._cached.values())
                self._is_touched = found != self._trained
            if self._is_touched:
                self._is_touched = False
                self._look_at_trained()
                return True
            return False
        layers = self._layers()
        for n, (_, layer) in enumerate(layers):
            self._put_forward(n, layer)
        if len(layers) != len(self):
            raise TypeError("offload: expected the layers that were offloaded; give others to attnd.torch.offload")
        described = describe_apart(layers)
        parts = Parts([f"{name}." for name, _ in layers], described)
        cached = {f"{name}.{inner}": layer.get_parameter(inner) for (name, layer), found in zip(layers, described)
                  for inner in found.names}
        owners = {name: stack_of(tensor) for name, tensor in cached.items()}
        moved = any(at is not None and at[0] is self and at[1] != name for name, at in owners.items())
        if parts.shapes != self._parts.shapes or moved:
            self.rearrange(cached)
        has_taken = self.is_remote and self.take(cached)
        self._parts, self.described, self._cached = parts, described, cached
        refuse_hooks([layer for _, layer in layers])  # also of what came since
        for _, layer in layers:
            add_inner_hooks(self, layer)
        self._names = [[f"{name}.{inner}" for inner in dict.fromkeys(found.names)]
                       for (name, _), found in zip(layers, described)]
        self._seen = [*self._modules.values()]
        self._watch, self._is_touched = Watch([layer for _, layer in layers]), False
        self._look_at_trained()
        for optimizer in list(optimizers) if has_taken else ():
            optimizer.adopt(self)
        return True

    def _look_at_trained(self) -> None:
        self._trained = tuple(tensor.requires_grad for tensor in self._cached.values())
        self._trains = [any(self._cached[name].requires_grad for name in names) for names in self._names]

    def _put_forward(self, index: int, layer: nn.Module) -> None:
        """The stack's, where the layer has not had it."""
        forward = layer.__dict__.get("forward")
        if self._forwards.get(index) is layer:
            return  # with what has been put around it since
        if forward is not None and not isinstance(forward, LayerForward):
            refuse(layer, "it has a forward of its own, put in place of its class's")
        mine = LayerForward(self, index, layer)
        layer.__dict__.update(forward=mine, __deepcopy__=mine.copy_layer)
        self._forwards[index] = layer

    def _register(self, variant: Variant, max_rows: int, memory_rows: int) -> None:
        """A module for such calls, with the state of the one before."""
        options, old = self._options, self._module
        if old is not None:
            self._refuse_other_module()
        layout = layout_of(self._layers(), variant, options.element)
        weights = self._weights
        if old is not None:
            if old.micro_batches:
                raise FailedPrecondition("offload: this call needs another module (more rows, frozen parameters, dropout, "
                                         "no causal mask), and gradients since the last step would be lost: give offload "
                                         "max_rows, change this between step and backward, or begin without a causal mask")
            if options.server_optimizer:
                weights = self.weights()
        moments = self.moments()
        if old is not None:
            self.run_pending()
            old.release(timeout=options.timeout)
            # A registration that fails leaves the state to the next call, as rows of its own may be why.
            self._module, self._needs, self._weights, self._parked, self._held[:] = None, None, weights, moments, []
        kept = 2 * max_rows if options.kept_rows is None else options.kept_rows and max(options.kept_rows, max_rows)
        ttl = _LEASE if options.name is None else _NAMED_LEASE
        wanted = Registration(layout, self._name, self._spec, (), max_rows, kept, options.durability, ttl,
                              memory_rows if layout.memory_width else 0)
        if isinstance(self.ranks, Replicas):
            module: Module = ReplicaModule.make(self._client, self.ranks, wanted, options.timeout, options.replay_mib << 20)
            max_rows, memory_rows = module.registration.max_rows, module.registration.max_memory_rows
        elif self.ranks is not None:
            module = GroupModule.make(self._client, self.ranks, wanted, options.timeout)
            max_rows, memory_rows = module.registration.max_rows, module.registration.max_memory_rows
        else:
            module = Module(self._client, wanted, options.replay_mib, options.timeout,
                            options.snapshot_every if options.server_optimizer else 0)
        if options.server_optimizer:
            self._parts.put(module, {"weight": {name: host(tensor) for name, tensor in weights.items()}}, complete=True,
                            timeout=options.timeout)
        self._sent, self._parked, self._held[:] = {}, moments, [module]
        self._module, self._needs, self._weights = module, (variant, max_rows, memory_rows), {}
        self._put_parked()
        if options.name is None:
            renew(self, module, _LEASE)
            if old is None and self.ranks is None:  # another rank may need it still
                weakref.finalize(self, _release, self._held)

    def _refuse_other_module(self) -> None:
        if self.ranks is not None:
            raise FailedPrecondition("offload: this call needs another module (more rows, another mask, frozen parameters, "
                                     "dropout or optimizer), which a group cannot have one after the other: give offload "
                                     "max_rows for the longest call, and make the optimizer before the first")

    def _ensure(self, call: StackCall, with_gradient: bool) -> Module:
        """The module for the call."""
        rows = max(1, call.x.shape[0] * call.x.shape[1])
        most = self._options.max_rows or rows
        memory_rows = 0 if call.memory is None else call.memory.shape[0] * call.memory.shape[1]
        most_memory = memory_rows
        training = frozenset().union(*(layer.training for layer in self.described))
        drops = True in training
        dropout = "own" if len(training) == 2 else "none" if with_gradient and training == {False} else "all"
        variant = Variant(call.causal, dropout, self._frozen())
        if self._module is not None and self._needs is not None:
            was, most, most_memory = self._needs
            if not with_gradient and not drops:
                variant = variant._replace(dropout=was.dropout)  # the call says itself that there is none
            fits = rows <= most and memory_rows <= most_memory
            if fits and (variant == was and not self._is_new or layout_of(
                    self._layers(), variant, self._options.element).serialize() == self._module.layout.serialize()):
                self._needs, self._is_new = (variant, most, most_memory), False
                return self._module
        self._register(variant, max(rows, most), max(memory_rows, most_memory))
        self._is_new = False
        assert self._module is not None
        return self._module

    # ---- A call.

    def look(self) -> bool:
        """Whether the layers are others than at the last call; they are described anew then."""
        if self._local:
            raise FailedPrecondition("local_weights: expected no call of the layers in this block: they run on the daemon, "
                                     "which gets the weights at its end")
        self.check_states()
        self.copies.let_go()
        refuse_captures()
        refuse_around()
        changed = self._refresh()
        self._is_new |= changed
        return changed

    def refresh(self) -> None:
        """Looks at the layers now, not at their next call."""
        with self._lock:
            self._is_new |= self._refresh()

    def has(self, forward: LayerForward) -> bool:
        """Its layer is one of these."""
        return self._forwards.get(forward.index) is forward.layer

    def begin(self, call: StackCall, with_gradient: bool) -> Tuple[Module, Any]:
        """The module for a call, with present weights; what tells a change of them."""
        self.flush()
        if with_gradient and self._options.kept_rows == 0:
            raise ResourceExhausted("kept_rows: expected above 0 in attnd.torch.offload(..., kept_rows=) where a backward "
                                    "may follow, got 0: call the layers under torch.no_grad()", field="kept_rows")
        if with_gradient:
            self.meet()
        module = self._ensure(call, with_gradient)
        module.check_process()  # before it waits for threads that a fork has not
        if not self._options.server_optimizer:
            self.send_changed(module)
        return module, self.versions()

    def wants_gradients(self) -> bool:
        """Whether the backward that is under way is of parameters too: not that of torch.autograd.grad(y, x)."""
        return bool(torch._C._will_engine_execute_node(self._anchor_node))

    def names_of(self, layers: Tuple[int, int]) -> List[str]:
        """Parameters of layers [first, end)."""
        return [name for names in self._names[slice(*layers)] for name in names]

    def trains(self, layers: Tuple[int, int]) -> bool:
        return any(self._trains[slice(*layers)])

    def drops(self, layers: Tuple[int, int]) -> bool:
        return any(True in one.training for one in self.described[slice(*layers)])

    def watch_over(self, pending: Any) -> None:
        """A call that is not computed yet, and is before weights change."""
        self._pending.add(pending)

    def run_pending(self) -> None:
        waiting, self._pending = list(self._pending), weakref.WeakSet()
        for pending in waiting:
            if pending.part.run is None and (pending.is_kept or pending.output() is not None):
                try:
                    pending.result()
                except FailedPrecondition as error:
                    if error.reason not in ("", "STATE_LOST"):
                        raise
                    pending.error = error  # for whoever looks at it: its input, or its weights, are others by now

    def takes_alike(self, indices: Tuple[int, int], first: Tuple[Any, ...], first_named: Dict[str, Any],
                    arguments: Tuple[Any, ...], named: Dict[str, Any]) -> bool:
        """Whether the second layer means by its arguments what the first one meant by its own."""
        layers = [self.described[index] for index in indices]
        is_alike = layers[0].windows == layers[1].windows and layers[0].causal == layers[1].causal
        turned = named.get("position_embeddings")
        if layers[0].rotary != layers[1].rotary or turned is not first_named.get("position_embeddings"):
            check_rotary(layers[1], input_of(self.kind, arguments, named), named.get("position_ids"), turned)
        if is_alike and all(same(first_named[name], named[name]) for name in named if name not in _IGNORED):
            return True
        if layers[0].call == "tensor":
            return is_alike
        one, other = [adapt(self[index], [layer], *given) for index, layer, given in zip(
            indices, layers, ((first, first_named), (arguments, named)))]
        return (one.causal == other.causal and same(one.mask, other.mask) and one.kv_lengths == other.kv_lengths
                and one.positions == other.positions and same(one.cu_seqlens, other.cu_seqlens)
                and same(one.memory, other.memory) and one.memory_lengths == other.memory_lengths)

    def run(self, arguments: Tuple[Any, ...], keywords: Dict[str, Any], is_now: bool = True) -> Any:
        """All layers."""
        compute_others(self, arguments, keywords)
        with self._lock:
            self.look()
            layers = [layer for _, layer in self._layers()]
            if not any(has_hooks(layer) or not isinstance(layer.forward, LayerForward) for layer in layers):
                return call_layers(self, (0, len(self)), arguments, keywords, is_now=is_now)
        x = layers[0](*arguments, **keywords)
        for layer in layers[1:]:
            x = layer(x[0] if isinstance(x, tuple) else x, *arguments[1:], **keywords)
        return x

    def send_changed(self, module: Module) -> None:
        """With optimizer="local": puts what has changed here."""
        tensors = self._tensors()
        present = {name: digest(tensor) for name, tensor in tensors.items()}
        changed = {name: host(tensors[name]) for name, bits in present.items() if self._sent.get(name) != bits}
        if changed:
            self.run_pending()
            if module.micro_batches:
                module.discard(timeout=self._options.timeout)
            self._parts.put(module, {"weight": changed}, timeout=self._options.timeout)
            self._sent = present

    def gradients(self, module: Module, names: Sequence[str], power: float) -> Dict[str, Tensor]:
        """With optimizer="local": of these parameters, since the backward that has just been, whose dy was multiplied by
        power; the server's are cleared."""
        tensors, trained = self._tensors(), self.in_module()
        found = self._parts.get(module, ["gradient"], [name for name in names if name in trained],
                                timeout=self._options.timeout)["gradient"]
        module.discard(timeout=self._options.timeout)
        return {name: send(torch.from_numpy(array) / power if power != 1 else torch.from_numpy(array),
                           tensors[name].device).to(tensors[name].dtype) for name, array in found.items()}


def _copied(layer: nn.Module, memo: Dict[int, Any]) -> nn.Module:
    """Without what makes it one of a stack."""
    held = {name: layer.__dict__.pop(name) for name in ("forward", "__deepcopy__")}
    try:
        made = copy.deepcopy(layer, memo)
    finally:
        layer.__dict__.update(held)
    drop_inner_hooks(made)
    return made


def _release(held: List[Module]) -> None:
    """Releases the modules of a stack that is gone."""
    try:
        held.pop().release(timeout=1.0)
    except (AttndError, OSError, IndexError):
        pass  # it ends by its time
