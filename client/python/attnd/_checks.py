"""Checks of single arguments. Each raises InvalidArgument or InvalidType naming the argument, else gives its value."""
from __future__ import annotations

import operator
from typing import Any, List, Optional, Sequence

import numpy as np

from .errors import wrong, wrong_type


def flag(field: str, value: object) -> bool:
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise wrong_type(field, "True or False", value)
    return bool(value)


def word(field: str, value: object, choices: Sequence[str], expected: str) -> str:
    """One of a few words; `expected` says them."""
    if not isinstance(value, str):
        raise wrong_type(field, expected, value)
    if value not in choices:
        raise wrong(field, expected, repr(value))
    return value


def integer(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise wrong_type(field, f"an int of {low}..{high}", value)
    if not low <= value <= high:
        raise wrong(field, f"{low}..{high}", value)
    return int(value)


def uint64(field: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(field, "an int", value) from None
    if not 0 <= number < 1 << 64:
        raise wrong(field, "0..2**64-1", number)
    return number


def number(field: str, value: object, default: Optional[float]) -> Optional[float]:
    """A finite float32, or the default for None."""
    if value is None:
        return default
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise wrong_type(field, "a finite number", value) from None
    if not -3.4028235e38 <= found <= 3.4028235e38:  # compares, as torch.compile's symbols can
        raise wrong(field, "a finite float32", found)
    return found


def seconds(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise wrong_type(field, "a number of seconds above 0", value)
    if not 0 < value < 1e9:
        raise wrong(field, "a number of seconds above 0", value)
    return float(value)


def ascii_text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(field, "a string", value)
    if not value or not value.isascii() or not value.isprintable():
        raise wrong(field, "printable ASCII", "other characters" if value else "nothing")
    return value


def short_text(field: str, value: object, most: int) -> bytes:
    """Printable text of at most so many bytes, as these."""
    if not isinstance(value, str):
        raise wrong_type(field, "a string", value)
    if not value.isprintable():  # half a surrogate pair is not either
        raise wrong(field, "printable text", "other characters")
    encoded = value.encode()
    if not 0 < len(encoded) <= most:
        raise wrong(field, f"1 to {most} bytes", len(encoded))
    return encoded


def lengths(field: str, value: object) -> List[int]:
    """A shape, or one length."""
    try:
        one = isinstance(value, (int, np.integer))
        found = [operator.index(n) for n in ([value] if one else value)]  # type: ignore[attr-defined]
    except TypeError:
        raise wrong_type(field, "an int or several", value) from None
    if min(found, default=0) < 0:
        raise wrong(field, "lengths of 0 or more", found)
    return found


def dtype(field: str, value: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(value)
    except TypeError:
        raise wrong_type(field, "a NumPy type of numbers", value) from None
    if found.hasobject:
        raise wrong(field, "a NumPy type of numbers", found)
    return found
