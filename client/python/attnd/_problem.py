"""Problem: one attention problem with every option resolved and checked, as client and local computation use it.

`resolve` takes what the caller typed; whatever is wrong raises here, before a byte is sent, naming the argument, what
was expected and what it got. The mathematics is docs/NUMERICS.md's.
"""
from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import (TYPE_CHECKING, Any, Dict, Iterator, List, Literal, NamedTuple, Optional, Sequence, Tuple, TypedDict,
                    Union, cast)

import numpy as np

from . import _arrays, _checks
from ._arrays import Array, ArrayLike, Tensor
from .errors import wrong, wrong_type
from .masks.nodes import Mask
from .masks.sizes import Sizes
from .masks.sizes import resolve as resolve_mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_LENGTH, MAX_HEADS, MAX_BATCH, MAX_HEAD_DIM, MAX_ELEMENTS = 1 << 20, 1 << 16, 1 << 20, 256, 1 << 40

# Axes that turn the caller's order into ours, heads before length: [batch, heads, length, dim], [heads, length, dim].
_TO_HEADS_FIRST = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3), "htd": (0, 1, 2), "thd": (1, 0, 2)}


Layout = Literal["bhld", "blhd", "thd", "htd"]
Causal = Union[None, bool, Literal["top_left", "bottom_right"]]
Precision = Literal["f16", "bf16"]


class Options(TypedDict, total=False):
    """Options of attention; the same for forward and backward. All are optional.

    layout: "bhld" [batch, heads, length, dim] (default) or "blhd"; with cu_seqlens "thd" [total length, heads, dim]
        (default then) or "htd".
    causal: None (default), "top_left", "bottom_right", or True, which takes the alignment from `align` and needs one
        where query and key lengths differ. Row i sees keys j <= i + offset.
    align: where the diagonal lies: "top_left" (offset 0), "bottom_right" (key length - query length), an int, or
        int array [batch].
    window: (left, right), inclusive around i + offset; -1 or None is unbounded.
    mask: an attnd.masks.Mask, or bool, broadcastable to [batch, q_heads, q_len, kv_len]; True = attend.
    bias: float16, bfloat16 or float32, broadcastable to the same shape; added to the scores, -inf masks.
    scale: multiplies Q·Kᵀ; None: 1/sqrt(head dim).
    softcap: c in c·tanh(S/c); 0 (default): none.
    dropout_p, seed, offset: dropout's probability (rounded to 256ths) and the generator's state. dropout_p above 0 needs
        a seed, and each training step one of its own; backward must be given forward's.
    accumulate: "f32" (default) or "f16", where the server's engine has it.
    precision: "f16" or "bf16" sends float32 tensors in 16 bits and gives float32 results.
    kv_lengths: int [batch], keys of each batch entry that exist; the rest is padding and never read as numbers.
    cu_seqlens_q, cu_seqlens_k: int [sequences + 1], where packed sequences start, and the total.
    alibi_slopes: float [q_heads] or [batch, q_heads]; adds -slope·|i + offset - j|.
    sink: float [q_heads], one extra logit per head in the denominator.
    zero_rest: True counts each key that is not visible as logit 0 in the denominator.
    allow_nondeterministic: lets a server add gradients in any order where that is faster.
    """

    layout: Optional[Layout]
    causal: Causal
    align: object
    window: Optional[Sequence[Optional[int]]]
    mask: object
    bias: Optional[ArrayLike]
    scale: Optional[float]
    softcap: float
    dropout_p: float
    seed: Optional[int]
    offset: int
    accumulate: Literal["f32", "f16"]
    precision: Optional[Precision]
    kv_lengths: object
    cu_seqlens_q: object
    cu_seqlens_k: object
    alibi_slopes: object
    sink: object
    zero_rest: bool
    allow_nondeterministic: bool


