"""The maintain job: all other jobs in the order in which each serves the next, under one budget of time.

merge (rows into the base) > catch-up (indexes over them) > compact (fewer fragments, while indexes cover
them, since pylance never joins what different indexes cover) > snapshot (of the regions, after the
commits that may lose one) > expire (versions that hold generations) > gc (what nothing holds).
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import InvalidUsageError, LeaseLostError, MemwalOpsError
from memwal_ops.jobs import catchup, compact, expire, gc, merge, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.table import Table

STEPS = ("merge", "catchup", "compact", "snapshot", "expire", "gc")
_DESTRUCTIVE = frozenset({"expire", "gc"})


@dataclass(frozen=True, slots=True)
class MaintainOptions:
    """What a user may ask of a maintenance run.

    Attributes:
        apply: whether expire and gc delete; otherwise they plan.
        dry_run: change nothing at all.
        budget: no step begins later than that after the start; None: no limit.
        merge: options of that job, and so on.
    """

    apply: bool = False
    dry_run: bool = False
    budget: timedelta | None = None
    merge: merge.MergeOptions = field(default_factory=merge.MergeOptions)
    catchup: catchup.CatchupOptions = field(default_factory=catchup.CatchupOptions)
    compact: compact.CompactOptions = field(default_factory=compact.CompactOptions)
    snapshot: snapshot.SnapshotOptions = field(default_factory=snapshot.SnapshotOptions)
    expire: expire.ExpireOptions = field(default_factory=expire.ExpireOptions)
    gc: gc.GcOptions = field(default_factory=gc.GcOptions)

    def __post_init__(self) -> None:
        if self.apply and self.dry_run:
            raise InvalidUsageError("--apply and --dry-run contradict each other; give one of them.")
        if self.budget is not None and self.budget <= timedelta(0):
            raise InvalidUsageError("--budget must be above zero; give for example 30m.")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: the ``report`` of its job, or why there is none (``error``, or ``skipped`` in words)."""

    step: str
    seconds: float
    report: Any = None
    error: MemwalOpsError | None = None
    skipped: str | None = None

    @property
    def decision(self) -> str:
        """The job's own word; ``failed`` or ``skipped`` where there is none."""
        if self.report is not None:
            return str(self.report.decision)
        return "failed" if self.error is not None else "skipped"

    @property
    def exit_code(self) -> int:
        """What the step's own command would have exited with."""
        if self.error is not None:
            return self.error.exit_code
        return int(getattr(self.report, "exit_code", 0))

    def to_json(self) -> dict[str, object]:
        """The ``steps`` entry of a report."""
        error = self.error
        return {
            "step": self.step,
            "decision": self.decision,
            "seconds": round(self.seconds, 6),
            "report": None if self.report is None else self.report.to_json(),
            "error": None if error is None else {"reason": error.reason, "message": str(error), "remedy": error.remedy},
            "because": self.skipped,
        }


@dataclass(frozen=True, slots=True)
class MaintainReport:
    """The account of a run. ``decision`` is maintained, incomplete, over_budget or dry_run."""

    run_id: str
    applied: bool
    dry_run: bool
    steps: tuple[StepReport, ...]
    version: int
    seconds: float

    @property
    def decision(self) -> str:
        """One word for the whole."""
        if self.exit_code:
            return "incomplete"
        if any(step.skipped for step in self.steps):
            return "over_budget"
        return "dry_run" if self.dry_run else "maintained"

    @property
    def exit_code(self) -> int:
        """That of the first step which did not end well."""
        return next((step.exit_code for step in self.steps if step.exit_code), 0)

    def to_json(self) -> dict[str, object]:
        """The document of ``maintain --json``."""
        return {
            "decision": self.decision,
            "apply": self.applied,
            "steps": [step.to_json() for step in self.steps],
            "version": self.version,
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }


def maintain(
    table: Table,
    options: MaintainOptions,
    *,
    on_step: Callable[[str], None] = lambda _: None,
    on_commit: Callable[[], None] = lambda: None,
) -> MaintainReport:
    """Run all jobs, each on the newest version. A step that fails does not stop the ones that build.

    Nothing is deleted after an error: whoever is called in the night finds the table as it was when the
    trouble began. A blocked region keeps old versions from being expired. It is no error to gc, nor is an
    index that stays behind: what they need is kept.

    Args:
        table: any version of it.
        options: see :class:`MaintainOptions`.
        on_step: called with the name of each step as it begins.
        on_commit: see :func:`memwal_ops.jobs.compact.apply`.
    """
    started = time.monotonic()
    steps: list[StepReport] = []
    for step in STEPS:
        begun = time.monotonic()
        skipped = _skipped(step, steps, options, begun - started)
        if skipped is not None:
            steps.append(StepReport(step, 0.0, skipped=skipped))
            continue
        on_step(step)
        try:
            table = table.newest()
            report = _run(step, table, options, on_commit)
        except LeaseLostError:
            raise  # another does all of it
        except MemwalOpsError as error:
            steps.append(StepReport(step, time.monotonic() - begun, error=error))
        else:
            steps.append(StepReport(step, time.monotonic() - begun, report=report))
    version = table.newest().version if steps[-1].error is None else table.version
    seconds = time.monotonic() - started
    return MaintainReport(str(uuid.uuid4()), options.apply, options.dry_run, tuple(steps), version, seconds)


def _skipped(step: str, before: list[StepReport], options: MaintainOptions, seconds: float) -> str | None:
    if options.budget is not None and seconds >= options.budget.total_seconds():
        return f"the budget of {options.budget} was used up"
    if step == "expire" and options.apply and any(one.decision == "blocked" for one in before):
        return "a region is blocked, and old versions may be what one restores from"
    failed = next((one.step for one in before if one.error is not None), None)
    if failed is not None and step in _DESTRUCTIVE and options.apply:
        return f"{failed} failed, and nothing is deleted after a failure"
    return None


def _run(step: str, table: Table, options: MaintainOptions, on_commit: Callable[[], None]) -> object:
    jobs: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "merge": (merge.dry_run, merge.apply),
        "catchup": (catchup.dry_run, catchup.apply),
        "compact": (compact.dry_run, partial(compact.apply, on_commit=on_commit)),
        "snapshot": (snapshot.dry_run, snapshot.apply),
        "expire": (expire.plan, expire.apply),
        "gc": (gc.plan, gc.apply),
    }
    look, act = jobs[step]
    acts = options.apply if step in _DESTRUCTIVE else not options.dry_run
    return (act if acts else look)(table, getattr(options, step))
