"""Keep one row for each table, for the page of all of them: made when a table changes, not when a page is asked for.

With ten thousand tables the status of all takes seconds of processor time, so a request only filters and sorts rows.
Those that it shows are made anew. An invalid parameter is ignored: a link from an older release still shows tables.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

from memwal_ops.core.figures import backlog_of
from memwal_ops.storage.locations import is_catalog
from memwal_ops.supervisor.observe import findings
from memwal_ops.supervisor.observe.status_document import TableStatus, applicable_jobs

_CHUNK = 100
# A job becomes late without any event; the shortest time after which it is late is three minutes.
_VALID_SECONDS = 120.0
_STALE_SECONDS, _IDLE_SECONDS = 5.0, 60.0
# While no page is asked for, refreshing takes half a hundredth of a core.
_IDLE_FACTOR = 200.0


class Tables(Protocol):
    """The tables of the service."""

    def stamps(self, names: Iterable[str] | None = None) -> Mapping[str, object]:
        """Return for each table, or for these, by name, a value that changes with its status."""

    def status(self, names: Iterable[str]) -> list[TableStatus]:
        """Return the status of those that exist, in the order of ``names``."""

    def deletable_later(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what ``expire`` reported last as deletable later, by the names of tables: ``bytes`` and ``by``."""

    def costs(self) -> Mapping[str, float]:
        """Return what the runs of the last week cost, by the names of tables, as last read."""

    def read_costs(self) -> None:
        """Read what the runs cost that have ended since the last call."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the page of all tables has about one. Numbers and times are None where they are not known.

    Attributes:
        state: ``not_read``, ``unreadable`` or ``read``.
        what: its worst finding; ``findings``: how many there are.
        folder: the folder of a database, or the catalog, that the table is in.
        held: bytes that only older revisions need, ``free``: when the last of them can go, by ISO 8601.
        coverage: the share of rows that the least complete index covers; ``recall``: the lowest of its vector indexes.
        waiting: the backlog, counted in ``noun``; ``age``: seconds that its oldest part waits; ``blocked``: no job
            processes a part of it.
        last: the job that ran last, its outcome and when it ended; ``next``: the job that is due next, and when;
            ``next_waits``: what it has waited for since then; empty: it does not.
        cost: what its runs of the last week cost.
    """

    name: str
    uri: str
    format: str
    folder: str
    state: str
    read: bool
    level: int
    what: str
    findings: int
    rows: float | None
    bytes: float | None
    held: float | None
    free: str | None
    parts: float | None
    coverage: float | None
    recall: float | None
    waiting: float | None
    noun: str
    age: float | None
    blocked: bool
    last_job: str
    last_outcome: str
    last: str | None
    next_job: str
    next: str | None
    next_waits: str
    running: str
    paused: bool
    verified: bool
    cost: float | None
    labels: Mapping[str, str]


def row_of(
    table: Mapping[str, Any], reported: Sequence[findings.Finding], later: Mapping[str, Any], cost: float | None = None
) -> Row:
    """Return the row of a table; ``later``: what ``expire`` reported last as deletable later."""
    backlog = backlog_of(table)
    rows, uncovered = backlog.amount("table_rows"), backlog.amount("uncovered")
    covered = rows and uncovered is not None and backlog.amount("indexes")
    recalls = [one["recall"] for one in table["answers"] if one.get("recall") is not None]
    jobs = applicable_jobs(table)
    nothing: tuple[str, Mapping[str, Any]] = ("", {})
    ran = max(jobs.items(), key=lambda one: one[1]["last_finished"] or "", default=nothing)
    due_job = findings.next_job(jobs) or ""
    worst_finding = max(reported, key=lambda one: findings.severity(findings.level_of_finding(one)), default=None)
    held = backlog.amount("held")
    ran_job, ran_last = ran if ran[1].get("last_finished") else nothing
    due_next = jobs.get(due_job, {})
    waits = findings.waits_text(due_next) if due_next.get("waiting_seconds") else ""
    since = datetime.now(UTC) - timedelta(seconds=due_next.get("waiting_seconds", 0.0))
    return Row(
        name=table["name"], uri=table["uri"], format=table["format"] or "", folder=_folder(table["uri"]),
        state=table["state"], read=table["looked_at"] is not None,
        level=findings.OK if worst_finding is None else findings.level_of_finding(worst_finding),
        what="" if worst_finding is None else worst_finding["what"], findings=len(reported), rows=rows,
        bytes=backlog.amount("table_bytes"), held=later.get("bytes") if held is None else held, free=later.get("by"),
        parts=backlog.amount("parts"),
        coverage=1 - min(1.0, (uncovered or 0) / rows) if covered and rows else None,
        recall=min(recalls, default=None), waiting=backlog.amount("backlog"), noun=backlog.noun_of("backlog"),
        age=backlog.amount("age"), blocked=bool(backlog.amount("blocked")),
        last_job=ran_job, last_outcome=ran_last.get("last_outcome") or "",
        last=ran_last.get("last_finished"), next_job=due_job, next_waits=waits,
        next=since.isoformat() if waits else due_next.get("next_due"),
        running=", ".join(name for name, job in jobs.items() if job["state"] == "running"),
        paused=bool(table.get("paused")) or any(job.get("paused") for job in jobs.values()),
        verified=findings.is_verified(jobs), cost=cost, labels=table.get("labels", {}),
    )  # fmt: skip


