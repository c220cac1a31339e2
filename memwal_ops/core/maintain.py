"""The maintain job: run every job that applies to a table, in the order of their dependencies, or report their plans.

Generic over formats: the steps are the table's own jobs, ordered by ``JobSpec.after``; a job that is registered for
the format and does not apply to this table is a step ``not_applicable``. A format registers it with an options class
of its own, which derives from :class:`MaintenanceOptions` and has a field for the options of each step.
"""

from __future__ import annotations

import enum
import shlex
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memwal_ops.core import protocols, registry, run
from memwal_ops.core.answers import BadAnswers, PastAnswers, bad_answers, no_past_answers
from memwal_ops.core.context import RunContext
from memwal_ops.core.figures import Figures, poll_cache
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import MaintenanceOptions, Options
from memwal_ops.core.outlook import Outlook, describe_outlooks, outlook_on
from memwal_ops.core.past_runs import PastRuns, no_past_runs
from memwal_ops.core.report import Need, PlanReport, Report
from memwal_ops.errors import LeaseLostError, MemwalOpsError, NotALanceTableError, RegionsBlockedError, worst_exit_code
from memwal_ops.storage import locations
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.clock import PLANNED_BY
from memwal_ops.storage.objects import open_store
from memwal_ops.text import counted_as, duration_text, paragraph


