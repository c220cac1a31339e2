"""Counts the rows of the base table, and complains where there are too few: an example of a job of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from memwal_ops.core.job import JobSpec, MetricSpec
from memwal_ops.core.options import Options, count, duration, size


@dataclass(frozen=True)
class AuditOptions(Options):
    """What a user may ask of an audit."""

    min_rows: int = count(1, minimum=0, help="Fewer rows are too few.")
    max_bytes: int = size(1 << 30, help="How much to read at a time.")
    patience: timedelta = duration(timedelta(minutes=5), help="How long to wait.")


AUDIT = JobSpec(
    name="audit",
    summary="Count the rows of a table.",
    options=AuditOptions,
    load="memwal_audit.job",
    every=timedelta(hours=1),
    metrics={"base_rows": MetricSpec("count", "Rows of the base table.")},
)
