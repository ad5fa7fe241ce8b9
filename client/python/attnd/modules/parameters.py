"""RemoteParameter: a parameter whose numbers are a daemon's, and what stands for its numbers and its gradient here.

All three know their shape, type and place, and refuse whatever would read or write numbers: a refusal names
attnd.torch.fetch, assign_ or local_weights, which do it. A gradient also has norms, and can be multiplied:
clip_grad_norm_, a GradScaler and scaling by hand work on it, and the step applies what it was multiplied by.
"""
from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..errors import FailedPrecondition, Unimplemented, wrong

__all__ = ["GradientState", "RemoteGradient", "RemoteNumbers", "RemoteParameter", "asked_by", "refuse_conversion",
           "refuse_memory", "stack_of"]

RemoteStack = Any  # stack.RemoteStack

# These ask for no number.
_HARMLESS = frozenset("""
    size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex
    is_signed is_conj is_neg is_inference is_same_size get_device data_ptr __hash__ __repr__
    __str__ __format__ __len__ __dir__ requires_grad_ is_pinned is_shared is_set_to has_names dim_order is_distributed
    is_tensor is_storage result_type can_cast has_torch_function _is_view
    _has_compatible_shallow_copy_type
""".split())
_READ_PROPERTIES = frozenset("""
    shape dtype device layout requires_grad is_leaf grad_fn ndim itemsize nbytes is_meta is_cuda is_cpu is_sparse
    is_sparse_csr is_quantized is_mkldnn is_xla is_mps is_ipu is_xpu is_hpu is_maia is_mtia is_vulkan is_nested names
    _version
    output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks _base name volatile
""".split())


_LIKE = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}  # new tensors, which are here


def called(function: Any) -> Tuple[str, str]:
    """The function's name, and "get" or "set" where it is a property's."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(function.__self__, "__name__", "?"), name.strip("_")
    return name, ""


def _plain(function: Any, arguments: Sequence[Any], keywords: Optional[Dict[str, Any]]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*arguments, **(keywords or {}))


def _is_harmless(name: str, how: str) -> bool:
    return name in _READ_PROPERTIES if how == "get" else not how and name in _HARMLESS


def _first(kind: type, arguments: Sequence[Any], keywords: Optional[Dict[str, Any]]) -> Any:
    for value in [*arguments, *(keywords or {}).values()]:
        if isinstance(value, kind):
            return value
        if isinstance(value, (list, tuple)):
            found = _first(kind, value, None)
            if found is not None:
                return found
    return None


def refuse_memory(made: Any, told: str) -> None:
    """Has C++ that reads or writes the tensor's memory raise this, where it would crash, as there is none."""
    native: Any = torch._C
    if not getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False):  # asks where tensors lie
        with native.DisableTorchFunctionSubclass():
            native._set_storage_data_ptr_access_error_msg(made.untyped_storage()._cdata, told)


