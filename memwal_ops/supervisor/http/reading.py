"""The paths that read: health, metrics, status, runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST

from memwal_ops.supervisor.http.exchange import HttpError, Response, json_response, long_json_response
from memwal_ops.supervisor.http.openapi import openapi
from memwal_ops.supervisor.http.routing import Route
from memwal_ops.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.supervisor.http.exchange import Request
    from memwal_ops.supervisor.http.routing import Routes

MAX_RUNS = 1000
_MAX_PAGE = 1_000_000
_LARGEST_ID = 2**63 - 1
_TEXT = "text/plain; charset=utf-8"
_RUN_FILTERS: Mapping[str, Mapping[str, Any]] = {
    "table": {"type": "string", "description": "Only runs on this table, by its name or URI."},
    "job": {"type": "string", "description": "Only runs of this job."},
    "failed": {"enum": ["true", "false", "1", "0"], "description": "Only runs that did not succeed."},
    "outcome": {"type": "string", "description": "Only runs with this outcome."},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_RUNS, "default": 50, "description": "At most N runs."},
    "before": {
        "type": "integer",
        "minimum": 0,
        "maximum": _LARGEST_ID,
        "description": "Only runs before this one, by its id.",
    },
    "page": {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "description": "The page, from 1, of limit runs."},
}


@dataclass(frozen=True, slots=True)
class Sources:
    """What the paths return.

    Attributes:
        alive: whether the event loop makes progress, and a sentence.
        ready: whether it runs jobs, and a sentence.
        metrics: the text for Prometheus.
        status: the document of ``/api/v1/status``.
        runs: the newest runs, by the filters of ``History.runs``.
        run: one run with its log, by its number; None: there is none.
    """

    alive: Callable[[], tuple[bool, str]]
    ready: Callable[[], tuple[bool, str]]
    metrics: Callable[[], bytes]
    status: Callable[[], Mapping[str, Any]]
    runs: Callable[..., list[dict[str, Any]]]
    run: Callable[[int], dict[str, Any] | None]


def reading_routes(sources: Sources, routes: Callable[[], Routes]) -> Iterator[Route]:
    """Yield the routes that read; ``routes`` returns all of them, for their description."""
    yield Route(
        "GET", "/healthz", "Whether the main loop works", lambda *_: _state(*sources.alive()),
        answers={200: ("It works", "text/plain"), 503: ("It does not: restart the service", "text/plain")},
    )  # fmt: skip
    yield Route(
        "GET", "/readyz", "Whether it runs jobs", lambda *_: _state(*sources.ready()),
        answers={200: ("It does", "text/plain"), 503: ("It starts or stops", "text/plain")},
    )  # fmt: skip
    yield Route(
        "GET", "/metrics", "Metrics for Prometheus", lambda *_: Response(200, CONTENT_TYPE_LATEST, sources.metrics()),
        answers={200: ("Prometheus' text format", "text/plain")},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/status", "The status of the service, of all tables and jobs",
        lambda *_: long_json_response(sources.status()),
        answers={200: ("The status", "StatusDocument")},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/runs", "Runs, the newest first",
        lambda request, _: long_json_response(_page(sources, request)),
        parameters=_RUN_FILTERS,
        answers={200: ("A page of runs", "Runs"), 400: _INVALID, 503: _NO_HISTORY},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/runs/{id}", "One run, with its report, log lines and error",
        lambda _, found: json_response(200, _run(sources, found["id"])),
        answers={200: ("The run", "RunWithLog"), 404: ("There is no such run", "Error"), 503: _NO_HISTORY},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/openapi.json", "This description",
        lambda *_: json_response(200, openapi(routes())),
        answers={200: ("OpenAPI 3.1", "Document")},
    )  # fmt: skip


_INVALID = ("A parameter is invalid", "Error")
_NO_HISTORY = ("The run history cannot be read", "Error")


def _page(sources: Sources, request: Request) -> dict[str, Any]:
    filters = run_filters(request.query)
    limit = filters["limit"]
    runs = sources.runs(**{**filters, "limit": limit + 1})
    more = len(runs) > limit
    return {"runs": runs[:limit], "next": runs[limit - 1]["id"] if more else None}


def _run(sources: Sources, number: str) -> dict[str, Any]:
    digits = number.isascii() and number.isdigit() and len(number) < len(str(_LARGEST_ID))
    run = sources.run(int(number)) if digits else None
    if run is None:
        raise HttpError(404, "There is no such run: it may have been pruned (history.keep).")
    return run


def run_filters(query: str) -> dict[str, Any]:
    """Return the filters of runs in a query string, as those of ``History.runs``.

    Raises:
        ValueError: one is unknown or invalid.
    """
    given = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}
    unknown = sorted(given.keys() - _RUN_FILTERS.keys())
    if unknown:
        raise ValueError(f"There is no filter {unknown[0]!r}; use {', '.join(_RUN_FILTERS)}.")
    failed = given.get("failed", "false").lower()
    if failed not in {"true", "false", "1", "0"}:
        raise ValueError("failed must be true or false.")
    filters: dict[str, Any] = {name: given[name] for name in ("table", "job", "outcome") if name in given}
    numbers = {name: _number(name, given[name]) for name in ("limit", "before", "page") if name in given}
    limit = numbers.get("limit", 50)
    more: dict[str, Any] = {"before": numbers["before"]} if "before" in numbers else {}
    if "page" in numbers:
        more["offset"] = (numbers["page"] - 1) * limit
    always = {"table": None, "job": None, "failed": failed in {"true", "1"}, "limit": limit}
    return {**always, **filters, **more}


def _number(name: str, text: str) -> int:
    bounds = _RUN_FILTERS[name]
    least, most = bounds["minimum"], bounds["maximum"]
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise ValueError(f"{name} must be a number from {least} to {most}.")
    return int(text)


def _state(good: bool, why: str) -> Response:  # noqa: FBT001 - the result of the two probes
    return Response(200 if good else 503, _TEXT, f"{printable(why)}\n".encode())
