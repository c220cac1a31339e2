"""Serve pages, health, metrics, status and actions over HTTP.

Reading needs no password: it binds to 127.0.0.1 by default, and serves only requests for its own host names, so that no
page in a browser reads it by DNS rebinding. Acting needs a token (:mod:`memwal_ops.supervisor.http.access`).
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from memwal_ops.errors import HistoryError, InvalidUsageError
from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.actions import ActionConflictError, Actions, UnknownTargetError
from memwal_ops.supervisor.http import access, connections, routes
from memwal_ops.supervisor.http.acting import Audit, acting_routes, check_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from memwal_ops.supervisor.observe.pages import Page

_SIGN_IN, _SIGN_OUT = "/sign-in", "/sign-out"
_PAGE_METHODS = ["GET", "HEAD"]
# What a redirect goes to: a path of this service, and not the host that // or /\ would begin.
_REFUSED = 400
_OWN_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")

_STATUSES: Mapping[type[Exception], int] = {
    UnknownTargetError: 404,
    ActionConflictError: 409,
    ValueError: 400,
    HistoryError: 503,
    TimeoutError: 503,
}


class HttpServer:
    """Serves on background threads.

    Args:
        alive, ready, metrics, status, runs, run: see :class:`memwal_ops.supervisor.http.routes.Sources`.
        pages: returns the page of any other path and its query string, for a viewer; None if there is none.
        sign_in: returns the page that asks for a token; given why the last one was refused.
        allowed_hosts: host names that requests may have in their ``Host`` header, besides its own.
        refused: returns the page for a form that was refused, by status, reason and where to go back to.
        acted: returns the page that shows what an action found, by its document, where to go back to, and the viewer;
            None: there is nothing to show but the page from which it was asked for.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        alive: Callable[[], tuple[bool, str]],
        ready: Callable[[], tuple[bool, str]],
        metrics: Callable[[], Iterable[bytes]],
        status: Callable[[], Mapping[str, Any]],
        runs: Callable[..., list[dict[str, Any]]],
        run: Callable[[int], dict[str, Any] | None] = lambda _: None,
        pages: Callable[[str, str, access.Viewer], Page | None] = lambda *_: None,
        sign_in: Callable[[str], Page] | None = None,
        refused: Callable[[int, str, str], Page] | None = None,
        acted: Callable[[Mapping[str, Any], str, access.Viewer], Page | None] = lambda *_: None,
        allowed_hosts: Iterable[str] = (),
        actions: Actions | None = None,
        tokens: access.TokenFile | None = None,
        audit: Audit | None = None,
        certificate: connections.Certificate | None = None,
    ) -> None:
        """Bind the address, and start to serve. Raises ``InvalidUsageError``: the address cannot be bound."""
        self._sign_in_page, self._refused_page, self._acted_page = sign_in, refused, acted
        self._names = access.HostNames(host, allowed_hosts)
        self._access = access.Access(tokens, self._names)
        self._audit = audit or Audit(None)
        self._rendered = _RenderedPages(pages)
        sources = routes.Sources(alive, ready, metrics, status, runs, run)
        acting = () if actions is None else acting_routes(actions)
        self._routes = routes.Routes([*routes.reading_routes(sources, lambda: self._routes), *acting])
        try:
            self._server = connections.BoundedServer((host, port), connections.Handler, self.response_to, certificate)
        except OSError as error:
            raise InvalidUsageError(
                f"The HTTP address {host}:{port} cannot be bound: {error.strerror}.",
                remedy="Give another http.port or http.host, or http.enabled: false.",
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def close(self, seconds: float = 0.0) -> None:
        """Stop serving; requests in progress may take so long to end."""
        self._server.shutdown()
        self._server.server_close()
        self._server.wait(seconds)

    def response_to(self, request: connections.Request) -> connections.Response:
        """Return the response to a request; to a form that is refused, a page that says why."""
        response = self._response_to(request)
        if (
            request.kind != connections.FORM
            or response.kind != connections.JSON
            or response.status < _REFUSED
            or self._refused_page is None
        ):
            return response
        try:
            after = request.fields().get("next", "/")
        except connections.HttpError:
            after = "/"
        assert isinstance(response.body, bytes)  # noqa: S101 - what is refused is short
        page = self._refused_page(response.status, str(json.loads(response.body)["error"]), _own(after))
        return replace(_of(page), headers=response.headers)

    def _response_to(self, request: connections.Request) -> connections.Response:
        try:
            return self._respond(request)
        except connections.HttpError as error:
            return error.response()
        except tuple(_STATUSES) as error:
            return connections.json_response(
                _status_of(error), {"error": redact(str(error) or "The service is busy: ask again.")}
            )
        except Exception as error:  # noqa: BLE001 - a response must not contain a traceback
            get_logger(__name__).exception("http_failed", path=request.path[:200])
            return connections.json_response(500, {"error": redact(f"{type(error).__name__}: {error}")})

    def _respond(self, request: connections.Request) -> connections.Response:
        self._check_host(request)
        if request.path in {_SIGN_IN, _SIGN_OUT}:
            return self._signed(request)
        route, values, methods = self._routes.find(request.method, request.path)
        if route is not None and route.read is not None:
            return route.read(request, values)
        if route is not None:
            return self._act(request, route, values)
        if methods or request.method not in _PAGE_METHODS:
            allowed = methods or _PAGE_METHODS
            message = f"Use {' or '.join(allowed)} here." if methods else "Pages are read-only: use GET or HEAD."
            raise connections.HttpError(405, message, ("Allow", ", ".join(allowed)))
        viewer = self._access.viewer(request)
        page = self._rendered.get(request.path, request.query, viewer)
        if page is None:
            raise connections.HttpError(
                404, "Try /, /healthz, /readyz, /metrics, or the paths in /api/v1/openapi.json."
            )
        return replace(_of(page), secret=viewer.csrf is not None)

    def _check_host(self, request: connections.Request) -> None:
        hosts = [str(header) for header in request.headers.get_all("Host", [])]
        foreign = [host for host in hosts if not self._names.is_own(host)]
        if foreign:
            message = f"The host {foreign[0][:200]!r} is not a name of this service: use its address, or add the host"
            raise connections.HttpError(421, f"{message} to http.allowed_hosts.")

    def _act(self, request: connections.Request, route: routes.Route, found: Mapping[str, str]) -> connections.Response:
        self._access.check_origin(request)
        fields: dict[str, str] = {}

        def csrf() -> str:
            fields.update(request.fields())
            return fields.pop("csrf", "") or str(request.headers.get("X-CSRF-Token") or "")

        caller = self._access.caller(request, csrf)
        fields = fields or request.fields()
        after = fields.pop("next", "/")
        fields.pop("csrf", None)
        check_fields(route, fields)
        assert route.act is not None  # noqa: S101 - a route reads or acts
        target = {"table": found.get("name"), "job": found.get("job")}
        record = {**target, "fields": dict(fields), "role": caller.role, "session": caller.session}
        try:
            status, document = route.act(found, fields, caller)
        except Exception as error:
            code = _status_of(error)
            self._audit.record(route.action, code, who=caller.name, client=request.client, error=str(error), **record)
            raise
        finally:
            self._rendered.forget()
        self._audit.record(route.action, status, who=caller.name, client=request.client, **record)
        if request.kind == connections.FORM and caller.session:
            page = self._acted_page(document, _own(after), self._access.viewer(request))
            return _see_other(after) if page is None else replace(_of(page), secret=True)
        return connections.json_response(status, document)

    def _signed(self, request: connections.Request) -> connections.Response:
        out = request.path == _SIGN_OUT
        if request.method in _PAGE_METHODS and not out and self._sign_in_page is not None:
            return _of(self._sign_in_page(""))
        if request.method != "POST":
            allowed = "POST" if out else "GET, HEAD, POST"
            raise connections.HttpError(405, f"Use {allowed} here.", ("Allow", allowed))
        self._access.check_origin(request)
        if out:
            return _see_other("/", self._access.sign_out(request))
        fields = request.fields()
        try:
            token, cookie = self._access.sign_in(request, fields.get("token", ""))
        except connections.HttpError as error:
            # Not in the audit log: guesses would push out what was done. The log has them.
            if self._sign_in_page is None or request.kind != connections.FORM:
                raise
            page = _of(self._sign_in_page(str(error)))
            return connections.Response(error.status, page.kind, page.body, page.policy, error.headers)
        self._audit.record("sign-in", 303, who=token.name, client=request.client, role=token.role)
        return _see_other(fields.get("next", "/"), cookie)


_MAX_RENDERED = 64


class _RenderedPages:
    """The last pages, each rendered once until what it shows has changed, however many requests ask for it."""

    def __init__(self, render: Callable[[str, str, access.Viewer], Page | None]) -> None:
        self._render = render
        self._lock = threading.Lock()
        self._pages: dict[tuple[str, str, access.Viewer], tuple[threading.Lock, list[Page]]] = {}

    def get(self, *key: Any) -> Page | None:
        """Return the page of a path, a query string and a viewer."""
        with self._lock:
            lock, kept = self._pages.pop(key, (threading.Lock(), []))
            self._pages[key] = lock, kept
            while len(self._pages) > _MAX_RENDERED:
                del self._pages[next(iter(self._pages))]
        with lock:
            if kept and kept[0].is_current():
                return kept[0]
            page = self._render(*key)
            kept[:] = [] if page is None else [page]
            return page

    def forget(self) -> None:
        """Render all anew: someone has acted."""
        with self._lock:
            self._pages = {}


def _status_of(error: Exception) -> int:
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)


def _of(page: Page) -> connections.Response:
    return connections.Response(page.status, page.kind, page.body, page.policy)


def _see_other(path: str, *headers: tuple[str, str]) -> connections.Response:
    return connections.Response(303, "text/plain; charset=utf-8", b"", headers=(("Location", _own(path)), *headers))


def _own(path: str) -> str:
    path = quote(path, safe="/?&=%:;,+@!$'()*~-._", errors="replace")
    return path if _OWN_PATH.fullmatch(path) else "/"
