"""The merge job: merge flushed generations into the base table, in order, atomically with progress.

``plan`` only reads. ``apply`` works pass by pass and plans again from the newest version before each one, because
between two passes there may be another merger, a writer's flush or a schema change. A pass is one base version; killed
anywhere, the next run reads the progress and continues.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import Progress, RunContext
from memwal_ops.core.documents import document
from memwal_ops.core.figures import cached_for_poll
from memwal_ops.core.options import EngineChoice, choose_engine
from memwal_ops.core.report import MergeDecision, MergeOutcome, Need
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError, MergeEngine, MergePass, PassResult
from memwal_ops.formats.lance.engines.merge.passes import LocalMergeEngine
from memwal_ops.formats.lance.files.version_files import VersionWriter, is_shared
from memwal_ops.formats.lance.generations.backlog import (
    Backlog,
    BlockedRegion,
    backlog_of,
    restored_index,
    with_listed_log,
)
from memwal_ops.formats.lance.generations.generation_files import checked_backlog, oldest_unmerged
from memwal_ops.formats.lance.generations.wal import read_unflushed
from memwal_ops.formats.lance.options import DEFAULT_MAX_BYTES, SPARK_MAX_BYTES, MergeOptions
from memwal_ops.formats.lance.retention.damage import names_damage, refuse_damaged_base_files
from memwal_ops.formats.lance.wire.region_manifest import MERGED_ELSEWHERE, RegionRecord
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted, grid, paragraph, short_ids, size_text, span_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
    from uuid import UUID

    from memwal_ops.core.spark.stages import StageProgress
    from memwal_ops.formats.lance.generations.generation import GenerationRef
    from memwal_ops.formats.lance.jobs.drained import DrainedRegion
    from memwal_ops.formats.lance.table import Table


__all__ = ["MergeDecision", "MergeOptions", "MergeReport", "apply", "backlog", "plan"]

_log = get_logger(__name__)
_MAX_GENERATIONS_POLLED, _MAX_WITHOUT_SIZE = 64, 1024
# A pass keeps the key, the address and the age of each row; this bounds it where rows are narrower than that.
_BYTES_OF_ROW = 512
_MIN_ROWS = 2 << 20
_PLANNED = ("rows waiting", "size")
_DONE = ("rows read", "size", "rows written", "rows deleted", "seconds", "version")


@dataclass(frozen=True, slots=True)
class MergePassReport:
    """One pass in a report. ``result`` is None in a dry run."""

    merge_pass: MergePass
    result: PassResult | None

    def to_json(self) -> dict[str, Any]:
        """The ``passes`` entry of a report."""
        regions = {str(region_id): list(span) for region_id, span in self.merge_pass.regions.items()}
        figures = (
            dict.fromkeys(one.name for one in fields(PassResult)) if self.result is None else document(self.result)
        )
        return {"regions": regions, **figures}


@dataclass(frozen=True, slots=True)
class MergeReport(MergeOutcome):
    """Report of a merge.

    ``engine_reason``: why that engine was selected; ``fell_back``: whether it is local because Spark cannot run here.
    ``drained``: the regions of ``accept_drained``. ``overwritten``: by region the keys of which another program put
    older rows over newer ones.
    """

    decision: MergeDecision
    run_id: str
    passes: tuple[MergePassReport, ...]
    blocked: tuple[BlockedRegion, ...]
    backlog_after: Backlog
    engine: str
    version: int
    commit_conflicts: int
    seconds: float
    engine_reason: str = ""
    fell_back: bool = False
    drained: tuple[DrainedRegion, ...] = ()
    overwritten: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document of ``merge --json``."""
        return document(self, "fell_back")

    def needs(self) -> Iterator[Need]:
        """What a run would merge."""
        waiting = self.backlog_after.to_json()
        if waiting["generations"]:
            yield Need("merge", f"merge {counted(waiting['generations'], 'generation')}", rows=waiting["rows"])

    def describe(self) -> str:
        """The report as text for people."""
        generations = sum(len(entry.merge_pass.generations) for entry in self.passes)
        accepted = sum(len(region.fault.drops) for region in self.drained if region.adoptable)
        parts = [headline(self.decision, generations, len(self.passes), self.seconds, accepted)]
        if self.engine == "spark" or self.fell_back:
            parts.append(paragraph(f"Engine: {self.engine} ({self.engine_reason.removesuffix('.')})."))
        if self.passes:
            parts.append(_passes(self))
        done = self.decision is not MergeDecision.DRY_RUN
        parts += [paragraph(region.describe(done=done), hanging="  ") for region in self.drained]
        if self.overwritten:
            from memwal_ops.formats.lance.jobs.inspect.report import MergedElsewhere  # noqa: PLC0415 - as below

            parts += MergedElsewhere("Another program", self.overwritten).problems()
        parts += [fault.describe("BLOCKED") for fault in self.blocked]
        after = self.backlog_after.to_json()
        if after["generations"]:
            waiting = f"{counted(after['generations'], 'generation')} in {counted(after['regions'], 'region')}"
            parts.append(
                paragraph(f"Waiting: {waiting}, {counted(after['rows'], 'row')}, {size_text(after['bytes'])}.")
            )
        elif self.blocked:
            parts.append("No other generation is known to be unmerged; a blocked region may have more.")
        else:
            parts.append("All generations are merged.")
        return "\n\n".join(parts) if len(parts) > 2 else "\n".join(parts)  # noqa: PLR2004 - nothing to set apart


