"""The merge job of tables with the legacy MemWAL index: merge FLUSHED MemWALs into the base table, in order.

A pass is one version: new fragments, deletion vectors and the state MERGED together. If states changed in a second
commit after the upsert, a run killed between the two would repeat the upsert over updates that users made meanwhile.
The report has the keys of every other merge, with region names as ids.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import RunContext
from memwal_ops.core.documents import document
from memwal_ops.core.report import MergeDecision, MergeOutcome
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote
from memwal_ops.formats.lance.commit.publication import deleted_unless_named
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError, MergePass, collapse, read_all_keys
from memwal_ops.formats.lance.engines.merge.locate import locate, repeated_keys
from memwal_ops.formats.lance.engines.merge.passes import refuse_shared_keys
from memwal_ops.formats.lance.engines.merge.rewrite import remove_files, rewrite
from memwal_ops.formats.lance.files.version_files import list_versions, read_version_manifest
from memwal_ops.formats.lance.jobs.merge import decide, headline
from memwal_ops.formats.lance.legacy import index
from memwal_ops.formats.lance.legacy.mem_tables import MemTables, mem_table_ref, region_number, with_key
from memwal_ops.formats.lance.legacy.states import Change, merge
from memwal_ops.formats.lance.options import DEFAULT_MAX_BYTES, LegacyOptions, MergeOptions
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted, grid, paragraph, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.legacy_index import MemWal, MemWalId


@dataclass(frozen=True, slots=True)
class LegacyPass:
    """The MemWALs of one pass, and what it did. ``version`` is None in a dry run."""

    ids: tuple[MemWalId, ...]
    version: int | None = None
    rows_read: int = 0
    rows_upserted: int = 0
    rows_deleted: int = 0
    bytes_read: int = 0
    use_index: bool = False
    seconds: float = 0.0

    @property
    def regions(self) -> Mapping[str, list[int]]:
        """Per region its first and last generation."""
        spans: dict[str, list[int]] = {}
        for one in self.ids:
            spans.setdefault(one.region, [one.generation, one.generation])[1] = one.generation
        return spans

    def to_json(self) -> dict[str, Any]:
        """The ``passes`` entry of a report."""
        figures = document(self, "ids")
        shown = figures if self.version is not None else dict.fromkeys(figures)
        return {"regions": dict(self.regions), **shown, "phases": None, "metrics": None}


@dataclass(frozen=True, slots=True)
class LegacyMergeReport(MergeOutcome):
    """Report of a merge.

    ``marked``: MemWALs that only got the state MERGED: FLUSHED by a release for which that means merged. ``work``: per
    region what is unmerged at the end. ``restored``: the version whose rows were restored first, if that was needed.
    """

    decision: MergeDecision
    run_id: str
    passes: tuple[LegacyPass, ...]
    marked: tuple[MemWalId, ...]
    blocked: tuple[index.BlockedMemWal, ...]
    work: Mapping[str, index.RegionWork]
    restored: int | None
    version: int
    seconds: float
    commit_conflicts: int = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``merge --json``; the index records no sizes, so the backlog has null for them."""
        marked = [{"region_id": mem_wal_id.region, "generation": mem_wal_id.generation} for mem_wal_id in self.marked]
        engine = {"engine": "local", "engine_reason": "the legacy layout", "restored_version": self.restored}
        left = backlog_json(self.work)
        return document(self, "marked", "work", "restored", marked_merged=marked, backlog_after=left, **engine)

    def describe(self) -> str:
        """The report as text for people."""
        parts = [self._headline()]
        if self.restored is not None:
            were = "would be" if self.decision is MergeDecision.DRY_RUN else "were"
            text = f"The newest version had no rows: those of version {self.restored} {were} restored first."
            parts.append(paragraph(text))
        if self.marked:
            text = "FLUSHED by a release for which that means merged; only the state was set"
            parts.append(paragraph(f"{text}: {', '.join(map(str, self.marked))}."))
        if any(entry.version is not None for entry in self.passes):
            parts.append(_passes(self.passes))
        parts += [blocked_text(fault) for fault in self.blocked]
        waiting = sum(len(region.pending) for region in self.work.values())
        unflushed = sum(len(region.waiting) for region in self.work.values())
        if unflushed:
            text = f"{counted(unflushed, 'MemWAL')} not flushed yet: a writer does that, or migrate replays it."
            parts.append(paragraph(text))
        if self.decision is not MergeDecision.DRY_RUN:
            parts.append(f"Waiting: {counted(waiting, 'generation')}.")
        return "\n\n".join(parts)

    def _headline(self) -> str:
        generations = sum(len(entry.ids) for entry in self.passes)
        match self.decision:
            case "nothing_to_merge":
                return "nothing_to_merge: every FLUSHED MemWAL is in the base table already."
            case "dry_run":
                return f"dry_run: would merge {counted(generations, 'generation')}; nothing was changed."
            case _:
                return headline(self.decision, generations, len(self.passes), self.seconds)