class _Numbers:
    """A parameter and its detached self share this."""

    owner: Optional[Tuple[Any, str]]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Sequence[Any] = (),
                           keywords: Optional[Dict[str, Any]] = None) -> Any:
        name, how = called(function)
        if name == "device" and how == "get":
            found = stack_of(arguments[0])
            return torch.device("cpu") if found is None else found[0].device  # of what goes with it
        if name == "is_meta" and how == "get":
            found = stack_of(arguments[0])
            if found is not None and found[0].loads.is_open:
                return False  # load_state_dict would say that it copies nothing
        if _is_harmless(name, how):
            made = _plain(function, arguments, keywords)
            if name == "requires_grad_":
                _touched(arguments[0])
            return made
        self: Any = arguments[0] if arguments and isinstance(arguments[0], _Numbers) else None
        if self is not None:
            if name == "requires_grad" and how == "set":
                _plain(function, arguments, keywords)
                return _touched(self)
            if name == "grad":
                return _plain(function, arguments, keywords)
            if name == "detach" or (name == "data" and how == "get"):
                return RemoteNumbers.of(self)
            loaded = stack_of(self) if name == "copy_" else None
            if loaded is not None and loaded[0].loads.is_open:
                loaded[0].loads.add(loaded[1], arguments[1])
                return self
            if name in _LIKE:
                keywords = {"dtype": self.dtype, "device": "cpu", **(keywords or {})}
                keywords.pop("memory_format", None)
                return getattr(torch, name[:-len("_like")])(tuple(self.shape), *arguments[1:], **keywords)
            if name == "__eq__" and len(arguments) > 1 and self is arguments[1]:
                return True  # of lists and dicts
            if isinstance(self, RemoteParameter) and _is_moved(name, how, arguments, keywords):
                return self  # wherever it was moved, as RemoteStack._apply has it
            if name in ("view_as", "expand_as") and len(arguments) > 1 and self is arguments[1]:
                refuse_hook(name)  # who asks for its node in autograd's graph, as register_multi_grad_hook
        _refuse(_first(_Numbers, arguments, keywords), f"{name} = ..." if how == "set" else name)

    def as_subclass(self, cls: Any) -> NoReturn:
        """PyTorch does not ask __torch_function__ about this one and the next."""
        _refuse(self, "as_subclass")

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self, "set_")


def _is_moved(name: str, how: str, arguments: Sequence[Any], keywords: Optional[Dict[str, Any]]) -> bool:
    """Whether a module outside of the stack, which has layers of it, moves or converts its parameters."""
    if name == "data" and how == "set":
        return arguments[1] is arguments[0]
    if how or name not in _CONVERSIONS:
        return False
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not nn.Module._apply.__code__:
        is_inside = (frame.f_globals.get("__name__") in (__name__, nn.Module.__module__)
                     or frame.f_code.co_name == "__torch_function__")  # of a mode, as a default device is one
        frame = frame.f_back if is_inside else None
    if frame is None:
        return False
    like = torch.empty(0, dtype=arguments[0].dtype, device="cpu")
    if getattr(like, name)(*arguments[1:], **(keywords or {})).dtype != like.dtype:
        refuse_conversion()
    return True


def refuse_conversion() -> NoReturn:
    raise Unimplemented("to: parameters on a daemon are float32 there, and keep their type here; convert the model before "
                        "attnd.torch.offload, whose precision= is the arithmetic's", field="dtype")


def refuse_hook(what: str) -> NoReturn:
    raise Unimplemented(f"{what}: hooks of a parameter on a daemon do not run; offload(..., optimizer=\"local\") brings "
                        "gradients here", field="hook")


def _touched(self: Any) -> None:
    found = stack_of(self)
    if found is not None:
        own = found[0]._cached.get(found[1])
        if isinstance(self, RemoteParameter) and isinstance(own, RemoteParameter) and own is not self:  # of local_weights
            _plain(Tensor.requires_grad_, (own, self.requires_grad), None)
        found[0].touch()