def _passes(report: MergeReport) -> str:
    """One line for each region of each pass; the figures of a pass are on its first line."""
    names = short_ids({region_id for entry in report.passes for region_id in entry.merge_pass.regions})
    rows = []
    for number, entry in enumerate(report.passes, 1):
        figures = _figures(entry)
        for line, (region_id, (first, last)) in enumerate(entry.merge_pass.regions.items()):
            shown = (str(number), figures) if line == 0 else ("", [""] * len(figures))
            rows.append((shown[0], names[region_id], span_text(first, last), *shown[1]))
    done = any(entry.result is not None for entry in report.passes)
    return grid(("pass", "region", "generations", *(_DONE if done else _PLANNED)), rows, words=("region",))


def _figures(entry: MergePassReport) -> list[str]:
    """What a pass did; of one that is planned sizes by the manifests, lower bounds if some are not recorded."""
    if (done := entry.result) is not None:
        figures = [f"{done.rows_read:,}", size_text(done.bytes_read), f"{done.rows_upserted:,}"]
        return [*figures, f"{done.rows_deleted:,}", f"{done.seconds:.2f}", str(done.version)]
    refs = entry.merge_pass.generations
    known = "" if all(ref.rows is not None and ref.bytes is not None for ref in refs) else "at least "
    rows, size = sum(ref.rows or 0 for ref in refs), sum(ref.bytes or 0 for ref in refs)
    return [f"{known}{rows:,}", f"{known}{size_text(size)}"]


def headline(decision: MergeDecision, generations: int, passes: int, seconds: float, accepted: int = 0) -> str:
    """The first sentence of a report, of any layout. ``accepted``: generations that another program dropped."""
    done, took = counted(generations, "generation"), counted(passes, "pass", "passes")
    theirs = f"{counted(accepted, 'generation')} that another program dropped" if accepted and not generations else ""
    match decision:
        case "merged":
            return f"merged: {f'accepted {theirs}' if theirs else f'{done} in {took}'}, {seconds:.2f} s."
        case "nothing_to_merge":
            return "nothing_to_merge: every flushed generation is in the base table already."
        case "superseded":
            return "superseded: another merger merged all generations that waited when this one began."
        case "dry_run":
            return f"dry_run: would {f'accept {theirs}' if theirs else f'merge {done} in {took}'}; nothing was changed."
        case _ if not generations:
            return f"blocked: {f'accepted {theirs}, but' if theirs else 'nothing was merged,'} see below."
        case _:
            return f"blocked: {done} merged in {took}, but see below."


def restore_index(table: Table, backlog: Backlog) -> Table:
    """Restore specs of regions, and the progress of blocked ones, if older versions prove it.

    Returns the newest version then, else ``table``. Raises as :func:`apply`.
    """
    retry = CommitRetry()
    note = commit.CommitNote("merge")
    lost_by = (errors.RegionReplacedError, errors.GenerationMissingError)
    blocked = [fault.region_id for fault in backlog.blocked if isinstance(fault.error, lost_by)]
    without_progress = [backlog.regions[region_id].manifest for region_id in blocked if region_id in backlog.regions]
    while lost := restored_index(table, [one.manifest for one in backlog.regions.values()], without_progress):
        try:
            commit.commit_change(table, commit.IndexChange(lost.details, records=lost.records), note)
        except commit.CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            uri = table.location.uri
            for region_id, merged in lost.progress.items():
                _log.info("progress_restored", table=uri, region=str(region_id), generation=merged)
            if lost.specs:
                _log.info("region_specs_restored", table=uri, specs=[*lost.specs])
            return retry.landed(table)
    return table


