"""Pauses of the fleet, of tables and of jobs, in a file of the state folder: they survive restarts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from memwal_ops.errors import HistoryError
from memwal_ops.supervisor.observe.status_document import PauseStatus
from memwal_ops.supervisor.state.directory import private_opener

FILE = "pauses.json"
Scope = tuple[str, ...]
"""What is paused: nothing for the fleet, a table, or a table and a job."""
FLEET: Scope = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause: its end (None: until it is resumed), the reason, and who paused it, when."""

    until: datetime | None
    reason: str
    by: str
    since: datetime

    def in_force(self, now: datetime) -> bool:
        """Whether it has not ended yet."""
        return self.until is None or now < self.until

    def to_json(self) -> PauseStatus:
        """Return it as an entry of the status."""
        until = None if self.until is None else self.until.isoformat(timespec="seconds")
        return {"until": until, "reason": self.reason, "by": self.by, "since": self.since.isoformat(timespec="seconds")}


class Pauses:
    """All pauses; ``folder``: the state folder, None: they are only in memory. One thread writes."""

    def __init__(self, folder: str | None = None) -> None:
        """Read the file. Raises ``HistoryError``: it is damaged, and what was paused must not run."""
        self._path = None if folder is None else os.path.join(folder, FILE)
        self._known: dict[Scope, Pause] = {} if self._path is None else _read(self._path)

    @classmethod
    def of_status(cls, status: Mapping[str, Any]) -> Self:
        """Those of a service, by its status; they are only in memory."""
        shown: dict[Scope, Any] = {FLEET: status["service"].get("paused")}
        for table in status["tables"]:
            shown |= {(table["name"],): table.get("paused")}
            shown |= {(table["name"], name): job.get("paused") for name, job in table["jobs"].items()}
        pauses = cls()
        pauses._known = {scope: _pause(pause) for scope, pause in shown.items() if pause is not None}
        return pauses

    def of(self, scope: Scope, now: datetime) -> Pause | None:
        """Return the pause of exactly this scope, if it is in force."""
        pause = self._known.get(scope)
        return pause if pause is not None and pause.in_force(now) else None

    def covering(self, table: str, job: str, now: datetime) -> Pause | None:
        """Return a pause that keeps a job on a table from running."""
        if not self._known:
            return None
        pauses = (self.of(scope, now) for scope in (FLEET, (table,), (table, job)))
        return next((pause for pause in pauses if pause is not None), None)

    def set(self, scope: Scope, pause: Pause) -> None:
        """Add or replace a pause; those that have ended are removed.

        Raises ``HistoryError``: it cannot be written, and would not survive a restart; nothing has changed.
        """
        kept = {known: kept for known, kept in self._known.items() if kept.in_force(pause.since)}
        self._write({**kept, scope: pause})

    def remove(self, scopes: Iterable[Scope]) -> None:
        """Remove pauses. Raises ``HistoryError``: the file cannot be written; nothing has changed."""
        gone = {*scopes}
        self._write({scope: pause for scope, pause in self._known.items() if scope not in gone})

    def _write(self, pauses: dict[Scope, Pause]) -> None:
        if self._path is not None:
            document = [{"scope": [*scope], **pause.to_json()} for scope, pause in pauses.items()]
            try:
                with open(f"{self._path}.new", "w", encoding="utf-8", opener=private_opener) as file:
                    json.dump(document, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(f"{self._path}.new", self._path)
            except OSError as error:
                raise HistoryError(f"The pauses {self._path} cannot be written: {error.strerror}.") from error
        self._known = pauses


def _read(path: str) -> dict[Scope, Pause]:
    try:
        with open(path, encoding="utf-8") as file:
            return {tuple(map(str, entry["scope"])): _pause(entry) for entry in json.load(file)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HistoryError(
            f"The pauses {path} cannot be read: {error}.",
            remedy="What was paused would run. Restore the file, or remove it to resume everything.",
        ) from error


def _pause(document: Mapping[str, str]) -> Pause:
    until = None if document["until"] is None else datetime.fromisoformat(document["until"])
    return Pause(until, str(document["reason"]), str(document["by"]), datetime.fromisoformat(document["since"]))
