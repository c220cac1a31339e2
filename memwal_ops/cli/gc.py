"""``memwal-ops gc``: what may go, what is held and by what; with --apply, delete what may go."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from memwal_ops.cli.options import Duration, json_output, storage_options
from memwal_ops.cli.progress import counting
from memwal_ops.cli.text import counted, grid, paragraph, size_text
from memwal_ops.core.table import open_table
from memwal_ops.errors import InvalidUsageError
from memwal_ops.jobs import gc as job
from memwal_ops.jobs.collectables import Item, Kind, Verdict
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta
    from typing import Any

_DEFAULTS = job.GcOptions()
_SHOWN = 8
_MOST_REASONS = 1000
# They are shown indented by others, too.
_NARROW = 104
_NUMEROUS = {
    Kind.WAL_ENTRY: ("WAL entry", "WAL entries"),
    Kind.REGION_MANIFEST: ("region manifest version", "region manifest versions"),
}
_NUMBERS = re.compile(r"\d+( (d|h|min|s)\b)?")


def gc_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how careful the collector is; the command gets them as one value, ``careful``."""

    @functools.wraps(command)
    def with_options(
        *,
        reader_grace: timedelta,
        orphan_min_age: timedelta,
        manifest_retention: int,
        fence_retention: timedelta,
        max_deletes: int | None,
        allow_unsafe: bool,
        **named: Any,
    ) -> Any:
        careful = job.GcOptions(
            reader_grace, orphan_min_age, manifest_retention, fence_retention, max_deletes, allow_unsafe
        )
        return command(careful=careful, **named)

    decorated: Callable[..., Any] = with_options
    for option in (
        click.option("--allow-unsafe", is_flag=True, help="Take values below their safe minimum."),
        click.option("--max-deletes", type=click.IntRange(min=1), metavar="N", help="Delete at most N objects."),
        click.option(
            "--fence-retention",
            type=Duration(),
            default=duration_text(_DEFAULTS.fence_retention),
            show_default=True,
            help="How long a writer that was fenced may be stalled and wake again.",
        ),
        click.option(
            "--manifest-retention",
            type=click.IntRange(min=1),
            default=_DEFAULTS.manifest_retention,
            show_default=True,
            help="How many of each region's newest manifest versions stay.",
        ),
        click.option(
            "--orphan-min-age",
            type=Duration(),
            default=duration_text(_DEFAULTS.orphan_min_age),
            show_default=True,
            help="How long a flush or a commit may be under way.",
        ),
        click.option(
            "--reader-grace",
            type=Duration(),
            default=duration_text(_DEFAULTS.reader_grace),
            show_default=True,
            help="How long a reader may go on with what it has read.",
        ),
    ):
        decorated = option(decorated)
    return decorated


@click.command(short_help="Delete what nothing needs any more; plan it first.")
@click.argument("uri")
@click.option("--apply", "delete", is_flag=True, help="Delete. Without it, nothing is changed.")
@click.option(
    "--plan-file", type=click.Path(dir_okay=False, path_type=Path), help="Write every item here, as JSON lines."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=job.DEFAULT_LIMIT,
    show_default=True,
    help="At most this many items of each list in --json.",
)
@gc_options
@storage_options
@json_output
def gc(
    uri: str,
    delete: bool,
    plan_file: Path | None,
    limit: int,
    careful: job.GcOptions,
    storage_options: dict[str, str],
    as_json: bool,
) -> int:
    """Collect the garbage of the table at URI.

    That is: merged generations, flushed WAL entries, old region manifests, orphans, old snapshots, and what
    killed commits left. Everything has a proof or is kept: a generation stays while any version, tag, branch,
    hold or index needs it. Safe to kill, to run twice, and to run beside writers, readers and all other jobs.

    Exit codes: 0 planned, nothing_to_delete, drained or deleted; 10 a region could not be read (all of it was
    kept); 27 some deletions failed; any other code: see the README.
    """
    table = open_table(uri, storage_options)
    run = job.apply if delete else job.plan
    reasons = Reasons()
    with _written(plan_file) as write, counting("collecting", "things", show=sys.stderr.isatty()) as advance:

        def on_item(item: Item) -> None:
            write(item)
            reasons.take(item)
            advance()

        report = run(table, careful, limit=limit, on_item=on_item)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else describe(report, plan_file, reasons))
    return report.exit_code


@contextmanager
def _written(path: Path | None) -> Iterator[Callable[[Item], None]]:
    """A function that writes one item as a line; the file appears when the block ends well, and as a whole."""
    if path is None:
        yield lambda _: None
        return
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InvalidUsageError(f"--plan-file {path} cannot be written: {error}.") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield lambda item: _line(file, item)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _line(file: TextIO, item: Item) -> None:
    file.write(json.dumps({**item.to_json(), "verdict": item.verdict.value}) + "\n")


