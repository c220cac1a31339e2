"""Tell what the next run of a job costs before it runs, and why it would do nothing (:class:`NextRun`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.outlook import rows_done, seconds_at
from memwal_ops.text import size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.past_runs import PastRun

Rate = tuple[float, float]
"""The seconds of a past run, and the rows that it wrote."""
MAX_RATES = 10
"""So many of them are kept."""


@dataclass(frozen=True, slots=True)
class NextRun:
    """What a job would do if it ran now.

    Attributes:
        debt: bytes that are due to be written, by this run or by later ones.
        bytes_read: about what it reads.
        bytes_written: about what it writes.
        seconds: how long it takes, by the rate of a past run on this table; None: there is none to compare with.
        why: why it would do nothing; None: it would do something.
    """

    debt: int
    bytes_read: int
    bytes_written: int
    seconds: float | None
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The document ``next_run``."""
        seconds = None if self.seconds is None else round(self.seconds, 1)
        cost = {"debt": self.debt, "bytes_read": self.bytes_read, "bytes_written": self.bytes_written}
        return {**cost, "seconds": seconds, "why": self.why}


def next_run(
    spec: JobSpec, figures: Mapping[str, float], rates: Iterable[Rate], why: str | None = None
) -> NextRun | None:
    """The next run of a job by its backlog metrics; None if these do not show it.

    Args:
        spec: the job.
        figures: its backlog metrics.
        rates: those of past runs of the job on the table, the newest first.
        why: why nothing is due, if that is so; None: as the job's spec has it.
    """
    debt = spec.debt
    if debt is None or not {debt.due, debt.rows, debt.bytes_written, debt.bytes_read} <= figures.keys():
        return None
    if not figures[debt.due]:
        return NextRun(0, 0, 0, None, why or debt.nothing_due)
    written = int(figures[debt.bytes_written])
    return NextRun(written, int(figures[debt.bytes_read]), written, seconds_at(figures[debt.rows], rates))


def rates_of(job: str, runs: Iterable[PastRun]) -> tuple[Rate, ...]:
    """The rates of past runs, of those that wrote rows."""
    done = ((run.seconds, rows_done(job, run.report)) for run in runs)
    return tuple(rate for rate in done if rate[1])[:MAX_RATES]


def describe_next_run(document: Mapping[str, Any]) -> str:
    """The document ``next_run`` as a clause: ``reads 2.0 MiB and writes 1.9 MiB (about 3 s)``."""
    if document["why"] is not None:
        return f"nothing is due: {str(document['why']).rstrip('.')}"
    cost = f"reads {size_text(document['bytes_read'])} and writes {size_text(document['bytes_written'])}"
    return f"{cost} ({seconds_text(document['seconds'])})"


def seconds_text(seconds: float | None) -> str:
    """How long a run takes: ``about 3 s``, or that it is unknown."""
    if seconds is None:
        return "time unknown: there is no past run to compare with"
    return f"about {time_text(max(1.0, seconds))}"
