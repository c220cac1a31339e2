"""Find the indexes that answer badly in what the last verification recorded, without asking them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PAGE = "runbooks/wrong-answers.md"
ASKED_BY = "verify"
"""The job that asks indexes."""
_RECALL = "index_recall_low"


class PastAnswers(Protocol):
    """The recorded answers of a table's indexes."""

    def __call__(self, uri: str) -> Sequence[Mapping[str, Any]]:
        """The entries of ``answers`` of the last verification that asked, each with ``asked_at``."""


def no_past_answers(uri: str) -> Sequence[Mapping[str, Any]]:
    """No answers: there is no run history."""
    del uri
    return ()


@dataclass(frozen=True, slots=True)
class BadAnswers:
    """One index that answered badly.

    Attributes:
        index, type: its name and its type.
        why: what was found: one sentence or several.
        remedy: what to do.
        wrong: whether rows were missing or wrong; otherwise its recall is low.
        asked_at: when it was asked, as ISO 8601; empty: that is not known.
    """

    index: str
    type: str
    why: str
    remedy: str
    wrong: bool
    asked_at: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry of reports."""
        kind = "wrong" if self.wrong else "recall_low"
        document = {"index": self.index, "type": self.type, "kind": kind, "why": self.why, "remedy": self.remedy}
        return {**document, "asked_at": self.asked_at or None, "runbook": PAGE}

    def describe(self) -> str:
        """One line of a report."""
        when = f", asked {self.asked_at[:16].replace('T', ' ')} UTC" if self.asked_at else ""
        how = "answers wrongly" if self.wrong else "finds too few of the nearest rows"
        return f"the index {self.index} ({self.type}) {how}{when}: {self.why}"


def bad_answers(entries: Iterable[Mapping[str, Any]]) -> list[BadAnswers]:
    """Those of the recorded entries whose index answers badly, wrong answers first."""
    found = [one for one in map(_bad, entries) if one is not None]
    return sorted(found, key=lambda one: not one.wrong)


def _bad(entry: Mapping[str, Any]) -> BadAnswers | None:
    recorded = entry.get("findings")
    findings = [one for one in recorded if isinstance(one, dict)] if isinstance(recorded, list) else []
    index, wrong = str(entry.get("index")), int(entry.get("wrong") or 0)
    if not findings and not wrong:
        return None
    why = " ".join(dict.fromkeys(str(one.get("evidence")) for one in findings))
    remedy = next((str(one["remedy"]) for one in findings if one.get("remedy")), "")
    return BadAnswers(
        index,
        str(entry.get("type")),
        why
        or f"{counted(wrong, 'answer')} of {int(entry.get('queries') or 0):,} {'was' if wrong == 1 else 'were'} wrong.",
        remedy or f"Build it anew: memwal-ops catchup URI --rebuild --index {index}",
        wrong=any(one.get("check") != _RECALL for one in findings) or not findings,
        asked_at=str(entry.get("asked_at") or ""),
    )
