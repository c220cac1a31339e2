"""``memwal-ops snapshot``: take a snapshot of all regions into the MemWAL index."""

from __future__ import annotations

import json
import sys

import click

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.progress import counting
from memwal_ops.cli.text import counted, paragraph
from memwal_ops.core.table import open_table
from memwal_ops.jobs import snapshot as job


@click.command(short_help="Store the state of all regions for readers.")
@click.argument("uri")
@click.option(
    "--inline-threshold",
    type=click.IntRange(min=0),
    default=job.DEFAULT_INLINE_THRESHOLD,
    show_default=True,
    help="Up to this many regions, keep the rows inside the index; else in a file beside it.",
)
@click.option("--dry-run", is_flag=True, help="Read all regions and change nothing.")
@storage_options
@json_output
def snapshot(uri: str, inline_threshold: int, dry_run: bool, storage_options: dict[str, str], as_json: bool) -> int:
    """Take a snapshot of all regions of the table at URI into its MemWAL index.

    Readers then find the regions without listing anything. Merge progress, configuration and index
    catch-up stay as they are. Safe to kill, to run twice, and to run beside mergers and writers.

    Exit codes: 0 built, unchanged or dry_run; 10 a region could not be read (the others are in the
    snapshot); any other code: see the README.
    """
    options = job.SnapshotOptions(inline_threshold)
    table = open_table(uri, storage_options)
    if dry_run:
        report = job.dry_run(table, options)
    else:
        with counting("reading", "regions", show=sys.stderr.isatty()) as advance:
            report = job.apply(table, options, on_region=advance)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else describe(report))
    return report.exit_code


def describe(report: job.SnapshotReport) -> str:
    """The report for a person."""
    parts = [_headline(report)]
    if report.wal_hints_updated:
        parts.append(f"Wrote down the end of the log of {counted(report.wal_hints_updated, 'region')}.")
    for one in report.skipped:
        mark = "NOT READ" if one.is_fault else "passed over"
        parts.append(paragraph(f"{mark}: {one.path} ({one.reason}). {one.detail}", hanging="  "))
    return "\n".join(parts)


def _headline(report: job.SnapshotReport) -> str:
    regions = counted(report.num_regions, "region")
    where = "inside the index" if report.stored == "inline" else "in a file beside the index"
    match report.decision:
        case "built":
            return f"built: {regions}, {where}, as version {report.version}, {report.seconds:.2f} s."
        case "unchanged":
            return f"unchanged: the stored snapshot of {regions} is current; nothing was committed."
        case _:
            if report.is_current:
                return f"dry_run: the stored snapshot of {regions} is current; there is nothing to do."
            return f"dry_run: would store {regions} {where}; nothing was changed."