def backlog_json(work: Mapping[str, index.RegionWork]) -> dict[str, int | None]:
    """The ``backlog`` of a report."""
    return {
        "regions": sum(bool(region.pending) for region in work.values()),
        "generations": sum(len(region.pending) for region in work.values()),
        "rows": None,
        "bytes": None,
    }


def blocked_text(fault: index.BlockedMemWal) -> str:
    """A blocked region as a paragraph."""
    where = f"region {fault.region!r}" + ("" if fault.generation is None else f", generation {fault.generation}")
    return paragraph(f"BLOCKED {where} ({fault.error.reason}): {fault.error} {fault.error.remedy}", hanging="  ")


def _passes(passes: tuple[LegacyPass, ...]) -> str:
    rows = [
        (
            str(number),
            ", ".join(
                f"{region} {first}" + (f"-{last}" if last > first else "")
                for region, (first, last) in entry.regions.items()
            ),
            f"{entry.rows_read:,}",
            size_text(entry.bytes_read),
            f"{entry.rows_upserted:,}",
            f"{entry.seconds:.2f}",
            str(entry.version),
        )
        for number, entry in enumerate(passes, 1)
    ]
    columns = ("pass", "generations", "rows read", "size", "rows written", "seconds", "version")
    return grid(columns, rows, words=("generations",))


# For every part of the keys all MemTables are opened again.
_MIN_KEY_BYTES = 16 << 20
_FAULTS = (errors.GenerationMissingError, errors.GenerationCorruptError, errors.SchemaProjectionError)


@dataclass(slots=True)
class _Run:
    """State of a run. ``limit``: what was FLUSHED when it began."""

    options: MergeOptions
    limit: frozenset[MemWalId]
    context: RunContext
    note: CommitNote
    blocked: dict[str, index.BlockedMemWal] = field(default_factory=dict)
    passes: list[LegacyPass] = field(default_factory=list)
    marked: list[MemWalId] = field(default_factory=list)
    restored: int | None = None
    work: Mapping[str, index.RegionWork] = field(default_factory=dict)
    compared: bool = False

    def block(self, fault: index.BlockedMemWal) -> None:
        known = self.blocked.get(fault.region)
        if known is None or (known.generation or 0) > (fault.generation or 0):
            self.blocked[fault.region] = fault

    def select(self, pending: Iterable[MemWal]) -> list[MemWal]:
        def may(one: MemWal) -> bool:
            fault = self.blocked.get(one.id.region)
            before = fault is None or (fault.generation is not None and one.id.generation < fault.generation)
            return before and one.id in self.limit

        return [mem_wal for mem_wal in pending if may(mem_wal)]


@names_damage
def plan(table: Table, options: MergeOptions, context: RunContext | None = None) -> LegacyMergeReport:
    """Report what a merge would do, without changes; MemTables are not opened."""
    del context
    note = CommitNote("merge")
    emptied = index.find_emptied(table)
    if emptied is not None and not options.restore:
        raise emptied.error("merge")
    work = _work(table, options)
    pending = [mem_wal for region in work.values() for mem_wal in region.pending]
    if pending:
        index.check_mergeable(with_key(table, options))
    return LegacyMergeReport(
        decision=MergeDecision.DRY_RUN,
        run_id=note.run_id,
        passes=tuple(LegacyPass((mem_wal.id,)) for mem_wal in pending),
        marked=tuple(mem_wal.id for region in work.values() for mem_wal in region.merged_already),
        blocked=tuple(region.blocked for region in work.values() if region.blocked is not None),
        work=work,
        restored=None if emptied is None else emptied.source,
        version=table.version,
        seconds=note.seconds,
    )


