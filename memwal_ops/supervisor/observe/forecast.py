"""Tell what a supervisor would run, in which order and at what cost, and what stays undone and why (:func:`forecast`).

By the state of the tables now: what writers add until then is not known. Pure: it reads documents of the fleet status.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.core.cost import expected_cost
from memwal_ops.core.worth import worth_of
from memwal_ops.supervisor.scheduling.windows import is_open
from memwal_ops.text import time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memwal_ops.core.cost import Cost, Spent
    from memwal_ops.core.prices import Prices
    from memwal_ops.core.worth import Worth
    from memwal_ops.supervisor.config.effective import JobSettings
    from memwal_ops.supervisor.scheduling.discovery import FoundTable

_STEP = timedelta(minutes=5)


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


def forecast(
    tables: Iterable[FoundTable],
    documents: Iterable[Mapping[str, Any]],
    applicable: Mapping[str, frozenset[str] | None],
    past: Callable[[str, str, str], Sequence[Spent]],
    prices: Mapping[str, Prices],
    currency: str,
    now: datetime,
    until: datetime,
) -> list[Forecast]:
    """Every enabled job of every table, in the order in which they run; those that do not run are last.

    Args:
        tables: the tables.
        documents: their fleet status, see :class:`memwal_ops.supervisor.observe.fleet.FleetStatus`.
        applicable: by table, the jobs that apply to it; None: not known.
        past: what the past runs of a table (its name and its URI) and a job spent.
        prices: by store.
        currency: of the prices.
        now: the time.
        until: the end of the time that was asked for.
    """
    known = {(table.name, table.uri): table for table in tables}
    found: list[Forecast] = []
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
            )
            applies = applicable.get(table.name)
            if applies is not None and name not in applies:
                at, why = None, "it does not apply to this table"
            else:
                at, why = _first(settings, status, document, worth, now, until)
            cost = expected_cost(spent, settings.job.work_due(figures), prices, currency)
            found.append(
                Forecast(table.name, name, at, why, _times(settings, at, now, until), cost, worth, settings.apply)
            )
    return sorted(found, key=lambda one: (one.at or datetime.max.replace(tzinfo=now.tzinfo), *_rank(one)))


def _rank(one: Forecast) -> tuple[bool, float, str, str]:
    return one.worth.missed is None, -one.worth.ratio, one.table, one.job


def _first(
    settings: JobSettings,
    status: Mapping[str, Any],
    document: Mapping[str, Any],
    worth: Worth,
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
    due, why = _due(settings, status, figures, worth, now, nothing=nothing)
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
    worth: Worth,
    now: datetime,
    *,
    nothing: bool,
) -> tuple[datetime | None, str]:
    if status["running_seconds"]:
        return now, "it is running"
    if worth.missed is not None and not nothing:
        missed = worth.missed
        return now, f"objective {missed.objective}: {missed.figure:,.0f}, at most {missed.limit:,.0f}"
    if settings.when is not None and settings.when.is_met(figures):
        return now, f"when: {settings.when.text}"
    if settings.schedule is None or status["next_due"] is None:
        text = "" if settings.when is None else f", and not yet so: {settings.when.text}"
        return None, f"it has no schedule{text}"
    if nothing and settings.skips_if_not_due and settings.job.debt is not None:
        return None, f"nothing is due: {settings.job.debt.nothing_due.rstrip('.')}"
    return max(now, datetime.fromisoformat(status["next_due"])), f"schedule: {settings.schedule}"


def _times(settings: JobSettings, at: datetime | None, now: datetime, until: datetime) -> int:
    if at is None:
        return 0
    if settings.schedule is None or settings.skips_if_not_due:
        return 1
    return 1 + int((until - at) / settings.schedule.period(now))
