"""Tell before a run what it costs, how long it takes, how much space it needs, and why it would do nothing.

By the rate of the last run, where the run history has one; else by the format's own estimate, and named as such. Both
are rough: they are for people who decide whether to start a run now, and no job depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol, runtime_checkable

from memwal_ops import text
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import Options
from memwal_ops.core.past_runs import PastRun, PastRuns
from memwal_ops.core.protocols import Table
from memwal_ops.core.report import Need
from memwal_ops.core.usage import rows_done

Rate = tuple[float, float]
"""The seconds of a past run, and the rows that it wrote."""
MAX_RATES = 10
"""So many of them are kept."""


@dataclass(frozen=True, slots=True)
class NextRun:
    """What a job would do if it ran now.

    Attributes:
        debt: bytes that are due to be written, by this run or by later ones.
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

    ``rates``: those of past runs of the job on the table, the newest first. ``why``: why nothing is due, if that is so;
    None: as the job's spec has it.
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
    cost = f"reads {text.size_text(document['bytes_read'])} and writes {text.size_text(document['bytes_written'])}"
    return f"{cost} ({seconds_text(document['seconds'])})"


def seconds_text(seconds: float | None) -> str:
    """How long a run takes: ``about 3 s``, or that it is unknown."""
    if seconds is None:
        return "time unknown: there is no past run to compare with"
    return f"about {text.time_text(max(1.0, seconds))}"


Basis = Literal["last_run", "estimate", "mixed"]
# A run that did less than this share of the work shows what a run costs, and not what the work does.
_COMPARABLE = 0.1
# The job and its option that say how long what a step replaced is kept.
_OLD_VERSIONS = ("expire", "older_than")
_KEPT_BY = {"merge": ("gc", "drain_after")}
_BASES: Mapping[str | None, str] = {
    "last_run": "by the rate of the last runs",
    "estimate": "estimated: the run history has no comparable run",
    "mixed": "in part estimated, since the run history has no comparable run of some jobs",
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a format estimates: seconds, and the bytes that a job adds, at most."""

    seconds: float
    adds: int = 0


@runtime_checkable
class EstimatesWork(Protocol):
    """A format that can estimate what a job has to do; optional."""

    def work_of(self, table: Any, need: Need) -> Work:
        """The work of one need of a table, from what its plan and the open table say: without requests."""


@runtime_checkable
class WorksBeside(Protocol):
    """A format that promises what may go on beside its jobs; optional."""

    @property
    def beside(self) -> str:
        """One sentence about writers and readers, for a person who decides whether to run the jobs now."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one job needs. ``seconds`` is None if it cannot be estimated."""

    job: str
    seconds: float | None
    basis: Basis | None
    adds: int

    def to_json(self) -> dict[str, Any]:
        """The entry of ``steps``."""
        return {"job": self.job, "seconds": _rounded(self.seconds), "basis": self.basis, "bytes": self.adds}


@dataclass(frozen=True, slots=True)
class Outlook:
    """What all jobs of a table need.

    ``kept``: how long what they replace is kept; None: that is not known, or no step adds anything. ``beside``: what
    the format promises about writers and readers; empty: nothing.
    """

    steps: tuple[Step, ...] = ()
    kept: timedelta | None = None
    beside: str = ""

    @property
    def seconds(self) -> float | None:
        """The sum of the steps that are known; None if none is."""
        known = [step.seconds for step in self.steps if step.seconds is not None]
        return sum(known) if known else None

    @property
    def basis(self) -> Basis | None:
        """What ``seconds`` is based on."""
        bases = {step.basis for step in self.steps if step.basis is not None}
        return "mixed" if len(bases) > 1 else next(iter(bases), None)

    @property
    def adds(self) -> int:
        """Bytes that the steps add, at most."""
        return sum(step.adds for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """The document ``outlook``; ``until`` as ISO 8601, None if nothing is added."""
        until = None if self.kept is None else _until(self.kept).isoformat(timespec="seconds")
        return {
            "seconds": _rounded(self.seconds),
            "basis": self.basis,
            "bytes": self.adds,
            "until": until,
            "steps": [step.to_json() for step in self.steps],
        }


def outlook_on(table: Table, needs: Iterable[Need], past: PastRuns, options: Options | None = None) -> Outlook:
    """What the needs of a table take; ``options`` are those of maintain, which say how long versions are kept."""
    steps = tuple(_step(table, need, past) for need in needs if need.now)
    beside = table.format.beside if isinstance(table.format, WorksBeside) else ""
    return Outlook(steps, _kept(table, steps, options), beside)


def describe_outlooks(outlooks: Sequence[Outlook]) -> str:
    """One paragraph about the maintenance of some tables, one after another; empty if none needs any."""
    together = Outlook(
        tuple(step for outlook in outlooks for step in outlook.steps),
        max((outlook.kept for outlook in outlooks if outlook.kept is not None), default=None),
    )
    if not together.steps:
        return ""
    parts = [*dict.fromkeys(outlook.beside for outlook in outlooks if outlook.steps and outlook.beside)]
    if together.seconds is not None:
        parts.append(f"It takes about {text.time_text(max(1.0, together.seconds))} ({_BASES[together.basis]}).")
    if together.adds and together.kept is not None:
        parts.append(
            f"It needs up to {text.size_text(together.adds)} more space until {_until(together.kept):%Y-%m-%d}: what "
            f"it replaces is kept for {text.duration_text(together.kept)}, so that readers can finish, and then "
            "deleted."
        )
    return text.paragraph(" ".join(parts))


def _step(table: Table, need: Need, past: PastRuns) -> Step:
    estimated = table.format.work_of(table, need) if isinstance(table.format, EstimatesWork) else None
    adds = 0 if estimated is None else estimated.adds
    done = ((run.seconds, rows_done(need.job, run.report)) for run in past(table.location.address, need.job))
    by_rate = seconds_at(need.work, done)
    if by_rate is not None:
        return Step(need.job, by_rate, "last_run", adds)
    return Step(need.job, None, None, 0) if estimated is None else Step(need.job, estimated.seconds, "estimate", adds)


def seconds_at(wanted: float, rates: Iterable[tuple[float, float]]) -> float | None:
    """How long so much work takes, by the first of past runs that is comparable: its seconds, and what it did."""
    return next((seconds * wanted / done for seconds, done in rates if done and done >= _COMPARABLE * wanted > 0), None)


def _kept(table: Table, steps: Iterable[Step], options: Options | None) -> timedelta | None:
    """The longest time for which what the steps replace is kept, by the options of the job that deletes it."""
    spans = []
    for job, name in {_KEPT_BY.get(step.job, _OLD_VERSIONS) for step in steps if step.adds}:
        spec = table.jobs.get(job)
        span = None if spec is None else getattr(getattr(options, job, None) or spec.options(), name, None)
        spans += [span] if span is not None else []
    return max(spans, default=None)


def _until(kept: timedelta) -> datetime:
    return datetime.now(UTC) + kept


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
