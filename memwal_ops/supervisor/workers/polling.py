"""Poll the backlog figures of a table's jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from memwal_ops.core.polling import poll_cache
from memwal_ops.core.protocols import DetectsChanges
from memwal_ops.core.registry import formats, location_of
from memwal_ops.core.run import unexpected_error
from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage.objects import open_store
from memwal_ops.supervisor.workers.validation import checked_figures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Table

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
