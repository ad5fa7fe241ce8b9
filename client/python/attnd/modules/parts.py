"""Parts: a stack's parameters as its layout has them, whole or cut by rows where ops read them apart (cross-attention's
packed projections: q of x, k and v of the memory)."""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from .._arrays import Array
from .layers import Described
from .module import Module

__all__ = ["Parts"]


class Parts:
    def __init__(self, prefixes: Iterable[str], layers: Sequence[Described]) -> None:
        self._parts: Dict[str, List[Tuple[str, int]]] = {}  # by the module's name: the layout's, and rows
        self.prefixes = list(prefixes)
        self.names: List[str] = []  # of the module, for each parameter of the layout
        self.shapes: List[Tuple[str, Tuple[int, ...]]] = []  # of the layout's parameters, by its names
        for prefix, layer in zip(self.prefixes, layers):
            for inner, (own, shape) in zip(layer.names, layer.block.parameters):
                self.names.append(prefix + inner)
                self.shapes.append((prefix + own, tuple(shape)))
                self._parts.setdefault(prefix + inner, []).append((prefix + own, shape[0]))

    def put(self, module: Module, kinds: Mapping[str, Mapping[str, Array]], **options: Any) -> None:
        """As Module.put_kinds, by the module's names."""
        module.put_kinds({kind: {own: part for name, array in tensors.items() for own, part in self._cut(name, array)}
                          for kind, tensors in kinds.items()}, **options)

    def put_gradients(self, module: Module, tensors: Mapping[str, Array], **options: Any) -> None:
        """As Module.put_gradients, by the module's names."""
        module.put_gradients({own: part for name, array in tensors.items() for own, part in self._cut(name, array)},
                             **options)

    def get(self, module: Module, kinds: Sequence[str], names: Optional[Iterable[str]] = None, *,
            timeout: Optional[float] = None) -> Dict[str, Dict[str, Array]]:
        """As Module.get_kinds, by the module's names."""
        wanted = list(self._parts) if names is None else list(names)
        found = module.get_kinds(kinds, [own for name in wanted for own, _ in self._parts[name]], timeout=timeout)
        return {kind: {name: self._whole(name, tensors) for name in wanted if self._parts[name][0][0] in tensors}
                for kind, tensors in found.items()}

    def _cut(self, name: str, array: Array) -> List[Tuple[str, Array]]:
        parts = self._parts[name]
        if len(parts) == 1:
            return [(parts[0][0], array)]
        return list(zip([own for own, _ in parts], np.split(array, np.cumsum([rows for _, rows in parts])[:-1])))

    def _whole(self, name: str, tensors: Mapping[str, Array]) -> Array:
        arrays = [tensors[own] for own, _ in self._parts[name]]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
