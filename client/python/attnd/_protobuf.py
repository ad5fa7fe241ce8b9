"""Protobuf messages by hand, since this package needs nothing but NumPy: fields to bytes.

A message is bytes; the functions give one field each, and nothing for a default that proto3 leaves out. (Protocol
Buffers, "Encoding".)
"""
from __future__ import annotations

import struct
from typing import Iterable, Optional


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return present(field, value) if value else b""


def present(field: int, value: int) -> bytes:
    """An optional number that is there, 0 or not."""
    return varint(field << 3) + varint(value)


def maybe(field: int, value: Optional[int]) -> bytes:
    return b"" if value is None else present(field, value)


def zigzag(value: int) -> int:
    return value << 1 if value >= 0 else -value * 2 - 1


def signed(field: int, value: int) -> bytes:
    """A sint32."""
    return number(field, zigzag(value))


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<Q", value) if value else b""


def float32(field: int, value: float) -> bytes:
    return some_float32(field, value) if value else b""


def some_float32(field: int, value: float) -> bytes:
    """An optional float that is there, 0 or not."""
    return varint(field << 3 | 5) + struct.pack("<f", value)


def float64(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<d", value) if value else b""


def some_float64(field: int, value: float) -> bytes:
    """An optional number that is there, 0 or not."""
    return varint(field << 3 | 1) + struct.pack("<d", value)


def text(field: int, value: str) -> bytes:
    return message(field, value.encode()) if value else b""


def message(field: int, body: bytes) -> bytes:
    """A message or bytes, also an empty one."""
    return varint(field << 3 | 2) + varint(len(body)) + body


def numbers(field: int, values: Iterable[int]) -> bytes:
    body = b"".join(map(varint, values))
    return message(field, body) if body else b""


def floats(field: int, values: Iterable[float]) -> bytes:
    body = b"".join(struct.pack("<f", value) for value in values)
    return message(field, body) if body else b""
