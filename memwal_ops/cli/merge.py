"""``memwal-ops merge``: land flushed generations in the base table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.inspect import problem
from memwal_ops.cli.options import RegionId, Size, json_output, region_of, storage_options
from memwal_ops.cli.progress import counting, stages
from memwal_ops.cli.text import counted, grid, paragraph, short_ids, size_text, span_text
from memwal_ops.core.table import open_table
from memwal_ops.jobs import merge as job

if TYPE_CHECKING:
    from memwal_ops.core.table import Table
    from memwal_ops.engines.api import PassResult

_PLANNED = ("rows waiting", "size")
_DONE = ("rows read", "size", "rows written", "rows deleted", "seconds", "version")


@click.command(short_help="Merge flushed generations into the base table.")
@click.argument("uri")
@click.option("--region", "regions", multiple=True, type=RegionId(), help="Only this region (repeatable).")
@click.option(
    "--engine",
    type=click.Choice(["local", "spark", "auto"]),
    default="auto",
    show_default=True,
    help="Where the merge runs; auto takes Spark above --spark-above, where it can run.",
)
@click.option("--master", help="Where Spark runs: local[2], spark://..., yarn, k8s://...  [default: as configured]")
@click.option(
    "--spark-above",
    type=Size(),
    default=job.DEFAULT_SPARK_ABOVE,
    help="Backlog above which --engine auto takes Spark.  [default: 64GiB]",
)
@click.option(
    "--max-bytes",
    type=Size(),
    help="Budget of one pass, by the manifests' accounting; memory of the local engine follows it.  "
    "[default: 1GiB; on Spark 1TiB]",
)
@click.option("--max-generations", type=click.IntRange(min=1), help="At most this many generations in one pass.")
@click.option("--dry-run", is_flag=True, help="Show the passes and change nothing.")
@storage_options
@json_output
def merge(
    uri: str,
    regions: tuple[str, ...],
    engine: str,
    master: str | None,
    spark_above: int,
    max_bytes: int | None,
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
    options = job.MergeOptions((), engine, max_bytes, max_generations, master, spark_above)
    table = open_table(uri, storage_options)
    options = replace(options, regions=tuple(region_of(table, region) for region in regions))
    report = job.dry_run(table, options) if dry_run else _merge(table, options, show=sys.stderr.isatty())
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        click.echo(describe(report))
    return report.exit_code


def _merge(table: Table, options: job.MergeOptions, *, show: bool) -> job.MergeReport:
    planned = job.plan(table, options) if show else None
    refs = [ref for one in planned.passes for ref in one.generations] if planned else []
    if planned is None or not refs:
        return job.apply(table, options)
    if job.choose_engine(options, planned.backlog).name == "spark":
        with stages("starting Spark", show=True) as tell:
            return job.apply(table, options, on_stage=tell)
    rows = [ref.rows for ref in refs if ref.rows is not None]
    total = sum(rows) if len(rows) == len(refs) else None
    with counting("merging", "rows", total=total, show=True) as advance:
        return job.apply(table, options, on_rows=advance)


def describe(report: job.MergeReport) -> str:
    """The report for a person."""
    parts = [_headline(report)]
    if report.engine == "spark" or report.fell_back:
        parts.append(paragraph(f"Engine: {report.engine} ({report.engine_reason.removesuffix('.')})."))
    if report.passes:
        parts.append(_passes(report))
    parts += [problem(fault, "BLOCKED") for fault in report.blocked]
    parts.append(_what_waits(report))
    return "\n\n".join(parts) if len(parts) > 2 else "\n".join(parts)  # noqa: PLR2004 - nothing to set apart


def _what_waits(report: job.MergeReport) -> str:
    after = report.backlog_after.to_json()
    if after["generations"]:
        return paragraph(
            f"Waiting: {counted(after['generations'], 'generation')} in {counted(after['regions'], 'region')}, "
            f"{counted(after['rows'], 'row')}, {size_text(after['bytes'])}."
        )
    if any(fault.region_id not in report.backlog_after.regions for fault in report.blocked):
        return "Nothing else waits, as far as can be seen: what a blocked region holds is not known."
    return "Nothing waits any more."


def _passes(report: job.MergeReport) -> str:
    """One line for each region of each pass; the figures of a pass stand on its first line."""
    names = short_ids({region_id for entry in report.passes for region_id in entry.merge_pass.regions})
    rows = []
    for number, entry in enumerate(report.passes, 1):
        figures = _planned(entry) if entry.result is None else _done(entry.result)
        for line, (region_id, (first, last)) in enumerate(entry.merge_pass.regions.items()):
            shown = (str(number), figures) if line == 0 else ("", [""] * len(figures))
            rows.append((shown[0], names[region_id], span_text(first, last), *shown[1]))
    done = any(entry.result is not None for entry in report.passes)
    return grid(("pass", "region", "generations", *(_DONE if done else _PLANNED)), rows, words=("region",))


def _done(result: PassResult) -> list[str]:
    return [
        f"{result.rows_read:,}",
        size_text(result.bytes_read),
        f"{result.rows_upserted:,}",
        f"{result.rows_deleted:,}",
        f"{result.seconds:.2f}",
        str(result.version),
    ]


def _planned(entry: job.PassReport) -> list[str]:
    """Sizes by the manifests' accounting; releases that kept none leave it open."""
    refs = entry.merge_pass.generations
    known = "" if all(ref.rows is not None and ref.bytes is not None for ref in refs) else "at least "
    rows, size = sum(ref.rows or 0 for ref in refs), sum(ref.bytes or 0 for ref in refs)
    return [f"{known}{rows:,}", f"{known}{size_text(size)}"]


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
        case _ if not generations:
            return "blocked: nothing was merged, see below."
        case _:
            return f"blocked: {counted(generations, 'generation')} merged in {passes}, but see below."
