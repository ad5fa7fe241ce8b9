"""From dense training to sparse training, as SPION and SAT do it: docs/SPARSE_TRAINING.md.

    import attnd.sparse as sparse
    layers = [sparse.SparseAttention() for _ in range(4)]       # in the model, in place of attention
    training = sparse.SparseTraining(layers, sparse.spion(block=64, quantile=0.99), every=200)
    for step, batch in enumerate(batches):
        with training.step():                                   # captures when it is time, and switches when it settles
            loss(model(batch)).backward()
        optimizer.step()

Capture, Captured and build_pattern are the parts, for NumPy too; Tracker holds the rules of when attention has settled.
"""
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from .capture import Capture, Captured, build_pattern
    from .rules import Rule, sat, spion
    from .tracker import LayerReport, Report, Tracker
    from .training import SparseAttention, SparseTraining

__all__ = ["Capture", "Captured", "LayerReport", "Report", "Rule", "SparseAttention", "SparseTraining", "Tracker",
           "build_pattern", "sat", "spion"]

_HOMES = {"Capture": "capture", "Captured": "capture", "build_pattern": "capture", "Rule": "rules", "sat": "rules",
          "spion": "rules", "LayerReport": "tracker", "Report": "tracker", "Tracker": "tracker",
          "SparseAttention": "training", "SparseTraining": "training"}


def __getattr__(name: str) -> Any:
    from importlib import import_module
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("." + _HOMES[name], __name__), name)
    return value


def __dir__() -> List[str]:
    return list(__all__)
