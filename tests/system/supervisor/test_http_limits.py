"""What clients of the HTTP side may do: connect by the thousand, idle, trickle, read nothing, ask for other hosts."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.http import connections as module
from memwal_ops.supervisor.http.server import HttpServer
from memwal_ops.supervisor.observe import pages as pages_module
from tests.support.fleet import FakeTables, fleet, job, pages_of, status
from tests.support.service import configure, service
from tests.support.waiting import PATIENCE, until

LARGE = b"x" * (64 << 20)


def serve(host: str = "127.0.0.1", allowed_hosts: tuple[str, ...] = ()) -> HttpServer:
    return HttpServer(
        host, 0, alive=lambda: (True, "ok"), ready=lambda: (True, "ready"), metrics=lambda: [LARGE], status=dict,
        runs=lambda **_: [], allowed_hosts=allowed_hosts,
    )  # fmt: skip


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """Where no request ends because it took long."""
    monkeypatch.setattr(module, "REQUEST_SECONDS", 3600.0)
    server = serve()
    yield server
    server.close()


def ask(port: int, path: str = "/healthz", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def connections() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def connect(port: int, held: ExitStack) -> socket.socket:
    return held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))


def ended(client: socket.socket, seconds: float = PATIENCE) -> bool:
    """Whether the server hangs up within that time; what it sends is thrown away."""
    ends = time.monotonic() + seconds
    client.settimeout(0.1)
    while time.monotonic() < ends:
        try:
            if not client.recv(1 << 20):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_idle_clients_are_limited_and_block_no_other(served: HttpServer) -> None:
    before = connections()
    with ExitStack() as held:
        idle = [connect(served.port, held) for _ in range(300)]
        assert ask(served.port) == (200, "ok\n")
        until(lambda: connections() - before <= 64)
        assert ended(idle[0]), "the oldest gives way"
        assert not ended(idle[-1], 0.3), "the newest stays"
    until(lambda: connections() <= before)


def test_half_requests_render_no_page_and_a_page_is_rendered_once_until_it_changes() -> None:
    document = status(fleet(300))
    tables = FakeTables(document)
    pages = pages_of(document, tables=tables)
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (True, "ready"), metrics=list, status=dict,
        runs=lambda **_: [], pages=pages.page_at,
    )  # fmt: skip
    try:
        with ExitStack() as held:
            for _ in range(200):
                connect(server.port, held).sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-a: ")
            assert ask(server.port) == (200, "ok\n")
        until(lambda: ask(server.port) == (200, "ok\n") and connections() <= 1)
        assert tables.asked == 0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pages_module, "_FRESH_SECONDS", 3600.0)
            first = ask(server.port, "/")
            asked = tables.asked
            assert {ask(server.port, "/") for _ in range(20)} == {first}
            assert tables.asked == asked, "rendered once"
            document["tables"][0]["jobs"]["gc"] = job(state="running")  # on another page than the first
            worst = next(one for one in document["tables"] if one["name"] == "payments")
            worst["jobs"]["gc"] = job(state="running", running_seconds=4.0)
            assert ask(server.port, "/") != first
    finally:
        server.close()


def test_a_whole_request_is_answered_beside_half_ones() -> None:
    """However many come meanwhile."""
    began, may_end = threading.Event(), threading.Event()

    def metrics() -> list[bytes]:
        began.set()
        assert may_end.wait(PATIENCE)
        return [b"m 1\n"]

    server = HttpServer("127.0.0.1", 0, alive=None, ready=None, metrics=metrics, status=dict, runs=None)  # type: ignore[arg-type]  # not asked
    try:
        with ThreadPoolExecutor(1) as threads, ExitStack() as held:
            answer = threads.submit(ask, server.port, "/metrics")
            assert began.wait(PATIENCE)
            half = [connect(server.port, held) for _ in range(200)]
            assert ended(half[0])
            may_end.set()
            assert answer.result(PATIENCE) == (200, "m 1\n")
    finally:
        may_end.set()
        server.close()


def test_a_request_has_a_deadline_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then renews nothing; neither does an answer that is read slowly or never."""
    monkeypatch.setattr(module, "REQUEST_SECONDS", 2.0)
    server = serve()
    try:
        before, began = connections(), time.monotonic()
        with ExitStack() as held:
            trickling, silent, reads_nothing = (connect(server.port, held) for _ in range(3))
            reads_nothing.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):  # long before all of it was sent
                for letter in b"GET /healthz HTTP/1.0\r\nX: " + b"x" * 1000:
                    trickling.sendall(bytes([letter]))
                    time.sleep(0.1)
            assert time.monotonic() - began > 1.5
            assert ended(silent)
            until(lambda: connections() <= before)
        assert ask(server.port) == (200, "ok\n")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:1", 200),
        ("LocalHost:9464", 200),
        ("localhost.", 200),
        ("[::1]:9464", 200),
        ("10.1.2.3", 200),
        ("metrics.example.org", 200),
        ("evil.example.org", 421),
        ("127.0.0.1.evil.example.org", 421),
        ("localhost.evil.example.org:9464", 421),
        ("user@evil.example.org", 421),
        ("[", 421),
        ("", 421),
    ],
)
def test_only_a_host_of_its_own_is_answered(host: str, code: int) -> None:
    """A name that a stranger's DNS has pointed at this address is none."""
    server = serve(allowed_hosts=("Metrics.example.org",))
    try:
        found, text = ask(server.port, Host=host)
        assert found == code
        if code == 421:
            assert "http.allowed_hosts" in json.loads(text)["error"]
            assert "ready" not in text
    finally:
        server.close()


