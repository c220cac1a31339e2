"""Print the budget of the fleet: what is used of it, and what of that is this supervisor's part."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.core.prices import money_text
from memwal_ops.text import counted, size_text, time_text
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOUNS = {"cpu": " of processor", "bytes_written": " written", "requests": " requests", "money": ""}


def budget_notes(budget: Mapping[str, Any] | None) -> list[str]:
    """The line of a budget; nothing if there is none, or none with limits."""
    return [] if budget is None or not budget["limits"] else [budget_text(budget)]


def budget_text(budget: Mapping[str, Any]) -> str:
    """One line: each limit, what all members used of it, and the part of this one.

    Args:
        budget: as in the service's status.
    """
    several, currency = budget["members"] > 1, budget["currency"]
    parts = []
    for name, limit in budget["limits"].items():
        used, most, part = (
            _amount(name, amount, currency) for amount in (budget["used"][name], limit, budget["own"]["used"][name])
        )
        parts.append(f"{used} of {most}{_NOUNS[name]}" + (f" ({part} by this member)" if several else ""))
    per = duration_text(timedelta(seconds=budget["per_seconds"]))
    whose = f"the budget of {counted(budget['members'], 'member')}" if several else "the budget"
    text = f"Used of {whose} per {per}: {'; '.join(parts)}."
    if budget["members_unread"]:
        others = counted(budget["members_unread"], "other member")
        text += f" The use of {others} cannot be read now, and is taken to grow as this one's does."
    return text


def _amount(name: str, amount: float, currency: str) -> str:
    if name == "money":
        return money_text(amount, currency)
    return time_text(amount) if name == "cpu" else size_text(amount) if name == "bytes_written" else f"{amount:,.0f}"
