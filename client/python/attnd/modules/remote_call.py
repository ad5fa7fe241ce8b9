"""RemoteCall: a call of a stack and its backward, as autograd has them."""
from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import torch
from torch import Tensor

from ..errors import FailedPrecondition, ResourceExhausted, Unavailable
from .calls import StackCall
from .numbers import bits_of, tensor_of

__all__ = ["RemoteCall"]

RemoteStack = Any  # stack.RemoteStack


class RemoteCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: RemoteStack, call: StackCall, grad_enabled: bool, anchor: Optional[Tensor], x: Tensor,
                memory: Optional[Tensor], *tensors: Tensor) -> Tensor:
        with_gradient = grad_enabled and any(ctx.needs_input_grad)
        with stack._lock:
            return RemoteCall._forward(ctx, stack, call, with_gradient, x, memory, bool(tensors))

    @staticmethod
    def _forward(ctx: Any, stack: RemoteStack, call: StackCall, with_gradient: bool, x: Tensor, memory: Optional[Tensor],
                 is_local: bool) -> Tensor:
        stack.flush()
        module, drops = stack._ensure(call, with_gradient)
        ctx.versions = stack.send_changed(module) if is_local else ()
        drops = drops and module.layout.drops
        seed = int(torch.randint(2 ** 62, (1,))) if drops else 0
        ctx.stack, ctx.module, ctx.x_type, ctx.device = stack, module, x.dtype, x.device
        ctx.has_memory, ctx.is_packed = memory is not None, call.cu_seqlens is not None
        if memory is not None:
            ctx.memory_type, ctx.memory_device = memory.dtype, memory.device
        if x.numel() == 0:
            ctx.activations = None
            return torch.empty_like(x)
        given: Dict[str, Any] = dict(kv_lengths=call.kv_lengths, positions=call.positions, seed=seed,
                                     mask=None if call.mask is None else call.mask.cpu().numpy(),
                                     timeout=stack._options.timeout)
        element = module.layout.element
        bits = bits_of(x[0] if call.cu_seqlens is not None else x, element)
        if call.cu_seqlens is not None:
            given["cu_seqlens"] = call.cu_seqlens.tolist()
        if memory is not None:
            given.update(memory=bits_of(memory, element), memory_lengths=call.memory_lengths)
        if with_gradient:
            try:
                y, ctx.activations = module.forward(bits, keep=True, **given)
            except Unavailable as error:
                if error.reason != "ACTIVATION_PRESSURE":
                    raise
                raise ResourceExhausted(
                    f"kept_rows: expected room for the activations of this call beside those that wait for their backward, "
                    f"of {module.registration.kept_rows} rows at most: give attnd.torch.offload(..., kept_rows=) the rows "
                    "of all calls between forward and backward", reason=error.reason, field="kept_rows") from None
        else:
            y = module.forward(bits, training=drops, **given)
        return tensor_of(y, element, x.dtype, x.device).reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        dy, = outer
        with ctx.stack._lock:
            return RemoteCall._backward(ctx, dy)

    @staticmethod
    def _backward(ctx: Any, dy: Tensor) -> Any:
        stack, module = ctx.stack, ctx.module
        stack.device = dy.device
        if module is not stack.module:
            raise FailedPrecondition("backward: expected the module of its forward, got one that was registered since: a "
                                     "call between them needed more rows, or another mask")
        local = not stack._options.server_optimizer
        trained = bool(stack._in_module())
        if not local and trained:
            stack.before_backward()
        if ctx.activations is None:
            if not local:
                stack.after_backward(is_empty=True)
            zeros = [torch.zeros_like(t) if t.requires_grad else None for t in stack._tensors().values()] if local else ()
            return (None, None, None, None, torch.empty_like(dy),
                    None, *zeros)
        if local and ctx.versions != stack.versions():
            raise RuntimeError("one of the parameters needed for gradient computation has been modified by an inplace "
                               "operation since this stack's forward")
        element = module.layout.element
        dx = module.backward(bits_of(dy[0] if ctx.is_packed else dy, element), ctx.activations,
                             want_dx=any(ctx.needs_input_grad[4:6]), weight_gradients=trained,
                             timeout=stack._options.timeout)
        if not local and trained:
            stack.after_backward(is_empty=False)
        d_memory = None
        if ctx.has_memory and dx is not None:
            dx, made = dx
            d_memory = tensor_of(made, element, ctx.memory_type, ctx.memory_device)
        given = None if dx is None else tensor_of(dx, element, ctx.x_type, ctx.device).reshape(dy.shape)
        gradients: Sequence[Optional[Tensor]] = ()
        if local:
            gradients = stack.gradients(module) if trained else [None] * len(stack._tensors())
        return (None, None, None, None, given, d_memory, *gradients)
