"""Tracker: whether the attention of all layers has settled."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from .. import _checks
from ..errors import brief, wrong, wrong_type
from .capture import Captured
from .rules import Rule


@dataclass(frozen=True)
class LayerReport:
    """distance: of the last two maps; change: of the last two distances, in percent; None where there are not enough yet.
    settled: by the rule. why: what is missing, in words; "" when settled."""

    distance: Optional[float]
    change: Optional[float]
    skewness: float
    settled: bool
    why: str


@dataclass(frozen=True)
class Report:
    """The outcome of an observation. captures: how many in a row so far. settled: all layers, after the warm-up."""

    step: int
    captures: int
    layers: Tuple[LayerReport, ...]
    settled: bool

    def __str__(self) -> str:
        if self.settled:
            return f"step {self.step}: attention has settled in all {len(self.layers)} layers"
        first = next((n for n, layer in enumerate(self.layers) if not layer.settled), None)
        why = "the warm-up is not over" if first is None else f"layer {first}: {self.layers[first].why}"
        return f"step {self.step}: {sum(layer.settled for layer in self.layers)} of {len(self.layers)} layers have " \
               f"settled; {why}"


class Tracker:
    """Looks at each capture of all layers, in their order, and says when to switch. One thread.

    A change of distance needs three captures. A layer whose previous distance is 0, or whose map is constant, has not
    settled, and the report says so. warmup: steps before which nothing settles. If it never settles, dense training goes
    on; `last` says what is missing.
    """

    @brief
    def __init__(self, layers: int, rule: Rule, *, warmup: int = 0) -> None:
        if not isinstance(rule, Rule):
            raise wrong_type("rule", "that of attnd.sparse.spion or sat", rule)
        self._layers = _checks.integer("layers", layers, 1, 65536)
        self._rule, self._warmup = rule, _checks.integer("warmup", warmup, 0, 1 << 62)
        self._distances: List[Optional[float]] = [None] * self._layers
        self._captures = 0
        self.last: Optional[Report] = None

    @brief
    def observe(self, step: int, captured: Sequence[Captured]) -> Report:
        """Raises InvalidArgument naming the layer whose map holds NaN or infinity, or has no distance though it should."""
        if len(captured) != self._layers:
            raise wrong("captured", f"{self._layers} maps, one a layer", str(len(captured)))
        for number, one in enumerate(captured):
            if not math.isfinite(one.mean) or not math.isfinite(one.variance):
                raise wrong(f"captured[{number}]", f"a finite map of layer {number}", "NaN or infinity in it")
            if self._captures > 0 and one.distance is None:
                raise wrong(f"captured[{number}]", "a distance from the capture before (previous=)", "none")
        layers = tuple(self._layer(n, one) for n, one in enumerate(captured))
        self._captures += 1
        self._distances = [one.distance for one in captured]
        settled = step >= self._warmup and all(layer.settled for layer in layers)
        self.last = Report(step, self._captures, layers, settled)
        return self.last

    def restart(self) -> None:
        """Forgets all captures: the next is the first again. After CAPTURE_LOST."""
        self._distances, self._captures = [None] * self._layers, 0

    def _layer(self, number: int, one: Captured) -> LayerReport:
        before, now, change = self._distances[number], one.distance, None
        if before is None or now is None:
            why = f"{self._captures + 1} of three captures"
        elif before == 0:
            why = "the distance before was 0, so that a change of it means nothing"
        else:
            change = abs(now - before) / before * 100
            why = self._missing(change, one.skewness)
        return LayerReport(now, change, one.skewness, why == "", why)

    def _missing(self, change: float, skewness: float) -> str:
        rule = self._rule
        if not change < rule.change:
            return f"the distance changed by {change:.3g} %, the rule wants below {rule.change:g}"
        if rule.skewness is None:
            return ""
        if math.isnan(skewness):
            return "the map is constant, so that it has no skewness"
        return "" if skewness >= rule.skewness else f"a skewness of {skewness:.3g}, the rule wants {rule.skewness:g}"
