"""The paths that act (run, retry, cancel, pause, resume), and the record of who acted.

That is an event of the log, and a line of JSON in the state folder.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.actions import ActionConflictError, Actions, UnknownTargetError, end_of_pause
from memwal_ops.supervisor.http.access import Caller
from memwal_ops.supervisor.http.connections import SEPARATOR, SEVERAL
from memwal_ops.supervisor.http.routes import Route
from memwal_ops.supervisor.state.directory import private_opener
from memwal_ops.text import parse_duration

_Act = Callable[[Mapping[str, str], Mapping[str, str], Caller], tuple[int, dict[str, Any]]]


FILE = "audit.jsonl"
_MAX_BYTES = 4 << 20


class Audit:
    """The audit log; ``folder``: the state folder, None: only the log. Of 4 MiB and more, one older file is kept."""

    def __init__(self, folder: str | None) -> None:
        self._path = None if folder is None else os.path.join(folder, FILE)
        self._lock = threading.Lock()
        self._log = get_logger(__name__)

    def record(self, action: str, status: int, *, who: str | None, client: str, **details: Any) -> None:
        """Record an action, or that it was refused, with the status of its response."""
        entry = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "action": action,
            "status": status,
            "who": who,
            "client": client,
            **{name: _redacted(value) for name, value in details.items() if value},
        }
        self._log.info("http_action", **{name: value for name, value in entry.items() if name != "at"})
        if self._path is not None:
            self._append(self._path, entry)

    def _append(self, path: str, entry: Mapping[str, Any]) -> None:
        with self._lock:
            try:
                file = private_opener(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
                try:
                    size, line = os.fstat(file).st_size, json.dumps(entry).encode() + b"\n"
                    if os.write(file, line) < len(line):
                        os.ftruncate(file, size)  # the disk is full: the next entry begins a line
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    large = size + len(line) > _MAX_BYTES
                finally:
                    os.close(file)
                if large:
                    os.replace(path, f"{path}.1")
            except OSError as error:  # the disk may be full: the event of the log remains
                self._log.error("audit_not_written", file=path, error=error.strerror)


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(item) for name, item in value.items()}
    return redact(value) if isinstance(value, str) else value


_API, _TABLE, _JOB = "/api/v1", "/api/v1/tables/{name}", "/api/v1/tables/{name}/jobs/{job}"
_MAX_TEXT, _MAX_DIGITS = 500, 20
_BY: Mapping[str, Any] = {
    "type": ["string", "null"], "maxLength": 100, "description": "Who asks; the name of the token, if not given.",
}  # fmt: skip
_REASON: Mapping[str, Any] = {"type": ["string", "null"], "maxLength": _MAX_TEXT, "description": "Why."}
_ALWAYS = {"by": _BY, "reason": _REASON}
_TABLES: Mapping[str, Any] = {
    "type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxLength": 100_000,
    "description": "The names of the tables.",
}  # fmt: skip
_UNTIL: Mapping[str, Any] = {
    "type": ["string", "null"], "format": "date-time", "description": "Its end; without one, until it is resumed.",
}  # fmt: skip
_FOR: Mapping[str, Any] = {
    "type": ["string", "null"], "pattern": r"^[1-9][0-9]{0,2}[smhdw]$", "description": "Its length, such as 2h.",
}  # fmt: skip
_HOLD = "2h"
_VERSION: Mapping[str, Any] = {
    "type": ["integer", "null"], "minimum": 1, "maximum": (1 << 63) - 1, "description": "The newest, if not given.",
}  # fmt: skip
_PAUSE_FIELDS = {**_ALWAYS, "until": _UNTIL, "for": _FOR}
_QUEUED = {202: ("It is queued, or runs soon", "Action")}
_NOT_FOUND = {404: ("There is no such table or job", "Error")}
_CONFLICT = {409: ("It cannot be done now", "Error")}


def acting_routes(actions: Actions) -> Iterator[Route]:
    """Yield the routes that act; each has its refusals, which are the same for all, from the server."""
    yield _route(
        f"{_JOB}/run", "Run a job now", _ALWAYS, _QUEUED,
        lambda at, fields, caller: (202, actions.run(at["name"], at["job"], _by(fields, caller))),
    )  # fmt: skip
    yield _route(
        f"{_JOB}/cancel", "Cancel the run of a job; a second time, at once", _ALWAYS,
        {202: ("It stops after its current step", "Action")},
        lambda at, fields, caller: (202, actions.cancel(at["name"], at["job"], _by(fields, caller))),
    )  # fmt: skip
    yield _route(
        f"{_JOB}/plan", "Plan a job, which changes nothing", _ALWAYS, {200: ("Its report, as of a dry run", "Action")},
        lambda at, *_: (200, actions.plan(at["name"], at["job"])),
    )  # fmt: skip
    yield _route(
        f"{_TABLE}/holds", "Keep a version for a while", {**_ALWAYS, "version": _VERSION, "for": _FOR},
        {200: ("The hold", "Action")}, _hold(actions),
    )  # fmt: skip
    yield _route(
        f"{_TABLE}/holds/{{id}}/release", "End a hold before its time", _ALWAYS, {200: ("The hold", "Action")},
        lambda at, *_: (200, actions.hold(at["name"], release=_whole(at["id"]))),
    )  # fmt: skip
    yield from _routes_of_several(actions)
    for place, what in ((_JOB, "a job"), (_TABLE, "all jobs of a table"), (_API, "all jobs of all tables")):
        yield _route(f"{place}/retry", f"End the backoff of {what}", _ALWAYS, _QUEUED, _retry(actions))
        yield _route(
            f"{place}/pause", f"Pause {what}; what runs finishes", _PAUSE_FIELDS, {200: ("It is paused", "Action")},
            _pause(actions),
        )  # fmt: skip
        yield _route(
            f"{place}/resume", f"End the pause of {what}", _ALWAYS, {200: ("It is not paused any more", "Action")},
            lambda at, *_: (200, actions.resume(at.get("name"), at.get("job"))),
        )  # fmt: skip


def _routes_of_several(actions: Actions) -> Iterator[Route]:
    """Yield the routes for some tables: one that cannot be acted on is named, and does not keep the others."""

    def each(act: _Act) -> _Act:
        def acts(_: Mapping[str, str], fields: Mapping[str, str], caller: Caller) -> tuple[int, dict[str, Any]]:
            # Not the fleet: a form of which no table is chosen would pause all of them.
            names = [*dict.fromkeys(fields.get(SEVERAL, "").split(SEPARATOR))]
            if names == [""]:
                raise ValueError(f"Choose at least one table: the field {SEVERAL} has their names.")
            done: dict[str, Any] = {}
            refused: dict[str, str] = {}
            for name in names:
                try:
                    done[name] = act({"name": name}, fields, caller)[1]
                except (UnknownTargetError, ActionConflictError) as error:
                    refused[name] = str(error)
            if not done:
                raise ActionConflictError("; ".join(f"{name}: {why}" for name, why in refused.items()))
            return 200, {"done": done, "refused": refused}

        return acts

    resume: _Act = lambda at, *_: (200, actions.resume(at["name"], None))  # noqa: E731 - one line of a table
    for word, fields, act in (
        ("retry", _ALWAYS, _retry(actions)), ("pause", _PAUSE_FIELDS, _pause(actions)), ("resume", _ALWAYS, resume),
    ):  # fmt: skip
        yield _route(
            f"{_API}/tables/{word}", f"{word.capitalize()} the jobs of some tables", {**fields, SEVERAL: _TABLES},
            {200: ("What was done, by table, and what was refused", "Action")}, each(act),
        )  # fmt: skip


def _retry(actions: Actions) -> _Act:
    return lambda at, fields, caller: (202, actions.retry(at.get("name"), at.get("job"), _by(fields, caller)))


def _pause(actions: Actions) -> _Act:
    def pause(at: Mapping[str, str], fields: Mapping[str, str], caller: Caller) -> tuple[int, dict[str, Any]]:
        until = end_of_pause(fields.get("until"), fields.get("for"))
        reason = fields.get("reason", "")
        return 200, actions.pause(at.get("name"), at.get("job"), _by(fields, caller), until=until, reason=reason)

    return pause


def _hold(actions: Actions) -> _Act:
    def hold(at: Mapping[str, str], fields: Mapping[str, str], caller: Caller) -> tuple[int, dict[str, Any]]:
        span = parse_duration(fields.get("for", _HOLD))
        version = _whole(fields["version"]) if "version" in fields else None
        note = f"{_by(fields, caller)}: {fields.get('reason', '')}".removesuffix(": ")
        return 200, actions.hold(at["name"], version=version, seconds=span.total_seconds(), note=note)

    return hold


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS and 0 < int(text) < 1 << 63):
        raise ValueError("A version or a hold is a number from 1.")
    return int(text)


def _by(fields: Mapping[str, str], caller: Caller) -> str:
    return fields.get("by") or caller.name


def check_fields(route: Route, fields: Mapping[str, str]) -> None:
    """Refuse fields that an action does not have, and texts that are too long. Raises ``ValueError``: there is one."""
    unknown = sorted(fields.keys() - route.fields.keys())
    if unknown:
        known = ", ".join(route.fields)
        raise ValueError(f"There is no field {unknown[0]!r} here; use {known}.")
    for name, text in fields.items():
        if len(text) > route.fields[name].get("maxLength", _MAX_TEXT):
            raise ValueError(f"The field {name} is too long.")


def _route(
    template: str,
    summary: str,
    fields: Mapping[str, Mapping[str, Any]],
    answers: Mapping[int, tuple[str, str]],
    act: _Act,
) -> Route:
    answer = _NOT_FOUND if "{" in template else {}
    return Route(
        "POST", template, summary, act=act, fields=fields,
        answers={**answers, **answer, **({} if template == f"{_API}/pause" else _CONFLICT)},
    )  # fmt: skip