@dataclass(slots=True)
class _Limits:
    """The last generation to merge in each region: before a fault, or when the run began, so that it ends."""

    last: dict[UUID, int]
    blocked: dict[UUID, BlockedRegion] = field(default_factory=dict)

    def block(self, fault: BlockedRegion) -> None:
        known = self.blocked.get(fault.region_id)
        if known is None or (known.generation or 0) > (fault.generation or 0):
            self.blocked[fault.region_id] = fault
        before = 0 if fault.generation is None else fault.generation - 1
        self.last[fault.region_id] = min(self.last.get(fault.region_id, before), before)

    def release(self, backlog: Backlog, region_ids: AbstractSet[UUID]) -> None:
        """Let these regions be merged up to what they list now: what blocked them was accepted."""
        for region_id in region_ids:
            self.blocked.pop(region_id, None)
            self.last[region_id] = max((ref.generation for ref in backlog.regions[region_id].pending), default=0)

    def select(self, pending: Iterable[GenerationRef]) -> list[GenerationRef]:
        return [ref for ref in pending if ref.generation <= self.last.get(ref.region_id, 0)]


@names_damage
def plan(table: Table, options: MergeOptions, context: RunContext | None = None) -> MergeReport:
    """Report what a merge would do, without changes: decision ``dry_run``, passes without results.

    Up to the first damaged generation of each region; no rows are read.

    Raises:
        InvalidUsageError: a region that the table does not have.
        UnsupportedFeatureError: a table on which the merge could not commit.
    """
    del context
    options.refuse_legacy()
    note = commit.CommitNote("merge")
    table = with_listed_log(table)
    wanted = table.regions.all_named(options.regions)
    backlog = checked_backlog(table, backlog_of(table, wanted)).backlog
    blocked = backlog.blocked
    regions: tuple[DrainedRegion, ...] = ()
    if options.accept_drained and any(fault.drops for fault in blocked):
        from memwal_ops.formats.lance.jobs import drained  # noqa: PLC0415 - where another program merges

        regions = drained.drained_regions(table, backlog)
        merged = {**table.index.merged_generations, **drained.merged_there(regions)}
        accepted = replace(table, memwal=replace(table.index, merged_generations=merged))
        backlog = checked_backlog(accepted, backlog_of(accepted, wanted)).backlog
        listed = {region.fault.region_id for region in regions if region.adoptable and region.missing}
        blocked = tuple(fault for fault in backlog.blocked if fault.region_id not in listed)
    waiting = list(backlog.pending)
    if waiting:
        commit.check_committable(table)
        commit.check_takes_rows(table)
    else:
        refuse_damaged_base_files(table)
    choice = _choose(options, waiting)
    passes, sized = [], _sized(options, choice.name)
    while waiting:
        merge_pass = _next_pass(waiting, sized)
        passes.append(MergePassReport(merge_pass, None))
        waiting = waiting[len(merge_pass.generations) :]
    if choice.name == "spark":
        from memwal_ops.core.spark.session import check_environment  # noqa: PLC0415 - Spark only

        choice = replace(choice, reason=f"{choice.reason}; found {check_environment()}")
    return MergeReport(
        decision=MergeDecision.DRY_RUN,
        run_id=note.run_id,
        engine=choice.name,
        engine_reason=choice.reason,
        fell_back=choice.fell_back,
        passes=tuple(passes),
        blocked=_compared(table, blocked),
        drained=regions,
        overwritten=_overwritten(table, backlog),
        backlog_after=backlog,
        version=table.version,
        commit_conflicts=0,
        seconds=note.seconds,
    )