@dataclass(frozen=True, slots=True)
class Scanned:
    """One table: what it needs, by job in their order.

    Attributes:
        backlog: the metrics of the job that reduces its backlog.
        blocked: the parts that this job cannot continue with; ``part`` has the place, too.
        last_writer: the release of the table's own writers; None: it is not known.
        outlook: how long these jobs take, and the space that they need.
        errors: the error of the table, or of each job that has no plan.
        answers: its indexes that answered badly when they were last asked.
        deletes: the jobs of ``maintain`` that delete, in their order.
    """

    uri: str
    revision: int | None = None
    needs: tuple[Need, ...] = ()
    errors: tuple[tuple[str | None, MemwalOpsError], ...] = field(default=())
    backlog: Figures = field(default_factory=lambda: Figures({}, None))
    blocked: tuple[protocols.Blocked, ...] = ()
    last_writer: str | None = None
    outlook: Outlook = field(default_factory=Outlook)
    answers: tuple[BadAnswers, ...] = ()
    deletes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The ``tables`` entry."""
        return {
            "uri": self.uri,
            "bad_answers": [answer.to_json() for answer in self.answers],
            "version": self.revision,
            "last_writer": self.last_writer,
            "needs": [need.to_json() for need in self.needs],
            "outlook": self.outlook.to_json(),
            "blocked": [dict(block.document) for block in self.blocked],
            "errors": [
                {"job": job, "reason": error.reason, "message": str(error), "exit_code": error.exit_code}
                for job, error in self.errors
            ],
        }


@dataclass(frozen=True, slots=True)
class NotATable:
    """What a LanceDB folder has beside its tables. Its URI, why it is no table, and what to do."""

    uri: str
    why: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """The ``skipped`` entry."""
        return {"uri": self.uri, "why": self.why, "remedy": self.remedy}


def tables_of_database(uri: str, storage_options: Mapping[str, str]) -> tuple[list[str], list[NotATable]]:
    """The URIs of the tables of a LanceDB folder, ascending, and of the other folders. One listing."""
    root = uri.rstrip("/")
    level = open_store(resolve(root, storage_options)).list_level("")
    folders = sorted({*level.directories, *level.empty})
    marks = {name: beside for name in folders if (beside := locations.decoded_name(name)) in folders}
    places = {name: locations.below(root, name) for name in folders}
    tables = [place for name, place in places.items() if locations.is_database_table(name) and name not in marks]
    skipped = [
        NotATable(place, "LanceDB gives no table such a name.", "Scan it by its URI if it is a table.")
        for name, place in places.items()
        if not locations.is_database_table(name)
    ]
    of_catalog = "It is no table: a catalog writes its marks for {} there."
    skipped += [NotATable(places[name], of_catalog.format(beside), "Leave it there.") for name, beside in marks.items()]
    link = "It is a symbolic link."
    skipped += [NotATable(f"{root}/{name}", link, "Scan the folder that it leads to.") for name in sorted(level.links)]
    return tables, skipped


def skipped_stub(uri: str, storage_options: Mapping[str, str]) -> NotATable | None:
    """A table's folder without a version and without rows; None: it is something else.

    Raises:
        NotALanceTableError: it has no version, and files that may have rows.
        MemwalOpsError: the store failed.
    """
    stub = registry.find_stub(uri, storage_options)
    if stub is None:
        return None
    remedy = f"memwal-ops repair {shlex.quote(uri)} shows what may be deleted."
    if stub.with_data:
        raise NotALanceTableError(stub.evidence, remedy=remedy)
    return NotATable(uri, stub.evidence, remedy)


def scan_table(table: protocols.Table, past: PastRuns = no_past_runs, asked: PastAnswers = no_past_answers) -> Scanned:
    """What the jobs of ``maintain`` would do on a table with their default options. Reads only.

    ``past``: the run history, by which it is told how long that takes. ``asked``: how well its indexes answered when
    they were last asked; no index is asked here.
    """
    needs: list[Need] = []
    errors: list[tuple[str | None, MemwalOpsError]] = []
    backlog = Figures({}, table.format.name)
    blocked: tuple[protocols.Blocked, ...] = ()
    steps = ordered(spec for spec in table.jobs.values() if spec.in_maintain and spec.name != "repair")
    with poll_cache():
        for spec in steps:
            try:
                needs += _needs(table, spec)
                if registry.package_of(spec) is None and _reduces_backlog(spec):
                    backlog = replace(backlog, values=spec.job.backlog(table))
                    blocked = _blocked(table) if backlog.amount("blocked") else ()
            except MemwalOpsError as error:
                errors.append((spec.name, error))
    writer = table.format.last_writer(table) if isinstance(table.format, protocols.NamesWriters) else None
    where, outlook = table.location.address, outlook_on(table, needs, past)
    bad = tuple(bad_answers(asked(where)))
    deletes = tuple(spec.name for spec in steps if spec.deletes)
    return Scanned(where, table.revision, tuple(needs), tuple(errors), backlog, blocked, writer, outlook, bad, deletes)


def _blocked(table: protocols.Table) -> tuple[protocols.Blocked, ...]:
    blocked = table.format.summarize(table).blocked
    return tuple(
        replace(block, part=" at ".join(filter(None, table.format.part_of(block.document)))) for block in blocked
    )


def _needs(table: protocols.Table, spec: JobSpec) -> Iterable[Need]:
    """What a built-in job's plan says; of the job that reduces the backlog, and of another package's, the backlog."""
    if registry.package_of(spec) is None and not _reduces_backlog(spec):
        plan = run.run_job(table, spec.name, apply=False)
        if isinstance(plan, PlanReport):
            return plan.needs()
    with run.plugin_errors(spec):
        figures = spec.job.backlog(table) if spec.backlog_metrics else {}
    backlog = Figures(figures, table.format.name)
    waiting = int(backlog.amount("backlog") or 0)
    what = f"{spec.name} {counted_as(waiting, backlog.noun_of('backlog'))}"
    rows = figures.get("rows", None if "rows" in spec.backlog_metrics else 0)
    return [Need(spec.name, what, rows=None if rows is None else int(rows))] if waiting else []


def _reduces_backlog(spec: JobSpec) -> bool:
    return any(metric.role == "backlog" for metric in spec.backlog_metrics.values())


_WIDTH = 9


class MaintainDecision(enum.StrEnum):
    """The outcome of a maintenance run."""

    MAINTAINED = "maintained"
    INCOMPLETE = "incomplete"
    OVER_BUDGET = "over_budget"
    DRY_RUN = "dry_run"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: the ``report`` of its job, or why there is none: ``error``, ``skipped`` or ``not_applicable``."""

    step: str
    deletes: bool
    seconds: float = 0.0
    report: Report | None = None
    error: MemwalOpsError | None = None
    skipped: str | None = None
    applies: bool = True

    @property
    def decision(self) -> str:
        """The decision of the job's report; ``failed``, ``skipped`` or ``not_applicable`` if there is no report."""
        if self.report is not None:
            return str(self.report.decision)
        if not self.applies:
            return "not_applicable"
        return "failed" if self.error is not None else "skipped"

    @property
    def exit_code(self) -> int:
        """The exit code that the step's own command would have had."""
        if self.error is not None:
            return self.error.exit_code
        return 0 if self.report is None else self.report.exit_code

    @property
    def blocked(self) -> bool:
        """Whether it did its work, but for a part of the table that is blocked."""
        return self.exit_code == RegionsBlockedError.exit_code

    @property
    def failed(self) -> bool:
        """Whether nothing may be deleted after it. Of a blocked part gc keeps what it needs, so that one is none."""
        return self.exit_code != 0 and not self.blocked

    def to_json(self) -> dict[str, Any]:
        """The step as an entry of ``steps``."""
        error = self.error
        return {
            "step": self.step,
            "decision": self.decision,
            "seconds": round(self.seconds, 6),
            "report": None if self.report is None else self.report.to_json(),
            "error": None if error is None else {"reason": error.reason, "message": str(error), "remedy": error.remedy},
            "because": self.skipped,
        }


