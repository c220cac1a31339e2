"""Bound the number of connections and the time of each, with TLS or without; one connection is one request.

File descriptors and threads are needed by the jobs: idle and slow clients must not take them.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from socketserver import BaseRequestHandler

    from memwal_ops.supervisor.http.exchange import Request, Response
    from memwal_ops.supervisor.http.tls import Certificate

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
        """Admit a connection; at the limit, the oldest one is closed, so that idle clients do not lock others out.

        Without a limit idle connections take every descriptor of the process, and no job can open a file or start.
        """
        with self._changed:
            if len(self._connections) >= MAX_CONNECTIONS:
                oldest = next((connection for connection, ends in self._connections.items() if ends is not None), None)
                if oldest is not None:
                    self._shut_down(oldest)
                self._changed.wait_for(lambda: len(self._connections) < MAX_CONNECTIONS, _EVICTION_SECONDS)
            if len(self._connections) >= MAX_CONNECTIONS:
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
            self._changed.notify_all()

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
        """Shut down a connection: its thread wakes up, and closes it."""
        self._connections[request] = None
        with suppress(OSError):
            # Not that of an SSL socket: it ends the encryption first, and its thread would send the rest in plain text.
            socket.socket.shutdown(request, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's
        """Log a client that disconnected before the response at debug level, without a traceback."""
        get_logger(__name__).debug("http_client_gone", client=str(client_address), error=repr(sys.exception()))
