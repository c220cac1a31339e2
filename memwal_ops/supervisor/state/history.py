"""Record the history of all runs in a SQLite file, when one starts and when it ends, and answer what is asked of it.

Runs that were in flight when a service was killed are ``running`` in the file; the next service, which holds the lock
of the state folder, marks them as ``killed``. Runs are pruned by age and number.

In WAL mode a killed service loses nothing that it wrote. Another process may lock the file, such as a backup or the
sqlite3 shell: the tables do not wait for it, and what could not be written is written before the next statement.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Self

from memwal_ops.errors import HistoryError
from memwal_ops.storage.metering import KINDS
from memwal_ops.supervisor.state.directory import make_private, private_opener

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY,
    "table" TEXT NOT NULL, uri TEXT NOT NULL, job TEXT NOT NULL, supervisor TEXT NOT NULL,
    why TEXT NOT NULL, started REAL NOT NULL, finished REAL, outcome TEXT NOT NULL,
    exit_code INTEGER, decision TEXT, reason TEXT, error TEXT, remedy TEXT,
    plan TEXT NOT NULL, figures TEXT, phases TEXT, versions TEXT, report TEXT, log TEXT, used TEXT, achieved TEXT
);
CREATE INDEX IF NOT EXISTS runs_by_job ON runs ("table", job, started);
CREATE INDEX IF NOT EXISTS runs_by_uri ON runs (uri, job, started);
CREATE INDEX IF NOT EXISTS runs_by_time ON runs (started);
CREATE TABLE IF NOT EXISTS seen (
    "table" TEXT NOT NULL, job TEXT NOT NULL, first REAL NOT NULL, PRIMARY KEY ("table", job)
);
CREATE TABLE IF NOT EXISTS samples (
    "table" TEXT NOT NULL, at INTEGER NOT NULL, figures TEXT NOT NULL, PRIMARY KEY ("table", at)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS samples_by_time ON samples (at);
CREATE TABLE IF NOT EXISTS polls (
    "table" TEXT NOT NULL, day TEXT NOT NULL, store TEXT NOT NULL, polls INTEGER NOT NULL,
    "get" INTEGER NOT NULL, "put" INTEGER NOT NULL, "list" INTEGER NOT NULL, "delete" INTEGER NOT NULL,
    bytes_read INTEGER NOT NULL, bytes_written INTEGER NOT NULL, cpu_seconds REAL NOT NULL,
    PRIMARY KEY (day, "table", store)
) WITHOUT ROWID;
"""
_VERSION = 1
LEDGER = ("used", "achieved")
_ADDED = ("log", *LEDGER)
"""Columns of ``runs`` that a file of an earlier release lacks; that release reads a file that has them."""
# Another process may lock the file, such as a backup or the sqlite3 shell. The tables must not wait for it.
_BUSY_TIMEOUT = 2.0
_LOCKED_RETRY_SECONDS = 60.0
_MAX_PENDING = 1000


