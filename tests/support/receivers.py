"""Servers on threads: an HTTP and a mail server that keep what they are sent, and one that never answers."""

from __future__ import annotations

import socket
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
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
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
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
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
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server.server_address[1], requests
        finally:
            server.shutdown()


@contextmanager
def silent_server(drip: bytes = b"") -> Iterator[int]:
    """A server that takes each connection, and never answers; with ``drip`` it begins, and then sends a byte a second.

    Yields its port.
    """
    ended, connections = threading.Event(), []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(drip)
            while drip and not ended.wait(1.0):
                connection.sendall(b"x")

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                threading.Thread(target=serve, args=(connections[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                connection.close()
