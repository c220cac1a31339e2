"""HTTP requests: methods, malformed ones, clients that vanish."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from memwal_ops.supervisor.http.server import HttpServer
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def served() -> Iterator[HttpServer]:
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (False, "starting"), metrics=lambda: [b"m 1\n"],
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


def test_requests_in_progress_end_before_it_is_closed() -> None:
    """They read the history, which the service closes next; a connection without a request is not waited for."""
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def runs(**_: object) -> list[dict[str, object]]:
        began.set()
        may_end.wait(PATIENCE)
        ended.set()
        return []

    server = HttpServer("127.0.0.1", 0, alive=None, ready=None, metrics=None, status=None, runs=runs)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads, socket.create_connection(("127.0.0.1", server.port)):
        answered = threads.submit(answer, server, "GET", "/api/v1/runs")
        assert began.wait(PATIENCE)
        closed = threads.submit(server.close, PATIENCE)
        with pytest.raises(TimeoutError):
            closed.result(0.1)
        may_end.set()
        closed.result(PATIENCE)
        assert ended.is_set()
        assert answered.result(PATIENCE)[0] == 200
