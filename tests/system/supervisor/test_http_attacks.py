"""Attacks on what acts over HTTP: none changes anything without a token, and none with a foreign page."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from memwal_ops.supervisor.actions import Actions
from memwal_ops.supervisor.http import access as tokens_module
from memwal_ops.supervisor.http.access import TokenFile, Viewer
from memwal_ops.supervisor.http.acting import Audit
from memwal_ops.supervisor.http.server import HttpServer
from memwal_ops.supervisor.observe.pages import Page
from memwal_ops.supervisor.observe.status import status_of
from tests.support.fakes import Stage
from tests.support.waiting import PATIENCE

OPERATE, VIEW, ODD = "operate-" + "o" * 32, "view-" + "v" * 32, "a/b <i>é%"
TABLES = f"tables: [{{uri: /a}}, {{uri: '/x/{ODD}'}}]\n"
PAUSE, FORM = "/api/v1/tables/a/pause", "application/x-www-form-urlencoded"


@dataclass
class Served:
    """A server whose loop turns, with a page that shows who looks at it."""

    stage: Stage
    port: int
    folder: Path

    def send(
        self, path: str, body: bytes | str = b"", method: str = "POST", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return found

    def bearer(self, path: str, token: str = OPERATE, **fields: Any) -> tuple[int, Any]:
        status, _, text = self.send(
            path, json.dumps(fields), Authorization=f"Bearer {token}", Content_Type="application/json"
        )
        return status, json.loads(text)

    def sign_in(self, token: str = OPERATE) -> tuple[str, str]:
        """Return the cookie and the value that forms send back."""
        status, headers, _ = self.send("/sign-in", urlencode({"token": token}), Content_Type=FORM)
        assert (status, headers["Location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {*headers["Set-Cookie"].split("; ")}
        cookie = headers["Set-Cookie"].split(";")[0]
        return cookie, json.loads(self.send("/viewer", method="GET", Cookie=cookie)[2])["csrf"]

    def raw(self, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as client:
            client.sendall(sent)
            found = b""
            while read := client.recv(1 << 16):
                found += read
        return found

    @property
    def paused(self) -> bool:
        return any(one["paused"] for one in status_of(self.stage.scheduler)[0])

    @property
    def audit(self) -> list[dict[str, Any]]:
        path = self.folder / "audit.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def page(path: str, _: str, viewer: Viewer) -> Page | None:
    document = {"role": viewer.role, "csrf": viewer.csrf, "acting": viewer.acting}
    return Page("application/json", json.dumps(document).encode()) if path == "/viewer" else None


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "tokens").write_text(f"operate {OPERATE} anna\nview {VIEW} viktor\n")
    (tmp_path / "tokens").chmod(0o600)
    yield from serve(tmp_path, TokenFile(str(tmp_path / "tokens")))


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Served]:
    """A service that has no token."""
    yield from serve(tmp_path, None)


def serve(folder: Path, tokens: TokenFile | None) -> Iterator[Served]:
    stage, ended = Stage(folder, TABLES), threading.Event()

    def turn() -> None:
        while not ended.is_set():
            stage.scheduler.step(0.05)

    loop = threading.Thread(target=turn, daemon=True)
    loop.start()
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (True, "ready"), metrics=lambda: [b"m 1\n"],
        status=lambda: {"tables": status_of(stage.scheduler)[0]}, runs=stage.history.runs, run=stage.history.run,
        pages=page, sign_in=lambda error: Page("text/html", error.encode()), allowed_hosts=["ops.example.org"],
        actions=Actions(stage.scheduler), tokens=tokens, audit=Audit(str(folder)),
    )  # fmt: skip
    yield Served(stage, server.port, folder)
    ended.set()
    loop.join(PATIENCE)
    server.close()


def test_a_token_acts_and_the_audit_log_names_it(served: Served) -> None:
    status, done = served.bearer(PAUSE, reason="a move", **{"for": "2h"})
    assert (status, done["paused"]["by"], done["paused"]["reason"]) == (200, "anna", "a move")
    assert served.paused
    status, refused = served.bearer("/api/v1/tables/a/jobs/merge/run")
    assert (status, "paused" in refused["error"]) == (409, True)
    assert served.bearer("/api/v1/tables/a/resume")[0] == 200
    assert served.bearer("/api/v1/tables/a/jobs/merge/run", by="ben")[0] == 202
    assert served.bearer("/api/v1/tables/a/jobs/merge/cancel")[0] in {202, 409}
    for path in ("/api/v1/tables/none/pause", "/api/v1/tables/a/jobs/none/run"):
        assert served.bearer(path)[0] == 404
    assert [(one["action"], one["status"], one["who"]) for one in served.audit][:4] == [
        ("pause", 200, "anna"), ("run", 409, "anna"), ("resume", 200, "anna"), ("run", 202, "anna"),
    ]  # fmt: skip
    assert served.audit[0]["fields"] == {"reason": "a move", "for": "2h"}
    assert OPERATE not in (served.folder / "audit.jsonl").read_text()


def test_odd_names_of_tables_are_percent_encoded(served: Served) -> None:
    name = next(name for name in served.stage.scheduler.tables if name != "a")
    assert served.bearer(f"/api/v1/tables/{quote(name, safe='')}/pause")[0] == 200
    assert served.bearer(f"/api/v1/tables/{quote(name, safe='')}/jobs/merge/resume")[0] == 409
    assert served.bearer(f"/api/v1/tables/{quote(name, safe='')}/resume")[0] == 200


def test_without_a_configured_token_nothing_acts(without: Served) -> None:
    for headers in ({}, {"Authorization": f"Bearer {OPERATE}"}, {"Authorization": "Bearer "}):
        status, _, text = without.send(PAUSE, **headers)
        assert status == 403
        assert "http.token_file" in json.loads(text)["error"]
    assert without.send("/sign-in", urlencode({"token": OPERATE}), Content_Type=FORM)[0] == 403
    assert json.loads(without.send("/viewer", method="GET")[2]) == {"role": None, "csrf": None, "acting": False}
    assert not without.paused


def test_wrong_tokens_and_a_token_that_only_views(served: Served) -> None:
    status, headers, text = served.send(PAUSE)
    assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="memwal-ops"')
    assert "Bearer TOKEN in the header Authorization" in json.loads(text)["error"], "not masked as if it were one"
    for wrong in (
        "Bearer wrong",
        f"Bearer {OPERATE[:-1]}",
        f"Bearer {OPERATE}x",
        f"Basic {OPERATE}",
        OPERATE,
        "Bearer",
    ):
        assert served.send(PAUSE, Authorization=wrong)[0] == 401
    twice = f"POST {PAUSE} HTTP/1.0\r\nAuthorization: Bearer x\r\nAuthorization: Bearer {OPERATE}\r\n\r\n"
    assert served.raw(twice.encode()).split()[1] == b"401"
    status, refused = served.bearer(PAUSE, VIEW)
    assert (status, "viktor has the role view" in refused["error"]) == (403, True)
    cookie, csrf = served.sign_in(VIEW)
    assert served.send(PAUSE, urlencode({"csrf": csrf}), Content_Type=FORM, Cookie=cookie)[0] == 403
    assert not served.paused


def test_guessing_is_slow(served: Served) -> None:
    codes = [served.bearer(PAUSE, f"{number:032}")[0] for number in range(12)]
    assert codes == [401] * 10 + [429] * 2
    status, headers, _ = served.send(PAUSE, Authorization=f"Bearer {OPERATE}")
    assert (status, 0 < int(headers["Retry-After"]) <= 61) == (429, True)
    assert not served.paused
    for number in range(12):
        assert served.send("/sign-in", urlencode({"token": f"{number:032}"}), Content_Type=FORM)[0] == 429
    assert len(served.audit) == 0, "guesses do not push out of the audit log what was done"


def test_numbers_are_bounded(served: Served) -> None:
    for version in (0, -1, 1e300, "9" * 400, f"{'0' * 19}1{'9' * 40}", "1 ", "²"):
        status, refused = served.bearer("/api/v1/tables/a/holds", version=version)
        assert (status, "number from 1" in refused["error"]) == (400, True), version
    assert served.bearer(f"/api/v1/tables/a/holds/{'0' * 30}1{'9' * 30}/release")[0] == 400


def test_an_error_that_nobody_expects_is_in_the_audit_log(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actions, "pause", lambda *_, **__: 1 / 0)
    status, refused = served.bearer(PAUSE)
    assert (status, "ZeroDivisionError" in refused["error"]) == (500, True)
    assert [(one["action"], one["status"], one["who"]) for one in served.audit] == [("pause", 500, "anna")]


def test_a_line_of_the_audit_log_that_does_not_fit_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes the beginning of a line; the next one would be appended to it."""
    audit, write = Audit(str(tmp_path)), os.write
    audit.record("pause", 200, who="anna", client="x")
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    audit.record("pause", 200, who="ben", client="x")
    monkeypatch.setattr(os, "write", write)
    audit.record("resume", 200, who="carl", client="x")
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["who"] for line in lines] == ["anna", "carl"]


