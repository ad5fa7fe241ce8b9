"""When attention has settled, and which blocks then stay: SPION's and SAT's rules with their constants."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional

from .. import _checks
from ..errors import brief, wrong


@dataclass(frozen=True)
class Rule:
    """change: a layer has settled when |d_t - d_(t-1)| / d_(t-1), in percent, is below it, d_t being the distance of two
    captures. skewness: and when the map's is at least this.
    block, builder: build_pattern's arguments; learned: from the layer's own scores Pat Pat^T (SAT) instead of its map.
    """

    block: int
    change: float
    skewness: Optional[float]
    builder: Dict[str, Any]
    learned: bool = False


@brief
def spion(block: int, *, quantile: Optional[float] = None, density: Optional[float] = None, convolve: bool = True,
          change: float = 15.0, min_blocks_per_row: int = 0) -> Rule:
    """SPION (arXiv 2309.12578). quantile: its flood rule, SPION-CF, with convolve=False SPION-F; density: the largest
    blocks and the diagonal, SPION-C. Exactly one of the two. change: in percent. (Its authors compare the integer part,
    which for 15 is the same.)"""
    if (quantile is None) == (density is None):
        raise wrong("quantile", "one of quantile and density", "none" if quantile is None else "both")
    chosen: Dict[str, Any] = {"rule": "flood", "quantile": quantile} if density is None else \
        {"rule": "top_k", "density": density}
    builder = dict(chosen, diagonals=_checks.flag("convolve", convolve), force_diagonal=True,
                   min_blocks_per_row=min_blocks_per_row)
    return Rule(_checks.integer("block", block, 1, 65536), _positive("change", change), None, builder)


@brief
def sat(block: int, *, density: float, change: float = 1.3, skewness: float = 1.7, learned: bool = True,
        min_blocks_per_row: int = 0) -> Rule:
    """SAT (doi 10.1109/ACCESS.2024.3425638): a skewness of at least `skewness` and a change below `change` percent. The
    blocks are the largest of the layer's learned Pat Pat^T, or, with learned=False, of its map."""
    builder = {"rule": "top_k", "density": density, "min_blocks_per_row": min_blocks_per_row}
    return Rule(_checks.integer("block", block, 1, 65536), _positive("change", change),
                _positive("skewness", skewness), builder, _checks.flag("learned", learned))


def _positive(name: str, value: float) -> float:
    found = _checks.number(name, value, None)
    if found is None or not found > 0:
        raise wrong(name, "a number above 0", str(value))
    return found
