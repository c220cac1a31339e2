"""What jobs say of themselves, checked: a package may be anybody's, and its faults must be told as its own."""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import JobPluginError, MemwalOpsError
from memwal_ops.jobs.registry import package_of
from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.jobs.api import Job


def unexpected(error: Exception, job: str | None) -> MemwalOpsError:
    """What a job raised that is none of our errors: a bug, and whose."""
    package = None if job is None else package_of(job)
    said = redact(f"{type(error).__name__}: {error}")
    if package is None:
        return MemwalOpsError(f"Unexpected {said}")
    return JobPluginError(f"The job {job!r} of {package} raised {said}")


def checked_figures(job: Job, figures: object) -> dict[str, float]:
    """The backlog figures that a look gave.

    Raises:
        JobPluginError: they are no mapping of declared names to numbers.
    """
    if not hasattr(figures, "items"):
        raise _fault(job, f"its look gave {figures!r:.80}, and no mapping")
    for name, value in figures.items():
        if name not in job.figures:
            raise _fault(job, f"its look gave the figure {name!r:.80}, which it does not declare")
        if not _is_amount(value):
            raise _fault(job, f"its look gave {value!r:.80} for {name}, and no number")
    return {name: _plain(value) for name, value in figures.items()}


def checked_report(job: Job, report: Any) -> tuple[int, str, dict[str, Any]]:
    """Exit code, decision and document of a report.

    Raises:
        JobPluginError: it lacks one of them.
    """
    code, decision, told = job.exit_code(report), report.decision, report.to_json()
    if type(code) is not int or not 0 <= code <= 255:  # noqa: PLR2004 - what a process can exit with
        raise _fault(job, f"its exit code is {code!r:.80}")
    if not isinstance(decision, str):
        raise _fault(job, f"its decision is {decision!r:.80}, and no word")
    if not isinstance(told, dict):
        raise _fault(job, f"its report is {told!r:.80}, and no document")
    # Strict JSON, as others will read it: no NaN.
    document: dict[str, Any] = json.loads(json.dumps(told, default=str), parse_constant=lambda _: None)
    return code, decision, document


def amounts(figures: Mapping[Any, Any]) -> dict[str, float]:
    """Those that are numbers from 0 upwards: metrics are made of them."""
    return {str(name): _plain(value) for name, value in figures.items() if _is_amount(value) and value >= 0}


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Those that are."""
    return tuple(value for value in values if type(value) is int)


def _is_amount(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _plain(value: Any) -> float:
    return int(value) if isinstance(value, Integral) else float(value)


def _fault(job: Job, what: str) -> JobPluginError:
    package = package_of(job.name) or "memwal_ops"
    return JobPluginError(f"The job {job.name!r} of {package} does not keep to the interface: {what}.")