@dataclass(frozen=True, slots=True)
class MaintainReport:
    """The report of a run: one entry for each step. ``outlook``: what a run would take; None if this was one."""

    run_id: str
    applied: bool
    dry_run: bool
    steps: tuple[StepReport, ...]
    revision: int
    seconds: float
    outlook: Outlook | None = None

    @property
    def decision(self) -> MaintainDecision:
        """The outcome in one word."""
        if self.exit_code:
            return MaintainDecision.INCOMPLETE
        if any(step.skipped and step.applies for step in self.steps):
            return MaintainDecision.OVER_BUDGET
        return MaintainDecision.DRY_RUN if self.dry_run else MaintainDecision.MAINTAINED

    @property
    def exit_code(self) -> int:
        """The exit code of the step with the worst outcome; 0 if all succeeded."""
        return worst_exit_code(step.exit_code for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """The document of ``maintain --json``."""
        return {
            "decision": self.decision.value,
            "apply": self.applied,
            "steps": [step.to_json() for step in self.steps],
            "outlook": None if self.outlook is None else self.outlook.to_json(),
            "version": self.revision,
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }

    def describe(self) -> str:
        """The report as human-readable text: one line for each step, then the warnings and errors of each."""
        lines = [f"{self.decision}: the table is at version {self.revision} after {self.seconds:.1f} s.", ""]
        margin = " " * (_WIDTH + 1)
        for step in self.steps:
            head, rest = _headline(_step_text(step))
            lines.append(paragraph(f"{step.step:<{_WIDTH}} {head}", hanging=margin))
            lines += [f"{margin}{line}".rstrip() for line in rest if step.exit_code and line]
            if not step.exit_code:
                warnings = getattr(step.report, "warnings", ())
                lines += [paragraph(f"WARNING: {warning}", indent=margin, hanging="  ") for warning in warnings]
        planned = [step.step for step in self.steps if step.deletes and step.decision == "planned"]
        if planned and not self.applied:
            commands = " and ".join(planned)
            lines += ["", f"Nothing was deleted; add --apply for that, or see the details with memwal-ops {commands}."]
            lines.append(PLANNED_BY)
        if self.outlook is not None and (told := describe_outlooks([self.outlook])):
            lines += ["", told]
        return "\n".join(lines)


class Maintain:
    """The maintain job of every format."""

    def plan(self, table: protocols.Table, options: MaintenanceOptions, context: RunContext) -> MaintainReport:
        """Plan every step."""
        return _run(table, replace(options, apply=False, dry_run=True), context)

    def apply(self, table: protocols.Table, options: MaintenanceOptions, context: RunContext) -> MaintainReport:
        """Run every step, each on the newest revision. A step that fails does not stop the steps that build.

        Nothing is deleted after a step that failed, by an error or by the exit code of its report, so that an operator
        finds the table as it was. While a part is blocked, old revisions are not expired, since a restore may need
        them; gc still runs, and keeps what that part needs. Raises ``LeaseLostError``: another supervisor holds the
        lease now.
        """
        return _run(table, options, context)


JOB = Maintain()


def ordered(specs: Iterable[JobSpec]) -> tuple[JobSpec, ...]:
    """Sort jobs topologically by ``after``; alphabetically where that leaves a choice."""
    waiting = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}
    done: list[JobSpec] = []
    while waiting:
        ready = [spec for spec in waiting.values() if not spec.after & (waiting.keys() - {spec.name})]
        if not ready:
            raise ValueError(f"These jobs depend on each other in a cycle: {', '.join(waiting)}.")
        done.append(ready[0])
        del waiting[ready[0].name]
    return tuple(done)


