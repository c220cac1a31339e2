"""The types of the status document, which ``/status`` and ``memwal-ops status`` print, and its budget in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypedDict

from memwal_ops.core.cost import money_text
from memwal_ops.text import counted, duration_text, size_text, time_text

_NOUNS = {"cpu": " of processor", "bytes_written": " written", "requests": " requests", "money": ""}


def budget_notes(budget: Mapping[str, Any] | None) -> list[str]:
    """The line of a budget; nothing if there is none, or none with limits."""
    return [] if budget is None or not budget["limits"] else [budget_text(budget)]


def budget_text(budget: Mapping[str, Any]) -> str:
    """One line: each limit, what all members used of it, and the part of this one."""
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
    if any(budget["used"][name] > limit for name, limit in budget["limits"].items()):
        text += " One run may use more than a limit if nothing was used before it; it is charged for longer."
    return text


def _amount(name: str, amount: float, currency: str) -> str:
    if name == "money":
        return money_text(amount, currency)
    return time_text(amount) if name == "cpu" else size_text(amount) if name == "bytes_written" else f"{amount:,.0f}"


def applicable_jobs(table: Mapping[str, Any]) -> dict[str, Any]:
    """The jobs in a table's status that apply to it: the others never run, and say nothing of it."""
    return {name: job for name, job in table["jobs"].items() if job.get("applies", True)}


class LeaseHolder(TypedDict):
    """The holder of a lease."""

    instance: str
    name: str


class LeaseStatus(TypedDict):
    """The lease of a job: ``state`` is free, held (by this service) or elsewhere."""

    state: str
    holder: LeaseHolder | None
    token: int | None
    expires: str | None
    elsewhere_seconds: float


class PauseStatus(TypedDict):
    """A pause: ``until`` None: until it is resumed."""

    until: str | None
    reason: str
    by: str
    since: str


class BreakerStatus(TypedDict):
    """An open circuit breaker: ``reason`` is failures or saves_nothing (triggers are ignored), after so many runs."""

    reason: str
    runs: int
    until: str


class JobStatus(TypedDict):
    """A job on a table. Times are ISO 8601, UTC; None: never, or unknown.

    ``applies``: whether it applies to the table, as far as polls have shown it. ``answers_only``: of a verification.
    ``next_run``: see :class:`memwal_ops.core.outlook.NextRun`; None for a job whose metrics do not show it.
    ``limit``: that of the fleet's budget which a run would pass, if it waits for that.
    ``asked``: who requested the run that is due or in flight, ``by`` and ``since``. ``progress``: of the run in flight,
    as its job reports it: activity, unit, done, total, detail, seconds_left.
    ``paused``: its own pause; its table and the fleet may be paused, too.
    ``scheduling``: what a forecast needs beside, and nothing else reads; also of a table.
    """

    state: str
    waiting_for: str | None
    why: str | None
    apply: bool
    applies: bool
    answers_only: bool
    schedule: str | None
    schedule_seconds: float
    next_due: str | None
    when: str | None
    last_started: str | None
    last_finished: str | None
    last_success: str | None
    last_outcome: str | None
    seconds_since_success: float | None
    consecutive_failures: int
    waiting_seconds: float
    running_seconds: float
    asked: dict[str, Any] | None
    progress: dict[str, Any] | None
    backoff_seconds: float
    next_run: dict[str, Any] | None
    breaker: BreakerStatus | None
    limit: str | None
    scheduling: dict[str, Any]
    paused: PauseStatus | None
    pid: int | None
    lease: LeaseStatus


class TableStatus(TypedDict):
    """The status of a table. ``state`` is not_read before the first poll, unreadable if the last one failed, or read.

    ``backlog`` has its backlog metrics by name, as the specs of its jobs declare them.

    ``answers``: how well its indexes answer, by the last ``verify --answers``: the entries of its report, with
    ``asked_at`` and ``asked_version``. ``expect_writes_seconds`` and ``labels``: of the configuration.
    ``idle_poll_seconds``: while it is idle, a write is seen within this time.
    """

    name: str
    uri: str
    format: str | None
    version: int | None
    state: str
    backlog: dict[str, float]
    looked_at: str | None
    seconds_since_look: float | None
    look_error: str | None
    idle_poll_seconds: float | None
    expect_writes_seconds: float | None
    labels: dict[str, str]
    clock_skew_seconds: float | None
    answers: list[dict[str, Any]]
    paused: PauseStatus | None
    scheduling: dict[str, Any] | None
    jobs: dict[str, JobStatus]


