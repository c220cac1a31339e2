"""Record which fields the versions of a table had, so that it is known after the versions are deleted.

A generation is merged by the field ids of its flush; whether an id was used again since is shown by the versions
(:mod:`memwal_ops.formats.lance.retention.schema_history`). Others delete them: LanceDB's advice for small disks is
``compact`` and ``cleanup_old_versions`` right after it. So the supervisor's poll, ``init`` and ``expire`` write what
versions show to ``_mem_wal_ops/schema/``, before those are deleted: a span of successive versions with the same
fields takes some bytes for each field, however many versions it has. Only ``expire`` fails without it.

The record of a table is not trusted for another one at the same URI, or after a restore from a backup: the manifest of
the last recorded version must be the recorded one. If that version is gone, the versions between it and the oldest
existing one are missing, and the record only tells how many; then the table must have the same MemWAL index.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from memwal_ops.errors import InvalidFormatError, MemwalOpsError, ObjectNotFoundError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.version_files import operation_of, parent_version, read_version_manifest
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry
from memwal_ops.log import get_logger
from memwal_ops.storage.api import ObjectMeta, concurrently
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


_MAX_SPANS = 64


class Field(NamedTuple):
    """A field as it stands in a manifest."""

    id: int
    name: str
    logical_type: str
    parent_id: int


@dataclass(frozen=True, slots=True)
class Span:
    """Successive versions with the same fields. Each of them changed the one before it.

    Attributes:
        first, last: their numbers.
        written: the earliest timestamp in their manifests, in ns.
        stored: the earliest time of their files, in ns, by the store's clock.
        parent: what the first is based on, see :func:`parent_version`.
        has_transaction: whether the first one's transaction is known.
        fields: in their order.
        files: the field ids in their files.
        keeps_fields: whether the first one's operation changes no field.
    """

    first: int
    last: int
    written: int
    stored: int
    parent: int | None
    has_transaction: bool
    fields: tuple[Field, ...]
    files: FileIds
    keeps_fields: bool

    @property
    def ids(self) -> frozenset[int]:
        """Of all fields."""
        return frozenset(field.id for field in self.fields)

    @property
    def follows(self) -> bool:
        """Whether the first one changed the version before it."""
        return self.has_transaction and self.parent == self.first - 1

    def joined(self, later: Span) -> Span:
        """With the span that follows on it and has the same fields."""
        return replace(
            self,
            last=later.last,
            written=min(self.written, later.written),
            stored=min(self.stored, later.stored),
            files=self.files.joined(later.files),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Successive versions, all of which were read.

    Attributes:
        spans: of them, ascending.
        complete: whether no earlier version existed then, so that none can be restored later.
        index: the uuid of the MemWAL index in the first and in the last of them.
        mark: identifies the manifest of the last.
    """

    spans: tuple[Span, ...]
    complete: bool
    index: tuple[str, str]
    mark: str

    @property
    def first(self) -> int:
        """The first version."""
        return self.spans[0].first

    @property
    def last(self) -> int:
        """The last version."""
        return self.spans[-1].last

    def start_of(self, field_id: int) -> Span | None:
        """The span since which the last version's field with that id exists; None: it has none."""
        start = None
        for span in reversed(self.spans):
            if field_id not in span.ids:
                break
            start = span
            if not span.follows:
                break
        return start

    def files(self) -> FileIds:
        """The field ids in the files of all versions."""
        return reduce(FileIds.joined, (span.files for span in self.spans))


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """The schema record of a table. Parts ascend; versions between them are missing."""

    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part]) -> SchemaRecord:
        """A record of ascending parts: successive ones are joined, and the oldest spans left out if there are many."""
        return cls(_bounded(_joined(parts)))

    @property
    def last(self) -> int:
        """The last version; 0: none."""
        return self.parts[-1].last if self.parts else 0

    def spans(self) -> Iterator[Span]:
        """All spans, ascending."""
        for part in self.parts:
            yield from part.spans

    def span_of(self, version: int) -> Span | None:
        """The span of a version; None: it is not recorded."""
        return next((span for span in self.spans() if span.first <= version <= span.last), None)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """With successive parts as one, and successive spans of the same fields."""
    made = [*parts[:1]]
    for earlier, later in pairwise(parts):
        if later.first != earlier.last + 1:
            made.append(later)
            continue
        before = made[-1]
        last, first = before.spans[-1], later.spans[0]
        same = first.follows and first.fields == last.fields
        spans = (*before.spans[:-1], last.joined(first)) if same else (*before.spans, first)
        made[-1] = Part((*spans, *later.spans[1:]), before.complete, (before.index[0], later.index[1]), later.mark)
    return made


