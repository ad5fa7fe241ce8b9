"""RemoteStack: a ModuleList or Sequential whose layers run on a daemon as one module, under autograd.

The layers stay in it as they were, for their names, options and train(); with optimizer="server" their parameters are
meta tensors, and state_dict() and load_state_dict() read and write the daemon's. The module is registered with the first
forward, when its rows and the optimizer are known, and again, state and all, where a later call needs another one.
"""
from __future__ import annotations

import math
import uuid
import weakref
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union, cast

import torch
from torch import Tensor, nn

from .._arrays import Tensor as Bits
from .._transfer import Transfer, send
from ..client import Client
from ..errors import AttndError, FailedPrecondition, Unimplemented, wrong
from .calls import StackCall, adapt
from .describe import describe
from .layers import Described, Variant, refuse
from .layout import Layout
from .module import AdamW, GroupRates, Module, Registration, SGD, StepResult
from .parts import Parts

__all__ = ["RemoteStack", "layout_of", "stack_of"]

_SHADOW = 2.0 ** -30  # a second number of a gradient's norm, too small to count, tells other changes from factors

_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class StackOptions(NamedTuple):
    """Of attnd.torch.offload."""

    server_optimizer: bool
    single: bool  # one layer, which state_dict() knows without a number
    name: Optional[str]
    element: str
    max_rows: Optional[int]
    kept_rows: Optional[int]
    durability: str
    replay_mib: int
    timeout: Optional[float]


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


def layout_of(layers: Sequence[Tuple[Any, nn.Module]], variant: Variant, element: str = "f32") -> Layout:
    """Named layers, first to last, as one layout. Raises TypeError for what cannot be one."""
    described = describe_all(layers, variant)
    layout = Layout(described[0].width, element, described[0].memory_width)
    for (name, _), layer in zip(layers, described):
        frozen = [n for n, inner in enumerate(layer.names) if f"{name}.{inner}" in variant.frozen]
        layout.layer(layer.block, f"{name}.", frozen=frozen, attention_scale=layer.attention_scale)
    return layout


class RemoteParameter(nn.Parameter):
    """A meta tensor for a parameter that a server's optimizer changes.

    One of a stack's has a gradient, whose norm is that of all of the stack's (infinity: not finite). So clip_grad_norm_ and
    a GradScaler see what is there, and the step applies what they have multiplied it by. None set to it clears them.
    """

    owner: Optional[Tuple[Any, str]] = None

    @property
    def grad(self) -> Optional[Tensor]:
        found = stack_of(self)
        return None if found is None else found[0].gradient_of(found[1])

    @grad.setter
    def grad(self, value: Optional[Tensor]) -> None:
        if value is not None:
            raise wrong("grad", "None, since gradients of this parameter are the daemon's", type(value).__name__)
        found = stack_of(self)
        if found is not None:
            found[0].discard()


def stack_of(parameter: Any) -> Optional[Tuple[RemoteStack, str]]:
    """The stack, and the name in it, of a parameter that a server's optimizer changes."""
    if not isinstance(parameter, RemoteParameter) or parameter.owner is None:
        return None
    stack: Optional[RemoteStack] = parameter.owner[0]()
    return None if stack is None else (stack, parameter.owner[1])


