"""Counters of what this process's clients have had to do so that their calls succeed, for monitoring.

    attnd.metrics.totals()                      # a Counters
    attnd.metrics.to_prometheus()               # into prometheus_client's registry, as attnd_client_*_total
    attnd.metrics.to_opentelemetry()            # observable counters of OpenTelemetry's meter, attnd.client.*
"""
from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Protocol
from weakref import WeakSet

from . import _native


class Handle(Protocol):
    """A native client, of which this module asks its numbers."""

    pointer: Optional[int]
    generation: int

    @property
    def library(self) -> ctypes.CDLL: ...


class Counters(NamedTuple):
    """Since the start of the process, of all its clients. retries: of pieces of calls, after seconds_waiting in all;
    failovers: of these at another address, and modules that have moved; leases_lost: residuals that a daemon had no more,
    so that all was sent again; replays: calls of modules that were repeated after a daemon's restart."""

    calls: int = 0
    failed_calls: int = 0
    retries: int = 0
    failovers: int = 0
    leases_lost: int = 0
    replays: int = 0
    seconds_waiting: float = 0.0


_MEANINGS: Dict[str, str] = {
    "calls": "Calls of attention and modules that have ended.", "failed_calls": "Calls that have failed.",
    "retries": "Pieces of calls that were tried again.", "failovers": "Retries at another daemon, and modules that moved.",
    "leases_lost": "Residuals that a daemon had no more.", "replays": "Calls of modules repeated after a restart.",
    "seconds_waiting": "Time spent waiting before retries."}

_live: WeakSet[Handle] = WeakSet()
_ended: List[Counters] = []  # of clients that are gone


def watch(handle: Handle) -> None:
    _live.add(handle)


def ended(handle: Handle) -> None:
    """Called before the native client goes."""
    _ended.append(_of(handle))


def _of(handle: Handle) -> Counters:
    now = _native.Counters()
    handle.library.attnd_client_get_counters(handle.pointer, ctypes.byref(now))
    return Counters(*(getattr(now, name) for name in Counters._fields))


def totals() -> Counters:
    live = [handle for handle in list(_live) if handle.pointer and handle.generation == _native.generation()]
    return Counters(*map(sum, zip(Counters(), *_ended, *map(_of, live))))


def to_prometheus(registry: Any = None) -> None:
    """Registers the counters with prometheus_client's registry, its default one if there is none."""
    (registry or import_module("prometheus_client").REGISTRY).register(_Collector())


class _Collector:
    def collect(self) -> Iterator[Any]:
        family = import_module("prometheus_client.core").CounterMetricFamily
        for name, value in totals()._asdict().items():
            yield family(f"attnd_client_{_named(name)}", _MEANINGS[name], value=value)


def to_opentelemetry(meter: Any = None) -> None:
    """Makes observable counters of the meter, the global provider's if there is none."""
    otel = import_module("opentelemetry.metrics")
    meter = meter or otel.get_meter("attnd")

    def observer(name: str) -> Callable[[Any], List[Any]]:
        return lambda options: [otel.Observation(getattr(totals(), name))]
    for name in Counters._fields:
        meter.create_observable_counter(f"attnd.client.{_named(name)}", [observer(name)],
                                        "s" if name == "seconds_waiting" else "1", _MEANINGS[name])


def _named(name: str) -> str:
    """Units come last in names of metrics."""
    return "waiting_seconds" if name == "seconds_waiting" else name
