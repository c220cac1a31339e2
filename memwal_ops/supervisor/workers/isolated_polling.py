"""Poll a table from a command; jobs of other packages run in a child process, so that a crash ends only that."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

from memwal_ops.core.registry import package_of
from memwal_ops.errors import JobPluginError, MemwalOpsError
from memwal_ops.supervisor.state.outcomes import describe_exit
from memwal_ops.supervisor.workers.polling import poll_table
from memwal_ops.supervisor.workers.pools import WorkerProcess
from memwal_ops.supervisor.workers.protocol import PollRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Table


def poll_isolated(
    table: Table,
    storage_options: Mapping[str, str],
    jobs: Iterable[JobSpec],
    options: Mapping[str, Mapping[str, Any]],
) -> tuple[Mapping[str, float], list[MemwalOpsError]]:
    """Return the backlog figures of jobs, and the errors, as :func:`poll_table` does.

    A job of another package that ended this process would end the command with its own exit code, perhaps 0, which
    monitoring takes for healthy.
    """
    jobs = [*jobs]
    packages = {job.name: package for job in jobs if (package := package_of(job)) is not None}
    own_figures, faults = poll_table(table, [job for job in jobs if job.name not in packages], options)
    figures = dict(own_figures)
    for job in jobs:
        if job.name not in packages or not job.backlog_metrics:
            continue
        request = PollRequest(1, table.location.address, storage_options, (job.name,), options)
        job_figures, fault = _poll_in_worker(job, packages[job.name], request)
        figures |= job_figures
        faults += [] if fault is None else [fault]
    return figures, faults


def _poll_in_worker(
    job: JobSpec, package: str, request: PollRequest
) -> tuple[Mapping[str, float], MemwalOpsError | None]:
    messages: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
    worker = WorkerProcess("watch", lambda _, message: messages.put(message), "ERROR")
    try:
        worker.send(request)
        while (message := messages.get()) is not None and message["type"] != "done":
            pass
    finally:
        worker.quit()
    if message is None:
        why = describe_exit(worker.exit_status)
        return {}, JobPluginError(f"The job {job.name!r} of {package} ended the process of its poll ({why}).")
    if message["outcome"] == "succeeded":
        return message["figures"], None
    return message["figures"], _error_of(message)


def _error_of(message: Mapping[str, Any]) -> MemwalOpsError:
    """Return the error in a worker's result."""
    error = JobPluginError(str(message["message"]), remedy=str(message["remedy"]))
    error.exit_code, error.reason = message["exit_code"], message["reason"]
    return error