def test_every_host_header_counts_and_none_is_none(served: HttpServer) -> None:
    for sent, code in (
        (b"Host: localhost\r\nHost: evil.example.org\r\n", b"421"),
        (b"Host: evil.example.org\r\nHost: localhost\r\n", b"421"),
        (b"", b"200"),
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n" + sent + b"\r\n")
            assert client.recv(100).split()[1] == code


def test_where_it_is_bound_everywhere_it_answers_to_the_name_of_the_machine() -> None:
    server = serve("0.0.0.0")
    try:
        assert ask(server.port, Host=f"{socket.gethostname()}:1")[0] == 200
        assert ask(server.port, Host="evil.example.org")[0] == 421
    finally:
        server.close()


def test_the_configuration_names_more_hosts(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http: {allowed_hosts: [metrics.example.org]}\ntables: [{uri: /t}]\n")
    assert load_settings(str(file), {}).config.http.allowed_hosts == ["metrics.example.org"]


@pytest.mark.long
def test_more_connections_than_descriptors_stop_no_maintenance(tables: list, tmp_path: Path) -> None:
    """Nor for a while after: nothing failed meanwhile, so nothing is in backoff."""
    needed, (soft, hard) = 1300, resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= needed, "this test needs more descriptors"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    # A worker for each run, so that the service opens pipes all the time.
    config = configure(tmp_path, "merge: {schedule: 1s}", more="pools: {merge: {max_runs: 1}, watch: {max_runs: 1}}")
    try:
        with service(config) as running, ExitStack() as held:
            port = running.port
            resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
            clients = [connect(port, held) for _ in range(1100)]
            for client in clients[-200:]:
                with suppress(OSError):
                    client.sendall(b"GET /healthz HTT")
            for table in tables:
                table.put([3, 5])
                table.flush()
            until(lambda: not any(read_backlog(open_table(table.uri)).pending for table in tables))
            done = len(running.runs(job="merge"))
            until(lambda: len(running.runs(job="merge")) > done + 5)
            until(lambda: running.get("/healthz") == "ok\n")
            held.close()
            assert [one for one in running.runs() if one["outcome"] not in {"succeeded", "running"}] == []
            assert {table["look_error"] for table in running.get("/api/v1/status")["tables"]} == {None}
            assert "Too many open files" not in running.log_path.read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
