"""Determine from the base table's versions whether a field is the one that a generation was flushed with.

Lance reuses the id of a dropped column for the next one that is added if no data file has it any more (an
empty base table, a column that was entirely NULL). Timeline of the loss this prevents: a generation is
flushed with column ``note`` (id 3); ``note`` is dropped; ``email`` is added and gets id 3; a merge by id alone
writes every old note into ``email``. The same if ``note`` is added again: dropped values reappear.

A field exists from the version that added it to the one that dropped it. Two versions have the same field under
an id if both descend, through versions that have the field, from a common one. The parent of a restored version is
the one that it restores, not the one before it.

Of versions that were deleted, the record that was made before shows it
(:mod:`memwal_ops.formats.lance.retention.schema_recorder`).

Which version a generation belongs to, our writers record in it, and in each entry of their logs. Of others only times
show it, and those of files may be the times of a copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, SchemaProjectionError
from memwal_ops.formats.lance.files.version_files import parent_version, read_version_manifest
from memwal_ops.formats.lance.retention import schema_recorder
from memwal_ops.storage.api import Store, concurrently
from memwal_ops.storage.export_file import NotExportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

# A field without its id: its name, type, and the position of its parent in the list.
_Shape = list[tuple[str, str, int]]

SAME_COLUMNS = "memwal-ops.same-columns-at"
"""Key of the table's config by which an operator confirms that a version has the columns of earlier flushes.

Its value is the number of that version. It is used only if the versions that would show it are gone.
"""

OPENED = "memwal-ops.opened-version"
"""Key of the metadata of WAL entries and generations with the version that their writer opened."""

_OPENED = re.compile(r"([0-9]{1,20}) ([0-9]{1,20})", re.ASCII)
# From how many versions on the record of versions is read instead of them.
_MANY = 128
_CONCURRENT_READS = 16
_DATA_FILES_CHECKED = 8
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Version:
    """The properties of a version that are kept in memory.

    Attributes:
        written: the timestamp in its manifest, in ns.
        fields: in their order.
        ids: of all fields.
        parent: the version that it is based on; 0: none; None: unknown, as its transaction is damaged.
        has_transaction: whether its transaction is known; without it, a restore cannot be recognized.
        confirmed: the version whose columns an operator confirmed in this one's config.
    """

    written: int
    fields: tuple[schema_recorder.Field, ...]
    ids: frozenset[int]
    parent: int | None
    has_transaction: bool
    confirmed: str


class WriterVersion(NamedTuple):
    """The version whose columns a writer has.

    Attributes:
        number: its number.
        written: the timestamp in its manifest, in ns: a number may be that of another table at the same place.
    """

    number: int
    written: int

    @classmethod
    def of(cls, table: Table) -> WriterVersion:
        """That of a writer that opens this version."""
        return cls(table.version, table.manifest.manifest.timestamp.ToNanoseconds())

    @classmethod
    def parsed(cls, text: str | None) -> WriterVersion | None:
        """As it is stored; None: not recorded."""
        match = _OPENED.fullmatch(text or "")
        return None if match is None else cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number} {self.written}"


@dataclass(frozen=True, slots=True)
class Flush:
    """When rows were flushed, or put into the log.

    Attributes:
        by_writer: by the writer's clock, in ns; None: not known.
        by_store: by the store's, which has whole seconds on some stores.
        opened: the version that the writer had opened; None: not recorded.
    """

    by_writer: int | None
    by_store: int
    opened: WriterVersion | None = None

    @property
    def earliest(self) -> int:
        """The earlier of the two."""
        return self.by_store if self.by_writer is None else min(self.by_writer, self.by_store)

    @property
    def clock_is_ahead(self) -> bool:
        """Whether the writer's clock is ahead. One that is behind cannot be distinguished from a copied file."""
        return self.by_writer is not None and self.by_writer > self.by_store + _SECOND


# Versions are immutable, and a backlog is merged in many passes, each of which needs all since its oldest flush.
_KNOWN: WeakKeyDictionary[Store, dict[int, _Version]] = WeakKeyDictionary()


