"""Choose what the history keeps of the figures of tables over time, for the charts of the pages.

Charts survive a restart, and ten thousand tables must not fill the disk: a table is sampled when its figures have
changed, at most once a minute, and less often in a large fleet; ``History.thin_samples`` keeps fewer of the older
ones. Ages alone are no change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memwal_ops.core.job import Role
from memwal_ops.supervisor.observe.status_document import BudgetStatus
from memwal_ops.supervisor.state.tables import TableState

ROLES: tuple[Role, ...] = (
    *("backlog", "age", "table_rows", "table_bytes", "held", "parts", "versions", "indexes", "uncovered", "lookup"),
)
Sample = tuple[str, int, "Mapping[str, float]"]
"""The name of a table, a time in seconds since 1970, and its figures by role."""
BUDGET = ""
"""What the budget of the fleet is recorded under: no table has that name."""
_MIN_SECONDS, _SECONDS_PER_TABLE, _UNCHANGED_SECONDS = 60.0, 0.1, 6 * 3600.0


class Sampler:
    """Takes samples of tables. Only the scheduler's thread calls it. ``monotonic``: the clock of the intervals."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # When, by role, and the figures of the last poll that were the same.
        self._taken: dict[str, tuple[float, dict[str, float], Mapping[str, float] | None]] = {}

    def take(self, states: Iterable[TableState]) -> list[Sample]:
        """Return the samples that are due now; the last figures come once more before they change after a long time."""
        states, now = [*states], self._monotonic()
        every = max(_MIN_SECONDS, _SECONDS_PER_TABLE * len(states))
        samples: list[Sample] = []
        known, self._taken = self._taken, {}
        for state in states:
            name, before = state.table.name, known.get(state.table.name)
            since = None if before is None else now - before[0]
            wait = _UNCHANGED_SECONDS if before and before[2] is state.figures else every
            if before and since is not None and since < wait:
                self._taken[name] = before
                continue
            figures = figures_by_role(state)
            same = before is not None and _same(before[1], figures)
            due = since is None or since >= (_UNCHANGED_SECONDS if same else every)
            if state.polled is None or not figures or not due:
                if before is not None:
                    self._taken[name] = (*before[:2], state.figures if same else None)
                continue
            when = int(state.polled.timestamp())
            if before is not None and since is not None and since > 2 * every and not _same(before[1], figures):
                samples.append((name, when - int(every), before[1]))
            samples.append((name, when, figures))
            self._taken[name] = (now, figures, state.figures)
        return samples


def budget_sample(budget: BudgetStatus | None, at: float) -> list[Sample]:
    """Return the part of each limit of the budget that is used, once a minute; nothing without limits."""
    if budget is None or not budget["limits"]:
        return []
    shares = {name: round(budget["used"][name] / limit, 4) for name, limit in budget["limits"].items()}
    return [(BUDGET, int(at - at % _MIN_SECONDS), shares)]


def figures_by_role(state: TableState) -> dict[str, float]:
    """Return the figures of a table that charts show, by role."""
    backlog = state.backlog
    found: dict[str, Any] = {role: backlog.amount(role) for role in ROLES}
    return {role: value for role, value in found.items() if value is not None}


def _same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(one.get(role) == other.get(role) for role in ROLES if role != "age")