def _bounded(parts: list[Part]) -> tuple[Part, ...]:
    room = _MAX_SPANS
    kept: list[Part] = []
    for part in reversed(parts):
        spans = part.spans[-room:] if room > 0 else ()
        if not spans:
            break
        kept.append(replace(part, spans=spans, complete=part.complete and len(spans) == len(part.spans)))
        room -= len(spans)
    return tuple(reversed(kept))


def encode_schema_record(record: SchemaRecord) -> bytes:
    """The stored form."""
    return encode_record(
        {
            "parts": [
                {
                    "complete": part.complete,
                    "index": [*part.index],
                    "mark": part.mark,
                    "spans": [_span_document(span) for span in part.spans],
                }
                for part in record.parts
            ]
        }
    )


def _span_document(span: Span) -> dict[str, object]:
    return {
        "versions": [span.first, span.last],
        "written": span.written,
        "stored": span.stored,
        "parent": span.parent,
        "has_transaction": span.has_transaction,
        "fields": [[*field] for field in span.fields],
        "with_key": span.files.with_key,
        "highest": sorted(span.files.highest),
        "keeps_fields": span.keeps_fields,
    }


def decode_schema_record(data: bytes, path: str) -> SchemaRecord:
    """Decode the stored form.

    Raises:
        UnsupportedFeatureError: a later release wrote it.
        ValueError: it is damaged.
    """
    try:
        record = SchemaRecord(tuple(map(_part, decode_record(data, path)["parts"])))
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"it is no schema record: {error!r:.100}") from error
    spans = [*record.spans()]
    if not spans or any(earlier.last >= later.first for earlier, later in pairwise(spans)):
        raise ValueError("its versions are not in order")
    return record


def _part(document: Any) -> Part:
    first, last = document["index"]
    spans = tuple(map(_span, document["spans"]))
    if any(earlier.last + 1 != later.first for earlier, later in pairwise(spans)):
        raise ValueError("versions of a part are not successive")
    return Part(spans, document["complete"] is True, (str(first), str(last)), str(document["mark"]))


def _span(document: Any) -> Span:
    first, last = map(_number, document["versions"])
    if not 0 < first <= last:
        raise ValueError(f"there are no versions {first} to {last}")
    parent = document["parent"]
    return Span(
        first,
        last,
        _number(document["written"]),
        _number(document["stored"]),
        None if parent is None else _number(parent),
        document["has_transaction"] is True,
        tuple(map(_field, document["fields"])),
        FileIds(_number(document["with_key"]), frozenset(map(_number, document["highest"]))),
        document["keeps_fields"] is True,
    )


def _field(document: Any) -> Field:
    number, name, kind, above = document
    return Field(_number(number), str(name), str(kind), _number(above))


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


_DROP_AND_ADD = 2


@dataclass(frozen=True, slots=True)
class FileIds:
    """The field ids in the data files of some versions.

    Attributes:
        with_key: the highest id in a file that has the key column too, of the version in which it is lowest; -1: none.
        highest: the highest id of each file.
    """

    with_key: int
    highest: frozenset[int]

    def joined(self, other: FileIds) -> FileIds:
        """Of the versions of both."""
        return FileIds(min(self.with_key, other.with_key), self.highest | other.highest)


def fewest_versions(field_id: int, before: FileIds, now: Collection[int]) -> int:
    """The number of versions that it takes at least until another column has a field id.

    Args:
        before: the files before the missing versions.
        now: all field ids after them.
    """
    return min(_versions(first, before, now) for first in range(field_id + 1))


