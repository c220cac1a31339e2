"""Bring the indexes of a table up to date, or migrate a vector index to a new codebook.

A codebook cannot be changed in place: distances from the base and from unmerged generations would no longer compare. So
a second index with new centroids is built next to the first, writers maintain both, and the first is dropped when it is
no longer needed. Each run determines the state, performs at most one step (S0-113), and reports which one comes next:
running it again confirms that step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import RunContext
from memwal_ops.core.documents import document
from memwal_ops.core.outlook import NextRun, rates_of, seconds_at
from memwal_ops.errors import InvalidUsageError, InvariantViolatedError, MemwalOpsError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.commit.index_build import IndexBuild, create_index
from memwal_ops.formats.lance.files.datasets import lance_errors, open_dataset
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.generations.wal import has_unflushed_rows
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.index_arguments import arguments_like
from memwal_ops.formats.lance.indexes.index_faults import dot_product_error
from memwal_ops.formats.lance.indexes.snapshots import catchup_entry
from memwal_ops.formats.lance.jobs.catchup.publishing import publish_build
from memwal_ops.formats.lance.jobs.catchup.tiers import catchup_figures, debts_of
from memwal_ops.formats.lance.jobs.catchup.update import catch_up, plan_catch_up
from memwal_ops.formats.lance.options import CatchupOptions
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.formats.lance.wire.memwal_index import with_catchup, with_maintained_indexes
from memwal_ops.storage.api import results_of
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.generations.generation import GenerationRef
    from memwal_ops.formats.lance.jobs.catchup.report import CatchupReport
    from memwal_ops.formats.lance.table import Table


_CONCURRENT_OPENS = 8
_NEXT = {
    "create": "Run it again: {new} will be built with new centroids, next to {old}.",
    "maintain": "Run it again: {new} will be listed among the indexes that writers maintain.",
    "catch_up": "Run it again: {new} will be brought up to the merged generations.",
    "wait": "Restart the writers, so that they maintain {new}; merge what they flushed before; then run it again.",
    "drop": "When every reader uses {new}, run it again: {old} will be dropped.",
    "done": "Nothing is left to do.",
}

_STEPS = {
    "created": "created: {new} exists next to {old}, with centroids of its own.",
    "maintained": "maintained: writers that start from now on maintain {new} as well.",
    "caught_up": "caught_up: {new} covers everything that is merged.",
    "waiting": "waiting: {old} is still needed.",
    "dropped": "dropped: {old} no longer exists.",
    "done": "done: {old} is dropped, and {new} replaces it.",
    "dry_run": "dry_run: nothing was changed.",
}
_HOLDS_SHOWN = 10
_BY_HAND = "Create the new index yourself with dataset.create_index(..., name=NEW), then run this again."


@dataclass(frozen=True, slots=True)
class OldIndexUse:
    """What still needs the old index: a generation that lacks the new one; None: a log that is not flushed."""

    region_id: UUID
    generation: int | None
    because: str

    def to_json(self) -> dict[str, object]:
        """The ``holds`` entry of a report."""
        return document(self)


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """Report of one step of a migration.

    ``decision`` is one of created, maintained, caught_up, waiting, dropped, done, dry_run;
    ``next`` describes the step that the next run performs.
    """

    decision: str
    run_id: str
    old: str
    new: str
    holds: tuple[OldIndexUse, ...]
    next: str
    version: int
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The document of ``catchup --migrate-codebook --json``."""
        return document(self)

    @property
    def exit_code(self) -> int:
        """0: failures are raised."""
        return 0

    def describe(self) -> str:
        """The step as text for people."""
        parts = [_STEPS[self.decision].format(old=self.old, new=self.new)]
        for hold in self.holds[:_HOLDS_SHOWN]:
            generation = "" if hold.generation is None else f", generation {hold.generation}"
            parts.append(paragraph(f"held by region {hold.region_id}{generation}: {hold.because}", hanging="  "))
        if len(self.holds) > _HOLDS_SHOWN:
            parts.append(f"and by {len(self.holds) - _HOLDS_SHOWN:,} more (--json shows all).")
        parts.append(paragraph(f"Next: {self.next}", hanging="  "))
        return "\n".join(parts)


