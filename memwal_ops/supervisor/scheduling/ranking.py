"""Rank the jobs that are due by what a run is worth, within the budget of the fleet (:class:`Ranking`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any

from memwal_ops.core import fleet_budget
from memwal_ops.core.cost import expected_cost, money_of
from memwal_ops.core.figures import Figures, jobs_of
from memwal_ops.core.job import POOLS, JobSpec, Pool
from memwal_ops.core.worth import ASKED, BY_WORTH, SAFETY, Due, Turns, Worth, expected_amounts, worth_of
from memwal_ops.supervisor.config.effective import Settings
from memwal_ops.supervisor.config.model import FleetBudgetConfig
from memwal_ops.supervisor.membership.records import published
from memwal_ops.supervisor.observe.status_document import BudgetStatus
from memwal_ops.supervisor.state import outcomes
from memwal_ops.supervisor.state.tables import TableJob, TableState

_NEVER = datetime.min.replace(tzinfo=UTC)
_RETENTION = "max_bytes_held"


def new_budget(settings: Settings, charged: Iterable[outcomes.Charged]) -> fleet_budget.FleetBudget:
    """The budget of a configuration.

    ``charged``: what earlier runs used, see :func:`memwal_ops.supervisor.state.outcomes.charged_runs`.
    """
    config = settings.config.budget
    if config is None:
        return fleet_budget.FleetBudget({}, 1.0)
    keeps = any(table.objectives for table in settings.tables)
    budget = fleet_budget.FleetBudget(config.limits(), config.per.total_seconds(), keeps=keeps)
    for finished, used, objective in charged:
        budget.add(finished, used, objective=objective)
    return budget


def budget_document(
    config: FleetBudgetConfig,
    budget: fleet_budget.FleetBudget,
    expected: fleet_budget.Amounts,
    now: datetime,
    currency: str,
    waits: tuple[datetime, str] | None = None,
) -> BudgetStatus:
    """The document ``budget`` of the service's status.

    ``waits``: of what would pass a limit that is not reached: when the first of it fits, and the limit.
    """
    at = now.timestamp()
    limit = budget.refuses(at, expected, fleet_budget.NOTHING)
    frees = datetime.fromtimestamp(budget.frees_at(at) if limit is not None else at, UTC)
    if limit is None and waits is not None:
        frees, limit = waits

    def shown(amounts: fleet_budget.Amounts) -> dict[str, float]:
        return {name: round(getattr(amounts, name), 6) for name in budget.limits}

    return {
        "per_seconds": config.per.total_seconds(),
        "currency": currency,
        "shadow": config.shadow,
        "limits": dict(budget.limits),
        "used": shown(budget.used(at)),
        "in_flight": shown(budget.in_flight(at, expected)),
        "own": {"used": shown(budget.own.at(at)[0]), "in_flight": shown(expected)},
        "members": 1 + budget.others.living,
        "members_unread": budget.others.living if budget.is_alone(at) else 0,
        "used_up": limit,
        "frees": frees.isoformat(timespec="seconds") if frees > now else None,
    }


def waits_since(entry: TableJob) -> tuple[datetime, datetime]:
    """The place of a job among those that wait.

    One that only reads counts as due by one interval later: what changes tables goes first, until it has waited as
    long. Of two that are due at once, that goes first which ran longer ago.
    """
    due = entry.due or _NEVER
    if entry.settings.job.reads_only and entry.due is not None and entry.settings.schedule is not None:
        due += entry.settings.schedule.period(due)
    return due, entry.started or _NEVER


class Ranking:
    """The order of a supervisor's runs. Only the scheduler's thread calls it."""

    def __init__(self, tables: Mapping[str, TableState], recorder: outcomes.RunRecorder) -> None:
        """Without a budget, until :meth:`configure`."""
        self._tables = tables
        self._recorder = recorder
        self._config: FleetBudgetConfig | None = None
        self._budget = fleet_budget.FleetBudget({}, 1.0)
        self._turns = {pool: Turns() for pool in POOLS}
        self._ready: dict[tuple[str, str], TableJob] = {}
        self._worths: dict[tuple[str, str], tuple[object, Worth, fleet_budget.Amounts]] = {}
        self._oldest: set[tuple[str, str]] = set()
        self._shadow: dict[tuple[str, str], dict[str, Any]] = {}

    def configure(self, settings: Settings, now: datetime) -> None:
        """Apply a configuration: what runs of the last ``per`` used counts, whether this process ran them or not."""
        self._settings = settings
        self._config = settings.config.budget
        self._prices = settings.config.prices.by_store()
        self._worths.clear()
        charged = (
            ()
            if self._config is None
            else self._recorder.charged(now - fleet_budget.CHARGED * self._config.per, self._prices)
        )
        others = self._budget.others
        self._budget = new_budget(settings, charged)
        self.meet(others, now)

    def meet(self, others: fleet_budget.Others, now: datetime) -> None:
        """Count what other members of the fleet use against its budget."""
        self._budget.meet(others, now.timestamp())

    def published(self, in_flight: Iterable[TableJob], now: datetime) -> dict[str, Any] | None:
        """What the other members are to know of this one's budget; None: it has none."""
        if self._config is None:
            return None
        return published(
            self._budget.limits,
            self._budget.per,
            self._budget.own,
            self._expected(in_flight),
            now.timestamp(),
            shadow=self._config.shadow,
        )

    # -- what may start

    def put(self, entry: TableJob) -> None:
        """Add a job that waits for nothing but its turn, or look at its worth again."""
        self._ready[entry.key] = entry
        self._turns[entry.settings.job.pool].put(self._due(entry))

    def ready(self) -> list[TableJob]:
        """What waits for nothing but its turn, and the budget."""
        return [*self._ready.values()]

    def discard(self, entry: TableJob) -> None:
        """Remove a job that cannot start any more."""
        if self._ready.pop(entry.key, None) is not None:
            self._turns[entry.settings.job.pool].discard(entry.key)

    def clear(self) -> None:
        """Remove all jobs."""
        self._ready.clear()
        for turns in self._turns.values():
            turns.clear()

    def choose(self, pool: Pool, in_flight: Iterable[TableJob], now: datetime) -> TableJob | None:
        """Whose turn it is in a pool; None: nothing may start, or the budget allows nothing."""
        turns = self._turns[pool]
        if not turns:
            return None
        allows = self._allows(in_flight, now)
        turn = turns.choose(allows)
        if self._config is not None and self._config.shadow:
            first = turns.first
            assert first is not None  # noqa: S101 - something is due
            self._shadow[first.key] = _shadow(first, turn, allowed=bool(first.urgent) or allows(first, BY_WORTH))
            return self._ready[first.key]
        if turn is None:
            return None
        self._oldest.discard(turn.key)
        if turn is turns.oldest:
            self._oldest.add(turn.key)
        return self._ready[turn.key]

    def next_change(self, now: datetime) -> datetime | None:
        """When the budget may allow what waits for it; None: it defers nothing."""
        if self._config is None or not self._ready:
            return None
        ends = self._budget.next_end(now.timestamp())
        # Microseconds are cut: at that time it has ended.
        return None if ends is None else datetime.fromtimestamp(ends, UTC) + timedelta(microseconds=1)

    def owe(self, credits_: Mapping[str, float]) -> None:
        """Set what the oldest job of each pool is owed."""
        for pool, turns in self._turns.items():
            turns.credit = credits_.get(pool, turns.credit)

    def credit(self, pool: Pool) -> float:
        """What the oldest job of a pool is owed, in what runs cost."""
        return self._turns[pool].credit

    # -- what the budget defers

    def deferred(self, in_flight: Iterable[TableJob], now: datetime) -> dict[tuple[str, str], str]:
        """What waits for the budget alone, each with the limit that it would pass."""
        if self._config is None or self._config.shadow:
            return {}
        refuses = self._budget.gate(now.timestamp(), self._expected(in_flight))
        due = (self._turns[entry.settings.job.pool].get(key) for key, entry in self._ready.items())
        limits = {job.key: self._limit(job, refuses) for job in due}
        return {key: limit for key, limit in limits.items() if limit is not None}

    def refusal(self, entry: TableJob, in_flight: Iterable[TableJob], now: datetime) -> str | None:
        """The limit that keeps a job from starting which waits for nothing but its turn; None: none does."""
        if self._config is None or self._config.shadow:
            return None
        return self._limit(self._due(entry), self._budget.gate(now.timestamp(), self._expected(in_flight)))

    def frees(self, entry: TableJob, now: datetime) -> datetime:
        """When a job fits that the budget refuses, if no other starts until then."""
        worth, uses = self._worth(entry)
        at = self._budget.frees_at(now.timestamp(), uses, objective=worth.missed is not None)
        return datetime.fromtimestamp(ceil(at), UTC)

    def _limit(self, due: Due, refuses: fleet_budget.BudgetGate) -> str | None:
        return None if due.urgent else refuses(self._worths[due.key][2], objective=due.worth.missed is not None)

    # -- runs

    def begin(self, entry: TableJob) -> dict[str, Any]:
        """Count a start; return what is recorded with the run: its expected cost, and what a shadow would have done."""
        due = self._due(entry)
        self._turns[entry.settings.job.pool].begin(due, oldest=entry.key in self._oldest)
        self._oldest.discard(entry.key)
        shadow, missed = self._shadow.pop(entry.key, None), due.worth.missed
        objective = {} if missed is None else {"objective": missed.to_json()}
        return {"cost": self.cost(entry), **objective, **({} if shadow is None else {"shadow": shadow})}

    def end(self, used: Mapping[str, Any] | None, plan: Mapping[str, Any], now: datetime) -> None:
        """Charge a run that ended. ``used``: what it used; None: that is not known."""
        if used and not outcomes.is_held(plan):
            uses = fleet_budget.amounts_of(used, money_of(used, self._prices))
            self._budget.add(now.timestamp(), uses, objective="objective" in plan)

    def to_json(self, in_flight: Iterable[TableJob], now: datetime) -> BudgetStatus | None:
        """The document ``budget`` of the service's status; None: none is configured."""
        if self._config is None:
            return None
        in_flight = [*in_flight]
        deferred = self.deferred(in_flight, now)
        waits = min(((self.frees(self._ready[key], now), limit) for key, limit in deferred.items()), default=None)
        currency = self._settings.config.prices.currency
        return budget_document(self._config, self._budget, self._expected(in_flight), now, currency, waits)

    def worth(self, entry: TableJob) -> Worth:
        """What the next run of a job is worth."""
        return self._worth(entry)[0]

    def expected_use(self, entry: TableJob) -> dict[str, Any]:
        """What the next run is expected to use, as a run records it."""
        past, uses = self._recorder.spent(entry), self._worth(entry)[1]
        cost = self.cost(entry) or {**uses._asdict(), "requests": {"get": uses.requests}, "bytes_read": 0}
        names = {"cpu_seconds": cost.get("cpu_seconds", uses.cpu), "bytes_written": cost["bytes_written"]}
        store = past[0].used.get("store") if past else None
        work = past[0].used.get("work") if past else None
        return {"store": store, "requests": cost["requests"], "bytes_read": cost["bytes_read"], **names, "work": work}

    def _allows(self, in_flight: Iterable[TableJob], now: datetime) -> Callable[[Due, bool], bool]:
        """Whether the budget lets a job start, given whether it is its turn as it has waited longest."""
        refuses = self._budget.gate(now.timestamp(), self._expected(in_flight))

        def allows(due: Due, turn: bool) -> bool:  # noqa: FBT001 - see Turns.choose
            own = None if turn else self._worths[due.key][2]
            return refuses(own, objective=due.worth.missed is not None) is None

        return allows

    def _due(self, entry: TableJob) -> Due:
        worth, _ = self._worth(entry)
        state = self._tables.get(entry.table.name)
        safe = state is not None and is_safety(entry.settings.job, worth, state.backlog)
        return Due(entry.key, waits_since(entry), worth, ASKED if entry.at_once else SAFETY if safe else 0)

    def _worth(self, entry: TableJob) -> tuple[Worth, fleet_budget.Amounts]:
        state = self._tables.get(entry.table.name)
        stamp = (None if state is None else state.result_at, entry.ended, id(entry.settings))
        known = self._worths.get(entry.key)
        if known is None or known[0] != stamp:
            figures = {} if state is None else state.figures
            past = self._recorder.spent(entry)
            settings = entry.table.settings
            worth = worth_of(
                entry.settings.job,
                figures,
                past,
                weight=settings.weight,
                objectives=settings.objectives,
                limits=self._budget.limits,
            )
            cost = self.cost(entry)
            uses = (
                fleet_budget.amounts_of(cost)
                if cost
                else expected_amounts(entry.settings.job, figures, past)._replace(money=0.0)
            )
            known = self._worths[entry.key] = (stamp, worth, uses)
        return known[1], known[2]

    def _expected(self, in_flight: Iterable[TableJob]) -> fleet_budget.Amounts:
        total = fleet_budget.NOTHING
        for entry in in_flight:
            total = total.plus(self._worth(entry)[1])
        return total

    def cost(self, entry: TableJob) -> dict[str, Any] | None:
        """What a run costs by its past ones: recorded with it, so that what came can be compared."""
        state = self._tables.get(entry.table.name)
        work = None if state is None else entry.settings.job.work_due(state.figures)
        currency = self._settings.config.prices.currency
        cost = expected_cost(self._recorder.spent(entry), work, self._prices, currency)
        return None if cost is None else cost.to_json()


def _shadow(first: Due, turn: Due | None, *, allowed: bool) -> dict[str, Any]:
    if turn is not None and turn.key == first.key:
        return {"would": "run"}
    if not allowed or turn is None:
        return {"would": outcomes.OVER_BUDGET}
    return {"would": "run_other", "table": turn.key[0], "job": turn.key[1]}


def is_safety(job: JobSpec, worth: Worth, backlog: Figures) -> bool:
    """Whether a job is delayed neither by others nor by the budget.

    What it does has a date; a part of its table is blocked, and it reports the cause; or the table holds more bytes
    than it may.
    """
    blocked = backlog.amount("blocked") and job.name in jobs_of("backlog")
    return job.has_dates or bool(blocked) or (worth.missed is not None and worth.missed.objective == _RETENTION)
