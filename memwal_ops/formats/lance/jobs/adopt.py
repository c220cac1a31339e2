"""The adopt job: record an operator's decision about regions and generations that wait for one (docs/jobs.md#adopt).

Progress is never lowered: a stalled merger of the old region would raise it again, over the new region's generations.
So unmerged generations at or below the progress get a region of their own
(:mod:`memwal_ops.formats.lance.log.region_seal`).

A decision about columns is a number in the table's config, published as exactly the version after the one that was
read: no drop of a column can come between. It counts for generations that were flushed before, and for fields that
exist since.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.documents import document
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.generations.backlog import read_backlog, subtract
from memwal_ops.formats.lance.generations.generation import open_generation, read_flush
from memwal_ops.formats.lance.generations.projection import UndecidedColumnsError
from memwal_ops.formats.lance.generations.wal import unflushed_entries
from memwal_ops.formats.lance.jobs.drained import DrainedRegion, accept, drained_regions
from memwal_ops.formats.lance.log import region_seal
from memwal_ops.formats.lance.retention.schema_history import SAME_COLUMNS, SchemaHistory
from memwal_ops.formats.lance.wire.region_manifest import UNMERGED, RegionManifest, RegionRecord, mark_of
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted, known_sum, paragraph, size_text, span_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.options import AdoptOptions
    from memwal_ops.formats.lance.table import Table


_NANOSECONDS = 1_000_000_000


class Answer(enum.StrEnum):
    """An operator's decision, as ``as`` of the report."""

    MERGED = "merged"
    UNMERGED = "unmerged"
    SAME_COLUMNS = "same_columns"
    MOVED = "moved"
    DRAINED = "drained"


class AdoptDecision(enum.StrEnum):
    """How a run ended."""

    PLANNED = "planned"
    ADOPTED = "adopted"
    NOTHING_TO_ADOPT = "nothing_to_adopt"


_NOTHING = {
    Answer.SAME_COLUMNS: "no generation waits for a decision about its columns",
    Answer.MOVED: "no generation names another path as its table",
    Answer.DRAINED: "no region is blocked by generations that another program dropped",
}


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """Report of a run; ``regions`` are the parts that the decision is about."""

    decision: AdoptDecision
    run_id: str
    answer: Answer
    regions: _Regions
    version: int
    seconds: float

    @property
    def exit_code(self) -> int:
        """That of blocked regions, if one stays blocked."""
        left = any(isinstance(region, DrainedRegion) and not region.adoptable for region in self.regions)
        return errors.RegionsBlockedError.exit_code if left else 0

    def to_json(self) -> dict[str, object]:
        """The document of ``adopt --json``."""
        return document(self, "answer", **{"as": self.answer})

    def describe(self) -> str:
        """The report as text for people: what the decision asserts."""
        if not self.regions:
            return f"nothing_to_adopt: {_NOTHING.get(self.answer, 'no region with a reused id is blocked')}."
        done = self.decision is not AdoptDecision.PLANNED
        as_ = "" if self.answer in _NOTHING else f" as {self.answer}"
        parts = [f"{self.decision}: {counted(len(self.regions), 'region')}{as_}."]
        parts += [paragraph(region.describe(done=done), hanging="  ") for region in self.regions]
        if undecided := [region for region in self.regions if isinstance(region, UndecidedRegion)]:
            parts.append(paragraph(_asserted(undecided, done=done)))
            parts += [f"Recorded in version {self.version}. Run memwal-ops merge."] if done else []
        return "\n".join(parts if done else [*parts, "Add --apply to do it."])


@dataclass(frozen=True, slots=True)
class UndecidedRegion:
    """Generations of one region that wait for a decision about columns.

    ``generations``: their numbers, ascending. ``columns``: the columns in question, each with its name in the
    generation if that is another one. ``flushed``: when the oldest of them was written.
    """

    region_id: UUID
    generations: tuple[int, ...]
    columns: tuple[str, ...]
    flushed: datetime

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry of a report."""
        return document(self)

    def describe(self, *, done: bool) -> str:
        """The generations and their columns."""
        del done
        numbers = self.generations
        return (
            f"region {self.region_id}: {counted(len(numbers), 'generation')} ({span_text(numbers[0], numbers[-1])}), "
            f"flushed since {self.flushed:%Y-%m-%d %H:%M:%S} UTC; columns {', '.join(self.columns)}."
        )


@dataclass(frozen=True, slots=True)
class MovedRegion:
    """Generations of one region that named another path as their table, and the files that this one has of them."""

    region_id: UUID
    foreign_root: str
    generations: tuple[int, ...]
    files: int
    bytes: int

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry of a report."""
        return document(self)

    def describe(self, *, done: bool) -> str:
        """The generations, the path, and what is here."""
        return (
            f"region {self.region_id}: {counted(len(self.generations), 'generation')} that named {self.foreign_root} "
            f"as the table {'name' if done else 'would name'} this one. It has all {counted(self.files, 'file')}, of "
            f"{size_text(self.bytes)}, in the sizes that the generations record."
        )


