"""python -m attnd check ADDRESS: does that daemon compute what it should?
python -m attnd bench ADDRESS: how fast does it answer from here?

Exit codes: 0 all well, 1 a wrong result or an error, 2 bad arguments.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from . import __version__, _arrays, _checks, connect, local
from .client import TLS, Client
from .errors import AttndError, InvalidArgument, NotFound, Unimplemented

_UNITS = {"f32": 2.0**-17, "f16": 2.0**-9, "bf16": 2.0**-6}


def main(arguments: Optional[List[str]] = None) -> int:
    chosen = _parser().parse_args(arguments)
    tls = TLS(chosen.ca, chosen.cert, chosen.key) if chosen.tls or chosen.ca or chosen.cert or chosen.key else None
    try:
        with connect(chosen.address, tls=tls, token=chosen.token, timeout=chosen.timeout,
                     channels=chosen.channels) as client:
            run: Callable[[Client, argparse.Namespace], int] = chosen.run
            return run(client, chosen)
    except AttndError as error:
        print(f"attnd: {error}", file=sys.stderr)
        return 2 if isinstance(error, (InvalidArgument, NotFound)) else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attnd", description="Checks and measures an attnd daemon.")
    parser.add_argument("--version", action="version", version=f"attnd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (("check", _check, "compare the daemon's results with float64 ones computed here"),
                            ("bench", _bench, "time calls of several sizes")):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("address", help='"host:port" or "unix:PATH"')
        command.add_argument("--tls", action="store_true", help="use TLS with the system's authorities")
        command.add_argument("--ca", help="PEM file of the authority; implies --tls")
        command.add_argument("--cert", help="PEM file of this client's certificate; implies --tls")
        command.add_argument("--key", help="PEM file of its key")
        command.add_argument("--token", help="bearer token")
        command.add_argument("--timeout", type=float, default=60.0, help="seconds of one call (default 60)")
        command.add_argument("--channels", type=int, default=8, help="connections (default 8)")
        if name == "check":
            command.add_argument("--seed", type=_seed, default=0, help="of the random tensors (default 0)")
        else:
            command.add_argument("--json", action="store_true", help="print one JSON object a line")
            command.add_argument("--seconds", type=_duration, default=1.0, help="of each measurement (default 1)")
    return parser


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of 0 or above, got {text!r}")
    return int(text)


def _duration(text: str) -> float:
    try:
        return _checks.seconds("duration", float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}") from None


class _Bar:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._on, self._shown = total, sys.stderr.isatty(), ""

    def show(self, done: float, label: str) -> None:
        if self._on:
            filled = int(30 * min(1.0, done / self._total))
            text = f"[{'#' * filled}{'.' * (30 - filled)}] {label}"
            if text != self._shown:
                sys.stderr.write(f"\r\033[K{text}")
                sys.stderr.flush()
                self._shown = text

    def clear(self) -> None:
        if self._on:
            sys.stderr.write("\r\033[K")
            self._shown = ""


# ---- check

_CASES: Dict[str, Dict[str, Any]] = {
    "plain": {}, "causal": {"causal": "top_left"}, "bottom right": {"causal": "bottom_right"},
    "window": {"window": (9, 3), "align": "bottom_right"}, "softcap": {"softcap": 3.0},
    "dropout": {"dropout_p": 0.25, "seed": 7, "offset": 3}, "key lengths": {"kv_lengths": [45, 17]},
    "sink": {"sink": [0.5, -0.5, 1.0, 0.0]}, "zero_rest": {"zero_rest": True, "causal": "top_left"},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "align": "bottom_right"},
}


def _check(client: Client, chosen: argparse.Namespace) -> int:
    _print_info(client)
    rng, wrong = np.random.default_rng(chosen.seed), 0
    jobs = [(element, name) for element in _UNITS for name in (*_CASES, "mask", "bias")]
    bar = _Bar(len(jobs))
    for n, (element, name) in enumerate(jobs):
        bar.show(n, f"{element} {name}")
        verdict = _check_case(client, rng, element, name)
        bar.clear()
        wrong += verdict.startswith("WRONG")
        print(f"{element:5} {name:13} {verdict}")
    print(f"{len(jobs)} cases, {wrong} wrong")
    return 1 if wrong else 0


def _check_case(client: Client, rng: np.random.Generator, element: str, name: str) -> str:
    shapes = (2, 4, 37, 32), (2, 2, 45, 32), (2, 2, 45, 16), (2, 4, 37, 16)
    q, k, v, d_o = [_arrays.cast(_arrays.Tensor(rng.standard_normal(shape).astype(np.float32), "f32"), element)
                    for shape in shapes]
    options = dict(_CASES.get(name, {}))
    if name == "mask":
        options["mask"] = rng.random((2, 1, 37, 45)) < 0.7
    if name == "bias":
        options["bias"] = rng.standard_normal((4, 37, 45)).astype(np.float32)
    try:
        r = client.forward(q, k, v, **options)
        o = _arrays.Tensor(r.out.view(np.uint16), element) if element == "bf16" else r.out
        g = client.backward(d_o, q, k, v, o, r.lse, bias_grad=name == "bias", **options)
    except Unimplemented as error:
        return f"not on this server: {error}"
    exact = local.forward(q, k, v, compute="float64", **options)
    slopes = local.backward(d_o, q, k, v, o, r.lse, bias_grad=name == "bias", compute="float64", **options)
    pairs = [("out", r.out, exact.out), ("lse", r.lse, exact.lse)]
    pairs += [(field, getattr(g, field), getattr(slopes, field)) for field in ("dq", "dk", "dv", "dbias", "dsink")]
    errors = {field: _difference(got, expected, element) for field, got, expected in pairs if got is not None}
    worst = max(errors, key=lambda field: errors[field])
    units = errors[worst] / _UNITS[element]
    return f"{'ok' if units < 8 else 'WRONG'}: largest error {errors[worst]:.1e} of the largest number, in {worst}"


def _difference(got: Any, expected: Any, element: str) -> float:
    """The largest error, as a part of the largest number; infinite where the kinds of numbers differ."""
    a, b = (_arrays.to_float32(_arrays.Tensor(x.view(np.uint16), "bf16")) if x.dtype.itemsize == 2 and element == "bf16"
            else np.asarray(x, np.float32) for x in (got, expected))
    finite = np.isfinite(b)
    if a.shape != b.shape or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    error = float(np.abs(a[finite] - b[finite]).max(initial=0))
    return error / max(float(np.abs(b[finite]).max(initial=0)), 1e-3) if np.isfinite(error) else float("inf")


def _print_info(client: Client) -> None:
    for index in range(len(client.addresses)):
        info = client.info(index)
        print(f"{info.address}: attnd {info.version}")
        for device in info.devices:
            print(f"  {device.backend} {device.name} ({device.architecture}), "
                  f"{device.memory_bytes / 2**30:.1f} GiB, {'serving' if device.serving else 'NOT SERVING'}")


# ---- bench

_SIZES: List[Tuple[str, Tuple[int, int, int, int]]] = [  # batch, heads, length, dim
    ("one small call", (1, 1, 16, 64)), ("1 head × 1024 × 64", (1, 1, 1024, 64)),
    ("8 heads × 512 × 64", (1, 8, 512, 64)), ("4 × 8 heads × 512 × 128", (4, 8, 512, 128)),
]


def _bench(client: Client, chosen: argparse.Namespace) -> int:
    if not chosen.json:
        _print_info(client)
        print(f"{'float16':24} {'direction':9} {'calls':>6} {'p50 ms':>9} {'p99 ms':>9} {'MB/s':>8} {'GFLOP/s':>8}")
    rng, bar = np.random.default_rng(0), _Bar(2 * len(_SIZES))
    for n, (name, shape) in enumerate(_SIZES):
        q, k, v = (rng.standard_normal(shape).astype(np.float16) for _ in range(3))
        r = client.forward(q, k, v, causal="top_left")
        for m, (direction, call) in enumerate((
                ("forward", lambda: client.forward(q, k, v, causal="top_left").receipt),
                ("backward", lambda: client.backward(r.out, q, k, v, r.out, r.lse, causal="top_left").receipt))):
            row = _measure(call, chosen.seconds, lambda part: bar.show(2 * n + m + part, f"{name}, {direction}"))
            batch, heads, length, dim = shape
            row["gflops"] = (4 if m == 0 else 10) * batch * heads * length**2 / 2 * dim / row["p50_seconds"] / 1e9
            bar.clear()
            if chosen.json:
                print(json.dumps({"name": name, "shape": shape, "direction": direction, **row}))
            else:
                print(f"{name:24} {direction:9} {row['calls']:6.0f} {row['p50_seconds'] * 1e3:9.3f} "
                      f"{row['p99_seconds'] * 1e3:9.3f} {row['bytes_per_second'] / 1e6:8.0f} {row['gflops']:8.1f}")
    return 0


def _measure(call: Callable[[], Any], seconds: float, progress: Callable[[float], None]) -> Dict[str, float]:
    """Calls one after the other for this long, at least three."""
    times: List[float] = []
    moved, begin = 0, time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        receipt = call()
        times.append(time.perf_counter() - start)
        moved += receipt.bytes_sent + receipt.bytes_received
        progress(min(1.0, (time.perf_counter() - begin) / seconds))
    return {"calls": len(times), "p50_seconds": float(np.percentile(times, 50)),
            "p99_seconds": float(np.percentile(times, 99)), "bytes_per_second": moved / sum(times)}


if __name__ == "__main__":
    sys.exit(main())
