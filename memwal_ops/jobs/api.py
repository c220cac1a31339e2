"""What a job is to the supervisor, and how a package adds one.

A package registers a :class:`Job` under the entry point ``memwal_ops.jobs``::

    [project.entry-points."memwal_ops.jobs"]
    audit = "my_package.audit:AUDIT"

From then on ``audit`` is a key of ``jobs`` in configuration files, with its own options, and its command,
if it has one, is one of ``memwal-ops``. The jobs of this package are registered in the same way.

A job may be killed at any moment, and may run twice at once: leases save work and prove nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import click

    from memwal_ops.core.table import Table

POOLS = ("merge", "build", "collect")
FIGURE_KINDS = ("count", "bytes", "seconds")


class StopRequested(BaseException):
    """The step in hand is done, and no further one is wanted. No error: it must pass every handler of errors."""


class Report(Protocol):
    """What a plan or a run says of itself."""

    @property
    def decision(self) -> str:
        """One word of a fixed set."""

    def to_json(self) -> dict[str, Any]:
        """All of it, for history and for people."""


def _nothing() -> None:
    return


@dataclass(slots=True)
class Run:
    """What a job is handed, to tell how it goes while it goes. Everything in it is optional for a job.

    Attributes:
        figures: sums that become metrics: ``bytes_merged``, ``rows_merged``, ``bytes_collected``,
            ``objects_collected``, ``conflicts``, ``regions_blocked`` (no sum: the table's, now); any other goes to
            the history only.
        phases: seconds per phase of the work.
        versions: base versions that it published.
    """

    figures: Counter[str] = field(default_factory=Counter)
    phases: dict[str, float] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    on_progress: Callable[[], None] = _nothing
    on_checkpoint: Callable[[], None] = _nothing
    on_commit: Callable[[], None] = _nothing

    def took(self, phase: str, seconds: float) -> None:
        """Add to the time of a phase."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def progress(self) -> None:
        """Say that it is alive; without that for ``hung_after``, it is ended."""
        self.on_progress()

    def checkpoint(self) -> None:
        """A good moment to stop: a step is done, and nothing of the next has begun.

        Raises:
            StopRequested: no further step is wanted.
            LeaseLostError: another supervisor does this job now.
        """
        self.on_progress()
        self.on_checkpoint()

    def committing(self) -> None:
        """Right before a commit that does not go through the table's store, but through pylance.

        Raises:
            LeaseLostError: another supervisor does this job now.
        """
        self.on_progress()
        self.on_commit()


def _success(_: Any) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job.

    Attributes:
        name: its key in configuration files, and its label in metrics: lower-case letters, digits and ``_``.
        options: a frozen dataclass in which every field has a default; ``__post_init__`` may raise
            ``InvalidUsageError``. What configuration files say below ``options`` becomes one of these.
        plan: what it would do; reads only. This is what runs where ``apply`` is false.
        apply: does it.
        exit_code: what its own command would exit with for a report; 0 for success. An error that is
            raised has its own.
        pool: which workers run it: merge, build or collect.
        deletes: it removes things, and so plans only, unless the configuration says ``apply: true``.
        enabled: it runs on every table without being named in the configuration.
        every: how often, where the configuration says nothing; None: never by the clock.
        when: the trigger by backlog, where the configuration says nothing.
        hung_after: ended after that long without any progress.
        figures: backlog figures that ``look`` gives, each with its kind: count, bytes or seconds.
        look: reads the figures by which ``when`` decides; reads only, and is called often.
        command: a click command to be added to ``memwal-ops``.
    """

    name: str
    options: type[Any]
    plan: Callable[[Table, Any], Report]
    apply: Callable[[Table, Any, Run], Report]
    exit_code: Callable[[Any], int] = _success
    pool: str = "build"
    deletes: bool = False
    enabled: bool = False
    every: timedelta | None = None
    when: str | None = None
    hung_after: timedelta = timedelta(minutes=30)
    figures: Mapping[str, str] = field(default_factory=dict)
    look: Callable[[Table], Mapping[str, float]] | None = None
    command: click.Command | None = None
