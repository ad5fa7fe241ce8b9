"""LayerCall: a call of a stack's layers as autograd has it; Run: one call of the daemon and its backward, which does several
such calls, one layer's output into the next, at once."""
from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .._transfer import largest, raised
from ..errors import FailedPrecondition, Unimplemented
from .calls import StackCall
from .deferred import Deferred
from .module import Module
from .numbers import bits_of, tensor_of

__all__ = ["LayerCall", "Part", "Run", "make_anchor", "uncompiled"]

_autograd: Any = torch._C._autograd
_keeps_graph: Any = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)  # of the backward under way

RemoteStack = Any  # stack.RemoteStack
Pending = Any  # chain.Pending
Turn = Any  # micro_batches.Turn


def uncompiled(function: Any) -> Any:
    """As it is, in a function that torch.compile traces: a call of a daemon is nothing to compile."""
    import torch._dynamo
    disable: Any = torch._dynamo.disable
    return disable(function)


@torch.inference_mode(False)  # whatever the layers are offloaded under
@torch.enable_grad()
def make_anchor() -> Tuple[Tensor, Any]:
    """A tensor that stands for a stack's parameters in autograd's graph, and its node there."""
    anchor = torch.zeros(0, device="cpu", requires_grad=True)
    node: Any = anchor.view_as(anchor).grad_fn
    return anchor, node.next_functions[0][0]


class Run:
    """Layers [first, end) on the daemon."""

    def __init__(self, stack: RemoteStack, module: Module, versions: Any, call: StackCall, layers: Tuple[int, int]) -> None:
        self.stack, self.module, self.versions, self.call, self.layers = stack, module, versions, call, layers
        self.wants_dx = False  # or the memory's gradient
        self.activations: Any = None
        self.x_type, self.device, self.memory_like = torch.float32, torch.device("cpu"), call.memory
        # These belong to the backward that is under way.
        self.dx: Optional[Tensor] = None
        self.d_memory: Optional[Tensor] = None
        self.gradients: Dict[str, Tensor] = {}

    def forward(self, x: Tensor, keep: bool, drops: bool, seed: int) -> Tensor:
        call, module = self.call, self.module
        self.x_type, self.device = x.dtype, x.device
        nothing = torch.empty(0)
        if call.memory is not None:
            self.memory_like = nothing.to(call.memory.device, call.memory.dtype)
        self.call = call._replace(x=nothing, memory=None)  # for the backward
        if x.numel() == 0:
            return torch.empty_like(x)
        element, rows = module.layout.element, call.enter(x)
        given: Dict[str, Any] = dict(kv_lengths=call.kv_lengths, positions=call.positions, seed=seed,
                                     mask=None if call.mask is None else call.mask.cpu().numpy(),
                                     sequences_before=call.before, timeout=self.stack._options.timeout)
        if self.layers != (0, len(self.stack)):
            given["layers"] = self.layers
        if call.cu_seqlens is not None:
            given["cu_seqlens"] = call.cu_seqlens.tolist()
        if call.memory is not None:
            given.update(memory=bits_of(call.memory, element), memory_lengths=call.memory_lengths)
        bits = bits_of(rows[0] if call.cu_seqlens is not None else rows, element)
        if keep:
            y, self.activations = module.forward(bits, keep=True, makes_room=True, **given)
            self.activations.weights = None  # check_backward looks at those of these layers
        else:
            y = module.forward(bits, training=drops, makes_room=True, **given)
        return call.leave(tensor_of(y, element, x.dtype, x.device).reshape(rows.shape))

    def check_backward(self, dy: Tensor) -> bool:
        """Whether the backward that is under way is of parameters too."""
        stack = self.stack
        stack.device = dy.device
        stack.meet()
        if self.module is not stack.module:
            raise FailedPrecondition("backward: expected the module of its forward, got one that was registered since: a "
                                     "call between them needed more rows, or no causal mask: give offload max_rows for the "
                                     "longest call, make the first call without a causal mask, or call backward before")
        local = not stack._options.server_optimizer
        trained = not stack.in_module().isdisjoint(stack.names_of(self.layers)) and (local or stack.wants_gradients())
        if not local and trained:
            stack.before_backward(stack.names_of(self.layers))
        now = stack.versions()
        if any(self.versions.get(name) != now.get(name) for name in stack.names_of(self.layers)):
            raise RuntimeError("one of the parameters needed for gradient computation has been modified by an inplace "
                               "operation since this stack's forward")
        return trained

    def backward(self, dy: Tensor) -> None:
        stack, local = self.stack, not self.stack._options.server_optimizer
        names, trained = stack.names_of(self.layers), self.check_backward(dy)
        if self.activations is None:
            if not local and trained:
                stack.after_backward(names, is_empty=True)
            elif local:
                tensors = stack._tensors()
                self.gradients = {name: torch.zeros_like(tensors[name]) for name in names if tensors[name].requires_grad}
            self.dx = torch.empty_like(dy)
            return
        power = self.send_backward(dy, trained)
        if not local and trained:
            stack.after_backward(names, is_empty=False)
        if local and trained:
            self.gradients = stack.gradients(self.module, names, power)

    def send_backward(self, dy: Tensor, trained: bool, turn: Optional[Turn] = None) -> float:
        """Makes dx and d_memory. Gives what dy was multiplied by."""
        stack, module, call, element, power = self.stack, self.module, self.call, self.module.layout.element, 1.0
        if element == "f16":
            adds = trained and stack._options.server_optimizer
            most = largest(dy)
            power = stack.choose_power(most, adds) if turn is None else turn.choose_power(stack, most)
            dy = raised(dy, power)
        rows = call.enter(dy)
        dx = module.backward(bits_of(rows[0] if call.cu_seqlens is not None else rows, element), self.activations,
                             want_dx=self.wants_dx, weight_gradients=trained, turn=0 if turn is None else turn.number,
                             timeout=stack._options.timeout)
        if self.memory_like is not None and dx is not None:
            dx, made = dx
            self.d_memory = _lowered(made, element, power, self.memory_like.dtype, self.memory_like.device)
        if dx is not None:
            self.dx = call.leave(_lowered(dx, element, power, self.x_type, self.device).reshape(rows.shape))
        return power


