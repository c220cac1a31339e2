"""Create the MemWAL index of a Lance table, or add to it; mark columns as the primary key, after checking them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import record
from memwal_ops.errors import DuplicateKeysError, InvalidUsageError, MemwalOpsError
from memwal_ops.formats.lance.answers.asked_index import RowReader
from memwal_ops.formats.lance.checks.rows import check_keys
from memwal_ops.formats.lance.commit.commit import CommitLostError, check_rewritable
from memwal_ops.formats.lance.commit.publication import commit_lost
from memwal_ops.formats.lance.files.datasets import is_commit_conflict, lance_errors, open_dataset
from memwal_ops.formats.lance.log import create
from memwal_ops.formats.lance.regions.specs import RegionField, RegionSpec
from memwal_ops.formats.lance.retention.schema_recorder import try_to_record_schema
from memwal_ops.formats.lance.table import Table, read_table, refuse_log_beside_dynamodb
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry
from memwal_ops.formats.lance.wire.version_manifest import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.options import InitOptions
    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location


_FLAG = "lance-schema:unenforced-primary-key"
_POSITION = "lance-schema:unenforced-primary-key:position"


def check_primary_key(table: Table, columns: Sequence[str]) -> bool:
    """Check that ``columns`` may be marked; return whether they are not marked yet. Memory: these columns.

    Raises:
        InvalidUsageError: a column is missing, or the table has another primary key, which Lance never changes.
        DuplicateKeysError: a value is NULL or duplicate: all but one of these rows would be lost in a merge.
    """
    uri = table.location.uri
    if table.primary_key:
        if table.primary_key != (*columns,):
            raise InvalidUsageError(
                f"{uri} has the primary key {', '.join(table.primary_key)}, which Lance never changes.",
                remedy="Leave --primary-key out; or copy the rows to a new table.",
            )
        return False
    missing = sorted({*columns} - {*table.schema.names})
    if missing or len({*columns}) < len(columns):
        raise InvalidUsageError(f"{uri} has no column {', '.join(missing)}." if missing else "A column is named twice.")
    for fault in check_keys(table, columns, RowReader()):
        raise DuplicateKeysError(
            f"{', '.join(columns)} cannot be the primary key of {uri}: {fault.evidence}",
            remedy="Remove these rows, or choose other columns.",
        )
    return True


def mark_primary_key(table: Table, columns: Sequence[str]) -> None:
    """Mark columns as the primary key, in this order, and as never NULL: two commits of pylance.

    Raises:
        CommitLostError: a concurrent commit conflicted, perhaps with rows that were not checked: check again.
        StorageError: the store failed: run it again.
        UnsupportedFeatureError: writers need a feature that this release does not support; pylance may drop its flag.
    """
    check_writable(table.manifest.manifest)
    table.guard.check()
    marks: dict[str, dict[str, str | None]] = {
        name: {_FLAG: "true"} if len(columns) == 1 else {_FLAG: "true", _POSITION: str(position)}
        for position, name in enumerate(columns, 1)
    }
    try:
        with lance_errors("mark the primary key of", table.location.uri):
            dataset = open_dataset(table.location, version=table.version)
            if nullable := [name for name in columns if dataset.schema.field(name).nullable]:
                changes: list[Any] = [{"path": name, "nullable": False} for name in nullable]
                dataset.alter_columns(*changes)
                record(int(dataset.version))
            dataset.update_field_metadata(marks)
            record(int(dataset.version))
    except MemwalOpsError as error:
        if is_commit_conflict(error):
            raise commit_lost(table, table.version + 1) from error
        raise


_RESULTS = {
    "created": "was created",
    "added": "was extended",
    "unchanged": "exists already",
    "dry_run": "would be created",
}
# The number of region ids that the text report lists.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LanceInitReport:
    """The result of ``init``: all specs and indexes, and those that this run added, or would add.

    ``open_regions``: regions of other specs that still take rows; they must be sealed and merged before rows are routed
    by an added spec.
    """

    decision: str
    uri: str
    version: int
    specs: tuple[memwal_pb2.RegionSpec, ...]
    maintained_indexes: tuple[str, ...]
    added_specs: tuple[int, ...] = ()
    added_indexes: tuple[str, ...] = ()
    open_regions: tuple[UUID, ...] = ()

    @property
    def exit_code(self) -> int:
        """0."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``."""
        return {
            "decision": self.decision,
            "uri": self.uri,
            "version": self.version,
            "region_specs": [
                {"spec_id": spec.spec_id, "fields": [_field(field) for field in spec.fields]} for spec in self.specs
            ],
            "maintained_indexes": [*self.maintained_indexes],
            "added_region_specs": [*self.added_specs],
            "added_maintained_indexes": [*self.added_indexes],
            "open_regions": [str(region) for region in self.open_regions],
        }

    def describe(self) -> str:
        """The text for a terminal."""
        fields = [f"{field.field_id} ({field.result_type})" for spec in self.specs for field in spec.fields]
        regions = f"regions by {', '.join(fields)}" if fields else "regions that writers choose"
        kept = f"indexes that writers maintain: {', '.join(self.maintained_indexes) or 'that of the key'}"
        extends = self.decision == "dry_run" and (self.added_specs or self.added_indexes)
        done = "would be extended" if extends else _RESULTS[self.decision]
        text = f"The MemWAL index of {self.uri} {done} (version {self.version}): {regions}; {kept}."
        if self.added_specs:
            text += f"\nNew region specs: {', '.join(map(str, self.added_specs))}."
        if self.added_indexes:
            text += f"\nNew maintained indexes: {', '.join(self.added_indexes)}."
        if self.open_regions:
            shown = ", ".join(map(str, self.open_regions[:_SHOWN])) + (", ..." if self.open_regions[_SHOWN:] else "")
            text += (
                f"\nOpen regions of other specs: {len(self.open_regions)} ({shown}). RegionRouter refuses the new spec "
                "until each is sealed, by RegionWriter(URI, REGION).seal(), and memwal-ops merge URI has run."
            )
        return text