def asked_by(package: str) -> bool:
    """Whether code of it has called."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(package):
            return True
        frame = frame.f_back
    return False


def _refuse(self: Any, what: str) -> NoReturn:
    found = stack_of(self)
    name = found[1] if found else "a parameter in whose place there is another"
    if asked_by("torch.distributed.fsdp"):
        raise Unimplemented(
            f"FSDP: {name} is on a daemon, and cannot be sharded: give attnd.torch.offload(..., group=), and the stack's "
            "parameters() as fully_shard(ignored_params={...}) or FullyShardedDataParallel(ignored_states=[...])",
            field="parameter")
    raise Unimplemented(
        f"{what}: {name} is on a daemon, and has no numbers here: attnd.torch.fetch(p) gives them, attnd.torch.assign_(p, "
        "tensor) writes them, and under `with attnd.torch.local_weights(model):` parameters are ordinary ones",
        field="parameter")


class RemoteParameter(_Numbers, nn.Parameter):
    """A meta tensor for a parameter that a server's optimizer changes. None set to its grad forgets the gradient."""

    owner: Optional[Tuple[Any, str]] = None  # weak reference to the stack, and the name in it
    had_gradient = False  # when another parameter took its place

    __hash__ = Tensor.__hash__

    @property
    def grad(self) -> Optional[Tensor]:
        if self.had_gradient:
            raise FailedPrecondition("grad: another parameter has taken this one's place in its layer, and the gradient "
                                     "that it had is lost: call zero_grad() of the optimizer")
        found = stack_of(self)
        return None if found is None else found[0].gradient_of(found[1])

    @grad.setter
    def grad(self, value: Optional[Tensor]) -> None:
        found = stack_of(self)
        if value is not None and found is not None and found[0].lends_gradients:
            found[0].set_lent(found[1], value)
            return
        if value is not None and (found is None or value is not found[0].gradient_of(found[1])):
            raise wrong("grad", "None, since gradients of this parameter are the daemon's, but under `with "
                        "attnd.torch.local_gradients(model):`", type(value).__name__)
        if value is None:
            self.had_gradient = False
            if found is not None:
                found[0].forget([found[1]])

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        found = stack_of(self)
        return f"RemoteParameter({found[1] if found else 'of a stack that is gone'}, shape={tuple(self.shape)})"

    def register_hook(self, hook: Any) -> NoReturn:
        refuse_hook("register_hook")

    register_post_accumulate_grad_hook = register_hook

    def __deepcopy__(self, memo: Dict[int, Any]) -> NoReturn:
        raise TypeError("copy.deepcopy: expected the stack or the model that this parameter is in, since its numbers are on "
                        "a daemon; attnd.torch.fetch(p) copies them")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("pickle: expected the model's state_dict(), since this parameter's numbers are on a daemon")


class RemoteNumbers(_Numbers, Tensor):
    """A remote parameter's detached self, as .data and detach() give it."""

    owner: Optional[Tuple[Any, str]] = None

    __hash__ = Tensor.__hash__

    @staticmethod
    def of(parameter: Any) -> RemoteNumbers:
        with torch._C.DisableTorchFunctionSubclass():
            made: RemoteNumbers = Tensor.detach(parameter).as_subclass(RemoteNumbers)
        made.owner = parameter.owner
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteNumbers({self.owner[1] if self.owner else ''}, shape={tuple(self.shape)})"


def stack_of(parameter: Any) -> Optional[Tuple[RemoteStack, str]]:
    """The stack, and the name in it, of a parameter that a server's optimizer changes."""
    owner = parameter.owner if isinstance(parameter, (RemoteParameter, RemoteNumbers)) else None
    if owner is None:
        return None
    stack: Optional[RemoteStack] = owner[0]()
    if stack is None or stack.owned.get(owner[1]) is not owner:  # torch.utils.swap_tensors has put another in its place
        return None
    return stack, owner[1]


# ---- Gradients.

class GradientState:
    """Remembers what a parameter's gradient was multiplied by since the last backward."""

    __slots__ = ("factor", "is_zero", "is_lost", "tensor")

    def __init__(self) -> None:
        self.factor = 1.0
        self.is_zero = False  # set to 0 here, whatever the daemon has
        self.is_lost = False  # a step has cleared it
        self.tensor: Optional[RemoteGradient] = None

    def scale(self, factor: float) -> None:
        if not self.is_zero:
            self.factor *= factor
        elif not math.isfinite(factor):
            self.factor, self.is_zero = math.nan, False

    def zero(self) -> None:
        self.factor, self.is_zero = 1.0, True


_CONVERSIONS = {"to", "cpu", "cuda", "float", "half", "bfloat16", "double", "type"}  # a tensor of that type is itself


