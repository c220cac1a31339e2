"""Create the MemWAL index of a Lance table for the region layout, or add region specs to it."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import InvalidUsageError, NoPrimaryKeyError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.generations.backlog import RestoredIndex, restored_index
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, is_of_key
from memwal_ops.formats.lance.log.region_files import refuse_other_layout
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError
from memwal_ops.formats.lance.regions.specs import RegionSpec, decode_spec, encode_specs
from memwal_ops.formats.lance.table import Table, load, read_table, refuse_log_beside_dynamodb
from memwal_ops.formats.lance.wire import memwal_index
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, with_region_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_TOP = -1


def create_mem_wal(
    location: Location, store: Store, *, region_specs: Sequence[RegionSpec] = (), maintained_indexes: Sequence[str] = ()
) -> Table:
    """Create the MemWAL index of a table (S0-011, S0-065, S0-066), or add specs and maintained indexes to its index.

    An added spec gets the next id, which no spec and no region ever had (S0-082). Existing specs and maintained indexes
    stay as they are. If the index was removed, and the regions are still there, it gets the settings and the progress
    that it had (:mod:`memwal_ops.formats.lance.generations.backlog`). Without a spec, all regions are manual (S0-043).

    Returns the table at the resulting version. ``maintained_indexes``: names of base indexes that writers mirror
    (S0-075), without the key's own.

    Raises:
        InvalidUsageError: the table has a MemWAL index and nothing was to be added, region folders exist that may be of
            another table, a base index does not exist, or a spec is invalid.
        CommitConflictError: every attempt conflicted with another commit.
        NoPrimaryKeyError: no column is marked as its primary key (S0-002).
        UnsupportedFeatureError: a spec has an expression, and DataFusion is not installed; or no rows of a log could be
            merged into the table.
    """
    refuse_log_beside_dynamodb(location, logged=True)
    table = read_table(location, store)
    if table.log.exists:
        return _add(table, region_specs, maintained_indexes)
    retry = CommitRetry()
    while True:
        refuse_existing(table)
        planned = plan_creation(table, region_specs=region_specs, maintained_indexes=maintained_indexes)
        try:
            _create(table, planned)
        except commit.CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return load(location, store)


def _create(table: Table, planned: RestoredIndex) -> None:
    note = commit.CommitNote("init")
    entry = _entry(table, planned.details)
    transaction = note.transaction(table.version)
    transaction.create_index.new_indices.append(entry)
    manifest = with_region_records(table.manifest.manifest, planned.records)
    commit.commit_built(table, replace(table.manifest, manifest=manifest, indexes=_with(table, entry)), transaction)


def _entry(table: Table, details: memwal_pb2.MemWalIndexDetails) -> table_pb2.IndexMetadata:
    entry = table_pb2.IndexMetadata(name=memwal_index.MEMWAL_INDEX_NAME, index_version=0)
    entry.index_details.type_url = memwal_index.MEMWAL_TYPE_URL
    return commit.next_entry(entry, details.SerializeToString(deterministic=True), table.version)


def _with(table: Table, entry: table_pb2.IndexMetadata) -> table_pb2.IndexSection:
    section = deepcopy(table.manifest.indexes or table_pb2.IndexSection())
    section.indices.append(entry)
    return section


def refuse_existing(table: Table) -> None:
    """Raise if the table has a MemWAL index, or region folders without one; see :func:`create_mem_wal`."""
    if memwal_index.find_memwal_entry(table.manifest.indexes) is not None:
        raise InvalidUsageError(
            f"{table.location.uri} has a MemWAL index already.",
            remedy="Open its regions and write; or give create_mem_wal region specs or indexes to add.",
        )
    if table.regions.region_ids and table.index_removed_after is None:
        raise InvalidUsageError(
            f"{table.location.uri} has no MemWAL index, but it has region folders: they belong to another table, or to "
            "this one before it was overwritten; or the versions that would show that they do not are gone.",
            remedy="Run memwal-ops inspect URI: it lists them with remedies.",
        )


def _add(table: Table, specs: Sequence[RegionSpec], maintained_indexes: Sequence[str]) -> Table:
    retry = CommitRetry()
    while True:
        details = plan_additions(table, specs, maintained_indexes)
        if details == table.index.details:
            if not (specs or maintained_indexes or retry.conflicts):
                refuse_existing(table)
            return table
        try:
            commit.commit_indexes(table, commit.IndexChange(details), commit.CommitNote("init"))
        except commit.CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return retry.landed(table)


def plan_creation(
    table: Table, *, region_specs: Sequence[RegionSpec] = (), maintained_indexes: Sequence[str] = ()
) -> RestoredIndex:
    """The index that :func:`create_mem_wal` gives a table without one: a new one, or that which was removed.

    Arguments and errors as there and for :func:`plan_additions`. Changes nothing.
    """
    given = plan_mem_wal(table, region_specs=region_specs, maintained_indexes=maintained_indexes)
    regions = _regions(table)
    restored = restored_index(table, regions, regions) if regions else None
    if restored is None:
        return RestoredIndex(given, {}, {}, ())
    entry = _entry(table, restored.details)
    again = replace(
        table,
        manifest=replace(table.manifest, indexes=_with(table, entry)),
        memwal=memwal_index.decode_memwal_index(entry),
    )
    return replace(restored, details=plan_additions(again, region_specs, maintained_indexes))


def plan_additions(
    table: Table, specs: Sequence[RegionSpec], maintained_indexes: Sequence[str]
) -> memwal_pb2.MemWalIndexDetails:
    """The details of the table's MemWAL index with missing specs and maintained indexes added. Changes nothing.

    Also with specs of regions that the index lost, as it was removed and made again.

    Raises:
        InvalidUsageError: a base index does not exist, a spec is invalid, or pylance wrote the table's regions.
        RegionManifestCorruptError: the spec id of a region cannot be read, so it could be assigned again.
    """
    regions = _regions(table)
    restored = restored_index(table, regions, ())
    details = deepcopy(table.index.details if restored is None else restored.details)
    before = len(details.region_specs), len(details.maintained_indexes)
    ids = _field_ids(table)
    names = {number: name for name, number in ids.items()}
    known = [decode_spec(region_spec, names) for region_spec in details.region_specs]
    # Also ids of specs that the index no longer has: their regions would be mistaken for those of the new spec.
    used = {spec.spec_id or 0 for spec in known} | {region.region_spec_id for region in regions}
    schema, key = table.schema, table.primary_key
    encoded = ((spec, encode_specs([spec], schema, ids, key)[0]) for spec in specs)
    added = [
        spec
        for spec, stored in encoded
        if not any(
            [*known_spec.fields] == [*stored.fields] and spec.spec_id in {None, known_spec.spec_id}
            for known_spec in details.region_specs
        )
    ]
    details.region_specs.extend(encode_specs(added, schema, ids, key, earlier=known, used=used))
    planned = plan_mem_wal(table, maintained_indexes=maintained_indexes)
    details.maintained_indexes.extend(
        name for name in planned.maintained_indexes if name not in details.maintained_indexes
    )
    if (len(details.region_specs), len(details.maintained_indexes)) != before:
        refuse_other_layout(table, None)
    return details


def _regions(table: Table) -> list[RegionManifest]:
    """The newest manifest of each region, without those that no writer has claimed."""
    manifests = []
    for region_id in table.regions.region_ids:
        region = table.region(region_id)
        try:
            manifests.append(region.latest(checked=True))
        except NoRegionManifestError:
            if region.is_claimed():
                raise
    return manifests


def _field_ids(table: Table) -> dict[str, int]:
    return {field.name: field.id for field in table.manifest.manifest.fields if field.parent_id == _TOP}


def plan_mem_wal(
    table: Table, *, region_specs: Sequence[RegionSpec] = (), maintained_indexes: Sequence[str] = ()
) -> memwal_pb2.MemWalIndexDetails:
    """The details of the index that :func:`create_mem_wal` gives a table without one; arguments and errors as there."""
    location = table.location
    if not table.primary_key:
        raise NoPrimaryKeyError(f"{location.uri} has no column that is marked as its primary key.")
    commit.check_takes_rows(table)
    known = base_indexes(table)
    unknown = sorted({*maintained_indexes} - known.keys())
    if unknown:
        raise InvalidUsageError(f"{location.uri} has no index {', '.join(unknown)}.")
    ids = _field_ids(table)
    implicit = [name for name in maintained_indexes if is_of_key(table, known[name])]
    if implicit:
        raise InvalidUsageError(
            f"The index {', '.join(implicit)} is that of the primary key, which every writer maintains implicitly.",
            remedy="Leave it out.",
        )
    details = memwal_pb2.MemWalIndexDetails()
    # Without it, field 1 is absent, and old releases decode the details as an empty legacy list.
    details.snapshot_ts_millis = time.time_ns() // 1_000_000
    details.maintained_indexes.extend(dict.fromkeys(maintained_indexes))
    details.region_specs.extend(encode_specs(region_specs, table.schema, ids, table.primary_key))
    return details