class SchemaHistory:
    """The schema history of one table. Versions are read lazily, newest first, and by any number of threads."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._read: dict[int, _Version | None] = {table.version: _version(table.manifest)}
        self._known: dict[int, _Version] | None = None
        self._reading = RLock()  # generations are opened in threads that share a history
        self._in_a_row = 0
        self._at: dict[int, int | None] = {}
        self._stored: dict[int, int] | None = None
        self._verdicts: dict[tuple[int, int], bool | None] = {}
        self._in_both: dict[WriterVersion, int | None] = {}
        self._spans: dict[int, _Version] = {}

    @classmethod
    def of(cls, table: Table) -> SchemaHistory:
        """That of a version, with what was read of it before."""
        return table.once("schema history", lambda: cls(table))

    def is_same_field(self, field_id: int, flush: Flush, *, renamed: bool, adopted: int = 0) -> bool | None:
        """Whether the field that the newest version has under an id is the one that a generation was flushed with.

        Args:
            field_id: the id, which both have.
            flush: the generation's.
            renamed: whether their names differ.
            adopted: the version to whose columns the rows belong by an operator's decision (``adopt``), if later than
                the flush; used if the table was overwritten after the flush.

        Returns:
            False if the id was reused in between; None if the versions that would show it no longer exist, or if the
            clocks of writer and store contradict each other.
        """
        at: int | None
        by_store: int | None
        shared = None if flush.opened is None else self._shared_id(flush.opened)
        if flush.opened is not None and shared is not None and (field_id <= shared or self._is_near(flush.opened)):
            if field_id <= shared:
                return True
            by_store = at = flush.opened.number
        else:
            by_store = self._version_by_store(flush.by_store)
            no_clock = flush.by_writer is None or flush.clock_is_ahead
            at = by_store if no_clock else self._version_by_writer(flush.by_writer or 0)
            if self.has_time_of_copy(flush):
                # Timeline by these times: a column is dropped and added again; the table is copied; the log, which is
                # older than the drop, is younger than all versions: the dropped values come back.
                return True if self._same_since_first(field_id) or self._confirmed(field_id, flush) else None
        if adopted and (at is None or not self._same_table(at)):
            # The table was overwritten since the flush, so its columns are unrelated to those before. If it was not,
            # they are related, and the decision about a region's rows must not restore a dropped column.
            by_store, at = (max(adopted, version or 0) for version in (by_store, at))
        verdict = None if at is None else self._same(field_id, at)
        if verdict is False and at != by_store:
            # With a clock that is behind, values of a column that was added before the flush would be lost.
            verdict = False if by_store is not None and self._same(field_id, by_store) is False else None
        if verdict is None and (
            self._confirmed(field_id, flush)
            or (not renamed and self._in_file(field_id, flush))
            or self._not_reused(field_id, flush)
        ):
            return True
        return verdict

    def _shared_id(self, opened: WriterVersion) -> int | None:
        """The highest field id in the data files that this version and the newest have; -1: none.

        While a file has an id, neither it nor a lower one is given to another field. None: the version is not known, or
        is not the one that a writer opened.
        """
        if opened not in self._in_both:
            self._in_both[opened] = self._compared_files(opened)
        return self._in_both[opened]

    def _compared_files(self, opened: WriterVersion) -> int | None:
        newest = self._table.manifest.manifest
        if opened.number == newest.version:
            return -1 if opened == WriterVersion.of(self._table) else None
        try:
            manifest = read_version_manifest(self._table.store, opened.number, self._table.naming).manifest
        except (ObjectNotFoundError, NotExportedError):
            span = self._record.span_of(opened.number)
            return -1 if span is not None and span.written <= opened.written else None
        except InvalidFormatError:
            return None
        if manifest.timestamp.ToNanoseconds() != opened.written:
            return None
        files = {file.path for fragment in manifest.fragments for file in fragment.files}
        kept = (file for fragment in newest.fragments for file in fragment.files if file.path in files)
        return max((max(file.fields, default=-1) for file in kept), default=-1)

    def _is_near(self, opened: WriterVersion) -> bool:
        """Whether it takes few requests to follow the history from the newest version to this one."""
        return abs(self._table.version - opened.number) <= _MANY or self._record.span_of(opened.number) is not None

    def has_time_of_copy(self, flush: Flush) -> bool:
        """Whether only the time of a file is known, and files of the table are younger than their content: a copy's."""
        number = None if flush.by_writer is not None else self._version_by_store(flush.by_store)
        version = None if number is None else self._version(number)
        stored = (self._stored or {}).get(number or 0)
        return version is not None and stored is not None and stored > version.written + _SECOND

    def _same_since_first(self, field_id: int) -> bool:
        """Whether the field is the same in all existing versions that have it."""
        oldest = min(self._table.history.listed(), default=self._table.version)
        first = next(
            (version for version in range(oldest, self._table.version) if self._has(version, field_id)), oldest
        )
        return self._same(field_id, first) is True

    def _version_by_writer(self, time: int) -> int | None:
        """The newest version at that time by the timestamps in the manifests; None if it is gone."""
        if time not in self._at:
            self._at[time] = self._newest_at(lambda number: self._written(number, time) <= time)
        return self._at[time]

    def _written(self, number: int, unknown: int) -> int:
        version = self._version(number)
        return unknown if version is None else version.written  # expired since it was listed

    def _newest_at(self, is_before: Callable[[int], bool]) -> int | None:
        """The newest version that was written before a moment; None if it is not known, since the next one is gone.

        Versions after the next one need not exist: of a restored table, those after the version that was restored may
        have been expired. They were written after it.
        """
        listed = {number for number in self._table.history.listed() if number < self._table.version}
        newest = self._newest_of(listed, is_before)
        if newest is None and self._record.parts:
            # All versions of a span have the same fields: the last of those that are gone stands for them.
            recorded = {number for span in self._record.spans() for number in (span.first, span.last)}
            newest = self._newest_of(listed | recorded, is_before)
        return newest

    def _newest_of(self, numbers: set[int], is_before: Callable[[int], bool]) -> int | None:
        newest = self._table.version
        for number in sorted({*(number for number in numbers if number < newest), newest}, reverse=True):
            if is_before(number):
                known = number == newest or number + 1 in numbers or number + 1 == newest
                return number if known and self._version(number) is not None else None
        return None

    def _version_by_store(self, time: int) -> int | None:
        """The newest version at that time by the store's clock; None if it is gone."""
        if self._stored is None:
            listed = self._table.history.listed()
            recorded = {number: span.stored for span in self._record.spans() for number in (span.first, span.last)}
            stored = {version: schema_recorder.nanoseconds(meta.last_modified) for version, meta in listed.items()}
            self._stored = recorded | stored
        stored = self._stored
        number = self._newest_at(lambda number: stored.get(number, time) <= time)
        return number if number in stored else None

    def _same_table(self, at: int) -> bool:
        """Whether version ``at`` is of the same table as the newest, by the key column, which cannot be dropped."""
        key = self._table.primary_key[0]
        ids = (field.id for field in self._table.manifest.manifest.fields if field.name == key and field.parent_id < 0)
        return self._same(next(ids), at) is True

    def _same(self, field_id: int, at: int) -> bool | None:
        """Whether the field of the newest version and that of version ``at`` have a common origin."""
        key = field_id, at
        if key not in self._verdicts:
            self._verdicts[key] = self._compared(field_id, at)
        return self._verdicts[key]

    def _compared(self, field_id: int, at: int) -> bool | None:
        place = self._nearest(field_id, at)
        if place is None:
            return None
        lines = [self._table.version, place]
        while lines[0] != lines[1]:
            lines.sort()
            version = self._version(lines[1])
            if version is None or version.parent is None:
                return None
            lines[1] = version.parent
            parent = self._version(version.parent) if version.parent else None
            if version.parent and parent is None:
                return None
            if parent is None or field_id not in parent.ids:
                return False if version.has_transaction else None
        return True

    def _nearest(self, field_id: int, at: int) -> int | None:
        """The version whose field a writer had that flushed at version ``at``; None if it is gone.

        The writer may have opened the table before the field was dropped, or its clock may be behind.
        """
        for number in range(at, 0, -1):
            version = self._version(number)
            if version is None:
                return None
            if field_id in version.ids:
                return number
        later = (number for number in range(at + 1, self._table.version + 1) if self._has(number, field_id))
        return next(later, None)

    def _has(self, number: int, field_id: int) -> bool:
        version = self._version(number)
        return version is not None and field_id in version.ids

    def _confirmed(self, field_id: int, flush: Flush) -> bool:
        """Whether an operator confirmed the field, in a version since which it was not dropped."""
        confirmed: str | None = None
        for number, version in self._newest_first():
            confirmed = version.confirmed if confirmed is None else confirmed
            if field_id not in version.ids or version.written <= flush.earliest:
                return False
            if confirmed in {str(number), str(number - 1)}:  # the confirmed version, or the next, which has the config
                return True
        return False

    def _in_file(self, field_id: int, flush: Flush) -> bool:
        """Whether a data file of the newest version is older than the generation and has the id or a higher one.

        While a file has an id, neither it nor a lower one is given to another field.
        """
        with_id = (
            file
            for fragment in self._table.manifest.manifest.fragments
            for file in fragment.files
            if max(file.fields, default=-1) >= field_id and not file.HasField("base_id")
        )
        for file in islice(with_id, _DATA_FILES_CHECKED):
            meta = self._table.store.head(f"data/{file.path}")
            if meta is not None and schema_recorder.nanoseconds(meta.last_modified) <= flush.earliest:
                return True
        return False

    def _not_reused(self, field_id: int, flush: Flush) -> bool:
        """Whether too few versions are missing since the flush for the id to have been given to another field."""
        newer: schema_recorder.Part | None = None
        for part in reversed(self._evidence.parts):
            start = part.start_of(field_id)
            if start is None or (newer is not None and not _joins(field_id, part, start, newer)):
                return False
            if max(start.written, start.stored) <= flush.earliest:
                return True
            if start.first > part.first:
                return False
            newer = part
        return False

    def base_ids(self, generation: table_pb2.Manifest, *, ignore: str) -> dict[int, int] | None:
        """The base's ids for a generation whose fields are numbered independently of the base.

        They are taken from the newest version that existed when the generation was flushed and had the same fields in
        the same order. If those versions are gone, the numbers are the base's own if the oldest version that exists
        has the same fields and never dropped one (its ids have no gap).

        Args:
            generation: its manifest.
            ignore: a top-level field of the generation that the base never had.

        Returns:
            Generation id to base id; None if that cannot be determined.
        """
        fields = [field for field in generation.fields if field.name != ignore or field.parent_id >= 0]
        wanted = _shape(fields)
        flushed = generation.timestamp.ToNanoseconds()
        oldest: _Version | None = None
        for _, version in self._newest_first():
            oldest = version
            if version.written <= flushed and _shape(version.fields) == wanted:
                return {mine.id: theirs.id for mine, theirs in zip(fields, version.fields, strict=True)}
        if oldest is None or oldest.written <= flushed or _shape(oldest.fields) != wanted:
            return None
        ids = [field.id for field in oldest.fields]
        return {mine.id: mine.id for mine in fields} if ids == list(range(len(ids))) else None

    @cached_property
    def _record(self) -> schema_recorder.SchemaRecord:
        """What is recorded of versions; it is read once a version is missing."""
        return schema_recorder.read_schema_record(self._table)

    @cached_property
    def _evidence(self) -> schema_recorder.SchemaRecord:
        """The record with what the existing versions show."""
        return schema_recorder.extended_record(self._table, self._record)

    def _newest_first(self) -> Iterator[tuple[int, _Version]]:
        for number in range(self._table.version, 0, -1):
            version = self._version(number)
            if version is None:
                return
            yield number, version

    def _version(self, number: int) -> _Version | None:
        with self._reading:
            if number not in self._read and not self._is_gone(number) and not self._is_far(number):
                self._in_a_row = max(1, 2 * self._in_a_row) if number + 1 in self._read else 1
                self._read_down(number, min(self._in_a_row, _CONCURRENT_READS))
            return self._read.get(number) or self._recorded(number)

    def _is_gone(self, number: int) -> bool:
        """Whether a recorded version is known to be missing, without a request for it."""
        return number not in self._table.history.listed() and self._recorded(number) is not None

    def _is_far(self, number: int) -> bool:
        return number < self._table.version - _MANY and self._recorded(number) is not None

    def _recorded(self, number: int) -> _Version | None:
        """A version that is gone; those of a span stand for each other, and each is based on the first of them."""
        span = self._record.span_of(number)
        if span is None:
            return None
        if span.first not in self._spans:
            self._spans[span.first] = _Version(
                written=span.written,
                fields=span.fields,
                ids=span.ids,
                parent=span.parent,
                has_transaction=span.has_transaction,
                confirmed="",
            )
        first = self._spans[span.first]
        return first if number == span.first else replace(first, parent=span.first, has_transaction=True)

    def _read_down(self, number: int, count: int) -> None:
        """Read a version and the ``count`` - 1 before it at once, as most searches go through consecutive versions.

        Raises ``SchemaProjectionError``: it is damaged; the others are read again when they are needed.
        """
        known = self._validated()
        missing = [older for older in range(number, max(0, number - count), -1) if older not in self._read]
        fetched = dict(concurrently(partial(self._known_or_fetched, known), missing, threads=count))
        for older in missing:
            schema = fetched[older]
            if isinstance(schema, SchemaProjectionError):
                if older == number:
                    raise schema
                return
            self._read[older] = self._shared(known, older, schema)

    def _known_or_fetched(self, known: dict[int, _Version], number: int) -> _Version | SchemaProjectionError | None:
        try:
            return known.get(number) or self._fetched(number)
        except SchemaProjectionError as error:
            return error

    def _shared(self, known: dict[int, _Version], number: int, version: _Version | None) -> _Version | None:
        if version is not None:
            later = known.get(number + 1)
            if later is not None and later.fields == version.fields:
                version = replace(version, fields=later.fields, ids=later.ids)  # shared: schemas rarely change
            known[number] = version
        return version

    def _validated(self) -> dict[int, _Version]:
        """The versions that earlier runs read; none if there is another table at the URI now, or the newest is gone."""
        if self._known is None:
            known = _KNOWN.get(self._table.store, {})
            newest = max(list(known), default=None)
            if newest is not None and self._fetched(newest) != known[newest]:
                known = {}  # not emptied: another run may be reading it
            self._known = _KNOWN[self._table.store] = known
        return self._known

    def _fetched(self, number: int) -> _Version | None:
        try:
            return _version(read_version_manifest(self._table.store, number, self._table.naming))
        except (ObjectNotFoundError, NotExportedError):
            return None
        except InvalidFormatError as error:
            # Regions with generations older than the change are blocked by this; all others are merged.
            raise SchemaProjectionError(
                f"A version that is needed to match the generation's columns is damaged: {error}",
                remedy="Restore that file from a backup; or give the columns their old names back, merge, and "
                "rename them again.",
            ) from error


