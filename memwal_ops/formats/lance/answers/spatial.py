"""Write conditions on geometries: strips that together cover the plane, and places of drawn geometries."""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_EXTENSION = b"ARROW:extension:name"
_WKB, _WKT = b"geoarrow.wkb", b"geoarrow.wkt"
_NATIVE = frozenset(
    b"geoarrow." + kind
    for kind in (b"point", b"linestring", b"polygon", b"multipoint", b"multilinestring", b"multipolygon", b"box")
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_FAR = 1e30
_CUTS = 16
_PAIR = 16


def spatial_conditions(
    column: str, field: pa.Field, values: pa.ChunkedArray, samples: int
) -> Iterator[tuple[str, str]]:
    """What each condition is, and the condition; none for a column that is not known to have geometries."""
    kind = (field.metadata or {}).get(_EXTENSION) or str(getattr(field.type, "extension_name", "")).encode()
    if kind not in _NATIVE | {_WKB, _WKT}:
        return
    places = [at for value in values.to_pylist() if (at := _place(value, kind)) is not None]
    yield "null", f"{column} IS NULL"
    if not places:
        return
    ascending = np.unique([x for x, _ in places])
    cuts = np.unique(np.linspace(0, len(ascending) - 1, min(_CUTS, samples, len(ascending))).astype(int))
    for low, high in pairwise([-_FAR, *ascending[cuts].tolist(), _FAR]):
        corners = [(low, -_FAR), (high, -_FAR), (high, _FAR), (low, _FAR), (low, -_FAR)]
        text = ", ".join(f"{x!r} {y!r}" for x, y in corners)
        yield "range", f"st_intersects({column}, ST_GeomFromText('POLYGON(({text}))'))"
    for x, y in places[: max(4, samples // 2)]:
        yield "equal", f"st_intersects({column}, ST_GeomFromText('POINT({x!r} {y!r})'))"


def _place(value: Any, kind: bytes) -> tuple[float, float] | None:
    """Coordinates near a geometry, if not of it (where it has more than two); None: it has none."""
    if kind == _WKB:
        order = "<" if value and value[0] else ">"
        found = struct.unpack(f"{order}2d", value[-_PAIR:]) if value and len(value) > _PAIR else ()
    elif kind == _WKT:
        found = tuple(float(one) for one in _NUMBER.findall(value or "")[:2])
    else:
        found = _first_pair(value)
    return (found[0], found[1]) if len(found) > 1 and np.isfinite(found[:2]).all() else None


def _first_pair(value: Any) -> tuple[float, ...]:
    """The first two numbers of nested lists and structs."""
    while isinstance(value, list):
        value = value[0] if value else None
    return tuple(value.values())[:2] if isinstance(value, dict) and None not in value.values() else ()
