"""Tell what a supervisor would run, in which order and at what cost, and what stays undone and why (:func:`forecast`).

By the state of the tables now: what writers add until then is not known. Pure: it reads documents of the fleet status.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.core.cost import expected_cost
from memwal_ops.core.figures import Figures
from memwal_ops.core.fleet_budget import amounts_of
from memwal_ops.core.job import POOLS
from memwal_ops.core.turns import Due, Turns
from memwal_ops.core.worth import expected_amounts, worth_of
from memwal_ops.supervisor.scheduling.due import triggered_by
from memwal_ops.supervisor.scheduling.ranking import is_safety
from memwal_ops.supervisor.scheduling.schedules import is_open
from memwal_ops.supervisor.state.outcomes import OVER_BUDGET
from memwal_ops.text import time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memwal_ops.core.cost import Cost, Prices, Spent
    from memwal_ops.core.fleet_budget import Amounts, FleetBudget
    from memwal_ops.core.job import Objective, Pool
    from memwal_ops.core.worth import Worth
    from memwal_ops.supervisor.config.effective import JobSettings
    from memwal_ops.supervisor.scheduling.discovery import FoundTable

_STEP, _STEPS = timedelta(minutes=5), 96


@dataclass(frozen=True, slots=True)
class Forecast:
    """One job on one table.

    Attributes:
        table: its name.
        job: its name.
        at: when it runs first; None: not within the time that was asked for.
        why: what makes it run, or why it does not.
        runs: how often it runs by its schedule; those by its backlog, which writers make, are not among them.
        cost: of one run; None: no past run shows it.
        worth: of the next run.
        applies: whether it acts; else it only plans.
    """

    table: str
    job: str
    at: datetime | None
    why: str
    runs: int
    cost: Cost | None
    worth: Worth
    applies: bool

    def to_json(self) -> dict[str, Any]:
        """The entry of ``runs``, or of ``undone``."""
        shared = {"table": self.table, "job": self.job, "why": self.why, "worth": self.worth.to_json()}
        if self.at is None:
            return shared
        cost = None if self.cost is None else self.cost.to_json()
        at = self.at.isoformat(timespec="seconds")
        return {**shared, "at": at, "runs": self.runs, "apply": self.applies, "cost": cost}


@dataclass(frozen=True, slots=True)
class _Job:
    """A job that runs, at which times, unless the budget defers it."""

    found: Forecast
    waited: timedelta
    settings: JobSettings
    uses: Amounts
    urgent: bool

    @property
    def key(self) -> tuple[str, str]:
        """Its table and its name."""
        return self.found.table, self.found.job


def forecast(
    tables: Iterable[FoundTable],
    documents: Iterable[Mapping[str, Any]],
    applicable: Mapping[str, frozenset[str] | None],
    past: Callable[[str, str, str], Sequence[Spent]],
    budget: FleetBudget,
    prices: Mapping[str, Prices],
    currency: str,
    now: datetime,
    until: datetime,
    *,
    by_age: bool = False,
) -> list[Forecast]:
    """Every enabled job of every table, in the order in which they run; those that do not run are last.

    Args:
        tables: the tables.
        documents: their fleet status, see :class:`memwal_ops.supervisor.observe.status.FleetStatus`.
        applicable: by table, the jobs that apply to it; None: not known.
        past: what the past runs of a table (its name and its URI) and a job spent.
        budget: of the fleet, with what was used by now.
        prices: by store.
        currency: of the prices.
        now: the time.
        until: the end of the time that was asked for.
        by_age: the supervisor takes what has waited longest, as its budget is a shadow.
    """
    known = {(table.name, table.uri): table for table in tables}
    running: list[_Job] = []
    undone: list[Forecast] = []
    for document in documents:
        table = known[document["name"], document["uri"]]
        for name, status in document["jobs"].items():
            settings, figures = table.settings.jobs[name], document["backlog"]
            spent = past(table.name, table.uri, name)
            worth = worth_of(
                settings.job,
                figures,
                spent,
                weight=table.settings.weight,
                objectives=table.settings.objectives,
                limits=budget.limits,
            )
            applies = applicable.get(table.name)
            if applies is not None and name not in applies:
                at, why = None, "it does not apply to this table"
            else:
                at, why = _first(settings, status, document, table.settings.objectives, now, until)
            cost = expected_cost(spent, settings.job.work_due(figures), prices, currency)
            found = Forecast(table.name, name, at, why, _times(settings, at, now, until), cost, worth, settings.apply)
            if at is None:
                undone.append(found)
                continue
            uses = expected_amounts(settings.job, figures, spent)._replace(money=0.0)
            uses = uses if cost is None else amounts_of(cost.to_json())
            waited = timedelta(seconds=float(status["waiting_seconds"]))
            urgent = is_safety(settings.job, worth, Figures(figures, table.settings.format))
            running.append(_Job(found, waited, settings, uses, urgent))
    done = [*_within(budget, running, now, until, by_age=by_age)]
    undone += (one for one in done if one.at is None)
    undone.sort(key=lambda one: (one.worth.missed is None, -one.worth.ratio, one.table, one.job))
    return [*(one for one in done if one.at is not None), *undone]


def _within(
    budget: FleetBudget, jobs: Iterable[_Job], now: datetime, until: datetime, *, by_age: bool
) -> Iterator[Forecast]:
    """The runs in their order, each when the budget allows it; as the supervisor takes them in turns."""
    waiting: dict[datetime, dict[tuple[str, str], _Job]] = {}
    found: dict[tuple[str, str], Forecast] = {}
    turns = {pool: Turns() for pool in POOLS}
    times: list[datetime] = []

    def wait(job: _Job, at: datetime) -> None:
        if at not in waiting:
            heapq.heappush(times, at)
        waiting.setdefault(at, {})[job.key] = job

    for job in jobs:
        wait(job, job.found.at or now)
    while times:
        at = heapq.heappop(times)
        due = waiting.pop(at)
        for job in _in_turn(due, turns, budget, at, by_age=by_age):
            del due[job.key]
            again = _again(job.settings, at, now)
            if not budget.limits:
                found[job.key] = replace(job.found, at=at, runs=_times(job.settings, at, now, until))
                continue
            before = found.get(job.key, replace(job.found, at=at, runs=0))
            found[job.key] = replace(before, runs=before.runs + 1)
            if again is not None and again <= until:
                wait(job, again)
        later = {one: _later(budget, at, now, until, objective=one) for one in (False, True)} if due else {}
        for job in due.values():
            objective = job.found.worth.missed is not None
            if later[objective] <= until:
                wait(job, later[objective])
            elif job.key not in found:
                limit = budget.refuses(at.timestamp(), own=job.uses, objective=objective)
                found[job.key] = replace(
                    job.found, at=None, runs=0, why=f"{OVER_BUDGET}: {limit} is used up until then"
                )
    yield from found.values()


def _later(budget: FleetBudget, at: datetime, now: datetime, until: datetime, *, objective: bool) -> datetime:
    """When to ask the budget again: as it frees, and in steps, of which a plan has so many at most."""
    frees = datetime.fromtimestamp(math.ceil(budget.frees_at(at.timestamp(), objective=objective)), now.tzinfo)
    return max(frees, at + max(_STEP, (until - now) / _STEPS))


def _again(settings: JobSettings, at: datetime, now: datetime) -> datetime | None:
    """When a job is due again by its schedule; None: by its backlog, which writers make."""
    if settings.schedule is None or settings.skips_if_not_due:
        return None
    return at + settings.schedule.period(now)


def _in_turn(
    known: Mapping[tuple[str, str], _Job],
    turns: Mapping[Pool, Turns],
    budget: FleetBudget,
    at: datetime,
    *,
    by_age: bool,
) -> Iterator[_Job]:
    """Those that are due at once and start, in the order of their turns; pools run beside each other."""
    known = dict(known)
    when = at.timestamp()

    def allows(one: Due, turn: bool) -> bool:  # noqa: FBT001 - see Turns.choose
        own, objective = None if turn else known[one.key].uses, one.worth.missed is not None
        return budget.refuses(when, own=own, objective=objective) is None

    def starts(pool: Pool) -> Iterator[_Job]:
        due = [
            Due(key, _since(job, at), job.found.worth, int(job.urgent))
            for key, job in known.items()
            if job.settings.job.pool == pool
        ]
        for one in sorted(due, key=lambda one: one.age) if by_age else turns[pool].in_order(due, allows):
            budget.add(when, known[one.key].uses, objective=one.worth.missed is not None)
            yield known[one.key]

    pools = [starts(pool) for pool in turns]
    while pools:
        started = [(pool, job) for pool in pools if (job := next(pool, None)) is not None]
        pools = [pool for pool, _ in started]
        yield from (job for _, job in started)


def _since(job: _Job, now: datetime) -> datetime:
    """Since when a job is due, as far as a status shows it; one that only reads by an interval later."""
    due = now - job.waited
    if job.settings.job.reads_only and job.settings.schedule is not None:
        due += job.settings.schedule.period(now)
    return due


def _first(
    settings: JobSettings,
    status: Mapping[str, Any],
    document: Mapping[str, Any],
    objectives: Mapping[Objective, float],
    now: datetime,
    until: datetime,
) -> tuple[datetime | None, str]:
    """When a job runs first, and why; None with the reason if it does not."""
    figures = document["backlog"]
    if document["error"] is not None:
        return None, f"the table cannot be read: {document['error']['message']}"
    if status["waiting_for"] == "paused" or status.get("paused"):
        return None, "it is paused"
    nothing = settings.job.debt is not None and settings.has_nothing_to_do(figures)
    due, why = _due(settings, status, figures, objectives, now, nothing=nothing)
    if due is None:
        return None, why
    due = max(due, now + timedelta(seconds=float(status["backoff_seconds"] or 0)))
    if due > now and status["consecutive_failures"] and status["backoff_seconds"]:
        why += f"; after {status['consecutive_failures']} failures in a row it waits"
    while due <= until and not is_open(settings.windows, due, settings.zone):
        due += _STEP
    if due > until:
        closed = settings.windows and not is_open(settings.windows, until, settings.zone)
        what = (
            "its windows are closed until then" if closed else f"it is due in {time_text((due - now).total_seconds())}"
        )
        return None, what
    return due, why


def _due(
    settings: JobSettings,
    status: Mapping[str, Any],
    figures: Mapping[str, float],
    objectives: Mapping[Objective, float],
    now: datetime,
    *,
    nothing: bool,
) -> tuple[datetime | None, str]:
    if status["running_seconds"]:
        return now, "it is running"
    stopped = (status.get("breaker") or {}).get("reason") == "saves_nothing"
    if (triggered := triggered_by(settings, figures, objectives)) is not None and not stopped:
        return now, triggered
    if triggered is not None:
        note = f"its circuit breaker is open until {status['breaker']['until']}: its last runs achieved nothing"
        if settings.schedule is None or status["next_due"] is None:
            return None, note
    if settings.schedule is None or status["next_due"] is None:
        text = "" if settings.when is None else f", and not yet so: {settings.when.text}"
        return None, f"it has no schedule{text}"
    if nothing and settings.skips_if_not_due and settings.job.debt is not None:
        return None, f"nothing is due: {settings.job.debt.nothing_due.rstrip('.')}"
    return max(now, datetime.fromisoformat(status["next_due"])), f"schedule: {settings.schedule}"


def _times(settings: JobSettings, at: datetime | None, now: datetime, until: datetime) -> int:
    if at is None:
        return 0
    again = _again(settings, at, now)
    return 1 if again is None else 1 + int((until - at) / (again - at))
