"""Numbers, tables and paragraphs as people read them, at most ``WIDTH`` columns wide."""

from __future__ import annotations

import os
import sys
import textwrap
from itertools import zip_longest
from typing import TYPE_CHECKING, TypedDict

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID


class _Whole(TypedDict):
    break_long_words: bool
    break_on_hyphens: bool


WIDTH = 110
_NARROWEST = 60
_GAP = "  "
_STEP = 1024
_WHOLE: _Whole = {"break_long_words": False, "break_on_hyphens": False}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size: float) -> str:
    """Bytes with a binary unit: ``231.4 MiB``."""
    for unit in _UNITS[:-1]:
        if size < _STEP:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _STEP
    return f"{size:.1f} {_UNITS[-1]}"


def time_text(seconds: float) -> str:
    """A span of time in its largest unit, cut: ``45 s``, ``12 min``, ``3 h``, ``9 d``."""
    for size, unit in ((172_800, "d"), (7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds // (size / 2 if unit != 'd' else 86_400):.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 row``, ``20,000 rows``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def short_ids(region_ids: Collection[UUID]) -> Mapping[UUID, str]:
    """Each region's shortest prefix, of at least 8 characters, that no other of them has."""
    names = {region_id: str(region_id) for region_id in region_ids}
    for length in (8, 13, 18, 23):
        prefixes = {region_id: name[:length] for region_id, name in names.items()}
        if len(set(prefixes.values())) == len(names):
            return prefixes
    return names


def span_text(first: int, last: int) -> str:
    """A run of numbers: ``3`` or ``1 to 4``."""
    return str(first) if first == last else f"{first} to {last}"


def paragraph(text: str, *, indent: str = "", hanging: str = "", width: int | None = None) -> str:
    """The text wrapped at blanks; paths and ids stay whole, so that they can be copied.

    Args:
        indent: what every line begins with.
        hanging: what all lines but the first begin with, after ``indent``.
        width: columns at most; what the terminal has, unless given.
    """
    columns = columns_at_most() if width is None else width
    return textwrap.fill(text, columns, initial_indent=indent, subsequent_indent=indent + hanging, **_WHOLE)


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str]) -> str:
    """A table without lines; columns named in ``words`` are aligned left, all others are numbers.

    Where it would be too wide, headings and the widest columns wrap at blanks; words and figures stay whole.
    """
    table = [headings, *rows]
    columns = [*zip(*table, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    least = [_least(heading, cells, split=heading in words) for heading, *cells in columns]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > columns_at_most():
        wide = [index for index, width in enumerate(widths) if width > least[index]]
        if not wide:
            break
        widths[max(wide, key=lambda index: widths[index])] -= 1
    lines = []
    for row in table:
        cells = [textwrap.wrap(cell, width, **_WHOLE) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            placed = zip(parts, widths, headings, strict=True)
            lines.append(_GAP.join(_placed(part, width, left=name in words) for part, width, name in placed).rstrip())
    return "\n".join(lines)


def _least(heading: str, cells: Iterable[str], *, split: bool) -> int:
    """How narrow a column can be."""
    whole = [word for cell in cells for word in cell.split()] if split else [*cells]
    return max(map(cell_len, [*heading.split(), *whole]), default=0)


def _placed(text: str, width: int, *, left: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return text + blanks if left else blanks + text


def columns_at_most() -> int:
    """``WIDTH``, or what the terminal has, where there is one that is narrower."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return min(WIDTH, max(_NARROWEST, columns or WIDTH))