def _lowered(array: Any, element: str, power: float, to: torch.dtype, device: torch.device) -> Tensor:
    if power == 1:
        return tensor_of(array, element, to, device)
    wide = to if to == torch.float16 else torch.float32
    return tensor_of(array, element, wide, device).div_(power).to(to)


class Part:
    """Backward knows this of a call of layers [first, end): the run that it is a part of, where it has been computed.

    Gradients of what passes between two parts of one run stay on the daemon: the last part has all of them computed, the
    first one gives the run's.
    """

    __slots__ = ("stack", "layers", "pending", "run", "begins", "ends", "needs_grad", "wants_dx", "is_freed")

    def __init__(self, stack: RemoteStack, layers: Tuple[int, int]) -> None:
        self.stack, self.layers = stack, layers
        self.pending: Any = lambda: None  # weak reference
        self.run: Optional[Run] = None
        self.begins = self.ends = self.needs_grad = self.wants_dx = False
        self.is_freed = False  # a backward without retain_graph has been

    def nothing(self) -> Tuple[Any, ...]:
        """No gradient came: none of the layers gets one, not even 0."""
        local = not self.stack._options.server_optimizer
        return (None,) * (4 + (len(self.stack.names_of(self.layers)) if local else 0))

    def backward(self, dy: Tensor) -> Tuple[Any, ...]:
        if self.run is None:
            self.pending().result()
        run = self.run
        assert run is not None
        d_memory: Optional[Tensor] = None
        if self.ends:
            run.backward(dy)
            d_memory, run.d_memory = run.d_memory, None
        if self.begins:
            dx, run.dx = run.dx, None
        else:
            dx = torch.zeros((), dtype=dy.dtype, device=dy.device).expand(dy.shape)  # nobody reads it
        if self.stack._options.server_optimizer:
            return None, None, dx, d_memory
        gradients: List[Optional[Tensor]] = [run.gradients.get(name) for name in self.stack.names_of(self.layers)]
        if self.begins:
            run.gradients = {}
        return None, None, dx, d_memory, *gradients


class LayerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, anchor: Optional[Tensor], x: Tensor, memory: Optional[Tensor],
                *tensors: Tensor) -> Tensor:
        part = ctx.part = pending.part
        ctx.set_materialize_grads(part.stack.ranks is not None)  # whose ranks do as many backwards each
        part.needs_grad = pending.chain.grad_enabled and any(ctx.needs_input_grad)
        part.wants_dx = any(ctx.needs_input_grad[2:4])
        if pending.is_now:
            now: Tensor = pending.result()
            return now
        made = Deferred.of(pending, x.shape, x.dtype, x.device)
        pending.output = weakref.ref(made)
        return made

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return (uncompiled(_backward) if torch.compiler.is_dynamo_compiling() else _backward)(ctx.part, *outer)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise Unimplemented("forward_ad: expected no dual tensors: layers on a daemon have derivatives by backward() alone",
                            field="forward_ad")


def _backward(part: Part, dy: Optional[Tensor]) -> Tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise Unimplemented("create_graph: expected False: layers on a daemon have no second derivatives (nor have "
                            "autograd's hessian, hvp, jvp); leave it out, or keep these layers here", field="create_graph")
    if dy is not None and torch._C._dispatch_keys(dy).has("Batched"):
        raise Unimplemented("backward: expected one gradient of the output at a time, got several at once "
                            "(is_grads_batched=True, vectorize=True): call it in a loop", field="transform")
    if part.is_freed:
        raise RuntimeError("Trying to backward through the graph a second time: expected retain_graph=True in the first "
                           "backward through these layers, which ended their graph")
    with part.stack._lock:
        made = part.nothing() if dy is None else part.backward(dy)
    part.is_freed = not _keeps_graph()
    return made
