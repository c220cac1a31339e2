"""The ledger: what the runs of a history used, what that cost, and what they achieved (:func:`ledger_document`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from memwal_ops.core.achieved import SUMS
from memwal_ops.core.cost import relative_error
from memwal_ops.core.prices import money_of, monthly_storage
from memwal_ops.storage.metering import KINDS
from memwal_ops.supervisor.state.history import FAILURES
from memwal_ops.supervisor.state.outcomes import OVER_BUDGET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.prices import Prices

By = Literal["table", "job", "day"]
BY: tuple[By, ...] = ("table", "job", "day")


@dataclass(slots=True)
class Sums:
    """The sums of some runs; see :meth:`to_json`."""

    runs: int = 0
    polls: int = 0
    failed: int = 0
    unmeasured: int = 0
    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    peak_memory: int = 0
    money: float = 0.0
    achieved: Counter[str] = field(default_factory=Counter)
    saves: float = 0.0

    def add(self, run: Mapping[str, Any], prices: Mapping[str, Prices]) -> None:
        """Add one run of :meth:`memwal_ops.supervisor.state.history.History.ledger`."""
        used, achieved = run["used"], run["achieved"] or {}
        self.runs += 1
        self.failed += run["outcome"] in FAILURES
        self.seconds += max(0.0, run["finished"] - run["started"])
        if not used:
            self.unmeasured += 1
            return
        self._add_used(used, prices)
        self.peak_memory = max(self.peak_memory, used.get("peak_memory") or 0)
        self.achieved.update({name: achieved[name] for name in SUMS if name in achieved})
        self.saves += monthly_storage(achieved.get("bytes_freed", 0), str(used.get("store")), prices)

    def add_polls(self, polls: Mapping[str, Any], prices: Mapping[str, Prices]) -> None:
        """Add one entry of :meth:`memwal_ops.supervisor.state.history.History.polls`."""
        self.polls += polls["polls"]
        self._add_used(polls["used"], prices)

    def _add_used(self, used: Mapping[str, Any], prices: Mapping[str, Prices]) -> None:
        self.requests.update(used.get("requests") or {})
        self.used.update({name: used.get(name) or 0 for name in ("bytes_read", "bytes_written", "cpu_seconds")})
        self.money += money_of(used, prices)

    def to_json(self) -> dict[str, Any]:
        """The sums: ``money`` is what they cost, ``saves_monthly`` what storing the bytes they freed would."""
        return {
            "runs": self.runs,
            "polls": self.polls,
            "failed": self.failed,
            "unmeasured": self.unmeasured,
            "seconds": round(self.seconds, 3),
            "requests": {kind: int(self.requests[kind]) for kind in KINDS},
            "bytes_read": int(self.used["bytes_read"]),
            "bytes_written": int(self.used["bytes_written"]),
            "cpu_seconds": round(self.used["cpu_seconds"], 3),
            "peak_memory": self.peak_memory,
            "money": round(self.money, 6),
            "achieved": {name: int(self.achieved[name]) for name in SUMS},
            "saves_monthly": round(self.saves, 6),
        }


@dataclass(slots=True)
class Shadow:
    """What a shadow budget would have done. Runs held back, with their money, and others begun first."""

    held: int = 0
    money: float = 0.0
    others: int = 0

    def add(self, run: Mapping[str, Any], prices: Mapping[str, Prices]) -> None:
        """Add one run of a ledger."""
        would = ((run["plan"] or {}).get("shadow") or {}).get("would")
        self.others += would == "run_other"
        if would == OVER_BUDGET:
            self.held += 1
            self.money += money_of(run["used"] or {}, prices)

    def to_json(self) -> dict[str, Any]:
        """The entry ``shadow``."""
        return {"held": self.held, "money": round(self.money, 6), "others": self.others}


def ledger_document(
    runs: Iterable[Mapping[str, Any]],
    prices: Mapping[str, Prices],
    currency: str,
    by: By,
    since: datetime,
    polls: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The document of ``memwal-ops cost``: the sums of all runs, and of those of each table, job or day.

    The dearest first, days in their order. ``polls``: what of that is of polls. ``shadow``: what a budget that is a
    shadow would have done. ``estimates``: how wrong those were that were made when runs began.
    """
    groups: dict[str, Sums] = {}
    total = Sums()
    errors: list[float] = []
    polled, shadow = Sums(), Shadow()
    for poll in polls:
        for sums in (groups.setdefault("poll" if by == "job" else poll[by], Sums()), total, polled):
            sums.add_polls(poll, prices)
    for run in runs:
        key = _day(run["started"]) if by == "day" else str(run[by])
        groups.setdefault(key, Sums()).add(run, prices)
        total.add(run, prices)
        errors += _errors(run, prices)
        shadow.add(run, prices)
    parts = [{by: key, **sums.to_json()} for key, sums in groups.items()]
    if by == "day":
        parts.sort(key=lambda one: str(one["day"]))
    else:
        parts.sort(key=lambda one: (-one["money"], -one["cpu_seconds"], one[by]))
    return {
        "since": since.isoformat(timespec="seconds"),
        "currency": currency,
        "by": by,
        "groups": parts,
        "total": total.to_json(),
        "polls": {"polls": polled.polls, "requests": sum(polled.requests.values()), "money": round(polled.money, 6)},
        "shadow": shadow.to_json(),
        "estimates": {"runs": len(errors), "error": round(median(errors), 3) if errors else None},
        "prices": {store: one.to_json() for store, one in prices.items()},
    }


def _errors(run: Mapping[str, Any], prices: Mapping[str, Prices]) -> list[float]:
    """How wrong the estimate was that was made when a run began: none if there was none."""
    expected = (run["plan"] or {}).get("cost")
    if not expected or not run["used"] or run["outcome"] != "succeeded":
        return []
    actual = money_of(run["used"], prices)
    if actual:
        return [relative_error(float(expected["money"]), actual)]
    return [relative_error(float(expected["seconds"]), max(0.001, run["finished"] - run["started"]))]


def _day(started: float) -> str:
    return f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d}"