def migrate(table: Table, old: str, new: str, *, dry_run: bool = False) -> MigrationReport:
    """Perform the next step of replacing the vector index ``old`` by ``new``.

    ``table``: any version of it. ``new``: need not exist yet. ``dry_run``: only report the next step.

    Raises ``InvalidUsageError``: neither index exists, or they are not two vector indexes on one column;
    ``UnsupportedFeatureError``: the old one has no record of its build parameters; ``CommitConflictError``.
    """
    note = commit.CommitNote("catchup")
    commit.check_rewritable(table)
    table = table.newest()
    step, holds = _next_step(table, old, new)
    decision = "dry_run"
    if not dry_run:
        probe_conditional_writes(table.store)
        decision = _perform(table, step, old, new, note)
        table = table.newest()
        step, holds = _next_step(table, old, new)
    return MigrationReport(
        decision=decision,
        run_id=note.run_id,
        old=old,
        new=new,
        holds=holds,
        next=_NEXT[step].format(old=old, new=new),
        version=table.version,
        seconds=note.seconds,
    )


def _next_step(table: Table, old: str, new: str) -> tuple[str, tuple[OldIndexUse, ...]]:
    indexes = base_indexes(table)
    before, after = indexes.get(old), indexes.get(new)
    if old == new:
        raise InvalidUsageError(f"The new index must have another name than {old}.")
    if before is None and after is None:
        names = ", ".join(indexes) or "none"
        raise InvalidUsageError(f"{table.location.uri} has no index {old}; its indexes: {names}.")
    for index in (before, after):
        if index is not None and not index.is_vector:
            raise InvalidUsageError(f"Index {index.name} is a {index.type}, which has no codebook.")
    if before is None:
        return "done", ()
    if after is None:
        return "create", ()
    if [*after.segments[0].fields] != [*before.segments[0].fields]:
        raise InvalidUsageError(f"Index {new} is not on the same column as {old}.")
    maintained = table.index.maintained_indexes
    if old in maintained and new not in maintained:
        return "maintain", ()
    if not coverage(after.covered, table.manifest).complete:
        return "catch_up", ()
    holds = _holds(table, old, new)
    return ("wait" if holds else "drop"), holds


def _perform(table: Table, step: str, old: str, new: str, note: commit.CommitNote) -> str:
    retry = CommitRetry()
    if step == "create":
        _create(table, old, new, note, retry)
        return "created"
    if step == "maintain":
        commit.publish_change(table, partial(_maintain, new), note, retry)
        return "maintained"
    if step == "catch_up":
        anew = dot_product_error(table, base_indexes(table)[new]) is not None  # with its own codebook
        report = catch_up(table, CatchupOptions(indexes=(new,), rebuild=anew), RunContext())
        if report.failures:
            raise report.failures[0]
        return "caught_up"
    if step == "drop":
        commit.publish_change(table, partial(_drop, old, new), note, retry)
        return "dropped"
    return {"wait": "waiting", "done": "done"}[step]


def _holds(table: Table, old: str, new: str) -> tuple[OldIndexUse, ...]:
    index = table.index
    if old not in index.maintained_indexes and not index.maintain_all_indexes:
        return ()
    waiting = read_backlog(table)
    _ = table.layout  # read once, before the threads use it
    holds = [
        OldIndexUse(fault.region_id, fault.generation, f"It cannot be read: {fault.error}") for fault in waiting.blocked
    ]

    def hold_of(ref: GenerationRef) -> OldIndexUse | None:
        with lance_errors("read the indexes of", ref.folder):
            names = {index.name for index in open_dataset(table.location, ref.folder).describe_indices()}
        lacks = OldIndexUse(ref.region_id, ref.generation, f"It was flushed without index {new}.")
        return None if new in names else lacks

    holds += [hold for hold in results_of(hold_of, waiting.pending, threads=_CONCURRENT_OPENS) if hold is not None]
    manifests = [region.manifest for region in waiting.regions.values()]
    unflushed = results_of(partial(has_unflushed_rows, table), manifests, threads=_CONCURRENT_OPENS)
    known = {ref.region_id for ref in waiting.pending} | {hold.region_id for hold in holds}
    for region_id, has_log in zip(waiting.regions, unflushed, strict=True):
        if has_log and region_id not in known:
            because = f"It has unflushed rows, and no flushed generation shows that its writer maintains {new}."
            holds.append(OldIndexUse(region_id, None, because))
    return tuple(sorted(holds, key=lambda hold: (hold.region_id, hold.generation or 0)))