@names_damage
def apply(table: Table, options: MergeOptions, context: RunContext | None = None) -> LegacyMergeReport:
    """Merge everything that is FLUSHED when the call begins; per region its lowest generation first (S1-028).

    Raises:
        TableCorruptError: the newest version was emptied, and ``options.restore`` is not given.
        NoPrimaryKeyError: the key is not known.
        CommitConflictError: too many commit conflicts in a row.
        CommitStateUnknownError: the outcome of a commit is unknown; run it again.
        MemwalOpsError: any other refusal; what earlier passes published stays merged.
    """
    note = CommitNote("merge")
    if options.engine == "spark":
        raise errors.InvalidUsageError(
            "A table with the legacy MemWAL index is merged by the local engine only.",
            remedy="Leave --engine out; or run memwal-ops migrate --apply first, and merge on Spark then.",
        )
    retry = CommitRetry()
    work = _work(table, options)
    limit = frozenset(mem_wal.id for region in work.values() for mem_wal in region.pending)
    run = _Run(options, limit, context or RunContext(), note)
    if limit or any(region.merged_already for region in work.values()):
        probe_conditional_writes(table.store)
    while True:
        try:
            more = _step(table, run)
        except BlockedRegionsError as error:
            names = {region_number(region): region for region in run.work}
            for number, (generation, cause) in error.causes.items():
                run.block(index.BlockedMemWal(names[number], generation, cause))
            table = table.newest()
        except (CommitLostError, errors.ObjectNotFoundError) as error:
            table = retry.conflict_or_expired(table, error)
        else:
            if not more:
                break
            table = retry.landed(table)
            run.context.checkpoint()
    run.context.figures["conflicts"] += retry.conflicts
    run.context.figures["regions_blocked"] = len(run.blocked)
    return LegacyMergeReport(
        decision=decide(
            merged=bool(run.passes or run.marked) or run.restored is not None,
            blocked=bool(run.blocked),
            had_work=bool(limit),
        ),
        run_id=note.run_id,
        passes=tuple(run.passes),
        marked=tuple(run.marked),
        blocked=tuple(run.blocked[name] for name in sorted(run.blocked)),
        work=run.work,
        restored=run.restored,
        version=table.version,
        commit_conflicts=retry.conflicts,
        seconds=note.seconds,
    )


def _step(table: Table, run: _Run) -> bool:
    """Publish the next version, if there is anything to do: restored rows, states alone, or a pass.

    Returns whether it did; False: nothing is left.
    """
    if (emptied := index.find_emptied(table)) is not None:
        if not run.options.restore:
            raise emptied.error("merge")
        index.restore_emptied(table, emptied, run.note)
        run.restored = emptied.source
        return True
    run.work = _work(table, run.options)
    for region in run.work.values():
        if region.blocked is not None:
            run.block(region.blocked)
    if already := [mem_wal for region in run.work.values() for mem_wal in region.merged_already]:
        index.publish(table, _merged(table, already), run.note)
        run.marked += [mem_wal.id for mem_wal in already]
        return True
    waiting = run.select(mem_wal for region in run.work.values() for mem_wal in region.pending)
    if waiting:
        _merge_pass(table, waiting, run)
    return bool(waiting)


def backlog(table: Table) -> Mapping[str, float]:
    """The unmerged MemWALs, from the index alone, which has no sizes: of what waits, rows and bytes are not known."""
    work = index.read_work(index.mem_wals_of(table), index.Meanings(table))
    pending = [mem_wal for region in work.values() for mem_wal in region.pending]
    ages = [_age(table, mem_wal.last_updated_dataset_version) for mem_wal in pending]
    return {
        "generations": len(pending),
        **({} if pending else {"rows": 0, "bytes": 0}),
        "oldest_age": max(ages, default=0.0),
        "regions_behind": sum(bool(region.pending) for region in work.values()),
        "blocked_regions": sum(region.blocked is not None for region in work.values()),
    }


def _age(table: Table, version: int) -> float:
    """Seconds since a version was published, by its manifest; where that is gone, since the next one was."""
    try:
        stamp = read_version_manifest(table.store, version, table.naming).manifest.timestamp
    except errors.MemwalOpsError:
        later = [number for number in list_versions(table.store).numbered if number > version]
        return _age(table, min(later)) if later else 0.0
    return max(0.0, (datetime.now(UTC) - stamp.ToDatetime(UTC)).total_seconds())


def _work(table: Table, options: MergeOptions) -> Mapping[str, index.RegionWork]:
    work = index.read_work(index.mem_wals_of(table), index.Meanings(table, options.flushed_means))
    wanted = [str(name) for name in options.regions]
    if unknown := [name for name in wanted if name not in work]:
        raise errors.InvalidUsageError(
            f"{table.location.uri} has no region {', '.join(unknown)}.", remedy=f"It has: {', '.join(work) or 'none'}."
        )
    return {region: region_work for region, region_work in work.items() if not wanted or region in wanted}


