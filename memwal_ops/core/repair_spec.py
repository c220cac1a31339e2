"""The options and the spec of ``repair``, the same for every format; imports none of its code."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from memwal_ops.core.job import JobSpec, MetricSpec
from memwal_ops.core.options import count, flag, text
from memwal_ops.core.verification import VerifyOptions


@dataclass(frozen=True, kw_only=True)
class RepairOptions(VerifyOptions):
    """Options of every repair."""

    max_findings: int = count(1000, minimum=1, metavar="N", help="Repair at most N findings of a check in one run.")
    accept_loss: bool = flag(
        help="Also make the fixes that go on without what cannot be read any more; the plan prints what each loses."
    )
    undo: str = text("", metavar="ID", help="Restore what the repair with that id replaced; do nothing else.")


repair_job = partial(
    JobSpec,
    name="repair",
    summary="Print what has a provably safe fix; with --apply, fix it.",
    options=RepairOptions,
    deletes=True,
    every=timedelta(days=1),
    metrics={"repaired": MetricSpec("count", "Fixes that repair made.", "run", "repaired")},
)
"""The spec of the job that verifies a table, and fixes what it finds."""
