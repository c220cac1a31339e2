"""Read a request from a connection, within bounds, and write its response."""

from __future__ import annotations

import socket
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from memwal_ops.log import get_logger
from memwal_ops.supervisor.http import connections
from memwal_ops.supervisor.http.compression import accepts_gzip, compressed, is_compressible
from memwal_ops.supervisor.http.exchange import HttpError, Request, json_response

if TYPE_CHECKING:
    from memwal_ops.supervisor.http.exchange import Response

MAX_BODY = 64 << 10
# Of a body that is too large, so that the client reads the response before the connection ends.
_MAX_DRAINED = 1 << 20
# The address of a chart changes with its content.
_CACHED = "private, max-age=3600"


class Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server_version = "memwal-ops"
    sys_version = ""
    server: connections.BoundedServer

    def setup(self) -> None:
        """Bound each read and write; the server bounds the whole request."""
        super().setup()
        self.connection.settimeout(connections.REQUEST_SECONDS)

    def do_GET(self) -> None:
        """Answer a request of any method."""
        try:
            parts = urlsplit(self.path)
            if parts.netloc:  # GET http://host/path: the host is there
                self.headers["Host"] = parts.netloc
            path, query, body = parts.path, parts.query, self._body()
        except HttpError as error:
            self._send(error.response())
            self._drain()
            return
        except ValueError as error:
            self._send(json_response(400, {"error": str(error)}))
            return
        client = str(self.client_address[0])
        request = Request(self.command, path, query, self.headers, client, body, secure=self.server.secure)
        self._send(self.server.respond(request))

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_GET  # noqa: N815 - the base class's names

    def _body(self) -> bytes:
        """Read the body of a request that acts."""
        if self.command != "POST":
            return b""
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) > 1:
            raise HttpError(411, "Send the body with one Content-Length.")
        length = str(lengths[0]) if lengths else "0"
        if not (length.isascii() and length.isdigit()):
            raise HttpError(400, "The Content-Length is not a number.")
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            raise HttpError(413, f"The body is larger than {MAX_BODY} bytes.")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise HttpError(400, "The body is shorter than its Content-Length.")
        return body

    def _send(self, response: Response) -> None:
        body, encoding = response.body, {}
        if is_compressible(response):
            encoding = {"Vary": "Accept-Encoding"}
            if accepts_gzip(self._accepted_encodings()):
                body, encoding = compressed(body), {**encoding, "Content-Encoding": "gzip"}
        self.send_response(response.status)
        self.send_header("Content-Type", response.kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in encoding.items():
            self.send_header(name, value)
        cached = response.kind == "image/svg+xml" and response.status == 200  # noqa: PLR2004 - OK
        self.send_header("Cache-Control", _CACHED if cached else "no-store")
        self.send_header("Content-Security-Policy", response.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        # With no-referrer, browsers would send forms of our own pages with Origin: null.
        self.send_header("Referrer-Policy", "same-origin")
        for name, value in response.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _accepted_encodings(self) -> str:
        """``Accept-Encoding``; a request that could not be read has none."""
        headers = getattr(self, "headers", None)
        return "" if headers is None else ", ".join(map(str, headers.get_all("Accept-Encoding", [])))

    def _drain(self) -> None:
        """Read the rest of a refused body: closing the connection before would discard the response."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
        left = _MAX_DRAINED
        while left > 0 and (read := self.rfile.read1(min(left, 1 << 16))):
            left -= len(read)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no HTTP request that we know; without echoing it."""
        del message, explain
        self.command = getattr(self, "command", None) or "GET"
        self._send(json_response(int(code), {"error": f"The request is refused: {HTTPStatus(code).phrase}."}))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log a request at debug level."""
        get_logger(__name__).debug("http_request", line=format % args)
