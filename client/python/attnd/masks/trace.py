"""A FlexAttention mask_mod as a mask by description: called with symbols for query and key, whose comparisons are masks.

Symbols are sums of the query q, the key k, their quotients and remainders by constants, and entries of captured arrays at q
or k. What a comparison of two says is known where it is one of the kinds of attnd.masks; a mask_mod that does anything else
is evaluated, 64 rows at a time.
"""
from __future__ import annotations

import operator
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import _checks
from .._arrays import Array
from ..errors import wrong, wrong_type
from .dense import Evaluation
from .nodes import (COLUMNS, ROWS, All, BlockWindow, Documents, Global, Groups, Mask, Not, Prefix, Stride,
                          StrideColumns, Window, simplified)
from .recognise import BLOCK, Classified, block_list, classify
from .sizes import Sizes
from .values import MAX_INT, MAX_LENGTH, MAX_PATTERNS, Numbers

_Atom = Tuple[Any, ...]  # ("q",), ("k",), ("//", "q", p, c), ("%", terms, c, p), ("abs", terms, c), ("at", "q", Numbers)
_MOST_SCORES = 1 << 22  # of one call of mask_mod


class _Unknown(Exception):
    """The mask_mod says what no kind of mask says."""


class _Watched(Tensor):
    """A number that tells whether anybody reads it."""

    is_read = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        def plain(value: Any) -> Any:
            if not isinstance(value, _Watched):
                return value
            value.is_read = True
            return value.as_subclass(Tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*tree_map(plain, arguments), **tree_map(plain, keywords or {}))


def _refuse_dependence(mask_mod: Callable[..., Any], counts: Dict[str, Optional[int]], device: Any) -> None:
    """Refuses a mask_mod that reads the batch entry or the head where the caller has not said how many there are."""
    zeros = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
    watched = {name: zero.as_subclass(_Watched) for name, zero in zip(counts, zeros)}
    try:
        mask_mod(*watched.values(), *zeros[2:])
    except Exception:  # noqa: BLE001  whatever a function does with one score; it is called with more below
        return
    for name, zero in watched.items():
        if counts[name] is None and zero.is_read:
            raise wrong(name, "how many there are, since mask_mod depends on it", None)


def from_mask_mod(mask_mod: Any, batch: Optional[int], heads: Optional[int], rows: int, keys: int, device: Any) -> Mask:
    """attnd.masks.from_mask_mod."""
    if not callable(mask_mod):
        raise wrong_type("mask_mod", "a function of batch, head, query and key", mask_mod)
    if batch is None or heads is None:
        _refuse_dependence(mask_mod, {"batch": batch, "heads": heads}, device)
        batch, heads = batch or 1, heads or 1
    sizes = Sizes(_checks.integer("batch", batch, 1, MAX_PATTERNS), _checks.integer("heads", heads, 1, MAX_PATTERNS),
                  _checks.integer("rows", rows, 1, MAX_LENGTH), _checks.integer("keys", keys, 1, MAX_LENGTH))
    if batch * heads > MAX_PATTERNS:
        raise wrong("batch · heads", f"at most {MAX_PATTERNS} masks; 1 of what they do not depend on", batch * heads)
    made: List[Tuple[Mask, ...]] = []
    with torch.no_grad():
        for b in range(batch):
            masks = [_one(mask_mod, torch.tensor(b, device=device), torch.tensor(h, device=device), sizes)
                     for h in range(heads)]
            made.append(tuple(masks))
    return simplified(tuple(made))


def _one(mask_mod: Callable[..., Any], b: Tensor, h: Tensor, sizes: Sizes) -> Mask:
    found = trace(mask_mod, b, h)
    if found is not None and _agrees(mask_mod, b, h, found, sizes):
        return found
    return block_list(_evaluate(mask_mod, b, h, sizes), sizes.rows, sizes.keys)


def trace(mask_mod: Callable[..., Any], b: Tensor, h: Tensor) -> Optional[Mask]:
    """Traces it for one batch entry and head, rows and queries being the same; None: no kind of mask says it."""
    try:
        found = _truth(mask_mod(b, h, _Sum({("q",): 1}), _Sum({("k",): 1})))
    except Exception:  # noqa: BLE001  whatever a function does with what is no tensor
        return None
    return found.mask


