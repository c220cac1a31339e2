"""What a task does once it runs. Loads pylance: import it in the task's process and not before."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from memwal_ops.airflow import endings
from memwal_ops.core.table import open_table
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.jobs.api import Job, Run
from memwal_ops.jobs.registry import load_jobs
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.job_options import in_config_words, make_options
from memwal_ops.supervisor.triggers import TriggerError, parse_trigger

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run: the report's document, where there is one, and how it ended, if not well.

    ``trace`` is that of an error which nobody expected, without secrets.
    """

    document: dict[str, Any] | None
    ending: endings.Ending | None
    trace: str | None = None


def run_job(
    name: str, uri: str, options: Mapping[str, Any], *, apply: bool | None, storage: Mapping[str, str]
) -> Outcome:
    """Run a registered job on a table. Raises nothing: whatever happens is told in the outcome.

    Args:
        name: the job.
        uri: the table.
        options: by the names that configuration files of the supervisor have below ``options``.
        apply: do it, or plan only; None: a job that deletes plans only, any other does it.
        storage: storage options, secrets included.
    """
    try:
        job = _job(name)
        wanted = _options(job, options)
        table = open_table(uri, storage)
        act = not job.deletes if apply is None else apply
        report: Any = job.apply(table, wanted, Run()) if act else job.plan(table, wanted)
        # Exactly what --json prints: what XCom stores must be what JSON can say.
        document = json.loads(json.dumps(report.to_json()))
        return Outcome(document, endings.of_report(job.exit_code(report), document))
    except Exception as error:  # noqa: BLE001 - the caller turns it into the end of a task
        return _failed(error)


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at a table's backlog found."""

    fires: bool
    figures: dict[str, float]
    ending: endings.Ending | None = None
    trace: str | None = None


def look(name: str, uri: str, when: str | None, *, storage: Mapping[str, str]) -> Look:
    """Read the figures of a job's backlog and evaluate a trigger on them. Reads only, and raises nothing.

    Args:
        name: the job whose figures are meant.
        uri: the table.
        when: a trigger as in the supervisor's configuration; None: the job's own.
        storage: storage options, secrets included.
    """
    try:
        job = _job(name)
        if job.look is None:
            raise InvalidUsageError(f"The job {name!r} tells no backlog.")
        trigger = _trigger(job, when)
        figures = dict(job.look(open_table(uri, storage)))
        return Look(trigger.holds(figures), figures)
    except Exception as error:  # noqa: BLE001 - the caller turns it into the end of a task
        failed = _failed(error)
        return Look(fires=False, figures={}, ending=failed.ending, trace=failed.trace)


def _failed(error: Exception) -> Outcome:
    expected = isinstance(error, MemwalOpsError)
    return Outcome(None, endings.of_error(error), None if expected else redact(traceback.format_exc()))


def _job(name: str) -> Job:
    jobs = load_jobs()
    if name not in jobs:
        raise InvalidUsageError(f"There is no job {name!r}; there are {', '.join(sorted(jobs))}.")
    return jobs[name]


def _options(job: Job, given: Mapping[str, Any]) -> Any:
    try:
        return make_options(job.options, given)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise InvalidUsageError(f"The options of {job.name} cannot be used: {told}.") from None
    except InvalidUsageError as error:
        raise InvalidUsageError(in_config_words(str(error)), remedy=in_config_words(error.remedy)) from None


def _trigger(job: Job, when: str | None) -> Any:
    text = job.when if when is None else when
    if text is None:
        raise InvalidUsageError(f"The job {job.name!r} has no trigger of its own; give `when`.")
    try:
        return parse_trigger(text, job.figures)
    except TriggerError as error:
        raise InvalidUsageError(f"when={text!r} is no trigger: {error}.") from None
