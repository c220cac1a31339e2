"""The report of a merge of a legacy table; its keys are those of every other merge, with region names as ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.core.merge_report import MergeDecision, MergeOutcome
from memwal_ops.text import counted, grid, paragraph, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.lance.legacy.index import BlockedMemWal, RegionWork
    from memwal_ops.formats.lance.wire.legacy_index import MemWalId


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

    Attributes:
        marked: MemWALs that only got the state MERGED: FLUSHED by a release for which that means merged.
        work: per region the unmerged MemWALs when the run ended.
        restored: the version whose rows were restored first; None: that was not needed.
    """

    decision: MergeDecision
    run_id: str
    passes: tuple[LegacyPass, ...]
    marked: tuple[MemWalId, ...]
    blocked: tuple[BlockedMemWal, ...]
    work: Mapping[str, RegionWork]
    restored: int | None
    version: int
    commit_conflicts: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The document of ``merge --json``; the index records no sizes, so the backlog has null for them."""
        marked = [{"region_id": one.region, "generation": one.generation} for one in self.marked]
        return document(
            self,
            "marked",
            "work",
            "restored",
            marked_merged=marked,
            restored_version=self.restored,
            backlog_after=backlog_json(self.work),
            engine="local",
            engine_reason="the legacy layout",
        )

    def describe(self) -> str:
        """The report as text for people."""
        parts = [self._headline()]
        if self.restored is not None:
            parts.append(
                paragraph(
                    f"The newest version had no rows: those of version {self.restored} "
                    f"{'would be' if self.decision is MergeDecision.DRY_RUN else 'were'} restored first."
                )
            )
        if self.marked:
            listed = ", ".join(map(str, self.marked))
            parts.append(
                paragraph(f"FLUSHED by a release for which that means merged; only the state was set: {listed}.")
            )
        if any(entry.version is not None for entry in self.passes):
            parts.append(_passes(self.passes))
        parts += [blocked_text(fault) for fault in self.blocked]
        waiting = sum(len(region.pending) for region in self.work.values())
        unflushed = sum(len(region.waiting) for region in self.work.values())
        if unflushed:
            parts.append(
                paragraph(f"{counted(unflushed, 'MemWAL')} not flushed yet: a writer does that, or migrate replays it.")
            )
        if self.decision is not MergeDecision.DRY_RUN:
            parts.append(f"Waiting: {counted(waiting, 'generation')}.")
        return "\n\n".join(parts)

    def _headline(self) -> str:
        generations = sum(len(entry.ids) for entry in self.passes)
        done = f"{counted(generations, 'generation')} in {counted(len(self.passes), 'pass', 'passes')}"
        match self.decision:
            case "merged":
                return f"merged: {done}, {self.seconds:.2f} s."
            case "nothing_to_merge":
                return "nothing_to_merge: every FLUSHED MemWAL is in the base table already."
            case "superseded":
                return "superseded: another merger merged all generations that waited when this one began."
            case "dry_run":
                return f"dry_run: would merge {counted(generations, 'generation')}; nothing was changed."
            case _ if not generations:
                return "blocked: nothing was merged, see below."
            case _:
                return f"blocked: {done} merged, but see below."


def backlog_json(work: Mapping[str, RegionWork]) -> dict[str, int | None]:
    """The ``backlog`` of a report."""
    return {
        "regions": sum(bool(region.pending) for region in work.values()),
        "generations": sum(len(region.pending) for region in work.values()),
        "rows": None,
        "bytes": None,
    }


def blocked_text(fault: BlockedMemWal) -> str:
    """A blocked region as a paragraph."""
    where = f"region {fault.region!r}" + ("" if fault.generation is None else f", generation {fault.generation}")
    return paragraph(f"BLOCKED {where} ({fault.error.reason}): {fault.error} {fault.error.remedy}", hanging="  ")


def _passes(passes: tuple[LegacyPass, ...]) -> str:
    rows = [
        (
            str(number),
            ", ".join(f"{region} {first}" + (f"-{last}" if last > first else "") for region, (first, last) in spans),
            f"{entry.rows_read:,}",
            size_text(entry.bytes_read),
            f"{entry.rows_upserted:,}",
            f"{entry.seconds:.2f}",
            str(entry.version),
        )
        for number, entry in enumerate(passes, 1)
        if (spans := [(region, span) for region, span in entry.regions.items()]) is not None
    ]
    columns = ("pass", "generations", "rows read", "size", "rows written", "seconds", "version")
    return grid(columns, rows, words=("generations",))
