"""Record which fields the versions of a table had, so that it is known after the versions are deleted.

A generation is merged by the field ids of its flush; whether an id was used again since is shown by the versions
(:mod:`memwal_ops.formats.lance.retention.schema_history`). Others delete them: LanceDB's advice for small disks is
``compact`` and ``cleanup_old_versions`` right after it. So the supervisor's poll, ``init`` and ``expire`` write what
versions show to ``_mem_wal_ops/schema/``, before those are deleted: a span of successive versions with the same
fields takes some bytes for each field, however many versions it has. Only ``expire`` fails without it.

The record of a table is not trusted for another one at the same URI, or after a restore from a backup: the manifest of
the last recorded version must be the recorded one. If that version is gone, the versions between it and the oldest
existing one are missing, and the record only tells how many
(:mod:`memwal_ops.formats.lance.retention.schema_record`); then the table must have the same MemWAL index.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import structlog

from memwal_ops.errors import InvalidFormatError, MemwalOpsError, ObjectNotFoundError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.versions import operation_of, parent_version, read_version_manifest
from memwal_ops.formats.lance.retention.schema_record import (
    Field,
    FileIds,
    Part,
    SchemaRecord,
    Span,
    decode_schema_record,
    encode_schema_record,
)
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry
from memwal_ops.storage.concurrently import concurrently
from memwal_ops.storage.export_file import NotExportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import ObjectMeta

SCHEMA_FOLDER = "_mem_wal_ops/schema"
_NAME = re.compile(rf"{SCHEMA_FOLDER}/([0-9]{{20}})-[0-9a-f]{{16}}\.json", re.ASCII)
_CONCURRENT_READS = 16
# How many versions a poll reads. What it leaves out is recorded by ``expire`` before it is deleted.
_BOUND = 128
# Operations that change no field; an unknown one may.
_KEEP_FIELDS = frozenset(
    {"append", "delete", "create index", "rewrite", "reserve fragments", "update", "update config"}
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def nanoseconds(time: datetime) -> int:
    """Nanoseconds since 1970 of an aware time, exactly: equal times stay equal, and a file may be given the time."""
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000


def span_of(number: int, found: VersionManifest, stored: int, key: Collection[str]) -> Span:
    """One version as a span.

    Args:
        stored: the time of its file, in ns.
        key: names of the key columns.
    """
    manifest, transaction = found.manifest, found.transaction
    keys = {one.id for one in manifest.fields if one.name in key and one.parent_id < 0}
    files = [set(file.fields) for fragment in manifest.fragments for file in fragment.files if file.fields]
    return Span(
        number,
        number,
        manifest.timestamp.ToNanoseconds(),
        stored,
        # Without a transaction, a restore cannot be recognized: see ``has_transaction``.
        number - 1 if transaction is None else parent_version(found),
        transaction is not None,
        tuple(Field(one.id, one.name, one.logical_type, one.parent_id) for one in manifest.fields),
        FileIds(max((max(ids) for ids in files if keys & ids), default=-1), frozenset(map(max, files))),
        transaction is not None and operation_of(transaction) in _KEEP_FIELDS,
    )


def index_of(found: VersionManifest) -> str:
    """The uuid of the MemWAL index; empty: there is none."""
    entry = find_memwal_entry(found.indexes)
    return "" if entry is None else entry.uuid.uuid.hex()


def read_schema_record(table: Table) -> SchemaRecord:
    """The record that belongs to the history of this version; an empty one if there is none.

    A listing, and for each record, of which there is usually one, two requests.
    """
    return _newest_record(table, _records(table))


def extended_record(table: Table, known: SchemaRecord, *, limit: int | None = _BOUND) -> SchemaRecord:
    """The record with the existing versions that it does not have, the newest ``limit`` of them."""
    made = known
    if known.last < table.version:
        for part in _unrecorded(table, known, limit):  # joined one by one: there may be many, of many fields
            made = SchemaRecord.of([*made.parts, part])
    return made


def record_schema(table: Table, *, limit: int | None = None) -> None:
    """Record the existing versions up to this one that are not recorded. Nothing is done for a table without MemWAL.

    Safe to kill and to run concurrently. Requests: a listing; if there is anything to record, one for each version, and
    five.

    Args:
        table: the newest version.
        limit: how many versions are read at most, newest first.
    """
    if not table.log.exists:
        return
    records = _records(table)
    name = f"{SCHEMA_FOLDER}/{table.version:020}-{_digest(_mark(table.manifest))}.json"
    if any(meta.path == name for _, meta in records):
        return
    known = _newest_record(table, records)
    table.store.put_if_absent(name, encode_schema_record(extended_record(table, known, limit=limit)))
    outdated = [meta.path for number, meta in records if number <= known.last]
    if outdated:
        table.store.delete_many(outdated)


def try_to_record_schema(table: Table) -> None:
    """The same for callers that do not depend on it: an error is only logged, and few versions are read."""
    try:
        record_schema(table, limit=_BOUND)
    except MemwalOpsError as error:
        structlog.get_logger(__name__).debug("schema_not_recorded", error=error.reason)


def _records(table: Table) -> list[tuple[int, ObjectMeta]]:
    """All records, the newest first."""
    named = ((_NAME.fullmatch(meta.path), meta) for meta in table.store.list(SCHEMA_FOLDER))
    return sorted(((int(name[1]), meta) for name, meta in named if name), key=lambda one: one[0], reverse=True)


def _newest_record(table: Table, records: Iterable[tuple[int, ObjectMeta]]) -> SchemaRecord:
    for number, meta in records:
        found = _read(table, meta.path) if number <= table.version else None
        if found is not None and found.last == number and _is_of(table, found.parts[-1]):
            return found
    return SchemaRecord()


def _is_of(table: Table, part: Part) -> bool:
    """Whether the last recorded version is one of this table; if it is gone, whether the MemWAL index is the same."""
    found = table.manifest if part.last == table.version else _manifest(table, part.last)
    return part.mark == _mark(found) if found is not None else part.index[1] == index_of(table.manifest) != ""


def _manifest(table: Table, number: int) -> VersionManifest | None:
    try:
        return read_version_manifest(table.store, number, table.naming)
    except (ObjectNotFoundError, NotExportedError, InvalidFormatError):
        return None


def _mark(found: VersionManifest) -> str:
    transaction = "" if found.transaction is None else found.transaction.uuid
    return f"{found.manifest.timestamp.ToNanoseconds()}:{transaction}"


def _digest(mark: str) -> str:
    return hashlib.sha256(mark.encode()).hexdigest()[:16]


def _unrecorded(table: Table, known: SchemaRecord, limit: int | None) -> Iterator[Part]:
    """The existing versions after those that are known, ascending; damaged ones count as missing."""
    listed = table.history.listed()
    numbers = sorted((one for one in listed if known.last < one < table.version), reverse=True)[:limit]
    lowest = min(listed, default=table.version)

    def read(number: int) -> Part | None:
        found = table.manifest if number == table.version else _manifest(table, number)
        if found is None:
            return None
        stored = nanoseconds(listed[number].last_modified) if number in listed else 0
        span = span_of(number, found, stored, table.primary_key)
        return Part((span,), number <= lowest, (index_of(found),) * 2, _mark(found))

    for _, part in concurrently(read, [*reversed(numbers), table.version], threads=_CONCURRENT_READS):
        if part is not None:
            yield part


def _read(table: Table, path: str) -> SchemaRecord | None:
    """What it records; None if it is damaged, of a later release, or was deleted meanwhile: then it proves nothing."""
    try:
        return decode_schema_record(table.store.get(path), path)
    except (ObjectNotFoundError, UnsupportedFeatureError, NotExportedError, ValueError):
        return None
