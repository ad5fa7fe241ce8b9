"""Calls of the layers of a stack, one by one, as loops over them make them.

A layer's output is a Deferred. A call of the next layer with it extends the chain; what anybody else looks at, or keeps
beside the chain, is computed: consecutive layers whose outputs are gone by then are one call of the daemon, and what a loop
over all layers leaves is one call of the whole module. A layer is a function of its input, weights and seed,
so that nothing depends on where a chain is cut.
"""
from __future__ import annotations

import inspect
import types
import weakref
from typing import Any, Dict, List, NoReturn, Optional, Set, Tuple, Union

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import FailedPrecondition, Unimplemented, wrong, wrong_type
from .calls import StackCall, adapt
from .deferred import Deferred, Lazy
from .micro_batches import CutRun, Flow, whole
from .module import Module
from .remote_call import LayerCall, Part, Run, uncompiled

__all__ = ["LayerForward", "advance", "call_layers", "compute_others", "input_of", "same"]

RemoteStack = Any  # stack.RemoteStack

_X = {"tensor": "input", "encoder": "src", "decoder": "tgt", "attention": "query"}  # a model's: hidden_states


_handed_on: Dict[int, int] = {}  # seeds that calls had from one before, by the generator's state before the call
_MOST_HANDED_ON = 1 << 14


