"""Migrate a namespace to a Lance table with MemWAL, in rounds, until it has all writes.

The first round reads a pinned manifest twice: for the types of attributes, and for the rows, which are one version of
the new table. A later round, in this run or the next one, applies the fragments that were added since; if segments were
replaced meanwhile, it compares all rows. So a killed run can be repeated, and nothing is written twice. When no
fragments are left, all rows are compared. The work that grows with the namespace runs on an engine: local, or Spark.
"""

from __future__ import annotations

import enum
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops import errors
from memwal_ops.core.documents import document
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.core.registry import open_sink
from memwal_ops.formats.zeppelin.backlog import damaged_parts, read_fragments
from memwal_ops.formats.zeppelin.compaction import dimensions_of
from memwal_ops.formats.zeppelin.jobs import migrate_rows
from memwal_ops.formats.zeppelin.reader import read_log
from memwal_ops.formats.zeppelin.wire.fragment import Fragment
from memwal_ops.text import counted, grid, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.row_sink import RowSink
    from memwal_ops.formats.zeppelin.jobs.migrate_spark import SparkMigration
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.specs import ZeppelinMigrateOptions


class ZeppelinMigrateDecision(enum.StrEnum):
    """How a migration ended."""

    PLANNED = "planned"
    MIGRATED = "migrated"
    NOTHING_TO_MIGRATE = "nothing_to_migrate"


