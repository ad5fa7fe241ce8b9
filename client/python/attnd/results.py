"""What Client.forward and Client.backward return."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from ._arrays import Array


@dataclass(frozen=True)
class Receipt:
    """What was done. Times are seconds; `stages` sums each stage over the shards of the call."""

    backend: str
    device: str = ""
    kernel: str = ""
    accumulate: str = "f32"
    dropout_p_effective: float = 0.0
    deterministic: bool = True
    shards: int = 0
    retries: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    elapsed: float = 0.0
    stages: Dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardResult:
    """out: q's element type, in q's layout, head dim of v. lse: float32 [batch, q_heads, q_len] (packed
    [q_heads, total rows]), natural logarithm, before dropout; None unless asked for."""

    out: Array
    lse: Optional[Array]
    receipt: Receipt
    residual: None = None


@dataclass(frozen=True)
class Gradients:
    """dq, dk, dv: of q, k, v. dbias: float32 of the bias's shape, if asked for. dsink: float32 [q_heads], if there
    is a sink."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Optional[Array]
    dsink: Optional[Array]
    receipt: Receipt


@dataclass(frozen=True)
class Device:
    """One engine of a server. backend: "reference", "cpu" or "cuda"."""

    name: str
    uuid: str
    backend: str
    architecture: str
    memory_bytes: int
    serving: bool
    threads: int


@dataclass(frozen=True)
class ServerInfo:
    """What a server is and can do. boot_epoch changes with each start of its process."""

    address: str
    version: str
    boot_epoch: str
    max_message_bytes: int
    features: List[str]
    devices: List[Device]