@names_damage
def apply(
    table: Table, options: MergeOptions, context: RunContext | None = None, *, engine: MergeEngine | None = None
) -> MergeReport:
    """Merge everything that was flushed when the call began (S0-156 to S0-168).

    ``table``: any version of the table; the newest is read before each pass. ``context``: reports progress in rows and
    stages, and can stop the run between two passes. ``engine``: used instead of ``options.engine``.
    Returns the report, with the blocked regions; the others are merged.
    Raises ``CommitConflictError``: too many commit conflicts in a row; ``CommitStateUnknownError``: the outcome of a
    commit is unknown; run it again; ``MemwalOpsError``: any other refusal; what earlier passes published stays merged.
    """
    options.refuse_legacy()
    note = commit.CommitNote("merge")
    context = context or RunContext()
    table = with_listed_log(table)
    wanted = table.regions.all_named(options.regions)
    backlog = backlog_of(table, wanted)
    if (restored := restore_index(table, backlog)) is not table:
        table = with_listed_log(restored)
        backlog = backlog_of(table, wanted)
    if overwritten := _overwritten(table, backlog):
        table = _record(table, {}, note, {MERGED_ELSEWHERE: table.history.program(table.version)})
        table = with_listed_log(table)
    sizes: dict[GenerationRef, GenerationRef] = {}
    choice = EngineChoice(engine.name, "given by the caller") if engine else None
    choice = choice or _choose(options, _with_sizes(table, backlog, backlog.pending, sizes))
    accepts = options.accept_drained and any(fault.drops for fault in backlog.blocked)
    if backlog.pending or accepts:
        commit.check_committable(table)
        commit.check_takes_rows(table)
        probe_conditional_writes(table.store)
    else:
        refuse_damaged_base_files(table)
    sized = _sized(options, choice.name)
    # Start Spark only if there is work.
    with (
        _running(choice, options, context, needed=bool(backlog.pending) or accepts)
        if engine is None
        else nullcontext(engine) as running
    ):
        report = _merge_all(table, sized, running, choice, backlog, sizes, note, context)
    return replace(report, blocked=_compared(table.newest(), report.blocked), overwritten=overwritten)


def _overwritten(table: Table, backlog: Backlog) -> Mapping[str, tuple[str, ...]]:
    """By region the keys of which another program, which wrote the newest version, put older rows over newer ones."""
    if not backlog.regions or not is_shared(table.manifest) or VersionWriter.of(table.manifest).ours:
        return {}
    from memwal_ops.formats.lance.jobs.drained import overwritten  # noqa: PLC0415 - as above

    return overwritten(table, [region.manifest for region in backlog.regions.values()])


def _compared(table: Table, blocked: tuple[BlockedRegion, ...]) -> tuple[BlockedRegion, ...]:
    """The faults; what another program dropped with what is left of its rows."""
    if not any(fault.drops for fault in blocked):
        return blocked
    from memwal_ops.formats.lance.jobs.drained import compare  # noqa: PLC0415 - as above

    return tuple(
        replace(fault, error=errors.DrainedElsewhereError(f"{fault.error} {compare(table, fault).found()}"))
        if fault.drops
        else fault
        for fault in blocked
    )


def _merge_all(
    table: Table,
    options: MergeOptions,
    engine: MergeEngine,
    choice: EngineChoice,
    backlog: Backlog,
    sizes: dict[GenerationRef, GenerationRef],
    note: commit.CommitNote,
    context: RunContext,
) -> MergeReport:
    wanted = table.regions.all_named(options.regions)
    limits = _Limits({ref.region_id: ref.generation for ref in backlog.pending})
    had_work = bool(backlog.pending)
    done: list[MergePassReport] = []
    retry = CommitRetry()
    on_rows = _row_counter(backlog, context)
    compared = False
    drained: list[DrainedRegion] = []
    while True:
        for fault in backlog.blocked:
            limits.block(fault)
        waiting = limits.select(backlog.pending)
        if not waiting:
            accepted = _accepted(table, backlog, limits, note) if options.accept_drained else None
            if accepted is None:
                break
            table, backlog, regions = accepted
            drained += regions
            continue
        waiting = _with_sizes(table, backlog, waiting, sizes)
        merge_pass = _next_pass(waiting, _shrunk(options, retry.consecutive))
        whole = MergePass(tuple(waiting), merge_pass.max_bytes)
        try:
            # A pass compares the keys of its own regions only, not those of regions in different passes.
            if not compared and len(merge_pass.generations) < len(waiting) and len(whole.regions) > 1:
                engine.refuse_shared_keys(table, whole)
                compared = True
            result = engine.run(table, merge_pass, note, on_rows)
        except BlockedRegionsError as error:
            table = table.newest()
            _block(limits, error, table.index.merged_generations)
        except (commit.CommitLostError, errors.ObjectNotFoundError) as error:
            table = retry.conflict_or_expired(table, error)
        else:
            done.append(MergePassReport(merge_pass, result))
            context.figures["bytes_merged"] += result.bytes_read
            context.figures["rows_merged"] += result.rows_read
            for phase, seconds in result.phases.items():
                context.add_phase_seconds(phase, seconds)
            _log.info("pass_merged", table=table.location.uri, version=result.version, rows=result.rows_upserted)
            table = retry.landed(table)
            context.checkpoint()
        table = with_listed_log(table)
        backlog = backlog_of(table, wanted)
    # To which regions the progress of other mergers belongs: otherwise only versions that expire show it.
    if unrecorded := {key: record for key, record in backlog.unrecorded.items() if table.records.get(key) != record}:
        table = _record(table, unrecorded, note)
    blocked = tuple(limits.blocked[region_id] for region_id in sorted(limits.blocked))
    context.figures["conflicts"] += retry.conflicts
    context.figures["regions_blocked"] = len(blocked)
    return MergeReport(
        decision=decide(merged=bool(done or drained), blocked=bool(blocked), had_work=had_work),
        run_id=note.run_id,
        drained=tuple(drained),
        engine=choice.name,
        engine_reason=choice.reason,
        fell_back=choice.fell_back,
        passes=tuple(done),
        blocked=blocked,
        backlog_after=backlog,
        version=table.version,
        commit_conflicts=retry.conflicts,
        seconds=note.seconds,
    )


