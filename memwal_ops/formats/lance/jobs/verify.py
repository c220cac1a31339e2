"""The verify job: check the objects of a table and their references, without changing anything."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core import verification
from memwal_ops.core.context import RunContext
from memwal_ops.core.export import exported_store
from memwal_ops.core.options import AnswersOptions, EngineChoice, VerificationOptions, choose_engine
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, SparkJobFailedError, SparkUnavailableError
from memwal_ops.formats.lance.answers.asked_index import RowReader
from memwal_ops.formats.lance.answers.check import ANSWERS, check_answers, or_plan
from memwal_ops.formats.lance.checks import base, rows
from memwal_ops.formats.lance.files.datasets import list_branches
from memwal_ops.formats.lance.generations.backlog import RegionBacklog, read_backlog
from memwal_ops.formats.lance.options import VerifyOptions as LanceVerifyOptions
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, MEM_WAL_FOLDER
from memwal_ops.storage.api import LinkError, concurrently
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.core.answers import IndexAnswers
    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.table import Table


_CONCURRENT_REGIONS = 8
_CHECKS = 3
_CONTENTS = (
    (re.compile(r"data/"), "the ends of data files"),
    (re.compile(r"_indices/"), "the ends of index files"),
    (re.compile(r".*/wal/"), "writer epochs of WAL entries"),
    (re.compile(r".*/manifest/"), "older region manifests"),
    (re.compile(r""), "other files"),
)
"""Per path pattern, what is not checked if an export has no contents of such files."""


@dataclass(frozen=True)
class LanceVerifyReport(verification.VerifyReport):
    """The report for a Lance table.

    ``engine``: which read rows, and why; None: none were to be read. ``stages``: of Spark: by name, seconds, tasks,
    lost attempts and seconds of executors. ``branches``: the branches of the table, none of which was checked.
    """

    engine: EngineChoice | None = None
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    branches: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """The document of ``verify --json``."""
        return super().to_json() | {
            "engine": None if self.engine is None else self.engine.name,
            "engine_reason": None if self.engine is None else self.engine.reason,
            "stages": {name: dict(figures) for name, figures in self.stages.items()},
            "branches_not_verified": [*self.branches],
        }

    def describe(self) -> str:
        """The report as human-readable text."""
        lines = [super().describe()]
        if self.branches:
            left = f"This is main alone. --branch all verifies each branch, too: {', '.join(self.branches)}."
            lines += ["", paragraph(left, hanging="  ")]
        if self.engine is None or (self.engine.name == "local" and self.engine.reason == "requested"):
            return "\n".join(lines)
        took = "".join(
            f" {name}: {counted(int(stage['tasks']), 'task')} in {stage['seconds']:.1f} s."
            for name, stage in self.stages.items()
        )
        engine = f"Engine: {self.engine.name} ({self.engine.reason.removesuffix('.')}).{took}"
        return "\n".join([*lines, "", paragraph(engine, hanging="  ")])


def verified(
    table: Table, options: VerificationOptions, context: RunContext | None = None
) -> verification.VerifyReport:
    """Check the newest version, the regions, and the objects of memwal-ops itself.

    Requests: one listing of each region and of the versions, one or two for each file of the newest version, each
    unmerged generation, and each of the newest manifests and unflushed log entries.

    Raises:
        StorageError: the store failed.
        SparkUnavailableError, SparkJobFailedError: it was to read rows on Spark.
    """
    context = context or RunContext()
    with reader_of(table, options, context) as (reader, engine):
        run = _Verification(table, options, context, reader)
        if run.checks_all:
            run.check()
        elif run.export is None:
            run.check_answers()
    return LanceVerifyReport(
        table.version, run.findings, run.checked, run.skipped, run.rows_read, run.answers, run.seed, engine,
        reader.stages, run.branches,
    )  # fmt: skip


plan = apply = or_plan(verified)


@dataclass
class _Region:
    findings: list[verification.Inconsistency] = field(default_factory=list)
    opened: list[Generation] = field(default_factory=list)
    generations: int = 0
    entries: int = 0


class _Verification:
    def __init__(self, table: Table, options: VerificationOptions, context: RunContext, reader: RowReader) -> None:
        self.reader = reader
        self.table, self.options, self.context = table, options, context
        self.findings = verification.Inconsistencies(options.max_findings)
        self.checks_all = not isinstance(options, AnswersOptions) or options.checks_all
        self.checked: dict[str, int] = {}
        self.history = SchemaHistory(table)
        self.export = exported_store(table)
        self.reads_rows, self.rows_read = options.deep and self.export is None, verification.RowsRead.NONE
        self.asked = options if isinstance(options, AnswersOptions) and options.asks else None
        self.answers: list[IndexAnswers] = []
        self.seed: int | None = None

    @property
    def skipped(self) -> list[str]:
        """What was not checked because the table is read from an export."""
        if self.export is None:
            return []
        if not self.checks_all:
            return ["answers of indexes"]
        contents = {next(what for kind, what in _CONTENTS if kind.match(path)) for path in self.export.left_out}
        tags = ["tags"] if self.table.branch_name else []  # they are in the root
        return [*sorted(contents), *tags, "rows of indexes", *(["rows and keys"] if self.options.deep else []),
                *(["answers of indexes"] if self.asked is not None else [])]  # fmt: skip

    @property
    def branches(self) -> list[str]:
        """The branches of the table, if it was opened at its root; a finding reports records that cannot be read."""
        if self.table.branch_name is not None:
            return []
        try:
            return [branch.name for branch in list_branches(self.table.store)]
        except MemwalOpsError:
            return []

    def check(self) -> None:
        """All checks, the base table first."""
        table, deep = self.table, self.options.deep
        self.checked = {"regions": 0, "generations": 0, "log entries": 0}
        self.checked["fragments"] = len(table.manifest.manifest.fragments)
        self._add("base table", lambda: base.check_files(table))
        self._add("versions", lambda: base.check_version_manifests(table, deep=deep))
        self._add("tags", lambda: base.check_references(table))
        if (error := table.why_not("merge")) is not None and table.regions.region_ids:
            what = "The regions were not checked, and their rows are not merged."
            self.findings.add(
                verification.finding_of(error, error.reason, MEM_WAL_FOLDER, what, verification.Severity.WARNING)
            )
        backlog_ = read_backlog(table)
        for fault in backlog_.blocked:
            place = f"region {fault.region_id}" + (f", generation {fault.generation}" if fault.generation else "")
            about = f"{fault.region_id}/{fault.generation}" if fault.generation else str(fault.region_id)
            what = "Merges of the region stop there."
            self.findings.add(verification.finding_of(fault.error, fault.error.reason, place, what, about=about))
        opened: dict[UUID, list[Generation]] = {}
        states = sorted(backlog_.regions.items())
        for (region_id, _), region in concurrently(lambda it: self._region(it[1]), states, threads=_CONCURRENT_REGIONS):
            self.context.advance("checking regions", "regions", total=len(states))
            self.checked["regions"] += 1
            self.checked["log entries"] += region.entries
            self.checked["generations"] += region.generations
            opened[region_id] = region.opened
            self.findings.extend(region.findings)
        regions = backlog_.regions
        self._add("progress", lambda: base.check_progress(table, regions))
        self._add("catch-up entries", lambda: base.check_catchup(table))
        damaged = [finding.place for finding in self.findings.kept if finding.check == "base_file"]
        readable = all(path.startswith(INDICES_FOLDER) for path in damaged)
        if self.asked is not None and self.export is None and readable:
            self.ask()
        indexes = frozenset(finding.about for finding in self.findings.kept if finding.check in ANSWERS)
        if not damaged:  # with files missing, rows cannot be read
            self._add("rows of indexes", lambda: base.check_rows_of_indexes(table, indexes))
            if self.export is None:
                self._add("distances of indexes", lambda: base.check_distances(table, indexes))
        self._add("region snapshot", lambda: base.check_snapshot(table, regions))
        self._add("leases and holds", lambda: verification.check_own_files(table))
        for path in table.regions.strays:
            self.findings.add(verification.Inconsistency(
                verification.Severity.INFO, "unrecognized", path, "It is not a region.", "No job reads or deletes it.",
                "Remove it yourself if you put it there.",
            ))  # fmt: skip
        if self.reads_rows:
            if readable:
                self.rows_read = verification.RowsRead.ALL
                self._add("rows", lambda: rows.check_values(table, self.reader))
            if table.primary_key:
                self._add("keys", lambda: rows.check_keys(table, table.primary_key, self.reader))
            self._add("row ids", lambda: rows.check_row_ids(table, self.reader))
            self._add("rows of generations", lambda: rows.check_generation_rows(table, opened))

    def check_answers(self) -> None:
        """Ask the indexes, unless rows cannot be read."""
        self._add("base table", lambda: verification.missing_object(self.table))
        if not self.findings.counts:
            self.ask()

    def ask(self) -> None:
        """Ask the indexes."""
        self._add("answers of indexes", self._answers, named=True)

    def _answers(self) -> list[verification.Inconsistency]:
        assert self.asked is not None  # noqa: S101 - the caller checked
        self.seed = self.asked.seed_at(self.table.version)
        self.answers, findings = check_answers(self.table, self.asked, self.context, self.seed, self.reader)
        return findings

    def _add(
        self, what: str, check: Callable[[], Iterable[verification.Inconsistency]], *, named: bool = False
    ) -> None:
        """Run a check; if it cannot be finished, that is a finding. What an option ``named`` may not exist."""
        self.context.checkpoint()
        try:
            self.findings.extend(check())
        except NotExportedError:
            pass  # it is in ``skipped``
        except LinkError as error:
            self.findings.add(verification.finding_of(error, "link", what, "Files behind a link are not checked."))
        except (SparkUnavailableError, SparkJobFailedError):
            raise  # the table has no part in it
        except MemwalOpsError as error:
            if named and isinstance(error, InvalidUsageError):
                raise
            self.findings.add(
                verification.finding_of(error, "not_checked", what, "This part was not checked completely.")
            )

    def _region(self, state: RegionBacklog) -> _Region:
        """Check a region; again if it has an error and a newer manifest: gc may have deleted what is missing."""
        manifests = self.table.region(state.manifest.region_id)
        for _ in range(_CHECKS):
            region = self._checked(state)
            if all(finding.severity is not verification.Severity.ERROR for finding in region.findings):
                break
            try:
                newest = manifests.latest()
            except MemwalOpsError:
                break  # a finding reports it
            if newest.version == state.manifest.version:
                break
            state = replace(state, manifest=newest)
        return region

    def _checked(self, state: RegionBacklog) -> _Region:
        region = _Region()
        contents = base.contents_of(self.table, state)
        if isinstance(contents, verification.Inconsistency):
            region.findings.append(contents)
            return region
        region.entries = len(contents.wal.ids)
        deep = self.options.deep
        try:
            region.findings += base.check_manifests(self.table, state, deep=deep)
            for generation in base.check_generations(self.table, state, contents, self.history, deep=deep):
                if isinstance(generation, verification.Inconsistency):
                    region.findings.append(generation)
                    continue
                region.generations += 1
                if deep:  # a handle needs some KiB, and there may be many thousand
                    region.opened.append(generation)
            region.findings += base.check_log(self.table, state, contents)
            region.findings += base.check_unrecognized(contents)
        except NotExportedError:
            pass  # it is in ``skipped``
        except MemwalOpsError as error:
            place = f"region {state.manifest.region_id}"
            region.findings.append(
                verification.finding_of(error, "not_checked", place, "The region was not checked completely.")
            )
        return region


@contextmanager
def reader_of(
    table: Table, options: VerificationOptions, context: RunContext
) -> Iterator[tuple[RowReader, EngineChoice | None]]:
    """What reads rows; Spark is started with the first that it reads."""
    if not isinstance(options, LanceVerifyOptions) or not options.reads_rows or exported_store(table) is not None:
        yield RowReader(context.checkpoint), None
        return
    choice = choose_engine(options, "data to check", _size(table, options))
    if choice.name != "spark":
        yield RowReader(context.checkpoint), choice
        return
    from memwal_ops.formats.lance.answers.reading_on_spark import SparkReader  # noqa: PLC0415 - Spark only
    from memwal_ops.formats.lance.engines.spark.running import LoggingTaskRunner  # noqa: PLC0415 - by Spark alone

    with LoggingTaskRunner(options.master, context, "memwal-ops verify") as runner:
        yield SparkReader(table, runner, context.checkpoint), choice


def _size(table: Table, options: LanceVerifyOptions) -> int:
    """Bytes of the data files, and of these at most what the indexes are asked for, if that is all."""
    size = sum(file.file_size_bytes for fragment in table.manifest.manifest.fragments for file in fragment.files)
    return size if options.deep else min(size, options.max_bytes)
