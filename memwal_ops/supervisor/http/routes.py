"""The paths of the API: one table of them decides what a request does, and is described as OpenAPI 3.1."""

from __future__ import annotations

import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from prometheus_client import CONTENT_TYPE_LATEST

from memwal_ops.supervisor.http import connections
from memwal_ops.supervisor.http.access import Caller
from memwal_ops.supervisor.observe.findings import NOT_READ
from memwal_ops.supervisor.observe.status_document import StatusDocument
from memwal_ops.text import printable
from memwal_ops.version import __version__


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path. It has either ``read`` or ``act``.

    Attributes:
        template: the path; ``{name}`` is one segment, percent-encoded.
        read: returns the response, given the request and the decoded segments.
        act: changes something, given the segments, the fields of the body, and who acts; returns status and document.
        fields: the fields of the body, with their schemas.
        parameters: those of the query string.
        answers: by status, a description and the name of the schema (or a media type).
    """

    method: str
    template: str
    summary: str
    read: Callable[[connections.Request, Mapping[str, str]], connections.Response] | None = None
    act: Callable[[Mapping[str, str], Mapping[str, str], Caller], tuple[int, dict[str, Any]]] | None = None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    answers: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def action(self) -> str:
        """The last word of the path."""
        return self.template.rpartition("/")[2]

    def match(self, path: str) -> dict[str, str] | None:
        """Return the decoded segments if a path, as it was sent, is this one."""
        wanted, given = self.template.split("/"), path.split("/")
        if len(wanted) != len(given):
            return None
        values: dict[str, str] = {}
        for part, segment in zip(wanted, given, strict=True):
            if _VARIABLE.fullmatch(part):
                if not segment:
                    return None
                values[part[1:-1]] = unquote(segment, errors="surrogateescape")
            elif part != segment:
                return None
        return values


_VARIABLE = re.compile(r"\{\w+\}")


class Routes:
    """All routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.all = (*routes,)

    def find(self, method: str, path: str) -> tuple[Route | None, dict[str, str], list[str]]:
        """Return the route of a request and its segments; and the methods that the path has, sorted."""
        matches = [(route, values) for route in self.all if (values := route.match(path)) is not None]
        methods = sorted({method for route, _ in matches for method in _methods(route)})
        for route, values in matches:
            if method in _methods(route):
                return route, values, methods
        return None, {}, methods


def _methods(route: Route) -> tuple[str, ...]:
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)


_PLAIN: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}
_OBJECT: dict[str, Any] = {"type": "object"}
_NUMBER = {"type": ["number", "null"]}
_TEXT_SCHEMA = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}
_RUN: dict[str, Any] = {
    "type": "object",
    "required": ["id", "table", "uri", "job", "why", "plan", "started", "outcome"],
    "properties": {
        "id": {"type": "integer"},
        **dict.fromkeys(("table", "uri", "job", "supervisor", "why", "started", "outcome"), _TEXT_SCHEMA),
        **dict.fromkeys(("finished", "decision"), _MAYBE),
        "seconds": _NUMBER,
        "exit_code": {"type": ["integer", "null"]},
        "error": {"type": ["object", "null"]},
        "plan": _OBJECT,
        **{name: {"type": ["object", "null"]} for name in ("figures", "phases", "report")},
        "versions": {"type": ["array", "null"], "items": {"type": "integer"}},
    },
}
_LOG = {"type": "array", "items": _TEXT_SCHEMA, "description": "The last lines that its worker logged."}
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": _TEXT_SCHEMA}},
    "Action": {"type": "object", "description": "What was done."},
    "Document": _OBJECT,
    "Run": _RUN,
    "Runs": {
        "type": "object",
        "required": ["runs", "next"],
        "properties": {
            "runs": {"type": "array", "items": {"$ref": "#/components/schemas/Run"}},
            "next": {"type": ["integer", "null"], "description": "Give it as before, for the next page."},
        },
    },
    "Tables": {
        "type": "object",
        "required": ["tables", "total", "not_read"],
        "properties": {
            "tables": {"type": "array", "items": {"$ref": "#/components/schemas/TableStatus"}},
            "total": {"type": "integer"},
            "not_read": {"type": "integer"},
        },
    },
    "RunWithLog": {**_RUN, "required": [*_RUN["required"], "log"], "properties": {**_RUN["properties"], "log": _LOG}},
}
_PATHS: Mapping[str, str] = {
    "name": "The name of the table; characters such as / are percent-encoded.",
    "job": "The name of the job.",
    "id": "The number of the run, or of the hold.",
}
_REFUSALS: Mapping[int, str] = {
    400: "The body is invalid",
    401: "There is no token, or a wrong one",
    403: "No token is configured, its role may not act, or the request comes from a page of another site",
    413: "The body is too large",
    415: "The body is neither JSON nor a form",
    429: "Too many wrong tokens",
    503: "The service is busy, or its tokens or pauses cannot be read or written",
}


def openapi(routes: Routes) -> dict[str, Any]:
    """Return the document."""
    schemas = {**_SCHEMAS}
    schema_of(StatusDocument, schemas)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes.all:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "memwal-ops", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "A line of http.token_file."}
            },
        },
    }


_ABOUT = "The service of memwal-ops. Reading needs no token; acting needs one with the role operate (docs/http.md)."


