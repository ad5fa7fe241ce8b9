"""The masks of transformers' models as options and descriptions, so that no array of rows × keys is made.

transformers builds a mask from functions of (batch, head, query, key): closures of transformers.masking_utils, which are
recognised by their names and cells, and a model's own, which are called with symbols. What is found is compared with the
function itself at random scores, once for each composition of transformers' functions and class of shapes, and each time for
a model's own. Everything else is sdpa_mask's dense mask.
"""
from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import sdpa_mask

from .._arrays import Array
from ..errors import InvalidArgument
from .dense import Evaluation
from .nodes import All, AllOf, BlockWindow, Documents, Groups, Mask, Window, simplified
from .sizes import Sizes
from .trace import trace
from .values import Numbers

Function = Callable[..., Any]


class Shape(NamedTuple):
    """The shape of a mask; row i is query position i + q_offset, key j position j + kv_offset."""

    batch: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int

    @property
    def align(self) -> int:
        return self.q_offset - self.kv_offset


class Description(NamedTuple):
    """Keywords of attnd.torch.attention that say what a mask says."""

    window: Tuple[int, int]  # (-1, -1): none
    mask: Optional[Mask]
    keys: Optional[Tensor]  # bool [batch, kv_length], which keys are no padding; None: all

    def options(self, shape: Shape) -> Dict[str, Any]:
        left, right = self.window
        options: Dict[str, Any] = {"align": shape.align} if self.window != (-1, -1) or self.mask is not None else {}
        if right == 0:
            options["causal"] = True
        if left >= 0 or right > 0:
            options["window"] = left, -1 if right == 0 else right
        if self.mask is not None:
            options["mask"] = self.mask
        if self.keys is None:
            return options
        lengths = self.keys.sum(1)
        if bool((self.keys == (torch.arange(shape.kv_length) < lengths[:, None])).all()):
            options["kv_lengths"] = lengths.to(torch.int32)
        elif self.mask is None:
            options["mask"] = self.keys[:, None, None]
        else:
            padding = Groups(Numbers(np.ones((shape.batch, shape.q_length), np.int32)),
                             Numbers(self.keys.numpy().astype(np.int32)))
            options["mask"] = self.mask & padding
        return options


class LazyMask(Tensor):
    """A bool mask [batch, 1, q_length, kv_length] that is a description until an operator of torch wants its numbers."""

    options: Dict[str, Any]
    _make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: Shape, device: Any, options: Dict[str, Any], make: Callable[[], Tensor]) -> LazyMask:
        size = (shape.batch, 1, shape.q_length, shape.kv_length)
        made: LazyMask = Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=device)
        made.options, made._make = options, make
        return made

    def dense(self) -> Tensor:
        found: Optional[Tensor] = self.__dict__.get("_dense")
        if found is None:
            found = self.__dict__["_dense"] = self._make()
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<mask {tuple(self.shape)}: {self.options}>"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (),  # type: ignore[override, unused-ignore]
                           keywords: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.dense() if isinstance(value, LazyMask) else value
        return function(*tree_map(plain, arguments), **tree_map(plain, keywords or {}))


def model_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
               mask_function: Optional[Function] = None, attention_mask: Optional[Tensor] = None,
               allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, device: Any = "cpu",
               **others: Any) -> Optional[Tensor]:
    """AttentionMaskInterface calls this; arguments and results as of transformers.masking_utils.sdpa_mask."""
    given = dict(others, batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                 kv_offset=kv_offset, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
                 allow_is_bidirectional_skip=allow_is_bidirectional_skip, device=device)
    if mask_function is not None:
        given["mask_function"] = mask_function
    if mask_function is None or torch.compiler.is_compiling() or attention_mask is not None and attention_mask.dim() != 2:
        dense: Optional[Tensor] = sdpa_mask(**given)
        return dense
    shape = Shape(batch_size, q_length, kv_length, int(q_offset), int(kv_offset))
    found = describe(mask_function, attention_mask, shape)
    if found is None:
        dense = sdpa_mask(**given)
        return dense
    if found.mask is None and found.keys is None:
        if allow_is_bidirectional_skip and found.window == (-1, -1):
            return None
        if allow_is_causal_skip and found.window == (-1, 0) and shape.align == (kv_length - 1 if q_length == 1 else 0):
            return None
    without_skips = dict(given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)

    def make() -> Tensor:
        made: Optional[Tensor] = sdpa_mask(**without_skips)
        assert made is not None  # which only a skip would be
        return made
    lazy: Tensor = LazyMask(shape, device, found.options(shape), make)
    return lazy


