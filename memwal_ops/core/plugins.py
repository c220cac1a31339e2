"""Check what other packages declare; give their formats the jobs that need nothing else: inspect, verify, why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core import job
from memwal_ops.core.options import Options, VerificationOptions, describe, text
from memwal_ops.errors import InvalidUsageError, JobPluginError
from memwal_ops.text import counted, grid, paragraph, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from importlib.metadata import EntryPoint

    from memwal_ops.core import verification
    from memwal_ops.core.context import RunContext
    from memwal_ops.core.explanation import Explanation
    from memwal_ops.core.protocols import Table, TableSummary

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_FORMAT = ("name", "suffix", "init", "demo", "part_of", "detect", "open", "summarize", "missing_of")
_TABLE = ("format", "location", "store", "jobs", "revision", "has_revision", "newest", "with_guard", "summary")
_SHOWN: Mapping[str, Callable[[float], str]] = {
    "bytes": size_text,
    "seconds": time_text,
    "count": lambda value: f"{int(value):,}",
}


def distribution(entry: EntryPoint) -> str:
    """The name and release of the package of an entry point."""
    return entry.value if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def check_format(loaded: object, entry: EntryPoint) -> None:
    """Refuse what is no :class:`memwal_ops.core.protocols.TableFormat`. Raises ``JobPluginError``."""
    _refuse(f"The table format {entry.name!r} of {distribution(entry)}", loaded, _FORMAT, "TableFormat")


def check_table(table: object, what: str) -> None:
    """Refuse what is no :class:`memwal_ops.core.protocols.Table`; ``what`` it is. Raises ``JobPluginError``."""
    _refuse(what, table, _TABLE, "Table")


def _refuse(what: str, given: object, members: Iterable[str], protocol: str) -> None:
    if lacking := [name for name in members if not hasattr(given, name)]:
        raise JobPluginError(
            f"{what} lacks {', '.join(lacking)}: see memwal_ops.core.protocols.{protocol}.",
            remedy="Report it to that package; docs/formats/adding-one.md lists what it needs.",
        )


def defect_of(spec: object, entry: EntryPoint) -> str | None:  # noqa: PLR0911 - one for each possible defect
    """Why the object of an entry point is no spec of a job, as the end of a sentence; None: it is one."""
    if not isinstance(spec, job.JobSpec):
        return f"it is a {type(spec).__name__}, not a memwal_ops.core.job.JobSpec"
    if spec.name != entry.name.partition(".")[2] or NAME.fullmatch(spec.name) is None:
        form = "FORMAT.NAME or any.NAME, of lower-case letters, digits and _"
        return f"its name is {spec.name!r}; the entry point must be {form}"
    if spec.pool not in job.POOLS:
        return f"its pool is {spec.pool!r}; it must be one of {', '.join(job.POOLS)}"
    options: object = spec.options
    if not isinstance(options, type) or not issubclass(options, Options):
        return "its options are not a subclass of memwal_ops.core.options.Options"
    try:
        describe(spec.options)
        spec.options()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of another package
        return f"its options cannot be made without values: {error!r}"
    invalid = sorted(
        name
        for name, metric in spec.metrics.items()
        if NAME.fullmatch(name) is None
        or metric.unit not in job.UNITS
        or NAME.fullmatch(metric.exported or name) is None
    )
    if invalid:
        return f"its metrics {', '.join(invalid)} have an invalid name, or a unit other than {', '.join(job.UNITS)}"
    if not_pages := [page for page in spec.pages.values() if not page.startswith(("https://", "http://"))]:
        return f"its pages {', '.join(not_pages)} are no URLs"
    return None


@dataclass(frozen=True)
class SummaryReport:
    """The state of a table, by what its format's ``summarize`` returns."""

    table: Table
    summary: TableSummary

    decision = "inspected"
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``inspect --json``."""
        return {
            "decision": self.decision,
            "uri": self.table.location.address,
            "format": self.table.format.name,
            "version": self.summary.revision,
            "parts": self.summary.parts,
            "backlog": dict(self.summary.backlog),
            "blocked": [dict(part.document) for part in self.summary.blocked],
        }

    def describe(self) -> str:
        """The inspection as text: the backlog metrics as the jobs declare them, and what is blocked."""
        table, summary = self.table, self.summary
        metrics = {name: metric for spec in table.jobs.values() for name, metric in spec.backlog_metrics.items()}
        rows = [
            (name, _SHOWN[metrics[name].unit](value), metrics[name].help) if name in metrics else (name, str(value), "")
            for name, value in summary.backlog.items()
        ]
        head = f"{table.format.name}, revision {summary.revision}, {counted(summary.parts, 'part')}"
        lines = [f"{table.location.address}: {head}."]
        lines += ["", grid(("backlog", "", ""), rows, words=("backlog", ""))] if rows else []
        for part in summary.blocked:
            where = " at ".join(filter(None, table.format.part_of(part.document))) or "The table"
            lines += ["", paragraph(f"BLOCKED: {where}: {part.reason}: {part.detail}", hanging="  ")]
        return "\n".join(lines)


class Inspect:
    """The job ``inspect`` of a format that brings none."""

    def plan(self, table: Table, options: Options, context: RunContext) -> SummaryReport:
        """Read the summary."""
        del options, context
        return SummaryReport(table, table.format.summarize(table))

    apply = plan


class Verify:
    """The job ``verify`` of a format that brings none: what its format can tell without reading rows."""

    def plan(self, table: Table, options: VerificationOptions, context: RunContext) -> verification.VerifyReport:
        """Ask for a missing object of the newest revision, and for blocked parts."""
        from memwal_ops.core import verification  # noqa: PLC0415 - the code of a job: not for the registry

        del context
        findings = verification.Inconsistencies(options.max_findings)
        findings.extend(verification.missing_object(table))
        summary = table.format.summarize(table)
        for part in summary.blocked:
            place = " at ".join(filter(None, table.format.part_of(part.document))) or "the table"
            stopped = "Jobs cannot continue with it."
            findings.add(
                verification.Inconsistency(
                    verification.Severity.ERROR, "blocked", place, f"{part.reason}: {part.detail}", stopped, ""
                )
            )
        checked = {"revisions": 1, "parts": summary.parts}
        return verification.VerifyReport(summary.revision, findings, checked, rows_read=verification.RowsRead.NONE)

    apply = plan


@dataclass(frozen=True)
class ExplainOptions(Options):
    """Options of why: the target."""

    target: str = text("", positional=True, metavar="PATH", help="The object to explain.")


class ExplainJob:
    """The job ``why`` of a format that brings none: by the ``collectors`` that the module of its gc declares."""

    def plan(self, table: Table, options: ExplainOptions, context: RunContext) -> Explanation:
        """Explain the candidates at the target.

        Raises ``InvalidUsageError``: the format has no gc, or its module declares no ``collectors(table)``.
        """
        from memwal_ops.core.explanation import explain  # noqa: PLC0415 - what deletes: not for the registry

        del context
        spec = table.jobs.get("gc")
        collectors = None if spec is None else getattr(spec.job, "collectors", None)
        if collectors is None:
            raise InvalidUsageError(
                f"The format {table.format.name} does not declare why it keeps or deletes an object.",
                remedy="Its package declares it by a function collectors(table) in the module of its job gc.",
            )
        return explain(table, options.target, collectors(table))

    apply = plan


INSPECT, VERIFY, WHY = Inspect(), Verify(), ExplainJob()
GIVEN_JOBS = (
    job.read_only_job(
        name="inspect", summary="Show a table and its backlog.", options=Options, load=f"{__name__}:INSPECT"
    ),
    job.read_only_job(
        name="verify",
        summary="Check what the format tells without reading rows.",
        options=VerificationOptions,
        load=f"{__name__}:VERIFY",
    ),
    job.read_only_job(
        name="why",
        summary="Print why an object is kept, or is deletable.",
        options=ExplainOptions,
        load=f"{__name__}:WHY",
    ),
)
"""The jobs of each format of another package that brings none of that name."""