def test_tokens_are_compared_in_constant_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every token, also after the one that matches, by the function that is made for it."""
    compared = []
    compare = tokens_module.hmac.compare_digest

    def seen(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(tokens_module.hmac, "compare_digest", seen)
    assert served.bearer(PAUSE)[0] == 200
    assert served.bearer(PAUSE, "short")[0] == 401
    assert compared == [(32, 32)] * 4


def test_a_page_of_ours_acts_and_one_of_another_site_does_not(served: Served) -> None:
    cookie, csrf = served.sign_in()
    form = urlencode({"csrf": csrf, "next": "/tables/a", "reason": "x"})
    own = f"http://127.0.0.1:{served.port}"
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": f"https://127.0.0.1:{served.port}.evil.example"},
        {"Origin": own, "Sec_Fetch_Site": "cross-site"},
        {"Origin": own, "Sec_Fetch_Site": "same-site"},
        {"Origin": "file://"},
        {"Origin": "http://["},
    ):
        status, _, text = served.send(PAUSE, form, Content_Type=FORM, Cookie=cookie, **headers)
        assert (status, "another site" in text) == (403, True), headers
        assert served.send("/sign-in", urlencode({"token": OPERATE}), Content_Type=FORM, **headers)[0] == 403
    for forged in ({}, {"csrf": ""}, {"csrf": csrf[:-1]}, {"csrf": "é"}):
        assert served.send(PAUSE, urlencode(forged), Content_Type=FORM, Cookie=cookie, Origin=own)[0] == 403
    assert served.send(PAUSE, json.dumps({"by": "x"}), Content_Type="application/json", Cookie=cookie)[0] == 403
    assert served.send(PAUSE, form, Content_Type="text/plain", Cookie=cookie)[0] == 415
    assert served.send(PAUSE, form, Content_Type=FORM)[0] == 401
    assert served.send(PAUSE, form, Content_Type=FORM, Cookie=f"{cookie}; {cookie}x")[0] == 401, "a tossed cookie"
    assert not served.paused
    for headers in ({"Origin": own, "Sec_Fetch_Site": "same-origin"}, {"Origin": "https://ops.example.org"}, {}):
        status, answer, _ = served.send(PAUSE, form, Content_Type=FORM, Cookie=cookie, **headers)
        assert (status, answer["Location"]) == (303, "/tables/a"), headers
    assert served.paused
    status, _, text = served.send(
        "/api/v1/tables/a/resume", "{}", Content_Type="application/json", Cookie=cookie, X_CSRF_Token=csrf
    )
    assert (status, json.loads(text)) == (200, {"resumed": {"table": "a", "job": None}})
    assert {one["session"] for one in served.audit if one["action"] == "pause"} == {True}
    assert served.send("/sign-out", Cookie=cookie)[0] == 303
    assert served.send(PAUSE, form, Content_Type=FORM, Cookie=cookie)[0] == 401


def test_a_session_ends_with_its_token(served: Served) -> None:
    cookie, csrf = served.sign_in()
    (served.folder / "tokens").write_text(f"operate {'n' * 32}\n")
    assert served.send(PAUSE, urlencode({"csrf": csrf}), Content_Type=FORM, Cookie=cookie)[0] == 401
    (served.folder / "tokens").write_text("")
    status, refused = served.bearer(PAUSE)
    assert (status, "is empty" in refused["error"]) == (503, True)
    assert served.send("/healthz", method="GET")[0] == 200
    assert not served.paused


@pytest.mark.parametrize(
    "after",
    [
        "//evil.example", "/\\evil.example", "https://evil.example", "javascript:alert(1)", "/a\r\nSet-Cookie: x=1", "",
        "\\\\evil.example", "/\t/evil.example", " //evil.example",
    ],
)  # fmt: skip
def test_a_redirect_stays_here_and_adds_no_header(served: Served, after: str) -> None:
    cookie, csrf = served.sign_in()
    for path, fields in ((PAUSE, {"csrf": csrf}), ("/sign-in", {"token": OPERATE})):
        status, headers, _ = served.send(path, urlencode({**fields, "next": after}), Content_Type=FORM, Cookie=cookie)
        assert status == 303
        assert re.fullmatch(r"/([^/\\\s].*)?", headers["Location"]), headers["Location"]
        assert headers.get("Set-Cookie", "memwal_ops_session").startswith("memwal_ops_session")
        if path == "/sign-in":
            cookie = headers["Set-Cookie"].split(";")[0]


def test_dns_rebinding(served: Served) -> None:
    for host in ("evil.example", f"evil.example:{served.port}"):
        assert served.send(PAUSE, Host=host, Authorization=f"Bearer {OPERATE}")[0] == 421
    sent = f"POST http://evil.example{PAUSE} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {OPERATE}\r\n\r\n"
    assert served.raw(sent.encode()).split()[1] == b"421"
    assert not served.paused


def test_bodies_are_bounded_and_must_be_whole(served: Served) -> None:
    head = f"POST {PAUSE} HTTP/1.0\r\nAuthorization: Bearer {OPERATE}\r\nContent-Type: application/json\r\n"
    for lines, body, code in (
        ("Content-Length: 65537\r\n", b"x" * 65537, b"413"),
        (f"Content-Length: {'9' * 5000}\r\n", b"{}", b"413"),
        ("Content-Length: -1\r\n", b"", b"400"),
        ("Content-Length: 2\r\nContent-Length: 2\r\n", b"{}", b"411"),
        ("Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"411"),
        ("Content-Length: 1\r\n", b"{", b"400"),
        ("Content-Length: 2\r\n", b"[]", b"400"),
        ("Content-Length: 10\r\n", b'{"by": [1]', b"400"),
        ("Content-Length: 11\r\n", b'{"by": [1]}', b"400"),
        ("Content-Length: 14\r\n", b'{"unknown": 1}', b"400"),
        ("Content-Length: 60000\r\n", b"[" * 60000, b"400"),
        ("X: " + "x" * 70000 + "\r\n", b"", b"431"),
        ("X: x\r\n" * 200, b"", b"431"),
    ):
        assert served.raw(head.encode() + lines.encode() + b"\r\n" + body).split()[1] == code, lines[:80]
    assert served.send("/healthz", b"x" * 70000, method="PUT")[0] == 405
    assert served.bearer(PAUSE, reason="x" * 501)[0] == 400
    assert not served.paused


def test_a_request_that_is_cut_does_nothing(served: Served) -> None:
    """RFC 9112, 8: what ends within its headers, or before its Content-Length, was not asked for."""
    body = json.dumps({"for": "10m"})
    whole = (
        f"POST {PAUSE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OPERATE}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
    lines = [at for at in range(len(whole)) if whole[:at].endswith(b"\r\n")]
    for end in (*lines[:-1], lines[1] + 3, lines[-1] - 1, lines[-1], len(whole) - 1):
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
            client.sendall(whole[:end])
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1 << 16)[:12] in {b"HTTP/1.0 400", b""}, whole[:end]
        assert not served.paused, whole[:end]
    assert served.audit == []
    assert served.raw(whole).split()[1] == b"200"
    assert served.paused


def test_path_tricks(served: Served) -> None:
    token = {"Authorization": f"Bearer {OPERATE}"}
    for path in (
        "/api/v1/tables/../tables/a/pause", "/api/v1/tables/./a/pause", "//api/v1/pause/", "/api/v1//pause",
        "/api/v1/tables//pause", "/api/v1/%74ables/a/pause", "/api/v1/tables/a/pause/", "/API/v1/pause",
        "/api/v1/tables/a/jobs//run", "/api/v1/pause;x", "/api/v1/pause%2f", "/api/v1/pause%00",
        "/sign-in/..", "/runbooks/../sign-in",
    ):  # fmt: skip
        assert served.send(path, **token)[0] in {404, 405}, path
    for name in ("..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "%ff", "a%0d%0aX-Evil:%201", "%"):
        status, headers, text = served.send(f"/api/v1/tables/{name}/pause", **token)
        assert status == 404, name
        assert "X-Evil" not in headers
        assert json.loads(text)["error"].startswith("The service has no table")
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        status, headers, _ = served.send(PAUSE, method=method, **token)
        assert (status, headers["Allow"]) == (405, "POST")
    assert served.send("/api/v1/status", **token)[0] == 405
    assert served.raw(b"EVIL / HTTP/1.0\r\n\r\n").split()[1] == b"501"
    assert not served.paused


def test_stored_markup_is_text(served: Served) -> None:
    """A reason with markup comes back as JSON, which no browser takes for a page."""
    assert served.bearer(PAUSE, reason="<script>alert(1)</script>", by="<b>")[0] == 200
    status, headers, text = served.send("/api/v1/status", method="GET")
    assert json.loads(text)["tables"][0]["paused"]["reason"] == "<script>alert(1)</script>"
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == ("application/json", "nosniff")
    status, headers, text = served.send("/api/v1/tables/%3Cscript%3E/pause", Authorization=f"Bearer {OPERATE}")
    assert (status, headers["Content-Type"]) == (404, "application/json")


def test_a_slow_body_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal_ops.supervisor.http.connections.REQUEST_SECONDS", 1.0)
    head = f"POST {PAUSE} HTTP/1.0\r\nAuthorization: Bearer {OPERATE}\r\nContent-Length: 100\r\n\r\n{{"
    assert served.raw(head.encode())[:12] in {b"", b"HTTP/1.0 400"}
    assert not served.paused
