"""Rank the jobs that are due by what a run is worth, within the budget of the fleet (:class:`Ranking`)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.cost import expected_cost, money_of
from memwal_ops.core.figures import jobs_of
from memwal_ops.core.fleet_budget import CHARGED, NOTHING, Amounts, FleetBudget, amounts_of
from memwal_ops.core.job import POOLS
from memwal_ops.core.turns import BY_WORTH, Due, Turns
from memwal_ops.core.worth import expected_amounts, worth_of
from memwal_ops.supervisor.membership.records import published
from memwal_ops.supervisor.state.outcomes import OVER_BUDGET, is_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memwal_ops.core.figures import Figures
    from memwal_ops.core.fleet_budget import Others
    from memwal_ops.core.job import JobSpec, Pool
    from memwal_ops.core.worth import Worth
    from memwal_ops.supervisor.config.effective import Settings
    from memwal_ops.supervisor.config.model import FleetBudgetConfig
    from memwal_ops.supervisor.observe.status_document import BudgetStatus
    from memwal_ops.supervisor.state.outcomes import Charged, RunRecorder
    from memwal_ops.supervisor.state.tables import TableJob, TableState

_NEVER = datetime.min.replace(tzinfo=UTC)
_RETENTION = "max_bytes_held"
_ASKED, _SAFETY = 2, 1


def new_budget(settings: Settings, charged: Iterable[Charged]) -> FleetBudget:
    """The budget of a configuration.

    Args:
        settings: the configuration.
        charged: what earlier runs used, see :func:`memwal_ops.supervisor.state.outcomes.charged_runs`.
    """
    config = settings.config.budget
    if config is None:
        return FleetBudget({}, 1.0)
    keeps = any(table.objectives for table in settings.tables)
    budget = FleetBudget(config.limits(), config.per.total_seconds(), keeps=keeps)
    for finished, used, objective in charged:
        budget.add(finished, used, objective=objective)
    return budget


def budget_status(
    config: FleetBudgetConfig, budget: FleetBudget, expected: Amounts, now: datetime, currency: str
) -> BudgetStatus:
    """The document ``budget`` of the service's status; ``expected``: what runs of this supervisor will use."""
    at = now.timestamp()
    refused = budget.refuses(at, expected, NOTHING)
    frees = budget.frees_at(at) if refused is not None else at

    def shown(amounts: Amounts) -> dict[str, float]:
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
        "used_up": refused,
        "frees": datetime.fromtimestamp(frees, UTC).isoformat(timespec="seconds") if frees > at else None,
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
    """The order of a supervisor's runs. Only the scheduler's thread calls it.

    Args:
        tables: the scheduler's, by name.
        recorder: what past runs spent.
    """

    def __init__(self, tables: Mapping[str, TableState], recorder: RunRecorder) -> None:
        """Without a budget, until :meth:`configure`."""
        self._tables = tables
        self._recorder = recorder
        self._config: FleetBudgetConfig | None = None
        self._budget = FleetBudget({}, 1.0)
        self._turns = {pool: Turns() for pool in POOLS}
        self._worths: dict[tuple[str, str], tuple[object, Worth, Amounts]] = {}
        self._oldest: set[tuple[str, str]] = set()
        self._shadow: dict[tuple[str, str], dict[str, Any]] = {}

    def configure(self, settings: Settings, now: datetime) -> None:
        """Apply a configuration: what runs of the last ``per`` used counts, whether this process ran them or not."""
        self._settings = settings
        self._config = settings.config.budget
        self._prices = settings.config.prices.by_store()
        self._worths.clear()
        charged = () if self._config is None else self._recorder.charged(now - CHARGED * self._config.per, self._prices)
        others = self._budget.others
        self._budget = new_budget(settings, charged)
        self.meet(others, now)

    def meet(self, others: Others, now: datetime) -> None:
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

    def choose(
        self, pool: Pool, entries: Sequence[TableJob], in_flight: Iterable[TableJob], now: datetime
    ) -> TableJob | None:
        """Whose turn it is in a pool; sets what those wait for that the budget does not allow.

        Args:
            pool: the pool.
            entries: its jobs that may start.
            in_flight: those that run, of all pools.
            now: the time.
        """
        if not entries:
            return None
        known = {entry.key: entry for entry in entries}
        due = [self._due(entry) for entry in entries]
        allows = self._allows(in_flight, now)
        turn = self._turns[pool].choose(due, allows)
        if self._config is not None and self._config.shadow:
            first = min(due, key=lambda one: (one.urgent < _ASKED, *one.age))
            self._shadow[first.key] = _shadow(first, turn, allowed=bool(first.urgent) or allows(first, BY_WORTH))
            return known[first.key]
        for one in due:
            if one is not turn and not one.urgent and not allows(one, BY_WORTH):
                known[one.key].waiting = OVER_BUDGET
        if turn is None:
            return None
        self._oldest.discard(turn.key)
        if turn.age == min(one.age for one in due):
            self._oldest.add(turn.key)
        return known[turn.key]

    def begin(self, entry: TableJob) -> dict[str, Any]:
        """Count a start; return what is recorded with the run: its expected cost, and what a shadow would have done."""
        due = self._due(entry)
        self._turns[entry.settings.job.pool].begin(due, oldest=entry.key in self._oldest)
        self._oldest.discard(entry.key)
        shadow, missed = self._shadow.pop(entry.key, None), due.worth.missed
        objective = {} if missed is None else {"objective": missed.to_json()}
        return {"cost": self._cost(entry), **objective, **({} if shadow is None else {"shadow": shadow})}

    def end(self, used: Mapping[str, Any] | None, plan: Mapping[str, Any], now: datetime) -> None:
        """Charge a run that ended.

        Args:
            used: what it used; None: that is not known.
            plan: what :meth:`begin` returned for it.
            now: the time.
        """
        if used and not is_held(plan):
            uses = amounts_of(used, money_of(used, self._prices))
            self._budget.add(now.timestamp(), uses, objective="objective" in plan)

    def to_json(self, in_flight: Iterable[TableJob], now: datetime) -> BudgetStatus | None:
        """The document ``budget`` of the service's status; None: none is configured."""
        if self._config is None:
            return None
        currency = self._settings.config.prices.currency
        return budget_status(self._config, self._budget, self._expected(in_flight), now, currency)

    def _allows(self, in_flight: Iterable[TableJob], now: datetime) -> Callable[[Due, bool], bool]:
        """Whether the budget lets a job start, given whether it is its turn as it has waited longest."""
        at, expected = now.timestamp(), self._expected(in_flight)

        def allows(one: Due, turn: bool) -> bool:  # noqa: FBT001 - see Turns.choose
            own = None if turn else self._worths[one.key][2]
            return self._budget.refuses(at, expected, own, objective=one.worth.missed is not None) is None

        return allows

    def _due(self, entry: TableJob) -> Due:
        worth, _ = self._worth(entry)
        state = self._tables.get(entry.table.name)
        safe = state is not None and is_safety(entry.settings.job, worth, state.backlog)
        return Due(entry.key, waits_since(entry), worth, _ASKED if entry.at_once else _SAFETY if safe else 0)

    def _worth(self, entry: TableJob) -> tuple[Worth, Amounts]:
        """What the next run is worth and uses; computed once for each poll of the table, and run of the job."""
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
            cost = self._cost(entry)
            uses = amounts_of(cost) if cost else expected_amounts(entry.settings.job, figures, past)._replace(money=0.0)
            known = self._worths[entry.key] = (stamp, worth, uses)
        return known[1], known[2]

    def _expected(self, in_flight: Iterable[TableJob]) -> Amounts:
        total = NOTHING
        for entry in in_flight:
            total = total.plus(self._worth(entry)[1])
        return total

    def _cost(self, entry: TableJob) -> dict[str, Any] | None:
        """What a run costs by its past ones: recorded with it, so that what came can be compared."""
        state = self._tables.get(entry.table.name)
        work = None if state is None else entry.settings.job.work_due(state.figures)
        currency = self._settings.config.prices.currency
        cost = expected_cost(self._recorder.spent(entry), work, self._prices, currency)
        return None if cost is None else cost.to_json()


def _shadow(first: Due, turn: Due | None, *, allowed: bool) -> dict[str, Any]:
    """What the policy would have done in place of starting ``first``, which has waited longest."""
    if turn is not None and turn.key == first.key:
        return {"would": "run"}
    if not allowed or turn is None:
        return {"would": OVER_BUDGET}
    return {"would": "run_other", "table": turn.key[0], "job": turn.key[1]}


def is_safety(job: JobSpec, worth: Worth, backlog: Figures) -> bool:
    """Whether a job is delayed neither by others nor by the budget.

    What it does has a date; a part of its table is blocked, and it reports the cause; or the table holds more bytes
    than it may.
    """
    blocked = backlog.amount("blocked") and job.name in jobs_of("backlog")
    return job.has_dates or bool(blocked) or (worth.missed is not None and worth.missed.objective == _RETENTION)
