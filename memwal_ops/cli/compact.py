"""``memwal-ops compact``: rewrite small or much-deleted base fragments."""

from __future__ import annotations

import json
import sys

import click

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.progress import counting
from memwal_ops.cli.text import counted, paragraph, size_text
from memwal_ops.core.table import open_table
from memwal_ops.jobs import compact as job


@click.command(short_help="Join small base fragments and drop deleted rows.")
@click.argument("uri")
@click.option(
    "--target-rows",
    type=click.IntRange(min=1),
    default=job.DEFAULT_TARGET_ROWS,
    show_default=True,
    help="Rows of a fragment afterwards; smaller neighbours are joined.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be rewritten and change nothing.")
@storage_options
@json_output
def compact(uri: str, target_rows: int, dry_run: bool, storage_options: dict[str, str], as_json: bool) -> int:
    """Rewrite small or much-deleted fragments of the base table at URI.

    Merge progress, configuration and index catch-up stay as they are, and indexes go on covering
    what they covered. Old files stay until old versions are cleaned up. Safe to kill, to run twice,
    and to run beside mergers and writers.

    Exit codes: 0 compacted, unchanged or dry_run; any other code: see the README.
    """
    options = job.CompactOptions(target_rows)
    table = open_table(uri, storage_options)
    if dry_run:
        report = job.dry_run(table, options)
    else:
        with counting("rewriting", "groups of fragments", show=sys.stderr.isatty()) as advance:
            report = job.apply(table, options, on_task=advance)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else describe(report))
    return 0


def describe(report: job.CompactReport) -> str:
    """The report for a person."""
    parts = [paragraph(_headline(report), hanging="  ")]
    if report.snapshot_lost:
        parts.append(
            paragraph(
                "The region snapshot stood in a file, which is found no more; run memwal-ops snapshot to store it "
                "again. Until then readers list the regions.",
                hanging="  ",
            )
        )
    return "\n".join(parts)


def _headline(report: job.CompactReport) -> str:
    change = f"{counted(report.fragments_removed, 'fragment')} into {report.fragments_added:,}"
    rows = counted(report.rows_rewritten, "row")
    match report.decision:
        case "compacted":
            return (
                f"compacted: {change}, {rows}, {size_text(report.bytes_written or 0)} written, "
                f"{counted(report.fragments_after, 'fragment')} now, version {report.version}, {report.seconds:.2f} s."
            )
        case "unchanged":
            return f"unchanged: nothing was rewritten. {report.why}"
        case _:
            if report.why is not None:
                return f"dry_run: would rewrite nothing. {report.why}"
            return f"dry_run: would rewrite {change} (about), {rows}; nothing was changed."
