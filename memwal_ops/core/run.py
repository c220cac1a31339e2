"""Run one job on one table: the command line, workers, Airflow and notebooks all do it by :class:`Run`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeVar

from memwal_ops import errors
from memwal_ops.core.anchors import Unguarded
from memwal_ops.core.context import RunContext, StopRequested, recording
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import OptionError, Options, boolean, describe
from memwal_ops.core.protocols import ExplainsJobs, Table
from memwal_ops.core.registry import format_errors, open_table, package_of
from memwal_ops.core.report import Report, bounded
from memwal_ops.core.tracing import performed
from memwal_ops.core.usage import Measurement, achieved_by, rows_done
from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact


@dataclass(slots=True)
class Run:
    """One run of a job on a table: :meth:`perform` opens the table, runs the job and records how that ended.

    The command line, workers, Airflow and notebooks run every job by it, and ``maintain`` its steps.

    Attributes:
        choose: gives the job's options, and whether to act (:meth:`JobSpec.acts`), once its spec is known.
        context: receives progress and stop requests; its guard is the one of a table that is opened here.
        recorder: called with the run when it has ended, unless the table was not opened.
        options: of the job's own class; None: they were not read.
        report: that of the job; None: the run failed, or was stopped.
        used: what it used, see :class:`memwal_ops.core.usage.Measurement`; measured for a recorder.
    """

    place: str | os.PathLike[str] | Table
    job: str
    choose: Callable[[JobSpec], tuple[Options, bool | None]]
    branch: str | None = None
    storage_options: Mapping[str, str] | None = None
    context: RunContext = field(default_factory=RunContext)
    recorder: Callable[[Run], None] | None = None
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    acts: bool = False
    options: Options | None = None
    report: Report | None = None
    error: errors.MemwalOpsError | StopRequested | None = None
    used: Mapping[str, Any] = field(default_factory=dict)
    _table: Table | None = None
    _spec: JobSpec | None = None

    @property
    def table(self) -> Table:
        """The table as it was opened."""
        return _known(self._table, "The table is not open.")

    @property
    def spec(self) -> JobSpec:
        """The job, as the table has it."""
        return _known(self._spec, "The job does not apply to the table.")

    @property
    def is_refused(self) -> bool:
        """Whether the table was opened, and the job does not apply to it."""
        return self._table is not None and self._spec is None

    def perform(self) -> Report:
        """Open the table, ``plan`` or ``apply`` the job, and record the end.

        A run that acts records what it publishes, and in the lease of its job that it ran by hand.

        Raises:
            JobPluginError: the job is of another package and raised an error of another kind.
            MemwalOpsError: the table cannot be opened; the job does not apply to it; it was refused or failed, by kind:
                what it had published stays.
            StopRequested: the context's listener stopped it.
        """
        measurement = None if self.recorder is None else Measurement()
        try:
            self.report = report = self._perform()
        except (errors.MemwalOpsError, StopRequested) as error:
            self.error = error
            raise
        finally:
            has_ended = self.report is not None or self.error is not None
            if self.recorder is not None and measurement is not None and self._table is not None and has_ended:
                self.used = measurement.used(self._table.location)
                self.recorder(self)
        return report

    def _perform(self) -> Report:
        context = self.context
        if isinstance(self.place, str | os.PathLike):
            with context.phase("open"):
                table = open_table(self.place, self.storage_options, branch=self.branch, job=self.job)
            self._table = table if isinstance(context.guard, Unguarded) else table.with_guard(context.guard)
        elif self.storage_options is not None or self.branch is not None:
            raise errors.InvalidUsageError(
                "storage_options and branch are valid with a URI only; this table is already open."
            )
        else:
            self._table = self.place
        table = self._table
        self._spec = spec = applicable(table, self.job)
        with plugin_errors(spec):
            self.options, apply = self.choose(spec)
        self.acts = spec.acts(apply=apply) and not spec.reads_only
        of = spec.name, table.location, table.format.name, context.figures, context.revisions
        with performed(*of, act=self.acts) as reported:
            with format_errors(table.format), plugin_errors(spec):
                if self.acts:
                    with recording(context.revisions):
                        report = spec.job.apply(table, self.options, context)
                    context.record(table.store, spec.name, report)
                else:
                    report = spec.job.plan(table, self.options, context)
            reported(report)
            return report

    def record(self) -> dict[str, Any]:
        """The record of an ended run: what a run history keeps of it.

        Raises ``JobPluginError``: the report is of another package, and none.
        """
        sums = {
            "figures": amounts(self.context.figures),
            "phases": amounts(self.context.phases),
            "versions": whole_numbers(self.context.revisions),
            "used": self.used,
        }
        if isinstance(self.error, StopRequested):
            return {"outcome": "stopped", "decision": "stopped", **sums}
        if self.error is not None:
            outcome = "lost" if isinstance(self.error, errors.LeaseLostError) else "failed"
            return {"outcome": outcome, **failure(self.error), **sums}
        with plugin_errors(self.spec):
            code, decision, document = checked_report(self.spec, self.report)
        return {
            "outcome": "partial" if code else "succeeded",
            "exit_code": code,
            "decision": decision,
            "report": bounded(document),
            **sums,
            "used": {**self.used, "work": rows_done(self.job, document)},
            "achieved": achieved_by(self.job, document),
        }


def run_job(
    table: str | os.PathLike[str] | Table,
    job: str,
    options: Options | Mapping[str, Any] | None = None,
    *,
    apply: bool | None = None,
    branch: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    context: RunContext | None = None,
    **values: Any,
) -> Report:
    """Run a job on a table: ``run_job("s3://bucket/orders.lance", "merge", max_bytes="1GiB")``.

    Args:
        table: a URI, or an open table.
        job: the job's name: ``merge``, ``catchup``, ``gc`` ...
        options: the job's options, as its own class or a base of it that all formats share, or by name, as under
            ``options`` in a configuration file; or give them by name in ``values``.
        apply: whether to act, or to plan only. None: a job that deletes plans, any other job acts. True for
            ``maintain`` is its ``--apply``: the steps that delete act, too.
        storage_options: as :func:`open_table` takes them; with a URI only.
        **values: options by name; strings are parsed as on the command line (``"1GiB"``, ``"15m"``).

    Returns:
        The job's report: ``decision``, ``exit_code``, ``to_json()`` and ``describe()``.

    Raises:
        InvalidUsageError: the job does not apply to the table, or an option is invalid; ``apply``, or an option that
            is a flag, is neither True nor False.
        JobPluginError: the job is of another package and raised an error of another kind.
        MemwalOpsError: the job was refused or failed, by kind; what it had published stays.
    """
    choose = partial(chosen, options=options, values=values, apply=apply)
    return Run(table, job, choose, branch, storage_options, context or RunContext()).perform()


def chosen(
    spec: JobSpec,
    *,
    options: Options | Mapping[str, Any] | None,
    values: Mapping[str, Any] = MappingProxyType({}),
    apply: bool | None,
) -> tuple[Options, bool | None]:
    """What :func:`run_job` makes of its arguments once the job is known: options of its own class, and ``apply``.

    Raises ``InvalidUsageError``: an option is invalid, or ``apply`` is.
    """
    boolean("apply", apply, optional=True)
    if options is not None and values:
        raise errors.InvalidUsageError(
            f"Give the options of {spec.name} as an object or by name, not both.", remedy=_names(spec)
        )
    own = _read(spec, values if options is None else options)
    if apply and not spec.deletes and any(option.name == "apply" for option in fields(own)):
        own = replace(own, apply=True)  # type: ignore[call-arg]  # checked: it is a field
    return own, apply


_KnownT = TypeVar("_KnownT")


def _known(value: _KnownT | None, otherwise: str) -> _KnownT:
    if value is None:
        raise LookupError(otherwise)
    return value


def failure(error: errors.MemwalOpsError) -> dict[str, Any]:
    """What a record has of an error, without secrets."""
    return {
        "exit_code": error.exit_code or errors.MemwalOpsError.exit_code,
        "reason": error.reason,
        "message": redact(str(error)),
        "remedy": redact(error.remedy),
    }


def checked_report(job: JobSpec, report: Any) -> tuple[int, str, dict[str, Any]]:
    """Return exit code, decision and document of a report.

    Raises ``JobPluginError``: one of them is missing or invalid.
    """
    code, decision, raw = report.exit_code, report.decision, report.to_json()
    if type(code) is not int or not 0 <= code <= 255:  # noqa: PLR2004 - what a process can exit with
        raise interface_error(job, f"its exit code is {code!r:.80}")
    if not isinstance(decision, str):
        raise interface_error(job, f"its decision is {decision!r:.80}, not a string")
    if not isinstance(raw, dict):
        raise interface_error(job, f"its report is {raw!r:.80}, not a dictionary")
    # Strict JSON for its readers: no NaN.
    document: dict[str, Any] = json.loads(json.dumps(raw, default=str), parse_constant=lambda _: None)
    return code, str(decision), document


def interface_error(job: JobSpec, what: str) -> errors.JobPluginError:
    """The error of a job that violates the interface."""
    package = package_of(job) or "memwal_ops"
    return errors.JobPluginError(f"The job {job.name!r} of {package} violates the job interface: {what}.")


def amounts(figures: Mapping[Any, Any]) -> dict[str, float]:
    """Return the figures that are numbers of at least 0, for metrics."""
    return {str(name): plain(value) for name, value in figures.items() if is_amount(value) and value >= 0}


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return the values that are integers."""
    return tuple(value for value in values if type(value) is int)