def _accepted(
    table: Table, backlog: Backlog, limits: _Limits, note: commit.CommitNote
) -> tuple[Table, Backlog, tuple[DrainedRegion, ...]] | None:
    """Accept what another program dropped: the table, what waits now, and the regions; None: nothing can be."""
    blocked = [fault.region_id for fault in backlog.blocked if fault.drops]
    if not blocked:
        return None
    from memwal_ops.formats.lance.jobs.drained import accept  # noqa: PLC0415 - as above

    table, regions = accept(table, blocked, note)
    changed = {region.fault.region_id for region in regions if region.adoptable}
    if not changed:
        return None
    table = with_listed_log(table.newest())
    backlog = backlog_of(table, backlog.regions)
    limits.release(backlog, changed)
    return table, backlog, regions


def _record(
    table: Table, records: Mapping[UUID, RegionRecord], note: commit.CommitNote, config: Mapping[str, str] | None = None
) -> Table:
    """Record what is known of other mergers, or let the next run determine it, while versions still show it."""
    try:
        probe_conditional_writes(table.store)
        commit.commit_indexes(
            table, commit.IndexChange(table.index.details, records=records, config=config or {}), note
        )
    except errors.LeaseLostError:
        raise
    except errors.MemwalOpsError as error:
        _log.info("regions_not_recorded", table=table.location.uri, error=str(error))
    return table.newest()


def decide(*, merged: bool, blocked: bool, had_work: bool) -> MergeDecision:
    """How a run ended that merged something, left something blocked, or had no work when it began."""
    if blocked:
        return MergeDecision.BLOCKED
    if merged:
        return MergeDecision.MERGED
    return MergeDecision.SUPERSEDED if had_work else MergeDecision.NOTHING_TO_MERGE


def _row_counter(backlog: Backlog, context: RunContext) -> Callable[[int], None]:
    """The callback for an engine's number of rows read; the total is known if every manifest has its part."""
    rows = [ref.rows for ref in backlog.pending]
    total = None if None in rows else sum(filter(None, rows))
    return lambda count: context.advance("merging", "rows", count, total=total)


def _choose(options: MergeOptions, waiting: Iterable[GenerationRef]) -> EngineChoice:
    return choose_engine(options, "a backlog", sum(ref.bytes or 0 for ref in waiting))


@contextmanager
def _running(
    choice: EngineChoice, options: MergeOptions, context: RunContext, *, needed: bool
) -> Iterator[MergeEngine]:
    if choice.name == "spark" and needed:
        from memwal_ops.core.spark.session import session  # noqa: PLC0415 - as above
        from memwal_ops.formats.lance.engines.spark.engine import SparkMergeEngine  # noqa: PLC0415 - not for a local merge

        context.report(Progress("starting Spark", "tasks", 0))
        with session(options.master) as spark:
            yield SparkMergeEngine(
                spark, on_progress=lambda stage: context.report(_stage_progress(stage)), checkpoint=context.checkpoint
            )
    else:
        yield LocalMergeEngine()


def _stage_progress(stage: StageProgress) -> Progress:
    detail = f"{stage.rows:,} rows" + (f", {size_text(stage.bytes)}" if stage.bytes else "")
    return Progress(f"merging: {stage.stage}", "tasks", stage.tasks_done, stage.tasks or None, detail)