class Seed:
    """Dropout's, of layers that follow each other: each is dropped at its own sites.

    Each call takes a number of PyTorch's generator. Who sets it back to what it was before a call, as checkpointing does,
    has the dropout of that call again, also where its seed was that of a layer before it.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Optional[int] = None

    def draw(self) -> None:
        """Once a call."""
        state = hash(torch.get_rng_state().numpy().tobytes())
        number = int(torch.randint(2 ** 62, (1,), device="cpu"))
        if self.value is None:
            self.value = _handed_on.get(state, number)
            return
        if len(_handed_on) >= _MOST_HANDED_ON:
            _handed_on.pop(next(iter(_handed_on)), None)
        _handed_on[state] = self.value


class Chain:
    """Calls that extend each other share one chain."""

    def __init__(self, stack: RemoteStack, first: int, module: Module, versions: Any, call: StackCall,
                 arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> None:
        self.stack, self.first, self.module, self.versions, self.call = stack, first, module, versions, call
        self.arguments, self.keywords = arguments, keywords
        self.grad_enabled = torch.is_grad_enabled()
        self.read = _versions(arguments, keywords)
        memory = _kept(call.memory)
        self.memory = memory if memory is None or isinstance(memory, Lazy) else memory.detach()


class Pending:
    """A call of layers [first, end), as forward knows it. Its output has it, and so have calls that extend it until they are
    done."""

    __slots__ = ("part", "chain", "seed", "drops", "before", "following", "x", "value", "is_now", "is_kept", "is_used",
                 "node", "output", "error", "__weakref__")

    def __init__(self, chain: Chain, layers: Tuple[int, int], seed: Seed, drops: bool, before: Optional[Pending],
                 x: Optional[Tensor], is_now: bool = False) -> None:
        self.part = Part(chain.stack, layers)
        self.part.pending = weakref.ref(self)
        self.chain: Any = chain  # until it is done
        self.seed, self.drops = seed, drops
        self.before, self.x = before, x  # the call that it extends, or what it reads
        self.following: Any = lambda: None  # weak reference to the one that extends it
        if before is not None:
            before.following = weakref.ref(self)
        self.value: Union[None, Flow, Tensor] = None
        self.is_now = is_now
        self.is_kept = False  # is wanted, or will be
        self.is_used = False  # by another layer
        self.node: Optional[int] = None  # its own in autograd's graph
        self.output: Any = lambda: None  # weak reference to the Deferred
        self.error: Optional[FailedPrecondition] = None  # what it was called with is lost

    def result(self) -> Tensor:
        if not isinstance(self.value, Tensor):
            self.value = whole(self.compute())
        return self.value

    def before_write(self) -> None:
        """The output may be written in place from now on: the call that reads it as it is now is computed before."""
        following = self.following()
        if following is not None and following.part.run is None:
            following.result()

    def compute(self) -> Union[Flow, Tensor]:
        """Runs it and all that it extends, and what they read before: a thousand calls back are no recursion."""
        found = self.value
        if found is not None:
            return found  # without its stack's lock, for which a thread that has another's might wait for ever
        for one in _inputs(self):
            one._compute()
        return self._compute()

    def _compute(self) -> Union[Flow, Tensor]:
        with self.part.stack._lock, torch.inference_mode(False), torch.no_grad():
            if self.value is not None:
                return self.value
            waiting = [self]
            while waiting[-1].before is not None and waiting[-1].before.part.run is None:
                waiting.append(waiting[-1].before)
            self.error = next((one.error for one in waiting if one.error is not None), None)
            if self.error is not None:
                raise self.error
            waiting.reverse()
            together: List[Pending] = []
            for one, following in zip(waiting, [*waiting[1:], self]):
                together.append(one)
                is_cut = one.is_kept or one.output() is not None or (one.part.needs_grad and not following.part.needs_grad)
                if one is self or is_cut:
                    one.value = _run(together)
                    together = []
            made = self.value
            assert made is not None
            if self.output() is None and not self.is_kept:
                self.value = None  # it is who asked that has it
            return made


def _inputs(pending: Pending) -> List[Pending]:
    """Calls that have not been computed, whose outputs it needs: each behind those that it needs itself."""
    order: List[Pending] = []
    seen: Set[int] = set()
    waiting = [(pending, False)]
    while waiting:
        one, is_ready = waiting.pop()
        if is_ready:
            order.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            waiting.append((one, True))
            first, before = one, one.before
            while before is not None and before.part.run is None:
                first, before = before, before.before
            chain = first.chain
            waiting += [(read._pending, False) for read in (first.x, None if chain is None else chain.memory)
                        if isinstance(read, Deferred) and read._pending.value is None]
    return order[:-1]


def compute_others(stack: RemoteStack, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> None:
    """Has what other stacks' layers give to a call computed before the call has its own stack's lock: none is taken under
    another, since threads may call the stacks in any order."""
    for value in [*arguments, *keywords.values()]:
        if isinstance(value, Deferred) and value._pending.part.stack is not stack:
            value._pending.compute()


def _run(calls: List[Pending]) -> Union[Flow, Tensor]:
    first, last = calls[0], calls[-1]
    chain, stack = first.chain, first.chain.stack
    given = None if first.before is None else first.before.output()
    if _versions(chain.arguments, chain.keywords) != chain.read or _versions((given,), {}) not in ((), (0,)):
        raise FailedPrecondition("layers: expected inputs as they were in the call, got one that was changed in place "
                                 "before its output was looked at; change a copy of it")
    x: Any = first.x if first.before is None else first.before.value
    call = chain.call._replace(memory=chain.memory)
    is_cut = len(call.split(stack._options.micro_batches)) > 1
    run = (CutRun if is_cut else Run)(stack, chain.module, chain.versions, call,
                                      (first.part.layers[0], last.part.layers[1]))
    drops = any(one.drops for one in calls)
    given = x._pending.compute() if isinstance(x, Deferred) else x
    if not is_cut or isinstance(given, Tensor):
        given = whole(given).detach()
    y = run.forward(given, last.part.needs_grad, drops, (first.seed.value or 0) if drops else 0)
    begins = next((one.part for one in calls if one.part.needs_grad), last.part)
    begins.begins = last.part.ends = True
    run.wants_dx = begins.wants_dx and (begins is first.part or chain.call.memory is not None)
    for one in calls:
        one.part.run = run
        one.before = one.x = one.chain = None
    return y


class LayerForward:
    """The forward of an offloaded layer, in place of its class's."""

    def __init__(self, stack: RemoteStack, index: int, layer: nn.Module) -> None:
        self._stack, self._index, self._class, self._layer = stack, index, type(layer), weakref.ref(layer)

    @property
    def index(self) -> int:
        return self._index

    @property
    def layer(self) -> Optional[nn.Module]:
        return self._layer()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self._class.forward, self))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(advance)(self, self._stack, arguments, keywords, True)
        return advance(self, self._stack, arguments, keywords)

    def copy_layer(self, memo: Dict[int, Any]) -> nn.Module:
        made: nn.Module = self._stack.copy_of_layer(self._index, memo)
        return made

    def __deepcopy__(self, memo: Dict[int, Any]) -> NoReturn:
        raise TypeError("copy.deepcopy: expected the stack, or a layer of it")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._stack.__reduce_ex__(protocol)