class RemoteGradient(Tensor):
    """A gradient on a daemon."""

    _stack: RemoteStack
    _name: str
    _state: GradientState

    __hash__ = Tensor.__hash__

    @staticmethod
    def of(stack: RemoteStack, name: str, state: GradientState, shape: Sequence[int], like: Optional[Tensor] = None
           ) -> RemoteGradient:
        """like: an ordinary parameter, whose gradient it can be."""
        make: Any = Tensor._make_wrapper_subclass
        made: RemoteGradient = make(RemoteGradient, tuple(shape), dtype=torch.float32 if like is None else like.dtype,
                                    device=stack.device if like is None else like.device)
        refuse_memory(made, "grad: expected attnd.torch.fetch(p.grad) where C++ reads or writes the numbers of a gradient "
                            "on a daemon")
        made._stack, made._name, made._state = stack, name, state
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteGradient({self._name}, shape={tuple(self.shape)})"

    def norm_of(self, order: Any) -> Tensor:
        state = self._live()
        value = 0.0 if state.is_zero else abs(state.factor) * self._stack.gradient_norm(self._name, order)
        return torch.tensor(value, dtype=torch.float32, device=self.device)

    def scale(self, factor: Any) -> RemoteGradient:
        if isinstance(factor, Tensor) and (isinstance(factor, RemoteGradient) or factor.numel() != 1):
            _refuse_gradient(self, "multiplying it by more than one number")
        self._live().scale(float(factor))
        return self

    def zero(self) -> RemoteGradient:
        if self._state.is_lost and not self._stack.is_lent(self._name):
            self._stack.revive(self._name)
        self._live().zero()
        self._stack.settle()
        return self

    def is_finite(self) -> bool:
        state = self._live()
        return state.is_zero or (math.isfinite(state.factor) and math.isfinite(self._stack.gradient_norm(self._name, 2)))

    def _live(self) -> GradientState:
        if self._stack.gradient_state(self._name) is not self._state:
            raise FailedPrecondition(f"grad: zero_grad has forgotten this gradient of {self._name}; take p.grad anew")
        if self._stack.is_lent(self._name):
            raise FailedPrecondition(f"grad: in a block of local_gradients take {self._name}.grad anew: it is an ordinary "
                                     "tensor there")
        if self._state.is_lost:
            raise FailedPrecondition(
                f"grad: the daemon has cleared the gradient of {self._name} with the last step; call zero_grad() between a "
                "step and the next backward, and take numbers of gradients before the step")
        return self._state

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Sequence[Any] = (),
                           keywords: Optional[Dict[str, Any]] = None) -> Any:
        name, how = called(function)
        if _is_harmless(name, how):
            return _plain(function, arguments, keywords)
        first = arguments[0] if arguments else None
        operation = _OPERATIONS.get(name)
        if isinstance(first, RemoteGradient):
            if (name == "data" and how == "get") or name in ("detach", "detach_", "__get__"):
                return first
            if name == "data" and how == "set" and arguments[1] is first:
                return None
            if name in _CONVERSIONS:
                made = function(torch.empty(0, dtype=first.dtype, device=first.device), *arguments[1:], **(keywords or {}))
                if (made.dtype, made.device) == (first.dtype, first.device):
                    return first
            if operation is not None and not how:
                return operation([first], arguments[1:], keywords or {}, True)
        elif isinstance(first, (list, tuple)) and operation is not None and name.startswith("_"):
            return operation(first, arguments[1:], keywords or {}, False)
        _refuse_gradient(_first(RemoteGradient, arguments, keywords), name)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Sequence[Any] = (),
                           keywords: Optional[Dict[str, Any]] = None) -> Any:
        _refuse_gradient(_first(RemoteGradient, arguments, keywords), str(function))


def _refuse_gradient(self: Any, what: str) -> NoReturn:
    self._live()  # one that is gone has another remedy
    raise Unimplemented(
        f"{what}: the gradient of {self._name} is on a daemon, where it can be multiplied by a number, set to 0 or None, "
        "and measured (clip_grad_norm_, norms of order 1, 2 and inf, a GradScaler). attnd.torch.fetch(p.grad) gives its "
        "numbers; under `with attnd.torch.local_gradients(model):` it is an ordinary tensor", field="grad")


