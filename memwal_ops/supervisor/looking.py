"""One look at a table: the backlog figures of its jobs, and what could not be read of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from memwal_ops.errors import MemwalOpsError
from memwal_ops.supervisor.job_answers import checked_figures, unexpected

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.table import Table
    from memwal_ops.jobs.api import Job


def look_at(table: Table, jobs: Iterable[Job]) -> tuple[Mapping[str, float], list[MemwalOpsError]]:
    """The figures of all jobs, and the faults: what one job cannot read keeps the figures of no other one back."""
    figures: dict[str, float] = {}
    faults: list[MemwalOpsError] = []
    for job in jobs:
        try:
            if job.look is not None:
                figures |= checked_figures(job, job.look(table))
        except MemwalOpsError as error:
            faults.append(error)
        except Exception as error:  # noqa: BLE001 - a stranger's code, or a bug of ours
            structlog.get_logger(__name__).exception("unexpected_error", job=job.name)
            faults.append(unexpected(error, job.name))
    return figures, faults
