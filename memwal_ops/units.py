"""Sizes and spans of time as people write them: one spelling for the command line and for configuration files."""

from __future__ import annotations

import re
from datetime import timedelta

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str) -> int:
    """The bytes of ``67108864``, ``64MiB``, ``64M`` (binary) or ``64MB`` (decimal).

    Raises:
        ValueError: says what is wrong, for a person.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        raise ValueError(f"{text!r} is no size; write for example 64MiB, 1GiB or 500MB.")
    try:
        return int(float(match[1]) * _BYTES[match[2].upper()])
    except OverflowError:
        raise ValueError(f"{text!r} is more than any machine has.") from None


def parse_duration(text: str) -> timedelta:
    """The span of ``90s``, ``15m``, ``2h``, ``3d``, ``1w`` or ``0``.

    Raises:
        ValueError: says what is wrong, for a person.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError(f"{text!r} is no span of time; write for example 90s, 15m, 2h or 3d.")
    if not match[2] and float(match[1]):
        # Seconds or days? What it decides on is deleted.
        raise ValueError(
            f"{text!r} has no unit; write for example {match[1]}s, {match[1]}m, {match[1]}h or {match[1]}d."
        )
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2].lower()])
    except OverflowError:
        raise ValueError(f"{text!r} is longer than time can be told here.") from None


def duration_text(span: timedelta) -> str:
    """A span as :func:`parse_duration` takes it: ``90s``, ``15m``, ``2h``, ``7d``."""
    seconds = span.total_seconds()
    if seconds != int(seconds):
        return f"{seconds:g}s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % size == 0:
            return f"{int(seconds) // size}{unit}"
    return f"{int(seconds)}s"