def describe(report: job.GcReport, plan_file: Path | None = None, reasons: Reasons | None = None) -> str:
    """The report for a person."""
    parts = [_headline(report)]
    rows = [
        (
            _KINDS[kind],
            *(f"{counter[verdict]:,}" for verdict in (Verdict.DELETE, Verdict.HELD, Verdict.UNKNOWN)),
        )
        for kind in Kind
        if kind in report.counts and (counter := report.counts[kind])
    ]
    if rows:
        may_go = "deleted" if report.applied else "may go"
        parts.append(grid(("", may_go, "held", "unknown"), rows, words=("",)))
    if reasons is not None:
        parts += [reasons.describe(verdict) for verdict in (Verdict.HELD, Verdict.UNKNOWN) if reasons.found[verdict]]
    for path, why in list(report.failed.items())[:_SHOWN]:
        parts.append(paragraph(f"NOT DELETED: {path}: {why}", hanging="  "))
    parts += [paragraph(f"WARNING: {warning}", hanging="  ") for warning in report.warnings]
    parts.append(_next(report, plan_file))
    return "\n\n".join(parts)


_KINDS = {
    Kind.GENERATION: "generations",
    Kind.ORPHAN: "orphan directories",
    Kind.WAL_ENTRY: "WAL entries",
    Kind.REGION_MANIFEST: "region manifest versions",
    Kind.SNAPSHOT: "external snapshots",
    Kind.LEFTOVER: "leftovers of killed commits",
    Kind.UNKNOWN: "unknown",
}


class Reasons:
    """Each reason once, with how many things it holds, and one of them."""

    def __init__(self) -> None:
        """None yet."""
        self.found: dict[Verdict, dict[str, tuple[Item, int, int, str]]] = {verdict: {} for verdict in Verdict}

    def take(self, item: Item) -> None:
        """Count an item."""
        alike = self.found[item.verdict]
        if item.verdict is Verdict.DELETE:
            return
        # Those of many things differ in numbers and ages alone; one of each is enough, and would else hide the others.
        key = _NUMBERS.sub("...", item.why) if item.kind in _NUMEROUS else item.why
        if key in alike or len(alike) < _MOST_REASONS:
            first, count, size, why = alike.get(key, (item, 0, 0, item.why))
            alike[key] = (first, count + 1, size + item.bytes, why if why == item.why else key)

    def describe(self, verdict: Verdict) -> str:
        """A paragraph for each of the first."""
        lines = ["Held:" if verdict is Verdict.HELD else "Unknown, and kept:"]
        alike = list(self.found[verdict].items())
        for _, (first, count, size, why) in alike[:_SHOWN]:
            more = "" if count == 1 else f" and {count - 1:,} more"
            named = counted(count, *_NUMEROUS[first.kind]) if first.kind in _NUMEROUS else f"{first.path}{more}"
            text = f"{named} ({size_text(size)}): {why}"
            lines.append(paragraph(text, indent="  ", hanging="  ", width=_NARROW))
        if len(alike) > _SHOWN:
            lines.append(f"  and {len(alike) - _SHOWN} other reasons (--json, --plan-file)")
        return "\n".join(lines)


def _headline(report: job.GcReport) -> str:
    about = f"{counted(report.regions, 'region')}, {counted(report.versions, 'version')} that may be opened"
    if report.sealed:
        about += f", {counted(report.sealed, 'sealed region')}"
    match report.decision:
        case "planned":
            text = f"planned: {size_text(report.bytes_reclaimable)} may go"
            if report.drainable:
                text += f", {counted(report.drainable, 'generation')} may be drained"
            text += "; nothing was changed."
        case "deleted" | "incomplete":
            gone = counted(report.deleted_objects, "object")
            text = f"{report.decision}: {gone}, {size_text(report.deleted_bytes)}, in {report.seconds:.2f} s."
        case "drained":
            text = f"drained: {counted(report.drained, 'generation')}; nothing was old enough to be deleted yet."
        case _:
            text = "nothing_to_delete: everything that stands is needed, or not old enough."
    return f"{text}\n  {about}."


def _next(report: job.GcReport, plan_file: Path | None) -> str:
    parts = []
    if plan_file is not None:
        parts.append(f"Every item stands in {plan_file}.")
    if not report.applied and report.decision == "planned":
        if report.drainable:
            parts.append(
                f"{counted(report.drainable, 'generation is', 'generations are')} needed by nobody: --apply takes them "
                "off the region's list, and a run after --reader-grace deletes them."
            )
        parts.append("Add --apply to do it; every proof is made again then.")
    if report.drained and report.applied:
        later = datetime.now(UTC) + report.reader_grace
        if report.reader_grace:
            parts.append(f"Run it again after {later:%Y-%m-%d %H:%M} UTC: it deletes then what it drained now.")
    if report.limited:
        parts.append("--max-deletes ended this run; the next one goes on.")
    parts.append("memwal-ops why URI PATH tells condition by condition what keeps one of them.")
    return paragraph(" ".join(parts))