@dataclass(frozen=True)
class Sequence1:
    """One batch entry, or one packed sequence: its rows in Q and K, and its diagonal's offset."""

    q_begin: int
    q_len: int
    kv_begin: int
    kv_len: int
    offset: int


@dataclass(frozen=True)
class Problem:
    """Sizes, options and tensors of one problem; tensors have heads before length."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: str
    batch: int
    scale: Optional[float]
    softcap: float
    causal: bool
    alignment: str  # "none", "top_left", "bottom_right", "offsets"
    offsets: Optional[Array]
    window: Tuple[int, int]
    kv_lengths: Optional[Array]
    cu_seqlens_q: Optional[Array]
    cu_seqlens_k: Optional[Array]
    mask: Optional[Array]  # bool, 4 dimensions, each full or 1
    described: Optional[Mask]  # a mask by description, instead
    bias: Optional[Tensor]  # the same
    bias_shape: Tuple[int, ...]  # as the caller gave it
    alibi_slopes: Optional[Array]  # flat
    dropout_threshold: int
    seed: int
    offset: int
    sink: Optional[Array]
    zero_rest: bool
    accumulate: str
    allow_nondeterministic: bool
    result_element: str  # of the caller's tensors: what results are cast to
    memo: Dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # what follows from all but numbers

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def element(self) -> str:
        return self.q.element

    @property
    def q_heads(self) -> int:
        return int(self.q.bits.shape[-3])

    @property
    def kv_heads(self) -> int:
        return int(self.k.bits.shape[-3])

    @property
    def q_len(self) -> int:
        return int(self.q.bits.shape[-2])

    @property
    def kv_len(self) -> int:
        return int(self.k.bits.shape[-2])

    @property
    def qk_head_dim(self) -> int:
        return int(self.q.bits.shape[-1])

    @property
    def v_head_dim(self) -> int:
        return int(self.v.bits.shape[-1])

    @property
    def o_shape(self) -> Tuple[int, ...]:
        return (*self.q.bits.shape[:-1], self.v_head_dim)

    @property
    def lse_shape(self) -> Tuple[int, ...]:
        return tuple(self.q.bits.shape[:-1])

    @property
    def mask_sizes(self) -> Sizes:
        """Sizes for a mask by description: the longest sequence's lengths, padding counted."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return Sizes(self.batch, self.q_heads, self.q_len, self.kv_len)
        return Sizes(self.batch, self.q_heads, int(np.diff(self.cu_seqlens_q).max()), int(np.diff(self.cu_seqlens_k).max()))

    def resolved_scale(self) -> float:
        return float(np.float32(1 / math.sqrt(self.qk_head_dim) if self.scale is None else self.scale))

    def sequences(self) -> Iterator[Sequence1]:
        for b in range(self.batch):
            q_begin, q_len, kv_begin, kv_len = 0, self.q_len, 0, self.kv_len
            if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
                q_begin, kv_begin = int(self.cu_seqlens_q[b]), int(self.cu_seqlens_k[b])
                q_len, kv_len = int(self.cu_seqlens_q[b + 1]) - q_begin, int(self.cu_seqlens_k[b + 1]) - kv_begin
            elif self.kv_lengths is not None:
                kv_len = int(self.kv_lengths[b])
            offset = kv_len - q_len if self.alignment == "bottom_right" else 0
            if self.offsets is not None:
                offset = int(self.offsets[b if len(self.offsets) > 1 else 0])
            yield Sequence1(q_begin, q_len, kv_begin, kv_len, offset)

    def in_callers_order(self, array: Array) -> Array:
        """A tensor with heads before length, seen in the caller's layout."""
        axes = _TO_HEADS_FIRST[self.layout]
        seen: Array = array if axes in _SAME_ORDER else array.transpose(axes)
        return seen

    def callers_shape(self, shape: Tuple[int, ...]) -> Tuple[int, ...]:
        return tuple(shape[axis] for axis in _TO_HEADS_FIRST[self.layout])


