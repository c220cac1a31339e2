"""Describe the API as OpenAPI 3.1, from its routes and from the types of the status document."""

from __future__ import annotations

import types
import typing
from typing import TYPE_CHECKING, Any

from memwal_ops.supervisor.observe.status_document import StatusDocument
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.supervisor.http.routing import Route, Routes

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
_TEXT = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}
_RUN: dict[str, Any] = {
    "type": "object",
    "required": ["id", "table", "uri", "job", "why", "plan", "started", "outcome"],
    "properties": {
        "id": {"type": "integer"},
        **dict.fromkeys(("table", "uri", "job", "supervisor", "why", "started", "outcome"), _TEXT),
        **dict.fromkeys(("finished", "decision"), _MAYBE),
        "seconds": _NUMBER,
        "exit_code": {"type": ["integer", "null"]},
        "error": {"type": ["object", "null"]},
        "plan": _OBJECT,
        **{name: {"type": ["object", "null"]} for name in ("figures", "phases", "report")},
        "versions": {"type": ["array", "null"], "items": {"type": "integer"}},
    },
}
_LOG = {"type": "array", "items": _TEXT, "description": "The last lines that its worker logged."}
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": _TEXT}},
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
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    body = {"required": False, "content": {"application/json": {"schema": schema}}}
    return {**operation, "security": [{"token": []}], "requestBody": body}


def _segment(name: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1} if name == "id" else {"type": "string", "minLength": 1}


def _answer(text: str, kind: str) -> dict[str, Any]:
    if "/" in kind:
        return {"description": text, "content": {kind: {"schema": _TEXT}}}
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