class _Runner(nn.Module):
    """The one layer that a loop over the stack finds. Always in train(), so that no fast path of PyTorch goes round it."""

    def __init__(self, stack: RemoteStack) -> None:
        super().__init__()
        object.__setattr__(self, "_stack", stack)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._stack.run(arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name == "_stack":
            raise AttributeError(name)
        return getattr(self._stack.first, name)


class RemoteStack(nn.Module):
    """Made by attnd.torch.offload."""

    def __init__(self, layers: Sequence[Tuple[str, nn.Module]], client: Client, options: StackOptions) -> None:
        super().__init__()
        described = self._describe(layers, Variant())  # refuses before anything changes
        self._parts = Parts([f"{name}." for name, _ in layers], described)
        for name, layer in layers:
            self.add_module(name, layer)
        self.training = layers[0][1].training
        self._client, self._options = client, options
        self._name = options.name or f"stack-{uuid.uuid4().hex}"
        self._optimizer: Union[None, AdamW, SGD] = None
        self._groups: Tuple[int, ...] = ()
        self._module: Optional[Module] = None
        self._held: List[Module] = []  # the same, for what is left when the stack goes
        self._needs: Optional[Tuple[Variant, int, int]] = None  # what the module was registered for
        self._described: List[Described] = []
        self._weights: Dict[str, Tensor] = {}  # with optimizer="server", until there is a module
        self._sent: Dict[str, Tuple[int, int]] = {}  # with "local", versions of what the server has
        self.device = torch.device("cpu")  # of the last backward
        self.peers: Sequence[RemoteStack] = (self,)  # of one optimizer
        self.hides = False  # its gradients
        self._stepped: FrozenSet[str] = frozenset()  # parameters that the optimizer has
        self._speaker = ""  # the parameter that has their norm
        self._norm = 0.0
        self._number: Optional[Tensor] = None  # the norm as others have scaled it; None: nobody has looked
        object.__setattr__(self, "_runner", _Runner(self))
        object.__setattr__(self, "_anchor", torch.zeros(0, requires_grad=True))
        if options.server_optimizer:
            self._take_parameters()
        torch_module: Any = self
        torch_module._register_state_dict_hook(_fill_state_dict)
        torch_module._register_load_state_dict_pre_hook(_take_state_dict, with_module=True)

    # ---- As the ModuleList or Sequential was.

    @property
    def first(self) -> nn.Module:
        return next(iter(self._modules.values()))  # type: ignore[return-value]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([cast(nn.Module, self._runner)])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            if range(len(self._modules))[index] != range(len(self._modules)):
                raise Unimplemented("slice: expected the whole stack, which is one call", field="slice")
            return [self._runner]
        if index not in (0, -1):
            raise IndexError(f"a remote stack is one layer, and has no layer {index}")
        return self._runner

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.run(arguments, keywords)

    def extra_repr(self) -> str:
        where = "server" if self._options.server_optimizer else "local"
        return f"on {self._client.addresses[0]} as {self._name}, optimizer={where}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        torch_module: Any = super()
        return self if self._options.server_optimizer else torch_module._apply(fn, recurse)

    # ---- The module.

    @property
    def module(self) -> Optional[Module]:
        """The daemon's, once there is one."""
        return self._module

    def set_optimizer(self, optimizer: Union[AdamW, SGD], groups: Dict[str, int], other: int,
                      peers: Sequence[RemoteStack]) -> None:
        """For its next registration. groups: by parameter; the rest belongs to `other`. peers: stacks of this optimizer."""
        self.peers, self._stepped = peers, frozenset(groups)
        self._choose_speaker()
        self._optimizer, old = optimizer, (self._optimizer, self._groups)
        self._groups = tuple(groups.get(name, other) for name in self._parts.names)
        if (self._optimizer, self._groups) != old and self._module is not None and self._needs is not None:
            self._register(*self._needs)

    def step(self, rates: Sequence[GroupRates], multiplier: float) -> Optional[StepResult]:
        """None where there is nothing to step with."""
        if self._module is None or self._module.micro_batches == 0:
            return None
        self._number = None
        rates = rates[:max(self._groups, default=0) + 1]
        return self._module.step(rates=rates, multiplier=multiplier, timeout=self._options.timeout)

    def discard(self) -> None:
        """Forgets the gradients of backwards since the last step."""
        self._number = None
        if self._module is not None and self._module.micro_batches:
            self._module.discard(timeout=self._options.timeout)

    def gradient_of(self, name: str) -> Optional[Tensor]:
        """RemoteParameter.grad."""
        if self.hides or name != self._speaker or self._module is None or self._module.micro_batches == 0:
            return None
        if self._number is None:
            squared, finite = self._module.gradient_stats(timeout=self._options.timeout)
            number = (math.sqrt(squared) if finite else math.inf) * torch.tensor([1.0, _SHADOW])
            # Beside a scaler's numbers: those that it copies from a GPU to the host it reads before they are there.
            device = next((peer.device for peer in self.peers if peer.device.type != "cpu"), self.device)
            self._norm, self._number = float(number[0]), number.to(device)
        return self._number

    def _choose_speaker(self) -> None:
        trained = [name for name, tensor in self._tensors().items() if tensor.requires_grad]
        self._speaker = next((name for name in trained if name in self._stepped), trained[0] if trained else "")

    def factor(self) -> float:
        """What the gradients were multiplied by, here; the next step's multiplier is to have it."""
        if self._number is None or not 0 < self._norm < math.inf:
            return 1.0
        number, shadow = map(float, self._number.tolist())
        if not abs(number * _SHADOW - shadow) <= 1e-5 * abs(shadow):
            raise FailedPrecondition("grad: expected gradients on a daemon to be multiplied alone, as clip_grad_norm_ and a "
                                     "GradScaler do, got another change of them")
        return number / self._norm

    def look_again(self) -> None:
        """Before a backward adds to them."""
        factor = self.factor()
        if factor == 0:
            self.discard()  # zero_grad(set_to_none=False)
        elif factor != 1:
            raise FailedPrecondition("backward: expected a step or zero_grad since gradients were clipped or unscaled")
        self._number = None

    def state(self, kinds: Sequence[str]) -> Tuple[Dict[str, Dict[str, Tensor]], int]:
        """Tensors by kind and name, all of one state, and how often the optimizer has stepped."""
        if self._module is None:
            return {kind: dict(self._weights) if kind == "weight" else {} for kind in kinds}, 0
        found = self._parts.get(self._module, kinds, timeout=self._options.timeout)
        step = int(self._module.status(timeout=self._options.timeout)["optimizer_step"])
        return {kind: {name: torch.from_numpy(array) for name, array in tensors.items()}
                for kind, tensors in found.items()}, step

    def put_moments(self, moments: Dict[str, Dict[str, Tensor]], step: int) -> None:
        if self._module is None:
            most = self._options.max_rows or 4096
            self._register(Variant(frozen=self._frozen()), most, most)
        assert self._module is not None
        self._parts.put(self._module, {kind: {name: _host(tensor) for name, tensor in tensors.items()}
                                       for kind, tensors in moments.items()}, optimizer_step=step,
                        timeout=self._options.timeout)

    def _describe(self, layers: Sequence[Tuple[str, nn.Module]], variant: Variant) -> List[Described]:
        described = describe_all(layers, variant)
        seen: Dict[int, str] = {}
        for name, layer in layers:
            for inner, tensor in layer.named_parameters():
                if id(tensor) in seen:
                    refuse(layer, f"{name}.{inner} is {seen[id(tensor)]} too, and layers share nothing here")
                seen[id(tensor)] = f"{name}.{inner}"
        return described

    def _layers(self) -> List[Tuple[str, nn.Module]]:
        return [(name, layer) for name, layer in self._modules.items() if layer is not None]

    def _tensors(self) -> Dict[str, nn.Parameter]:
        """In the layout's order."""
        described = self._described or describe_all(self._layers(), Variant())
        return {f"{name}.{inner}": layer.get_parameter(inner) for (name, layer), found in zip(self._layers(), described)
                for inner in found.names}

    def _frozen(self) -> Tuple[str, ...]:
        return tuple(name for name, tensor in self._tensors().items() if not tensor.requires_grad)

    def _take_parameters(self) -> None:
        for name, tensor in self._tensors().items():
            self._weights[name] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            owner, _, last = name.rpartition(".")
            meta = RemoteParameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad)
            meta.owner = weakref.ref(self), name
            self.get_submodule(owner)._parameters[last] = meta

    def _register(self, variant: Variant, max_rows: int, memory_rows: int) -> None:
        """A module for such calls, with the state of the one before."""
        options, old = self._options, self._module
        layout = layout_of(self._layers(), variant, options.element)
        state: Dict[str, Any] = {"weight": self._weights}
        step: Optional[int] = None
        if old is not None:
            if old.micro_batches:
                raise FailedPrecondition("offload: this call needs another module (more rows, another mask, frozen "
                                         "parameters or dropout), and gradients since the last step would be lost: give "
                                         "offload max_rows, or change this between step and backward")
            same = self._optimizer is not None and old.registration.optimizer == self._optimizer
            moments = self._optimizer.moments if same and self._optimizer is not None else ()
            state, step = self.state(["weight", *moments])
            old.release(timeout=options.timeout)
        kept = 2 * max_rows if options.kept_rows is None else options.kept_rows
        module = Module(self._client, Registration(layout, self._name, self._optimizer, self._groups, max_rows, kept,
                                                   options.durability, 3600.0, memory_rows if layout.memory_width else 0),
                        options.replay_mib, options.timeout)
        if options.server_optimizer:
            trained = {name for name, parameter in zip(self._parts.names, layout.parameters) if parameter.trained}
            kinds = {kind: {name: _host(tensor) for name, tensor in tensors.items() if kind == "weight" or name in trained}
                     for kind, tensors in state.items()}
            self._parts.put(module, kinds, optimizer_step=step, complete=True, timeout=options.timeout)
        self._sent = {}
        self._module, self._needs, self._weights = module, (variant, max_rows, memory_rows), {}
        self._described = describe_all(self._layers(), variant)
        self._choose_speaker()
        self._held[:] = [module]
        if options.name is None and old is None:
            weakref.finalize(self, _release, self._held)

    def _ensure(self, call: StackCall, with_gradient: bool) -> Module:
        rows, variant = call.x.shape[0] * call.x.shape[1], Variant(call.causal, frozen=self._frozen())
        most = self._options.max_rows or rows
        memory_rows = 0 if call.memory is None else call.memory.shape[0] * call.memory.shape[1]
        most_memory = memory_rows
        if self._module is not None and self._needs is not None:
            was, most, most_memory = self._needs
            # Without gradients a call says by itself whether there is dropout.
            drops = self._module.layout.drops
            right = not self.training if was.keeps_all else not with_gradient or self.training or not drops
            if right and (was.causal, was.frozen) == (variant.causal, variant.frozen) and (
                    rows <= most and memory_rows <= most_memory):
                return self._module
        drops = layout_of(self._layers(), variant).drops
        self._register(variant._replace(keeps_all=drops and with_gradient and not self.training), max(rows, most),
                       max(memory_rows, most_memory))
        assert self._module is not None
        return self._module

    # ---- A call.

    def run(self, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
        described = self._described or describe_all(self._layers(), Variant())
        call = adapt(self.first, described, arguments, keywords)
        x = call.x
        if x.shape[-1] != described[0].width:
            raise wrong("x", f"{described[0].width} columns", x.shape[-1])
        every = list(self._tensors().values())
        tensors = [] if self._options.server_optimizer else every
        anchor = self._anchor if any(tensor.requires_grad for tensor in every) else None
        apply: Any = _Remote.apply
        y = apply(self, call, torch.is_grad_enabled(), anchor, x.reshape(x.shape[0], -1, x.shape[-1]), call.memory,
                  *tensors)
        return call.give(y.reshape(x.shape))

    def send_changed(self, module: Module) -> Tuple[Tuple[int, int], ...]:
        """With optimizer="local": puts what has changed here. Gives what the server has now."""
        tensors = self._tensors()
        present = {name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()}
        changed = {name: _host(tensors[name]) for name, version in present.items() if self._sent.get(name) != version}
        if changed:
            if module.micro_batches:
                module.discard(timeout=self._options.timeout)
            self._parts.put(module, {"weight": changed}, timeout=self._options.timeout)
            self._sent = present
        return tuple(present.values())

    def gradients(self, module: Module) -> List[Optional[Tensor]]:
        """With optimizer="local": of each parameter, since the backward that has just been; the server's are cleared."""
        tensors = self._tensors()
        trained = [name for name, tensor in tensors.items() if tensor.requires_grad]
        found = self._parts.get(module, ["gradient"], trained, timeout=self._options.timeout)["gradient"]
        module.discard(timeout=self._options.timeout)
        return [send(torch.from_numpy(found[name]), tensor.device).to(tensor.dtype) if name in found else None
                for name, tensor in tensors.items()]


def _release(held: List[Module]) -> None:
    """Of a stack that is gone: its module is nobody's."""
    try:
        held.pop().release(timeout=1.0)
    except (AttndError, OSError):
        pass  # it ends by its time


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: RemoteStack, call: StackCall, grad_enabled: bool, anchor: Optional[Tensor], x: Tensor,
                memory: Optional[Tensor], *tensors: Tensor) -> Tensor:
        with_gradient = grad_enabled and any(ctx.needs_input_grad)
        module = stack._ensure(call, with_gradient)
        ctx.versions = stack.send_changed(module) if tensors else ()
        seed = int(torch.randint(2 ** 62, (1,))) if stack.training and module.layout.drops else 0
        given: Dict[str, Any] = dict(kv_lengths=call.kv_lengths, positions=call.positions, seed=seed,
                                     mask=None if call.mask is None else call.mask.cpu().numpy(),
                                     timeout=stack._options.timeout)
        element = module.layout.element
        bits = _bits(x[0] if call.cu_seqlens is not None else x, element)
        if call.cu_seqlens is not None:
            given["cu_seqlens"] = call.cu_seqlens.tolist()
        if memory is not None:
            given.update(memory=_bits(memory, element), memory_lengths=call.memory_lengths)
            ctx.memory_type, ctx.memory_device = memory.dtype, memory.device
        if with_gradient:
            y, ctx.activations = module.forward(bits, keep=True, **given)
        else:
            y = module.forward(bits, training=stack.training and module.layout.drops, **given)
        ctx.stack, ctx.module, ctx.x_type, ctx.device = stack, module, x.dtype, x.device
        ctx.has_memory, ctx.is_packed = memory is not None, call.cu_seqlens is not None
        return _tensor(y, element, x.dtype, x.device).reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        dy, = outer
        stack, module = ctx.stack, ctx.module
        stack.device = dy.device
        stack.look_again()
        if module is not stack.module:
            raise FailedPrecondition("backward: expected the module of its forward, got one that was registered since: a "
                                     "call between them needed more rows, or another mask")
        local = not stack._options.server_optimizer
        trained = any(t.requires_grad for t in stack._tensors().values())
        if local and ctx.versions != tuple((t.data_ptr(), t._version) for t in stack._tensors().values()):
            raise RuntimeError("one of the parameters needed for gradient computation has been modified by an inplace "
                               "operation since this stack's forward")
        element = module.layout.element
        dx = module.backward(_bits(dy[0] if ctx.is_packed else dy, element), ctx.activations,
                             want_dx=any(ctx.needs_input_grad[4:6]), weight_gradients=trained,
                             timeout=stack._options.timeout)
        d_memory = None
        if ctx.has_memory and dx is not None:
            dx, made = dx
            d_memory = _tensor(made, element, ctx.memory_type, ctx.memory_device)
        given = None if dx is None else _tensor(dx, element, ctx.x_type, ctx.device).reshape(dy.shape)
        gradients: Sequence[Optional[Tensor]] = ()
        if local:
            gradients = stack.gradients(module) if trained else [None] * len(stack._tensors())
        return (None, None, None, None, given, d_memory, *gradients)


