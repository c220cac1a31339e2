"""The report of an inspection as text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.indexes.snapshots import is_external
from memwal_ops.formats.lance.jobs.faults_text import problem
from memwal_ops.text import counted, grid, paragraph, printable, size_text, span_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.lance.jobs.inspect.job import Inspection, RegionState
    from memwal_ops.formats.lance.table import Table


def describe(inspection: Inspection) -> str:
    """The report as text for people."""
    table = inspection.table
    kind = "plain table" if table.memwal is None else f"{table.layout.name} layout"
    about = (
        f"{kind}, version {table.version}, {counted(inspection.rows, 'row')} in "
        f"{counted(inspection.fragments, 'fragment')}, primary key {', '.join(table.primary_key) or 'none'}"
    )
    lines = [table.location.uri, paragraph(about, indent="  ")]
    if table.memwal is None:
        lines.append(paragraph(_without_index(table), indent="  "))
    else:
        lines += [paragraph(_how_far_behind(inspection), indent="  "), paragraph(_snapshot(inspection), indent="  ")]
    if unflushed := sum(region.unflushed_wal_entries or 0 for region in inspection.regions):
        lines.append(f"  {counted(unflushed, 'log entry', 'log entries')} not flushed yet: only writers flush them.")
    if inspection.regions:
        lines += ["", _regions(inspection)]
    if inspection.indexes:
        lines += ["", _indexes(inspection)]
    for index in inspection.indexes:
        if index.fault is not None:
            lines += ["", paragraph(f"PROBLEM: index {index.name} {index.fault.why} (memwal-ops verify).")]
    for region in inspection.regions:
        if region.fault is not None:
            lines += ["", problem(region.fault, "PROBLEM in")]
    if unreadable := inspection.versions.unreadable:
        lines += ["", paragraph(_unreadable(unreadable))]
    for stray in table.regions.strays[: inspection.limit]:
        lines += ["", f"Stray, not a region: {printable(stray)}"]
    if (more := len(table.regions.strays) - inspection.limit) > 0:
        lines += ["", f"and {more:,} more strays (--limit)."]
    return "\n".join(lines)


def _without_index(table: Table) -> str:
    if not table.regions.region_ids:
        return "It has no log: the base table has all rows."
    return (
        f"Its MemWAL index was removed after version {table.index_removed_after}. The log of "
        f"{counted(len(table.regions.region_ids), 'region')} is kept, and not shown: merge continues with it once the "
        "index is made again (lancedb: set_lsm_write_spec; pylance: initialize_mem_wal)."
    )


def _unreadable(versions: Mapping[int, str]) -> str:
    version, path = min(versions.items())
    return (
        f"PROBLEM: {counted(len(versions), 'version')} of the base table cannot be read, the first is {version}: "
        f"{path} is missing. A clean-up was killed, or files were deleted by hand (runbooks/errors/26-version_gone.md)."
    )


def _how_far_behind(inspection: Inspection) -> str:
    if not inspection.regions:
        return "No writer has opened a region yet: the base table has all rows."
    backlog = inspection.backlog.to_json()
    broken = sum(region.fault is not None for region in inspection.regions)
    problems = f" {counted(broken, 'region has a problem', 'regions have a problem')}, see below." if broken else ""
    if not backlog["generations"]:
        unreadable = any(region.backlog is None for region in inspection.regions)
        which = "every flushed generation that can be read" if unreadable else "every flushed generation"
        return f"Up to date: the base table has {which}.{problems}"
    return (
        f"Behind by {counted(backlog['generations'], 'generation')} in {counted(backlog['regions'], 'region')}: "
        f"{counted(backlog['rows'], 'row')}, {size_text(backlog['bytes'])} not merged.{problems}"
    )


def _snapshot(inspection: Inspection) -> str:
    index = inspection.table.index
    if index.inline_snapshots is None and not is_external(inspection.table):
        return "No snapshot of the regions is stored (memwal-ops snapshot takes one)."
    taken = datetime.fromtimestamp((index.snapshot_ts_millis or 0) / 1000, UTC)
    return f"Snapshot of {counted(index.num_regions, 'region')}, taken {taken:%Y-%m-%d %H:%M:%S} UTC."


def _regions(inspection: Inspection) -> str:
    return grid(
        ("region", "status", "epoch", "merged", "generations waiting", "rows", "bytes"),
        [_region_cells(region) for region in inspection.regions],
        words=("region", "status"),
    )


def _region_cells(region: RegionState) -> list[str]:
    if region.backlog is None:
        return [str(region.region_id), "unreadable", "", "", "", "", ""]
    merged = region.backlog.merged
    waiting = [flushed for flushed in region.backlog.manifest.flushed_generations if flushed.generation > merged]
    span = "none"
    if waiting:
        span = f"{len(waiting)} ({span_text(waiting[0].generation, waiting[-1].generation)})"
    return [
        str(region.region_id),
        region.backlog.manifest.status.name.lower(),
        str(region.backlog.manifest.writer_epoch),
        "none" if merged == 0 else f"to {merged}",
        span,
        f"{sum(flushed.physical_rows or 0 for flushed in waiting):,}",
        size_text(sum(flushed.accounted_bytes or 0 for flushed in waiting)),
    ]


def _indexes(inspection: Inspection) -> str:
    return grid(
        ("index", "type", "state", "fragments covered", "uncovered", "rows uncovered"),
        [
            (
                index.name,
                index.type,
                "caught up" if index.uncovered_fragments == 0 else "behind",
                f"{index.covered_fragments:,}",
                f"{index.uncovered_fragments:,}",
                f"{index.uncovered_rows:,}",
            )
            for index in inspection.indexes
        ],
        words=("index", "type", "state"),
    )
