"""Numbers, tables and paragraphs as people read them, at most ``WIDTH`` columns wide."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as Grid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID

WIDTH = 110
_STEP = 1024
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


def paragraph(text: str, *, indent: str = "", hanging: str = "", width: int = WIDTH) -> str:
    """The text wrapped at blanks; paths and ids stay whole, so that they can be copied.

    Args:
        indent: what every line begins with.
        hanging: what all lines but the first begin with, after ``indent``.
        width: columns at most.
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str]) -> str:
    """A table without lines; columns named in ``words`` are aligned left, all others are numbers."""
    table = Grid(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=WIDTH, no_color=True, highlight=False, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