@dataclass(frozen=True, slots=True)
class Adoption:
    """What adopt does with one region.

    Attributes:
        new_id: the region to which its generations are moved; None: they are not moved.
        rows: in those that it lists, as recorded by the writers; None if one of them was not.
        merged: the table's progress for its id.
        unflushed_wal_entries: entries of its log that no generation contains.
        record: the record to be stored in the table; None: the region is moved.
        up_to: the progress to be stored, if it is more than the table has.
    """

    region_id: UUID
    new_id: UUID | None
    generations: tuple[int, ...]
    rows: int | None
    merged: int
    unflushed_wal_entries: int
    record: RegionRecord | None
    up_to: int | None = None

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry of a report."""
        merged = self.up_to or self.merged
        return document(
            self, "new_id", "merged", "record", "up_to", new_region_id=self.new_id, merged_generation=merged
        )

    def describe(self, *, done: bool) -> str:
        """What happens to the region."""
        generations = self.generations
        span = f" ({span_text(min(generations), max(generations))})" if generations else ""
        region = (
            f"region {self.region_id}: {counted(len(generations), 'generation')}{span}, {counted(self.rows, 'row')}"
        )
        recorded = f"{'recorded' if done else 'would be recorded'} as merged up to generation"
        if self.up_to is not None:
            newly = [number for number in generations if self.merged < number <= self.up_to]
            lost = f" gc deletes the {counted(len(newly), 'generation')} up to there that it lists." if newly else ""
            return f"{region}; {recorded} {self.up_to}.{lost}"
        if self.record is not None and self.record.mark != UNMERGED:
            return f"{region}; {recorded} {self.merged}."
        if self.record is not None:
            return f"{region}; all {'wait' if done else 'would wait'} to be merged."
        to = "sealed" if self.new_id is None else f"moved to region {self.new_id}"
        if done:
            return f"{region}; {to}. Its writers continue under the new id."
        log = counted(self.unflushed_wal_entries, "entry", "entries")
        warning = (
            f" Its log has {log} that no generation contains: stop its writer first."
            if self.unflushed_wal_entries
            else ""
        )
        return f"{region}; would be {to}. It would be sealed, and its writer fenced.{warning}"


_Regions = tuple[UndecidedRegion, ...] | tuple[Adoption, ...] | tuple[MovedRegion, ...] | tuple[DrainedRegion, ...]


def plan(table: Table, options: AdoptOptions, context: RunContext | None = None) -> AdoptReport:
    """What :func:`apply` would do; reads only.

    Raises:
        InvalidUsageError: the table has no such region, or the decision would lose rows.
        GenerationMissingError: a generation of a region that is to be moved is missing.
        ForeignRootError: of a table that was moved, a file is missing.
    """
    del context
    note, answer = commit.CommitNote("adopt"), _answer(options)
    commit.check_rewritable(table)
    regions: _Regions
    match answer:
        case Answer.SAME_COLUMNS:
            regions = undecided_regions(table)
        case Answer.MOVED:
            regions = _moved(_foreign(table, options))
        case Answer.DRAINED:
            regions = drained_regions(table, read_backlog(table, table.regions.all_named(options.regions)))
        case _:
            regions = _adoptions(table, options)
    decision = AdoptDecision.PLANNED if regions else AdoptDecision.NOTHING_TO_ADOPT
    return AdoptReport(decision, note.run_id, answer, regions, table.version, note.seconds)


def apply(table: Table, options: AdoptOptions, context: RunContext | None = None) -> AdoptReport:
    """Record the decision, or move the regions. Safe to kill, to repeat and to run twice concurrently.

    Raises ``InvalidUsageError``: see :func:`plan`; ``CommitConflictError``: too many commit conflicts in a row;
    ``CommitStateUnknownError``: the outcome of the commit is unknown; run it again.
    """
    del context
    note, answer = commit.CommitNote("adopt"), _answer(options)
    commit.check_rewritable(table)
    probe_conditional_writes(table.store)
    regions: _Regions
    match answer:
        case Answer.SAME_COLUMNS:
            table, regions = _record_columns(table, note)
        case Answer.MOVED:
            foreign = _foreign(table, options)
            region_seal.point_here(table, foreign)
            regions = _moved(foreign)
        case Answer.DRAINED:
            table, regions = accept(table, table.regions.all_named(options.regions), note)
        case _:
            table, regions = _adopt(table, options, note)
    decision = AdoptDecision.ADOPTED if regions else AdoptDecision.NOTHING_TO_ADOPT
    return AdoptReport(decision, note.run_id, answer, regions, table.version, note.seconds)


def _record_columns(table: Table, note: commit.CommitNote) -> tuple[Table, tuple[UndecidedRegion, ...]]:
    regions: tuple[UndecidedRegion, ...] = ()

    def change(newest: Table) -> commit.IndexChange | None:
        nonlocal regions  # computed again on each version: it may be the one in which a column was dropped
        regions = undecided_regions(newest)
        return commit.IndexChange(newest.index.details, config={SAME_COLUMNS: str(newest.version)}) if regions else None

    return commit.publish_change(table, change, note, CommitRetry()), regions


def undecided_regions(table: Table) -> tuple[UndecidedRegion, ...]:
    """The unmerged generations whose columns nothing proves to be the base's, by region."""
    history = SchemaHistory(table)
    undecided: dict[UUID, list[tuple[int, tuple[str, ...], int]]] = {}
    for ref in read_backlog(table).pending:
        try:
            open_generation(table, ref, history)
        except UndecidedColumnsError as error:
            flushed = read_flush(table, ref)
            if flushed is not None:
                undecided.setdefault(ref.region_id, []).append((ref.generation, error.columns, flushed))
        except (errors.GenerationMissingError, errors.GenerationCorruptError, errors.SchemaProjectionError):
            continue  # no decision helps; merge and inspect name it
    return tuple(
        UndecidedRegion(
            region_id,
            tuple(generation for generation, _, _ in rows),
            tuple(dict.fromkeys(name for _, names, _ in rows for name in names)),
            datetime.fromtimestamp(min(flushed for _, _, flushed in rows) / _NANOSECONDS, UTC),
        )
        for region_id, rows in undecided.items()
    )


