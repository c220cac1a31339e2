"""``memwal-ops inspect``: what a table is and how far behind it is."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.text import counted, grid, paragraph, size_text, span_text
from memwal_ops.core.snapshots import is_external
from memwal_ops.core.table import open_table
from memwal_ops.jobs import inspect as job

if TYPE_CHECKING:
    from memwal_ops.core.backlog import Blocked
    from memwal_ops.jobs.inspect import Inspection, RegionState


@click.command(short_help="Show a table, and how far behind it is.")
@click.argument("uri")
@storage_options
@json_output
def inspect(uri: str, storage_options: dict[str, str], as_json: bool) -> int:
    """Show the table at URI: regions, generations, indexes and the backlog. Changes nothing.

    Exit code 0 also where a region has a problem: that is the answer, and not a failure to answer.
    """
    inspection = job.inspect(open_table(uri, storage_options))
    if as_json:
        click.echo(json.dumps(inspection.to_json(), indent=2))
    else:
        click.echo(describe(inspection))
    return 0


def describe(inspection: Inspection) -> str:
    """The inspection for a person."""
    table = inspection.table
    about = (
        f"{table.layout.value} layout, version {table.version}, {counted(inspection.rows, 'row')} in "
        f"{counted(inspection.fragments, 'fragment')}, primary key {', '.join(table.primary_key)}"
    )
    lines = [table.location.uri, paragraph(about, indent="  "), paragraph(_how_far_behind(inspection), indent="  ")]
    lines.append(paragraph(_snapshot(inspection), indent="  "))
    if unflushed := sum(region.unflushed_wal_entries or 0 for region in inspection.regions):
        lines.append(f"  {counted(unflushed, 'log entry', 'log entries')} not flushed yet: the writers' part.")
    if inspection.regions:
        lines += ["", _regions(inspection)]
    if inspection.indexes:
        lines += ["", _indexes(inspection)]
    for region in inspection.regions:
        if region.fault is not None:
            lines += ["", problem(region.fault, "PROBLEM in")]
    for stray in table.regions.strays:
        lines += ["", f"Not a region, left alone: {stray}"]
    return "\n".join(lines)


def problem(fault: Blocked, heading: str) -> str:
    """Why a region cannot go on and what to do, indented below ``heading region ID``."""
    where = "" if fault.generation is None else f" at generation {fault.generation}"
    return "\n".join(
        [
            f"{heading} region {fault.region_id}{where}: {fault.error.reason}",
            paragraph(str(fault.error), indent="    "),
            paragraph(f"What to do: {fault.error.remedy} (runbooks/merge-blocked.md)", indent="    "),
        ]
    )


def _how_far_behind(inspection: Inspection) -> str:
    if not inspection.regions:
        return "No writer has opened a region yet: the base table is all there is."
    backlog = inspection.backlog.to_json()
    broken = sum(region.fault is not None for region in inspection.regions)
    problems = f" {counted(broken, 'region has a problem', 'regions have a problem')}, see below." if broken else ""
    if not backlog["generations"]:
        unreadable = any(region.backlog is None for region in inspection.regions)
        seen = "every flushed generation that can be seen" if unreadable else "every flushed generation"
        return f"Up to date: the base table holds {seen}.{problems}"
    return (
        f"Behind by {counted(backlog['generations'], 'generation')} in {counted(backlog['regions'], 'region')}: "
        f"{counted(backlog['rows'], 'row')}, {size_text(backlog['bytes'])} wait to be merged.{problems}"
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
    waiting = [one for one in region.generations if one.state != "merged"]
    numbers = [one.flushed.generation for one in waiting]
    span = "none" if not numbers else f"{len(numbers)} ({span_text(numbers[0], numbers[-1])})"
    return [
        str(region.region_id),
        region.backlog.manifest.status.name.lower(),
        str(region.backlog.manifest.writer_epoch),
        "none" if region.backlog.merged == 0 else f"to {region.backlog.merged}",
        span,
        f"{sum(one.flushed.physical_rows or 0 for one in waiting):,}",
        size_text(sum(one.flushed.accounted_bytes or 0 for one in waiting)),
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
