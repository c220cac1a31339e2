"""Notifications: what is told to whom, once, in what words, and what happens where it does not arrive."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from email import message_from_bytes
from email.policy import default
from pathlib import Path
from typing import Any

import pytest
import structlog

from memwal_ops.supervisor.config.loader import ConfigProblemsError, load_settings
from memwal_ops.supervisor.config.model import NotifyConfig, TargetConfig
from memwal_ops.supervisor.notify import (
    FindingChange,
    FindingNotifier,
    Findings,
    Message,
    NotificationError,
    TableFinding,
    after,
    changes,
    send,
    signed,
)
from memwal_ops.supervisor.observe.heartbeat import Heartbeat
from tests.support.receivers import Receiver, http_receiver, mail_receiver, raw_server, silent_server
from tests.support.run_cli import run_here
from tests.support.waiting import until

PAGE = "runbooks/alerts/MemwalOpsJobFailing.md"
SECRET = "whsec_" + base64.b64encode(b"s" * 24).decode()


def found(table: str = "orders", what: str = "merge failed 3 times in a row.", level: str = "warning") -> TableFinding:
    return TableFinding(table, level, what, "Look: memwal-ops history --table orders", PAGE)


def kinds(made: list[FindingChange]) -> list[tuple[str, str]]:
    return [(change.kind, change.found.table) for change in made]


def test_a_finding_is_the_same_while_only_its_amounts_grow() -> None:
    told = after(
        {}, changes({}, [found(what="merge failed 1 time in a row."), found("users", "the oldest waits for 40 min.")])
    )
    now = [found(what="merge failed 14 times in a row."), found("users", "the oldest waits for 3.5 h.")]
    assert changes(told, now) == []
    assert kinds(changes(told, now[:1])) == [("resolved", "users")]
    assert kinds(changes(told, now[:1], lambda table: table != "users")) == [], "it was not looked at"


def test_a_worse_or_another_reason_is_a_change() -> None:
    told = after({}, changes({}, [found()]))
    (worse,) = changes(told, [found(level="critical")])
    assert (worse.kind, worse.before) == ("changed", found())
    (other,) = changes(told, [found(what="merge died 3 times in a row.")])
    assert (other.kind, other.before) == ("changed", found())
    known = after(told, [other])
    assert [one.what for one in known.values()] == ["merge died 3 times in a row."]
    assert changes(known, [found(what="merge died 4 times in a row.")]) == []
    assert kinds(changes(known, [found("a", level="critical"), found("b")])) == [
        ("new", "a"), ("new", "b"), ("resolved", "orders"),
    ]  # fmt: skip


def message(*made: FindingChange, link: str = "https://ops.example.com") -> Message:
    return Message("ops@host pid 7", link, "2030-01-01T00:00:00+00:00", made)


def test_the_words_of_a_message() -> None:
    text = message(FindingChange("new", found("a/b c")), FindingChange("resolved", found("users"))).text()
    assert "NEW warning: a/b c: merge failed 3 times in a row." in text
    assert "Do: Look: memwal-ops history --table orders" in text
    assert f"Page: https://ops.example.com/{PAGE}" in text
    assert "https://ops.example.com/tables/a%2Fb%20c" in text
    assert "RESOLVED: users: merge failed" in text
    many = message(*(FindingChange("new", found(str(number))) for number in range(300)))
    assert "And 280 more changes." in many.text()
    assert (len(many.document()["changes"]), many.document()["omitted"]) == (200, 100)
    assert many.title == "memwal-ops: 300 new"


def test_hostile_words_stay_words() -> None:
    """A table's name and an error come from a store."""
    bad = FindingChange("new", found("<!channel>\nBcc: x@example.com", "<script>\x1b[2J & \u202e"))
    assert "<" not in message(bad).slack()["text"]
    assert "\n" not in message(bad).title
    with mail_receiver() as (port, mails):
        send(TargetConfig(name="m", type="email", host="127.0.0.1", port=port, security="none",
                          sender="ops@example.com", to=["a@example.com"]), message(bad))  # fmt: skip
    (mail,) = (message_from_bytes(one, policy=default) for one in mails)
    assert (mail["Bcc"], mail["To"]) == (None, "a@example.com")


