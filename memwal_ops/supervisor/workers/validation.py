"""Validate what jobs return, so that a fault of another package's job is reported as a fault of that package."""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from memwal_ops.core.registry import package_of
from memwal_ops.errors import JobPluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.job import JobSpec


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