def is_amount(value: object) -> bool:
    """Whether a figure is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def plain(value: Any) -> float:
    """A figure as a number of Python's own."""
    return int(value) if isinstance(value, Integral) else float(value)


def _read(spec: JobSpec, given: Options | Mapping[str, Any]) -> Options:
    if not isinstance(given, Mapping):
        return _as_own(spec, given)
    try:
        return spec.options.read(given)
    except OptionError as error:
        if "remedy" not in vars(error):
            error.remedy = _names(spec)  # the default remedy, --help, exists on the command line only
        raise


def _names(spec: JobSpec) -> str:
    listed = ", ".join(option.name for option in describe(spec.options)) or "none"
    return f"The options of {spec.name}: {listed}."


@contextmanager
def plugin_errors(spec: JobSpec) -> Iterator[None]:
    """Turn an unexpected exception of another package's job into an error that names the package.

    Raises:
        JobPluginError: with the job and its package. An exception of a built-in job is a bug, and passes unchanged.
    """
    try:
        yield
    except errors.MemwalOpsError:
        raise
    except (Exception, SystemExit) as error:
        fault = unexpected_error(error, spec)
        if not isinstance(fault, errors.JobPluginError):
            raise
        get_logger(__name__).exception("unexpected_error", job=spec.name)
        raise fault from error


