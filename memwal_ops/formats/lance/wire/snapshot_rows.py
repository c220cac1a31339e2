"""Encode and decode the rows of a region snapshot: one per region, in the columns of the table's layout.

The specification's rows contain the whole region manifest (S0-106 to S0-108). pylance documents
less: the ids and fields of the regions, whose state is only in their manifests. Each
table gets the rows that its readers expect; beside rows without the state, the metadata of the rows has a part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.wire.names import U64_MAX
from memwal_ops.formats.lance.wire.region_fields import decode_field, field_types
from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_REGION_FIELD = "region_field_"
_SHARD_FIELD = "shard_field_"
_REGION_COLUMNS = pa.schema(
    [
        ("region_id", pa.binary(16)),
        ("version", pa.uint64()),
        ("region_spec_id", pa.uint32()),
        ("writer_epoch", pa.uint64()),
        ("replay_after_wal_id", pa.uint64()),
        ("wal_id_last_seen", pa.uint64()),
        ("current_generation", pa.uint64()),
        ("flushed_generations", pa.list_(pa.struct([("generation", pa.uint64()), ("path", pa.string())]))),
    ]
)
_SHARD_COLUMNS = pa.schema(
    [pa.field("shard_id", pa.string(), nullable=False), pa.field("shard_spec_id", pa.uint32(), nullable=False)]
)
_STATES = b"memwal-ops:states"
_STATE_NUMBERS = 3
_MAY_BE_MISSING = {"replay_after_wal_id", "wal_id_last_seen", "flushed_generations"}


# One row as a mapping of column to Python value.
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RegionRow:
    """One region in a snapshot.

    Attributes:
        region_id: the region.
        region_spec_id: the spec by which rows are routed to it; 0: writers choose the region.
        fields: value per region field that it has.
        state: the rest of its manifest; None in the shard layout, in which only the manifest has it.
    """

    region_id: UUID
    region_spec_id: int
    fields: Mapping[str, Any]
    state: RegionState | None


@dataclass(frozen=True, slots=True)
class RegionState:
    """The state in a region manifest of that version. Names and units as there."""

    version: int
    writer_epoch: int
    replay_after_wal_id: int | None
    wal_id_last_seen: int | None
    current_generation: int
    flushed_generations: tuple[FlushedGeneration, ...]


def region_rows(regions: Sequence[RegionManifest | Row], specs: Iterable[memwal_pb2.RegionSpec]) -> pa.Table:
    """Rows as the specification defines them, in the order of ``regions``; no region: no row, all columns.

    Args:
        regions: manifests, or rows of an earlier snapshot that are still valid.
        specs: the table's region specs, which add a column for each field.
    """
    types = field_types(specs)
    rows = [one if isinstance(one, dict) else _region_row(one, types) for one in regions]
    return _rows(rows, _REGION_COLUMNS, _REGION_FIELD, types)


def shard_rows(regions: Sequence[RegionManifest | Row], specs: Iterable[memwal_pb2.RegionSpec]) -> pa.Table:
    """Rows as documented by pylance 7 and later; arguments as for :func:`region_rows`."""
    types = field_types(specs)
    rows = [one if isinstance(one, dict) else _shard_row(one, types) for one in regions]
    return _rows(rows, _SHARD_COLUMNS, _SHARD_FIELD, types)


def check_fields(manifest: RegionManifest, specs: Iterable[memwal_pb2.RegionSpec]) -> None:
    """Raise ``InvalidFormatError`` if a region field of the manifest is not a value of its type."""
    types = field_types(specs)
    for name, value in manifest.region_fields:
        if name in types:
            decode_field(value, types[name])


def decode_rows(rows: pa.Table) -> tuple[RegionRow, ...]:
    """The regions of a snapshot, of either layout.

    Raises:
        InvalidFormatError: the columns are those of neither layout or of other types, a number is missing,
            or a region id is not a UUID.
    """
    names = set(rows.column_names)
    try:
        if names >= set(_REGION_COLUMNS.names):
            return tuple(_decode_region(row) for row in _typed(rows, _REGION_COLUMNS).to_pylist())
        if names >= set(_SHARD_COLUMNS.names):
            return tuple(
                RegionRow(UUID(row["shard_id"]), row["shard_spec_id"], _fields(row, _SHARD_FIELD), None)
                for row in _typed(rows, _SHARD_COLUMNS).to_pylist()
            )
    except (TypeError, ValueError, KeyError, OverflowError, pa.ArrowException) as error:
        raise InvalidFormatError(f"A row of the region snapshot does not decode: {error}") from error
    raise InvalidFormatError(f"The region snapshot has the columns {rows.column_names}, which are of no known layout.")


def without_fields(rows: pa.Table) -> pa.Table:
    """The columns that every table of the layout has: none of those of region fields.

    Raises:
        InvalidFormatError: the columns are of no known layout.
    """
    decode_rows(rows)
    columns = _REGION_COLUMNS if "region_id" in rows.column_names else _SHARD_COLUMNS
    return rows.select(columns.names)


def _region_row(manifest: RegionManifest, types: Mapping[str, pa.DataType]) -> Row:
    return {
        "region_id": manifest.region_id.bytes,
        "version": manifest.version,
        "region_spec_id": manifest.region_spec_id,
        "writer_epoch": manifest.writer_epoch,
        "replay_after_wal_id": manifest.replay_after_wal_id,
        "wal_id_last_seen": manifest.wal_id_last_seen,
        "current_generation": manifest.current_generation,
        "flushed_generations": [
            {"generation": flushed.generation, "path": flushed.path} for flushed in manifest.flushed_generations
        ],
        **_field_cells(manifest, types, _REGION_FIELD),
    }


def _shard_row(manifest: RegionManifest, types: Mapping[str, pa.DataType]) -> Row:
    return {
        "shard_id": str(manifest.region_id),
        "shard_spec_id": manifest.region_spec_id,
        **_field_cells(manifest, types, _SHARD_FIELD),
    }


def _field_cells(manifest: RegionManifest, types: Mapping[str, pa.DataType], prefix: str) -> Row:
    return {prefix + name: decode_field(value, types[name]) for name, value in manifest.region_fields if name in types}


def _rows(rows: list[Row], columns: pa.Schema, prefix: str, types: Mapping[str, pa.DataType]) -> pa.Table:
    schema = pa.schema([*columns, *(pa.field(prefix + name, kind) for name, kind in types.items())])
    return pa.Table.from_pylist(rows, schema=schema)


def _typed(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Cast rows to the columns' types; raises Arrow's errors, or ``ValueError`` for a missing number."""
    for field in columns:
        column = rows.column(field.name)
        if column.null_count and field.name not in _MAY_BE_MISSING:
            raise ValueError(f"a row has no {field.name}")
        rows = rows.set_column(rows.column_names.index(field.name), field, column.cast(field.type))
    return rows


