"""The gc job: delete objects that are no longer needed, and report why the others are kept.

Planning, proving and deleting are the same for every format (:mod:`memwal_ops.core.collector`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from memwal_ops.core import collector
from memwal_ops.core.candidates import CollectionReport as BaseReport, GcDecision
from memwal_ops.core.context import RunContext
from memwal_ops.core.figures import cached_for_poll
from memwal_ops.core.leases import free_space
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs.gc.collectors import (
    RegionCollector,
    TableCollector,
    regions_without_index,
    table_candidates,
    views,
)
from memwal_ops.formats.lance.jobs.gc.evidence import KINDS, CurrentEvidence, LanceCandidate, read_evidence
from memwal_ops.formats.lance.jobs.gc.wal import WalView
from memwal_ops.formats.lance.options import GcOptions, RetentionOptions
from memwal_ops.formats.lance.retention.damage import names_damage, require_complete
from memwal_ops.formats.lance.retention.identity import anchored
from memwal_ops.formats.lance.retention.merged_since import record_progress, recorded_before
from memwal_ops.formats.lance.wire.version_manifest import check_writable
from memwal_ops.storage.api import DiskFullError
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.core.collector import Collector
    from memwal_ops.formats.lance.table import Table

__all__ = ["GcOptions", "GcReport", "apply", "backlog", "candidates", "plan"]


@dataclass(kw_only=True)
class GcReport(BaseReport[LanceCandidate]):
    """Report of a gc run.

    ``regions``: how many were found. ``sealed``: how many of them are sealed. ``versions``: how many versions of the
    table may be opened. ``reader_grace``: how long drained generations are kept.
    """

    kinds = KINDS
    drains = ("generation", "generations")
    closing = "memwal-ops why URI PATH shows the conditions of one of them."

    regions: int = 0
    sealed: int = 0
    versions: int = 0
    reader_grace: timedelta = timedelta(0)

    def about(self) -> str:
        """See the base class."""
        text = f"{counted(self.regions, 'region')}, {counted(self.versions, 'retained version')}"
        return f"{text}, {counted(self.sealed, 'sealed region')}" if self.sealed else text

    def notes(self) -> Iterator[str]:
        """See the base class."""
        if self.decision is GcDecision.PLANNED and self.drainable:
            yield (
                f"{counted(self.drainable, 'generation is', 'generations are')} no longer needed: --apply removes them "
                "from the region's list, and a run after --reader-grace deletes them."
            )
        if self.drained and self.reader_grace:
            later = datetime.now(UTC) + self.reader_grace
            yield f"Run it again after {later:%Y-%m-%d %H:%M} UTC, to delete what was drained now."

    def details(self) -> Mapping[str, Any]:
        """See the base class."""
        return {
            "regions": {
                "total": self.regions,
                "sealed": self.sealed,
                "unreadable": [
                    {"region_id": str(region_id), "error": why} for region_id, why in sorted(self.faults.items())
                ],
            },
            "retained_versions": self.versions,
        }


@names_damage
def plan(table: Table, options: GcOptions, context: RunContext | None = None) -> GcReport:
    """Report what is deletable, what is kept and why, and what is not recognized. Reads only, in constant memory.

    ``table``: the newest version of it. ``context``: reports progress per candidate, and can stop the run after each.
    Raises ``StorageError``: the store failed; ``TableCorruptError``: something is deletable, and the newest version
    lacks a file; ``UnsupportedFeatureError``: writers need a feature that this release does not support (S3-013).
    """
    check_writable(table.manifest.manifest)
    report = _report(options, applied=False)
    collectors = _collectors(CurrentEvidence(read_evidence(table, options, datetime.now(UTC))), report)
    collector.plan(collectors, report, options, context or RunContext())
    if report.decision is GcDecision.PLANNED:
        require_complete(table)
    return report


@names_damage
def apply(table: Table, options: GcOptions, context: RunContext | None = None) -> GcReport:
    """Drain and delete. Safe to kill, to repeat, and to run concurrently with itself, writers, readers and all jobs.

    ``table``: any version of it; the newest is read before each batch. ``context``: reports progress per candidate, and
    can stop the run after each.
    Raises ``StorageError``: the store failed before anything could be proven; ``TableCorruptError``: something is
    deletable, and the newest version lacks a file; ``UnsupportedFeatureError``: see :func:`plan`.
    """
    context = context or RunContext()
    check_writable(table.manifest.manifest)
    try:
        return _apply(table, options, context, writes=True)
    except DiskFullError:
        # Deletions need no space, and what they free is enough to drain the rest.
        if not free_space(table.store) and not _apply(table, options, context, writes=False).deleted_objects:
            raise
    return _apply(table, options, context, writes=True)


def _apply(table: Table, options: GcOptions, context: RunContext, *, writes: bool) -> GcReport:
    """Drain and delete; ``writes``: False: delete what that is possible of without a byte more on the disk."""
    if writes:
        probe_conditional_writes(table.store)
    report = _report(options, applied=True)
    table, anchor = anchored(table)
    current = CurrentEvidence(read_evidence(table, options, store_time(table.store)), (anchor,))
    if writes and options.drain_after and table.log.shows_progress:
        record_progress(
            table.store, current.evidence.retention, current.evidence.now, options.drain_after, current.check
        )
    collectors = _collectors(current, report)
    collector.collect(collectors, report, options, context, drains=writes)
    context.figures["generations_drained"] += report.drained
    return report


def candidates(
    table: Table, options: RetentionOptions, regions: Iterable[UUID] | None = None
) -> Iterator[LanceCandidate]:
    """All candidates of a plan; if ``regions`` are given, only those that belong to these."""
    report = GcReport(applied=False)
    current = CurrentEvidence(read_evidence(table, options, datetime.now(UTC)))
    return collector.candidates(_collectors(current, report, regions), report)


def backlog(table: Table) -> Mapping[str, float]:
    """Generations that are merged, and still on a region's list, although they were merged a ``drain_after`` ago.

    Without a record of earlier runs, all that are merged: gc does not run with ``--apply``. One listing and
    one request, if any are.
    """
    regions = cached_for_poll(table, "backlog", lambda: read_backlog(table)).regions
    listed = [
        (region_id, flushed.generation)
        for region_id, region in regions.items()
        for flushed in region.manifest.flushed_generations
        if flushed.generation <= region.merged
    ]
    waited = None
    if listed:
        waited = recorded_before(table.store, table.version, datetime.now(UTC) - GcOptions().drain_after)
    if waited is not None:
        listed = [(region_id, generation) for region_id, generation in listed if generation <= waited.get(region_id, 0)]
    return {"merged_generations": len(listed)}


def _collectors(
    current: CurrentEvidence, report: GcReport, regions: Iterable[UUID] | None = None
) -> Iterator[Collector[LanceCandidate]]:
    report.versions = len(current.evidence.retention.versions)
    shows_progress = current.evidence.table.log.shows_progress
    if not shows_progress:
        yield TableCollector(current, partial(regions_without_index, regions))
    for region_id, log in views(current.evidence, regions) if shows_progress else ():
        report.regions += 1
        report.sealed += isinstance(log, WalView) and log.view.newest.sealed
        yield RegionCollector(current, region_id, log)
    if regions is None:
        yield TableCollector(current, table_candidates)


def _report(options: GcOptions, *, applied: bool) -> GcReport:
    return GcReport(applied=applied, warnings=options.dangers(), reader_grace=options.reader_grace)
