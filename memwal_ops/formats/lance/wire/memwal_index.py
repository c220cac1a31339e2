"""Decode and change the ``__lance_mem_wal`` index entry of a table version: configuration, progress, snapshots.

The details are a protobuf message inside the version manifest, so that merge progress and the merged data are published
by the same put (S0-067).

A region snapshot has one row per region, in the columns of the table's layout. The specification's rows contain the
whole region manifest (S0-106 to S0-108). pylance documents less: the ids and fields of the regions, whose state is only
in their manifests. Each table gets the rows that its readers expect; beside rows without the state, the metadata of the
rows has a part of it.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError, InvariantViolatedError, LegacyLayoutError, TableCorruptError
from memwal_ops.formats.lance.wire import region_manifest
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.names import U64_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


MEMWAL_INDEX_NAME = "__lance_mem_wal"
MEMWAL_TYPE_URL = "/lance.table.MemWalIndexDetails"
# Field 1, length-delimited: mem_wal_list. In the current message it is a number (0x08) or absent.
_LEGACY_FIRST_BYTE = 0x0A
_UUID_BYTES = 16


@dataclass(frozen=True, slots=True)
class MemWalIndex:
    """The MemWAL index of one version (S0-058 to S0-068).

    Attributes:
        dataset_version: the version that last wrote the entry.
        snapshot_ts_millis: when the region snapshots were taken, Unix milliseconds; None: never.
        num_regions: number of regions in the snapshot.
        inline_snapshots: the snapshot rows as stored inline; None: none or in a file.
        region_specs: how rows are routed to regions.
        maintained_indexes: names of the base indexes that writers maintain for unmerged rows.
        maintain_all_indexes: None if the writing release did not have the option.
        merged_generations: per region the last generation that the base table contains.
        index_catchup: per base index and region the last generation that it covers.
        writer_config_defaults: options for writers.
        details: the message itself, including unknown fields. Not to be changed in place.
    """

    uuid: UUID
    dataset_version: int
    snapshot_ts_millis: int | None
    num_regions: int
    inline_snapshots: bytes | None
    region_specs: tuple[memwal_pb2.RegionSpec, ...]
    maintained_indexes: tuple[str, ...]
    maintain_all_indexes: bool | None
    merged_generations: Mapping[UUID, int]
    index_catchup: Mapping[str, Mapping[UUID, int]]
    writer_config_defaults: Mapping[str, str]
    details: memwal_pb2.MemWalIndexDetails


def find_memwal_entry(indexes: table_pb2.IndexSection | None) -> table_pb2.IndexMetadata | None:
    """The MemWAL entry of an index section, which is None without any index; None: there is none.

    Raises ``TableCorruptError``: there are two (S0-011).
    """
    entries = [] if indexes is None else [entry for entry in indexes.indices if entry.name == MEMWAL_INDEX_NAME]
    if len(entries) > 1:
        raise TableCorruptError(f"The table has {len(entries)} MemWAL indexes; at most one is allowed.")
    return entries[0] if entries else None


def with_details(old: table_pb2.IndexMetadata, details: bytes, version: int) -> table_pb2.IndexMetadata:
    """A copy of a MemWAL entry with other details, as of a version, and without a fragment bitmap.

    The index covers no fragments, and Lance leaves its bitmap absent. In an empty one, Lance enters the fragments that
    an insert by ``merge_insert`` adds to a table with stable row ids, and refuses each compaction from then on: it
    would join fragments that are covered with others.
    """
    entry = deepcopy(old)
    entry.index_details.value = details
    entry.dataset_version = version
    entry.ClearField("fragment_bitmap")
    return entry


def is_legacy(entry: table_pb2.IndexMetadata) -> bool:
    """Whether the details are a list of MemWALs, as older Lance releases wrote them."""
    return entry.index_details.value[:1] == bytes([_LEGACY_FIRST_BYTE])


def decode_memwal_index(entry: table_pb2.IndexMetadata) -> MemWalIndex:
    """Decode the details of a MemWAL entry.

    Raises:
        LegacyLayoutError: the details are a list of MemWALs, as older Lance releases wrote them.
        TableCorruptError: not a protobuf message; an id that is not a UUID; a region with two progress entries.
    """
    value = entry.index_details.value
    if is_legacy(entry):
        raise LegacyLayoutError("The table has the MemWAL index of older Lance releases (mem_wal_list).")
    details = memwal_pb2.MemWalIndexDetails()
    try:
        details.ParseFromString(value)
    except DecodeError as error:
        raise TableCorruptError(f"The details of the MemWAL index are not a protobuf message: {error}") from error
    return MemWalIndex(
        _uuid(entry.uuid.uuid, "the MemWAL index"),
        entry.dataset_version,
        details.snapshot_ts_millis if details.HasField("snapshot_ts_millis") else None,
        details.num_regions,
        details.inline_snapshots if details.HasField("inline_snapshots") else None,
        tuple(details.region_specs),
        tuple(details.maintained_indexes),
        details.maintain_all_indexes if details.HasField("maintain_all_indexes") else None,
        _progress(details.merged_generations, "merge progress"),
        {
            catchup.index_name: _progress(catchup.caught_up_generations, f"catch-up of {catchup.index_name}")
            for catchup in details.index_catchup
        },
        dict(details.writer_config_defaults),
        details,
    )


def merge_progress(indexes: table_pb2.IndexSection | None) -> Mapping[UUID, int]:
    """The merge progress of a version by its index section; none without a MemWAL index, or with a legacy one.

    Raises ``TableCorruptError``: see :func:`decode_memwal_index`.
    """
    entry = find_memwal_entry(indexes)
    return {} if entry is None or is_legacy(entry) else decode_memwal_index(entry).merged_generations


def with_progress(
    details: memwal_pb2.MemWalIndexDetails, progress: Mapping[UUID, int]
) -> memwal_pb2.MemWalIndexDetails:
    """A copy of the details with the merge progress of each region in ``progress`` raised to that generation (S0-065).

    Raises ``InvariantViolatedError``: a region's progress would not increase.
    """
    changed = deepcopy(details)
    entries = {UUID(bytes=entry.region_id.uuid): entry for entry in changed.merged_generations}
    for region_id, generation in sorted(progress.items()):
        entry = entries.get(region_id)
        if entry is None:
            entry = changed.merged_generations.add()
            entry.region_id.uuid = region_id.bytes
        if generation <= entry.generation:
            raise InvariantViolatedError(
                f"The progress of region {region_id} must not be set from {entry.generation} to {generation}."
            )
        entry.generation = generation
    return changed


def with_catchup(
    details: memwal_pb2.MemWalIndexDetails, catchup: Mapping[str, Mapping[UUID, int] | None]
) -> memwal_pb2.MemWalIndexDetails:
    """A copy of the details with the catch-up entry of each index in ``catchup`` set to exactly that (S0-078, S0-181).

    ``None`` removes the entry. Entries of other indexes are not changed.

    Raises ``InvariantViolatedError``: an entry would exceed the merge progress.
    """
    changed = deepcopy(details)
    merged = {UUID(bytes=entry.region_id.uuid): entry.generation for entry in details.merged_generations}
    entries = {entry.index_name: entry for entry in changed.index_catchup}
    for name, generations in sorted(catchup.items()):
        if generations is None:
            entries.pop(name, None)
            continue
        entry = deepcopy(entries[name]) if name in entries else memwal_pb2.IndexCatchupProgress(index_name=name)
        del entry.caught_up_generations[:]
        for region_id, generation in sorted(generations.items()):
            if generation > merged.get(region_id, 0):
                raise InvariantViolatedError(
                    f"The catch-up entry of {name} must not be generation {generation} of region {region_id}: "
                    f"its merge progress is {merged.get(region_id, 0)}."
                )
            caught_up = entry.caught_up_generations.add()
            caught_up.region_id.uuid = region_id.bytes
            caught_up.generation = generation
        entries[name] = entry
    kept = list(entries.values())
    del changed.index_catchup[:]
    changed.index_catchup.extend(kept)
    return changed


def with_snapshot(
    details: memwal_pb2.MemWalIndexDetails, *, timestamp_millis: int, num_regions: int, inline: bytes | None
) -> memwal_pb2.MemWalIndexDetails:
    """A copy of the details in which only the region snapshot is changed (S0-069 to S0-073, S0-175).

    ``timestamp_millis``: when it was taken, Unix milliseconds. ``inline``: a Lance file's bytes; None if the rows are
    in ``_indices/{uuid}/index.lance``.
    """
    changed = deepcopy(details)
    changed.snapshot_ts_millis = timestamp_millis
    changed.num_regions = num_regions
    changed.ClearField("inline_snapshots")
    if inline is not None:
        changed.inline_snapshots = inline
    return changed


def with_maintained_indexes(
    details: memwal_pb2.MemWalIndexDetails, names: Iterable[str]
) -> memwal_pb2.MemWalIndexDetails:
    """A copy of the details in which writers maintain exactly these base indexes (S0-075)."""
    changed = deepcopy(details)
    del changed.maintained_indexes[:]
    changed.maintained_indexes.extend(names)
    return changed


def stamp_progress(
    built: VersionManifest,
    parent: VersionManifest,
    progress: Mapping[UUID, int],
    *,
    version: int,
    records: Mapping[UUID, region_manifest.RegionRecord] = MappingProxyType({}),
) -> VersionManifest:
    """Stamp the number ``version`` and the ``progress`` into a version that pylance built on ``parent``.

    ``records`` identify the regions of the progress (:mod:`memwal_ops.formats.lance.wire.region_manifest`).

    The progress is stored in two places: in the index details, which readers use, and in the transaction, which the
    conflict check of a concurrent merger uses. The details are copied from the parent, since pylance drops unknown
    fields when it rewrites them; only its changes of ``index_catchup`` are kept, for indexes that lost fragments.

    Raises ``InvariantViolatedError``: progress would not rise, or the version has no MemWAL index.
    """
    indexes = deepcopy(built.indexes or table_pb2.IndexSection())
    entry = find_memwal_entry(indexes)
    old = find_memwal_entry(parent.indexes)
    if entry is None or old is None:
        raise InvariantViolatedError("The version that pylance built has no MemWAL index any more.")
    derived = decode_memwal_index(entry).index_catchup
    before = decode_memwal_index(old)
    claims = {
        name: derived.get(name)
        for name in {*derived, *before.index_catchup}
        if derived.get(name) != before.index_catchup.get(name)
    }
    details = with_progress(with_catchup(before.details, claims), progress)
    entry.CopyFrom(with_details(old, details.SerializeToString(deterministic=True), version))
    manifest = region_manifest.with_region_records(built.manifest, records)
    manifest.version = version
    return replace(built, manifest=manifest, indexes=indexes, transaction=_with_marker(built.transaction, progress))


def _with_marker(
    transaction: table_pb2.Transaction | None, progress: Mapping[UUID, int]
) -> table_pb2.Transaction | None:
    if transaction is None or not transaction.HasField("update"):
        return transaction
    marked = deepcopy(transaction)
    del marked.update.merged_generations[:]
    for region_id, generation in sorted(progress.items()):
        entry = marked.update.merged_generations.add()
        entry.region_id.uuid = region_id.bytes
        entry.generation = generation
    return marked


def _progress(entries: Iterable[memwal_pb2.MergedGeneration], what: str) -> dict[UUID, int]:
    progress: dict[UUID, int] = {}
    for entry in entries:
        region_id = _uuid(entry.region_id.uuid, what)
        if region_id in progress:
            raise TableCorruptError(f"The {what} of the table has two entries for region {region_id}.")
        progress[region_id] = entry.generation
    return progress


def _uuid(data: bytes, what: str) -> UUID:
    if len(data) != _UUID_BYTES:
        raise TableCorruptError(f"The id of {what} has {len(data)} bytes, so it is not a UUID.")
    return UUID(bytes=data)


def _empty() -> MemWalIndex:
    entry = table_pb2.IndexMetadata()
    entry.uuid.uuid = bytes(_UUID_BYTES)
    return decode_memwal_index(entry)


NO_MEMWAL = _empty()
"""The index of a table that has none, for code that only reads it: no regions, no progress."""

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
    flushed_generations: tuple[region_manifest.FlushedGeneration, ...]


def region_rows(
    regions: Sequence[region_manifest.RegionManifest | Row], specs: Iterable[memwal_pb2.RegionSpec]
) -> pa.Table:
    """Rows as the specification defines them, in the order of ``regions``; no region: no row, all columns.

    ``regions``: manifests, or rows of an earlier snapshot that are still valid. ``specs`` add a column for each field.
    """
    types = region_manifest.field_types(specs)
    rows = [region if isinstance(region, dict) else _region_row(region, types) for region in regions]
    return _rows(rows, _REGION_COLUMNS, _REGION_FIELD, types)


def shard_rows(
    regions: Sequence[region_manifest.RegionManifest | Row], specs: Iterable[memwal_pb2.RegionSpec]
) -> pa.Table:
    """Rows as documented by pylance 7 and later; arguments as for :func:`region_rows`."""
    types = region_manifest.field_types(specs)
    rows = [region if isinstance(region, dict) else _shard_row(region, types) for region in regions]
    return _rows(rows, _SHARD_COLUMNS, _SHARD_FIELD, types)


def check_fields(manifest: region_manifest.RegionManifest, specs: Iterable[memwal_pb2.RegionSpec]) -> None:
    """Raise ``InvalidFormatError`` if a region field of the manifest is not a value of its type."""
    types = region_manifest.field_types(specs)
    for name, value in manifest.region_fields:
        if name in types:
            region_manifest.decode_field(value, types[name])


def as_rows(rows: pa.Table) -> list[Row]:
    """The rows of a snapshot, with values of region fields as :func:`region_manifest.decode_field` has them."""
    columns = [[region_manifest.python_value(value) for value in column] for column in rows.columns]
    return [dict(zip(rows.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def decode_rows(rows: pa.Table) -> tuple[RegionRow, ...]:
    """The regions of a snapshot, of either layout.

    Raises ``InvalidFormatError``: the columns are those of neither layout or of other types, a number is missing, or a
    region id is not a UUID.
    """
    names = set(rows.column_names)
    try:
        if names >= set(_REGION_COLUMNS.names):
            return tuple(_decode_region(row) for row in as_rows(_typed(rows, _REGION_COLUMNS)))
        if names >= set(_SHARD_COLUMNS.names):
            return tuple(
                RegionRow(UUID(row["shard_id"]), row["shard_spec_id"], _fields(row, _SHARD_FIELD), None)
                for row in as_rows(_typed(rows, _SHARD_COLUMNS))
            )
    except (TypeError, ValueError, KeyError, OverflowError, pa.ArrowException) as error:
        raise InvalidFormatError(f"A row of the region snapshot does not decode: {error}") from error
    raise InvalidFormatError(f"The region snapshot has the columns {rows.column_names}, which are of no known layout.")


def without_fields(rows: pa.Table) -> pa.Table:
    """The columns that every table of the layout has: none of those of region fields.

    Raises ``InvalidFormatError``: the columns are of no known layout.
    """
    decode_rows(rows)
    columns = _REGION_COLUMNS if "region_id" in rows.column_names else _SHARD_COLUMNS
    return rows.select(columns.names)


def _region_row(manifest: region_manifest.RegionManifest, types: Mapping[str, pa.DataType]) -> Row:
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


def _shard_row(manifest: region_manifest.RegionManifest, types: Mapping[str, pa.DataType]) -> Row:
    return {
        "shard_id": str(manifest.region_id),
        "shard_spec_id": manifest.region_spec_id,
        **_field_cells(manifest, types, _SHARD_FIELD),
    }


def _field_cells(manifest: region_manifest.RegionManifest, types: Mapping[str, pa.DataType], prefix: str) -> Row:
    return {
        prefix + name: region_manifest.decode_field(value, types[name])
        for name, value in manifest.region_fields
        if name in types
    }


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
            tuple(_flushed(flushed) for flushed in row["flushed_generations"] or ()),
        ),
    )


def _flushed(entry: Row) -> region_manifest.FlushedGeneration:
    if entry["generation"] is None or entry["path"] is None:
        raise ValueError("a generation has no number or no path")
    return region_manifest.FlushedGeneration(entry["generation"], entry["path"])


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
    return all(number is None or (type(number) is int and 0 <= number <= U64_MAX) for number in stored)