# Each with the gradients, the other arguments, keywords, and whether the function takes one gradient.

def _norm(gradients: Any, rest: Sequence[Any], keywords: Dict[str, Any], single: bool) -> Any:
    others = {name: value for name, value in keywords.items() if name not in ("ord", "p")}
    if any(value is not None and value is not False for value in [*rest[1:], *others.values()]):
        _refuse_gradient(_first(RemoteGradient, gradients, None), "a norm of some dimensions or in another type")
    order = rest[0] if rest else keywords.get("ord", keywords.get("p"))
    if order in (None, "fro"):
        order = 2
    if isinstance(order, str) and order != "inf":
        _refuse_gradient(_first(RemoteGradient, gradients, None), f"a norm {order!r}")
    made = [one.norm_of(order) if isinstance(one, RemoteGradient) else torch.linalg.vector_norm(one, float(order))
            for one in gradients]
    return made[0] if single else made


def _factors(given: Any, count: int) -> List[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given] * count


def _multiply(gradients: Any, rest: Sequence[Any], keywords: Dict[str, Any], single: bool) -> Any:
    given = rest[0] if rest else keywords.get("other", keywords.get("scalar"))
    for one, factor in zip(gradients, _factors(given, len(gradients))):
        one.scale(factor) if isinstance(one, RemoteGradient) else one.mul_(factor)
    return gradients[0] if single else None


def _divide(gradients: Any, rest: Sequence[Any], keywords: Dict[str, Any], single: bool) -> Any:
    given = rest[0] if rest else keywords.get("other", keywords.get("scalar"))
    if keywords.get("rounding_mode"):
        _refuse_gradient(_first(RemoteGradient, gradients, None), "a division that rounds")
    for one, factor in zip(gradients, _factors(given, len(gradients))):
        if isinstance(one, RemoteGradient):
            if isinstance(factor, Tensor) and factor.numel() != 1:
                _refuse_gradient(one, "dividing it by more than one number")
            number = float(factor)
            one.scale(1 / number if number else math.copysign(math.inf, number))
        else:
            one.div_(factor)
    return gradients[0] if single else None


def _zero(gradients: Any, rest: Sequence[Any], keywords: Dict[str, Any], single: bool) -> Any:
    for one in gradients:
        one.zero() if isinstance(one, RemoteGradient) else one.zero_()
    return gradients[0] if single else None


def _unscale(gradients: Any, rest: Sequence[Any], keywords: Dict[str, Any], single: bool) -> Any:
    found_inf, inverse = rest
    if not all([one.is_finite() for one in gradients if isinstance(one, RemoteGradient)]):  # before one is multiplied
        found_inf.fill_(1.0)
    here = [one for one in gradients if not isinstance(one, RemoteGradient)]
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(here, found_inf, inverse)
    factor = float(inverse)
    for one in gradients:
        if isinstance(one, RemoteGradient) and factor != 1:
            one.scale(factor)


def _leave(gradients: Any, rest: Sequence[Any], keywords: Dict[str, Any], single: bool) -> Any:
    return gradients[0]


_OPERATIONS: Dict[str, Callable[[Any, Sequence[Any], Dict[str, Any], bool], Any]] = {
    "linalg_vector_norm": _norm, "vector_norm": _norm, "norm": _norm, "_foreach_norm": _norm, "mul_": _multiply,
    "__imul__": _multiply, "_foreach_mul_": _multiply, "div_": _divide, "__itruediv__": _divide, "true_divide_": _divide,
    "divide_": _divide, "multiply_": _multiply, "_foreach_div_": _divide, "zero_": _zero, "_foreach_zero_": _zero,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale, "requires_grad_": _leave}
