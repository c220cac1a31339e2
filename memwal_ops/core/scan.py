"""Report what each job would do on a table, from plans alone."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.bad_answers import bad_answers, no_past_answers
from memwal_ops.core.figures import Figures
from memwal_ops.core.maintain import ordered
from memwal_ops.core.outlook import Outlook, outlook_on
from memwal_ops.core.past_runs import no_past_runs
from memwal_ops.core.polling import poll_cache
from memwal_ops.core.protocols import NamesWriters
from memwal_ops.core.registry import find_stub, package_of
from memwal_ops.core.report import Need, PlanReport
from memwal_ops.core.run import plugin_errors, run_job
from memwal_ops.errors import MemwalOpsError, NotALanceTableError
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.locations import below, decoded_name, is_database_table
from memwal_ops.storage.objects import open_store
from memwal_ops.text import counted_as

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.bad_answers import BadAnswers, PastAnswers
    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.past_runs import PastRuns
    from memwal_ops.core.protocols import Blocked, Table


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
    blocked: tuple[Blocked, ...] = ()
    last_writer: str | None = None
    outlook: Outlook = field(default_factory=Outlook)
    answers: tuple[BadAnswers, ...] = ()
    deletes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The ``tables`` entry."""
        return {
            "uri": self.uri,
            "bad_answers": [one.to_json() for one in self.answers],
            "version": self.revision,
            "last_writer": self.last_writer,
            "needs": [one.to_json() for one in self.needs],
            "outlook": self.outlook.to_json(),
            "blocked": [dict(one.document) for one in self.blocked],
            "errors": [
                {"job": job, "reason": error.reason, "message": str(error), "exit_code": error.exit_code}
                for job, error in self.errors
            ],
        }


@dataclass(frozen=True, slots=True)
class Skipped:
    """What a LanceDB folder has beside its tables. Its URI, why it is no table, and what to do."""

    uri: str
    why: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """The ``skipped`` entry."""
        return {"uri": self.uri, "why": self.why, "remedy": self.remedy}


def tables_of_database(uri: str, storage_options: Mapping[str, str]) -> tuple[list[str], list[Skipped]]:
    """The URIs of the tables of a LanceDB folder, ascending, and of the other folders. One listing.

    Raises:
        MemwalOpsError: the store failed.
    """
    root = uri.rstrip("/")
    level = open_store(resolve(root, storage_options)).list_level("")
    folders = sorted({*level.directories, *level.empty})
    marks = {name: beside for name in folders if (beside := decoded_name(name)) in folders}
    tables = [below(root, name) for name in folders if is_database_table(name) and name not in marks]
    skipped = [
        Skipped(below(root, name), "LanceDB gives no table such a name.", "Scan it by its URI if it is a table.")
        for name in folders
        if not is_database_table(name)
    ]
    skipped += [
        Skipped(below(root, name), f"It is no table: a catalog writes its marks for {beside} there.", "Leave it there.")
        for name, beside in marks.items()
    ]
    link = "It is a symbolic link."
    skipped += [Skipped(f"{root}/{name}", link, "Scan the folder that it leads to.") for name in sorted(level.links)]
    return tables, skipped


def skipped_stub(uri: str, storage_options: Mapping[str, str]) -> Skipped | None:
    """A table's folder without a version and without rows; None: it is something else.

    Raises:
        NotALanceTableError: it has no version, and files that may have rows.
        MemwalOpsError: the store failed.
    """
    stub = find_stub(uri, storage_options)
    if stub is None:
        return None
    remedy = f"memwal-ops repair {shlex.quote(uri)} shows what may be deleted."
    if stub.with_data:
        raise NotALanceTableError(stub.evidence, remedy=remedy)
    return Skipped(uri, stub.evidence, remedy)


def scan_table(table: Table, past: PastRuns = no_past_runs, asked: PastAnswers = no_past_answers) -> Scanned:
    """What the jobs of ``maintain`` would do on a table with their default options. Reads only.

    Args:
        past: the run history, by which it is told how long that takes.
        asked: how well its indexes answered when they were last asked; no index is asked here.
    """
    needs: list[Need] = []
    errors: list[tuple[str | None, MemwalOpsError]] = []
    backlog = Figures({}, table.format.name)
    blocked: tuple[Blocked, ...] = ()
    steps = ordered(spec for spec in table.jobs.values() if spec.in_maintain and spec.name != "repair")
    with poll_cache():
        for spec in steps:
            try:
                needs += _needs(table, spec)
                if package_of(spec) is None and _reduces_backlog(spec):
                    backlog = replace(backlog, values=spec.job.backlog(table))
                    blocked = _blocked(table) if backlog.amount("blocked") else ()
            except MemwalOpsError as error:
                errors.append((spec.name, error))
    writer = table.format.last_writer(table) if isinstance(table.format, NamesWriters) else None
    where, outlook = table.location.address, outlook_on(table, needs, past)
    bad = tuple(bad_answers(asked(where)))
    deletes = tuple(spec.name for spec in steps if spec.deletes)
    return Scanned(where, table.revision, tuple(needs), tuple(errors), backlog, blocked, writer, outlook, bad, deletes)


def _blocked(table: Table) -> tuple[Blocked, ...]:
    found = table.format.summarize(table).blocked
    return tuple(replace(one, part=" at ".join(filter(None, table.format.part_of(one.document)))) for one in found)


def _needs(table: Table, spec: JobSpec) -> Iterable[Need]:
    """What a built-in job's plan says; of the job that reduces the backlog, and of another package's, the backlog."""
    if package_of(spec) is None and not _reduces_backlog(spec):
        plan = run_job(table, spec.name, apply=False)
        if isinstance(plan, PlanReport):
            return plan.needs()
    with plugin_errors(spec):
        figures = spec.job.backlog(table) if spec.backlog_metrics else {}
    backlog = Figures(figures, table.format.name)
    waiting = int(backlog.amount("backlog") or 0)
    what = f"{spec.name} {counted_as(waiting, backlog.noun_of('backlog'))}"
    return [Need(spec.name, what, rows=int(figures.get("rows", 0)))] if waiting else []


def _reduces_backlog(spec: JobSpec) -> bool:
    return any(metric.role == "backlog" for metric in spec.backlog_metrics.values())
