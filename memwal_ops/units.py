"""Parse and format sizes and spans of time, as the command line and configuration files write them."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import lru_cache

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str) -> int:
    """The bytes of ``64MiB``, ``64M`` (binary), ``64MB`` (decimal), ``67108864B`` or ``0``.

    Raises:
        ValueError: the text is not a size; the message can be shown to the user.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write for example 64MiB, 1GiB or 500MB.")
    if not match[2] and float(match[1]):
        raise ValueError(f"{text!r} has no unit; write for example {match[1]}B, {match[1]}MiB or {match[1]}GiB.")
    try:
        return int(float(match[1]) * _BYTES[match[2].upper()])
    except OverflowError:
        raise ValueError(f"{text!r} is too large for a size.") from None


def parse_duration(text: str) -> timedelta:
    """The span of ``90s``, ``15m``, ``2h``, ``3d``, ``1w`` or ``0``.

    Raises:
        ValueError: the text is not a duration; the message can be shown to the user.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write for example 90s, 15m, 2h or 3d.")
    if not match[2] and float(match[1]):
        # Seconds or days? A wrong guess could delete data.
        raise ValueError(
            f"{text!r} has no unit; write for example {match[1]}s, {match[1]}m, {match[1]}h or {match[1]}d."
        )
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2].lower()])
    except OverflowError:
        raise ValueError(f"{text!r} is too long for a duration.") from None


@lru_cache(1024)
def duration_text(span: timedelta) -> str:
    """A span as :func:`parse_duration` takes it: ``90s``, ``15m``, ``2h``, ``7d``."""
    seconds = span.total_seconds()
    if seconds != int(seconds):
        return f"{seconds:g}s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % size == 0:
            return f"{int(seconds) // size}{unit}"
    return f"{int(seconds)}s"


def size_literal(size: int) -> str:
    """A size as :func:`parse_size` takes it, to the byte: ``64MiB``, ``1000B``."""
    for amount, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and size % amount == 0:
            return f"{size // amount}{unit}"
    return f"{size}B" if size else "0"
