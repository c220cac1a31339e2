"""The SQLite file of the run history: opened, created, locked by others, of an earlier or a later release.

In WAL mode a killed service loses nothing that it wrote. Another process may lock the file, such as a backup or the
sqlite3 shell: the tables do not wait for it, and what could not be written is written before the next statement.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from memwal_ops.errors import HistoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY,
    "table" TEXT NOT NULL, uri TEXT NOT NULL, job TEXT NOT NULL, supervisor TEXT NOT NULL,
    why TEXT NOT NULL, started REAL NOT NULL, finished REAL, outcome TEXT NOT NULL,
    exit_code INTEGER, decision TEXT, reason TEXT, error TEXT, remedy TEXT,
    plan TEXT NOT NULL, figures TEXT, phases TEXT, versions TEXT, report TEXT, log TEXT, used TEXT, achieved TEXT
);
CREATE INDEX IF NOT EXISTS runs_by_job ON runs ("table", job, started);
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

        Raises:
            HistoryError: it cannot be opened or created, or a newer release wrote it.
        """
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
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

        Raises:
            HistoryError: it does not exist, cannot be read, or a newer release wrote it.
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