class PoolStatus(TypedDict):
    """A pool of workers. ``credit``: what its oldest job is owed, in what runs cost."""

    limit: int
    workers: int
    busy: int
    queued: int
    credit: float


class ConfigStatus(TypedDict):
    """The effective configuration; ``error``: why the current file is not, or not fully, in effect."""

    file: str
    loaded: str
    error: str | None


class PatternFault(TypedDict):
    """A pattern that could not be expanded, or only in part."""

    pattern: str
    error: str


class DeliveryFault(TypedDict):
    """A target whose last notification was not delivered; of ``heartbeat`` the last heartbeat."""

    target: str
    error: str


class OwnBudgetStatus(TypedDict):
    """What this supervisor has of the budget of the fleet."""

    used: dict[str, float]
    in_flight: dict[str, float]


class BudgetStatus(TypedDict):
    """The budget of the fleet. Its limits, what was used within ``per_seconds``, and what runs are expected to use.

    ``members``: how many of them live. ``members_unread``: how many of them are taken to use as much as this one, as
    the store of the fleet cannot be read.
    ``used_up``: the limit that is reached, or that all that waits would pass; runs that restore objectives may start.
    None: nothing is deferred. ``frees``: when the next run may start.
    """

    per_seconds: float
    currency: str
    shadow: bool
    limits: dict[str, float]
    used: dict[str, float]
    in_flight: dict[str, float]
    own: OwnBudgetStatus
    members: int
    members_unread: int
    used_up: str | None
    frees: str | None


class MemberStatus(TypedDict):
    """A member of the fleet, by its last record; what is None could not be read.

    ``tables``: those that it maintains, of ``known_tables``. ``same_tables``: its configuration names the tables that
    this member's does; ``same_budget``: it has the same ``budget``; ``refused_use``: why what
    it says that it used is left out of the budget.
    """

    name: str
    holder: str | None
    version: str | None
    started: str | None
    living: bool
    tables: int | None
    known_tables: int | None
    same_tables: bool
    same_budget: bool
    refused_use: str | None
    seconds_since_heartbeat: float


class FleetDocument(TypedDict):
    """The fleet as this member sees it. ``state`` is joining, joined or unreachable; ``error``: why the last."""

    uri: str
    name: str
    state: str
    error: str | None
    heartbeat_seconds: float
    members: list[MemberStatus]


class EventsStatus(TypedDict):
    """Events of S3: ``state`` is starting, listening or unreachable; ``error``: why the last.

    ``last_event``: the last one that had a table polled. ``lag_seconds``: age of the oldest message of the last
    request; 0: there was none. ``tables``: how many events come for. ``missed``: those with commits that none did.
    ``unreadable``: messages of the last hours that are not S3's, and what the last of them is.
    """

    queue: str
    state: str
    error: str | None
    last_message: str | None
    last_event: str | None
    lag_seconds: float | None
    tables: int
    missed: list[str]
    unreadable: int
    unreadable_error: str | None


class ServiceStatus(TypedDict):
    """The service itself; ``fleet`` and ``events`` are None unless they are configured."""

    version: str
    pid: int
    instance: str
    holder: str
    started: str
    ready: bool
    stopping: bool
    leases: bool
    paused: PauseStatus | None
    budget: BudgetStatus | None
    state_dir: str
    state_error: str | None
    config: ConfigStatus
    discovery_faults: list[PatternFault]
    discovery_pending: list[str]
    delivery_faults: list[DeliveryFault]
    fleet: FleetDocument | None
    events: EventsStatus | None


class StatusDocument(TypedDict):
    """The document of ``/api/v1/status``."""

    service: ServiceStatus
    pools: dict[str, PoolStatus]
    tables: list[TableStatus]
