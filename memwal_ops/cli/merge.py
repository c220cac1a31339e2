"""``memwal-ops merge``: land flushed generations in the base table."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memwal_ops.cli.options import RegionId, Size, json_output, storage_options
from memwal_ops.cli.text import counted, short_ids, size_text
from memwal_ops.core.table import open_table
from memwal_ops.errors import RegionsBlockedError
from memwal_ops.jobs import merge as job

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.core.table import Table


@click.command()
@click.argument("uri")
@click.option("--region", "regions", multiple=True, type=RegionId(), help="Only this region (repeatable).")
@click.option("--engine", type=click.Choice(["local", "auto"]), default="auto", show_default=True)
@click.option(
    "--max-bytes",
    type=Size(),
    default=job.DEFAULT_MAX_BYTES,
    help="Budget of one pass, by the manifests' accounting; memory follows it.  [default: 1GiB]",
)
@click.option("--max-generations", type=click.IntRange(min=1), help="At most this many generations in one pass.")
@click.option("--dry-run", is_flag=True, help="Show the passes and change nothing.")
@storage_options
@json_output
def merge(
    uri: str,
    regions: tuple[UUID, ...],
    engine: str,
    max_bytes: int,
    max_generations: int | None,
    dry_run: bool,
    storage_options: dict[str, str],
    as_json: bool,
) -> int:
    """Merge the flushed generations of the table at URI into its base table.

    Works pass by pass; each pass is one new version that carries rows, deletions and progress
    together. Safe to kill, to run twice, and to run on several machines at once.

    Exit codes: 0 merged, nothing_to_merge, superseded or dry_run; 10 a region is blocked (the others
    are merged); any other code: see the README.
    """
    options = job.MergeOptions(regions, engine, max_bytes, max_generations)
    table = open_table(uri, storage_options)
    report = job.dry_run(table, options) if dry_run else _merge(table, options, show=sys.stderr.isatty())
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        click.echo(describe(report))
    return RegionsBlockedError.exit_code if report.decision == "blocked" else 0


def _merge(table: Table, options: job.MergeOptions, *, show: bool) -> job.MergeReport:
    waiting = sum(ref.rows or 0 for merge_pass in job.plan(table, options).passes for ref in merge_pass.generations)
    with Progress(
        SpinnerColumn(),
        TextColumn("merging"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    ) as progress:
        bar = progress.add_task("merge", total=waiting or None)
        return job.apply(table, options, on_rows=lambda rows: progress.advance(bar, rows))


def describe(report: job.MergeReport) -> str:
    """The report for a person."""
    lines = [_headline(report)]
    names = short_ids({region_id for entry in report.passes for region_id in entry.merge_pass.regions})
    for number, entry in enumerate(report.passes, 1):
        spans = "; ".join(
            f"{names[region_id]} generation" + (f"s {first} to {last}" if last > first else f" {first}")
            for region_id, (first, last) in entry.merge_pass.regions.items()
        )
        result = entry.result
        lines.append(f"  pass {number}: region {spans}")
        if result is not None:
            lines.append(
                f"    read {counted(result.rows_read, 'row')} ({size_text(result.bytes_read)}), wrote "
                f"{counted(result.rows_upserted, 'row')}, deleted {counted(result.rows_deleted, 'row')} "
                f"-> version {result.version} in {result.seconds:.2f} s"
            )
    for fault in report.blocked:
        where = "" if fault.generation is None else f" at generation {fault.generation}"
        lines.append(f"  BLOCKED region {fault.region_id}{where}: {fault.error.reason}")
        lines.append(f"    {fault.error}")
        lines.append(f"    What to do: {fault.error.remedy} (runbooks/merge-blocked.md)")
    after = report.backlog_after.to_json()
    lines.append(
        "Nothing waits any more."
        if not after["generations"]
        else f"Waiting: {counted(after['generations'], 'generation')} in {counted(after['regions'], 'region')}, "
        f"{counted(after['rows'], 'row')}, {size_text(after['bytes'])}."
    )
    return "\n".join(lines)


def _headline(report: job.MergeReport) -> str:
    passes = counted(len(report.passes), "pass", "passes")
    generations = sum(len(one.merge_pass.generations) for one in report.passes)
    match report.decision:
        case "merged":
            return f"merged: {counted(generations, 'generation')} in {passes}, {report.seconds:.2f} s."
        case "nothing_to_merge":
            return "nothing_to_merge: every flushed generation is in the base table already."
        case "superseded":
            return "superseded: another merger landed everything that waited when this one began."
        case "dry_run":
            return f"dry_run: would merge {counted(generations, 'generation')} in {passes}; nothing was changed."
        case _:
            return f"blocked: {counted(generations, 'generation')} merged in {passes}, but see below."
