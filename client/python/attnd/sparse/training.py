"""SparseAttention, an attention that becomes sparse, and SparseTraining, which decides when. Needs torch."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from .. import _checks, masks
from ..errors import AttndError, FailedPrecondition, brief, wrong, wrong_type
from ..masks.nodes import Mask
from .capture import Capture, Captured, capturing, pattern_layout
from .rules import Rule
from .tracker import Report, Tracker


class SparseAttention(torch.nn.Module):
    """attnd.torch.attention, dense until it is given a pattern and sparse from then on.

        out = layer(q, k, v, kv_lengths=lengths)      # attnd.torch.attention's options, but mask and zero_rest

    zero_rest: pruned keys stay in the softmax's sum as scores of 0, as SPION and SAT train; False: the softmax is of the
    pattern's keys alone. learned: (rows, head_dim) of SAT's pattern: a parameter Pat [rows / block, head_dim], whose Pat
    Pat^T learns the pooled map (pattern_loss). block: of that pattern. The state dict holds phase and pattern.
    """

    def __init__(self, *, zero_rest: bool = True, learned: Optional[Tuple[int, int]] = None, block: int = 0,
                 server: str = "") -> None:
        super().__init__()
        self.zero_rest, self._server = zero_rest, server
        self.mask: Optional[Mask] = None
        self.captured: Optional[Captured] = None
        self._layout: Optional[np.ndarray[Any, np.dtype[np.bool_]]] = None
        self._block = 0
        self._wish: Optional[Capture] = None
        self.lost = False  # the map before was lost with the last capture
        if learned is not None:
            blocks = -(-learned[0] // _checks.integer("block", block, 1, 65536))
            self.pattern = torch.nn.Parameter(torch.rand(blocks, learned[1]))

    @property
    def phase(self) -> str:
        """"dense" or "sparse"."""
        return "dense" if self.mask is None else "sparse"

    def capture_next(self, wish: Capture) -> None:
        """Has the next forward capture its map, which `captured` then is."""
        self._wish, self.captured, self.lost = wish, None, False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        def call(**more: Any) -> Union[Tensor, Tuple[Tensor, Tensor]]:
            from ..torch import attention
            return attention(q, k, v, server=self._server, **more, **options)

        if self.mask is not None:
            return call(mask=self.mask, zero_rest=self.zero_rest)
        wish, self._wish = self._wish, None
        if wish is None:
            return call()
        try:
            out, self.captured = capturing(wish, call)
        except FailedPrecondition as error:
            if error.reason != "CAPTURE_LOST":
                raise
            self.lost = True
            out, self.captured = capturing(Capture(wish.block, wish.keep), call)
        return out

    def pattern_loss(self) -> Tensor:
        """The mean square of pooled map minus Pat Pat^T, of the last capture (SAT; it differs from the mean over batch
        entries and heads by what no Pat changes). Its gradient reaches Pat alone."""
        if self.captured is None:
            raise wrong("pattern_loss", "a forward that captured its map before", "none")
        pooled = torch.from_numpy(self.captured.pooled).to(self.pattern.device)
        return torch.nn.functional.mse_loss(self.pattern @ self.pattern.T, pooled)

    def set_pattern(self, layout: np.ndarray[Any, np.dtype[np.bool_]], block: int) -> None:
        """Sparse from here on. layout: bool [n, n], the blocks of block rows and keys that stay."""
        self._layout, self._block = np.array(layout, bool), block
        self.mask = masks.blocks(self._layout, block)

    def get_extra_state(self) -> Dict[str, Any]:
        return {"layout": None if self._layout is None else torch.from_numpy(self._layout), "block": self._block}

    def set_extra_state(self, state: Dict[str, Any]) -> None:
        if state["layout"] is None:
            self.mask, self._layout, self._block = None, None, 0
        else:
            self.set_pattern(state["layout"].numpy(), state["block"])


class SparseTraining:
    """Watches the attention of a model's layers while it trains, and switches them to sparse when it has settled.

    layers: the model's SparseAttention modules, in order. rule: attnd.sparse.spion(...) or sat(...). every: steps from one
    capture to the next; SAT's is 1. warmup: steps before which nothing settles. on_switch: called once, after the switch,
    with the report: the place to restart a learning-rate schedule (SPION) or the optimizer (SAT).

    Where a server has lost a map, by eviction or its restart, captures begin anew and training goes on. In a process group
    of torch.distributed rank 0 captures and decides, and all switch at the same step.
    """

    @brief
    def __init__(self, layers: Sequence[SparseAttention], rule: Rule, *, every: int, warmup: int = 0,
                 on_switch: Optional[Callable[[Report], None]] = None) -> None:
        self._layers = list(layers)
        for number, layer in enumerate(self._layers):
            if not isinstance(layer, SparseAttention):
                raise wrong_type(f"layers[{number}]", "an attnd.sparse.SparseAttention", layer)
            if rule.learned and not hasattr(layer, "pattern"):
                raise wrong(f"layers[{number}]", "a learned pattern (learned=(rows, head_dim), block=)", "none")
        self.tracker = Tracker(len(self._layers), rule, warmup=warmup)
        self._rule, self._every = rule, _checks.integer("every", every, 1, 1 << 62)
        self._on_switch = on_switch
        self._previous: List[Optional[Captured]] = [None] * len(self._layers)
        self.steps = 0
        self.switched_at: Optional[int] = None

    @property
    def phase(self) -> str:
        """"dense" or "sparse", of all layers."""
        return "sparse" if all(layer.phase == "sparse" for layer in self._layers) else "dense"

    @property
    def captures(self) -> bool:
        """Whether this step, inside step(), captures."""
        return self.phase == "dense" and (self.steps + 1) % self._every == 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One training step: each layer's first forward in it may capture. The switch comes at its end."""
        capturing_now = self.captures
        if capturing_now and _rank() == 0:
            for layer, previous in zip(self._layers, self._previous):
                layer.capture_next(Capture(self._rule.block, True, previous))
        yield
        if capturing_now:
            self._decide()
        self.steps += 1

    def _decide(self) -> None:
        layouts = _from_rank_0(self._look if _rank() == 0 else None)
        if layouts is None:
            return
        for layer, layout in zip(self._layers, layouts):
            layer.set_pattern(layout, self._rule.block)
        self.switched_at = self.steps
        if self._on_switch is not None and self.tracker.last is not None:
            self._on_switch(self.tracker.last)

    def _look(self) -> Optional[List[Any]]:
        """The layers' patterns once they have settled, else None."""
        captured = [layer.captured for layer in self._layers]
        if any(one is None for one in captured):
            raise wrong("layers", "layers that each compute attention in a training step",
                        f"layer {next(n for n, one in enumerate(captured) if one is None)}, which did not")
        found = [one for one in captured if one is not None]
        if any(layer.lost for layer in self._layers):
            self._restart()
        if self._previous[0] is None:
            self.tracker.restart()
        report = self.tracker.observe(self.steps, found)
        self._forget(self._previous)
        self._previous = list(found)
        if not report.settled:
            return None
        try:
            layouts = [self._pattern(layer, one) for layer, one in zip(self._layers, found)]
        except FailedPrecondition as error:
            if error.reason != "CAPTURE_LOST":
                raise
            self._restart()
            return None
        self._forget(self._previous)
        self._previous = [None] * len(self._layers)
        return layouts

    def _pattern(self, layer: SparseAttention, captured: Captured) -> Any:
        source: Any = captured
        if self._rule.learned:
            source = (layer.pattern @ layer.pattern.T).detach().cpu().float().numpy()
        return pattern_layout(source, block=self._rule.block, **self._rule.builder)

    def _restart(self) -> None:
        self.tracker.restart()
        self._forget(self._previous)
        self._previous = [None] * len(self._layers)

    @staticmethod
    def _forget(maps: Sequence[Optional[Captured]]) -> None:
        for one in maps:
            if one is not None:
                with contextlib.suppress(AttndError):  # a server that is away forgets by itself
                    one.release()

    def state_dict(self) -> Dict[str, Any]:
        """The state of the steps; phase and pattern are in the layers' own. Maps stay with the server: captures begin
        anew."""
        return {"steps": self.steps, "switched_at": self.switched_at}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.steps, self.switched_at = state["steps"], state["switched_at"]
        self._restart()


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _from_rank_0(decide: Optional[Callable[[], Optional[List[Any]]]]) -> Optional[List[Any]]:
    decided: List[Any] = [None if decide is None else decide()]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(decided, src=0)
    found: Optional[List[Any]] = decided[0]
    return found