_TRACED = "a function of the model's own"
_refused: Set[Any] = set()  # compositions of functions that were not what their names say
_checked: Set[Any] = set()


def describe(function: Function, attention_mask: Optional[Tensor], shape: Shape) -> Optional[Description]:
    """Describes what the function shows of these rows and keys, if it is known."""
    names: List[str] = []
    mask = _mask_of(function, _Search(shape, names))
    kind = (tuple(names), shape.q_length == 1, shape.q_length == shape.kv_length, shape.q_offset > 0, shape.kv_offset > 0)
    if mask is None or kind in _refused:
        return None
    parts = [part for part in (mask.of if isinstance(mask, AllOf) else (mask,)) if not isinstance(part, All)]
    windows = [part for part in parts if isinstance(part, Window)]
    rest = tuple(part for part in parts if not isinstance(part, Window))
    found = Description((_least(window.left for window in windows), _least(window.right for window in windows)),
                        None if not rest else rest[0] if len(rest) == 1 else AllOf(rest), None)
    if kind not in _checked or _TRACED in names:
        if not _agrees(function, found, shape):
            _refused.add(kind)
            warnings.warn(f"attnd: the mask functions of transformers {transformers.__version__} are not those known here "
                          f"({', '.join(names)}); masks are made in full", RuntimeWarning, stacklevel=4)
            return None
        _checked.add(kind)
    keys = None if attention_mask is None else _keys(attention_mask, shape)
    return found._replace(keys=None if keys is None or bool(keys.all()) else keys)


def _least(sides: Any) -> int:
    """The narrowest bound; -1: none."""
    return min((side for side in sides if side >= 0), default=-1)


def _keys(attention_mask: Tensor, shape: Shape) -> Tensor:
    """bool [batch, kv_length] on the host; keys beyond attention_mask do not exist."""
    part = attention_mask[:, shape.kv_offset:shape.kv_offset + shape.kv_length].to("cpu", torch.bool)
    return torch.nn.functional.pad(part.expand(shape.batch, -1), (0, shape.kv_length - part.shape[1]))


# ---- Each function by its name.

class _Search(NamedTuple):
    """Knowledge at the place where a function is met. names: of what has been met. sequences: each position's packed
    sequence, [batch, length], where only pairs of one sequence count; None: all count."""

    shape: Shape
    names: List[str]
    sequences: Optional[Array] = None


def _mask_of(function: Function, search: _Search) -> Optional[Mask]:
    """The mask of positions Q = query - kv_offset and J = key - kv_offset."""
    make, shape = _KNOWN.get(_name_of(function)), search.shape
    if make is not None:
        search.names.append(_name_of(function))
        return make(_cells(function), search)
    search.names.append(_TRACED)
    if shape.q_offset or shape.kv_offset:
        return None
    masks = [trace(function, torch.tensor(b), torch.tensor(0)) for b in range(shape.batch)]
    return None if None in masks else simplified(tuple((mask,) for mask in masks if mask is not None))


def _name_of(function: Function) -> str:
    """"" of what is not transformers' own."""
    own = getattr(function, "__module__", "") == "transformers.masking_utils"
    return getattr(function, "__qualname__", "").replace(".<locals>", "") if own else ""


def _cells(function: Function) -> Dict[str, Any]:
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return dict(zip(function.__code__.co_freevars, values))


def _all_of(cells: Dict[str, Any], search: _Search) -> Optional[Mask]:
    functions = list(cells["mask_functions"])
    packed = [_host(_cells(part)["packed_sequence_mask"]) for part in functions if _name_of(part) == _PACKED]
    inner = search._replace(sequences=packed[0]) if packed else search
    return _combined([_mask_of(part, inner) for part in functions], lambda one, other: one & other)


def _any_of(cells: Dict[str, Any], search: _Search) -> Optional[Mask]:
    masks = [_mask_of(part, search) for part in cells["mask_functions"]]
    return _combined(masks, lambda one, other: one | other)


def _combined(masks: List[Optional[Mask]], combine: Callable[[Mask, Mask], Mask]) -> Optional[Mask]:
    known = [mask for mask in masks if mask is not None]
    return functools.reduce(combine, known) if len(known) == len(masks) else None


def _packed(cells: Dict[str, Any], search: _Search) -> Optional[Mask]:
    """Pairs of one sequence."""
    own = _host(cells["packed_sequence_mask"])
    if not _covers(own, search.shape):
        return None
    steps = np.diff(own[0])
    if bool((own != own[:1]).any()) or bool((steps < 0).any()):
        numbers = Numbers(own - own.min() + 1)
        return Groups(numbers, numbers)
    begins = np.flatnonzero(steps) + 1
    return Documents(Numbers(np.concatenate([[0], begins, [own.shape[1]]]).astype(np.int32)))


