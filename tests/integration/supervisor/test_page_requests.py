"""The pages over HTTP: their headers, and what is refused."""

from __future__ import annotations

import gzip
import http.client
import re
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from memwal_ops.supervisor.actions import ActionConflictError
from memwal_ops.supervisor.http.access import TokenFile
from memwal_ops.supervisor.http.server import HttpServer
from tests.support.fleet import fleet, pages_of, status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
    from pathlib import Path


SECRET = "a-token-of-a-test-1"
FORM = "application/x-www-form-urlencoded"


class _Actions:
    """Refuses to pause."""

    def pause(self, *_: object, **__: object) -> None:
        raise ActionConflictError("It cannot be <b>paused</b> now.")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpServer]:
    document, tokens = status(fleet(20)), tmp_path / "tokens"
    tokens.write_text(f"operate {SECRET} ann\n")
    tokens.chmod(0o600)
    pages = pages_of(document)
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (True, "ready"), metrics=lambda: [b"m 1\n"],
        status=lambda: document, runs=lambda **_: [], pages=pages.page_at, sign_in=pages.sign_in,
        refused=pages.refused, tokens=TokenFile(str(tokens)),
        actions=_Actions(),  # type: ignore[arg-type]  # one of its methods
    )  # fmt: skip
    yield server
    server.close()


def sent(
    server: HttpServer, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, Message, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def signed_in(server: HttpServer) -> tuple[str, str]:
    """The cookie of a session, and the value that its forms send back."""
    _, headers, _ = sent(server, "/sign-in", "POST", urlencode({"token": SECRET}), Content_Type=FORM)
    cookie = headers["Set-Cookie"].partition(";")[0]
    found = re.search(rb'name="csrf" value="([^"]+)"', sent(server, "/", Cookie=cookie)[2])
    assert found is not None
    return cookie, found[1].decode()


def get(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


@pytest.mark.long
def test_pages_the_script_and_runbooks_with_their_headers(served: HttpServer) -> None:
    code, headers, home = get(served, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src 'self';" in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].endswith("frame-ancestors 'none'")
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert headers["Referrer-Policy"] == "same-origin"
    links = {*re.findall(r'(?:href|src)="(/[^"]*)"', home)}
    assert {link.split("/")[1].partition("?")[0] for link in links} == {"tables", "runbooks", "assets", "sign-in", ""}
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


def test_a_refused_form_is_a_page_that_leads_back(served: HttpServer) -> None:
    cookie, csrf = signed_in(served)
    path, back = "/api/v1/tables/payments/pause", "/tables/payments?range=7d"
    form = {"csrf": csrf, "next": back, "for": "2h"}

    def refused(fields: dict[str, str], **headers: str) -> tuple[int, str]:
        given = {"Content_Type": FORM, "Cookie": cookie, **headers}
        code, found, body = sent(served, path, "POST", urlencode(fields), **given)
        assert found["Content-Type"] == "text/html; charset=utf-8"
        assert found["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert csrf.encode() not in body
        return code, body.decode()

    code, page = refused(form)
    assert (code, "It cannot be &lt;b&gt;paused&lt;/b&gt; now." in page) == (409, True)
    assert f'<a href="{back}">Back</a>' in page
    code, page = refused({**form, "until": "2126-01-01T06:00"})
    assert (code, "Give either until or for." in page) == (400, True)
    code, page = refused({**form, "next": "//evil.example/"})
    assert (code, '<a href="/">Back</a>' in page, "evil" in page) == (409, True, False)
    code, page = refused({**form, "csrf": "x"})
    assert (code, "load the page again" in page) == (403, True)
    code, page = refused(form, Cookie="memwal_ops=x")
    assert (code, 'href="/sign-in"' in page) == (401, True)
    code, page = refused(form, Origin="https://evil.example")
    assert code == 403
    # A program gets JSON, also where it is refused.
    authorization = f"Bearer {SECRET}"
    code, headers, _ = sent(served, path, "POST", "{}", Content_Type="application/json", Authorization=authorization)
    assert (code, headers["Content-Type"]) == (409, "application/json")


def test_what_is_compressed_and_what_has_a_secret(served: HttpServer) -> None:
    for path in ("/", "/tables/payments", "/api/v1/status", "/assets/console.js", "/runbooks/"):
        plain, packed = sent(served, path), sent(served, path, Accept_Encoding="br, gzip;q=0.5")
        assert packed[1]["Content-Encoding"] == "gzip", path
        assert (plain[1]["Content-Encoding"], plain[1]["Vary"], packed[1]["Vary"]) == (None, *["Accept-Encoding"] * 2)
        assert int(packed[1]["Content-Length"]) == len(packed[2]) < len(plain[2]) / 2
        if path == "/assets/console.js":
            assert gzip.decompress(packed[2]) == plain[2]
        assert sent(served, path, "HEAD", Accept_Encoding="gzip")[2] == b""
    for refused in ("", "br", "gzip;q=0", "gzip; q=0.000, br", "*;q=0"):
        assert sent(served, "/", Accept_Encoding=refused)[1]["Content-Encoding"] is None, refused
    small = sent(served, "/healthz", Accept_Encoding="gzip")[1]
    assert (small["Content-Encoding"], small["Vary"]) == (None, None)
    # BREACH: the value of a session's forms never stands in a compressed page, beside words that anybody chose.
    cookie, csrf = signed_in(served)
    _, headers, body = sent(served, f"/?q={csrf[:5]}", Accept_Encoding="gzip", Cookie=cookie)
    assert (headers["Content-Encoding"], csrf.encode() in body) == (None, True)
    assert sent(served, "/api/v1/status", Accept_Encoding="gzip", Cookie=cookie)[1]["Content-Encoding"] == "gzip"