def unexpected_error(error: BaseException, spec: JobSpec | None) -> errors.MemwalOpsError:
    """The error for an unexpected exception: a bug of memwal-ops, or of the package that registers the job."""
    package = None if spec is None else package_of(spec)
    cause = redact(f"{type(error).__name__}: {error}")
    if spec is None or package is None:
        return errors.MemwalOpsError(f"Unexpected {cause}")
    return errors.JobPluginError(f"The job {spec.name!r} of {package} raised {cause}")


def _as_own(spec: JobSpec, options: Options) -> Options:
    """Options as the job's own class: values of a base class, and defaults for all others."""
    own, given = spec.options, type(options)
    if isinstance(options, own):
        return options
    if given is not Options and issubclass(own, given):
        return own(**{field.name: getattr(options, field.name) for field in fields(options)})
    names = [own.__name__, given.__name__]
    if names[0] == names[1]:
        names = [f"{options_class.__module__}.{options_class.__name__}" for options_class in (own, given)]
    raise errors.InvalidUsageError(f"The options of {spec.name} are {names[0]}, not {names[1]}.")


def applicable(table: Table, job: str) -> JobSpec:
    """The spec of a job that applies to a table. Raises as :func:`why_not`."""
    if job not in table.jobs:
        raise why_not(table, job)
    return table.jobs[job]


def why_not(table: Table, job: str) -> errors.MemwalOpsError:
    """Why a job does not apply: the table's own reason (:class:`ExplainsJobs`), or ``InvalidUsageError``.

    The remedy lists the jobs that do.
    """
    own = table.why_not if isinstance(table, ExplainsJobs) else lambda _: None
    listed = ", ".join(sorted(name for name in table.jobs if own(name) is None))
    if (why := own(job)) is not None:
        why.remedy = f"{why.remedy} The jobs that apply: {listed}."
        return why
    what = f"{job} does not apply to {table.location.address}, a {table.format.name} table."
    return errors.InvalidUsageError(what, remedy=f"The jobs that do: {listed}.")
