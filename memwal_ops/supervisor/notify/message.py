"""Write the message of some changes: as text, as JSON, and as chats take it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from memwal_ops.storage.redaction import redact
from memwal_ops.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memwal_ops.supervisor.notify.changes import Change

_MAX_IN_TEXT, _MAX_IN_JSON = 20, 200
_WORDS = {"new": "NEW", "changed": "CHANGED", "resolved": "RESOLVED"}


@dataclass(frozen=True, slots=True)
class Message:
    """The changes that one message tells.

    Attributes:
        service: the name of the service.
        link: the address of its pages, without a slash at its end; empty: none is configured.
        sent: when, ISO 8601.
        test: it only tries a target.
    """

    service: str
    link: str
    sent: str
    changes: Sequence[Change]
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

    def _entry(self, change: Change) -> str:
        found = change.found
        level = "" if change.kind == "resolved" else f" {found.level}"
        lines = [f"{_WORDS[change.kind]}{level}: {_clean(found.table) or 'the service'}: {_clean(found.what)}"]
        if change.kind != "resolved":
            lines.append(f"Do: {_clean(found.do)}")
            lines += [f"Page: {self._page(found.runbook)}"] if found.runbook else []
        if self.link and found.table:
            lines.append(self._table(found.table))
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
    """A text on one line, without secrets and control characters; None as it is."""
    return None if text is None else printable(redact(str(text)))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
