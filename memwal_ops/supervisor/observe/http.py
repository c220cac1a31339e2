"""Serve pages, health, metrics and status over HTTP, read-only.

There is no authentication: it binds to 127.0.0.1 by default, and serves only requests for its own host names, so
that no page in a browser reads it by DNS rebinding. The number and duration of connections are bounded: file
descriptors and threads are needed by the jobs.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST

from memwal_ops.errors import HistoryError, InvalidUsageError
from memwal_ops.log import get_logger
from memwal_ops.storage.redaction import redact
from memwal_ops.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from memwal_ops.supervisor.observe.pages import Page

    _Response = tuple[int, str, bytes] | tuple[int, str, bytes, str]

_MAX_RUNS = 1000
_MAX_CONNECTIONS = 64
# For a whole request, from its connection to the last byte of the response.
_REQUEST_SECONDS = 30.0
_EVICTION_SECONDS = 0.2
# The address of a chart changes with its content.
_CACHED = "private, max-age=3600"
_EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound


class _Server(ThreadingHTTPServer):
    """Bounds the number of connections and the time of each; one connection is one request (HTTP/1.0)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        # Connections, the oldest first, each with its deadline; None once it was shut down, until its thread has ended.
        self._connections: dict[socket.socket, float | None] = {}
        self._changed = threading.Condition()
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class's
        """Admit a connection; at the limit, the oldest one is closed, so that idle clients do not lock others out.

        Without a limit idle connections take every descriptor of the process, and no job can open a file or start.
        """
        with self._changed:
            if len(self._connections) >= _MAX_CONNECTIONS:
                oldest = next((connection for connection, ends in self._connections.items() if ends is not None), None)
                if oldest is not None:
                    self._shut_down(oldest)
                self._changed.wait_for(lambda: len(self._connections) < _MAX_CONNECTIONS, _EVICTION_SECONDS)
            if len(self._connections) >= _MAX_CONNECTIONS:
                return False
            self._connections[request] = time.monotonic() + _REQUEST_SECONDS
        return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and free its slot."""
        # Under the lock: after the close, the descriptor may be reused by another file, which would be shut down.
        with self._changed:
            super().shutdown_request(request)
            self._connections.pop(request, None)
            self._changed.notify_all()

    def service_actions(self) -> None:
        """Shut down connections past their deadline; called about every half second."""
        now = time.monotonic()
        with self._changed:
            late = [connection for connection, ends in self._connections.items() if ends is not None and ends < now]
            for connection in late:
                self._shut_down(connection)

    def _shut_down(self, request: socket.socket) -> None:
        """Shut down a connection: its thread wakes up, and closes it."""
        self._connections[request] = None
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's
        """Log a client that disconnected before the response at debug level, without a traceback."""
        get_logger(__name__).debug("http_client_gone", client=str(client_address), error=repr(sys.exception()))


class HttpServer:
    """Serves a few paths on background threads.

    Args:
        alive: returns whether the event loop makes progress, and a sentence.
        ready: returns whether it runs jobs, and a sentence.
        metrics: returns the text for Prometheus.
        status: returns the document of ``/api/v1/status``.
        runs: returns the newest runs, by table, job, failed and limit.
        pages: returns the page of any other path and its query string; None if there is none.
        allowed_hosts: host names that requests may have in their ``Host`` header, besides its own.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        alive: Callable[[], tuple[bool, str]],
        ready: Callable[[], tuple[bool, str]],
        metrics: Callable[[], bytes],
        status: Callable[[], Mapping[str, Any]],
        runs: Callable[..., list[dict[str, Any]]],
        pages: Callable[[str, str], Page | None] = lambda *_: None,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        """Bind the address, and start to serve.

        Raises:
            InvalidUsageError: the address cannot be bound.
        """
        server = self
        self._alive, self._ready, self._metrics, self._status, self._runs = alive, ready, metrics, status, runs
        self._pages = pages
        own = socket.gethostname() if host in _EVERYWHERE else host
        self._names = {name.lower().rstrip(".") for name in ("localhost", own, *allowed_hosts)}

        class Handler(BaseHTTPRequestHandler):
            server_version = "memwal-ops"
            sys_version = ""
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                self._respond(*server.response_to(self.path, self.headers.get_all("Host", [])))

            do_HEAD = do_GET  # noqa: N815 - the base class's name

            def refuse(self) -> None:
                self._respond(*_json(405, {"error": "This server is read-only: use GET or HEAD."}))

            do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse  # noqa: N815 - the base class's names

            def _respond(self, code: int, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", _CACHED if kind == "image/svg+xml" else "no-store")
                self.send_header("Content-Security-Policy", policy)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")
                if code == 405:  # noqa: PLR2004 - RFC 9110 requires Allow for this code
                    self.send_header("Allow", "GET, HEAD")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                get_logger(__name__).debug("http_request", line=format % args)

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise InvalidUsageError(
                f"The HTTP address {host}:{port} cannot be bound: {error.strerror}.",
                remedy="Give another http.port or http.host, or http.enabled: false.",
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def response_to(self, target: str, hosts: Iterable[str] = ()) -> _Response:  # noqa: PLR0911 - one for each path
        """Return status code, content type, body and policy for a path, requested with these ``Host`` headers."""
        foreign = [host for host in hosts if not self._is_own_host(host)]
        if foreign:
            message = f"The host {foreign[0][:200]!r} is not a name of this service: use its address, or add the host"
            return _json(421, {"error": f"{message} to http.allowed_hosts."})
        try:
            parts = urlsplit(target)
            match parts.path:
                case "/healthz":
                    return _state(*self._alive())
                case "/readyz":
                    return _state(*self._ready())
                case "/metrics":
                    return 200, CONTENT_TYPE_LATEST, self._metrics()
                case "/api/v1/status":
                    return _json(200, self._status())
                case "/api/v1/runs":
                    return _json(200, {"runs": self._runs(**_filters(parts.query))})
                case _:
                    if (page := self._pages(parts.path, parts.query)) is not None:
                        return page.status, page.kind, page.body, page.policy
                    return _json(404, {"error": "Try /, /healthz, /readyz, /metrics, /api/v1/status or /api/v1/runs."})
        except ValueError as error:
            return _json(400, {"error": str(error)})
        except HistoryError as error:
            return _json(503, {"error": str(error)})
        except Exception as error:  # noqa: BLE001 - a response must not contain a traceback
            get_logger(__name__).exception("http_failed", path=target[:200])
            return _json(500, {"error": redact(f"{type(error).__name__}: {error}")})

    def _is_own_host(self, host: str) -> bool:
        """Whether a ``Host`` header names this service: by one of its names, or by an address, which no DNS rebinds."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            return name in self._names or bool(ip_address(name))
        except ValueError:
            return False


def _filters(query: str) -> dict[str, Any]:
    given = {key: values[-1] for key, values in parse_qs(query).items()}
    unknown = sorted(given.keys() - {"table", "job", "failed", "limit"})
    if unknown:
        raise ValueError(f"There is no filter {unknown[0]!r}; use table, job, failed and limit.")
    limit = given.get("limit", "50")
    if not (limit.isascii() and limit.isdigit()) or not 1 <= int(limit) <= _MAX_RUNS:
        raise ValueError(f"limit must be a number from 1 to {_MAX_RUNS}.")
    failed = given.get("failed", "false").lower()
    if failed not in {"true", "false", "1", "0"}:
        raise ValueError("failed must be true or false.")
    return {
        "table": given.get("table"),
        "job": given.get("job"),
        "failed": failed in {"true", "1"},
        "limit": int(limit),
    }


def _state(good: bool, why: str) -> tuple[int, str, bytes]:  # noqa: FBT001 - the result of the two probes
    return 200 if good else 503, "text/plain; charset=utf-8", f"{printable(why)}\n".encode()


def _json(code: int, document: object) -> tuple[int, str, bytes]:
    return code, "application/json", json.dumps(document, indent=2, default=str).encode() + b"\n"
