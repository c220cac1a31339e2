"""``memwal-ops maintain``: everything that a table needs, in the right order, with one account at the end."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from memwal_ops.cli import catchup, compact, expire, gc, merge, snapshot
from memwal_ops.cli.options import Duration, Size, json_output, storage_options
from memwal_ops.cli.text import paragraph
from memwal_ops.core.table import open_table
from memwal_ops.jobs import expire as expire_job
from memwal_ops.jobs import gc as gc_job
from memwal_ops.jobs import maintain as job
from memwal_ops.jobs import merge as merge_job
from memwal_ops.jobs import snapshot as snapshot_job
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

_DESCRIBE: dict[str, Callable[[Any], str]] = {
    "merge": merge.describe,
    "catchup": catchup.describe,
    "compact": compact.describe,
    "snapshot": snapshot.describe,
    "expire": expire.describe,
    "gc": gc.describe,
}
_EXPIRE = expire_job.ExpireOptions()


@click.command(short_help="Merge, catch up, compact, snapshot, expire and collect, in that order.")
@click.argument("uri")
@click.option("--apply", "delete", is_flag=True, help="Let expire and gc delete. Without it, they plan.")
@click.option("--dry-run", is_flag=True, help="Change nothing at all.")
@click.option("--budget", type=Duration(), help="No step begins later than that after the start, for example 45m.")
@click.option(
    "--max-bytes",
    type=Size(),
    default=merge_job.DEFAULT_MAX_BYTES,
    help="Budget of one merge pass; memory follows it.  [default: 1GiB]",
)
@click.option(
    "--older-than",
    type=Duration(),
    default=duration_text(_EXPIRE.older_than),
    show_default=True,
    help="Expire versions of that age.",
)
@click.option(
    "--keep", type=click.IntRange(min=1), default=_EXPIRE.keep, show_default=True, help="The newest N versions stay."
)
@click.option(
    "--inline-threshold",
    type=click.IntRange(min=0),
    default=snapshot_job.DEFAULT_INLINE_THRESHOLD,
    show_default=True,
    help="Up to this many regions, the snapshot stands inside the index.",
)
@gc.gc_options
@storage_options
@json_output
def maintain(
    uri: str,
    delete: bool,
    dry_run: bool,
    budget: timedelta | None,
    max_bytes: int,
    older_than: timedelta,
    keep: int,
    inline_threshold: int,
    careful: gc_job.GcOptions,
    storage_options: dict[str, str],
    as_json: bool,
) -> int:
    """Do for the table at URI whatever is due: merge, catchup, compact, snapshot, expire, gc.

    The first four build, and act; expire and gc delete only with --apply. A step that fails does not stop those
    that build after it; nothing is deleted after a failure. Safe to kill, and to run twice or at once.

    Exit codes: 0 maintained, over_budget or dry_run; else that of the first step that did not end well.
    """
    options = job.MaintainOptions(
        apply=delete,
        dry_run=dry_run,
        budget=budget,
        merge=merge_job.MergeOptions(max_bytes=max_bytes),
        snapshot=snapshot_job.SnapshotOptions(inline_threshold),
        expire=expire_job.ExpireOptions(older_than, keep),
        gc=careful,
    )
    table = open_table(uri, storage_options)

    def on_step(step: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"{step} ...", err=True)

    report = job.maintain(table, options, on_step=on_step)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else describe(report))
    return report.exit_code


def describe(report: job.MaintainReport) -> str:
    """The account for a person: one line for each step, and what a step has to say beyond it."""
    lines = [f"{report.decision}: the table is at version {report.version} after {report.seconds:.1f} s.", ""]
    for step in report.steps:
        if step.error is not None:
            text = f"failed ({step.error.reason}): {step.error} {step.error.remedy}"
        elif step.skipped is not None:
            text = f"skipped: {step.skipped}."
        else:
            text = _DESCRIBE[step.step](step.report)
        head, rest = _headline(text)
        lines.append(paragraph(f"{step.step:<9} {head}", hanging=" " * 10))
        lines += [f"{' ' * 10}{line}".rstrip() for line in rest if step.exit_code and line]
        if not step.exit_code:
            warnings = getattr(step.report, "warnings", ())
            lines += [paragraph(f"WARNING: {warning}", indent=" " * 10, hanging="  ") for warning in warnings]
    deleting = [step for step in report.steps if step.step in {"expire", "gc"} and step.decision == "planned"]
    if deleting and not report.applied:
        lines += ["", "Nothing was deleted; add --apply for that, or look closer with memwal-ops expire and gc."]
    return "\n".join(lines)


def _headline(text: str) -> tuple[str, list[str]]:
    """The first sentence, which may be wrapped, and the lines after it."""
    first, *rest = text.splitlines()
    while rest and rest[0].startswith(" "):
        first += f" {rest.pop(0).strip()}"
    return first, rest
