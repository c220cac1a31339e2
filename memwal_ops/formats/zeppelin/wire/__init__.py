"""Decode and encode the objects of Zeppelin namespaces, in both dialects: no I/O. Names, and ULIDs."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime

MANIFEST, META = "manifest.json", "meta.json"
"""The names of the objects that are read first."""
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_LENGTH = 26
_RANDOM_BITS = 80
_HIGHEST = 2**128 - 1


def new_ulid(above: str = "") -> str:
    """A ULID of now, or the next one above ``above`` if that is later, from a clock that is ahead."""
    value = (time.time_ns() // 1_000_000 << _RANDOM_BITS) | int.from_bytes(os.urandom(_RANDOM_BITS // 8))
    least = _value(above)
    if least is not None and value <= least:
        # Far enough above it that two writers that read the same ULID are unlikely to choose the same next one.
        value = min(least + 1 + int.from_bytes(os.urandom(8)), _HIGHEST)
    return _text(value)


def ulid_time(ulid: str) -> datetime | None:
    """The time in a ULID, by its writer's clock; None if it is not a ULID."""
    value = _value(ulid)
    if value is None:
        return None
    try:
        return datetime.fromtimestamp((value >> _RANDOM_BITS) / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _value(ulid: str) -> int | None:
    if len(ulid) != _LENGTH or not all(digit in _VALUES for digit in ulid):
        return None
    value = 0
    for digit in ulid:
        value = value << 5 | _VALUES[digit]
    return value if value <= _HIGHEST else None


def _text(value: int) -> str:
    return "".join(_DIGITS[value >> 5 * place & 31] for place in reversed(range(_LENGTH)))
