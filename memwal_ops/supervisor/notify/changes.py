"""Find what changed since a target was last told: which findings are new, changed or resolved."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from memwal_ops.supervisor.observe.findings import Finding

Kind = Literal["new", "changed", "resolved"]
# Amounts, ages, versions, ids: a finding is the same while only these differ.
_AMOUNT = re.compile(r"\b[0-9a-f]{8,}\b|\d[\d.,:]*(?:\s?(?:ms|s|min|h|d|days?|[KMGT]?i?B)\b)?")

_PLURAL = re.compile(r"# (\w+?)s?\b")


@dataclass(frozen=True, slots=True)
class Found:
    """One finding on a table, or on the service (``table`` is empty)."""

    table: str
    level: str
    what: str
    do: str
    runbook: str | None

    @classmethod
    def of(cls, table: str, finding: Finding) -> Found:
        """Return a finding of a table."""
        return cls(table, finding["level"], finding["what"], finding["do"], finding["runbook"])

    @property
    def key(self) -> str:
        """What stays the same while the finding does: its table, its page, its text without amounts."""
        return "\n".join((self.table, self.runbook or "", _PLURAL.sub(r"# \1", _AMOUNT.sub("#", self.what))))

    def to_json(self) -> dict[str, Any]:
        """Return its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Change:
    """A finding that is new, changed or resolved. ``before``: of a changed one, how it was reported."""

    kind: Kind
    found: Found
    before: Found | None = None


def changes(
    told: Mapping[str, Found], now: Iterable[Found], is_known: Callable[[str], bool] = lambda _: True
) -> list[Change]:
    """Return what differs from what a target was told, the worst and newest first.

    A finding that has gone, while another of the same page came to the same table, is changed.

    Args:
        told: by key.
        now: all findings that hold now.
        is_known: whether the findings of a table are known now; what is not known is not resolved.
    """
    current = {found.key: found for found in now}
    gone: dict[tuple[str, str | None], list[Found]] = defaultdict(list)
    for key, found in told.items():
        if key not in current and is_known(found.table):
            gone[found.table, found.runbook].append(found)
    made: list[Change] = []
    for key, found in current.items():
        before = told.get(key)
        if before is None and gone[found.table, found.runbook]:
            before = gone[found.table, found.runbook].pop(0)
            made.append(Change("changed", found, before))
        elif before is None:
            made.append(Change("new", found))
        elif before.level != found.level:
            made.append(Change("changed", found, before))
    made += [Change("resolved", found) for group in gone.values() for found in group]
    return sorted(made, key=_order)


def _order(change: Change) -> tuple[bool, bool, str, str]:
    return change.kind == "resolved", change.found.level != "critical", change.found.table, change.found.what


def after(told: Mapping[str, Found], made: Iterable[Change]) -> dict[str, Found]:
    """Return what a target knows once it was told these changes."""
    known = dict(told)
    for change in made:
        if change.before is not None:
            known.pop(change.before.key, None)
        if change.kind == "resolved":
            known.pop(change.found.key, None)
        else:
            known[change.found.key] = replace(change.found)
    return known
