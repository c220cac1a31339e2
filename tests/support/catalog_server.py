"""A catalog on the loopback interface, after the REST specification of Lance namespaces: lists and describes tables."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "catalog-token-0123456789"
"""What a request must carry, as ``Authorization: Bearer``."""


class CatalogServer:
    """The tables of the namespace ``prod``: each with its location; ``vend`` returns their storage options.

    ``requests`` has the path of every request; ``before`` is called with each of them.
    """

    def __init__(self, page: int = 2) -> None:
        """Start on a free port, in threads of this process."""
        self.tables: dict[str, str] = {}
        self.vend: Callable[[], dict[str, str]] = dict
        self.before: Callable[[str], None] = lambda path: None
        self.requests: list[str] = []
        self._page = page
        catalog = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                catalog.requests.append(self.path)
                catalog.before(self.path)
                allowed = self.headers.get("authorization") == f"Bearer {TOKEN}"
                code, document = catalog.answer(self.path) if allowed else (401, {"error": "who are you?", "code": 16})
                body = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _answer

            def log_message(self, *_: Any) -> None:
                """Not to stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body: the page of names after the token, or one table."""
        parts, query = urlsplit(path).path.split("/"), parse_qs(urlsplit(path).query)
        names = unquote(parts[3]).split("$")
        if parts[2:] == ["namespace", parts[3], "list"] and names == ["prod"]:
            return 200, {"namespaces": []}
        if parts[2] == "namespace" and names == ["prod"]:
            left = [name for name in sorted(self.tables) if name > query.get("page_token", [""])[0]]
            page = left[: self._page]
            return 200, {"tables": page, "page_token": page[-1] if len(left) > len(page) else None}
        if parts[2] == "table" and names[0] == "prod" and names[1] in self.tables:
            return 200, {"location": self.tables[names[1]], "storage_options": self.vend()}
        return 404, {"error": "there is none", "code": 4 if parts[2] == "table" else 1}

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def catalog_server() -> Iterator[CatalogServer]:
    """A server that is stopped afterwards."""
    server = CatalogServer()
    try:
        yield server
    finally:
        server.stop()
