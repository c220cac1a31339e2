"""An HTTP proxy before the S3 server that fails as real networks do: before or after the effect."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit
from xml.sax.saxutils import escape, unescape


@dataclass
class Fault:
    """What happens to the next ``times`` requests that match.

    ``when`` is ``before`` (the server never sees the request), ``after`` (it was carried out
    and only the answer is lost), ``cut`` (half of the answer's content arrives, then a reset) or
    ``late`` (nothing else happens). ``status`` is answered instead; None resets the connection.
    ``stall`` seconds pass before anything.
    """

    method: str
    path: str
    when: Literal["before", "after", "cut", "late"]
    status: int | None = None
    code: str = "InternalError"
    times: int = 1
    stall: float = 0.0


@dataclass
class FaultyProxy:
    """Forwards to ``target``; ``seen`` has every request as (method, path with query).

    A request that the server does not answer in ``patience`` seconds is reset. ``quoted_tags``: what becomes of an
    ``If-Match`` in quotes: ``compared``, or ``refused`` as by Ceph RGW 16.2, which compares the bare tag, or
    ``forwarded`` as it came, as are those without quotes then; ``bare_tags``: of one without them, ``compared`` or
    ``ignored``.
    """

    target: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    drop_condition: bool = False
    quoted_tags: Literal["compared", "refused", "forwarded"] = "compared"
    bare_tags: Literal["compared", "ignored"] = "compared"
    undeletable: set[str] = field(default_factory=set)
    patience: float = 10.0
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> FaultyProxy:
        proxy = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with lock:
                    proxy.note(self.command, self.path)
                    fault = proxy.next_fault(self.command, self.path)
                if fault is not None and fault.stall:
                    time.sleep(fault.stall)
                if fault is not None and fault.when == "before":
                    return self.fail(fault)
                try:
                    status, headers, content = proxy.forward(self.command, self.path, dict(self.headers), body)
                except TimeoutError:
                    return self.reset()
                if fault is not None and fault.when == "after":
                    return self.fail(fault)
                self.reply(status, headers, content, cut=fault is not None and fault.when == "cut")
                return None

            def reset(self) -> None:
                # Closing with a pending linger of zero sends a reset.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()

            def fail(self, fault: Fault) -> None:
                if fault.status is None:
                    self.reset()
                    return
                text = f"<Error><Code>{fault.code}</Code><Message>made to fail</Message></Error>"
                self.reply(fault.status, [("content-type", "application/xml")], text.encode())

            def reply(self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False) -> None:
                self.send_response(status)
                length = str(len(content))
                for key, value in headers:
                    if key.lower() == "content-length" and self.command == "HEAD":
                        length = value
                    elif key.lower() not in {"content-length", "transfer-encoding", "connection", "date", "server"}:
                        self.send_header(key, value)
                self.send_header("content-length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.reset()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """A client that was killed while it waited is no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """The proxy's own URL."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_port}"

    def count(self, method: str) -> int:
        """Requests with this method so far."""
        return sum(1 for seen, _ in self.seen if seen == method)

    def note(self, method: str, path: str) -> None:
        """A request has come."""
        self.seen.append((method, path))

    def next_fault(self, method: str, path: str) -> Fault | None:
        """The fault for this request, one of its times used up."""
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None

    def without_undeletable(self, body: bytes) -> tuple[bytes, list[str]]:
        """A DeleteObjects request without the objects that may not go, and their keys."""
        kept: list[str] = []

        def look(match: re.Match[bytes]) -> bytes:
            key = unescape(match.group(1).decode())
            if key in self.undeletable:
                kept.append(key)
                return b""
            return match.group(0)

        return re.sub(rb"<Object><Key>(.*?)</Key>.*?</Object>", look, body), kept

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's own answer."""
        kept: list[str] = []
        if method == "POST" and "delete" in path and self.undeletable:
            body, kept = self.without_undeletable(body)
            headers = {key: value for key, value in headers.items() if key.lower() != "content-length"}
        if self.drop_condition:
            headers = {key: value for key, value in headers.items() if key.lower() not in {"if-none-match", "if-match"}}
        wanted = next((value for key, value in headers.items() if key.lower() == "if-match"), None)
        if wanted is not None and self.quoted_tags != "forwarded":
            headers = {key: value for key, value in headers.items() if key.lower() != "if-match"}
            if wanted.startswith('"') and self.quoted_tags == "refused":
                said = b"<Error><Code>PreconditionFailed</Code><Message></Message></Error>"
                return 412, [("Content-Type", "application/xml")], said
            if not self.drop_condition and (wanted.startswith('"') or self.bare_tags == "compared"):
                headers["If-Match"] = f'"{wanted.strip(chr(34))}"'
        parts = urlsplit(self.target)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self.patience)
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            refusals = "".join(
                f"<Error><Key>{escape(key)}</Key><Code>AccessDenied</Code><Message>locked</Message></Error>"
                for key in kept
            )
            content = content.replace(b"</DeleteResult>", refusals.encode() + b"</DeleteResult>")
            return answer.status, answer.getheaders(), content
        finally:
            connection.close()
