"""Keep one row for each table, for the page of all of them: made when a table changes, not when a page is asked for.

With ten thousand tables the status of all takes seconds of processor time, so a request only filters and sorts rows.
Those that it shows are made anew: what a reader sees is never older than the request.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from memwal_ops.core.figures import backlog_of
from memwal_ops.storage.catalogs import is_catalog
from memwal_ops.supervisor.observe.findings import OK, level_of_finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memwal_ops.supervisor.observe.findings import Finding
    from memwal_ops.supervisor.observe.status_document import TableStatus

_CHUNK = 100
# A job becomes late without any event; the shortest time after which it is late is three minutes.
_VALID_SECONDS = 120.0
_STALE_SECONDS, _IDLE_SECONDS = 5.0, 60.0


class Tables(Protocol):
    """The tables of the service."""

    def stamps(self) -> Mapping[str, object]:
        """Return for each table, by name, a value that changes with its status."""

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
        level: the level of its worst finding.
        what: its worst finding; ``findings``: how many there are.
        folder: the folder of a database, or the catalog, that the table is in.
        held: bytes that only older revisions need, ``free``: when the last of them can go, by ISO 8601.
        coverage: the share of rows that the least complete index covers; ``recall``: the lowest of its vector indexes.
        waiting: the backlog, counted in ``noun``; ``age``: seconds that its oldest part waits.
        last: the job that ran last, its outcome and when it ended; ``next``: the job that is due next, and when.
        running: the jobs that run.
        paused: its runs are paused, or those of a job.
        cost: what its runs of the last week cost.
        labels: those of the configuration.
    """

    name: str
    uri: str
    format: str
    folder: str
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
    last_job: str
    last_outcome: str
    last: str | None
    next_job: str
    next: str | None
    running: str
    paused: bool
    cost: float | None
    labels: Mapping[str, str]


def row_of(
    table: Mapping[str, Any], findings: Sequence[Finding], later: Mapping[str, Any], cost: float | None = None
) -> Row:
    """Return the row of a table.

    Args:
        table: its status document.
        findings: what is wrong with it.
        later: what ``expire`` reported last as deletable later.
        cost: what its runs of the last week cost.
    """
    backlog = backlog_of(table)
    rows, uncovered = backlog.amount("table_rows"), backlog.amount("uncovered")
    covered = rows and uncovered is not None and backlog.amount("indexes")
    recalls = [one["recall"] for one in table["answers"] if one.get("recall") is not None]
    jobs = {name: job for name, job in table["jobs"].items() if job.get("applies", True)}
    ran = max(jobs.items(), key=lambda one: one[1]["last_finished"] or "", default=("", None))
    due = min(jobs.items(), key=lambda one: one[1]["next_due"] or "~", default=("", None))
    worst = max(findings, key=level_of_finding, default=None)
    held = backlog.amount("held")
    return Row(
        name=table["name"],
        uri=table["uri"],
        format=table["format"] or "",
        folder=_folder(table["uri"]),
        level=OK if worst is None else level_of_finding(worst),
        what="" if worst is None else worst["what"],
        findings=len(findings),
        rows=rows,
        bytes=backlog.amount("table_bytes"),
        held=later.get("bytes") if held is None else held,
        free=later.get("by"),
        parts=backlog.amount("parts"),
        coverage=1 - min(1.0, (uncovered or 0) / rows) if covered and rows else None,
        recall=min(recalls, default=None),
        waiting=backlog.amount("backlog"),
        noun=backlog.noun_of("backlog"),
        age=backlog.amount("age"),
        last_job=ran[0] if ran[1] is not None and ran[1]["last_finished"] else "",
        last_outcome="" if ran[1] is None else ran[1]["last_outcome"] or "",
        last=None if ran[1] is None else ran[1]["last_finished"],
        next_job=due[0] if due[1] is not None and due[1]["next_due"] else "",
        next=None if due[1] is None else due[1]["next_due"],
        running=", ".join(name for name, job in jobs.items() if job["state"] == "running"),
        paused=bool(table.get("paused")) or any(job.get("paused") for job in jobs.values()),
        cost=cost,
        labels=table.get("labels", {}),
    )


def _folder(uri: str) -> str:
    """Return the folder of a table, or the catalog's part of its URI."""
    parent = uri.partition("?")[0].rstrip("/").rpartition("/")[0]
    return parent if not is_catalog(uri) or "/" in parent.partition("://")[2] else uri.partition("?")[0]


class Overview:
    """The rows of all tables. Safe on any thread.

    Args:
        tables: the tables.
        findings: returns what is wrong with a table, by its status document.
    """

    def __init__(self, tables: Tables, findings: Callable[[Mapping[str, Any]], list[Finding]]) -> None:
        """Make no row yet."""
        self._tables, self._findings = tables, findings
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[object, float, Row]] = {}
        self._refreshed = float("-inf")
        self._asked = threading.Event()

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

    def keep_fresh(self) -> None:
        """Refresh the rows as long as the process runs: at once when a page was asked for, else once a minute."""
        self._tables.read_costs()
        while True:
            self._asked.wait(_IDLE_SECONDS)
            self._asked.clear()
            self._tables.read_costs()
            self.refresh()

    def _made(self, stamps: Mapping[str, object]) -> list[Row]:
        names, made = [*stamps], []
        later, costs = (self._tables.deletable_later(), self._tables.costs()) if names else ({}, {})
        for at in range(0, len(names), _CHUNK):
            for table in self._tables.status(names[at : at + _CHUNK]):
                row = row_of(table, self._findings(table), later.get(table["name"], {}), costs.get(table["name"]))
                self._rows[row.name] = (stamps[row.name], time.monotonic(), row)
                made.append(row)
        return made
