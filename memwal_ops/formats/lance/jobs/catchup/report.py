"""The report of a catch-up, index by index, as JSON and as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core.documents import document
from memwal_ops.core.outlook import NextRun, describe_next_run
from memwal_ops.core.report import Need
from memwal_ops.formats.lance.files.named_files import IndexCorruptError
from memwal_ops.formats.lance.jobs.answers_guard import AnswerComparison, cost_of
from memwal_ops.text import counted, grid, paragraph, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from memwal_ops.core.options import EngineChoice
    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.formats.lance.generations.backlog import BlockedRegion


class CatchupDecision(enum.StrEnum):
    """How a catch-up ended."""

    CAUGHT_UP = "caught_up"
    UNCHANGED = "unchanged"
    NO_INDEXES = "no_indexes"
    INCOMPLETE = "incomplete"
    """An index failed; the others were processed."""
    ANSWERS_WORSE = "answers_worse"
    """An index would have answered worse, and was not published; the others were processed."""
    DRY_RUN = "dry_run"


@dataclass(frozen=True, slots=True)
class Partitions:
    """Balance of an IVF index over all its segments, in rows."""

    count: int
    largest: int
    smallest: int
    threshold: float

    @property
    def imbalance(self) -> float:
        """Largest by smallest; an empty partition counts as one row."""
        return self.largest / max(self.smallest, 1)

    def to_json(self) -> dict[str, object]:
        """The ``partitions`` entry of an index."""
        imbalance = self.imbalance
        return document(self, "threshold", imbalance=round(imbalance, 3), retrain=imbalance > self.threshold)


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Report of one index.

    Attributes:
        uncovered_fragments: fragments that it did not cover before its update.
        uncovered_rows: live rows in them.
        before: ``index_catchup`` when the run began: per region the generation; ``after``: and at the end.
        decision: one of those of docs/jobs.md#catchup.
        partitions: balance of an IVF index; None for others, and if it could not be read.
        method: how it was built, or would be: update, retrain or rebuild; None: it was not.
        answers: its answers before and after, compared; None: nothing was built.
        why: the evidence by which it was, or would be, built anew instead of updated; of one that is not, what is wrong
            with it nevertheless, or why it was left; None: there is none.
        bytes_written: size of the segments that were built; in a dry run about that of those that would be.
        engine: which built it, or would, and why; None: it was not built.
        stages: of a build on Spark: by stage its seconds, tasks, lost attempts and seconds of executors.
    """

    name: str
    type: str
    uncovered_fragments: int
    uncovered_rows: int
    segments: int
    before: Mapping[UUID, int]
    after: Mapping[UUID, int]
    decision: str
    partitions: Partitions | None
    error: MemwalOpsError | None = None
    seconds: float = 0.0
    method: str | None = None
    answers: AnswerComparison | None = None
    why: str | None = None
    bytes_written: int = 0
    engine: EngineChoice | None = None
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The ``indexes`` entry of a report."""
        name, reason = (None, None) if self.engine is None else (self.engine.name, self.engine.reason)
        return document(self, engine=name, engine_reason=reason)


@dataclass(frozen=True, slots=True)
class CatchupReport:
    """Report of a run. ``decision`` is one of caught_up, unchanged, no_indexes, incomplete, dry_run.

    ``blocked`` are regions that reuse the id of another one: ``index_catchup`` does not apply to them. With
    ``keeps_codebooks`` vector indexes may not be retrained in place. ``cost``: of a plan, what a run reads and writes;
    ``rows``: those that an index which it would update lacks, each counted once.
    """

    decision: CatchupDecision
    run_id: str
    indexes: tuple[IndexReport, ...]
    version: int
    seconds: float
    commit_conflicts: int = 0
    blocked: tuple[BlockedRegion, ...] = ()
    keeps_codebooks: bool = True
    cost: NextRun | None = None
    rows: int = 0

    @property
    def failures(self) -> tuple[MemwalOpsError, ...]:
        """The errors of indexes that failed."""
        return tuple(index.error for index in self.indexes if index.error is not None)

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        if not self.failures:
            return errors.RegionsBlockedError.exit_code if self.blocked else 0
        corrupt = [error for error in self.failures if isinstance(error, errors.TableCorruptError)]
        if any(not isinstance(error, IndexCorruptError) for error in corrupt):  # rows are missing
            return errors.TableCorruptError.exit_code
        for reason in (errors.CodebookChangedError, errors.AnswersWorseError):
            if all(isinstance(error, reason) for error in self.failures):
                return reason.exit_code
        return errors.IndexesBehindError.exit_code

    def to_json(self) -> dict[str, object]:
        """The document of ``catchup --json``."""
        values = document(self, "keeps_codebooks", "cost", "rows")
        if self.cost is None:
            return values
        cost = self.cost
        sizes = {"debt": cost.debt, "bytes_read": cost.bytes_read, "bytes_written": cost.bytes_written}
        return values | sizes | {"expected_seconds": cost.to_json()["seconds"]}

    def needs(self) -> Iterator[Need]:
        """What a run would update, and what it would refuse."""
        behind = [index for index in self.indexes if index.decision == "would_update"]
        if behind:
            indexed = sum(index.uncovered_rows for index in behind)
            what = f"update {counted(len(behind), 'index', 'indexes')}"
            yield Need("catchup", what, rows=self.rows, indexed=indexed)
        for index in self.indexes:
            if index.error is not None:
                what = f"refuse to update {index.name}: {index.error.reason}"
                yield Need("catchup", what, rows=index.uncovered_rows)

    def describe(self) -> str:
        """The report as text for people."""
        parts = [_headline(self)]
        if self.indexes:
            parts.append(_table(self))
        for index in self.indexes:
            if (error := index.error) is not None:
                parts.append(paragraph(f"FAILED: {index.name} ({error.reason}). {error} {error.remedy}", hanging="  "))
            if (built := _engine(index)) is not None:
                parts.append(paragraph(built, hanging="  "))
            if index.why is not None:
                label = "NOTE" if index.method in {None, "update"} else "ANEW"
                parts.append(paragraph(f"{label}: {index.name}: {index.why}", hanging="  "))
            if index.partitions is not None and index.partitions.imbalance > index.partitions.threshold:
                largest, smallest = counted(index.partitions.largest, "row"), index.partitions.smallest
                migrate, retrain = f"--migrate-codebook {index.name} NEW_NAME", f"--index {index.name} --retrain"
                text = (
                    f"UNBALANCED: {index.name} has {largest} in its largest partition and {smallest:,} in its smallest."
                    " To give it new centroids without mixing distances, run memwal-ops catchup URI "
                    f"{migrate if self.keeps_codebooks else retrain}."
                )
                parts.append(paragraph(text, hanging="  "))
        compared = [index.answers for index in self.indexes if index.answers is not None and index.answers.queries]
        if (cost := cost_of(compared, len(compared), self.seconds)) is not None:
            parts.append(paragraph(cost, hanging="  "))
        parts += [fault.describe("BLOCKED") for fault in self.blocked]
        if self.cost is not None and self.cost.why is None:
            parts.append(paragraph(f"A run {describe_next_run(self.cost.to_json())}.", hanging="  "))
        return "\n\n".join(parts)


def _headline(report: CatchupReport) -> str:
    updated = counted(sum(index.decision == "updated" for index in report.indexes), "index", "indexes")
    match report.decision:
        case "caught_up":
            recorded = sum(index.decision == "recorded" for index in report.indexes)
            noted = f", {counted(recorded, 'index', 'indexes')} recorded as caught up" if recorded else ""
            done = f"{updated} updated{noted}{_left(report)}"
            return f"caught_up: {done}, version {report.version}, {report.seconds:.2f} s."
        case "unchanged":
            return "unchanged: all indexes were caught up, and none was updated."
        case "no_indexes":
            return "no_indexes: the base table has no index."
        case "dry_run":
            waiting = counted(sum(index.decision == "would_update" for index in report.indexes), "index", "indexes")
            return f"dry_run: would update {waiting}{_left(report)}; nothing was changed."
        case "answers_worse":
            worse = counted(len(report.failures), "index", "indexes")
            return f"answers_worse: {worse} not published, {updated} updated, version {report.version}."
        case _:
            failed = counted(len(report.failures), "index", "indexes")
            return f"incomplete: {failed} failed, {updated} updated, version {report.version}."


def _left(report: CatchupReport) -> str:
    left = sum(index.decision == "over_budget" for index in report.indexes)
    return f", {counted(left, 'index', 'indexes')} left by --max-bytes for the next run" if left else ""


def _engine(index: IndexReport) -> str | None:
    """Where an index was built, and what its stages took; None: where all indexes are."""
    engine = index.engine
    if engine is None or (engine.name == "local" and engine.reason == "requested"):
        return None
    stages = ", ".join(
        f"{name} {figures['seconds']:.1f} s ({counted(int(figures['tasks']), 'task')})"
        for name, figures in index.stages.items()
    )
    took = f" {stages}." if stages else ""
    return f"ENGINE: {index.name}: {engine.name} ({engine.reason.removesuffix('.')}).{took}"


def _table(report: CatchupReport) -> str:
    rows = [
        (
            index.name,
            index.type,
            index.decision if index.method in {None, "update"} else f"{index.decision} ({index.method})",
            f"{index.uncovered_fragments:,}",
            f"{index.uncovered_rows:,}",
            f"{index.segments:,}",
            size_text(index.bytes_written),
            f"{index.seconds:.2f}",
        )
        for index in report.indexes
    ]
    headings = ("index", "type", "decision", "fragments behind", "rows behind", "segments", "written", "seconds")
    return grid(headings, rows, words=("index", "type", "decision"))