def _asserted(regions: Sequence[UndecidedRegion], *, done: bool) -> str:
    columns = dict.fromkeys(name for region in regions for name in region.columns)
    text = (
        f"{'You have asserted' if done else 'With --apply, you assert'}: since "
        f"{min(region.flushed for region in regions):%Y-%m-%d %H:%M:%S} UTC, this table was not removed and created "
        "again, and none of these columns was dropped, replaced by a restore, or added again: "
        f"{', '.join(columns)}. What is written as 'is' was renamed, and is the same column. So the generations' "
        "values belong into them."
    )
    warning = (
        " If one of them was dropped and added again, first copy it to a new column, drop it, and rename the copy: "
        "then it has another field id, and the generations' values are ignored. If the table was created again, do not "
        "use --apply: move the region's folder to a place outside the table."
    )
    return text if done else text + warning


def _foreign(table: Table, options: AdoptOptions) -> tuple[region_seal.ForeignGeneration, ...]:
    return region_seal.foreign_generations(
        table, read_backlog(table, table.regions.all_named(options.regions)).regions.values()
    )


def _moved(foreign: tuple[region_seal.ForeignGeneration, ...]) -> tuple[MovedRegion, ...]:
    moved: dict[tuple[UUID, str], list[region_seal.ForeignGeneration]] = defaultdict(list)
    for one in foreign:
        moved[one.ref.region_id, one.root].append(one)

    def region(region_id: UUID, root: str, some: list[region_seal.ForeignGeneration]) -> MovedRegion:
        files, size = sum(one.files for one in some), sum(one.bytes for one in some)
        return MovedRegion(region_id, root, tuple(one.ref.generation for one in some), files, size)

    return tuple(region(*place, some) for place, some in moved.items())


def _adopt(table: Table, options: AdoptOptions, note: commit.CommitNote) -> tuple[Table, tuple[Adoption, ...]]:
    adoptions = _adoptions(table, options)
    for adoption in adoptions:
        if adoption.record is None and adoption.up_to is None:
            region_seal.move_region(table, adoption.region_id)
    retry = CommitRetry()
    # Computed again on each version: a merge may have been published meanwhile.
    while recorded := [
        adoption for adoption in _adoptions(table, options) if adoption.record is not None or adoption.up_to is not None
    ]:
        records = {adoption.region_id: adoption.record for adoption in recorded if adoption.record is not None}
        progress = {adoption.region_id: adoption.up_to for adoption in recorded if adoption.up_to is not None}
        try:
            if progress:
                commit.publish_progress(table, progress, records, note)
            else:
                commit.commit_indexes(table, commit.IndexChange(table.index.details, records=records), note)
        except commit.CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return retry.landed(table), adoptions
    return table, adoptions