def _remapped(cells: Dict[str, Any], search: _Search) -> Optional[Mask]:
    """A function of positions that restart in each sequence. Relative functions do not see that, where only pairs of one
    sequence count and its positions rise by one."""
    own, positions = search.sequences, _host(cells["position_ids"])
    names: List[str] = []
    mask = _mask_of(cells["mask_function"], _Search(search.shape, names))
    if mask is None or own is None or positions.shape != own.shape or not _covers(own, search.shape):
        return None
    same, steps = own[:, 1:] == own[:, :-1], np.diff(positions, axis=1) == 1
    if not set(names) <= _RELATIVE or not (steps | ~same).all() or bool((own[:, 1:] < own[:, :-1]).any()):
        return None
    search.names.extend(names)
    return mask


def _covers(numbers: Array, shape: Shape) -> bool:
    """One for each row and key, which are the same positions."""
    return not shape.q_offset and not shape.kv_offset and numbers.shape[1] == shape.q_length == shape.kv_length


def _host(tensor: Tensor) -> Array:
    array: Array = tensor.detach().to("cpu", torch.int64).numpy().astype(np.int32)
    return array


def _chunked(cells: Dict[str, Any], search: _Search) -> Mask:
    shift = search.shape.kv_offset - _host(cells["left_padding"]).reshape(-1)
    return BlockWindow(int(cells["chunk_size"]), 0, 0, Numbers(shift if (shift != shift[0]).any() else shift[:1]))


def _blockwise(cells: Dict[str, Any], search: _Search) -> Optional[Mask]:
    ids, shape = np.maximum(_host(cells["block_sequence_ids"]), -1) + 1, search.shape
    rows = ids[:, shape.q_offset:shape.q_offset + shape.q_length]
    keys = ids[:, shape.kv_offset:shape.kv_offset + shape.kv_length]
    if rows.shape[1] != shape.q_length or keys.shape[1] != shape.kv_length:
        return None
    return Groups(Numbers(rows), Numbers(keys))


_PACKED = "packed_sequence_mask_function.inner_mask"
_RELATIVE = {"causal_mask_function", "bidirectional_mask_function", "and_masks.and_mask", "or_masks.or_mask",
             "sliding_window_overlay.inner_mask", "sliding_window_bidirectional_overlay.inner_mask"}
_KNOWN: Dict[str, Callable[[Dict[str, Any], _Search], Optional[Mask]]] = {
    "causal_mask_function": lambda cells, search: Window(-1, 0),
    "bidirectional_mask_function": lambda cells, search: All(),
    "sliding_window_overlay.inner_mask": lambda cells, search: Window(int(cells["sliding_window"]) - 1, -1),
    "sliding_window_bidirectional_overlay.inner_mask":
        lambda cells, search: Window(int(cells["sliding_window"]), int(cells["sliding_window"])),
    "chunked_overlay.inner_mask": _chunked,
    "blockwise_overlay.inner_mask": _blockwise,
    _PACKED: _packed,
    "remap_positions_for_packed_sequence.inner_mask": _remapped,
    "and_masks.and_mask": _all_of,
    "or_masks.or_mask": _any_of,
}


def _agrees(function: Function, found: Description, shape: Shape) -> bool:
    """At 16 rows × 32 keys."""
    random = np.random.default_rng(0)
    window = Window(*found.window)
    mask = window if found.mask is None else window & found.mask
    try:
        evaluation = Evaluation(mask, Sizes(shape.batch, 1, shape.q_length, shape.kv_length))
    except InvalidArgument:  # a captured array is shorter than the problem
        return False
    for _ in range(16):
        b, i = int(random.integers(shape.batch)), int(random.integers(shape.q_length))
        near = np.clip(i + shape.align + random.integers(-3, 4, 8), 0, shape.kv_length - 1)  # where most masks change
        j = np.concatenate([near, random.integers(shape.kv_length, size=24)])
        at = [torch.full((32,), x) for x in (b, 0, i + shape.q_offset)]
        expected = function(*at, torch.from_numpy(j) + shape.kv_offset)
        got = evaluation.rows(b, range(i, i + 1), shape.kv_length, shape.align)[0, 0, j]
        if not np.array_equal(expected.expand(32).cpu().numpy(), got):
            return False
    return True