def _run(table: protocols.Table, options: MaintenanceOptions, context: RunContext) -> MaintainReport:
    started = time.monotonic()
    registered = {name: spec for name, spec in registry.job_specs(table.format.name).items() if spec.in_maintain}
    steps: list[StepReport] = []

    def choose(step: JobSpec) -> tuple[Options, bool | None]:
        return getattr(options, step.name, None) or step.options(), False if options.dry_run else options.apply or None

    for known in ordered(registered.values()):
        if known.name not in table.jobs:
            why = str(run.why_not(table, known.name)).removesuffix(".")
            steps.append(StepReport(known.name, known.deletes, skipped=why, applies=False))
            continue
        spec = table.jobs[known.name]  # with the code for this table's layout
        step_started = time.monotonic()
        skipped = _skipped(spec, steps, options, step_started - started)
        if skipped is not None:
            steps.append(StepReport(spec.name, spec.deletes, skipped=skipped))
            continue
        context.step(spec.name)
        context.checkpoint()
        step_context = replace(context, phases={})
        try:
            if any(step.report or step.error for step in steps):
                table = table.newest()
            report = run.Run(table, spec.name, choose, context=step_context).perform()
        except LeaseLostError:
            raise  # the new holder runs all steps
        except MemwalOpsError as error:
            steps.append(StepReport(spec.name, spec.deletes, time.monotonic() - step_started, error=error))
        else:
            steps.append(StepReport(spec.name, spec.deletes, time.monotonic() - step_started, report=report))
        context.add_phase_seconds(spec.name, steps[-1].seconds)
    revision = table.newest().revision if steps and steps[-1].error is None else table.revision
    outlook = _outlook(table, steps, options, context) if options.dry_run else None
    seconds = time.monotonic() - started
    return MaintainReport(str(uuid.uuid4()), options.apply, options.dry_run, tuple(steps), revision, seconds, outlook)


def _outlook(
    table: protocols.Table, steps: Sequence[StepReport], options: MaintenanceOptions, context: RunContext
) -> Outlook:
    plans = [step.report for step in steps if isinstance(step.report, PlanReport)]
    return outlook_on(table, (need for plan in plans for need in plan.needs()), context.past_runs, options)


def _skipped(spec: JobSpec, before: Sequence[StepReport], options: MaintenanceOptions, seconds: float) -> str | None:
    if options.budget is not None and seconds >= options.budget.total_seconds():
        return f"the budget of {duration_text(options.budget)} was used up"
    if (
        spec.skip_if_blocked
        and options.apply
        and any(step.exit_code == RegionsBlockedError.exit_code for step in before)
    ):
        return "a part of the table is blocked, and a restore may need old versions"
    failed = next((step for step in before if step.failed), None)
    if failed is not None and spec.deletes and options.apply:
        how = f"{failed.decision}, exit code {failed.exit_code}"
        return f"{failed.step} failed ({how}), and nothing is deleted after a failure"
    return None


def _step_text(step: StepReport) -> str:
    if step.error is not None:
        return f"failed ({step.error.reason}): {step.error} {step.error.remedy}"
    if not step.applies:
        return f"not_applicable: {step.skipped}."
    if step.report is None:
        return f"skipped: {step.skipped}."
    return step.report.describe()


def _headline(text: str) -> tuple[str, list[str]]:
    """Split a report into its first sentence, which may be wrapped, and the lines after it."""
    first, *rest = text.splitlines()
    while rest and rest[0].startswith(" "):
        first += f" {rest.pop(0).strip()}"
    return first, rest