def _version(found: VersionManifest) -> _Version:
    manifest, transaction = found.manifest, found.transaction
    fields = tuple(
        schema_recorder.Field(field.id, field.name, field.logical_type, field.parent_id) for field in manifest.fields
    )
    # Without a transaction, a restore cannot be recognized: see ``has_transaction``.
    parent = int(manifest.version) - 1 if transaction is None else parent_version(found)
    return _Version(
        written=manifest.timestamp.ToNanoseconds(),
        fields=fields,
        ids=frozenset(field.id for field in fields),
        parent=parent,
        has_transaction=transaction is not None,
        confirmed=manifest.config.get(SAME_COLUMNS, ""),
    )


def _shape(fields: Iterable[schema_recorder.Field | table_pb2.Field]) -> _Shape:
    listed = list(fields)
    places = {field.id: place for place, field in enumerate(listed)}
    return [(field.name, field.logical_type, places.get(field.parent_id, -1)) for field in listed]


def _joins(field_id: int, part: schema_recorder.Part, start: schema_recorder.Span, newer: schema_recorder.Part) -> bool:
    """Whether a field is the same before and after the versions that are missing between two parts.

    Any version that existed before may have been restored meanwhile, so none may have another field under the id.
    """
    others = any(field_id in span.ids for span in part.spans if span.first < start.first)
    after = newer.spans[0]
    if others or not part.complete or field_id not in after.ids or not newer.index[0] == part.index[1] != "":
        return False
    missing = after.first - 1 - part.last + (not after.keeps_fields)
    return missing < schema_recorder.fewest_versions(field_id, part.files(), after.ids)
