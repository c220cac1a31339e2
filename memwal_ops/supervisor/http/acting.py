"""The paths that act: run, retry, cancel, pause and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.supervisor.actions import end_of_pause
from memwal_ops.supervisor.http.routing import Route
from memwal_ops.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.supervisor.actions import Actions
    from memwal_ops.supervisor.http.access import Caller

    _Act = Callable[[Mapping[str, str], Mapping[str, str], Caller], tuple[int, dict[str, Any]]]

_API, _TABLE, _JOB = "/api/v1", "/api/v1/tables/{name}", "/api/v1/tables/{name}/jobs/{job}"
_MAX_TEXT, _MAX_DIGITS = 500, 20
_BY: Mapping[str, Any] = {
    "type": ["string", "null"], "maxLength": 100, "description": "Who asks; the name of the token, if not given.",
}  # fmt: skip
_REASON: Mapping[str, Any] = {"type": ["string", "null"], "maxLength": _MAX_TEXT, "description": "Why."}
_ALWAYS = {"by": _BY, "reason": _REASON}
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
    """Refuse fields that an action does not have, and texts that are too long.

    Raises:
        ValueError: there is one.
    """
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
    found = _NOT_FOUND if "{" in template else {}
    return Route(
        "POST", template, summary, act=act, fields=fields,
        answers={**answers, **found, **({} if template == f"{_API}/pause" else _CONFLICT)},
    )  # fmt: skip
