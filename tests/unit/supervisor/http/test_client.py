"""``memwal-ops service`` and ``status`` where another server listens on the port of the service, or one that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from memwal_ops.cli.check import ask_service
from memwal_ops.errors import InvalidUsageError
from memwal_ops.supervisor.config.model import HttpConfig
from memwal_ops.supervisor.http import client
from memwal_ops.supervisor.http.client import ServiceClient
from tests.support.receivers import raw_server
from tests.support.run_cli import run_here

TOKEN = "t" * 32
OK = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_does_not_get_the_token(status: int) -> None:
    with raw_server(OK, b"{}") as (other, asked):
        answer = f"HTTP/1.0 {status} Found\r\nLocation: http://127.0.0.1:{other}/x\r\n\r\n".encode()
        with raw_server(answer) as (port, _):
            with pytest.raises(InvalidUsageError, match=f"refused it: status {status}"):
                ServiceClient(HttpConfig(port=port), TOKEN).act("/pause", {})
            assert ask_service(HttpConfig(port=port))[0] is None
        assert asked == []


@pytest.mark.parametrize(
    "body",
    [b"{}", b"[]", b"null", b'"paused"', b"[" * 100_000, b'{"a": "\xff"}', b"<html>", b'{"paused": "x"}',
     b'{"resumed": 1}', b'{"service": {}, "tables": [{}]}', b'{"service": {"instance": "x"}, "tables": 5}'],
)  # fmt: skip
def test_another_server_is_told_from_the_service(
    body: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    (tmp_path / "tokens").chmod(0o600)
    with raw_server(OK, body) as (port, _):
        file = tmp_path / "c.yaml"
        file.write_text(f"http: {{port: {port}, token_file: {tmp_path}/tokens}}\ntables: [{{uri: s3://b/t}}]\n")
        for action in ("pause", "resume", "retry", "run", "cancel"):
            done = run_here(capfd, "service", action, "--table", "t", "--job", "merge", "--config", str(file))
            assert (done.code, "memwal-ops" in done.err) == (2, True), (action, done)
        found, why = ask_service(HttpConfig(port=port))
        assert (found, "memwal-ops" in why) == (None, True)


def test_a_server_that_never_ends_its_response_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_RESPONSE_SECONDS", 0.2)
    with raw_server(OK, *[b" "] * 1000, pause=0.05) as (port, _):
        with pytest.raises(InvalidUsageError, match="not complete after"):
            ServiceClient(HttpConfig(port=port), TOKEN).act("/pause", {})
        assert "not complete after" in ask_service(HttpConfig(port=port))[1]
