"""Numbers as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from uuid import UUID

_STEP = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size: float) -> str:
    """Bytes with a binary unit: ``231.4 MiB``."""
    for unit in _UNITS[:-1]:
        if size < _STEP:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _STEP
    return f"{size:.1f} {_UNITS[-1]}"


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