def _merged(table: Table, done: Sequence[MemWal]) -> Change:
    """The change that sets all of them to MERGED; each owner is the one in the table's version."""
    mem_wals = index.mem_wals_of(table)
    change = Change()
    for generation in done:
        change |= merge(mem_wals, generation.id, generation.owner_id)
    return change


def _merge_pass(table: Table, waiting: list[MemWal], run: _Run) -> None:
    """Merge the next MemWALs, as many as fit the budget, and publish them as one version."""
    started = time.monotonic()
    is_marked = bool(table.primary_key)
    table = with_key(table, run.options)
    index.check_mergeable(table)
    budget = run.options.max_bytes or DEFAULT_MAX_BYTES
    with MemTables(table, run.options) as mem_tables:
        chosen, generations = _next(mem_tables, waiting, budget, run.options.max_generations)
        if not run.compared and len(chosen) < len(waiting) and len({mem_wal.id.region for mem_wal in waiting}) > 1:
            _refuse_shared(table, waiting, budget, run.options)
            run.compared = True
        change = _merged(table, chosen)
        ids = tuple(mem_wal.id for mem_wal in chosen)
        if not generations:
            run.passes.append(LegacyPass(ids, version=index.publish(table, change, run.note)))
            return
        winners = collapse(generations, table.primary_key)
        superseded = locate(table, winners, max_bytes=budget)
        if not is_marked and (example := repeated_keys(table, winners, max_bytes=budget)):
            raise _repeated(table, example)

        def on_rows(count: int) -> None:
            run.context.advance("merging", "rows", count)

        written = rewrite(table, generations, winners, superseded, budget, on_rows)
        with deleted_unless_named(lambda: remove_files(table, written.written_files())):
            version = index.publish(table, change, run.note, index.merge_draft(table, written))
        run.passes.append(
            LegacyPass(
                ids,
                version=version,
                rows_read=winners.rows_read,
                rows_upserted=winners.num_upserts,
                rows_deleted=superseded.deleted,
                bytes_read=sum(generation.data_bytes for generation in generations),
                use_index=superseded.use_index,
                seconds=time.monotonic() - started,
            )
        )
    run.context.figures["rows_merged"] += winners.rows_read
    run.context.figures["bytes_merged"] += run.passes[-1].bytes_read
    get_logger(__name__).info("pass_merged", table=table.location.uri, version=version, rows=winners.num_upserts)


def _next(
    mem_tables: MemTables, waiting: Sequence[MemWal], budget: int, max_generations: int | None
) -> tuple[list[MemWal], list[Generation]]:
    """The next MemWALs in order, up to the budget and always at least one, and those that have rows, opened.

    Raises ``BlockedRegionsError``: the first of a region that cannot be opened; others are not opened.
    """
    chosen: list[MemWal] = []
    generations: list[Generation] = []
    size = 0
    for mem_wal in waiting:
        if chosen and max_generations is not None and len(chosen) >= max_generations:
            break
        try:
            generation = mem_tables.generation(mem_wal)
        except _FAULTS as error:
            raise BlockedRegionsError({region_number(mem_wal.id.region): (mem_wal.id.generation, error)}) from error
        if generation is not None:
            if chosen and size + generation.data_bytes > budget:
                break
            size += generation.data_bytes
            generations.append(generation)
        chosen.append(mem_wal)
    return chosen, generations


def _refuse_shared(table: Table, waiting: Sequence[MemWal], budget: int, options: LegacyOptions) -> None:
    """Compare the keys of all regions before the first of several passes."""

    def read(_table: Table, _whole: MergePass) -> Iterator[tuple[UUID, pa.Table]]:
        for mem_wal in waiting:
            with MemTables(table, options) as mem_tables:
                _, generations = _next(mem_tables, [mem_wal], budget, None)
                for keys in read_all_keys(generations, table.primary_key):
                    yield region_number(mem_wal.id.region), keys.select(list(table.primary_key))

    refuse_shared_keys(table, MergePass(tuple(map(mem_table_ref, waiting)), max(budget, _MIN_KEY_BYTES)), read)


def _repeated(table: Table, example: Mapping[str, Any]) -> errors.DuplicateKeysError:
    return errors.DuplicateKeysError(
        f"{table.location.uri} has several rows with the key {dict(example)}: all of them would be replaced by one.",
        remedy="Give the columns that identify a row as --primary-key; or remove the duplicate rows first.",
    )
