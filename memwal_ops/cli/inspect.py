"""``memwal-ops inspect``: what a table is and how far behind it is."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table as Grid

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.text import counted, size_text
from memwal_ops.core.table import open_table
from memwal_ops.jobs import inspect as job

if TYPE_CHECKING:
    from memwal_ops.jobs.inspect import Inspection, RegionState

_WIDTH = 110


@click.command()
@click.argument("uri")
@storage_options
@json_output
def inspect(uri: str, storage_options: dict[str, str], as_json: bool) -> int:
    """Show the table at URI: regions, generations, indexes and the backlog. Changes nothing."""
    inspection = job.inspect(open_table(uri, storage_options))
    if as_json:
        click.echo(json.dumps(inspection.to_json(), indent=2))
    else:
        click.echo(describe(inspection))
    return 0


def describe(inspection: Inspection) -> str:
    """The inspection for a person."""
    table = inspection.table
    backlog = inspection.backlog.to_json()
    lines = [
        f"{table.location.uri}",
        f"  {table.layout.value} layout, version {table.version}, {counted(inspection.rows, 'row')} in "
        f"{counted(inspection.fragments, 'fragment')}, primary key {', '.join(table.primary_key)}",
        f"  backlog: {counted(backlog['generations'], 'generation')} in {counted(backlog['regions'], 'region')}, "
        f"{counted(backlog['rows'], 'row')}, {size_text(backlog['bytes'])}",
    ]
    if inspection.regions:
        lines += ["", _regions(inspection)]
    if inspection.indexes:
        lines += ["", _indexes(inspection)]
    for region in inspection.regions:
        if region.fault is not None:
            lines += ["", f"PROBLEM in region {region.region_id}: {region.fault.error.reason}"]
            lines += [f"  {region.fault.error}", f"  What to do: {region.fault.error.remedy}"]
    for stray in table.regions.strays:
        lines += ["", f"Not a region, left alone: {stray}"]
    return "\n".join(lines)


def _regions(inspection: Inspection) -> str:
    grid = Grid(box=None, pad_edge=False, title_justify="left")
    for heading in ("region", "status", "epoch", "merged", "generations waiting", "rows", "bytes"):
        grid.add_column(heading, justify="left" if heading in {"region", "status"} else "right")
    for region in inspection.regions:
        grid.add_row(*_region_cells(region))
    return _render(grid)


def _region_cells(region: RegionState) -> list[str]:
    if region.backlog is None:
        return [str(region.region_id), "unreadable", "", "", "", "", ""]
    waiting = [one for one in region.generations if one.state != "merged"]
    numbers = [one.flushed.generation for one in waiting]
    span = "none" if not numbers else f"{len(numbers)} ({numbers[0]} to {numbers[-1]})"
    return [
        str(region.region_id),
        region.backlog.manifest.status.name.lower(),
        str(region.backlog.manifest.writer_epoch),
        str(region.backlog.merged),
        span,
        f"{sum(one.flushed.physical_rows or 0 for one in waiting):,}",
        size_text(sum(one.flushed.accounted_bytes or 0 for one in waiting)),
    ]


def _indexes(inspection: Inspection) -> str:
    grid = Grid(box=None, pad_edge=False)
    for heading in ("index", "type", "fragments covered", "uncovered", "rows uncovered"):
        grid.add_column(heading, justify="left" if heading in {"index", "type"} else "right")
    for index in inspection.indexes:
        grid.add_row(
            index.name,
            index.type,
            str(index.covered_fragments),
            str(index.uncovered_fragments),
            f"{index.uncovered_rows:,}",
        )
    return _render(grid)


def _render(grid: Grid) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, no_color=True)
    console.print(grid)
    output = console.file
    assert isinstance(output, io.StringIO)  # noqa: S101 - it was given two lines above
    return output.getvalue().rstrip()
