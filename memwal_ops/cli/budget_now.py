"""Read the budget of the fleet as it is now, without its service (:func:`budget_now`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.fleet_budget import CHARGED, Others
from memwal_ops.errors import MemwalOpsError
from memwal_ops.supervisor.membership.reading import read_others
from memwal_ops.supervisor.scheduling.ranking import new_budget
from memwal_ops.supervisor.state.directory import instance_of, members_of, state_dir
from memwal_ops.supervisor.state.outcomes import charged_runs

if TYPE_CHECKING:
    from datetime import datetime

    from memwal_ops.core.fleet_budget import FleetBudget
    from memwal_ops.supervisor.config.effective import Settings
    from memwal_ops.supervisor.state.history import History


def budget_now(settings: Settings, history: History | None, now: datetime) -> FleetBudget:
    """The budget, with what the history and the other members of the fleet have used of it."""
    config, fleet = settings.config.budget, settings.config.fleet
    runs = () if config is None or history is None else history.ledger(now - CHARGED * config.per)
    budget = new_budget(settings, charged_runs(runs, settings.config.prices.by_store()))
    if config is not None and fleet is not None:
        at, folder = now.timestamp(), state_dir(settings.config)
        try:
            others = read_others(fleet, instance_of(folder), at, budget.per)
        except MemwalOpsError:
            others = Others(living=max(1, members_of(folder) - 1), until=0.0)
        budget.meet(others, at)
    return budget
