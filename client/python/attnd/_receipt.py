"""Receipt: what was done for a call. It stands apart from results.py, since what results hold makes calls itself."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict


@dataclass(frozen=True)
class Receipt:
    """Says what was done. Times are seconds; `stages` sums each stage over the shards of the call. leased: of a forward,
    shards that are kept on servers; of a backward, shards whose tensors the server had. trace_id: of OpenTelemetry's span
    in which the call was made."""

    backend: str
    device: str = ""
    kernel: str = ""
    accumulate: str = "f32"
    dropout_p_effective: float = 0.0
    deterministic: bool = True
    shards: int = 0
    retries: int = 0
    leased: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    elapsed: float = 0.0
    stages: Dict[str, float] = field(default_factory=dict)
    trace_id: str = ""