def _operation(route: Route) -> dict[str, Any]:
    segments = [part[1:-1] for part in route.template.split("/") if part.startswith("{")]
    parameters = [
        *(
            {"name": name, "in": "path", "required": True, "description": _PATHS[name], "schema": _segment(name)}
            for name in segments
        ),
        *({"name": name, "in": "query", "schema": dict(schema)} for name, schema in route.parameters.items()),
    ]
    answers = {str(status): _answer(text, kind) for status, (text, kind) in route.answers.items()}
    answers["421"] = _answer("The Host header is not a name of this service", "Error")
    operation: dict[str, Any] = {"summary": route.summary, "parameters": parameters, "responses": answers}
    if route.act is None:
        return operation
    for status, text in _REFUSALS.items():
        answers.setdefault(str(status), _answer(text, "Error"))
    properties = {name: dict(schema) for name, schema in route.fields.items()}
    needed = [name for name, schema in properties.items() if schema.get("minItems")]
    schema = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
    body = {"required": bool(needed), "content": {"application/json": {"schema": schema}}}
    return {**operation, "security": [{"token": []}], "requestBody": body}


def _segment(name: str) -> dict[str, Any]:
    whole = {"type": "integer", "minimum": 1, "maximum": _LARGEST_ID}
    return whole if name == "id" else {"type": "string", "minLength": 1}


def _answer(text: str, kind: str) -> dict[str, Any]:
    if "/" in kind:
        return {"description": text, "content": {kind: {"schema": _TEXT_SCHEMA}}}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
    return {"description": text, "content": content}


def schema_of(kind: Any, schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a type of the status document; those of its parts are added to ``schemas``, by name."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        return {"anyOf": [schema_of(part, schemas) for part in parts]}
    if origin is list:
        return {"type": "array", "items": schema_of(parts[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(parts[1], schemas)}
    name = kind.__name__
    if name not in schemas:
        schemas[name] = {}
        properties = {key: schema_of(part, schemas) for key, part in typing.get_type_hints(kind).items()}
        schemas[name] = {"type": "object", "required": sorted(kind.__required_keys__), "properties": properties}
    return {"$ref": f"#/components/schemas/{name}"}


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
        metrics: the text for Prometheus, by pieces.
        status: the document of ``/api/v1/status``.
        runs: the newest runs, by the filters of ``History.runs``.
        run: one run with its log, by its number; None: there is none.
    """

    alive: Callable[[], tuple[bool, str]]
    ready: Callable[[], tuple[bool, str]]
    metrics: Callable[[], Iterable[bytes]]
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
        "GET", "/metrics", "Metrics for Prometheus",
        lambda *_: connections.Response(200, CONTENT_TYPE_LATEST, connections.LongBody(sources.metrics())),
        answers={200: ("Prometheus' text format", "text/plain")},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/status", "The status of the service, of all tables and jobs",
        lambda *_: connections.long_json_response(sources.status()),
        answers={200: ("The status", "StatusDocument")},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/tables", "The status of all tables; before its first poll one is not_read, and looked_at null",
        lambda *_: connections.long_json_response(_tables(sources.status()["tables"])),
        answers={200: ("All tables, and how many of them were not read yet", "Tables")},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/runs", "Runs, the newest first",
        lambda request, _: connections.long_json_response(_page(sources, request)),
        parameters=_RUN_FILTERS,
        answers={200: ("A page of runs", "Runs"), 400: _INVALID, 503: _NO_HISTORY},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/runs/{id}", "One run, with its report, log lines and error",
        lambda _, found: connections.json_response(200, _run(sources, found["id"])),
        answers={200: ("The run", "RunWithLog"), 404: ("There is no such run", "Error"), 503: _NO_HISTORY},
    )  # fmt: skip
    yield Route(
        "GET", "/api/v1/openapi.json", "This description",
        lambda *_: connections.json_response(200, openapi(routes())),
        answers={200: ("OpenAPI 3.1", "Document")},
    )  # fmt: skip


_INVALID = ("A parameter is invalid", "Error")
_NO_HISTORY = ("The run history cannot be read", "Error")


def _tables(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    states: Counter[str] = Counter()

    def counted() -> Iterator[Mapping[str, Any]]:
        for table in tables:
            states[table["state"]] += 1
            yield table

    return {"tables": counted(), "total": states.total, "not_read": lambda: states[NOT_READ]}


def _page(sources: Sources, request: connections.Request) -> dict[str, Any]:
    filters = run_filters(request.query)
    limit = filters["limit"]
    runs = sources.runs(**{**filters, "limit": limit + 1})
    more = len(runs) > limit
    return {"runs": runs[:limit], "next": runs[limit - 1]["id"] if more else None}


def _run(sources: Sources, number: str) -> dict[str, Any]:
    digits = number.isascii() and number.isdigit() and len(number) < len(str(_LARGEST_ID))
    run = sources.run(int(number)) if digits else None
    if run is None:
        raise connections.HttpError(404, "There is no such run: it may have been pruned (history.keep).")
    return run


def run_filters(query: str) -> dict[str, Any]:
    """Return the filters of runs in a query string, as those of ``History.runs``.

    Raises ``ValueError``: one is unknown or invalid.
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


def _state(good: bool, why: str) -> connections.Response:  # noqa: FBT001 - the result of the two probes
    return connections.Response(200 if good else 503, _TEXT, f"{printable(why)}\n".encode())
