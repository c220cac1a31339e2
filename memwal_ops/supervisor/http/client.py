"""Ask a running service, and act on it, by the address and the token of its configuration.

Requests to other servers: they follow no redirect, and their errors quote no URL, which may have secrets.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.options import redact
from memwal_ops.text import printable
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http.client import HTTPResponse

    from memwal_ops.supervisor.config.model import HttpConfig


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: tokens and messages go where they were configured to go, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the redirect as an error with its status."""
        return None  # noqa: RET501 - the base class's result


class Deadline:
    """Bounds a request as a whole: at its end the connections are shut down, however slowly a server sends.

    The time limit of a socket is for each read: a server that sends a byte a second would be waited for without end.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._over = seconds, False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def watch(self, connection: socket.socket) -> None:
        """End a connection in time, too; its descriptor is copied, as TLS takes the socket's own."""
        with self._lock:
            self._sockets.append(socket.socket(fileno=os.dup(connection.fileno())))
        if self._over:
            self._end()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise :class:`TimeoutError` if the time was over, whatever came of it: a response may have been cut."""
        self._timer.cancel()
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets = []
        if self._over or isinstance(error, TimeoutError):
            raise TimeoutError(f"it did not end within {self._seconds:g} s")

    def _end(self) -> None:
        with self._lock:
            self._over = True
            for connection in self._sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Watched(urllib.request.AbstractHTTPHandler):
    """Opens connections under a deadline."""

    deadline: Deadline

    def do_open(self, http_class: Any, req: urllib.request.Request, **arguments: Any) -> HTTPResponse:
        def connection_of(*given: Any, **more: Any) -> Any:
            connection = http_class(*given, **more)
            create = connection._create_connection  # noqa: SLF001 - there is no other place before the first read

            def created(*address: Any, **limits: Any) -> socket.socket:
                made: socket.socket = create(*address, **limits)
                self.deadline.watch(made)
                return made

            connection._create_connection = created  # noqa: SLF001 - see above
            return connection

        return super().do_open(connection_of, req, **arguments)


class _WatchedHttp(_Watched, urllib.request.HTTPHandler):
    """``http``."""


class _WatchedHttps(_Watched, urllib.request.HTTPSHandler):
    """``https``."""


def fetch(
    url: str,
    seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    redirects: bool = False,
) -> None:
    """Send a request to another server, with a body as POST; the whole takes at most ``seconds``.

    A user and a password in the URL are sent as basic authentication. Raises ``OSError`` or ``ValueError`` or
    ``HTTPException``: there is no response in time, or one that is not good.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    sent = {"User-Agent": f"memwal-ops/{__version__}", **(headers or {})}
    if user:
        name, _, password = user.partition(":")
        given = f"{unquote(name)}:{unquote(password)}".encode()
        sent["Authorization"] = f"Basic {base64.b64encode(given).decode()}"
        url = urlunsplit(parts._replace(netloc=host))
    if parts.scheme not in {"http", "https"}:
        raise ValueError("its URL is not http or https")
    request = urllib.request.Request(url, body, sent)  # noqa: S310 - checked above
    with Deadline(seconds) as deadline:
        handlers: list[Any] = [_WatchedHttp(), _WatchedHttps(), *([] if redirects else [NoRedirects()])]
        for handler in handlers[:2]:
            handler.deadline = deadline
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as response:
            response.read(1)


def failure_text(error: Exception, url: str = "") -> str:
    """Return why a request failed, without its URL; that of an invalid URL would quote its path."""
    if isinstance(error, InvalidURL):
        return "its URL is invalid: it has a space, a control character, or a port that is not a number"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = f"{type(error).__name__}: {reason}"
    return printable(redact(text.replace(url, "URL") if url else text))


_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - not bound
# Of silence, and for a whole response.
_SECONDS, _RESPONSE_SECONDS = 15.0, 60.0
# A plan or a hold waits for a worker.
_ACT_SECONDS = 30.0
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class ServiceClient:
    """Sends requests to the service at ``http``; ``token``: to act."""

    def __init__(self, http: HttpConfig, token: str | None = None) -> None:
        host = _EVERYWHERE.get(http.host, http.host)
        self.address = f"{f'[{host}]' if ':' in host else host}:{http.port}"
        self._base = f"{'http' if http.tls_certificate is None else 'https'}://{self.address}"
        self._token = token
        # No proxy of the environment: it would get the token.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if http.tls_certificate is not None:
            handlers.append(urllib.request.HTTPSHandler(context=_only(os.path.expanduser(http.tls_certificate))))
        handlers.append(NoRedirects())
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Any:
        """Return the document at a path.

        Raises ``OSError`` or ``ValueError`` or ``HTTPException``: there is no response, or one that is not JSON.
        """
        with self._opener.open(f"{self._base}{path}", timeout=_SECONDS) as response:
            return _document(response)

    def act(self, path: str, fields: Mapping[str, str]) -> Any:
        """Act, and return the document of what was done.

        Raises ``InvalidUsageError``: the service does not respond, or refuses it; with its reason.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(  # noqa: S310 - http or https
            f"{self._base}/api/v1{path}", json.dumps(fields).encode(), headers, method="POST"
        )
        try:
            with self._opener.open(request, timeout=_ACT_SECONDS) as response:
                return _document(response)
        except urllib.error.HTTPError as error:
            raise InvalidUsageError(
                f"The service refused it: {_reason(error)}", remedy=_REMEDIES.get(error.code, "")
            ) from error
        except (OSError, ValueError, HTTPException) as error:
            raise InvalidUsageError(
                f"The service does not respond on {self.address} ({why_silent(error)}).",
                remedy="Start it (memwal-ops run), or give the --config that it was started with.",
            ) from error


_REMEDIES = {
    401: "Give --token-file with a token of http.token_file that may operate.",
    403: "Give --token-file with a token of http.token_file that may operate; docs/http.md, Tokens, has its form.",
    404: "memwal-ops status shows the tables and their jobs.",
    409: "memwal-ops status shows what it does now.",
    429: "Correct the token, and wait for a minute.",
    503: "See the log of the service.",
}


def target(table: str | None, job: str | None) -> str:
    """Return the path of a job, a table or the fleet below ``/api/v1``."""
    path = "" if table is None else f"/tables/{quote(table, safe='', errors='surrogateescape')}"
    return path if job is None else f"{path}/jobs/{quote(job, safe='')}"


def why_silent(error: Exception) -> str:
    """Return why there is no response."""
    why = error.reason if isinstance(error, urllib.error.URLError) else error
    return str((isinstance(why, OSError) and why.strerror) or why)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, HTTPException, KeyError, TypeError):
        return f"status {error.code}"


def _document(response: HTTPResponse) -> Any:
    ends, parts = time.monotonic() + _RESPONSE_SECONDS, []
    while part := response.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > ends:
            raise TimeoutError(f"its response is not complete after {_RESPONSE_SECONDS:g} s")
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError):
        raise ValueError("its response is not of memwal-ops") from None


def _only(certificate: str) -> ssl.SSLContext:
    """Trust the certificate of the configuration, and no other, whatever host it names.

    Of a chain only the first one: another holder of a certificate of the same authority is not this service.
    """
    try:
        match = _CERTIFICATE.search(Path(certificate).read_text(encoding="utf-8", errors="replace"))
        if match is None:
            raise ssl.SSLError("it has no certificate")
        context = ssl.create_default_context(cadata=match[0])
    except OSError as error:
        raise InvalidUsageError(
            f"The certificate {certificate} cannot be read: {error.strerror or error}.",
            remedy="Correct http.tls_certificate, or let this user read it.",
        ) from error
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
