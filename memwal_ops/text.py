"""Format and parse what people read: numbers, tables and paragraphs of a terminal, sizes, spans of time.

Lines have at most ``WIDTH`` columns, and untrusted text is escaped. Sizes and spans are as the command line and
configuration files write them.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import zip_longest
from typing import TypedDict
from uuid import UUID

from rich.cells import cell_len

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def for_table(remedy: str, uri: str) -> str:
    """The remedy with a table's URI where its commands say ``URI``."""
    return re.sub(r"(memwal-ops [a-z]+(?:[ -][a-z]+)* )URI\b", lambda match: match[1] + shlex.quote(uri), remedy)


def parse_size(text: str) -> int:
    """The bytes of ``64MiB``, ``64M`` (binary), ``64MB`` (decimal), ``67108864B`` or ``0``.

    Raises ``ValueError``: the text is not a size; the message can be shown to the user.
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

    Raises ``ValueError``: the text is not a duration; the message can be shown to the user.
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


class _Whole(TypedDict):
    break_long_words: bool
    break_on_hyphens: bool


WIDTH = 110
_MIN_WIDTH = 60
_GAP = "  "
_STEP = 1024
_WHOLE: _Whole = {"break_long_words": False, "break_on_hyphens": False}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


# Control, format (such as U+202E), surrogate (bytes of a name that are not UTF-8), line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with every character escaped (``\x1b``, ``\u202e``) that moves, colours or hides others on a terminal.

    File names, notes of holds and messages of stores are untrusted: printed raw, they could clear the
    screen, set its title, or imitate lines of our output. Idempotent.

    Args:
        lines: keep line breaks, for a text whose parts are escaped already.
    """
    if text.isprintable():
        return text
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    return "".join(
        character if unicodedata.category(character) not in _UNSAFE else character.encode("unicode_escape").decode()
        for character in text
    )


def known_sum(numbers: Iterable[int | None]) -> int | None:
    """Their sum; None if one of them is not known."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def size_text(size: float | None) -> str:
    """Bytes with a binary unit: ``231.4 MiB``; None: ``unknown size``."""
    if size is None:
        return "unknown size"
    for unit in _UNITS[:-1]:
        if size < _STEP:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _STEP
    return f"{size:.1f} {_UNITS[-1]}"


def time_text(seconds: float) -> str:
    """A span of time in its largest unit, rounded down: ``45 s``, ``12 min``, ``3 h``, ``9 d``."""
    for size, unit in ((172_800, "d"), (7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds // (size / 2 if unit != 'd' else 86_400):.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def counted(number: int | None, singular: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 row``, ``20,000 rows``; None: ``unknown rows``."""
    many = plural or f"{singular}s"
    return f"unknown {many}" if number is None else f"{number:,} {singular if number == 1 else many}"


def counted_as(number: int, plural: str) -> str:
    """As :func:`counted`, for a noun given in the plural: ``1 entry``, ``2 fragments``."""
    singular = f"{plural.removesuffix('ies')}y" if plural.endswith("ies") else plural.removesuffix("s")
    singular = singular.removesuffix("e") if singular.endswith("xe") else singular
    return counted(number, singular, plural)


def short_ids(region_ids: Collection[UUID]) -> Mapping[UUID, str]:
    """The prefix of each region id by which it is unique among these: 8, 13, 18 or 23 characters, or the whole id."""
    names = {region_id: str(region_id) for region_id in region_ids}
    for length in (8, 13, 18, 23):
        prefixes = {region_id: name[:length] for region_id, name in names.items()}
        if len(set(prefixes.values())) == len(names):
            return prefixes
    return names


def span_text(first: int, last: int) -> str:
    """A range of numbers: ``3`` or ``1 to 4``."""
    return str(first) if first == last else f"{first} to {last}"


def paragraph(text: str, *, indent: str = "", hanging: str = "", width: int | None = None) -> str:
    """The text wrapped at blanks; paths and ids stay whole, so that they can be copied.

    Args:
        indent: the beginning of every line.
        hanging: the beginning of all lines but the first, after ``indent``.
        width: columns at most; by default the width of the terminal.
    """
    columns = output_width() if width is None else width
    return textwrap.fill(printable(text), columns, initial_indent=indent, subsequent_indent=indent + hanging, **_WHOLE)


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str]) -> str:
    """A table without lines; columns named in ``words`` are aligned left, all others are numbers.

    If it would be too wide, headings and the widest columns wrap at blanks; words and numbers stay whole.
    """
    table = [headings, *([printable(cell) for cell in row] for row in rows)]
    columns = [*zip(*table, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    minimums = [_min_column_width(heading, cells, split=heading in words) for heading, *cells in columns]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > output_width():
        wide = [index for index, width in enumerate(widths) if width > minimums[index]]
        if not wide:
            break
        widths[max(wide, key=lambda index: widths[index])] -= 1
    lines = []
    for row in table:
        cells = [textwrap.wrap(cell, width, **_WHOLE) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            placed = zip(parts, widths, headings, strict=True)
            lines.append(_GAP.join(_aligned(part, width, left=name in words) for part, width, name in placed).rstrip())
    return "\n".join(lines)


def _min_column_width(heading: str, cells: Iterable[str], *, split: bool) -> int:
    """The smallest possible width of a column."""
    whole = [word for cell in cells for word in cell.split()] if split else [*cells]
    return max(map(cell_len, [*heading.split(), *whole]), default=0)


def _aligned(text: str, width: int, *, left: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return text + blanks if left else blanks + text


def output_width() -> int:
    """``WIDTH``, or the width of the terminal if that is narrower."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return min(WIDTH, max(_MIN_WIDTH, columns or WIDTH))
