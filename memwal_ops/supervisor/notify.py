"""Notify targets of findings, on a thread of its own: the scheduler never waits for a server.

Each target has its own view of what it was told, kept over restarts. What differs from that is sent as one message,
once it has held for ``group_wait`` and the limit of messages allows it; a message that fails is made anew by what holds
at the next attempt. The standard library sends all but what Apprise knows: a request signed as Standard Webhooks have
it, which Apprise cannot do, two documents for chats, and SMTP are less code than a dependency with its own seven.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import smtplib
import ssl
import threading
import time
import urllib.error
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from functools import partial
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import quote

from memwal_ops.errors import MemwalOpsError, import_extra
from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact, remember
from memwal_ops.supervisor.config.model import NotifyConfig, TargetConfig
from memwal_ops.supervisor.http import client
from memwal_ops.supervisor.observe.findings import Finding
from memwal_ops.supervisor.state.directory import private_opener
from memwal_ops.text import counted, printable

Kind = Literal["new", "changed", "resolved"]
# Amounts, ages, versions, ids: a finding is the same while only these differ.
_AMOUNT = re.compile(r"\b[0-9a-f]{8,}\b|\d[\d.,:]*(?:\s?(?:ms|s|min|h|d|days?|[KMGT]?i?B)\b)?")

_PLURAL = re.compile(r"# (\w+?)s?\b")


@dataclass(frozen=True, slots=True)
class TableFinding:
    """One finding on a table, or on the service (``table`` is empty)."""

    table: str
    level: str
    what: str
    do: str
    runbook: str | None

    @classmethod
    def of(cls, table: str, finding: Finding) -> TableFinding:
        """Return a finding of a table."""
        return cls(table, finding["level"], finding["what"], finding["do"], finding["runbook"])

    @property
    def key(self) -> str:
        """What stays the same while the finding does: its table, its page, its text without amounts."""
        return "\n".join((self.table, self.runbook or "", _PLURAL.sub(r"# \1", _AMOUNT.sub("#", self.what))))

    def to_json(self) -> dict[str, Any]:
        """Return its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FindingChange:
    """A finding that is new, changed or resolved. ``before``: of a changed one, how it was reported."""

    kind: Kind
    found: TableFinding
    before: TableFinding | None = None


def changes(
    told: Mapping[str, TableFinding], now: Iterable[TableFinding], is_known: Callable[[str], bool] = lambda _: True
) -> list[FindingChange]:
    """Return what differs from what a target was told, the worst and newest first.

    A finding that has gone, while another of the same page came to the same table, is changed.

    ``is_known``: whether the findings of a table are known now; what is not known is not resolved.
    """
    current = {found.key: found for found in now}
    gone: dict[tuple[str, str | None], list[TableFinding]] = defaultdict(list)
    for key, found in told.items():
        if key not in current and is_known(found.table):
            gone[found.table, found.runbook].append(found)
    made: list[FindingChange] = []
    for key, found in current.items():
        before = told.get(key)
        if before is None and gone[found.table, found.runbook]:
            before = gone[found.table, found.runbook].pop(0)
            made.append(FindingChange("changed", found, before))
        elif before is None:
            made.append(FindingChange("new", found))
        elif before.level != found.level:
            made.append(FindingChange("changed", found, before))
    made += [FindingChange("resolved", found) for group in gone.values() for found in group]
    return sorted(made, key=_order)


def _order(change: FindingChange) -> tuple[bool, bool, str, str]:
    return change.kind == "resolved", change.found.level != "critical", change.found.table, change.found.what


def after(told: Mapping[str, TableFinding], made: Iterable[FindingChange]) -> dict[str, TableFinding]:
    """Return what a target knows once it was told these changes."""
    known = dict(told)
    for change in made:
        if change.before is not None:
            known.pop(change.before.key, None)
        if change.kind == "resolved":
            known.pop(change.found.key, None)
        else:
            known[change.found.key] = replace(change.found)
    return known


_MAX_IN_TEXT, _MAX_IN_JSON = 20, 200
_WORDS = {"new": "NEW", "changed": "CHANGED", "resolved": "RESOLVED"}


