"""The interface of a job (:class:`Job`), and its description without its code (:class:`JobSpec`).

A package adds a job to a format, or to every format, by an entry point::

    [project.entry-points."memwal_ops.jobs"]
    "lance.audit" = "my_package.specs:AUDIT"      # or "any.audit"

From then on ``audit`` is a command, a key of ``jobs`` in configuration files and an Airflow task, with its own
options. Our own jobs are registered in the same way.

A job must be safe to kill at any moment, to repeat, and to run twice concurrently: leases only save work.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.options import Options
    from memwal_ops.core.report import Report

Pool = Literal["merge", "build", "collect"]
"""The worker pool of a job: for merging the log, for building indexes and files, or for deleting."""
Unit = Literal["count", "bytes", "seconds"]
POOLS: tuple[Pool, ...] = get_args(Pool)
UNITS: tuple[Unit, ...] = get_args(Unit)
Role = Literal[
    "backlog", "age", "behind", "blocked", "unflushed", "unflushed_age", "last_write", "merged_elsewhere", "gone",
    "table_rows", "table_bytes", "held", "parts", "versions", "indexes", "uncovered", "lookup",
]  # fmt: skip
"""The meaning of a metric in every format: see :class:`MetricSpec`."""
ROLES: tuple[Role, ...] = get_args(Role)
BACKLOG_ROLES: tuple[Role, ...] = ("backlog", "age", "behind", "blocked")
"""Those of pending work; the others are of the table itself."""

TableT = TypeVar("TableT", contravariant=True)  # noqa: PLC0105 - the argument has the variance
OptionsT = TypeVar("OptionsT", contravariant=True)  # noqa: PLC0105 - see above


class Job(Protocol[TableT, OptionsT]):
    """The code of a job, as ``JobSpec.load`` refers to it."""

    def backlog(self, table: TableT) -> Mapping[str, float]:
        """The job's backlog metrics, by the names in its spec. Reads only; called at every poll.

        Never called for a job whose spec has no backlog metrics; such a job needs no such function.
        """

    def plan(self, table: TableT, options: OptionsT, context: RunContext) -> Report:
        """Report what :meth:`apply` would do now. Reads only."""

    def apply(self, table: TableT, options: OptionsT, context: RunContext) -> Report:
        """Run the job."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric of a job.

    Attributes:
        unit: count, bytes or seconds; the unit of amounts in triggers.
        help: one sentence, for ``/metrics`` and the reference.
        kind: ``backlog``: a gauge, read by polling, and usable in triggers; ``run``: a counter, summed up over runs.
        exported: the metric's name in Prometheus after ``memwal_ops_``; None: it is not exported.
        per_job: its counter has a label ``job`` in addition to ``table``.
        role: its meaning for code that is independent of formats: ``backlog``: the amount of pending work; ``age``:
            the age of the oldest pending work; ``behind``: the number of parts of the table with pending work;
            ``blocked``: the number of blocked parts; ``unflushed``: what writers acknowledged and have not flushed,
            which no job can process; ``unflushed_age``: the age of the oldest of that; ``last_write``: the time since
            a writer last wrote. Of the table itself: ``table_rows``: its live rows;
            ``table_bytes``: the size of its data; ``held``: bytes that only older revisions need; ``parts``: the parts
            of its data; ``versions``: its revisions; ``indexes``: its indexes; ``uncovered``: rows that the index lacks
            that lacks most.
        detail: the lists of many tables leave it out.
    """

    unit: Unit
    help: str
    kind: Literal["backlog", "run"] = "backlog"
    exported: str | None = None
    per_job: bool = False
    role: Role | None = None
    detail: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DebtSpec:
    """How backlog metrics show a debt.

    Whether a job is due, and what its next run costs, is known by them before it runs.

    These are polled for the options of the job's runs (:func:`memwal_ops.core.figures.polled_options`).

    Attributes:
        due: the metric of what is due, which is 0 if nothing is.
        nothing_due: the reason for that, as a sentence.
        rows: the metric of the rows that a run writes, by which its time is told from that of past runs.
        bytes_written: the metric of the bytes that it writes.
        bytes_read: the metric of the bytes that it reads.
        when: a backlog trigger: a run is worth what it writes. It is the default where the configuration has neither a
            schedule nor a trigger. After a run that did only a part (as an index failed) it waits for the schedule.
        skips: in that case, the supervisor does not run it by its schedule while nothing is due, and nothing to check.
        checks: the metric of what a run checks in addition; None: nothing.
    """

    due: str
    when: str
    nothing_due: str
    rows: str
    bytes_written: str
    bytes_read: str
    skips: bool = False
    checks: str | None = None

    def has_nothing_to_do(self, figures: Mapping[str, float]) -> bool:
        """Whether backlog figures show that a run would find nothing to do."""
        names = [self.due] if self.checks is None else [self.due, self.checks]
        return all(figures.get(name) == 0 for name in names)


@dataclass(frozen=True, slots=True)
class Saving:
    """What a run saves.

    It is the debt that a backlog metric shows, and what readers or the store pay for it until then.

    ``metric``: the backlog metric. ``kind``: ``fragments``: a scan makes requests for each; ``rows``: a query reads
    them all, as no index has them or a log does; ``bytes``: they are stored.
    """

    metric: str
    kind: Literal["fragments", "rows", "bytes"]


Objective = Literal["max_backlog_age", "max_fragments", "max_unindexed_rows", "max_bytes_held"]
"""An upper limit that a table is to keep: of seconds, fragments, rows or bytes."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The description of a job without its code; enough for help, configuration checks and the registry.

    Attributes:
        name: its command, its key in configuration files and its label: lower-case letters, digits and ``_``.
        load: the location of its code: ``package.module`` with the functions of :class:`Job`, or
            ``package.module:NAME`` of an object that has them; imported when it runs.
        deletes: it deletes objects: it only plans unless ``--apply`` is given.
        reads_only: it never changes anything: by hand it has no lease, no ``--apply`` and no ``--dry-run``. A
            supervisor takes its lease, so that of several one runs it.
        after: jobs that ``maintain`` and the supervisor run before it on the same table, if both are due.
        in_maintain: ``maintain`` runs it, at its place by ``after``; a job that says nothing is not run by it.
        by_hand: an operator runs it: it has no key in configuration files.
        skip_if_blocked: ``maintain`` skips it while a part of the table is blocked: it deletes revisions that a restore
            may need.
        skip_if_unchanged: what it does depends on the table alone, and not on the time, on holds or on files that no
            commit refers to: the supervisor skips a scheduled run while nothing was written to the table since before
            the last run, if that succeeded and published nothing.
        enabled: the supervisor runs it on every table to which it applies, without an entry in the configuration.
        debt: how its metrics show what its next run costs.
        work: the metric of how much a run has to do, in the unit of :func:`memwal_ops.core.outlook.rows_done`; None:
            that of its debt, or there is none.
        saves: what a run saves, for the order of due jobs.
        has_dates: what it does must be done by a date: no budget defers it.
        objectives: by objective of a table, the backlog metric that a run lowers.
        named_options: options of a supervisor's runs, where the configuration names the job and gives no others.
        unnamed_options: the same, where the configuration does not name the job at all.
        low_recall_options: the same of a run after a verification that found the recall of an index to have fallen,
            unless the configuration has them; they let it train indexes anew.
        hung_after: a run is killed after that long without any progress.
        from_export: it also reads a table from an export: its command has ``--from FILE``.
        uri_from: the option that names a file with the key ``uri``: its command then needs no other URI.
        help: the help of its command: what it does, what it is safe to run concurrently with, exit codes, two
            examples; paragraphs.
        pages: the URL of a page for each reason of its package's own errors. These are subclasses of
            :class:`memwal_ops.errors.MemwalOpsError` with an exit code of 70 to 99.
        layouts: the layouts of tables to which it applies, by the names that its format gives them; empty: all.
        load_by_layout: the location of its code for a layout, where that is not ``load``.
        command: None: a command ``name`` is generated from this spec. Otherwise none is: the name of the package's own
            command, or empty.
    """

    name: str
    summary: str
    options: type[Options]
    load: str
    pool: Pool = "build"
    deletes: bool = False
    reads_only: bool = False
    after: frozenset[str] = frozenset()
    in_maintain: bool = False
    by_hand: bool = False
    skip_if_blocked: bool = False
    skip_if_unchanged: bool = False
    enabled: bool = False
    every: timedelta | None = None
    when: str | None = None
    debt: DebtSpec | None = None
    work: str | None = None
    saves: tuple[Saving, ...] = ()
    has_dates: bool = False
    objectives: Mapping[Objective, str] = field(default_factory=dict)
    named_options: Mapping[str, Any] = field(default_factory=dict)
    unnamed_options: Mapping[str, Any] = field(default_factory=dict)
    low_recall_options: Mapping[str, Any] = field(default_factory=dict)
    hung_after: timedelta = timedelta(minutes=30)
    metrics: Mapping[str, MetricSpec] = field(default_factory=dict)
    from_export: bool = False
    uri_from: str | None = None
    help: str = ""
    pages: Mapping[str, str] = field(default_factory=dict)
    layouts: frozenset[str] = frozenset()
    load_by_layout: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None

    def acts(self, *, apply: bool | None) -> bool:
        """Whether a run acts: as ``apply`` asks; None: a job that deletes only plans, any other one acts."""
        return not self.deletes if apply is None else apply

    def applies_to(self, layout: str) -> bool:
        """Whether it applies to tables of a layout."""
        return not self.layouts or layout in self.layouts

    def for_layout(self, layout: str) -> JobSpec:
        """The spec with the code for tables of a layout."""
        return replace(self, load=self.load_by_layout[layout]) if layout in self.load_by_layout else self

    def debts(self, figures: Mapping[str, float]) -> dict[str, float]:
        """What a run can save, by kind, by backlog figures."""
        return {save.kind: figures[save.metric] for save in self.saves if figures.get(save.metric)}

    def work_due(self, figures: Mapping[str, float]) -> float | None:
        """How much a run would have to do, by backlog figures; None: they do not show it."""
        name = self.work or (None if self.debt is None else self.debt.rows)
        return None if name is None else figures.get(name)

    @cached_property
    def job(self) -> Job[Any, Any]:
        """The code, imported at the first use.

        Raises:
            ImportError, AttributeError: it does not exist; the registry turns that into ``JobPluginError``.
        """
        module_name, _, attribute = self.load.partition(":")
        module: Any = importlib.import_module(module_name)
        return module if not attribute else getattr(module, attribute)  # type: ignore[no-any-return]

    @cached_property
    def backlog_metrics(self) -> Mapping[str, MetricSpec]:
        """The metrics that are read by polling."""
        return {name: metric for name, metric in self.metrics.items() if metric.kind == "backlog"}


read_only_job = partial(JobSpec, reads_only=True, by_hand=True)
"""The spec of a job that an operator runs to read a table; neither ``maintain`` nor the supervisor runs it."""
verify_job = partial(
    JobSpec,
    name="verify",
    reads_only=True,
    skip_if_unchanged=True,
    enabled=True,
    every=timedelta(days=1),
    named_options={"answers": True},
    unnamed_options={"answers_only": True},
)
"""The spec of a job that verifies a table. Once a day the supervisor asks its indexes; where its configuration names
the job, it verifies the whole table as well."""
repair_job = partial(
    JobSpec,
    name="repair",
    summary="Print what has a provably safe fix; with --apply, fix it.",
    deletes=True,
    every=timedelta(days=1),
    metrics={"repaired": MetricSpec("count", "Fixes that repair made.", "run", "repaired")},
)
"""The spec of the job that verifies a table, and fixes what it finds."""
maintain_job = partial(JobSpec, name="maintain", load="memwal_ops.core.maintain:JOB", every=timedelta(hours=1))
"""The spec of the job that runs the others of a format in their order."""


@dataclass(frozen=True)
class InitSpec:
    """The description of ``memwal-ops init URI``, which prepares tables of a format for its jobs.

    Attributes:
        load: ``package.module:function``, called with location, store, options and ``dry_run``. It leaves a table
            unchanged that already matches the options, refuses one that differs, and can be killed and run again.
    """

    summary: str
    options: type[Options]
    load: str

    @property
    def name(self) -> str:
        """The command."""
        return "init"

    @cached_property
    def function(self) -> Callable[..., Report]:
        """The code, imported at the first use."""
        module, _, attribute = self.load.partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]  # a module's attribute
