"""The region field values of one region, by which rows are routed to it, as its manifest stores them (S0-084)."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.regions.specs import MANUAL, RegionSpec, by_region, decode_spec, region_values
from memwal_ops.formats.lance.wire.region_manifest import decode_field, encode_field, field_type

if TYPE_CHECKING:
    import pyarrow as pa

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_TOP = -1
# Regions of the same values, each but the last of which was sealed.
_MOST_SEALED = 100


@dataclass(frozen=True)
class RegionValues:
    """A spec, and one value for each of its fields; None is NULL."""

    spec: RegionSpec
    values: tuple[Any, ...]

    def encoded(self) -> tuple[tuple[str, bytes], ...]:
        """The values as a region manifest stores them; NULL is left out."""
        stored = (
            (one.field_id, encode_field(value, field_type(one.result_type)))
            for one, value in zip(self.spec.fields, self.values, strict=True)
        )
        return tuple((name, value) for name, value in stored if value is not None)

    def region_id(self, number: int) -> UUID:
        """The id of the region with these values, derived from them; the next number where that one is sealed."""
        text = repr((self.spec.spec_id, self.encoded(), number)).encode()
        return UUID(bytes=sha256(text).digest()[:16], version=4)

    def has_region(self, region_id: UUID) -> bool:
        """Whether the id is derived from these values."""
        return any(self.region_id(number) == region_id for number in range(_MOST_SEALED))

    def other_values(self, rows: pa.Table) -> list[tuple[Any, ...]]:
        """The region values of rows that belong to other regions."""
        return [values for values, _ in by_region(region_values(self.spec, rows)) if values != self.values]


def table_spec(table: Table, spec_id: int) -> RegionSpec:
    """The table's spec of that id, its sources by the names that columns have in this version.

    Raises:
        InvalidUsageError: there is no such spec.
        TableCorruptError: the stored spec is invalid.
    """
    names = {one.id: one.name for one in table.manifest.manifest.fields if one.parent_id == _TOP}
    for stored in table.index.region_specs:
        if stored.spec_id == spec_id:
            return decode_spec(stored, names)
    known = ", ".join(str(one.spec_id) for one in table.index.region_specs)
    raise InvalidUsageError(f"{table.location.uri} has no region spec {spec_id}; it has: {known or 'none'}.")


def region_values_of(table: Table, manifest: RegionManifest) -> RegionValues | None:
    """The values of a region; None: it belongs to no spec.

    Raises:
        InvalidUsageError: the table has no such spec.
        InvalidFormatError: its manifest has a value that is not of the field's type.
    """
    if manifest.region_spec_id == MANUAL:
        return None
    spec, stored = table_spec(table, manifest.region_spec_id), dict(manifest.region_fields)
    return RegionValues(
        spec,
        tuple(
            decode_field(stored[one.field_id], field_type(one.result_type)) if one.field_id in stored else None
            for one in spec.fields
        ),
    )
