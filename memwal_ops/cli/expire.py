"""``memwal-ops expire``: let old base versions go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import Duration, json_output, storage_options
from memwal_ops.cli.text import counted, paragraph, size_text
from memwal_ops.core.table import open_table
from memwal_ops.jobs import expire as job
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from datetime import timedelta

_DEFAULTS = job.ExpireOptions()
_SHOWN = 8


@click.command(short_help="Let old base versions go, so that gc can free what they hold.")
@click.argument("uri")
@click.option(
    "--older-than",
    type=Duration(),
    default=duration_text(_DEFAULTS.older_than),
    show_default=True,
    help="Only versions that were published at least this long ago.",
)
@click.option(
    "--keep", type=click.IntRange(min=1), default=_DEFAULTS.keep, show_default=True, help="The newest N versions stay."
)
@click.option("--apply", "delete", is_flag=True, help="Do it. Without it, nothing is changed.")
@storage_options
@json_output
def expire(
    uri: str, older_than: timedelta, keep: int, delete: bool, storage_options: dict[str, str], as_json: bool
) -> int:
    """Let base versions of the table at URI go that are old, and that no tag, branch or hold keeps.

    A version goes if it is older than --older-than AND not one of the newest --keep. Its files are removed by
    pylance's own clean-up. The generations that only it held are then free for gc.

    Exit codes: 0 planned, nothing_to_expire or expired; any other code: see the README.
    """
    options = job.ExpireOptions(older_than, keep)
    table = open_table(uri, storage_options)
    report = (job.apply if delete else job.plan)(table, options)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else describe(report))
    return 0


def describe(report: job.ExpireReport) -> str:
    """The report for a person."""
    parts = [_headline(report)]
    named = [one for one in report.kept if one.because.startswith(("tag", "hold", "branch"))]
    parts += [paragraph(f"  version {one.version} stays: {one.because}", hanging="    ") for one in named[:_SHOWN]]
    if report.frees[0]:
        freed = f"{counted(report.frees[0], 'generation')} ({size_text(report.frees[1])})"
        word = "were" if report.applied and report.frees[0] > 1 else "was" if report.applied else "would be"
        parts.append(f"{freed} {word} held by nothing else, for memwal-ops gc to drain and delete.")
    parts += [paragraph(f"WARNING: {warning}", hanging="  ") for warning in report.warnings]
    if report.decision == "planned":
        parts.append("Add --apply to do it.")
    return "\n".join(parts)


def _headline(report: job.ExpireReport) -> str:
    going, kept = counted(len(report.versions), "version"), counted(len(report.kept), "version")
    match report.decision:
        case "planned":
            return f"planned: {going} may go ({size_text(report.bytes)} of base files), {kept} would stay."
        case "expired":
            return f"expired: {going} ({size_text(report.bytes)} of base files), {kept} stayed, {report.seconds:.2f} s."
        case _:
            first = min((one.old_enough for one in report.kept if one.old_enough is not None), default=None)
            when = "" if first is None else f" The first is old enough at {first:%Y-%m-%d %H:%M} UTC."
            return f"nothing_to_expire: {kept} kept: young, the newest, or held by a tag, branch or hold.{when}"