class BackwardInputs(NamedTuple):
    """Backward needs these beside the problem; heads before length."""

    o: Tensor
    lse: Array
    d_o: Tensor
    d_lse: Optional[Array]
    factor: float = 1.0  # by which d_o and d_lse, and so all results, are multiplied


def resolve(q: object, k: object, v: object, bias_grad: bool = False, **options: Unpack[Options]) -> Problem:
    """Checks everything and resolves every default. Raises InvalidArgument or InvalidType.

    A training calls with the same shapes again and again: where no option is an array, what was found for the same
    shapes, strides and options is found again by one look-up, at a third of the time.
    """
    key = template_key(q, k, v, bias_grad, options)
    if key is None:
        return _resolve(q, k, v, bias_grad, options)
    template = _templates.get(key)
    if template is None:
        problem = _resolve(q, k, v, bias_grad, options)
        if len(_templates) >= _MOST_TEMPLATES:
            _templates.clear()
        if problem.element == problem.result_element:
            _templates[key] = {**vars(problem), "q": None, "k": None, "v": None}
        return problem
    problem = object.__new__(Problem)
    axes, element = _TO_HEADS_FIRST[template["layout"]], template["result_element"]
    vars(problem).update(template)
    for name, array in (("q", q), ("k", k), ("v", v)):
        bits = cast(Array, array) if element != "bf16" else cast(Array, array).view(np.uint16)
        vars(problem)[name] = Tensor(bits if axes in _SAME_ORDER else bits.transpose(axes), element)
    return problem


def resolve_absent(batch: int, heads: Tuple[int, int], lengths: Tuple[int, int], dim: int, element: str,
                   **options: Unpack[Options]) -> Problem:
    """As resolve, for arrays that do not exist; heads and lengths are those of q, and of k and v. In packed layouts lengths
    are total, and batch is 1."""
    axes = _TO_HEADS_FIRST[_layout(options)]
    shapes = [(batch, count, length, dim)[-len(axes):] for count, length in zip(heads, lengths)]
    q, k = [Tensor(np.broadcast_to(np.zeros((), _arrays.bits_dtype(element)), shape).transpose(axes), element)
            for shape in shapes]
    return resolve(q, k, k, **options)


_SAME_ORDER = ((0, 1, 2, 3), (0, 1, 2))
_MOST_TEMPLATES = 256
_templates: Dict[Any, Dict[str, Any]] = {}
_PLAIN = (type(None), bool, int, float, str)


def memo_of(key: Any) -> Dict[str, Any]:
    """The memo of all problems of this template_key; empty where there was none yet."""
    template = None if key is None else _templates.get(key)
    return {} if template is None else cast(Dict[str, Any], template["memo"])


def template_key(q: object, k: object, v: object, bias_grad: bool, options: Options) -> Any:
    """Identifies a Problem but for its numbers; None where an option has numbers of its own."""
    if not (type(q) is type(k) is type(v) is np.ndarray):
        return None
    key: List[Any] = [bias_grad]
    for array in (q, k, v):
        key += (array.shape, array.strides, array.dtype)
    for name, value in options.items():
        parts = value if type(value) is tuple else (value,)
        if not all(type(part) in _PLAIN for part in parts):
            return None
        key += (name, type(value), value, *map(type, parts))  # True, 1 and 1.0 are equal as keys
    return tuple(key)