def _with_sizes(
    table: Table, backlog: Backlog, waiting: Sequence[GenerationRef], sizes: dict[GenerationRef, GenerationRef]
) -> list[GenerationRef]:
    """The same, with the sizes that writers did not record, read from the files once: ``sizes`` has what was read."""
    if any(ref.bytes is None and ref not in sizes for ref in waiting):
        read = {(ref.region_id, ref.path): ref for ref in checked_backlog(table, backlog).backlog.pending}
        sizes |= {ref: read.get((ref.region_id, ref.path), ref) for ref in waiting}
    return [sizes.get(ref, ref) for ref in waiting]


def _sized(options: MergeOptions, engine: str) -> MergeOptions:
    default = SPARK_MAX_BYTES if engine == "spark" else DEFAULT_MAX_BYTES
    return replace(options, max_bytes=options.max_bytes or default)


def _shrunk(options: MergeOptions, lost_in_a_row: int) -> MergeOptions:
    if not lost_in_a_row or options.max_bytes is None:
        return options
    return replace(options, max_bytes=max(1, options.max_bytes >> lost_in_a_row))


def _next_pass(waiting: list[GenerationRef], options: MergeOptions) -> MergePass:
    """The next generations in order, up to the budget in bytes and in rows, always at least one.

    Region by region rather than round-robin: all writes of a key are in one region, so the
    longer the sequence of one region, the more rows are superseded before they are written.
    """
    chosen: list[GenerationRef] = []
    size = rows = 0
    budget = options.max_bytes or DEFAULT_MAX_BYTES
    most_rows = max(_MIN_ROWS, budget // _BYTES_OF_ROW)
    for ref in waiting:
        # For a generation of unrecorded size assume the worst: one machine's budget.
        cost = min(budget, DEFAULT_MAX_BYTES) if ref.bytes is None else ref.bytes
        if chosen and (size + cost > budget or rows + (ref.rows or 0) > most_rows):
            break
        if options.max_generations is not None and len(chosen) >= options.max_generations:
            break
        chosen.append(ref)
        size, rows = size + cost, rows + (ref.rows or 0)
    return MergePass(tuple(chosen), budget)


def _block(limits: _Limits, error: BlockedRegionsError, merged: Mapping[UUID, int]) -> None:
    """Record faults, except of what another merger has merged meanwhile, and gc deleted."""
    for region_id, (generation, cause) in error.causes.items():
        if generation is None or merged.get(region_id, 0) < generation:
            limits.block(BlockedRegion(region_id, generation, cause))


def backlog(table: Table) -> Mapping[str, float]:
    """The size of the backlog, and the age of its oldest generation in seconds.

    Looks at the files of the first 64 unmerged generations of each region (:func:`checked_backlog`); of 1,024, where
    the writer did not record their sizes: with more, the sums are not known.
    """
    listed = with_listed_log(table)
    read = cached_for_poll(table, "backlog", lambda: backlog_of(listed))
    limit = _MAX_WITHOUT_SIZE if None in read.to_json().values() else _MAX_GENERATIONS_POLLED
    checked = cached_for_poll(table, "files", lambda: checked_backlog(listed, read, limit))
    current, now = checked.backlog, datetime.now(UTC)
    oldest = oldest_unmerged(listed, checked)
    sizes, log = current.to_json(), read_unflushed(listed, read)
    written = {} if log.newest is None else {"seconds_since_last_write": _age(log.newest, now)}
    if oldest is not None or not (sizes["generations"] or current.blocked):  # else it is not known: it is damaged
        written["oldest_age"] = 0.0 if oldest is None else _age(oldest, now)
    others = [dict(table.manifest.manifest.config).get(MERGED_ELSEWHERE, ""), *(one.program for one in current.blocked)]
    if release := next(filter(None, (re.match(r"lance (\d+)", other) for other in others)), None):  # else not known
        written["merged_elsewhere"] = float(release[1])
    return {
        **{name: size for name in ("generations", "rows", "bytes") if (size := sizes[name]) is not None},
        "regions_behind": sizes["regions"] or 0,
        "blocked_regions": len(current.blocked),
        "regions_gone": table.regions_gone,
        "unflushed_entries": log.entries,
        "unflushed_oldest_seconds": 0.0 if log.oldest is None else _age(log.oldest, now),
        **written,
    }


def _age(written: datetime, now: datetime) -> float:
    return max(0.0, (now - written).total_seconds())