def _decode_region(row: Row) -> RegionRow:
    return RegionRow(
        UUID(bytes=row["region_id"]),
        row["region_spec_id"],
        _fields(row, _REGION_FIELD),
        RegionState(
            row["version"],
            row["writer_epoch"],
            row["replay_after_wal_id"],
            row["wal_id_last_seen"],
            row["current_generation"],
            tuple(_flushed(one) for one in row["flushed_generations"] or ()),
        ),
    )


def _flushed(entry: Row) -> FlushedGeneration:
    if entry["generation"] is None or entry["path"] is None:
        raise ValueError("a generation has no number or no path")
    return FlushedGeneration(entry["generation"], entry["path"])


def _fields(row: Row, prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix) and value is not None
    }


def with_states(rows: pa.Table, states: Mapping[UUID, Sequence[int | None]]) -> pa.Table:
    """Store the states in the metadata of the rows: version, ``replay_after_wal_id``, ``wal_id_last_seen``."""
    return _with_states(rows, {str(region_id): [*state] for region_id, state in states.items()})


def states_of(rows: pa.Table) -> Mapping[str, tuple[int, int | None, int | None]]:
    """The states that :func:`with_states` stored, by region id, as far as they decode."""
    try:
        stored = json.loads((rows.schema.metadata or {}).get(_STATES, b"{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {region: (state[0], state[1], state[2]) for region, state in stored.items() if _is_state(state)}


def with_states_alone(rows: pa.Table, source: pa.Table) -> pa.Table:
    """The rows with the states of ``source``, and without the metadata of other programs."""
    return _with_states(rows, states_of(source))


def _with_states(rows: pa.Table, states: Mapping[str, Sequence[int | None]]) -> pa.Table:
    return rows.replace_schema_metadata({_STATES: json.dumps(states).encode()})


def _is_state(stored: object) -> bool:
    if not isinstance(stored, list) or len(stored) != _STATE_NUMBERS or stored[0] is None:
        return False
    return all(one is None or (type(one) is int and 0 <= one <= U64_MAX) for one in stored)
