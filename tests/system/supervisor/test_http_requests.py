"""HTTP requests: methods, malformed ones, clients that vanish."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING

import pytest

from memwal_ops.supervisor.http.server import HttpServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def served() -> Iterator[HttpServer]:
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (False, "starting"), metrics=lambda: b"m 1\n",
        status=lambda: {"tables": []}, runs=lambda **_: [],
    )  # fmt: skip
    yield server
    server.close()


def answer(server: HttpServer, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request(method, path)
    got = connection.getresponse()
    found = got.status, dict(got.getheaders()), got.read()
    connection.close()
    return found


def test_other_methods(served: HttpServer) -> None:
    code, headers, body = answer(served, "HEAD", "/healthz")
    assert (code, headers["Content-Length"], body) == (200, "3", b"")
    assert answer(served, "HEAD", "/readyz")[0] == 503
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        code, headers, body = answer(served, method, "/healthz")
        assert (code, headers["Allow"]) == (405, "GET, HEAD")
        assert "GET or HEAD" in json.loads(body)["error"]


def test_odd_requests_make_no_noise(served: HttpServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as odd:
        odd.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
        assert odd.recv(12) == b"HTTP/1.0 400"
    assert answer(served, "GET", "/api/v1/runs?limit=%C2%B2")[0] == 400
    for sent in (b"GET /metrics HTTP/1.0\r\n\r\n", b"\x16\x03\x01\r\n", b""):
        left = socket.create_connection(("127.0.0.1", served.port))
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, and no good-bye
        left.sendall(sent)
        left.close()
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(100)]
    assert answer(served, "GET", "/healthz")[0] == 200
    for one in idle:
        one.close()
    assert "Traceback" not in capfd.readouterr().err
