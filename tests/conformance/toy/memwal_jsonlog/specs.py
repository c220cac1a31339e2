"""The jobs and their options, as they are registered. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from memwal_ops.core.job import JobSpec, MetricSpec
from memwal_ops.core.options import CollectOptions, MaintenanceOptions, Options, count


@dataclass(frozen=True)
class MergeOptions(Options):
    """Options of merge."""

    max_entries: int = count(1000, minimum=1, help="At most this many log entries in one pass.")


MERGE = JobSpec(
    name="merge",
    summary="Merge the log into the base.",
    options=MergeOptions,
    load="memwal_jsonlog.merge",
    pool="merge",
    in_maintain=True,
    enabled=True,
    every=timedelta(minutes=10),
    when="entries >= 8",
    metrics={
        "entries": MetricSpec("count", "Log entries that are not merged.", role="backlog"),
        "missing": MetricSpec("count", "Missing log entries, at which a merge stops.", role="blocked"),
        "entries_merged": MetricSpec("count", "Log entries merged.", "run"),
    },
)
GC = JobSpec(
    name="gc",
    summary="Plan the deletion of merged log entries; with --apply, delete them.",
    options=CollectOptions,
    load="memwal_jsonlog.gc",
    pool="collect",
    in_maintain=True,
    deletes=True,
    after=frozenset({"merge"}),
    every=timedelta(hours=1),
)
MAINTAIN = JobSpec(
    name="maintain",
    summary="Run merge and gc, in that order.",
    options=MaintenanceOptions,
    load="memwal_ops.core.maintain:JOB",
)
