"""The context of a run: progress, figures, stop requests and the commit guard.

It is the same under the supervisor, on a terminal, in Airflow and in a notebook: a job calls the few methods of
:class:`RunContext`, and a front end passes a :class:`Listener`, or none.

A job may publish several revisions, and fail afterwards. What a format publishes is recorded right after it became
visible (:func:`record`); an error that ends the run then names it first, in every front end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from memwal_ops.core import tracing
from memwal_ops.core.anchors import CommitGuard, Unguarded
from memwal_ops.core.leases import record_by_hand
from memwal_ops.core.past_runs import PastRuns, no_past_runs
from memwal_ops.core.report import Report
from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage.api import Store

_RUN: ContextVar[list[int] | None] = ContextVar("revisions of the run", default=None)
_NAMED = 5


def record(revision: int) -> None:
    """Record a revision of the run's table that has just become visible; without a run, nothing is recorded."""
    revisions = _RUN.get()
    if revisions is not None and revision not in revisions[-1:]:
        revisions.append(revision)


@contextmanager
def recording(revisions: list[int]) -> Iterator[None]:
    """Record what is published in the block in ``revisions``.

    Raises ``MemwalOpsError``: that of the block; its remedy begins with what was published before.
    """
    before = len(revisions)
    token = _RUN.set(revisions)
    try:
        yield
    except MemwalOpsError as error:
        if published := revisions[before:]:
            error.remedy = f"{_text(published)} {error.remedy}"
        raise
    finally:
        _RUN.reset(token)


def _text(published: Sequence[int]) -> str:
    shown = ", ".join(map(str, published[:_NAMED])) + (" ..." if len(published) > _NAMED else "")
    return f"What this run published before stays: {'revisions' if len(published) > 1 else 'revision'} {shown}."


class StopRequested(BaseException):
    """A requested stop between two steps. A ``BaseException``: handlers of errors must not catch it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one activity.

    Attributes:
        activity: a few words: ``merging``, ``reading keys``.
        unit: what is counted: ``rows``, ``tasks``, ``objects``.
        done: how many of them are done, since the activity began.
        total: how many there will be; None if that is not known.
        detail: additional text: ``20,000 rows, 3.1 MiB``.
    """

    activity: str
    unit: str
    done: int
    total: int | None = None
    detail: str = ""


class Listener(Protocol):
    """The callbacks of a front end. Called from the run's own thread, and often: they must return quickly."""

    def heartbeat(self) -> None:
        """A heartbeat, without details."""

    def progress(self, progress: Progress) -> None:
        """An activity has progressed."""

    def step(self, name: str) -> None:
        """A step began (of ``maintain``: the job of that name)."""

    def checkpoint(self) -> None:
        """The run can stop here. Raises ``StopRequested`` or ``LeaseLostError``."""


class NullListener:
    """A listener that ignores everything."""

    def heartbeat(self) -> None:
        """Ignored."""

    def progress(self, progress: Progress) -> None:
        """Ignored."""

    def step(self, name: str) -> None:
        """Ignored."""

    def checkpoint(self) -> None:
        """Never raises."""


@dataclass(slots=True)
class RunContext:
    """What a job uses while it runs.

    Attributes:
        guard: checked before every effect that does not use the table's store; a table has it too.
        figures: sums of the run, by the names in the job's ``metrics``; other names are kept in the run history only.
        phases: seconds per phase.
        revisions: revisions of the table that the run published, in order.
        past_runs: the run history of this machine, for a plan that tells how long a run takes.
    """

    listener: Listener = field(default_factory=NullListener)
    guard: CommitGuard = field(default_factory=Unguarded)
    figures: Counter[str] = field(default_factory=Counter)
    phases: dict[str, float] = field(default_factory=dict)
    revisions: list[int] = field(default_factory=list)
    past_runs: PastRuns = no_past_runs
    _done: dict[str, int] = field(default_factory=dict)

    def heartbeat(self) -> None:
        """Send a heartbeat: a run without one for ``hung_after`` is killed."""
        self.listener.heartbeat()

    def advance(self, activity: str, unit: str, count: int = 1, *, total: int | None = None) -> None:
        """Add to the progress of an activity.

        Args:
            activity: see :class:`Progress`; each name has a count of its own.
            count: how many more are done.
            total: how many there will be.
        """
        self._done[activity] = self._done.get(activity, 0) + count
        self.listener.progress(Progress(activity, unit, self._done[activity], total))

    def report(self, progress: Progress) -> None:
        """Report the progress of an activity that keeps its own count."""
        self.listener.progress(progress)

    def step(self, name: str) -> None:
        """Report that a step begins."""
        self.listener.step(name)

    def checkpoint(self) -> None:
        """Stop if that was requested. Called between two steps: everything so far is kept.

        Raises:
            StopRequested: a stop was requested.
            LeaseLostError: another supervisor holds the lease of this job now.
        """
        self.listener.checkpoint()

    def add_phase_seconds(self, phase: str, seconds: float) -> None:
        """Add to the time of a phase."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def record(self, store: Store, job: str, report: Report) -> None:
        """Record that a job has acted, for the supervisors of the table; those record their own runs."""
        if isinstance(self.guard, Unguarded):
            record_by_hand(store, job, "partial" if report.exit_code else "succeeded")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase."""
        started = time.monotonic()
        try:
            with tracing.phase(name):
                yield
        finally:
            self.add_phase_seconds(name, time.monotonic() - started)
