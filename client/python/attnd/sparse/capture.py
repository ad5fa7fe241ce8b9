"""Block patterns built from captured attention maps. Needs NumPy alone."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Literal, Optional, Tuple, Union

import numpy as np

from .. import _checks, _native, masks
from .._arrays import Array
from .._call import Call, CallOptions
from .._capture import MAX_BLOCK, Capture, Captured, capturing
from .._protobuf import float64, message, number
from ..errors import FailedPrecondition, brief, wrong
from ..masks.nodes import Mask

__all__ = ["Capture", "Captured", "build_pattern", "capturing", "pattern_layout"]

_MAX_BLOCKS = 4096  # rows of blocks of a pattern


@brief
def build_pattern(source: Union[Captured, Array], *, rule: Literal["flood", "top_k"], block: Optional[int] = None,
                  quantile: Optional[float] = None, density: Optional[float] = None, diagonals: bool = False,
                  force_diagonal: bool = False, min_blocks_per_row: int = 0) -> Mask:
    """The blocks of attention that matter, as a mask for every head and batch entry.

    source: a Captured, or float32 [n, n] averages or scores of blocks. block: rows and keys of a block; None: that of the
        capture.
    rule: "flood": SPION's walk from every block of the first row and column to the largest of the next, which keeps blocks
        above the `quantile` of the map (torch.quantile's, linear). "top_k": int(density * n * n) largest blocks, with
        force_diagonal int(density * n * n - n) and the diagonal; of equal ones the first in row-major order.
    diagonals: of a map that is kept: average it after SPION's convolution with the 31 x 31 identity.
    force_diagonal: keep the diagonal's blocks, as SPION's rules do. min_blocks_per_row: rows of blocks with fewer get their
        largest ones too.

    Raises InvalidArgument naming the argument, FailedPrecondition CAPTURE_LOST where the server has the map no longer.
    """
    size = block if block is not None or not isinstance(source, Captured) else source.block
    layout = pattern_layout(source, rule=rule, block=size, quantile=quantile, density=density, diagonals=diagonals,
                            force_diagonal=force_diagonal, min_blocks_per_row=min_blocks_per_row)
    return masks.blocks(layout, _checks.integer("block", size, 1, MAX_BLOCK))


def pattern_layout(source: Union[Captured, Array], *, rule: str, block: Optional[int], quantile: Optional[float] = None,
                   density: Optional[float] = None, diagonals: bool = False, force_diagonal: bool = False,
                   min_blocks_per_row: int = 0) -> Array:
    """build_pattern's blocks, bool [n, n]."""
    _checks.word("rule", rule, ("flood", "top_k"), '"flood" or "top_k"')
    captured = source if isinstance(source, Captured) else None
    kept = captured if diagonals else None
    if diagonals and (captured is None or not captured.kept):
        raise wrong("diagonals", "False, or a map that the server keeps (keep=True)", "True")
    size = _checks.integer("block", block, 1, MAX_BLOCK)
    if captured is not None and kept is None and size != captured.block:
        raise wrong("block", f"{captured.block}, as captured", str(size))
    pooled = np.ascontiguousarray(source if captured is None else captured.pooled, np.float32)
    if pooled.ndim != 2 or pooled.shape[0] != pooled.shape[1]:
        raise wrong("source", "[n, n] averages of blocks", str(list(pooled.shape)))
    request = number(3, size) + number(6, diagonals) + number(7, _checks.flag("force_diagonal", force_diagonal)) + \
        number(8, _checks.integer("min_blocks_per_row", min_blocks_per_row, 0, _MAX_BLOCKS))
    if rule == "flood":
        request += message(4, float64(1, _needed("quantile", quantile, "flood")))
        _unwanted("density", density, "flood")
    else:
        request += message(5, float64(1, _needed("density", density, "top_k")))
        _unwanted("quantile", quantile, "top_k")
    if kept is None:
        request += message(2, pooled.tobytes())
    return _layout_of(_build(request, kept))


def _needed(name: str, value: Optional[float], rule: str) -> float:
    found = _checks.number(name, value, None)
    if found is None:
        raise wrong(name, f'a number beside rule="{rule}"', "None")
    return found


def _unwanted(name: str, value: Optional[float], rule: str) -> None:
    if value is not None:
        raise wrong(name, f'None beside rule="{rule}"', str(value))


def _build(request: bytes, kept: Optional[Captured]) -> Dict[str, Any]:
    library, pointer, token = _native.library(), None, None
    if kept is not None:
        handle = kept.handle()
        if handle is None:
            raise FailedPrecondition("source: a map of another process is not kept for this one", reason="CAPTURE_LOST")
        library, pointer, token = handle.library, handle.pointer, kept.token.encode()
    call = Call(library, CallOptions())
    call.run(library.attnd_build_pattern, pointer, request, len(request), token)
    return call.result()


def _layout_of(built: Dict[str, Any]) -> Array:
    rows = len(built["indptr"]) - 1
    layout = np.zeros((rows, rows), bool)
    for row, (begin, end) in enumerate(_pairs(built["indptr"])):
        layout[row, built["indices"][begin:end]] = True
    return layout


def _pairs(bounds: List[int]) -> Iterator[Tuple[int, int]]:
    return zip(bounds[:-1], bounds[1:])