def _resolve(q: object, k: object, v: object, bias_grad: bool, options: Options) -> Problem:
    unknown = next((name for name in options if name not in Options.__annotations__), None)
    if unknown is not None:
        import difflib
        close = difflib.get_close_matches(unknown, Options.__annotations__, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise wrong_type(unknown, f"no such option{hint}", options[unknown])  # type: ignore[literal-required]
    layout = _layout(options)
    tensors = [_heads_first(name, value, layout) for name, value in (("q", q), ("k", k), ("v", v))]
    result_element = tensors[0].element
    _check_elements(tensors)
    _check_shapes(tensors[0].bits.shape, tensors[1].bits.shape, tensors[2].bits.shape, layout)
    tensors = [_arrays.cast(tensor, _wire_element(tensor.element, options)) for tensor in tensors]
    sizes = _Sizes.of(tensors, options)
    mask = options.get("mask")
    described = mask if isinstance(mask, Mask) else None
    if described is not None:
        resolve_mask(described, Sizes(*sizes.score_shape))
    alignment, offsets = _alignment(options, sizes)
    problem = Problem(
        q=tensors[0], k=tensors[1], v=tensors[2], layout=layout, batch=sizes.batch,
        scale=_checks.number("scale", options.get("scale"), None),
        softcap=_checks.number("softcap", options.get("softcap"), 0.0) or 0.0,
        causal=bool(options.get("causal")),
        alignment=alignment, offsets=offsets, window=resolve_window(options.get("window")), kv_lengths=sizes.kv_lengths,
        cu_seqlens_q=sizes.cu_seqlens_q, cu_seqlens_k=sizes.cu_seqlens_k, described=described,
        mask=None if described is not None else _mask(mask, sizes),
        bias=_bias(options.get("bias"), sizes, bias_grad), bias_shape=_shape_of(options.get("bias")),
        alibi_slopes=_slopes(options.get("alibi_slopes"), sizes),
        dropout_threshold=_dropout_threshold(options.get("dropout_p", 0.0)), seed=_seed(options),
        offset=_checks.uint64("offset", options.get("offset", 0)),
        sink=_sink(options.get("sink"), sizes), zero_rest=_checks.flag("zero_rest", options.get("zero_rest", False)),
        accumulate=_checks.word("accumulate", options.get("accumulate", "f32"), ("f32", "f16"), '"f32" or "f16"'),
        allow_nondeterministic=_checks.flag("allow_nondeterministic", options.get("allow_nondeterministic", False)),
        result_element=result_element)
    _check_together(problem)
    return problem


def resolve_rows(problem: Problem, field: str, value: object) -> Tensor:
    """A tensor of O's shape in the caller's layout, in the problem's element, heads first."""
    return _arrays.cast(_rows(field, value, problem), problem.element)


def _rows(field: str, value: object, problem: Problem) -> Tensor:
    tensor = _heads_first(field, value, problem.layout)
    if tensor.bits.shape != problem.o_shape:
        raise wrong(field, f"shape {problem.callers_shape(problem.o_shape)}", _shape_of(value))
    if tensor.element not in (problem.result_element, problem.element):
        raise wrong(field, f"{_NAMES[problem.result_element]}, as q is", _NAMES[tensor.element])
    return tensor


def resolve_gradients(problem: Problem, dout: object, dlse: object) -> Tuple[Tensor, Optional[Array], float]:
    """dout and dlse, and what they have been multiplied by: results are linear in them, and float16 loses small ones."""
    d_lse = None if dlse is None else resolve_lse(problem, "dlse", dlse)
    given, factor = _rows("dout", dout, problem), 1.0
    if (given.element, problem.element) == ("f32", "f16"):
        factor = _arrays.lift(_arrays.largest(given.bits, d_lse))
    if factor != 1.0:
        given = Tensor(given.bits * np.float32(factor), "f32")
        d_lse = None if d_lse is None else d_lse * np.float32(factor)
    return _arrays.cast(given, problem.element), d_lse, factor


def resolve_out(problem: Problem, field: str, value: object, shape: Tuple[int, ...]) -> Tensor:
    """A result's array of the caller: writable, of the caller's element and this heads-first shape."""
    tensor = _heads_first(field, value, problem.layout)
    if tensor.bits.shape != shape:
        raise wrong(field, f"shape {problem.callers_shape(shape)}", _shape_of(value))
    if tensor.element != problem.result_element:
        raise wrong(field, f"{_NAMES[problem.result_element]}, as q is", _NAMES[tensor.element])
    if not tensor.bits.flags.writeable:
        raise wrong(field, "a writable array", "one that is read-only")
    return tensor


def resolve_lse(problem: Problem, field: str, value: object) -> Array:
    """lse, dlse: float32 [batch, q_heads, q_len], packed [q_heads, total rows]; contiguous."""
    tensor = _arrays.take(field, value)
    if tensor.element != "f32":
        raise wrong(field, "float32", _NAMES[tensor.element])
    if tensor.bits.shape != problem.lse_shape:
        raise wrong(field, f"shape {problem.lse_shape}", tensor.bits.shape)
    return np.ascontiguousarray(tensor.bits)


_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class _Sizes:
    """Later checks compare with these; max_* are the longest sequence's."""

    batch: int
    q_heads: int
    max_q_len: int
    max_kv_len: int
    lengths_differ: bool
    kv_lengths: Optional[Array]
    cu_seqlens_q: Optional[Array]
    cu_seqlens_k: Optional[Array]

    @staticmethod
    def of(tensors: Sequence[Tensor], options: Options) -> _Sizes:
        q, k = tensors[0].bits, tensors[1].bits
        if options.get("cu_seqlens_q") is None:
            batch, q_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
            lengths = options.get("kv_lengths")
            kv_lengths = None if lengths is None else _arrays.integers("kv_lengths", lengths, 0, kv_len, (batch,))
            differ = q_len != kv_len or (kv_lengths is not None and bool((kv_lengths != q_len).any()))
            return _Sizes(batch, q.shape[1], q_len, kv_len, differ, kv_lengths, None, None)
        if options.get("kv_lengths") is not None:
            raise wrong("kv_lengths", "none beside cu_seqlens", "an array")
        cu_q = _cu_seqlens("cu_seqlens_q", options.get("cu_seqlens_q"), q.shape[1])
        cu_k = _cu_seqlens("cu_seqlens_k", options.get("cu_seqlens_k"), k.shape[1])
        if len(cu_q) != len(cu_k):
            raise wrong("cu_seqlens_k", f"{len(cu_q)} entries, as cu_seqlens_q has", len(cu_k))
        q_lens, kv_lens = np.diff(cu_q), np.diff(cu_k)
        return _Sizes(len(q_lens), q.shape[0], int(q_lens.max()), int(kv_lens.max()), bool((q_lens != kv_lens).any()),
                      None, cu_q, cu_k)

    @property
    def score_shape(self) -> Tuple[int, int, int, int]:
        return self.batch, self.q_heads, self.max_q_len, self.max_kv_len


def _layout(options: Options) -> str:
    packed = [options.get(name) is not None for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if packed[0] != packed[1]:
        missing = "cu_seqlens_k" if packed[0] else "cu_seqlens_q"
        raise wrong(missing, "given together with the other cu_seqlens", None)
    choices = ("thd", "htd") if packed[0] else ("bhld", "blhd")
    layout = options.get("layout")
    if layout is None:
        return choices[0]
    beside = "with cu_seqlens" if packed[0] else "without cu_seqlens"
    return _checks.word("layout", layout, choices, f'"{choices[0]}" or "{choices[1]}" {beside}')


def _heads_first(field: str, value: object, layout: str) -> Tensor:
    tensor = _arrays.take(field, value)
    axes = _TO_HEADS_FIRST[layout]
    if tensor.bits.ndim != len(axes):
        raise wrong(field, f"{len(axes)} dimensions ({layout})", f"shape {tensor.bits.shape}")
    return Tensor(tensor.bits.transpose(axes), tensor.element)


def _check_elements(tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip("kv", tensors[1:]):
        if tensor.element != tensors[0].element:
            raise wrong(name, f"{_NAMES[tensors[0].element]}, as q is", _NAMES[tensor.element])


def _wire_element(element: str, options: Options) -> str:
    precision = options.get("precision")
    if precision is None:
        return element
    _checks.word("precision", precision, ("f16", "bf16", "f32"), 'None, "f16" or "bf16"')
    if precision == element:
        return element
    if element != "f32":
        raise wrong("precision", f"None for {_NAMES[element]} tensors", repr(precision))
    return precision


def _check_shapes(q: Tuple[int, ...], k: Tuple[int, ...], v: Tuple[int, ...], layout: str) -> None:
    names = dict(zip(("batch", "heads", "length", "dim")[-len(q):], range(len(q))))
    for name, shape in (("q", q), ("k", k), ("v", v)):
        limits = {"batch": MAX_BATCH, "heads": MAX_HEADS, "length": MAX_LENGTH, "dim": MAX_HEAD_DIM}
        for axis, index in names.items():
            if not 1 <= shape[index] <= limits[axis]:
                raise wrong(name, f"{axis} 1..{limits[axis]} (layout {layout})", shape[index])
        if math.prod(shape) > MAX_ELEMENTS:
            raise wrong(name, f"at most {MAX_ELEMENTS} elements", math.prod(shape))
    if "batch" in names and k[0] != q[0]:
        raise wrong("k", f"batch {q[0]}, as q has", k[0])
    if k[-1] != q[-1]:
        raise wrong("k", f"dim {q[-1]}, as q has", k[-1])
    if v[:-1] != k[:-1]:
        for axis, index in names.items():
            if index < len(v) - 1 and v[index] != k[index]:
                raise wrong("v", f"{axis} {k[index]}, as k has", v[index])
    if q[-3] % k[-3] != 0:
        raise wrong("k", f"heads that divide q's {q[-3]}", k[-3])


def _cu_seqlens(field: str, value: object, total: int) -> Array:
    cu = _arrays.integers(field, value, 0, MAX_LENGTH)
    if cu.ndim != 1 or len(cu) < 2:
        raise wrong(field, "one dimension of at least 2 entries", f"shape {cu.shape}")
    if cu[0] != 0 or cu[-1] != total or (np.diff(cu) < 0).any():
        raise wrong(field, f"0, never falling, to the total length {total}", cu.tolist() if len(cu) < 20 else "others")
    return cu


def _alignment(options: Options, sizes: _Sizes) -> Tuple[str, Optional[Array]]:
    causal, align = options.get("causal"), options.get("align")
    if not (causal is None or isinstance(causal, (bool, np.bool_))):
        _checks.word("causal", causal, ("top_left", "bottom_right"), 'None, True, "top_left" or "bottom_right"')
    if isinstance(align, str) and align not in ("top_left", "bottom_right"):
        raise wrong("align", '"top_left", "bottom_right", an int or an int array [batch]', repr(align))
    if isinstance(causal, str):
        if align is not None and not (isinstance(align, str) and align == causal):
            raise wrong("align", f'None or "{causal}", since causal says so', repr(align))
        return causal, None
    if isinstance(align, str):
        return align, None
    if align is not None:
        return "offsets", _offsets(align, sizes)
    mask = options.get("mask")
    bounded = causal or options.get("window") is not None or options.get("alibi_slopes") is not None
    if (bounded or (isinstance(mask, Mask) and mask.relative)) and sizes.lengths_differ:
        raise wrong("align", '"top_left", "bottom_right", an int or an int array [batch], since causal, window, '
                    "alibi_slopes or the mask depend on it and the lengths of queries and keys differ", None)
    return "none", None


def _offsets(align: object, sizes: _Sizes) -> Array:
    if isinstance(align, bool):
        raise wrong_type("align", '"top_left", "bottom_right", an int or an int array [batch]', align)
    offsets = _arrays.integers("align", align, -MAX_LENGTH, MAX_LENGTH).reshape(-1)
    if len(offsets) not in (1, sizes.batch):
        raise wrong("align", f"1 or {sizes.batch} entries", len(offsets))
    return offsets


def resolve_window(window: object) -> Tuple[int, int]:
    """(left, right), -1 unbounded."""
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise wrong("window", "(left, right)", repr(window))
    sides = []
    for name, side in zip(("left", "right"), window):
        try:
            number = -1 if side is None else operator.index(side)
        except TypeError:
            raise wrong_type(f"window {name}", "an int", side) from None
        if not -1 <= number < 1 << 31:
            raise wrong(f"window {name}", "-1..2147483647", number)
        sides.append(number)
    return sides[0], sides[1]


def _fit(field: str, array: Array, sizes: _Sizes) -> Array:
    """The array with 4 dimensions, each 1 or full."""
    full = sizes.score_shape
    if array.ndim > 4 or any(size not in (1, most) for size, most in zip(array.shape[::-1], full[::-1])):
        raise wrong(field, f"a shape that broadcasts to {full} = [batch, q_heads, q_len, kv_len]", array.shape)
    return array[(None,) * (4 - array.ndim)]


def _mask(value: object, sizes: _Sizes) -> Optional[Array]:
    if value is None:
        return None
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise wrong_type("mask", "a bool array, or a Mask made by attnd.masks", value)
    if value.dtype != np.bool_:
        raise wrong("mask", "a bool array (True = attend); floats belong into bias", f"an array of {value.dtype}")
    return _arrays.without_broadcast(_fit("mask", value, sizes))


def _bias(value: object, sizes: _Sizes, want_gradient: bool) -> Optional[Tensor]:
    if value is None:
        if want_gradient:
            raise wrong("bias_grad", "False without a bias", True)
        return None
    tensor = _arrays.take("bias", value)
    bits = _fit("bias", tensor.bits, sizes)
    return Tensor(bits if want_gradient else _arrays.without_broadcast(bits), tensor.element)


def _shape_of(value: object) -> Tuple[int, ...]:
    return tuple(value.bits.shape if isinstance(value, Tensor) else getattr(value, "shape", ()))


def _slopes(value: object, sizes: _Sizes) -> Optional[Array]:
    if value is None:
        return None
    slopes = _arrays.finite_floats("alibi_slopes", value)
    if slopes.shape not in ((sizes.q_heads,), (sizes.batch, sizes.q_heads)):
        raise wrong("alibi_slopes", f"shape ({sizes.q_heads},) or ({sizes.batch}, {sizes.q_heads})", slopes.shape)
    return slopes.reshape(-1)


def _sink(value: object, sizes: _Sizes) -> Optional[Array]:
    if value is None:
        return None
    sink = _arrays.finite_floats("sink", value)
    if sink.shape != (sizes.q_heads,):
        raise wrong("sink", f"shape ({sizes.q_heads},)", sink.shape)
    return sink


def _dropout_threshold(p: object) -> int:
    number = _checks.number("dropout_p", p, 0.0)
    assert number is not None
    if not 0 <= number < 1:
        raise wrong("dropout_p", "0 <= p < 1", number)
    threshold = int(np.float32(number) * np.float32(256) + np.float32(0.5))  # as the wire rounds it
    if threshold > 255:
        raise wrong("dropout_p", "at most 255/256 after rounding to 256ths", number)
    return threshold


def _seed(options: Options) -> int:
    seed = options.get("seed")
    if seed is not None:
        return _checks.uint64("seed", seed)
    if options.get("dropout_p"):  # a seed of ours would drop the same at every call
        raise wrong("seed", "0..2**64-1 beside dropout_p, another for each forward", None)
    return 0


def _check_together(problem: Problem) -> None:
    if problem.softcap < 0:
        raise wrong("softcap", "0 or above", problem.softcap)
    if problem.sink is not None and problem.zero_rest:
        raise wrong("zero_rest", "False beside sink", True)