@dataclass
class ZeppelinMigrateReport:
    """Report of a migration.

    Attributes:
        version: revision of the namespace that the table has.
        rows: live rows of the namespace; None where they were not counted.
        upserts: rows that were written, or would be; ``deletes``: likewise.
        rounds: how often the namespace was read until no changes were left.
        not_carried: parts of the namespace that are not migrated.
        compared: rows that were compared at the end; None: none were.
    """

    uri: str
    target: str
    version: int
    engine: str = "local"
    decision: ZeppelinMigrateDecision = ZeppelinMigrateDecision.NOTHING_TO_MIGRATE
    target_version: int = 0
    rows: int | None = None
    upserts: int = 0
    deletes: int = 0
    rounds: int = 0
    columns: migrate_rows.Columns | None = None
    not_carried: list[str] = field(default_factory=list)
    compared: int | None = None
    seconds: float = 0.0

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``migrate --json``."""
        columns = [
            {"attribute": name, "column": column.name, "type": str(column.type), "json": migrate_rows.is_json(column)}
            for name, column in ({} if self.columns is None else self.columns.by_attribute).items()
        ]
        return document(self, "uri", "compared", columns=columns, compared_rows=self.compared)

    def describe(self) -> str:
        """The report as text for people."""
        rows = counted(self.rows or 0, "row")
        work = f"{counted(self.upserts, 'row')} to write, {self.deletes:,} to delete"
        has = f"{self.target} has the {rows} of {self.uri}"
        nothing = f"{self.uri} has no rows." if self.compared is None else f"{has} already; all of them were compared."
        texts = {
            "planned": f"would migrate {self.uri} into {self.target}: {work}.",
            "migrated": f"{has} in version {self.target_version}; all of them were compared.",
            "nothing_to_migrate": nothing,
        }
        parts = [paragraph(f"{self.decision}: {texts[self.decision]}")]
        if self.columns is not None and self.columns.by_attribute:
            mixed = "JSON text, as its values are of several types"
            columns = [
                (name, column.name, mixed if migrate_rows.is_json(column) else str(column.type))
                for name, column in self.columns.by_attribute.items()
            ]
            parts.append(grid(("attribute", "column", "type"), columns, words=("attribute", "column", "type")))
        parts += [paragraph(f"Not carried over: {what}.") for what in self.not_carried]
        if self.decision is ZeppelinMigrateDecision.PLANNED:
            parts.append("Nothing was changed; add --apply to do it.")
        return "\n\n".join(parts)


_ROUNDS = 20
_HELD = timedelta(hours=12)


def plan(table: Namespace, options: ZeppelinMigrateOptions, context: RunContext) -> ZeppelinMigrateReport:
    """What :func:`apply` would do; reads only. Raises as :func:`apply`."""
    run = _Run(table, options, context)
    _refuse_missing(table)
    with run.engine():
        changes = run.read(table)
    if changes is not None and (changes.upserts or changes.deletes or run.sink.record is None):
        run.report.decision = ZeppelinMigrateDecision.PLANNED
        run.report.upserts, run.report.deletes = changes.upserts, len(changes.deletes)
    return run.finished()


def apply(table: Namespace, options: ZeppelinMigrateOptions, context: RunContext) -> ZeppelinMigrateReport:
    """Migrate. Safe to kill and to repeat.

    Raises:
        InvalidUsageError: no target, the target is not empty, others have written to it, or an attribute has values
            that its column cannot store.
        FragmentCorruptError, FragmentMissingError, SegmentCorruptError: an object of the namespace cannot be read.
        UnsupportedFeatureError: it has a kind of segment that is not supported.
        InvariantViolatedError: the rows of both differ at the end.
        SparkUnavailableError: Spark was requested, and cannot run here.
        SparkJobFailedError: a stage failed in Spark; run it again.
    """
    run = _Run(table, options, context)
    with run.engine():
        return run.applied(table)


class _Run:
    sink: RowSink

    def __init__(self, table: Namespace, options: ZeppelinMigrateOptions, context: RunContext) -> None:
        if not options.target:
            raise errors.InvalidUsageError(
                f"{table.location.uri} is a Zeppelin namespace, which is migrated to a Lance table, and no target was "
                "given.",
                remedy="Give one: memwal-ops migrate URI TARGET.",
            )
        source = table.location.uri.rstrip("/")
        self._options = options
        self._context, self._source, self._started = context, source, time.monotonic()
        location, self.sink = open_sink(options.target, table.location, context.guard, source=source)
        if f"{location.uri.rstrip('/')}/".startswith(f"{source}/"):
            raise errors.InvalidUsageError(
                f"{location.uri} is within the namespace, whose gc would list it.",
                remedy="Give a target outside of it.",
            )
        self._engine: migrate_rows.LocalMigration | SparkMigration = migrate_rows.LocalMigration(self.sink, context)
        self.report = ZeppelinMigrateReport(source, location.uri, table.revision, options.engine)
        if table.manifest.unwritable is not None:
            self.report.not_carried.append(f"what only a Zeppelin server understands ({table.manifest.unwritable})")
        for what, names in (
            ("bitmap indexes of", {name for segment in table.manifest.segments for name in segment.bitmap_fields}),
            ("inverted lists of", {name for segment in table.manifest.segments for name in segment.fts_fields}),
        ):
            if names:
                self.report.not_carried.append(f"{what} {', '.join(sorted(names))}: create indexes of Lance")

    @contextmanager
    def engine(self) -> Iterator[None]:
        """Start Spark if it was requested, and stop it at the end."""
        if self._options.engine == "local":
            yield
            return
        from memwal_ops.formats.zeppelin.jobs.migrate_spark import SparkMigration  # noqa: PLC0415 - PySpark is an extra

        with (
            self.sink.on_spark(self._options.master, self._context.report) as rows,
            SparkMigration(self.sink, rows, self._context) as self._engine,
        ):
            yield

    def applied(self, table: Namespace) -> ZeppelinMigrateReport:
        """Write and compare, round by round, until no writer came in between."""
        for _ in range(_ROUNDS):
            self._context.checkpoint()
            try:
                with _held(table):
                    changes = self.read(table)
                    if changes is None:
                        return self.finished()
                    self.write(table, changes)
                    is_current = _rows_of(table) == _rows_of(table.newest())
                    if is_current:
                        self.compare(table)
            except (
                errors.FragmentMissingError,
                errors.SegmentCorruptError,
                errors.ObjectNotFoundError,
                errors.VersionGoneError,
            ):
                if _rows_of(table) == _rows_of(table.newest()):
                    raise
                is_current = False  # a compaction and a collection came in between
            if is_current:
                return self.finished()
            table = table.newest()
        raise errors.InvalidUsageError(
            f"{table.location.uri} was written while it was read, {_ROUNDS} times.",
            remedy="Stop its writers, and run it again: it continues with what is left.",
        )

    def read(self, table: Namespace) -> migrate_rows.RowChanges | None:
        """The changes that bring the table to the state of a namespace; None: there is neither a row nor a table."""
        self.report.rounds += 1
        self.report.version = table.revision
        record = self.sink.record
        changes = None if record is None else self._since(table, record)
        if changes is None:
            changes = self._engine.find(table)
        if changes is not None:
            self.report.columns, self.report.rows = changes.columns, changes.live
        return changes

    def write(self, table: Namespace, changes: migrate_rows.RowChanges) -> None:
        schema, record = changes.columns.schema, self._record(table)
        if self.sink.record is None:
            self.report.upserts += changes.rows.create(self.sink, schema, record)
        else:
            if changes.upserts or changes.deletes:
                self.sink.set_record({**self.sink.record, "finished": None})
            self.sink.add_columns([field for field in schema if field.name not in self.sink.schema.names])
            if changes.upserts:
                self.report.upserts += changes.rows.upsert(self.sink, schema)
            if changes.deletes:
                self.sink.delete(changes.deletes, migrate_rows.ID)
                self.report.deletes += len(changes.deletes)
        self._context.revisions.append(self.sink.version)

    def compare(self, table: Namespace) -> None:
        """Finish the migration. Raises ``InvariantViolatedError``: both do not have the same rows."""
        wanted, migrated, same = self._engine.compare(table, migrate_rows.Columns(self.sink.schema))
        if not same:
            raise errors.InvariantViolatedError(
                f"{self.report.target} has {migrated:,} rows, the namespace has {wanted:,}, and they differ.",
                remedy="Do not use the table. Migrate to another target, and report this.",
            )
        self.report.rows = self.report.compared = wanted
        record = self._record(table)
        if {**(self.sink.record or {}), "finished": None} != record or (self.sink.record or {}).get("finished") is None:
            # The versions of the index and of the record itself, which come after this one, change no rows.
            self.sink.set_record({**record, "finished": self.sink.version})
        wrote = self.report.upserts or self.report.deletes
        self.report.decision = ZeppelinMigrateDecision.MIGRATED if wrote else ZeppelinMigrateDecision.NOTHING_TO_MIGRATE

    def finished(self) -> ZeppelinMigrateReport:
        self.report.target_version, self.report.seconds = self.sink.version, time.monotonic() - self._started
        return self.report

    def _record(self, table: Namespace) -> dict[str, Any]:
        return {"source": self._source, "revision": table.revision, **_rows_of(table), "finished": None}

    def _since(self, table: Namespace, record: Mapping[str, Any]) -> migrate_rows.RowChanges | None:
        """The changes in the log since the record; None: segments were replaced, or a run did not finish."""
        known, manifest = {*record["fragments"]}, table.manifest
        same = all(record[name] == _rows_of(table)[name] for name in ("segments", "pending"))
        if record.get("finished") is None or not same or not known <= {*manifest.fragment_ids}:
            return None
        touched: set[str] = set()
        new = [ref for ref in manifest.fragments if ref.id not in known]
        for _, fragment in read_fragments(table, new, dimensions_of(table)):
            if not isinstance(fragment, Fragment):
                raise fragment
            touched |= {*fragment.ids, *fragment.deletes}
        rows = read_log(table).rows
        kept = rows.take(np.array([at for at, name in enumerate(rows.ids) if name in touched], np.intp))
        kinds = migrate_rows.AttributeKinds.empty()
        kinds.add(kept)
        columns = migrate_rows.Columns(self.sink.schema).with_added(kinds)
        # Only ids that the table has: one may have been written and deleted in between.
        existing = {*kept.ids}
        gone = touched - existing
        present = (
            name
            for batch in (self.sink.rows([migrate_rows.ID]) if gone else ())
            for name in batch.column(migrate_rows.ID).to_pylist()
        )
        rows_of = migrate_rows.LocalMigration(self.sink, self._context).of_ids(table, columns, frozenset(existing))
        return migrate_rows.RowChanges(columns, None, len(existing), sorted(gone.intersection(present)), rows_of)


def _rows_of(table: Namespace) -> dict[str, list[str]]:
    manifest = table.manifest
    return {
        "segments": manifest.segment_ids,
        "fragments": manifest.fragment_ids,
        "pending": sorted(manifest.pending),
    }


def _refuse_missing(table: Namespace) -> None:
    for part in damaged_parts(table):
        if part.has_rows:
            raise part.error


@contextmanager
def _held(table: Namespace) -> Iterator[None]:
    """Hold this manifest, so that gc keeps its objects; a namespace that only a server may write gets no hold.

    Raises:
        FragmentMissingError, FragmentCorruptError, SegmentCorruptError: an object that it lists is missing or cut.
        VersionGoneError: it is being expired.
    """
    if table.manifest.unwritable is not None or not table.has_revision(table.revision):
        yield
        return
    _refuse_missing(table)
    hold = take_hold(table, table.revision, _HELD, note="memwal-ops migrate")
    try:
        yield
    finally:
        with suppress(errors.MemwalOpsError):  # it ends by itself
            release_hold(table, hold.number)