class HistoryFile:
    """The file of a history. Thread-safe; one process writes it, any number read it."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        """Use :meth:`open` or :meth:`open_to_read`."""
        self._connection = connection
        self._lock = threading.Lock()
        self._pending: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=_MAX_PENDING)
        self._locked_at = float("-inf")
        self.fault: str | None = None
        """Why the last write failed; None if it succeeded."""
        self.path = path

    @classmethod
    def open(cls, path: str) -> Self:
        """Open the file to write, and create it if it does not exist.

        Raises ``HistoryError``: it cannot be opened or created, or a newer release wrote it.
        """
        try:
            make_private(os.path.dirname(path) or ".")
            os.close(private_opener(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))  # SQLite makes its others as this one
            connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT, check_same_thread=False, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            _check_version(connection, path)
            connection.executescript(_SCHEMA)
            _add_columns(connection)
            connection.execute(f"PRAGMA user_version={_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise HistoryError(f"The history {path} cannot be opened: {error}.") from error
        connection.row_factory = sqlite3.Row
        return cls(connection, path)

    @classmethod
    def open_to_read(cls, path: str) -> Self:
        """Open the file to read, while another process may be writing it.

        Raises ``HistoryError``: it does not exist, cannot be read, or a newer release wrote it.
        """
        if not os.path.isfile(path):
            raise HistoryError(
                f"There is no history {path}.", remedy="Give --config or --state-dir of the service, or start it once."
            )
        try:
            connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
            connection.execute("PRAGMA query_only=1")
            _check_version(connection, path)
            connection.execute("SELECT 1 FROM runs LIMIT 1")
        except sqlite3.Error as error:
            raise HistoryError(f"The history {path} cannot be read: {error}.") from error
        connection.row_factory = sqlite3.Row
        return cls(connection, path)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @cached_property
    def _known_columns(self) -> frozenset[str]:
        """The columns of runs: a file of an earlier release, opened to read, lacks some."""
        return frozenset(str(row[1]) for row in self._read("PRAGMA table_info(runs)", ()))

    def _write(self, statement: str, values: Sequence[Any]) -> int:
        return self._execute(statement, values).rowcount

    def _execute(self, statement: str, values: Sequence[Any]) -> sqlite3.Cursor:
        with self._lock:
            try:
                # Wait for a locked file once a minute, not at every statement.
                timeout = _BUSY_TIMEOUT if time.monotonic() - self._locked_at > _LOCKED_RETRY_SECONDS else 0.0
                self._connection.execute(f"PRAGMA busy_timeout={int(timeout * 1000)}")
                while self._pending:
                    self._connection.execute(*self._pending[0])
                    self._pending.popleft()
                done = self._connection.execute(statement, values)
            except sqlite3.Error as error:
                self._locked_at = time.monotonic()
                self.fault = f"The history {self.path} cannot be written: {error}."
                raise HistoryError(self.fault) from error
            self.fault = None
            return done

    def _read(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            try:
                with closing(self._connection.execute(statement, values)) as cursor:
                    return cursor.fetchall()
            except sqlite3.Error as error:
                raise HistoryError(f"The history {self.path} cannot be read: {error}.") from error


def _add_columns(connection: sqlite3.Connection) -> None:
    known = {row[1] for row in connection.execute("PRAGMA table_info(runs)")}
    for name in _ADDED:
        if name not in known:
            connection.execute(f"ALTER TABLE runs ADD COLUMN {name} TEXT")


def _check_version(connection: sqlite3.Connection, path: str) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > _VERSION:
        connection.close()
        raise HistoryError(
            f"{path} was written by a newer release: it has format {version}, and this one reads up to {_VERSION}.",
            remedy="Upgrade memwal-ops here; or give the older release a state_dir of its own.",
        )


COMPLETED = ("succeeded", "partial")
FAILURES = ("failed", "died", "hung")
INTERRUPTED = ("stopped", "killed", "lost", "cancelled")
# Due again at the next start; after a lost lease, the job is its new holder's.
RESUMED = ("stopped", "killed")
FAILED_OUTCOMES = ("partial", *FAILURES, "lost", "killed")

BY_HAND = "by hand"
"""The supervisor, and the reason, of runs that no supervisor made."""

_RUN = ("id", "table", "uri", "job", "supervisor", "started", "finished", "outcome", "plan")
_DOCUMENTS = ("figures", "phases", "versions", "report", *LEDGER)
_MAX_LATER_RUNS = 50_000
# Of the samples of each table that are older than the first, the last one of each span of the second is kept (seconds).
_THINNED = ((86_400, 3600), (7 * 86_400, 6 * 3600))
_POLLS = ("table", "day", "store", "polls", *KINDS, "bytes_read", "bytes_written", "cpu_seconds")
PollRow = tuple[str | float, ...]
"""The columns of ``polls``."""
PastFigures = tuple[float, "Mapping[str, Any]", "Mapping[str, float]"]
"""Seconds of a run, what it used, and what it achieved."""


@dataclass(frozen=True, slots=True)
class LastRuns:
    """The last runs of a job on a table. Times are None if there was no such run.

    ``started`` is that of the last run that ended by itself: one that was stopped, killed or lost its lease does not
    count. ``attempted`` is that of the last run, however it ended; ``interrupted``: that was stopped or killed.
    ``failed``: when the last of the consecutive ``failures`` ended. ``fruitless``: so many of the last runs by trigger
    achieved nothing; ``fruitless_at``: when the last of them ended.
    """

    first_seen: datetime
    started: datetime | None
    finished: datetime | None
    succeeded: datetime | None
    outcome: str | None
    failures: int
    attempted: datetime | None = None
    interrupted: bool = False
    failed: datetime | None = None
    fruitless: int = 0
    fruitless_at: datetime | None = None

    def clamped(self, now: datetime) -> LastRuns:
        """Return the same with no time later than ``now``: times written with a wrong clock must not delay a job."""
        return replace(
            self,
            first_seen=min(self.first_seen, now),
            started=_not_after(self.started, now),
            finished=_not_after(self.finished, now),
            succeeded=_not_after(self.succeeded, now),
            attempted=_not_after(self.attempted, now),
            failed=_not_after(self.failed, now),
            fruitless_at=_not_after(self.fruitless_at, now),
        )


class History(HistoryFile):
    """The history file. Thread-safe; one process writes it, any number read it."""

    def mark_killed(self, now: datetime) -> int:
        """Mark the runs that were in flight when the last service was killed; return how many there were."""
        return self._write(
            "UPDATE runs SET outcome='killed', finished=?, reason='killed', "
            "error='The service ended while this ran.' WHERE outcome='running'",
            (now.timestamp(),),
        )

    def record_first_seen(self, table: str, job: str, now: datetime) -> None:
        """Record when a job on a table was first seen."""
        if not self._read('SELECT 1 FROM seen WHERE "table"=? AND job=?', (table, job)):
            values = (table, job, now.timestamp())
            self._write('INSERT OR IGNORE INTO seen ("table", job, first) VALUES (?, ?, ?)', values)

    def begin(
        self, *, table: str, uri: str, job: str, supervisor: str, why: str, plan: Mapping[str, Any], now: datetime
    ) -> int:
        """Record the start of a run; return its number."""
        cursor = self._execute(
            'INSERT INTO runs ("table", uri, job, supervisor, why, started, outcome, plan) '
            "VALUES (?, ?, ?, ?, ?, ?, 'running', ?)",
            (table, uri, job, supervisor, why, now.timestamp(), json.dumps(plan, default=str)),
        )
        return int(cursor.lastrowid or 0)

    def add(self, *, uri: str, job: str, started: datetime, finished: datetime, outcome: str, **details: Any) -> None:
        """Record a run that was made by hand, under the name of its table here; its URI if it has none.

        It is shown with the others, and counts in the ledger. No schedule and no budget depends on it.
        """
        named = self._read('SELECT "table" FROM runs WHERE uri=? ORDER BY id DESC LIMIT 1', (uri,))
        values = {
            "table": named[0]["table"] if named else uri,
            "uri": uri,
            "job": job,
            "supervisor": BY_HAND,
            "why": BY_HAND,
            "started": started.timestamp(),
            "finished": finished.timestamp(),
            "outcome": outcome,
            **_columns({"plan": {}, **details}),
        }
        names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        self._write(f"INSERT INTO runs ({names}) VALUES ({marks})", (*values.values(),))  # noqa: S608 - our own names

    def finish(self, number: int, now: datetime, outcome: str, **details: Any) -> None:
        """Record the end of a run; ``details`` are columns. A failed write is repeated before the next one."""
        values = _columns(details)
        sets = ", ".join(f"{name}=?" for name in values)
        statement = f"UPDATE runs SET outcome=?, finished=?{', ' if sets else ''}{sets} WHERE id=?"  # noqa: S608 - our own names
        given = (outcome, now.timestamp(), *values.values(), number)
        try:
            self._write(statement, given)
        except HistoryError as error:
            if isinstance(error.__cause__, sqlite3.OperationalError):  # a fault of the file, not of the statement
                self._pending.append((statement, given))
            raise

    def prune(self, now: datetime, keep: timedelta, max_runs: int) -> int:
        """Delete runs that started more than ``keep`` ago, and all but the newest ``max_runs``; return how many."""
        return self._write(
            "DELETE FROM runs WHERE outcome != 'running' AND (started < ? OR id <= "
            "(SELECT id FROM runs ORDER BY id DESC LIMIT 1 OFFSET ?))",
            ((now - keep).timestamp(), max_runs),
        )

    def add_samples(self, samples: Sequence[tuple[str, int, Mapping[str, float]]]) -> None:
        """Record the figures of tables at a time: the name, seconds since 1970, and the figures by role."""
        if samples:
            statement = (
                "INSERT OR REPLACE INTO samples (\"table\", at, figures) SELECT json_extract(value, '$[0]'), "
                "json_extract(value, '$[1]'), json_extract(value, '$[2]') FROM json_each(?)"
            )
            self._write(statement, (json.dumps(samples),))

    def samples(self, table: str, since: datetime) -> list[tuple[int, dict[str, float]]]:
        """Return the recorded figures of a table, by role, in the order of time: the last before ``since``, and later.

        A figure that does not change is recorded rarely: it is as in the last sample.
        """
        rows = self._read(
            'SELECT at, figures FROM samples WHERE "table"=?1 AND at >= ifnull((SELECT max(at) FROM samples WHERE '
            '"table"=?1 AND at <= ?2), ?2) ORDER BY at',
            (table, int(since.timestamp())),
        )
        return [(int(row["at"]), json.loads(row["figures"])) for row in rows]

    def thin_samples(self, now: datetime, keep: timedelta) -> None:
        """Delete samples that were taken more than ``keep`` ago, and most of those of more than a day ago."""
        seconds = int(now.timestamp())
        self._write("DELETE FROM samples WHERE at < ?", (seconds - int(keep.total_seconds()),))
        self._write("DELETE FROM polls WHERE day < ?", ((now - keep).astimezone(UTC).date().isoformat(),))
        for older, span in _THINNED:
            self._write(
                "DELETE FROM samples WHERE at BETWEEN ? AND ? AND EXISTS (SELECT 1 FROM samples AS later WHERE "
                'later."table" = samples."table" AND later.at > samples.at AND later.at < (samples.at / ? + 1) * ?)',
                (seconds - older - 86_400, seconds - older, span, span),
            )

    def deletable_later(self, after: int) -> list[tuple[int, str, dict[str, Any]]]:
        """Return what runs of ``expire`` reported as deletable later (``later``), of runs with a greater number.

        Of each: its number, the name of its table, and ``bytes`` and ``by``; empty if nothing is.
        """
        rows = self._read(
            "SELECT id, \"table\", json_extract(report, '$.later') AS later FROM runs WHERE id > max(?, (SELECT "
            "ifnull(max(id), 0) FROM runs) - ?) AND job='expire' AND outcome='succeeded' "
            "AND json_valid(report) ORDER BY id",
            (after, _MAX_LATER_RUNS),
        )
        return [(row["id"], row["table"], json.loads(row["later"] or "{}")) for row in rows]

    def last(self, table: str, uri: str, job: str, now: datetime) -> LastRuns:
        """Return the last runs of a job on a table; those of another table that had its name do not count."""
        achieved = "achieved" if "achieved" in self._known_columns else "NULL AS achieved"
        rows = self._read(
            f"SELECT started, finished, outcome, why, versions, {achieved} FROM runs "  # noqa: S608 - our own names
            'WHERE "table"=? AND uri=? AND job=? AND outcome != ? '
            "AND supervisor != ? ORDER BY started DESC, id DESC LIMIT 50",
            (table, uri, job, "running", BY_HAND),
        )
        seen = self._read('SELECT first FROM seen WHERE "table"=? AND job=?', (table, job))
        succeeded = self._read(
            'SELECT max(finished) AS at FROM runs WHERE "table"=? AND uri=? AND job=? AND outcome=? '
            "AND supervisor != ?",
            (table, uri, job, "succeeded", BY_HAND),
        )
        failures, failed = 0, None
        for row in rows:
            if row["outcome"] not in FAILURES:
                # A run that was stopped from outside is neither a success nor a failure of the job.
                if row["outcome"] in INTERRUPTED:
                    continue
                break
            failures += 1
            failed = failed or row["finished"]
        return LastRuns(
            first_seen=_when(seen[0]["first"]) or now if seen else now,
            started=next((_when(row["started"]) for row in rows if row["outcome"] not in INTERRUPTED), None),
            finished=_when(rows[0]["finished"]) if rows else None,
            succeeded=_when(succeeded[0]["at"]) if succeeded else None,
            outcome=rows[0]["outcome"] if rows else None,
            failures=failures,
            attempted=_when(rows[0]["started"]) if rows else None,
            interrupted=bool(rows) and rows[0]["outcome"] in RESUMED,
            failed=_when(failed),
            **_fruitless(rows),
        )

    def ended_since(self, table: str, job: str, since: datetime) -> list[tuple[float, float]]:
        """Return when each of a job's runs began and ended that ended since a time, the oldest first."""
        rows = self._read(
            'SELECT started, finished FROM runs WHERE "table"=? AND job=? AND finished > ? AND supervisor != ? '
            "ORDER BY started",
            (table, job, since.timestamp(), BY_HAND),
        )
        return [(float(row["started"]), float(row["finished"])) for row in rows]

    def runs(
        self,
        *,
        table: str | None = None,
        uri: str | None = None,
        job: str | None = None,
        failed: bool = False,
        outcome: str | None = None,
        before: int | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> list[dict[str, Any]]:
        """Return runs as documents, the newest first. ``table``: of this name or URI; ``uri``: and those of this one.

        ``before``: only those before the run with this number; ``offset``: without the newest so many.
        """
        wheres: list[str] = ["1"]
        values: list[Any] = []
        if table is not None:
            wheres.append('("table"=? OR uri IN (?, ?))')
            values += [table, table, uri]
        if job is not None:
            wheres.append("job=?")
            values.append(job)
        if failed:
            wheres.append(f"outcome IN ({', '.join('?' * len(FAILED_OUTCOMES))})")
            values += FAILED_OUTCOMES
        if outcome is not None:
            wheres.append("outcome=?")
            values.append(outcome)
        if before is not None:
            # By the same order as the list; a run that was pruned has no later one than its number.
            wheres.append("(started, id) < (ifnull((SELECT started FROM runs WHERE id=?), 9e99), ?)")
            values += [before, before]
        # By numbers first: sorting whole rows reads the reports of all runs of a table.
        ids = f"SELECT id FROM runs WHERE {' AND '.join(wheres)} ORDER BY started DESC, id DESC LIMIT ? OFFSET ?"  # noqa: S608 - our own words
        newest = f"SELECT * FROM runs WHERE id IN ({ids}) ORDER BY started DESC, id DESC"  # noqa: S608 - our own words
        rows = self._read(newest, (*values, limit, offset))
        return [_document(row) for row in rows]

    def run(self, number: int) -> dict[str, Any] | None:
        """Return one run with the lines of its log; None: there is none with this number."""
        rows = self._read("SELECT * FROM runs WHERE id=?", (number,))
        if not rows:
            return None
        log = rows[0]["log"] if "log" in rows[0].keys() else None  # noqa: SIM118 - a row of sqlite3
        return {**_document(rows[0]), "log": [] if log is None else json.loads(log)}

    def ledger(self, since: datetime, table: str | None = None) -> Iterator[dict[str, Any]]:
        """What each run used and achieved that ended since a time, the newest first, without its report.

        ``table``: only runs on the table of this name.
        """
        wanted = [*_RUN, *(self._known_columns & set(LEDGER))]
        names = ", ".join(f'"{name}"' for name in wanted)
        only = "" if table is None else 'AND "table"=? '
        rows = self._read(
            f"SELECT {names} FROM runs WHERE finished >= ? {only}ORDER BY started DESC, id DESC",  # noqa: S608 - our own names
            (since.timestamp(), *(() if table is None else (table,))),
        )
        for row in rows:
            columns = {name: row[name] for name in wanted}
            yield columns | {name: _loaded(columns.get(name)) for name in ("plan", *LEDGER)}

    def first_run(self, since: datetime) -> int:
        """Return a number below those of all runs that started since a time, of which :meth:`used_by` goes on."""
        (row,) = self._read("SELECT min(id) AS first FROM runs WHERE started >= ?", (since.timestamp(),))
        (last,) = self._read("SELECT ifnull(max(id), 0) AS id FROM runs", ())
        return int(last["id"] if row["first"] is None else row["first"] - 1)

    def used_by(self, after: int, running: Collection[int], limit: int) -> list[dict[str, Any]]:
        """Return id, table, started, finished (None: it runs), outcome, ``used`` and ``achieved`` of runs.

        Of those whose numbers are above ``after`` at most ``limit``, in their order; and of those that are ``running``.
        """
        rows = []
        for where, values in (
            ("id IN (SELECT value FROM json_each(?))", (json.dumps([*running]), len(running))),
            ("id > ?", (after, limit)),
        ):
            rows += self._read(
                f'SELECT id, "table", started, finished, outcome, used, achieved FROM runs WHERE {where} ORDER BY id LIMIT ?',  # noqa: E501, S608 - our own words
                values,
            )
        return [{**dict(row), **{name: _loaded(row[name]) for name in LEDGER}} for row in rows]

    def add_polls(self, rows: Sequence[PollRow]) -> None:
        """Add what polls used to that of their tables and days."""
        if rows:
            names = ", ".join(f'"{name}"' for name in _POLLS)
            values = ", ".join(f"json_extract(value, '$[{number}]')" for number in range(len(_POLLS)))
            sums = ", ".join(f'"{name}" = "{name}" + excluded."{name}"' for name in _POLLS[3:])
            self._write(
                f"INSERT INTO polls ({names}) SELECT {values} FROM json_each(?) WHERE true "  # noqa: S608 - our own names
                f'ON CONFLICT (day, "table", store) DO UPDATE SET {sums}',
                (json.dumps(rows),),
            )

    def polls(self, since: datetime) -> list[dict[str, Any]]:
        """What polls used by table and day, from the day of a time on: ``table``, ``day``, ``polls``, ``used``."""
        if not self._read("SELECT 1 FROM sqlite_master WHERE type='table' AND name='polls'", ()):
            return []  # of an earlier release, opened to read
        rows = self._read("SELECT * FROM polls WHERE day >= ?", (since.astimezone(UTC).date().isoformat(),))
        return [
            {
                **{name: row[name] for name in ("table", "day", "polls")},
                "used": {
                    **{name: row[name] for name in ("store", "bytes_read", "bytes_written", "cpu_seconds")},
                    "requests": {kind: row[kind] for kind in KINDS},
                },
            }
            for row in rows
        ]

    def spent(self, table: str, uri: str, job: str, limit: int) -> list[PastFigures]:
        """Seconds, ``used`` and ``achieved`` of the last runs of a job that succeeded, the newest first."""
        if "used" not in self._known_columns:
            return []
        rows = self._read(
            'SELECT finished - started AS seconds, used, achieved FROM runs WHERE "table" IN (?, ?) AND job=? '
            "AND uri=? AND outcome='succeeded' AND used IS NOT NULL ORDER BY started DESC LIMIT ?",
            (table, uri, job, uri, limit),  # the first run by hand may have the URI as its name
        )
        return [
            (round(float(row["seconds"]), 3), json.loads(row["used"]), _loaded(row["achieved"]) or {}) for row in rows
        ]

    def tables(self) -> set[str]:
        """Return the names of all tables that were ever configured, and the URIs of those with runs."""
        rows = self._read(
            'SELECT "table" AS name FROM seen UNION SELECT "table" FROM runs UNION SELECT uri FROM runs', ()
        )
        return {str(row["name"]) for row in rows}

    def jobs(self) -> set[str]:
        """Return the names of all jobs that were ever configured on a table."""
        return {str(row["job"]) for row in self._read("SELECT job FROM seen UNION SELECT job FROM runs", ())}


def is_triggered(why: str) -> bool:
    """Whether a run is by a trigger or an objective."""
    return why.startswith(("when: ", "objective "))


def _fruitless(rows: Sequence[Any]) -> dict[str, Any]:
    ended = []
    for row in rows:
        if (_loaded(row["versions"]) or []) or (_loaded(row["achieved"]) or {}):
            break
        if row["outcome"] in COMPLETED and is_triggered(row["why"]):
            ended.append(row["finished"])
    return {"fruitless": len(ended), "fruitless_at": _when(ended[0]) if ended else None}


def _columns(details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: json.dumps(value, default=str) if name in {"plan", "log", *_DOCUMENTS} and value is not None else value
        for name, value in details.items()
    }


def _loaded(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _document(row: Any) -> dict[str, Any]:
    started, finished = _when(row["started"]), _when(row["finished"])
    document: dict[str, Any] = {
        "id": row["id"],
        "table": row["table"],
        "uri": row["uri"],
        "job": row["job"],
        "supervisor": row["supervisor"],
        "why": row["why"],
        "started": None if started is None else started.isoformat(timespec="milliseconds"),
        "finished": None if finished is None else finished.isoformat(timespec="milliseconds"),
        "seconds": None if row["finished"] is None else round(row["finished"] - row["started"], 3),
        "outcome": row["outcome"],
        "exit_code": row["exit_code"],
        "decision": row["decision"],
        "error": None
        if row["error"] is None
        else {"reason": row["reason"], "message": row["error"], "remedy": row["remedy"]},
    }
    known = row.keys()
    for name in ("plan", *_DOCUMENTS):
        document[name] = _loaded(row[name] if name in known else None)  # see History._known_columns
    return document


def _not_after(when: datetime | None, now: datetime) -> datetime | None:
    return None if when is None else min(when, now)


def _when(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
