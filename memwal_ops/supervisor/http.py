"""The HTTP side: health, metrics and status, read-only. Without a password: it is bound to 127.0.0.1 by default."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST

from memwal_ops.errors import HistoryError, InvalidUsageError
from memwal_ops.log import get_logger
from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MOST_RUNS = 1000


class _Server(ThreadingHTTPServer):
    """Many may come at once, and leave when they like."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's
        """A client that is gone before its answer is nobody's fault, and no traceback in the log."""
        get_logger(__name__).debug("http_client_gone", client=str(client_address), error=repr(sys.exception()))


class HttpServer:
    """Serves five paths on threads of its own.

    Args:
        alive: whether the service works, and why not.
        ready: whether it is ready to run jobs, and why not.
        metrics: the text for Prometheus.
        status: the document of ``/api/v1/status``.
        runs: the newest runs, by table, job, failed and limit.
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
    ) -> None:
        """Bind, and begin to serve.

        Raises:
            InvalidUsageError: the address cannot be had.
        """
        server = self
        self._alive, self._ready, self._metrics, self._status, self._runs = alive, ready, metrics, status, runs

        class Handler(BaseHTTPRequestHandler):
            server_version = "memwal-ops"
            sys_version = ""
            timeout = 30

            def do_GET(self) -> None:
                self._answer(*server.answer(self.path))

            def do_HEAD(self) -> None:
                self._answer(*server.answer(self.path))

            def refuse(self) -> None:
                self._answer(*_json(405, {"error": "It can only be read: GET or HEAD."}))

            do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse  # noqa: N815 - the base class's names

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                if code == 405:  # noqa: PLR2004 - the one that has to say what is allowed
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
                f"Nothing can be served on {host}:{port}: {error.strerror}.",
                remedy="Give another http.port or http.host, or http.enabled: false.",
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, target: str) -> tuple[int, str, bytes]:  # noqa: PLR0911 - one for each path
        """Status code, content type and body for a path."""
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
                    return _json(404, {"error": "Try /healthz, /readyz, /metrics, /api/v1/status or /api/v1/runs."})
        except ValueError as error:
            return _json(400, {"error": str(error)})
        except HistoryError as error:
            return _json(503, {"error": str(error)})
        except Exception as error:  # noqa: BLE001 - a scrape must not end in a traceback on somebody's screen
            get_logger(__name__).exception("http_failed", path=target[:200])
            return _json(500, {"error": redact(f"{type(error).__name__}: {error}")})


def _filters(query: str) -> dict[str, Any]:
    given = {key: values[-1] for key, values in parse_qs(query).items()}
    unknown = sorted(given.keys() - {"table", "job", "failed", "limit"})
    if unknown:
        raise ValueError(f"There is no filter {unknown[0]!r}; use table, job, failed and limit.")
    limit = given.get("limit", "50")
    if not limit.isdigit() or not 1 <= int(limit) <= _MOST_RUNS:
        raise ValueError(f"limit must be a number from 1 to {_MOST_RUNS}.")
    failed = given.get("failed", "false").lower()
    if failed not in {"true", "false", "1", "0"}:
        raise ValueError("failed must be true or false.")
    return {
        "table": given.get("table"),
        "job": given.get("job"),
        "failed": failed in {"true", "1"},
        "limit": int(limit),
    }


def _state(good: bool, why: str) -> tuple[int, str, bytes]:  # noqa: FBT001 - what the two questions answer
    return 200 if good else 503, "text/plain; charset=utf-8", f"{why}\n".encode()


def _json(code: int, document: object) -> tuple[int, str, bytes]:
    return code, "application/json", json.dumps(document, indent=2, default=str).encode() + b"\n"