def _versions(first: int, before: FileIds, now: Collection[int]) -> int:
    """The same if ``first`` is the lowest id that is given away again."""
    rewritten = before.with_key >= first
    # Ids are successive: one that is missing was given to a column that was dropped, or replaced, since.
    given = set(range(first, max(now) + 1))
    follows = first == 0 or first - 1 in now or first - 1 in before.highest
    # A change of type gives a column another id, and takes away the one that it had, in one version.
    cast = len(set(range(first)) - set(now)) >= len(given)
    return _DROP_AND_ADD + rewritten + (not (given <= set(now) and (follows or cast)))


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
    """One version as a span. ``stored``: the time of its file, in ns. ``key``: names of the key columns."""
    manifest, transaction = found.manifest, found.transaction
    keys = {field.id for field in manifest.fields if field.name in key and field.parent_id < 0}
    files = [set(file.fields) for fragment in manifest.fragments for file in fragment.files if file.fields]
    return Span(
        number,
        number,
        manifest.timestamp.ToNanoseconds(),
        stored,
        # Without a transaction, a restore cannot be recognized: see ``has_transaction``.
        number - 1 if transaction is None else parent_version(found),
        transaction is not None,
        tuple(Field(field.id, field.name, field.logical_type, field.parent_id) for field in manifest.fields),
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
    digest = hashlib.sha256(_mark(table.manifest).encode()).hexdigest()[:16]
    name = f"{SCHEMA_FOLDER}/{table.version:020}-{digest}.json"
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
        get_logger(__name__).debug("schema_not_recorded", error=error.reason)


def _records(table: Table) -> list[tuple[int, ObjectMeta]]:
    named = ((_NAME.fullmatch(meta.path), meta) for meta in table.store.list(SCHEMA_FOLDER))
    return sorted(((int(name[1]), meta) for name, meta in named if name), key=lambda item: item[0], reverse=True)


def _newest_record(table: Table, records: Iterable[tuple[int, ObjectMeta]]) -> SchemaRecord:
    for number, meta in records:
        record = _read(table, meta.path) if number <= table.version else None
        if record is not None and record.last == number and _is_of(table, record.parts[-1]):
            return record
    return SchemaRecord()


def _is_of(table: Table, part: Part) -> bool:
    """Whether the last recorded version is one of this table; if it is gone, whether the MemWAL index is the same."""
    manifest = table.manifest if part.last == table.version else _manifest(table, part.last)
    return part.mark == _mark(manifest) if manifest is not None else part.index[1] == index_of(table.manifest) != ""


def _manifest(table: Table, number: int) -> VersionManifest | None:
    try:
        return read_version_manifest(table.store, number, table.naming)
    except (ObjectNotFoundError, NotExportedError, InvalidFormatError):
        return None


def _mark(found: VersionManifest) -> str:
    transaction = "" if found.transaction is None else found.transaction.uuid
    return f"{found.manifest.timestamp.ToNanoseconds()}:{transaction}"


def _unrecorded(table: Table, known: SchemaRecord, limit: int | None) -> Iterator[Part]:
    """The existing versions after those that are known, ascending; damaged ones count as missing."""
    listed = table.history.listed()
    numbers = sorted((version for version in listed if known.last < version < table.version), reverse=True)[:limit]
    lowest = min(listed, default=table.version)

    def read(number: int) -> Part | None:
        manifest = table.manifest if number == table.version else _manifest(table, number)
        if manifest is None:
            return None
        stored = nanoseconds(listed[number].last_modified) if number in listed else 0
        span = span_of(number, manifest, stored, table.primary_key)
        return Part((span,), number <= lowest, (index_of(manifest),) * 2, _mark(manifest))

    for _, part in concurrently(read, [*reversed(numbers), table.version], threads=_CONCURRENT_READS):
        if part is not None:
            yield part


def _read(table: Table, path: str) -> SchemaRecord | None:
    """What it records; None if it is damaged, of a later release, or was deleted meanwhile: then it proves nothing."""
    try:
        return decode_schema_record(table.store.get(path), path)
    except (ObjectNotFoundError, UnsupportedFeatureError, NotExportedError, ValueError):
        return None