def _folder(uri: str) -> str:
    parent = uri.partition("?")[0].rstrip("/").rpartition("/")[0]
    return parent if not is_catalog(uri) or "/" in parent.partition("://")[2] else uri.partition("?")[0]


class Overview:
    """The rows of all tables. Safe on any thread."""

    def __init__(self, tables: Tables, reported: Callable[[Mapping[str, Any]], list[findings.Finding]]) -> None:
        self._tables, self._findings = tables, reported
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[object, float, Row]] = {}
        self._refreshed = float("-inf")
        self._asked, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._keep_fresh, name="overview", daemon=True)

    def start(self) -> None:
        """Refresh the rows on a thread: at once when a page was asked for, else once a minute, or less often."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Read nothing more; a refresh in progress may take so long."""
        self._closing = True
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def count(self) -> int:
        """How many tables there were when the rows were last made."""
        return len(self._rows)

    def rows(self) -> list[Row]:
        """Return the rows of all tables, as they were last made; they are made now if that never happened."""
        if self._refreshed == float("-inf"):
            self.refresh()
        elif time.monotonic() - self._refreshed > _STALE_SECONDS:
            self._asked.set()
        return [row for _, _, row in [*self._rows.values()]]

    def renewed(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of these tables as they are now; without those of tables that were removed."""
        unknown = (None, 0.0, None)
        return self._made({row.name: self._rows.get(row.name, unknown)[0] for row in rows})

    def refresh(self) -> None:
        """Make the rows of all tables that have changed."""
        with self._lock:
            stamps, now = self._tables.stamps(), time.monotonic()
            for name in self._rows.keys() - stamps.keys():
                del self._rows[name]
            stale = {
                name: stamp
                for name, stamp in stamps.items()
                if (known := self._rows.get(name)) is None or known[0] != stamp or now - known[1] > _VALID_SECONDS
            }
            self._made(stale)
            self._refreshed = time.monotonic()

    def _keep_fresh(self) -> None:
        self._tables.read_costs()
        took = 0.0
        while not self._closing:
            self._asked.wait(max(_IDLE_SECONDS, took * _IDLE_FACTOR))
            self._asked.clear()
            if not self._closing:
                began = time.thread_time()
                self._tables.read_costs()
                self.refresh()
                took = time.thread_time() - began

    def _made(self, stamps: Mapping[str, object]) -> list[Row]:
        names, made = [*stamps], []
        later, costs = (self._tables.deletable_later(), self._tables.costs()) if names else ({}, {})
        for at in range(0, len(names), _CHUNK):
            for table in self._tables.status(names[at : at + _CHUNK]):
                row = row_of(table, self._findings(table), later.get(table["name"], {}), costs.get(table["name"]))
                self._rows[row.name] = (stamps[row.name], time.monotonic(), row)
                made.append(row)
        return made


PAGE_ROWS = 100
_MAX_TEXT, _MAX_QUERY = 200, 10_000
_MAX_PAGE = 100_000
STATES: dict[str, int | None] = {
    "critical": findings.CRITICAL,
    "warning": findings.WARNING,
    "ok": findings.OK,
    "paused": None,
    "running": None,
    findings.NOT_READ: None,
}
GROUPS: dict[str, Callable[[Row], str]] = {
    "database": lambda row: row.folder,
    "format": lambda row: row.format or "unknown",
    "state": lambda row: findings.WORDS[row.level],
}
_LABEL = "label:"
_LABELS = re.compile(r"label:[A-Za-z0-9_.-]{1,63}")
_VALUES = (
    "name", "format", "rows", "held", "free", "parts", "coverage", "recall", "waiting", "age", "last", "next", "cost",
)  # fmt: skip
SORTS: dict[str, Callable[[Row], Any]] = {
    **{name: attrgetter(name) for name in _VALUES},
    "size": attrgetter("bytes"),
    "state": lambda row: findings.severity(row.level),
}
_ASCENDING = frozenset({"name", "format", "free", "coverage", "recall", "next"})


@dataclass(frozen=True, slots=True)
class FleetQuery:
    """What a reader wants to see.

    Attributes:
        q: words that the name, the URI, the labels (``team=search``) or the finding of a table must have.
        state: of ``STATES``; ``format``: a format's name; empty: all.
        group: of ``GROUPS``, or a label as ``label:NAME``: show groups instead of tables; empty: tables.
        place: the folder or catalog of which to show the tables; empty: of all.
        label: as ``NAME=VALUE``: tables with that label; without a value, those that have none; empty: all.
        sort: of ``SORTS``; ``down``: the largest first.
        page: from 1.
    """

    q: str = ""
    state: str = ""
    format: str = ""
    group: str = ""
    place: str = ""
    label: str = ""
    sort: str = "state"
    down: bool = True
    page: int = 1

    @classmethod
    def read(cls, text: str) -> FleetQuery:
        """Return the query of a query string."""
        given = dict(parse_qsl(text, errors="surrogateescape", max_num_fields=50)) if len(text) <= _MAX_QUERY else {}
        sort = given.get("sort", "")
        sort = sort if sort in SORTS else "state"
        order, page = given.get("order"), given.get("page", "")
        return cls(
            q=given.get("q", "")[:_MAX_TEXT].strip(),
            state=given["state"] if given.get("state") in STATES else "",
            format=given.get("format", "")[:_MAX_TEXT],
            group=group if (group := given.get("group", "")) in GROUPS or _LABELS.fullmatch(group) else "",
            place=given.get("in", "")[: 10 * _MAX_TEXT],
            label=given.get("label", "")[:_MAX_TEXT],
            sort=sort,
            down=order == "down" or (order != "up" and sort not in _ASCENDING),
            page=min(int(page), _MAX_PAGE) if page.isascii() and page.isdigit() and int(page) else 1,
        )

    def link(self, **changes: Any) -> str:
        """Return the address of this query with changes; a change of anything but the page leads to the first one."""
        changed = replace(self, **{"page": 1, **changes})
        given = {
            **{name: getattr(changed, name) for name in ("q", "state", "format", "group", "label")},
            "in": changed.place,
            "sort": "" if changed.sort == "state" and changed.down else changed.sort,
            "order": "" if changed.down == (changed.sort not in _ASCENDING) else "down" if changed.down else "up",
            "page": "" if changed.page == 1 else changed.page,
        }
        text = urlencode({name: value for name, value in given.items() if value}, errors="surrogateescape")
        return f"/?{text}" if text else "/"

    def sort_link(self, column: str) -> str:
        """Return the address that sorts by a column; by the one that is sorted already, the other way round."""
        return self.link(sort=column, down=not self.down if column == self.sort else column not in _ASCENDING)

    def matches(self, row: Row) -> bool:
        """Whether to show a table."""
        return (
            (not self.state or _has_state(row, self.state))
            and (not self.format or (row.format or "unknown") == self.format)
            and (not self.place or row.folder == self.place)
            and (not self.label or _label_of(row, self.label.partition("=")[0]) == self.label)
            and (not self.q or _has_words(row, self.q.lower().split()))
        )


def _has_state(row: Row, state: str) -> bool:
    if (level := STATES[state]) is not None:
        return row.level == level
    if state == findings.NOT_READ:
        return row.state == findings.NOT_READ
    return row.paused if state == "paused" else bool(row.running)


def _label_of(row: Row, name: str) -> str:
    return f"{name}={row.labels.get(name, '')}"


def _has_words(row: Row, words: Iterable[str]) -> bool:
    labels = " ".join(_label_of(row, name) for name in row.labels)
    text = f"{row.name} {row.uri} {labels} {row.what}".lower()
    return all(word in text for word in words)


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of some tables: those that are ``read``; None where no table has such an amount.

    Attributes:
        read: how many tables were read at least once; ``not_read``: how many had no poll yet.
        cost: what their runs of the last week cost; None: nothing is known.
        free: the next time at which held bytes can go, by ISO 8601; ``free_table``: of which table.
    """

    tables: int
    read: int
    not_read: int
    critical: int
    warning: int
    ok: int
    paused: int
    running: int
    rows: float | None
    bytes: float | None
    held: float | None
    waiting: float | None
    cost: float | None
    free: str | None
    free_table: str

    @property
    def level(self) -> int:
        """The level of the worst table."""
        counts = {findings.CRITICAL: self.critical, findings.UNKNOWN: self.not_read, findings.WARNING: self.warning}
        return findings.worst(level for level, count in counts.items() if count)


def totals(rows: Sequence[Row]) -> Totals:
    """Return the sums of tables."""
    levels = Counter(row.level for row in rows)
    soonest = min((row for row in rows if row.free), key=lambda row: row.free or "", default=None)
    read, unread = sum(row.read for row in rows), sum(row.state == findings.NOT_READ for row in rows)
    return Totals(
        len(rows), read, unread, levels[findings.CRITICAL], levels[findings.WARNING], levels[findings.OK],
        sum(row.paused for row in rows), sum(bool(row.running) for row in rows), _sum(row.rows for row in rows),
        _sum(row.bytes for row in rows), _sum(row.held for row in rows), _sum(row.waiting for row in rows),
        _sum(row.cost for row in rows),
        None if soonest is None else soonest.free, "" if soonest is None else soonest.name,
    )  # fmt: skip


_FIRST = 5


def first_look(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what is wrong and what is behind: of both the worst tables, and how many there are."""
    wrong = sorted(
        (row for row in rows if row.level in {findings.WARNING, findings.CRITICAL}),
        key=lambda row: (-findings.severity(row.level), row.name),
    )
    behind = [
        row
        for row in rows
        if (row.waiting and row.blocked)
        or findings.level_of(row.waiting or 0, findings.DEFAULT_LIMITS.waiting)
        or findings.level_of(row.age or 0, findings.DEFAULT_LIMITS.age)
    ]
    behind.sort(key=lambda row: (-(row.age or 0), -(row.waiting or 0), row.name))
    return {
        "wrong": wrong[:_FIRST],
        "behind": behind[:_FIRST],
        "count": {"wrong": len(wrong), "behind": len(behind), "waiting": sum(bool(row.waiting) for row in rows)}
        | {"unverified": sum(row.read and not row.verified for row in rows)},
        "oldest": max((row.age for row in rows if row.age), default=None),
    }


def columns_of(rows: Sequence[Row]) -> set[str]:
    """Return the columns in which some table has a value: the others are not shown."""
    return {name for name, value in SORTS.items() if any(value(row) for row in rows)} | {"state", "name"}


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


def page_of(rows: Sequence[Row], query: FleetQuery) -> tuple[list[Row], int]:
    """Return the rows of a page, sorted, and the number of pages; what is not known comes last."""
    value, pages = SORTS[query.sort], max(1, -(-len(rows) // PAGE_ROWS))
    by_name = sorted(rows, key=lambda row: row.name)
    known = [row for row in by_name if value(row) is not None]
    known.sort(key=value, reverse=query.down)
    ordered = known if len(known) == len(by_name) else [*known, *(row for row in by_name if value(row) is None)]
    first = (min(query.page, pages) - 1) * PAGE_ROWS
    return ordered[first : first + PAGE_ROWS], pages


def group_names(rows: Iterable[Row]) -> list[str]:
    """Return by what tables can be grouped: ``GROUPS``, and each label that one of them has."""
    return [*GROUPS, *sorted({f"{_LABEL}{name}" for row in rows for name in row.labels})]


def groups_of(rows: Iterable[Row], query: FleetQuery) -> list[tuple[str, str, Totals]]:
    """Return the groups of tables, the worst and largest first: each with its name, address and sums."""
    label, key = query.group.removeprefix(_LABEL), GROUPS.get(query.group)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.labels.get(label, "") if key is None else key(row), []).append(row)
    found = [(name, _group_link(query, name), totals(some)) for name, some in groups.items()]
    return sorted(found, key=lambda one: (-findings.severity(one[2].level), -one[2].tables, one[0]))


def _group_link(query: FleetQuery, name: str) -> str:
    if query.group.startswith(_LABEL):
        return query.link(group="", label=f"{query.group.removeprefix(_LABEL)}={name}")
    return query.link(group="", **{"place" if query.group == "database" else query.group: name})