def _answer(options: AdoptOptions) -> Answer:
    named = {Answer.SAME_COLUMNS: options.same_columns, Answer.MOVED: options.moved, Answer.DRAINED: options.drained}
    answer = next((answer for answer, is_given in named.items() if is_given), options.answer)
    if answer is None:
        raise errors.InvalidUsageError(
            "Neither --as merged nor --as unmerged was given, and memwal-ops cannot determine which is correct.",
            remedy="runbooks/merge-blocked.md has the steps to find out. For regions that are blocked by "
            "schema_projection: --same-columns; by drained_elsewhere: --drained. For a table that was copied or moved: "
            "--moved.",
        )
    return Answer(answer)


def _adoptions(table: Table, options: AdoptOptions) -> tuple[Adoption, ...]:
    backlog = read_backlog(table, table.regions.all_named(options.regions))
    if options.up_to is not None:
        return tuple(_as_merged_up_to(table, region.manifest, options.up_to) for region in backlog.regions.values())
    replaced = [fault.region_id for fault in backlog.blocked if isinstance(fault.error, errors.RegionReplacedError)]
    decide = _as_merged if _answer(options) is Answer.MERGED else _as_unmerged
    return tuple(decide(table, backlog.regions[region_id].manifest) for region_id in replaced)


def _as_merged(table: Table, manifest: RegionManifest) -> Adoption:
    merged = table.index.merged_generations.get(manifest.region_id, 0)
    if not merged:
        raise errors.InvalidUsageError(
            f"The table has no progress for region {manifest.region_id}: none of it is merged.",
            remedy="If the table has the rows of its generations up to N all the same, as its MemWAL index was removed "
            "and made again: add --up-to N. If its rows do not belong to this table, move its folder to a place "
            "outside the table; runbooks/merge-blocked.md has the commands.",
        )
    if merged >= manifest.current_generation:
        raise errors.InvalidUsageError(
            f"Region {manifest.region_id} flushes generation {manifest.current_generation} next, and the table records "
            f"generations up to {merged} as merged: the next flush would count as merged, and its rows be lost.",
            remedy="Move its generations to a new region: --as unmerged.",
        )
    return _adoption(table, manifest, None, _record_of(manifest, merged))


def _as_merged_up_to(table: Table, manifest: RegionManifest, up_to: int) -> Adoption:
    """The progress that an operator states; a later merge begins after it."""
    region_id = manifest.region_id
    merged = table.index.merged_generations.get(region_id, 0)
    if not merged < up_to < manifest.current_generation:
        raise errors.InvalidUsageError(
            f"Region {region_id} is merged up to generation {merged}, and generation {manifest.current_generation} is "
            f"the next that it flushes: --up-to must be in between, not {up_to}."
        )
    _, fault = subtract(manifest, up_to)
    if fault is not None:
        raise errors.InvalidUsageError(
            f"If region {region_id} were merged up to generation {up_to}, its next merge would stop: {fault.error}",
            remedy="Give the last generation before the first that is listed, if the table has all rows up to there.",
        )
    is_listed = any(flushed.generation <= up_to for flushed in manifest.flushed_generations)
    return replace(_adoption(table, manifest, None, _record_of(manifest, up_to) if is_listed else None), up_to=up_to)


def _record_of(manifest: RegionManifest, merged: int) -> RegionRecord:
    """That of the last generation that is listed up to this one; one is."""
    listed = (flushed for flushed in manifest.flushed_generations if flushed.generation <= merged)
    last = max(listed, key=lambda flushed: flushed.generation)
    return RegionRecord(last.generation, mark_of(last.path))


def _as_unmerged(table: Table, manifest: RegionManifest) -> Adoption:
    if not table.index.merged_generations.get(manifest.region_id, 0):
        return _adoption(table, manifest, None, RegionRecord(table.version, UNMERGED, adopted=table.version))
    region_seal.check_complete(table, manifest)
    return _adoption(table, manifest, region_seal.new_region_id(manifest), None)


def _adoption(table: Table, manifest: RegionManifest, new_id: UUID | None, record: RegionRecord | None) -> Adoption:
    generations = tuple(flushed.generation for flushed in manifest.flushed_generations)
    rows = known_sum(flushed.physical_rows for flushed in manifest.flushed_generations)
    merged = table.index.merged_generations.get(manifest.region_id, 0)
    log = unflushed_entries(table, manifest)
    return Adoption(manifest.region_id, new_id, generations, rows, merged, log, record)
