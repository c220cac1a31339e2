"""Poll the backlog figures of a table's jobs.

Validate what jobs return, so that a fault of another package's job is reported as a fault of that package.
"""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import structlog

from memwal_ops.core.protocols import DetectsChanges
from memwal_ops.core.registry import formats, location_of, package_of
from memwal_ops.core.run import unexpected_error
from memwal_ops.core.table_history import poll_cache
from memwal_ops.errors import JobPluginError, MemwalOpsError
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Table


def checked_figures(job: JobSpec, figures: object) -> dict[str, float]:
    """Return the backlog figures of a job.

    Raises:
        JobPluginError: they are not a mapping of declared names to numbers.
    """
    if not hasattr(figures, "items"):
        raise _fault(job, f"its backlog is {figures!r:.80}, not a mapping")
    for name, value in figures.items():
        if name not in job.backlog_metrics:
            raise _fault(job, f"its backlog has the figure {name!r:.80}, which it does not declare")
        if not _is_amount(value):
            raise _fault(job, f"its backlog has {value!r:.80} for {name}, not a number")
    return {name: _plain(value) for name, value in figures.items()}


def checked_report(job: JobSpec, report: Any) -> tuple[int, str, dict[str, Any]]:
    """Return exit code, decision and document of a report.

    Raises:
        JobPluginError: one of them is missing or invalid.
    """
    code, decision, raw = report.exit_code, report.decision, report.to_json()
    if type(code) is not int or not 0 <= code <= 255:  # noqa: PLR2004 - what a process can exit with
        raise _fault(job, f"its exit code is {code!r:.80}")
    if not isinstance(decision, str):
        raise _fault(job, f"its decision is {decision!r:.80}, not a string")
    if not isinstance(raw, dict):
        raise _fault(job, f"its report is {raw!r:.80}, not a dictionary")
    # Strict JSON for its readers: no NaN.
    document: dict[str, Any] = json.loads(json.dumps(raw, default=str), parse_constant=lambda _: None)
    return code, str(decision), document


def amounts(figures: Mapping[Any, Any]) -> dict[str, float]:
    """Return the figures that are numbers of at least 0, for metrics."""
    return {str(name): _plain(value) for name, value in figures.items() if _is_amount(value) and value >= 0}


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return the values that are integers."""
    return tuple(value for value in values if type(value) is int)


def _is_amount(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _plain(value: Any) -> float:
    return int(value) if isinstance(value, Integral) else float(value)


def _fault(job: JobSpec, what: str) -> JobPluginError:
    package = package_of(job) or "memwal_ops"
    return JobPluginError(f"The job {job.name!r} of {package} violates the job interface: {what}.")


_OURS = "memwal_ops."


def poll_table(
    table: Table, jobs: Iterable[JobSpec], options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Mapping[str, float], list[MemwalOpsError]]:
    """Return the figures of all jobs, and the errors: the failure of one job does not hide the figures of others.

    Args:
        options: by job, the options of its runs, by name.
    """
    figures: dict[str, float] = {}
    faults: list[MemwalOpsError] = []
    with poll_cache(options):
        for job in jobs:
            try:
                if job.backlog_metrics:
                    figures |= checked_figures(job, job.job.backlog(table))
            except MemwalOpsError as error:
                faults.append(error)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - code of another package, or a bug of ours
                structlog.get_logger(__name__).exception("unexpected_error", job=job.name)
                faults.append(unexpected_error(error, job))
    return figures, faults


def fingerprint_of(table: Table, jobs: Iterable[JobSpec]) -> str | None:
    """Return the fingerprint for :func:`is_unchanged`, taken before the figures of ``jobs`` are read.

    None if there is none: the format has no fingerprints, or a job of another package may read anything else.
    """
    kind: object = table.format
    foreign = any(job.backlog_metrics and not job.load.startswith(_OURS) for job in jobs)
    if foreign or not isinstance(kind, DetectsChanges):
        return None
    try:
        found = kind.fingerprint(table)
    except MemwalOpsError:
        return None  # the poll itself reports the error
    return None if found is None else f"{table.format.name} {found}"


def is_unchanged(uri: str, storage_options: Mapping[str, str], fingerprint: str) -> bool:
    """Return whether a table still has a fingerprint of :func:`fingerprint_of`; it is not opened. False if unknown."""
    name, _, known = fingerprint.partition(" ")
    kind: object = formats().get(name)
    if not isinstance(kind, DetectsChanges):
        return False
    try:
        return kind.is_unchanged(open_store(location_of(uri, storage_options)), known)
    except MemwalOpsError:
        return False
