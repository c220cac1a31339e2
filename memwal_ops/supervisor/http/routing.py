"""The paths of the API: one table of them decides what a request does, and is described as OpenAPI."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from memwal_ops.supervisor.http.access import Caller
    from memwal_ops.supervisor.http.exchange import Request, Response


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
    read: Callable[[Request, Mapping[str, str]], Response] | None = None
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
        found: dict[str, str] = {}
        for part, segment in zip(wanted, given, strict=True):
            if _VARIABLE.fullmatch(part):
                if not segment:
                    return None
                found[part[1:-1]] = unquote(segment, errors="surrogateescape")
            elif part != segment:
                return None
        return found


_VARIABLE = re.compile(r"\{\w+\}")


class Routes:
    """All routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        """Keep them, in their order."""
        self.all = (*routes,)

    def find(self, method: str, path: str) -> tuple[Route | None, dict[str, str], list[str]]:
        """Return the route of a request and its segments; and the methods that the path has, sorted."""
        matches = [(route, found) for route in self.all if (found := route.match(path)) is not None]
        methods = sorted({one for route, _ in matches for one in _methods(route)})
        for route, found in matches:
            if method in _methods(route):
                return route, found, methods
        return None, {}, methods


def _methods(route: Route) -> tuple[str, ...]:
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)