def _versions(arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(value._version for value in [*arguments, *keywords.values()]
                     if isinstance(value, Tensor) and not value.is_inference() and not value.is_nested)


def same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Deferred) or isinstance(other, Deferred):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
                and bool(torch.equal(one, other)))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


def input_of(kind: str, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
    return arguments[0] if arguments else keywords.get(_X.get(kind, "hidden_states"))


def _check_input(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise wrong_type(name, "a tensor", x)
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise wrong(name, "numbers of float32, float16 or bfloat16", x.dtype)
    if x.is_meta or isinstance(x, FakeTensor):
        raise wrong(name, "a tensor with numbers", "one of the meta device or of a FakeTensorMode")


def _check_beside(kind: str, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> None:
    """A layer gives gradients of its input and its memory alone."""
    x, memory = input_of(kind, arguments, keywords), None
    if kind == "decoder":
        memory = keywords.get("memory", arguments[1] if len(arguments) > 1 else None)
    named = [*((f"argument {n}", value) for n, value in enumerate(arguments)), *keywords.items()]
    for name, value in named if torch.is_grad_enabled() else ():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor) and one is not x and one is not memory and one.requires_grad:
                raise Unimplemented(f"{name}: expected a tensor that wants no gradient, since layers on a daemon give those "
                                    "of their input and memory alone, got one that requires it: give its detach(), or send "
                                    "attention alone (attnd.torch.replace())", field=name)


def _is_as_given(x: Deferred) -> bool:
    """Nobody has written it, or put it elsewhere in autograd's graph."""
    with torch._C.DisableTorchFunctionSubclass():
        node = None if x.grad_fn is None else id(x.grad_fn)
        return (node == x._pending.node and x.requires_grad == x._pending.part.needs_grad
                and (x.is_inference() or x._version == 0))


def _extends(stack: RemoteStack, index: int, x: Any, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> bool:
    if not isinstance(x, Deferred):
        return False
    before = x._pending
    if before.part.stack is not stack or before.part.run is not None or before.is_used or not _is_as_given(x):
        return False
    chain = before.chain
    if before.part.layers[1] != index or chain.grad_enabled != torch.is_grad_enabled():
        return False
    if not stack._options.server_optimizer and chain.versions != stack.versions():
        return False  # weights here have changed since it began; those on a daemon change once it is computed
    first = input_of(stack.kind, chain.arguments, chain.keywords)
    own, is_self = _X.get(stack.kind, "hidden_states"), stack.kind == "attention"  # whose key and value are x too
    given = tuple(first if value is x and (is_self or n == 0) else value for n, value in enumerate(arguments))
    named = {name: first if value is x and (is_self or name == own) else value for name, value in keywords.items()}
    keys = [*arguments[1:3], *(keywords[name] for name in ("key", "value") if name in keywords)]
    if is_self and any(value is not x for value in keys):
        return False  # attention to what the layer before has read
    if len(given) != len(chain.arguments) or set(named) != set(chain.keywords):
        return False
    return (all(map(same, given, chain.arguments))
            and bool(stack.takes_alike((chain.first, index), chain.arguments, chain.keywords, given, named)))


def advance(forward: LayerForward, stack: RemoteStack, arguments: Tuple[Any, ...], keywords: Dict[str, Any],
            is_now: bool = False) -> Any:
    """A call of one layer."""
    compute_others(stack, arguments, keywords)
    with stack._lock:
        changed, index = stack.look(), forward.index
        if not stack.has(forward):
            raise FailedPrecondition("layer: expected a layer of an offloaded stack, got one that another has replaced "
                                     "there: call the stack's own")
        x = input_of(stack.kind, arguments, keywords)
        before: Optional[Pending] = x._pending if isinstance(x, Deferred) and x._pending.part.stack is stack else None
        follows = before is not None and before.part.layers[1] <= index and not before.is_used
        seed = before.seed if before is not None and follows else Seed()
        extends = not changed and not is_now and _extends(stack, index, x, arguments, keywords)
        if before is not None:
            before.is_kept |= before.is_used
            before.is_used = True
        if extends:
            assert before is not None
            _check_beside(stack.kind, arguments, keywords)
            return _call(stack, Pending(before.chain, (index, index + 1), seed, stack.drops((index, index + 1)), before,
                                        None), x)
        return call_layers(stack, (index, index + 1), arguments, keywords, seed, is_now)


def call_layers(stack: RemoteStack, layers: Tuple[int, int], arguments: Tuple[Any, ...], keywords: Dict[str, Any],
                seed: Optional[Seed] = None, is_now: bool = True) -> Any:
    """A call that extends no other."""
    _check_input("x", input_of(stack.kind, arguments, keywords))
    _check_beside(stack.kind, arguments, keywords)
    call = adapt(stack[layers[0]], stack.described[layers[0]:layers[1]], arguments, keywords)
    call = call.among(stack._causal, stack._needs[0].causal if stack._needs else call.causal)
    x = call.x if call.is_nested else input_of(stack.kind, arguments, keywords)
    if call.memory is not None:
        _check_input("memory", call.memory)
    if x.shape[-1] != stack.described[0].width:
        raise wrong("x", f"{stack.described[0].width} columns", x.shape[-1])
    wants = torch.is_grad_enabled() and (x.requires_grad or stack.trains((0, len(stack)))
                                         or (call.memory is not None and call.memory.requires_grad))
    module, versions = stack.begin(call, wants)
    is_now = is_now or call.is_nested
    kept = x
    if not is_now:
        arguments, keywords = tuple(map(_kept, arguments)), {name: _kept(value) for name, value in keywords.items()}
        kept = input_of(stack.kind, arguments, keywords)
        kept = kept if isinstance(kept, Deferred) else kept.detach()  # whatever x.data is set to
    chain = Chain(stack, layers[0], module, versions, call, arguments, keywords)
    return _call(stack, Pending(chain, layers, seed or Seed(), stack.drops(layers), None, kept, is_now), x)


def _kept(value: Any) -> Any:
    """The value, or a copy of a tensor that can be written without a trace before the call is computed: NumPy's memory,
    another process's, a tensor of inference_mode. Others tell by their versions."""
    if not isinstance(value, Tensor) or isinstance(value, Lazy) or value.is_nested:
        return value
    if value.untyped_storage().resizable() and not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.detach().clone()


def _call(stack: RemoteStack, pending: Pending, x: Tensor) -> Any:
    layers, call = pending.part.layers, pending.chain.call
    if pending.drops:
        pending.seed.draw()
    tensors = [] if stack._options.server_optimizer else [stack._tensors()[name] for name in stack.names_of(layers)]
    apply: Any = LayerCall.apply
    y = apply(pending, stack._anchor if stack.trains(layers) else None, x, call.memory, *tensors)
    if isinstance(y, Deferred):
        with torch._C.DisableTorchFunctionSubclass():
            pending.node = None if y.grad_fn is None else id(y.grad_fn)
            pending.part.needs_grad = y.requires_grad
        stack.watch_over(pending)
    return call.give(y)