def _create(table: Table, old: str, new: str, note: commit.CommitNote, retry: CommitRetry) -> None:
    while _next_step(table, old, new)[0] == "create":  # else another run published it first
        try:
            arguments = arguments_like(table, base_indexes(table)[old])
        except MemwalOpsError as error:
            message = f"Index {old} has no record of how it was built: {error}"
            raise UnsupportedFeatureError(message, remedy=_BY_HAND) from error
        try:
            build = create_index(table, new, partial(arguments.create, name=new))
            if build is None:
                raise InvariantViolatedError(f"pylance made no index {new}.")
            publish_build(table, new, build, partial(_created, new, build, table), note, retry)
        except commit.CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return


def _created(new: str, build: IndexBuild, built_on: Table, newest: Table) -> commit.IndexChange:
    generations = catchup_entry(newest, build.covered, progress_when_built=built_on.index.merged_generations)
    return commit.IndexChange(with_catchup(newest.index.details, {new: generations}), added=build.added)


def _maintain(new: str, table: Table) -> commit.IndexChange | None:
    names = table.index.maintained_indexes
    return None if new in names else commit.IndexChange(with_maintained_indexes(table.index.details, [*names, new]))


def _drop(old: str, new: str, table: Table) -> commit.IndexChange:
    if _next_step(table, old, new)[0] != "drop":
        raise InvalidUsageError(f"Index {old} cannot be dropped now: it is needed again after a concurrent write.")
    names = [name for name in table.index.maintained_indexes if name != old]
    details = with_catchup(with_maintained_indexes(table.index.details, names), {old: None})
    return commit.IndexChange(details, removed=base_indexes(table)[old].segment_ids)


__all__ = ["CatchupOptions", "apply", "backlog", "plan"]


@names_damage
def plan(table: Table, options: CatchupOptions, context: RunContext | None = None) -> CatchupReport | MigrationReport:
    """Report what :func:`apply` would do, without changes: decision ``dry_run``."""
    if options.migrate_codebook:
        table.require_memwal("--migrate-codebook")
        return migrate(table, *options.migrate_codebook, dry_run=True)
    context = context or RunContext()
    report = plan_catch_up(table, options, context)
    wanted = [index for index in report.indexes if index.decision == "would_update"]
    written = sum(index.bytes_written for index in wanted)
    debt = max(written, sum(one.bytes for one in debts_of(table, options).values()))
    rates = rates_of("catchup", context.past_runs(table.location.address, "catchup"))
    seconds = seconds_at(sum(index.uncovered_rows for index in wanted), rates)
    why = None if wanted else "No index would be updated."
    return replace(report, cost=NextRun(debt, written, written, seconds, why))


@names_damage
def apply(table: Table, options: CatchupOptions, context: RunContext | None = None) -> CatchupReport | MigrationReport:
    """Bring the indexes up to date, and make ``index_catchup`` agree with them (S0-179 to S0-181).

    ``table``: any version of the table; the newest is read during the run. ``context``: can stop the run between two
    indexes.
    Returns the report. It has the error of an index that failed; the others are processed.
    Raises ``InvalidUsageError``: an index that the table does not have; ``UnsupportedFeatureError``: a table whose
    manifest must not be rewritten here; ``CommitStateUnknownError``: the outcome of a commit is unknown; run it again.
    """
    context = context or RunContext()
    if options.migrate_codebook:
        table.require_memwal("--migrate-codebook")
        return migrate(table, *options.migrate_codebook, dry_run=False)
    return catch_up(table, options, context)


backlog = catchup_figures