@dataclass(frozen=True, slots=True)
class Message:
    """The changes that one message tells.

    Attributes:
        link: the address of its pages, without a slash at its end; empty: none is configured.
        sent: when, ISO 8601.
        test: it only tries a target.
    """

    service: str
    link: str
    sent: str
    changes: Sequence[FindingChange]
    test: bool = False

    @property
    def title(self) -> str:
        """One line: how many of which kind, and of a single one what it is about."""
        if self.test:
            return "memwal-ops: a test"
        counts = Counter(str(change.kind) for change in self.changes)
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in _WORDS if counts[kind])
        first = self.changes[0].found
        about = f"{_clean(first.table) or 'the service'}: {_clean(first.what)}" if len(self.changes) == 1 else kinds
        return f"memwal-ops: {kinds}: {about}"[:200] if len(self.changes) == 1 else f"memwal-ops: {about}"

    def text(self) -> str:
        """The message as plain text."""
        parts = [self._entry(change) for change in self.changes[:_MAX_IN_TEXT]]
        if (more := len(self.changes) - _MAX_IN_TEXT) > 0:
            parts.append(f"And {counted(more, 'more change')}.")
        parts.append(f"From {_clean(self.service)}{f', {self.link}/' if self.link else ''}")
        return "\n\n".join(parts)

    def _entry(self, change: FindingChange) -> str:
        finding = change.found
        level = "" if change.kind == "resolved" else f" {finding.level}"
        lines = [f"{_WORDS[change.kind]}{level}: {_clean(finding.table) or 'the service'}: {_clean(finding.what)}"]
        if change.kind != "resolved":
            lines.append(f"Do: {_clean(finding.do)}")
            lines += [f"Page: {self._page(finding.runbook)}"] if finding.runbook else []
        if self.link and finding.table:
            lines.append(self._table(finding.table))
        return "\n".join(lines)

    def _table(self, table: str) -> str:
        return f"{self.link}/tables/{quote(table, safe='', errors='surrogateescape')}"

    def _page(self, runbook: str) -> str:
        return f"{self.link}/{runbook}" if self.link and runbook.startswith("runbooks/") else runbook

    def document(self) -> dict[str, Any]:
        """The message as a JSON document."""
        shown = self.changes[:_MAX_IN_JSON]
        return {
            "version": 1,
            "service": _clean(self.service),
            "link": self.link or None,
            "sent": self.sent,
            "test": self.test,
            "title": self.title,
            "changes": [
                {
                    "kind": change.kind,
                    **{key: _clean(value) for key, value in change.found.to_json().items()},
                    "link": self._table(change.found.table) if self.link and change.found.table else None,
                }
                for change in shown
            ],
            "omitted": len(self.changes) - len(shown),
        }

    def slack(self) -> dict[str, Any]:
        """The message for an incoming webhook of Slack, and of what takes the same (Mattermost, Rocket.Chat)."""
        return {"text": f"*{_escaped(self.title)}*\n{_escaped(self.text())}"}

    def teams(self) -> dict[str, Any]:
        """The message for a workflow of Microsoft Teams: an adaptive card."""
        title = {"type": "TextBlock", "text": self.title, "weight": "bolder", "wrap": True}
        parts = [{"type": "TextBlock", "text": part, "wrap": True} for part in self.text().split("\n\n")]
        card = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "type": "AdaptiveCard",
            "version": "1.4",
            "body": [title, *parts],
        }
        content = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
        return {"type": "message", "attachments": [content]}


def _clean(text: Any) -> Any:
    return None if text is None else printable(redact(str(text)))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_TIMEOUT = 10.0
# For a whole message, however slowly its server answers.
MESSAGE_SECONDS = 20.0
_WEBHOOK_SECRET = "whsec_"  # noqa: S105 - how such a secret begins
_MAX_SECRET_BYTES = 64 << 10


class NotificationError(Exception):
    """A message that was not delivered."""


def send(target: TargetConfig, message: Message) -> None:
    """Deliver a message, within ``MESSAGE_SECONDS``.

    Raises ``NotificationError``: it was not delivered; the text has no secret.
    """
    try:
        _SENDERS[target.type](target, message)
    except NotificationError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise NotificationError(f"{target.name}: the server answered {error.code}.") from None
    except (OSError, ValueError, HTTPException, smtplib.SMTPException, MemwalOpsError) as error:
        raise NotificationError(f"{target.name}: {client.failure_text(error)}") from None


