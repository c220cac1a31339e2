"""The pages over HTTP: their headers, and what is refused."""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING

import pytest

from memwal_ops.supervisor.http.server import HttpServer
from tests.support.fleet import fleet, pages_of, status

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def served() -> Iterator[HttpServer]:
    document = status(fleet(20))
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (True, "ready"), metrics=lambda: b"m 1\n",
        status=lambda: document, runs=lambda **_: [], pages=pages_of(document).page_at,
    )  # fmt: skip
    yield server
    server.close()


def get(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_pages_the_script_and_runbooks_with_their_headers(served: HttpServer) -> None:
    code, headers, home = get(served, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src 'self';" in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].endswith("frame-ancestors 'none'")
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert headers["Referrer-Policy"] == "same-origin"
    links = {*re.findall(r'(?:href|src)="(/[^"]*)"', home)}
    assert {link.split("/")[1].partition("?")[0] for link in links} == {"tables", "runbooks", "assets", ""}
    links |= {"/runs/7", "/runbooks/merge-blocked.md"}
    kinds = {}
    for link in sorted(links):
        code, headers, body = get(served, link.replace("&amp;", "&"))
        assert (code, bool(body)) == (200, True), link
        kinds[headers["Content-Type"]] = headers
    assert kinds.keys() == {"text/html; charset=utf-8", "text/javascript; charset=utf-8"}
    assert kinds["text/javascript; charset=utf-8"]["Content-Security-Policy"] == "default-src 'none'"


def test_what_is_refused(served: HttpServer) -> None:
    assert get(served, "/", "HEAD")[2] == ""
    assert get(served, "/", "POST")[0] == 405
    assert get(served, "/", Host="evil.example")[0] == 421
    code, headers, body = get(served, "/index.html")
    assert (code, headers["Content-Type"]) == (404, "application/json")
    assert "Try /" in body
    assert headers["Content-Security-Policy"] == "default-src 'none'"
    for path in ("/tables/none", "/runs/100", "/runbooks/../errors.py", "/runbooks/%2e%2e/errors.py"):
        code, headers, body = get(served, path)
        assert (code, headers["Content-Type"]) == (404, "text/html; charset=utf-8")
        assert "There is no " in body
        assert "MemwalOpsError" not in body