def _host(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def _bits(tensor: Tensor, element: str) -> Bits:
    transfer = Transfer()
    host = transfer.fetch("x", tensor, _TYPES[element]).contiguous()
    transfer.wait()
    return Bits(host.view(torch.int16).numpy().view("u2") if element == "bf16" else host.numpy(), element)


def _tensor(array: Any, element: str, to: torch.dtype, device: torch.device) -> Tensor:
    made = torch.from_numpy(array.view("i2")).view(torch.bfloat16) if element == "bf16" else torch.from_numpy(array)
    return send(made, device).to(to)


# ---- state_dict

def _fill_state_dict(stack: RemoteStack, state_dict: Dict[str, Any], prefix: str, _: Any) -> None:
    """The server's tensors in the place of meta tensors."""
    if stack._options.server_optimizer:
        tensors, weights = stack._tensors(), stack.state(["weight"])[0]["weight"]
        for name, tensor in tensors.items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = weights[name].to(tensor.dtype, copy=True)
    if stack._options.single:
        for key in [key for key in state_dict if key.startswith(f"{prefix}0.")]:
            state_dict[prefix + key[len(prefix) + 2:]] = state_dict.pop(key)


def _take_state_dict(stack: RemoteStack, state_dict: Dict[str, Any], prefix: str, *_: Any) -> None:
    """What is loaded goes to the server; torch then finds meta tensors, which it need not copy."""
    if stack._options.single:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}0.{key[len(prefix):]}"] = state_dict.pop(key)
    if not stack._options.server_optimizer:
        return
    tensors = stack._tensors()
    given = {name: state_dict[prefix + name] for name, tensor in tensors.items()
             if prefix + name in state_dict and state_dict[prefix + name].shape == tensor.shape}
    for name, tensor in given.items():
        state_dict[prefix + name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if stack.module is None:
        stack._weights.update({name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
                               for name, tensor in given.items()})
    elif given:
        stack.discard()
        stack._parts.put(stack.module, {"weight": {name: _host(tensor) for name, tensor in given.items()}},
                         timeout=stack._options.timeout)
