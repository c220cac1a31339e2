"""Poll the backlog figures of a table's jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from memwal_ops.core.polling import one_poll
from memwal_ops.core.run import unexpected
from memwal_ops.errors import MemwalOpsError
from memwal_ops.supervisor.workers.validation import checked_figures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Table


def poll_table(table: Table, jobs: Iterable[JobSpec]) -> tuple[Mapping[str, float], list[MemwalOpsError]]:
    """Return the figures of all jobs, and the errors: the failure of one job does not hide the figures of others."""
    figures: dict[str, float] = {}
    faults: list[MemwalOpsError] = []
    with one_poll():
        for job in jobs:
            try:
                if job.backlog_metrics:
                    figures |= checked_figures(job, job.job.backlog(table))
            except MemwalOpsError as error:
                faults.append(error)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - code of another package, or a bug of ours
                structlog.get_logger(__name__).exception("unexpected_error", job=job.name)
                faults.append(unexpected(error, job))
    return figures, faults