def test_a_webhook_is_signed_as_standard_webhooks_are(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    with http_receiver() as server:
        target = TargetConfig(name="ops", type="webhook", url=f"{server.url}/hook?x=1", secret_file=str(file))
        send(target, message(FindingChange("new", found())))
    ((path, headers, body),) = server.received
    assert path == "/hook?x=1"
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(b"s" * 24, content, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"
    assert signed(body, "plain", "id", 7) != signed(body, "other", "id", 7)
    document = json.loads(body)
    assert document["changes"][0].items() >= {"kind": "new", "table": "orders", "level": "warning"}.items()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Apprise's own imports
@pytest.mark.parametrize("kind", ["slack", "teams", "apprise"])
def test_chats(kind: Any) -> None:
    if kind == "apprise":
        pytest.importorskip("apprise", reason="the extra memwal-ops[notify] is not installed")
    with http_receiver() as server:
        url = f"json://{server.url.removeprefix('http://')}/" if kind == "apprise" else server.url
        send(TargetConfig(name="c", type=kind, url=url), message(FindingChange("new", found())))
    ((_, _, body),) = server.received
    document = json.loads(body)
    if kind == "slack":
        assert document["text"].startswith("*memwal-ops: 1 new: orders: merge failed")
    elif kind == "teams":
        (card,) = document["attachments"]
        assert card["content"]["body"][1]["text"].startswith("NEW warning: orders")
    else:
        assert document["message"].startswith("NEW warning: orders")


def test_a_refusal_names_no_secret(tmp_path: Path) -> None:
    with http_receiver() as server:
        for status in (302, 500):
            server.status = status
            target = TargetConfig(name="ops", type="slack", url=f"{server.url}/T000/secretpart")
            with pytest.raises(NotificationError, match=f"ops: the server answered {status}") as caught:
                send(target, message(FindingChange("new", found())))
            assert "secretpart" not in str(caught.value)
    assert {path for path, _, _ in server.received} == {"/T000/secretpart"}, "no redirect is followed"
    for url in (
        "http://x:secretpart/T000",
        "http://127.0.0.1/T000 x/secretpart",
        "http://127.0.0.1/secretpart\nhttp://x/",
    ):
        with pytest.raises(NotificationError, match="its URL is invalid") as caught:
            send(TargetConfig(name="ops", type="slack", url=url), message(FindingChange("new", found())))
        assert "secretpart" not in str(caught.value)
    with (
        raw_server(b"SSH-2.0\r\n") as (port, _),
        pytest.raises(NotificationError, match=r"BadStatusLine: SSH-2\.0"),
    ):
        send(
            TargetConfig(name="ops", type="slack", url=f"http://127.0.0.1:{port}/x"),
            message(FindingChange("new", found())),
        )
    missing = TargetConfig(name="ops", type="slack", url_file=str(tmp_path / "none"))
    with pytest.raises(NotificationError, match="url_file cannot be read"):
        send(missing, message(FindingChange("new", found())))


class Stage:
    """A notifier on a stage: one target, its server, a clock, and what holds."""

    def __init__(self, folder: Path, server: Receiver, **config: Any) -> None:
        target = {"name": "ops", "type": "webhook", "url": server.url, "level": config.pop("level", "warning")}
        self.config = NotifyConfig.model_validate({"targets": [target], "group_wait": "60s", **config})
        self.folder, self.server, self.now = folder, server, 1000.0
        self.holds: Findings | None = Findings(())
        self.results: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.notifier = FindingNotifier(
            self.config, read=lambda: self.holds, path=str(self.folder / "notified.json"), service="s",
            on_result=lambda _, outcome: self.results.append(outcome), now=lambda: self.now,
        )  # fmt: skip

    def step(self, seconds: float = 0.0) -> list[list[tuple[str, str]]]:
        """The messages that arrive in a step: the kinds and tables of their changes."""
        self.now += seconds
        before = len(self.server.received)
        self.notifier.step()
        arrived = (json.loads(body)["changes"] for _, _, body in self.server.received[before:])
        return [[(one["kind"], one["table"]) for one in made] for made in arrived]


def test_findings_are_grouped_and_told_once(tmp_path: Path) -> None:
    with http_receiver() as server:
        stage = Stage(tmp_path, server)
        stage.holds = Findings((found("a"),))
        assert stage.step() == []
        stage.holds = Findings((found("a"), found("b", level="critical")))
        assert stage.step(59) == []
        assert stage.step(1) == [[("new", "b"), ("new", "a")]]
        assert stage.step(3600) == []
        stage.restart()
        stage.holds = Findings((), frozenset("ab"))
        assert stage.step() == stage.step(3600) == [], "nothing was polled since the restart"
        stage.holds = None
        assert stage.step(3600) == [], "nor is anything known"
        stage.holds = Findings((found("a"),))
        assert stage.step() == []
        assert stage.step(60) == [[("resolved", "b")]]
        stage.holds = Findings(())
        assert stage.step() == []
        stage.holds = Findings((found("a"),))
        assert stage.step(60) == stage.step(3600) == [], "it was gone for a moment only"


def test_a_target_of_critical_findings_hears_of_no_others(tmp_path: Path) -> None:
    with http_receiver() as server:
        stage = Stage(tmp_path, server, level="critical", group_wait="0s")
        stage.holds = Findings((found("a"), found("b", level="critical")))
        assert stage.step() == [[("new", "b")]]
        stage.holds = Findings((found("a"), found("b")))
        assert stage.step() == [[("resolved", "b")]], "it is not critical any more"


def test_messages_are_limited(tmp_path: Path) -> None:
    """Over a restart, too; what is kept back is in the next message."""
    with http_receiver() as server:
        stage = Stage(tmp_path, server, group_wait="0s", max_per_hour=2)
        for number in range(5):
            stage.holds = Findings(tuple(found(str(one)) for one in range(number + 1)))
            assert len(stage.step(10)) == (number < 2)
            stage.restart()
        assert stage.step(3500) == []
        assert stage.step(100) == [[("new", "2"), ("new", "3"), ("new", "4")]]


def test_what_does_not_arrive_is_tried_again_by_what_holds_then(tmp_path: Path) -> None:
    with http_receiver() as server, structlog.testing.capture_logs() as logs:
        stage = Stage(tmp_path, server, group_wait="0s")
        server.status, stage.holds = 500, Findings((found("a"), found("b")))
        assert len(stage.step()) == 1
        assert stage.step(29) == []
        assert len(stage.step(1)) == 1
        assert stage.step(59) == []
        server.status, stage.holds = 200, Findings((found("b"),))
        assert stage.step(1) == [[("new", "b")]]
    assert stage.results == ["failed", "failed", "succeeded"]
    assert [(one["event"], one["retry_in"]) for one in logs] == [
        ("notification_failed", 30),
        ("notification_failed", 60),
    ]


@pytest.mark.parametrize("text", ["", "{", '{"targets": 3}', '{"targets": {"ops": {"found": [{"x": 1}]}}}'])
def test_a_damaged_file_is_not_the_end(text: str, tmp_path: Path) -> None:
    (tmp_path / "notified.json").write_text(text)
    with http_receiver() as server:
        stage = Stage(tmp_path, server, group_wait="0s")
        stage.holds = Findings((found("a"),))
        assert stage.step() == [[("new", "a")]]
        stage.restart()
        assert stage.step() == []


def written(folder: Path, *targets: dict[str, Any], **keys: Any) -> Path:
    file = folder / "c.yaml"
    file.write_text(json.dumps({"notify": {"targets": [*targets], **keys}, "tables": [{"uri": "/data/t.lance"}]}))
    return file


def test_secrets_are_masked_and_warned_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = written(
        tmp_path,
        {"name": "ops", "type": "webhook", "url": "https://example.com/hidden1", "secret": "hidden2"},
        {"name": "mail", "type": "email", "host": "mail", "sender": "a@b.c", "to": ["d@e.f"], "username": "u",
         "password": "hidden3"},
    )  # fmt: skip
    shown = run_here(capfd, "config", "check", str(file), "--json")
    assert shown.code == 0
    assert "hidden" not in shown.out + shown.err
    assert [one["where"] for one in shown.document["warnings"]] == [
        "notify.targets[0].url", "notify.targets[0].secret", "notify.targets[1].password",
    ]  # fmt: skip
    keys = {one["key"]: one["value"] for one in shown.document["effective"]}
    assert keys["notify.targets.mail.to"] == ["d@e.f"]
    assert keys["notify.max_per_hour"] == 12


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ({"type": "webhook"}, "url or url_file"),
        ({"type": "webhook", "url": "https://x", "url_file": "/x"}, "either url"),
        ({"type": "webhook", "url": "ftp://x"}, "http"),
        ({"type": "slack", "url": "https://x", "secret": "s"}, "secret"),
        ({"type": "email", "host": "x", "sender": "a@b.c"}, "sender and to"),
        ({"type": "email", "host": "x", "sender": "a@b.c", "to": ["d@e.f"], "password": "p"}, "username"),
    ],
)
def test_what_is_no_target(target: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigProblemsError, match=word):
        load_settings(str(written(tmp_path, {"name": "ops", **target})), {})