def _agrees(mask_mod: Callable[..., Any], b: Tensor, h: Tensor, found: Mask, sizes: Sizes) -> bool:
    """At 4096 scores: the corners, around the diagonal, and anywhere."""
    random = np.random.default_rng(0)
    rows = np.unique([0, sizes.rows - 1, *random.integers(sizes.rows, size=62)])
    try:
        evaluation = Evaluation(found, Sizes(1, 1, sizes.rows, sizes.keys))
    except ValueError:  # what it captures is shorter than the problem
        return False
    for row in rows.tolist():
        near = np.clip(row + random.integers(-9, 10, 30), 0, sizes.keys - 1)
        key = np.concatenate([near, [0, sizes.keys - 1], random.integers(sizes.keys, size=32)])
        expected = _call(mask_mod, b, h, np.full(len(key), row), key)
        if not np.array_equal(expected, evaluation.rows(0, range(row, row + 1), sizes.keys, 0)[0, 0, key]):
            return False
    return True


def _call(mask_mod: Callable[..., Any], b: Tensor, h: Tensor, row: Array, key: Array) -> Array:
    """Calls it with scores one by one, as flex_attention does."""
    q, k = torch.from_numpy(row).to(b.device), torch.from_numpy(key).to(b.device)
    found = torch.vmap(mask_mod, in_dims=(None, None, 0, 0))(b, h, q, k)
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != q.shape:
        raise wrong_type("mask_mod", "a function whose result is one bool tensor", found)
    array: Array = found.cpu().numpy()
    return array


