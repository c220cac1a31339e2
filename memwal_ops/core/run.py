"""Run one job on one table; used by the command line, workers, Airflow and notebooks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.context import RunContext
from memwal_ops.core.options import OptionError, Options, boolean, describe
from memwal_ops.core.protocols import ExplainsJobs
from memwal_ops.core.published import recording
from memwal_ops.core.registry import format_errors, open_table, package_of
from memwal_ops.core.tracing import performed
from memwal_ops.errors import InvalidUsageError, JobPluginError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Table
    from memwal_ops.core.report import Report


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
        branch: a branch of the table; with a URI only.
        storage_options: as :func:`open_table` takes them; with a URI only.
        context: receives progress and stop requests.
        **values: options by name; strings are parsed as on the command line (``"1GiB"``, ``"15m"``).

    Returns:
        The job's report: ``decision``, ``exit_code``, ``to_json()`` and ``describe()``.

    Raises:
        InvalidUsageError: the job does not apply to the table, or an option is invalid; ``apply``, or an option that
            is a flag, is neither True nor False.
        JobPluginError: the job is of another package and raised an error of another kind.
        MemwalOpsError: the job was refused or failed, by kind; what it had published stays.
    """
    boolean("apply", apply, optional=True)
    opened: Table
    if isinstance(table, str | os.PathLike):
        opened = open_table(table, storage_options, branch=branch, job=job)
    elif storage_options is not None or branch is not None:
        raise InvalidUsageError("storage_options and branch are valid with a URI only; this table is already open.")
    else:
        opened = table
    spec = applicable(opened, job)
    if options is not None and values:
        raise InvalidUsageError(f"Give the options of {job} as an object or by name, not both.", remedy=_names(spec))
    with plugin_errors(spec):
        chosen = _read(spec, values if options is None else options)
        if apply and not spec.deletes and any(field.name == "apply" for field in fields(chosen)):
            chosen = replace(chosen, apply=True)  # type: ignore[call-arg]  # checked: it is a field
        return perform(spec, opened, chosen, context or RunContext(), act=spec.acts(apply=apply))


def perform(spec: JobSpec, table: Table, options: Options, context: RunContext, *, act: bool) -> Report:
    """Run a job's code on an open table: ``plan``, or ``apply``, which records what it publishes and that it ran.

    Args:
        spec: the job, as the table has it.
        table: the table.
        options: of the job's own class.
        context: receives progress and stop requests.
        act: what :meth:`JobSpec.acts` returns; a job that only reads plans in any case.

    Raises:
        JobPluginError: the job is of another package and raised an error of another kind.
        MemwalOpsError: the job was refused or failed, by kind; what it had published stays.
    """
    act = act and not spec.reads_only
    of = spec.name, table.location, table.format.name, context.figures, context.revisions
    with performed(*of, act=act) as reported:
        report = _perform(spec, table, options, context, act=act)
        reported(report)
        return report


def _perform(spec: JobSpec, table: Table, options: Options, context: RunContext, *, act: bool) -> Report:
    with format_errors(table.format), plugin_errors(spec):
        if not act:
            return spec.job.plan(table, options, context)
        with recording(context.revisions):
            report = spec.job.apply(table, options, context)
        context.record(table.store, spec.name, report)
        return report


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
    except MemwalOpsError:
        raise
    except (Exception, SystemExit) as error:
        fault = unexpected_error(error, spec)
        if not isinstance(fault, JobPluginError):
            raise
        get_logger(__name__).exception("unexpected_error", job=spec.name)
        raise fault from error


def unexpected_error(error: BaseException, spec: JobSpec | None) -> MemwalOpsError:
    """The error for an unexpected exception: a bug of memwal-ops, or of the package that registers the job."""
    package = None if spec is None else package_of(spec)
    cause = redact(f"{type(error).__name__}: {error}")
    if spec is None or package is None:
        return MemwalOpsError(f"Unexpected {cause}")
    return JobPluginError(f"The job {spec.name!r} of {package} raised {cause}")


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
    raise InvalidUsageError(f"The options of {spec.name} are {names[0]}, not {names[1]}.")


def applicable(table: Table, job: str) -> JobSpec:
    """The spec of a job that applies to a table.

    Raises:
        InvalidUsageError: it does not apply; the remedy lists the jobs that do.
        MemwalOpsError: the table itself has a reason why it does not (:class:`ExplainsJobs`).
    """
    spec = table.jobs.get(job)
    if spec is None:
        listed = ", ".join(sorted(table.jobs))
        why = table.why_not(job) if isinstance(table, ExplainsJobs) else None
        if why is not None:
            why.remedy = f"{why.remedy} The jobs that apply: {listed}."
            raise why
        raise InvalidUsageError(
            f"{job} does not apply to {table.location.address}, a {table.format.name} table.",
            remedy=f"The jobs that do: {listed}.",
        )
    return spec
