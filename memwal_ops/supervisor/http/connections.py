"""Read requests and write responses within bounds, with TLS or without; one connection is one request.

File descriptors and threads are needed by the jobs: idle and slow clients must not take them. Responses are compressed,
except a page for someone who is signed in: it has the value that its forms send back, beside words of the address, and
by the sizes of many compressed pages another site could find the value out (BREACH).

Not uvicorn or hypercorn (h11), which would replace the lines that read a request, and leave all bounds to us: uvicorn
0.54 never ends a request whose headers drip, and beside 1,100 idle connections, each with a descriptor, answers 503 to
``/healthz`` too; 1,000 small requests take 1.6 CPU s there, 3.8 by hypercorn 0.18, 1.0 here.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from memwal_ops.errors import InvalidConfigError
from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from email.message import Message
    from socketserver import BaseRequestHandler


class Certificate:
    """A certificate and its key. A pair that does not fit, while it is replaced, leaves the previous one in effect."""

    def __init__(self, certificate: str, key: str) -> None:
        """Read both files. Raises ``InvalidConfigError``: they cannot be read, or do not belong together."""
        self._files = (certificate, key)
        self._stamp = self._stamped()
        try:
            self._context = self._read()
        except (OSError, ValueError) as error:
            raise InvalidConfigError(
                f"The certificate {certificate} and the key {key} cannot be used: {_why(error)}.",
                remedy="Correct http.tls_certificate and http.tls_key: PEM files of one pair, which the service reads.",
            ) from error

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Encrypt a connection; its handshake comes with its first read."""
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def reload_if_changed(self) -> None:
        """Read the files again if they have changed."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        log = get_logger(__name__)
        try:
            self._context = self._read()
        except (OSError, ValueError) as error:
            log.warning("certificate_not_reloaded", file=self._files[0], error=_why(error), still="the previous one")
        else:
            log.info("certificate_reloaded", file=self._files[0])

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # An empty password: a key that needs one fails, and does not ask on the terminal.
        context.load_cert_chain(*self._files, password="")
        return context

    def _stamped(self) -> tuple[object, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: str) -> object:
    try:
        status = os.stat(file)
    except OSError as error:
        return error.errno
    return status.st_mtime_ns, status.st_size, status.st_ino


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error)


JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
SEVERAL, SEPARATOR = "tables", "\0"
"""The field that may be given several times, or as a list; between its values is what no name of a table has."""
_MAX_FIELDS = 150


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Its path and query string as sent, its body, and the address of the client."""

    method: str
    path: str
    query: str
    headers: Message
    client: str
    body: bytes = b""
    secure: bool = False

    @property
    def kind(self) -> str:
        """The media type of the body, without parameters."""
        return str(self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()

    def fields(self) -> dict[str, str]:
        """Return the fields of the body, a JSON object or a form; a null counts as not given.

        Raises ``HttpError``: it is neither, or a field is given twice or is neither text nor a number.
        """
        if not self.body:
            return {}
        if self.kind == FORM:
            return self._form()
        if self.kind != JSON:
            raise HttpError(415, f"The body must be {JSON} or {FORM}.")
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, "The body is not valid JSON.") from error
        if not isinstance(document, dict):
            raise HttpError(400, "The body must be a JSON object.")
        several = document.get(SEVERAL)
        if isinstance(several, list):
            document[SEVERAL] = SEPARATOR.join(map(_text, several))
        return {name: _text(value) for name, value in document.items() if value is not None}

    def _form(self) -> dict[str, str]:
        try:
            given = parse_qs(self.body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError as error:
            raise HttpError(400, "The form cannot be read.") from error
        if any(len(values) > 1 for name, values in given.items() if name != SEVERAL):
            raise HttpError(400, "A field of the form is given twice.")
        several = {SEVERAL: SEPARATOR.join(given[SEVERAL])} if SEVERAL in given else {}
        return {name: values[0] for name, values in given.items() if values[0]} | several


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise HttpError(400, "Each field of the body must be a text or a whole number.")
    return str(value)


@dataclass(frozen=True, slots=True)
class Response:
    """What is sent back; ``policy`` is its Content-Security-Policy. One with a ``secret`` is not compressed."""

    status: int
    kind: str
    body: bytes | LongBody
    policy: str = "default-src 'none'"
    headers: tuple[tuple[str, str], ...] = ()
    secret: bool = False


class HttpError(Exception):
    """A request is refused, with this status and a sentence."""

    def __init__(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers

    def response(self) -> Response:
        """Return the response of a refused request."""
        return json_response(self.status, {"error": redact(str(self))}, *self.headers)


def json_response(status: int, document: object, *headers: tuple[str, str]) -> Response:
    """Return a JSON document."""
    return Response(status, JSON, json.dumps(document, indent=2, default=str).encode() + b"\n", headers=headers)


class LongBody:
    """A body that may have a hundred megabytes. It is kept by gzip, a twentieth of its size."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.size, packed = 0, io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as file:
            for piece in pieces:
                self.size += file.write(piece)
        self.packed = packed.getvalue()

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        """The body as it was, by pieces."""
        with gzip.GzipFile(fileobj=io.BytesIO(self.packed)) as file:
            yield from iter(lambda: file.read(1 << 20), b"")


def long_json_response(document: Mapping[str, object]) -> Response:
    """Return a JSON document that may have megabytes, on one line: that takes a fifth of the time.

    An iterator in it becomes an array, item by item; what is callable is called after what stands before it.
    """
    return Response(200, JSON, LongBody(_pieces(document)))


def _pieces(document: Mapping[str, object]) -> Iterator[bytes]:
    for at, (key, value) in enumerate(document.items()):
        yield f"{', ' if at else '{'}{json.dumps(key)}: ".encode()
        if isinstance(value, Iterator):
            yield b"["
            for place, item in enumerate(value):
                yield f"{', ' if place else ''}{json.dumps(item, default=str)}".encode()
            yield b"]"
        else:
            yield json.dumps(value() if callable(value) else value, default=str).encode()
    yield b"}\n" if document else b"{}\n"


MAX_CONNECTIONS = 64
# For a whole request, from its connection to the last byte of the response.
REQUEST_SECONDS = 30.0
_EVICTION_SECONDS = 0.2


class BoundedServer(ThreadingHTTPServer):
    """An HTTP server with at most 64 connections (HTTP/1.0)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseRequestHandler],
        respond: Callable[[Request], Response],
        certificate: Certificate | None,
    ) -> None:
        self.respond = respond
        self.secure = certificate is not None
        # Connections, the oldest first, each with its deadline; None once it was shut down, until its thread has ended.
        self._connections: dict[socket.socket, float | None] = {}
        # Those whose request has come whole.
        self._answering: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._certificate = certificate
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; its own thread does the handshake of TLS."""
        connection, address = super().get_request()
        if self._certificate is None:
            return connection, address
        connection.settimeout(REQUEST_SECONDS)
        return self._certificate.wrap(connection), address

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class's
        """Admit a connection; at the limit one is closed, so that idle clients do not lock others out.

        It is the oldest of those that have not sent a whole request: an answer in progress ends before.

        Without a limit idle connections take every descriptor of the process, and no job can open a file or start.
        """
        with self._changed:
            living = [connection for connection, ends in self._connections.items() if ends is not None]
            if len(living) >= MAX_CONNECTIONS:
                waiting = (connection for connection in living if connection not in self._answering)
                self._shut_down(next(waiting, living[0]))
            # Those that were shut down end by themselves, on a busy machine a moment later.
            self._changed.wait_for(lambda: len(self._connections) < 2 * MAX_CONNECTIONS, _EVICTION_SECONDS)
            if len(self._connections) >= 2 * MAX_CONNECTIONS:
                return False
            self._connections[request] = time.monotonic() + REQUEST_SECONDS
        return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and free its slot."""
        # Under the lock: after the close, the descriptor may be reused by another file, which would be shut down.
        with self._changed:
            with suppress(OSError):
                socket.socket.shutdown(request, socket.SHUT_WR)
            self.close_request(request)
            self._connections.pop(request, None)
            self._answering.discard(request)
            self._changed.notify_all()

    def came_whole(self, request: Any) -> None:
        """Note that the request of a connection has come whole."""
        with self._changed:
            if request in self._connections:
                self._answering.add(request)

    def wait(self, seconds: float) -> None:
        """Wait until no connection is left; those whose request has not come whole end at once."""
        with self._changed:
            for connection in self._connections:
                with suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RD)
            self._changed.wait_for(lambda: not self._connections, seconds)

    def service_actions(self) -> None:
        """Shut down connections past their deadline, and read a changed certificate; called about twice a second."""
        now = time.monotonic()
        with self._changed:
            late = [connection for connection, ends in self._connections.items() if ends is not None and ends < now]
            for connection in late:
                self._shut_down(connection)
        if self._certificate is not None:
            self._certificate.reload_if_changed()

    def _shut_down(self, request: socket.socket) -> None:
        self._connections[request] = None
        with suppress(OSError):
            # Not that of an SSL socket: it ends the encryption first, and its thread would send the rest in plain text.
            socket.socket.shutdown(request, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's
        """Log a client that disconnected before the response at debug level, without a traceback."""
        get_logger(__name__).debug("http_client_gone", client=str(client_address), error=repr(sys.exception()))


_KINDS = frozenset({"text/html", "text/plain", "text/javascript", "application/json", "image/svg+xml"})
_MIN_BYTES = 1400  # less gains nothing
_LEVEL = 5
_REFUSED = re.compile(r"q=0(\.0*)?")


def is_compressible(response: Response) -> bool:
    """Return whether the body depends on what encodings a client accepts."""
    kind = response.kind.partition(";")[0]
    return not response.secret and kind in _KINDS and len(response.body) >= _MIN_BYTES


def accepts_gzip(header: str) -> bool:
    """Return whether a client accepts gzip, by its ``Accept-Encoding``."""
    accepted: dict[str, bool] = {}
    for part in header.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        accepted[name] = not any(_REFUSED.fullmatch(parameter.replace(" ", "")) for parameter in parameters)
    return accepted.get("gzip", accepted.get("*", False))


def compressed(body: bytes | LongBody) -> bytes:
    """Return a body by gzip."""
    return body.packed if isinstance(body, LongBody) else gzip.compress(body, _LEVEL, mtime=0)


MAX_BODY = 64 << 10
# Of a body that is too large, so that the client reads the response before the connection ends.
_MAX_DRAINED = 1 << 20
# The address of a chart changes with its content.
_CACHED = "private, max-age=3600"
_LINE_ENDS = (b"\r\n", b"\n")


class _Lines:
    """The lines of a stream; ``last`` is the last one that was read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.last = b""

    def readline(self, size: int = -1) -> bytes:
        self.last = self._stream.readline(size)
        return self.last


class Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server_version = "memwal-ops"
    sys_version = ""
    server: BoundedServer
    raw_requestline: bytes

    def setup(self) -> None:
        """Bound each read and write; the server bounds the whole request."""
        super().setup()
        self.connection.settimeout(REQUEST_SECONDS)

    def parse_request(self) -> bool:
        """Parse a request; one that ended before the empty line after its headers is not executed (RFC 9112, 8)."""
        stream, lines = self.rfile, _Lines(self.rfile)
        self.rfile = lines  # type: ignore[assignment]  # its base class reads lines alone
        try:
            good = super().parse_request()
        finally:
            self.rfile = stream
        if good and not (self.raw_requestline.endswith(b"\n") and lines.last in _LINE_ENDS):
            self.close_connection = True
            self.send_error(400)
            return False
        return good

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
        self.server.came_whole(self.connection)
        client = str(self.client_address[0])
        request = Request(self.command, path, query, self.headers, client, body, secure=self.server.secure)
        self._send(self.server.respond(request))

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_GET  # noqa: N815 - the base class's names

    def _body(self) -> bytes:
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
        body: bytes | LongBody = response.body
        encoding = {}
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
            for piece in [body] if isinstance(body, bytes) else body:
                self.wfile.write(piece)

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