def test_the_command_tries_each_target(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with http_receiver() as server:
        good = {"name": "good", "type": "webhook", "url": server.url}
        bad = {"name": "bad", "type": "slack", "url": "http://127.0.0.1:1/hidden"}
        file = written(tmp_path, good, bad)
        listed = run_here(capfd, "notify", "--config", str(file))
        assert (listed.code, server.received) == (0, [])
        tried = run_here(capfd, "notify", "--config", str(file), "--test", "--json")
        assert tried.code == 1
        assert {one["name"]: one["error"] is None for one in tried.document["targets"]} == {"good": True, "bad": False}
        assert "hidden" not in tried.out + tried.err
        assert run_here(capfd, "notify", "--config", str(file), "--test", "--target", "good").code == 0
        assert run_here(capfd, "notify", "--config", str(file), "--target", "none").code == 2
        assert len(server.received) == 2
        assert json.loads(server.received[0][2])["test"] is True
    assert run_here(capfd, "notify", "--config", str(written(tmp_path))).code == 2


def test_a_target_that_drips_delays_no_other_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte renews the time limit of a socket: a message has one as a whole."""
    monkeypatch.setattr("memwal_ops.supervisor.notify.MESSAGE_SECONDS", 0.3)
    results: list[tuple[str, str]] = []
    with silent_server(b"HTTP/1.1 200 OK\r\nX-a: ") as port, http_receiver() as good:
        targets = [
            TargetConfig(name="slow", type="webhook", url=f"http://127.0.0.1:{port}/"),
            TargetConfig(
                name="mail", type="email", host="127.0.0.1", port=port, security="none", sender="a@b", to=["c@d"]
            ),
            TargetConfig(name="good", type="webhook", url=good.url.replace("//", "//ann:p%40ss@")),
        ]
        notifier = FindingNotifier(
            NotifyConfig(group_wait="0s", targets=targets), read=lambda: Findings((found(),)), service="s",
            path=str(tmp_path / "notified.json"), on_result=lambda *result: results.append(result),
        )  # fmt: skip
        notifier.step()
    assert sorted(results) == [("good", "succeeded"), ("mail", "failed"), ("slow", "failed")]
    assert {*notifier.faults} == {"slow", "mail"}
    assert "did not end within 0.3 s" in notifier.faults["slow"]
    (_, headers, _) = good.received[0]
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"ann:p@ss"


def test_a_heartbeat_that_drips_delays_none_of_another_server() -> None:
    results: list[str] = []
    beats = Heartbeat(results.append)
    with silent_server(b"HTTP/1.1 200 OK\r\nX-a: ") as port, raw_server(b"HTTP/1.1 200 OK\r\n\r\n") as (good, _):
        beats.beat(f"http://127.0.0.1:{port}/", "t", "merge", 0.3)
        until(lambda: results == ["failed"])
        assert "did not end within 0.3 s" in beats.fault
        beats.beat(f"http://127.0.0.1:{port}/", "t", "merge", 3600.0)
        beats.beat(f"http://127.0.0.1:{good}/", "t", "merge", 3600.0)
        until(lambda: results == ["failed", "succeeded"])
        assert beats.fault == ""
