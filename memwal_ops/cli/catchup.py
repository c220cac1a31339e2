"""``memwal-ops catchup``: bring the base table's indexes up to what was merged."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.progress import counting
from memwal_ops.cli.text import counted, grid, paragraph
from memwal_ops.core.table import open_table
from memwal_ops.jobs import catchup as job
from memwal_ops.jobs.codebook_migration import MigrationReport, migrate

if TYPE_CHECKING:
    from memwal_ops.core.table import Table
    from memwal_ops.jobs.catchup_report import CatchupReport


@click.command(short_help="Bring the base indexes up to what was merged.")
@click.argument("uri")
@click.option("--index", "indexes", multiple=True, metavar="NAME", help="Only this index (repeatable).")
@click.option(
    "--min-uncovered-rows",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Leave an index alone that is behind by fewer rows.",
)
@click.option(
    "--max-segments",
    type=click.IntRange(min=1),
    default=job.DEFAULT_MAX_SEGMENTS,
    show_default=True,
    help="Merge the segments of an index that has more.",
)
@click.option(
    "--retrain-imbalance-threshold",
    type=click.FloatRange(min=1),
    default=job.DEFAULT_RETRAIN_IMBALANCE,
    show_default=True,
    help="Report an IVF index whose largest partition has this many times the rows of its smallest.",
)
@click.option(
    "--migrate-codebook",
    "migration",
    nargs=2,
    metavar="OLD NEW",
    help="Take the next step of replacing vector index OLD by NEW, which gets new centroids.",
)
@click.option("--dry-run", is_flag=True, help="Show what is behind and change nothing.")
@storage_options
@json_output
def catchup(
    uri: str,
    indexes: tuple[str, ...],
    min_uncovered_rows: int,
    max_segments: int,
    retrain_imbalance_threshold: float,
    migration: tuple[str, str] | None,
    dry_run: bool,
    storage_options: dict[str, str],
    as_json: bool,
) -> int:
    """Bring the base indexes of the table at URI up to date, and index_catchup in line with them.

    Each index is one new version of its own. A vector index keeps its codebook, or is left as it was.
    Safe to kill, to run twice, and to run beside mergers and writers.

    Exit codes: 0 caught_up, unchanged, no_indexes or dry_run; 18 an index failed (the others went on);
    19 all that failed came back with another codebook; any other code: see the README.
    """
    options = job.CatchupOptions(indexes, min_uncovered_rows, max_segments, retrain_imbalance_threshold)
    table = open_table(uri, storage_options)
    if migration is not None:
        step = migrate(table, *migration, dry_run=dry_run)
        click.echo(json.dumps(step.to_json(), indent=2) if as_json else describe_migration(step))
        return 0
    report = job.dry_run(table, options) if dry_run else _apply(table, options)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else describe(report))
    return report.exit_code


def _apply(table: Table, options: job.CatchupOptions) -> CatchupReport:
    with counting("indexes", "done", show=sys.stderr.isatty()) as advance:
        return job.apply(table, options, on_index=lambda _: advance())


def describe(report: CatchupReport) -> str:
    """The report for a person."""
    parts = [_headline(report)]
    if report.indexes:
        parts.append(_table(report))
    for one in report.indexes:
        if one.error is not None:
            parts.append(
                paragraph(f"FAILED: {one.name} ({one.error.reason}). {one.error} {one.error.remedy}", hanging="  ")
            )
        if one.partitions is not None and one.partitions.imbalance > one.partitions.threshold:
            parts.append(
                paragraph(
                    f"UNBALANCED: {one.name} has {counted(one.partitions.largest, 'row')} in its largest partition and "
                    f"{one.partitions.smallest:,} in its smallest. To give it new centroids without mixing distances, "
                    f"run memwal-ops catchup URI --migrate-codebook {one.name} NEW_NAME.",
                    hanging="  ",
                )
            )
    return "\n\n".join(parts)


_STEPS = {
    "created": "created: {new} stands beside {old}, with centroids of its own.",
    "maintained": "maintained: writers that start from now on maintain {new} as well.",
    "caught_up": "caught_up: {new} covers everything that is merged.",
    "waiting": "waiting: {old} is still needed.",
    "dropped": "dropped: {old} is gone.",
    "done": "done: {old} is gone, and {new} has its place.",
    "dry_run": "dry_run: nothing was changed.",
}
_HOLDS_SHOWN = 10


def describe_migration(report: MigrationReport) -> str:
    """One step of a codebook migration for a person."""
    parts = [_STEPS[report.decision].format(old=report.old, new=report.new)]
    for hold in report.holds[:_HOLDS_SHOWN]:
        generation = "" if hold.generation is None else f", generation {hold.generation}"
        parts.append(paragraph(f"held by region {hold.region_id}{generation}: {hold.because}", hanging="  "))
    if len(report.holds) > _HOLDS_SHOWN:
        parts.append(f"and by {len(report.holds) - _HOLDS_SHOWN:,} more (--json shows all).")
    parts.append(paragraph(f"Next: {report.next}", hanging="  "))
    return "\n".join(parts)


def _headline(report: CatchupReport) -> str:
    updated = counted(sum(one.decision == "updated" for one in report.indexes), "index", "indexes")
    match report.decision:
        case "caught_up":
            recorded = sum(one.decision == "recorded" for one in report.indexes)
            noted = f", {counted(recorded, 'index', 'indexes')} recorded as caught up" if recorded else ""
            return f"caught_up: {updated} updated{noted}, version {report.version}, {report.seconds:.2f} s."
        case "unchanged":
            return "unchanged: no index had anything to catch up with; nothing was committed."
        case "no_indexes":
            return "no_indexes: the base table has no index."
        case "dry_run":
            waiting = counted(sum(one.decision == "would_update" for one in report.indexes), "index", "indexes")
            return f"dry_run: would update {waiting}; nothing was changed."
        case _:
            failed = counted(len(report.failures), "index", "indexes")
            return f"incomplete: {failed} failed, {updated} updated, version {report.version}."


def _table(report: CatchupReport) -> str:
    rows = [
        (
            one.name,
            one.type,
            one.decision,
            f"{one.uncovered_fragments:,}",
            f"{one.uncovered_rows:,}",
            f"{one.segments:,}",
            f"{one.seconds:.2f}",
        )
        for one in report.indexes
    ]
    headings = ("index", "type", "decision", "fragments behind", "rows behind", "segments", "seconds")
    return grid(headings, rows, words=("index", "type", "decision"))