def signed(body: bytes, secret: str, number: str, timestamp: int) -> str:
    """Return the signature of a body, as Standard Webhooks have it (``webhook-signature``)."""
    encoded = secret.startswith(_WEBHOOK_SECRET)
    key = base64.b64decode(secret.removeprefix(_WEBHOOK_SECRET)) if encoded else secret.encode()
    digest = hmac.new(key, f"{number}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def _webhook(target: TargetConfig, message: Message) -> None:
    body, headers = json.dumps(message.document()).encode(), {}
    secret = _secret(target, "secret")
    if secret is not None:
        number, timestamp = f"msg_{uuid.uuid4().hex}", int(time.time())
        headers = {
            "webhook-id": number,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signed(body, secret, number, timestamp),
        }
    _post(target, body, headers)


def _slack(target: TargetConfig, message: Message) -> None:
    _post(target, json.dumps(message.slack()).encode())


def _teams(target: TargetConfig, message: Message) -> None:
    _post(target, json.dumps(message.teams()).encode())


def _post(target: TargetConfig, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    sent = {"Content-Type": "application/json", **(headers or {})}
    client.fetch(_secret(target, "url") or "", MESSAGE_SECONDS, body, sent)


class _Mail(smtplib.SMTP):
    """A connection to a mail server, which ends in time."""

    def __init__(self, deadline: client.Deadline, *server: Any, **options: Any) -> None:
        self._deadline = deadline
        super().__init__(*server, **options)

    def _get_socket(self, host: str, port: int, timeout: float) -> Any:
        connection = super()._get_socket(host, port, timeout)  # type: ignore[misc]  # the hook of its own subclass
        self._deadline.watch(connection)
        return connection


class _TlsMail(_Mail, smtplib.SMTP_SSL):
    """The same with TLS from its beginning."""


def _email(target: TargetConfig, message: Message) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = message.title, target.sender, ", ".join(target.to)
    mail["Date"], mail["Message-ID"] = formatdate(), make_msgid(domain="memwal-ops")
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text())
    host, context = target.host or "", ssl.create_default_context()
    password = _secret(target, "password")
    with client.Deadline(MESSAGE_SECONDS) as deadline, ExitStack() as opened:
        if target.security == "tls":
            server: smtplib.SMTP = _TlsMail(deadline, host, target.port or 465, timeout=_TIMEOUT, context=context)
        else:
            server = _Mail(deadline, host, target.port or 587, timeout=_TIMEOUT)
        opened.enter_context(server)
        if target.security == "starttls":
            server.starttls(context=context)
        if target.username is not None:
            server.login(target.username, password or "")
        server.send_message(mail)


def _apprise(target: TargetConfig, message: Message) -> None:
    apprise = import_extra("apprise", "notify", "Notifications by Apprise")
    sender = apprise.Apprise()
    if not sender.add(_secret(target, "url")):
        raise NotificationError(f"{target.name}: Apprise does not know such a URL.")
    if not sender.notify(title=message.title, body=message.text()):
        raise NotificationError(f"{target.name}: Apprise could not deliver the message.")


_SENDERS = {"webhook": _webhook, "slack": _slack, "teams": _teams, "email": _email, "apprise": _apprise}


def _secret(target: TargetConfig, key: str) -> str | None:
    """Return a value of the configuration, or of the file that it names; read at each use, as files are renewed."""
    path: str | None = getattr(target, f"{key}_file")
    if path is None:
        value: str | None = getattr(target, key)
        return value
    try:
        with open(path, encoding="utf-8") as file:
            secret = file.read(_MAX_SECRET_BYTES).strip()
    except (OSError, ValueError) as error:
        raise NotificationError(f"{target.name}: {key}_file cannot be read: {error}") from None
    remember([secret])
    return secret


@dataclass
class Told:
    """What one target knows. ``sent``: when messages were sent in the last hour, seconds since the epoch."""

    found: Mapping[str, TableFinding] = field(default_factory=dict)
    sent: list[float] = field(default_factory=list)


class ToldFile:
    """The state of all targets, in a file of the state folder. One that cannot be read or written is logged."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._written = ""
        self.targets: dict[str, Told] = {}
        try:
            with open(path, encoding="utf-8") as file:
                self.targets = {name: _read(entry) for name, entry in json.load(file)["targets"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            get_logger(__name__).warning("notifications_not_read", file=path, error=f"{type(error).__name__}: {error}")

    def write(self) -> None:
        """Write the file, if anything has changed."""
        document = {
            name: {"sent": told.sent, "found": [found.to_json() for found in told.found.values()]}
            for name, told in self.targets.items()
        }
        text = json.dumps({"version": 1, "targets": document})
        if text == self._written:
            return
        new = f"{self._path}.new"
        try:
            with open(new, "w", encoding="utf-8", opener=private_opener) as file:
                file.write(text)
            os.replace(new, self._path)
            self._written = text
        except OSError as error:
            with suppress(OSError):
                os.unlink(new)
            get_logger(__name__).warning("notifications_not_written", file=self._path, error=str(error))


def _read(document: Mapping[str, Any]) -> Told:
    findings = [TableFinding(**entry) for entry in document["found"]]
    return Told({finding.key: finding for finding in findings}, [float(moment) for moment in document["sent"]])


_STEP_SECONDS, _STEP_JOIN_SECONDS, _BUSY_FACTOR = 15.0, 1.0, 10.0
_HOUR = 3600.0
_FIRST_RETRY, _LONGEST_RETRY = 30.0, 900.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What holds now. Of ``unread`` tables, which were not polled yet, nothing is resolved."""

    found: tuple[TableFinding, ...]
    unread: frozenset[str] = frozenset()


class FindingNotifier:
    """Notifies the targets of a configuration.

    Args:
        read: returns what holds now; None if it is not known yet.
        service: the name of this service, for messages.
        on_result: called with a target's name and ``succeeded`` or ``failed``.
        now: the wall clock, in seconds.
    """

    def __init__(
        self,
        config: NotifyConfig,
        *,
        read: Callable[[], Findings | None],
        path: str,
        service: str,
        on_result: Callable[[str, str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._read = read
        self._path = path
        self._file: ToldFile | None = None
        self._service = service
        self._on_result = on_result
        self._now = now
        self._since: dict[str, float] = {}
        self._retry: dict[str, tuple[float, float]] = {}
        # By target: the thread that tells it now; and why the last message was not delivered.
        self._telling: dict[str, threading.Thread] = {}
        self._faults: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def configure(self, config: NotifyConfig) -> None:
        """Use another configuration from the next step on, and start the thread if there are targets."""
        self._config = config
        if config.targets and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop; a message that is being sent gets ``timeout`` seconds to end."""
        self._stopped.set()
        ends = time.monotonic() + timeout
        for thread in (self._thread, *self._telling.values()):
            if thread is not None:
                thread.join(max(0.0, ends - time.monotonic()))

    @property
    def faults(self) -> dict[str, str]:
        """By name of a target, why its last message was not delivered."""
        return dict(self._faults)

    def step(self, *, wait: bool = True, seconds: float = 2 * MESSAGE_SECONDS) -> None:
        """Send to each target what it was not told yet; ``wait``: after ``group_wait``.

        Each is told on a thread of its own, which is waited for at most ``seconds``: one that hangs delays no other.
        """
        config = self._config
        if not config.targets:
            return
        now_holds = self._read()
        if now_holds is None:
            return
        if self._file is None:
            self._file = ToldFile(self._path)
        names = {target.name for target in config.targets}
        self._telling = {name: thread for name, thread in self._telling.items() if thread.is_alive()}
        self._faults = {name: why for name, why in self._faults.items() if name in names}
        for target in config.targets:
            if target.name not in self._telling:
                told = self._file.targets.setdefault(target.name, Told())
                tell = partial(self._tell, target, now_holds, told, wait=wait)
                self._telling[target.name] = threading.Thread(target=tell, name="notify", daemon=True)
                self._telling[target.name].start()
        ends = time.monotonic() + seconds
        for thread in self._telling.values():
            thread.join(max(0.0, ends - time.monotonic()))
        self._file.targets = {name: told for name, told in self._file.targets.items() if name in names}
        self._file.write()

    def _tell(self, target: TargetConfig, holds: Findings, told: Told, *, wait: bool) -> None:
        now = self._now()
        wanted = [finding for finding in holds.found if target.level == "warning" or finding.level == "critical"]
        made = changes(told.found, wanted, lambda table: table not in holds.unread)
        if not made:
            self._since.pop(target.name, None)
            return
        since = self._since.setdefault(target.name, now)
        told.sent = [moment for moment in told.sent if now - _HOUR < moment <= now]
        grouped = not wait or now - since >= self._config.group_wait.total_seconds()
        not_before, _ = self._retry.get(target.name, (0.0, 0.0))
        if grouped and now >= not_before and len(told.sent) < self._config.max_per_hour:
            self._send(target, told, made, now)

    def _send(self, target: TargetConfig, told: Told, made: list[FindingChange], now: float) -> None:
        sent = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        message = Message(self._service, (self._config.link or "").rstrip("/"), sent, made)
        try:
            send(target, message)
        except Exception as error:  # noqa: BLE001 - whatever another server, or a library, does
            _, pause = self._retry.get(target.name, (0.0, _FIRST_RETRY / 2))
            pause = min(2 * pause, _LONGEST_RETRY)
            self._retry[target.name] = (now + pause, pause)
            text = str(error) if isinstance(error, NotificationError) else type(error).__name__
            self._faults[target.name] = text
            get_logger(__name__).warning("notification_failed", target=target.name, error=text, retry_in=pause)
            self._on_result(target.name, "failed")
            return
        self._retry.pop(target.name, None)
        self._since.pop(target.name, None)
        self._faults.pop(target.name, None)
        told.found = after(told.found, made)
        told.sent.append(now)
        self._on_result(target.name, "succeeded")

    def _work(self) -> None:
        pause = _STEP_SECONDS
        while not self._stopped.wait(pause):
            began = time.monotonic()
            try:
                self.step(seconds=_STEP_JOIN_SECONDS)
            except Exception:  # noqa: BLE001 - a bug here must not end all notifications
                get_logger(__name__).exception("internal_error")
            # Of many tables, finding out what holds may take some processor time: at most a tenth of one.
            group_wait = self._config.group_wait.total_seconds()
            pause = max(min(_STEP_SECONDS, group_wait), _BUSY_FACTOR * (time.monotonic() - began), 0.1)