def _evaluate(mask_mod: Callable[..., Any], b: Tensor, h: Tensor, sizes: Sizes) -> Iterator[Classified]:
    """Rows of blocks at a time: no array of rows × keys."""
    step = max(1, _MOST_SCORES // (sizes.keys * BLOCK)) * BLOCK
    key = np.arange(sizes.keys)
    for begin in range(0, sizes.rows, step):
        row = np.arange(begin, min(begin + step, sizes.rows))
        seen = _call(mask_mod, b, h, row.repeat(sizes.keys), np.tile(key, len(row)))
        yield classify(np.packbits(seen.reshape(len(row), -1), axis=1, bitorder="little"), sizes.keys)


# ---- Symbols.

class _Symbol:
    """Stands for a number or a truth in functions of torch and Python's operators."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        make = _FUNCTIONS.get(name)
        if make is None or keywords:
            raise _Unknown(name)
        return make(*arguments)

    def __bool__(self) -> bool:
        raise _Unknown("a branch")


class _Truth(_Symbol):
    """A bool for each row and key."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __and__(self, other: object) -> _Truth:
        return _Truth(self.mask & _truth(other).mask)

    def __or__(self, other: object) -> _Truth:
        return _Truth(self.mask | _truth(other).mask)

    def __invert__(self) -> _Truth:
        return _Truth(~self.mask)

    def logical_not(self) -> _Truth:
        return ~self

    __rand__, __ror__ = __and__, __or__
    logical_and, logical_or = __and__, __or__


class _Sum(_Symbol):
    """Σ factor · atom + constant."""

    def __init__(self, terms: Dict[_Atom, int], constant: int = 0) -> None:
        self.terms = {atom: factor for atom, factor in terms.items() if factor}
        self.constant = constant

    @property
    def frozen(self) -> Tuple[Any, int]:
        return tuple(sorted(self.terms.items(), key=repr)), self.constant

    def __add__(self, other: object) -> _Sum:
        right, terms = _sum(other), dict(self.terms)
        for atom, factor in right.terms.items():
            terms[atom] = terms.get(atom, 0) + factor
        return _Sum(terms, self.constant + right.constant)

    def __neg__(self) -> _Sum:
        return _Sum({atom: -factor for atom, factor in self.terms.items()}, -self.constant)

    def __sub__(self, other: object) -> _Sum:
        return self + -_sum(other)

    def __rsub__(self, other: object) -> _Sum:
        return _sum(other) - self

    def __mod__(self, other: object) -> _Sum:
        return _Sum({("%", *self.frozen, _positive(other)): 1})

    def __floordiv__(self, other: object) -> _Sum:
        axis = _axis(self.terms)
        return _Sum({("//", axis, _positive(other), self.constant): 1})

    def __abs__(self) -> _Sum:
        return _Sum({("abs", *self.frozen): 1})

    def __le__(self, other: object) -> _Truth:
        return _at_most(self - other)

    def __lt__(self, other: object) -> _Truth:
        return _at_most(self - other + 1)

    def __ge__(self, other: object) -> _Truth:
        return _at_most(_sum(other) - self)

    def __gt__(self, other: object) -> _Truth:
        return _at_most(_sum(other) - self + 1)

    def __eq__(self, other: object) -> _Truth:  # type: ignore[override]
        return _equal(self - other)

    def __ne__(self, other: object) -> _Truth:  # type: ignore[override]
        return ~_equal(self - other)

    __hash__ = None  # type: ignore[assignment]
    __radd__ = __add__
    abs = __abs__


_FUNCTIONS: Dict[str, Callable[..., Any]] = {
    "add": lambda a, b: _sum(a) + b, "sub": lambda a, b: _sum(a) - b, "rsub": lambda a, b: _sum(b) - a,
    "abs": abs, "remainder": operator.mod, "floor_divide": operator.floordiv,
    "le": lambda a, b: _sum(a) <= b, "lt": lambda a, b: _sum(a) < b, "ge": lambda a, b: _sum(a) >= b,
    "gt": lambda a, b: _sum(a) > b, "eq": lambda a, b: _sum(a) == b, "ne": lambda a, b: _sum(a) != b,
    **{prefix + "and": lambda a, b: _truth(a) & b for prefix in ("", "logical_", "bitwise_")},
    **{prefix + "or": lambda a, b: _truth(a) | b for prefix in ("", "logical_", "bitwise_")},
    **{prefix + "not": lambda a: ~_truth(a) for prefix in ("logical_", "bitwise_")},
    "getitem": lambda values, index: _entries(values, index),
}


def _sum(value: object) -> _Sum:
    return value if isinstance(value, _Sum) else _Sum({}, _constant(value))


def _constant(value: object) -> int:
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise _Unknown("no integer")
    return int(value)


def _positive(value: object) -> int:
    number = _constant(value)
    if not 1 <= number <= MAX_INT:
        raise _Unknown("no divisor")
    return number


def _truth(value: object) -> _Truth:
    if isinstance(value, _Truth):
        return value
    if isinstance(value, _Sum) and len(value.terms) == 1 and value.constant == 0:
        (atom, factor), = value.terms.items()  # an array of bools
        if factor == 1 and atom[0] == "at" and atom[2].array.dtype == np.bool_:
            return _chosen(atom[1], atom[2].array)
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype == torch.bool:
        value = bool(value)
    if not isinstance(value, bool):
        raise _Unknown("no truth")
    return _Truth(All() if value else Not(All()))


def _axis(terms: Dict[_Atom, int]) -> str:
    """"q" or "k", if that is all."""
    (atom, factor), *others = terms.items()
    if others or factor != 1 or atom not in (("q",), ("k",)):
        raise _Unknown("neither query nor key")
    axis: str = atom[0]
    return axis


def _entries(values: Tensor, index: Any) -> _Sum:
    """values[index], of which the last is a query or key and the others are numbers."""
    *lead, last = index if isinstance(index, tuple) else (index,)
    for one in lead:
        values = values[_constant(one)]
    if not isinstance(last, _Sum) or last.constant or not isinstance(values, Tensor) or values.dim() != 1:
        raise _Unknown("an index")
    if values.is_floating_point() or values.is_complex():
        raise _Unknown("no integers")
    return _Sum({("at", _axis(last.terms), Numbers(values.cpu().numpy())): 1})


# ---- What comparisons say.

def _at_most(sum_: _Sum) -> _Truth:
    """sum ≤ 0."""
    terms, c = sum_.terms, sum_.constant
    if not terms:
        return _truth(c <= 0)
    atoms = {atom[0] for atom in terms}
    if len(terms) == 1:
        return _one_at_most(*next(iter(terms.items())), c)
    if terms == {("q",): 1, ("k",): -1}:  # k ≥ q + c
        return _Truth(_distance_at_least(c))
    if terms == {("q",): -1, ("k",): 1}:  # k ≤ q − c
        return ~_Truth(_distance_at_least(1 - c))
    if atoms == {"//"} and len(terms) == 2:
        (_, axis, p, shift), (_, other, q, same) = sorted(terms, key=repr)
        if (p, shift) == (q, same) and (axis, other) == ("k", "q") and sorted(terms.values()) == [-1, 1]:
            rising = terms["//", "k", p, shift] == 1  # blocks of k − blocks of q ≤ −c, or ≥ c
            return _Truth(BlockWindow(p, -MAX_INT if rising else c, -c if rising else MAX_INT, _shift(shift)))
    raise _Unknown("an inequality")


def _distance_at_least(c: int) -> Mask:
    """k − q ≥ c."""
    return Window(-c, -1) if c <= 0 else Not(Window(-1, c - 1))


def _one_at_most(atom: _Atom, factor: int, c: int) -> _Truth:
    """factor · atom + c ≤ 0."""
    if abs(factor) != 1:
        raise _Unknown("a factor")
    if factor < 0:  # atom ≥ c
        return ~_one_at_most(atom, 1, 1 - c)
    if atom[0] in "qk":
        return _below(atom[0], 1 - c)
    if atom[0] == "//":
        return _below(atom[1], (1 - c) * atom[2] - atom[3])
    if atom[0] == "abs":
        inner = _Sum(dict(atom[1]), atom[2])
        return _at_most(inner + c) & _at_most(-inner + c)
    if atom[0] == "at":
        return _chosen(atom[1], atom[2].array.astype(np.int64) + c <= 0)
    return _remainder(atom, 0, -c + 1)


def _below(axis: str, end: int) -> _Truth:
    """Rows or keys below `end`."""
    end = max(0, min(end, MAX_LENGTH))
    return _Truth(Prefix(Numbers(np.array([end], np.int32))) if axis == "k" else Global(((0, end),) if end else (), ROWS))


def _remainder(atom: _Atom, low: int, high: int) -> _Truth:
    """low ≤ sum mod p < high."""
    _, terms, c, p = atom
    low, high = max(0, min(low, p)), max(0, min(high, p))
    if low >= high:
        return _truth(False)
    if dict(terms) == {("k",): 1}:
        begin, end = (low - c) % p, (high - 1 - c) % p + 1
        if begin < end:
            return _Truth(StrideColumns(p, begin, end))
        return _Truth(StrideColumns(p, begin, p) | StrideColumns(p, 0, end))
    if high - low == 1 and dict(terms) == {("q",): 1, ("k",): -1}:
        return _Truth(Stride(p, (low - c) % p))
    if high - low == 1 and dict(terms) == {("q",): -1, ("k",): 1}:
        return _Truth(Stride(p, (c - low) % p))
    raise _Unknown("a remainder")


def _equal(sum_: _Sum) -> _Truth:
    """sum = 0."""
    terms, c = sum_.terms, sum_.constant
    kinds = sorted(atom[0] for atom in terms)
    if kinds == ["%"]:
        (atom, factor), = terms.items()
        if abs(factor) == 1:
            value = -c * factor
            return _remainder(atom, value, value + 1)
    if kinds == ["at", "at"] and c == 0 and sorted(terms.values()) == [-1, 1]:
        (_, axis, row), (_, other, key) = sorted(terms, key=lambda atom: str(atom[1]), reverse=True)
        if (axis, other) == ("q", "k"):
            return _Truth(_same_id(row.array, key.array))
    if kinds == ["%", "%"] and c == 0 and sorted(terms.values()) == [-1, 1]:
        one, other_ = terms
        if one[3] == other_[3]:
            return _remainder(("%", *(_Sum(dict(one[1]), one[2]) - _Sum(dict(other_[1]), other_[2])).frozen, one[3]), 0, 1)
    return _at_most(sum_) & _at_most(-sum_)


def _same_id(row: Array, key: Array) -> Mask:
    """row[q] = key[k], whatever their values."""
    begins = np.flatnonzero(np.diff(row)) + 1
    if np.array_equal(row, key) and len(np.unique(row)) == len(begins) + 1:  # one after the other
        return Documents(Numbers(np.concatenate([[0], begins, [len(row)]]).astype(np.int32)))
    ids = {value: n + 1 for n, value in enumerate(np.unique(np.concatenate([row, key])).tolist())}
    return Groups(*(Numbers(np.array([ids[value] for value in array.tolist()], np.int32)) for array in (row, key)))


def _chosen(axis: str, seen: Array) -> _Truth:
    """The rows, or the keys, for which seen is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], seen, [False]]).astype(np.int8)))
    spans = tuple(zip(edges[0::2].tolist(), edges[1::2].tolist()))
    return _Truth(Global(spans, ROWS if axis == "q" else COLUMNS))


def _shift(shift: int) -> Numbers:
    return Numbers(np.array([shift] if shift else [], np.int32))
