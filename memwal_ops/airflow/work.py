"""Run a job, or poll a backlog, inside a task. Loads pylance: import it in the task's process and not before."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from memwal_ops.airflow import failures
from memwal_ops.core.job import JobSpec
from memwal_ops.core.registry import open_table
from memwal_ops.core.run import Run, applicable, chosen, plugin_errors
from memwal_ops.core.tracing import parent
from memwal_ops.core.triggers import TriggerError, parse_trigger
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.storage.options import redact


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: the report's document, if there is one, and the failure, if it failed.

    ``trace`` is the traceback of an unexpected error, without secrets.
    """

    document: dict[str, Any] | None
    failure: failures.Failure | None
    trace: str | None = None


def run_job(
    name: str,
    uri: str,
    options: Mapping[str, Any],
    *,
    apply: bool | None,
    storage: Mapping[str, str],
    branch: str | None = None,
    trace: Mapping[str, str] | None = None,
) -> RunResult:
    """Run a registered job on a table. Raises nothing: the outcome has the failure.

    Args:
        options: the job's options, with the names that configuration files of the supervisor have below ``options``.
        apply: act, or plan only; None: a job that deletes plans only, any other acts.
        storage: storage options, secrets included.
        trace: the trace of the task, as W3C carries it.
    """
    try:
        run = Run(uri, name, partial(chosen, options=options, apply=apply), branch, storage)
        with parent(trace):
            report = run.perform()
        with plugin_errors(run.spec):
            # Exactly what --json prints: XCom stores only what JSON can represent.
            document = json.loads(json.dumps(report.to_json()))
            return RunResult(document, failures.from_report(report.exit_code, document, run.table.format.part_of))
    except Exception as error:  # noqa: BLE001 - the caller turns it into the end of a task
        return _failed(error)


@dataclass(frozen=True, slots=True)
class Poll:
    """The result of a backlog poll: the metrics, and whether the trigger fires; or the failure."""

    fires: bool
    figures: dict[str, float]
    failure: failures.Failure | None = None
    trace: str | None = None


def poll(name: str, uri: str, when: str | None, *, storage: Mapping[str, str], branch: str | None = None) -> Poll:
    """Read a job's backlog metrics and evaluate a trigger on them. Reads only, and raises nothing.

    ``when``: a trigger as in the supervisor's configuration; None: the job's own. ``storage``: storage options, secrets
    included.
    """
    try:
        table = open_table(uri, storage, branch=branch)
        job = applicable(table, name)
        if not job.backlog_metrics:
            raise InvalidUsageError(f"The job {name!r} has no backlog metrics.")
        trigger = _trigger(job, when)
        figures = dict(job.job.backlog(table))
        return Poll(trigger.is_met(figures), figures)
    except Exception as error:  # noqa: BLE001 - the caller turns it into the end of a task
        failed = _failed(error)
        return Poll(fires=False, figures={}, failure=failed.failure, trace=failed.trace)


def _failed(error: Exception) -> RunResult:
    expected = isinstance(error, MemwalOpsError)
    return RunResult(None, failures.from_error(error), None if expected else redact(traceback.format_exc()))


def _trigger(job: JobSpec, when: str | None) -> Any:
    text = job.when if when is None else when
    if text is None:
        raise InvalidUsageError(f"The job {job.name!r} has no trigger of its own; give `when`.")
    try:
        return parse_trigger(text, {name: metric.unit for name, metric in job.backlog_metrics.items()})
    except TriggerError as error:
        raise InvalidUsageError(f"when={text!r} is not a valid trigger expression: {error}.") from None