def init(location: Location, store: Store, options: InitOptions, *, dry_run: bool) -> LanceInitReport:
    """Create the MemWAL index according to the options, or add what it lacks. Nothing is changed or removed.

    Raises ``MemwalOpsError``: as :func:`memwal_ops.formats.lance.log.create.create_mem_wal`.
    """
    fields = tuple(RegionField.parse(text) for text in options.region_fields)
    wanted: dict[str, Any] = {
        "region_specs": (RegionSpec(fields),) if fields else (),
        "maintained_indexes": options.maintained_indexes,
    }
    refuse_log_beside_dynamodb(location, logged=True)
    table = read_table(location, store)
    check_rewritable(table)
    if table.log.exists:
        if options.primary_key:
            check_primary_key(table, options.primary_key)
        return _add(table, wanted, dry_run=dry_run)
    if find_memwal_entry(table.manifest.indexes) is not None:
        _ = table.index  # legacy: raises an error with a remedy
    create.refuse_existing(table)
    retry = CommitRetry()
    while options.primary_key and check_primary_key(table, options.primary_key):
        marked = replace(table, primary_key=options.primary_key)
        create.plan_mem_wal(marked, **wanted)
        if dry_run:
            table = marked
            break
        try:
            mark_primary_key(table, options.primary_key)
        except CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            table = read_table(location, store)
    details = create.plan_creation(table, **wanted).details
    if not dry_run:
        table = create.create_mem_wal(location, store, **wanted)
        try_to_record_schema(table)
        details = table.index.details
    return _report("dry_run" if dry_run else "created", table, details)


def _add(table: Table, wanted: dict[str, Any], *, dry_run: bool) -> LanceInitReport:
    before = table.index.details
    details = create.plan_additions(table, wanted["region_specs"], wanted["maintained_indexes"])
    if details == before:
        return _report("unchanged", table, details)
    if not dry_run:
        table = create.create_mem_wal(table.location, table.store, **wanted)
        try_to_record_schema(table)
        details = table.index.details
    return _report("dry_run" if dry_run else "added", table, details, before)


def _report(
    decision: str,
    table: Table,
    details: memwal_pb2.MemWalIndexDetails,
    before: memwal_pb2.MemWalIndexDetails | None = None,
) -> LanceInitReport:
    old = details if before is None else before
    known = {spec.spec_id for spec in old.region_specs}
    added = tuple(spec.spec_id for spec in details.region_specs if spec.spec_id not in known)
    regions: list[UUID] = []
    for region_id in table.regions.region_ids if added else ():
        newest = table.region(region_id).latest(checked=True)
        if not newest.sealed and newest.region_spec_id != max(added):
            regions.append(region_id)
    return LanceInitReport(
        decision,
        table.location.uri,
        table.version,
        tuple(details.region_specs),
        tuple(details.maintained_indexes),
        added,
        tuple(name for name in details.maintained_indexes if name not in old.maintained_indexes),
        tuple(regions),
    )


def _field(field: memwal_pb2.RegionField) -> dict[str, Any]:
    return {
        "field_id": field.field_id,
        "source_ids": [*field.source_ids],
        "transform": field.transform if field.HasField("transform") else None,
        "expression": field.expression if field.HasField("expression") else None,
        "result_type": field.result_type,
        "parameters": dict(field.parameters),
    }
