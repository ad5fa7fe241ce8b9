"""Arguments of attnd.torch.attention: checked, and those that are neither tensors nor floats as one string, since an
operator's schema takes no unions."""
from __future__ import annotations

import collections
import functools
import weakref
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, TypeVar, Union

import torch
from torch import Tensor

from torch.autograd import forward_ad

from . import _checks
from ._problem import Precision
from .client import Client
from .errors import AttndError, Unimplemented, wrong, wrong_type
from .masks.nodes import Mask, by_token

Numbers = Union[Tensor, Sequence[float], Sequence[Sequence[float]]]

LAYOUTS = ("bhld", "blhd", "thd", "htd")
ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_PRECISIONS = {"f16": torch.float16, "bf16": torch.bfloat16}


class Words(NamedTuple):
    """keep: what servers are asked to keep tensors for, "" nothing, "keep" a backward, "bias" one that wants the bias's
    gradient. described: the token of a mask by description, or "". server: the connection's name. The rest as attnd.Options;
    left and right are the window."""

    layout: str
    causal: Union[None, bool, str]
    align: Union[None, int, str]
    left: Optional[int]
    right: Optional[int]
    zero_rest: bool
    accumulate: str
    precision: Optional[str]
    keep: str
    offset: int
    allow_nondeterministic: bool
    described: str
    server: str

    def pack(self) -> str:
        return "|".join(map(str, self))

    def contract(self) -> Dict[str, Any]:
        """Returns those of them that are options of Client.forward; tensors come in `precision` already."""
        return dict(layout=self.layout, causal=self.causal, align=self.align, zero_rest=self.zero_rest,
                    window=None if self.left is None else (self.left, self.right), accumulate=self.accumulate,
                    offset=self.offset, allow_nondeterministic=self.allow_nondeterministic)


@functools.lru_cache(256)
def unpack(options: str) -> Words:
    *words, server = options.split("|", len(Words._fields) - 1)
    values: List[Any] = [*map(_constant, words[:-1]), words[-1], server]
    return Words(*values)


_recent: Deque[Mask] = collections.deque(maxlen=16)  # live for backwards of compiled programs, which hold their tokens alone


def described_mask(options: str) -> Optional[Mask]:
    """The mask by description that a call's options name."""
    token = unpack(options).described
    mask = by_token(token) if token else None
    if token and mask is None:
        raise wrong("mask", "a mask that lives until its backward, beside a compiled program", "one that is gone")
    if mask is not None and (not _recent or _recent[-1] is not mask):
        _recent.append(mask)
    return mask


_T = TypeVar("_T")
_without: weakref.WeakSet[Client] = weakref.WeakSet()  # clients of daemons that have no masks by description


def described_first(client: Client, described: Callable[[], _T], dense: Callable[[], _T]) -> _T:
    """A call with a mask by description; or the same with a bool mask, where the daemon's engine refuses this one. Daemons
    that have no such masks at all are not asked again."""
    if client not in _without:
        try:
            return described()
        except Unimplemented as error:
            if error.reason != "MASK_UNSUPPORTED":
                raise
        if not _takes_masks(client):
            _without.add(client)
    return dense()


def _takes_masks(client: Client) -> bool:
    """Whether some daemon of the client says so; also where one does not answer now."""
    try:
        return any("masks" in client.info(index).features for index in range(len(client.addresses)))
    except AttndError:
        return True


def layout_of(options: str) -> str:
    return options.partition("|")[0]


def wire_type(tensor: Tensor, options: str) -> torch.dtype:
    """The type in which the tensor travels."""
    return _PRECISIONS.get(unpack(options).precision or "", tensor.dtype)


def _constant(text: str) -> Any:
    """None, a bool, an int or a word, from its str."""
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    return int(text) if text.lstrip("-").isdigit() else text


def check_tensor(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise wrong_type(name, "a torch.Tensor", tensor)
    if tensor.is_nested or tensor.layout != torch.strided:
        raise wrong(name, "a dense tensor; of sequences of several lengths attnd.torch.attention with cu_seqlens",
                    "a nested one" if tensor.is_nested else f"one of {tensor.layout}")
    return tensor


def check_tensors(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], mask: Union[None, Tensor, Mask]) -> None:
    for name, given in (("q", q), ("k", k), ("v", v), *(() if bias is None else (("bias", bias),))):
        tensor = check_tensor(name, given)
        if tensor.dtype not in ELEMENTS:
            raise wrong(name, "a tensor of float16, bfloat16 or float32", f"one of {tensor.dtype}")
        if name in "kv" and tensor.dtype != q.dtype:
            raise wrong(name, f"a tensor of {q.dtype}, as q is", f"one of {tensor.dtype}")
        if tensor.device != q.device:
            raise wrong(name, f"a tensor on q's device, {q.device}", f"one on {tensor.device}")
    if mask is None or isinstance(mask, Mask):
        return
    if check_tensor("mask", mask).dtype != torch.bool:
        raise wrong("mask", "a bool tensor (True = attend); floats belong into bias", f"one of {mask.dtype}")


def check_transforms(*tensors: object) -> None:
    """Refuses transforms that the operators cannot differentiate; they would give zeros or obscure errors of torch."""
    if torch.compiler.is_compiling():
        return
    stack = torch._C._functorch.peek_interpreter_stack()
    if stack is not None and stack.key() == torch._C._functorch.TransformType.Grad:
        raise Unimplemented("attention has no derivative within torch.func.grad, vjp and jacrev: use torch.autograd.grad "
                            "or backward(), around torch.func.vmap if need be", field="attention")
    dual: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(isinstance(t, Tensor) and dual(t).tangent is not None for t in tensors):
        raise Unimplemented("attention has no forward-mode derivative (jvp, jacfwd): use torch.autograd.grad or backward()",
                            field="attention")


def check_precision(precision: Optional[Precision]) -> Optional[Precision]:
    if precision is not None:
        _checks.word("precision", precision, tuple(_PRECISIONS), '"f16" or "bf16"')
    return precision


def numbers(name: str, value: Optional[Numbers]) -> Optional[Tensor]:
    """A copy, which is the backward's too."""
    if value is None:
        return None
    try:
        return (value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")).clone()
    except (TypeError, ValueError, RuntimeError):
        raise wrong_type(name, "a tensor or a list of numbers", value) from None


def seed_tensor(seed: Union[None, int, Tensor], dropout_p: float) -> Optional[Tensor]:
    """int64 of one number, whose bits are the seed's; drawn where there is none and dropout wants one."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex():
            raise wrong("seed", "an int, or an int64 tensor of one number", f"{seed.dtype} of {seed.numel()}")
        return seed
    if seed is not None:
        bits = _checks.uint64("seed", seed)
        return torch.tensor([bits - (1 << 64) if bits >= 1 << 63 else bits], dtype=torch.int64, device="cpu")
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu") if dropout_p > 0 else None


def diagonal(name: str, value: object) -> Any:
    """causal, or an align that is no tensor."""
    if value is None or isinstance(value, bool if name == "causal" else int):
        return value
    other = "or True" if name == "causal" else "an int or one int per batch entry"
    return _checks.word(name, value, ("top_left", "bottom_right"), f'"top_left", "bottom_right", {other}')
