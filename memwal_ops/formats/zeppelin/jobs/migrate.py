"""Migrate a namespace into a Lance table with MemWAL, in as many rounds as its writers need.

The first round reads a pinned manifest twice: for the types of attributes, and for the rows, which are one version of
the new table. A later round, in this run or the next one, applies what the log has since; where segments were
replaced meanwhile, it compares all rows. So a run that was killed is repeated, and nothing is written twice. When
nothing waits, all rows are compared.

Memory: the log, one cluster, and 32 bytes for each row where rows are compared.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.core.registry import open_sink
from memwal_ops.errors import (
    FragmentMissingError,
    InvalidUsageError,
    InvariantViolatedError,
    MemwalOpsError,
    ObjectNotFoundError,
    SegmentCorruptError,
)
from memwal_ops.formats.zeppelin.attribute_columns import ID, Columns, Kinds
from memwal_ops.formats.zeppelin.backlog import read_fragments
from memwal_ops.formats.zeppelin.compaction import dimensions_of
from memwal_ops.formats.zeppelin.jobs.migrate_report import MigrateDecision, MigrateReport
from memwal_ops.formats.zeppelin.reader import live_rows, read_log
from memwal_ops.formats.zeppelin.row_digests import Digests, digests, id_hashes
from memwal_ops.formats.zeppelin.wire.fragment import Fragment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.row_sink import RowSink
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.options import MigrateOptions
    from memwal_ops.formats.zeppelin.segments import Rows

_ROUNDS = 20
_HELD = timedelta(hours=12)
_BATCH_ROWS = 8192


def backlog(table: Namespace) -> Mapping[str, float]:
    """None."""
    del table
    return {}


def plan(table: Namespace, options: MigrateOptions, context: RunContext) -> MigrateReport:
    """What :func:`apply` would do; reads only. Raises as :func:`apply`."""
    run = _Run(table, options, context)
    found = run.read(table)
    if found is not None and (found.upserts or found.deletes or run.sink.record is None):
        run.report.decision = MigrateDecision.PLANNED
        run.report.upserts, run.report.deletes = found.upserts, len(found.deletes)
    return run.finished()


def apply(table: Namespace, options: MigrateOptions, context: RunContext) -> MigrateReport:
    """Migrate. Safe to kill and to repeat.

    Raises:
        InvalidUsageError: no target, something else is there, others have written to it, or an attribute has values
            that its column cannot hold.
        FragmentCorruptError, FragmentMissingError, SegmentCorruptError: an object of the namespace cannot be read.
        UnsupportedFeatureError: it has a kind of segment that is not supported.
        InvariantViolatedError: the rows of both differ at the end.
    """
    run = _Run(table, options, context)
    for _ in range(_ROUNDS):
        context.checkpoint()
        with _held(table):
            try:
                found = run.read(table)
                if found is None:
                    return run.finished()
                run.write(table, found)
                standing = _same_log(table, table.newest())
                if standing:
                    run.compare(table)
            except (FragmentMissingError, SegmentCorruptError, ObjectNotFoundError):
                if _same_log(table, table.newest()):
                    raise
                standing = False  # a compaction and a collection came in between
        if standing:
            return run.finished()
        table = table.newest()
    raise InvalidUsageError(
        f"{table.location.uri} was written while it was read, {_ROUNDS} times.",
        remedy="Stop its writers, and run it again: it goes on with what is left.",
    )


@dataclass
class _Found:
    """What a round is to do: ``upserts`` rows, chosen by ``wanted``, and ids to delete; ``rows`` are live, if known."""

    columns: Columns
    rows: int | None
    upserts: int
    deletes: list[str]
    wanted: _Wanted


class _Wanted:
    """Which rows are to be written: all, those of some ids, or those that the table has otherwise or not at all."""

    def __init__(self, ids: frozenset[str] | None = None, standing: Digests | None = None) -> None:
        self._ids, self._standing = ids, standing

    def batches(self, table: Namespace, columns: Columns) -> Iterator[pa.RecordBatch]:
        if self._ids is not None:
            rows = read_log(table).rows
            chosen = np.array([at for at, name in enumerate(rows.ids) if name in self._ids], np.intp)
            yield from _batches(columns, rows.take(chosen))
            return
        for rows in live_rows(table):
            for batch in _batches(columns, rows):
                if self._standing is None:
                    yield batch
                    continue
                differs = ~self._standing.has(*digests(batch))
                if differs.any():
                    yield batch.filter(pa.array(differs))


class _Run:
    """The target, and the report of a run."""

    sink: RowSink

    def __init__(self, table: Namespace, options: MigrateOptions, context: RunContext) -> None:
        if not options.target:
            raise InvalidUsageError(
                f"{table.location.uri} is a Zeppelin namespace: it is migrated into a Lance table, and no place for "
                "that was given.",
                remedy="memwal-ops migrate URI TARGET",
            )
        source = table.location.uri.rstrip("/")
        self._context, self._source, self._started = context, source, time.monotonic()
        location, self.sink = open_sink(options.target, table.location, context.guard, source=source)
        if f"{location.uri.rstrip('/')}/".startswith(f"{source}/"):
            raise InvalidUsageError(
                f"{location.uri} is within the namespace.", remedy="Give a place outside: its gc would find it there."
            )
        self.report = MigrateReport(source, location.uri, table.revision)
        if table.manifest.unwritable is not None:
            self.report.not_carried.append(f"what only a Zeppelin server understands ({table.manifest.unwritable})")
        for what, names in (
            ("bitmap indexes of", {name for one in table.manifest.segments for name in one.bitmap_fields}),
            ("inverted lists of", {name for one in table.manifest.segments for name in one.fts_fields}),
        ):
            if names:
                self.report.not_carried.append(f"{what} {', '.join(sorted(names))}: create indexes of Lance")

    def read(self, table: Namespace) -> _Found | None:
        """What is to do for the table to have what a namespace has; None: there is no row yet, and no table."""
        self.report.rounds += 1
        self.report.version = table.revision
        record = self.sink.record
        found = None if record is None else self._since(table, record)
        if found is None:
            found = self._all(table)
        if found is not None:
            self.report.columns, self.report.rows = found.columns, found.rows
        return found

    def write(self, table: Namespace, found: _Found) -> None:
        """Do it; the record is last."""
        schema, record = found.columns.schema, _record(self._source, table)
        rows = _Stream(found.wanted.batches(table, found.columns), self._context)
        if self.sink.record is None:
            rows.into(schema, lambda reader: self.sink.create(reader, ID, record))
            self.report.upserts += rows.count
        else:
            if found.upserts or found.deletes:
                self.sink.set_record({**self.sink.record, "finished": None})
            self.sink.add_columns([one for one in schema if one.name not in self.sink.schema.names])
            if found.upserts:
                rows.into(schema, lambda reader: self.sink.upsert(reader, ID))
                self.report.upserts += rows.count
            if found.deletes:
                self.sink.delete(found.deletes, ID)
                self.report.deletes += len(found.deletes)
        self._context.revisions.append(self.sink.version)

    def compare(self, table: Namespace) -> None:
        """Prove that both have the same rows; then the migration is finished.

        Raises:
            InvariantViolatedError: they differ.
        """
        columns = Columns(self.sink.schema)
        wanted = Digests.of((one for rows in live_rows(table) for one in _batches(columns, rows)), self._context)
        found = Digests.of(self.sink.rows(), self._context)
        if wanted != found:
            raise InvariantViolatedError(
                f"{self.report.target} has {len(found.ids):,} rows, the namespace has {len(wanted.ids):,}, and they "
                "differ.",
                remedy="Do not use the table. Migrate to another target, and report this.",
            )
        self.report.rows = self.report.compared = len(wanted.ids)
        record = _record(self._source, table)
        if {**(self.sink.record or {}), "finished": None} != record or (self.sink.record or {}).get("finished") is None:
            # Of the versions behind this one, the index and the record themselves change no rows.
            self.sink.set_record({**record, "finished": self.sink.version})
        wrote = self.report.upserts or self.report.deletes
        self.report.decision = MigrateDecision.MIGRATED if wrote else MigrateDecision.NOTHING_TO_MIGRATE

    def finished(self) -> MigrateReport:
        """The report."""
        self.report.target_version, self.report.seconds = self.sink.version, time.monotonic() - self._started
        return self.report

    def _since(self, table: Namespace, record: Mapping[str, Any]) -> _Found | None:
        """What the log has since the record; None: segments were replaced, or a run did not finish."""
        known, manifest = {*record["fragments"]}, table.manifest
        if (
            record.get("finished") is None
            or record["segments"] != [one.id for one in manifest.segments]
            or record["pending"] != sorted(manifest.pending)
            or not known <= {one.id for one in manifest.fragments}
        ):
            return None
        touched: set[str] = set()
        new = [one for one in manifest.fragments if one.id not in known]
        for _, fragment in read_fragments(table, new, dimensions_of(table)):
            if not isinstance(fragment, Fragment):
                raise fragment
            touched |= {*fragment.ids, *fragment.deletes}
        rows = read_log(table).rows
        kept = rows.take(np.array([at for at, name in enumerate(rows.ids) if name in touched], np.intp))
        kinds = Kinds.empty()
        kinds.add(kept)
        columns = Columns(self.sink.schema).with_added(kinds)
        # Of those that the table has: an id may have come and gone in between.
        standing = {*kept.ids}
        gone = touched - standing
        present = {name for batch in (self.sink.rows([ID]) if gone else ()) for name in batch.column(ID).to_pylist()}
        return _Found(columns, None, len(standing), sorted(gone & present), _Wanted(ids=frozenset(standing)))

    def _all(self, table: Namespace) -> _Found | None:
        """Compare all rows with those of the table, if there is one."""
        kinds, count, dimensions = Kinds.empty(), 0, dimensions_of(table)
        for rows in live_rows(table):
            kinds.add(rows)
            count += len(rows.ids)
            dimensions = dimensions or (rows.vectors.shape[1] if rows.ids else None)
            self._context.advance("reading", "rows", len(rows.ids))
        if self.sink.record is None:
            return None if dimensions is None else _Found(Columns.of(kinds, dimensions), count, count, [], _Wanted())
        columns = Columns(self.sink.schema).with_added(kinds)
        standing = Digests.of(self.sink.rows(), self._context)
        wanted = _Wanted(standing=standing)
        upserts, hashes = 0, []
        for rows in live_rows(table):
            hashes.append(id_hashes(rows.ids))
            upserts += sum(int((~standing.has(*digests(one))).sum()) for one in _batches(columns, rows))
        live = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
        every = Digests(live, live)
        deletes: list[str] = []
        if not every.places(standing.ids)[1].all():
            for batch in self.sink.rows([ID]):
                ids = batch.column(ID).to_pylist()
                deletes += [name for name, kept in zip(ids, every.places(id_hashes(ids))[1], strict=True) if not kept]
        return _Found(columns, count, upserts, deletes, wanted)


class _Stream:
    """Batches as a reader; an error of ours that ends it is raised as it is, not as Arrow's."""

    def __init__(self, batches: Iterator[pa.RecordBatch], context: RunContext) -> None:
        self._batches, self._context = batches, context
        self._error: MemwalOpsError | None = None
        self.count = 0

    def into(self, schema: pa.Schema, write: Any) -> None:
        """Call ``write`` with the reader."""
        try:
            write(pa.RecordBatchReader.from_batches(schema, self._counted()))
        except Exception as error:
            if self._error is not None:
                raise self._error from error
            raise

    def _counted(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches:
                self.count += batch.num_rows
                self._context.advance("migrating", "rows", batch.num_rows)
                yield batch
        except MemwalOpsError as error:
            self._error = error
            raise


def _batches(columns: Columns, rows: Rows) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows.ids), _BATCH_ROWS):
        yield columns.convert(rows.take(np.arange(start, min(start + _BATCH_ROWS, len(rows.ids)))))


def _record(source: str, table: Namespace) -> dict[str, Any]:
    manifest = table.manifest
    return {
        "source": source,
        "revision": table.revision,
        "segments": [one.id for one in manifest.segments],
        "fragments": [one.id for one in manifest.fragments],
        "pending": sorted(manifest.pending),
        "finished": None,
    }


def _same_log(one: Namespace, other: Namespace) -> bool:
    """Whether two manifests have the same rows."""
    return all(_record("", one)[name] == _record("", other)[name] for name in ("segments", "fragments", "pending"))


@contextmanager
def _held(table: Namespace) -> Iterator[None]:
    """Keep what this manifest needs from gc; a namespace that only a server may write gets no hold."""
    if table.manifest.unwritable is not None or not table.has_revision(table.revision):
        yield
        return
    hold = take_hold(table, table.revision, _HELD, note="memwal-ops migrate")
    try:
        yield
    finally:
        with suppress(MemwalOpsError):  # it ends by itself
            release_hold(table, hold.number)
