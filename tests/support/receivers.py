"""Servers that keep what they are sent: an HTTP server and a mail server, each on a thread."""

from __future__ import annotations

import socketserver
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Receiver:
    """What arrived, and how the next requests are answered.

    Attributes:
        url: of the server.
        received: path, headers (lower case) and body of each request.
        status: of the answers.
    """

    url: str = ""
    received: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    status: int = 200


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            found.received.append((self.path, headers, body))
            self.send_response(found.status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield found
        finally:
            server.shutdown()


@contextmanager
def mail_receiver() -> Iterator[tuple[int, list[bytes]]]:
    """A mail server without TLS: its port, and the mails that arrive."""
    mails: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            for line in self.rfile:
                word = line[:4].upper()
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    mails.append(b"".join(iter(self.rfile.readline, b".\r\n")))
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], mails
        finally:
            server.shutdown()


@contextmanager
def raw_server(*parts: bytes, pause: float = 0.0) -> Iterator[tuple[int, list[bytes]]]:
    """A server that reads a request and sends ``parts``, with a pause after each: its port, and the requests."""
    requests: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            requests.append(self.request.recv(1 << 16))
            with suppress(OSError):
                for part in parts:
                    self.request.sendall(part)
                    time.sleep(pause)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], requests
        finally:
            server.shutdown()
