"""The JSON object of a dataclass: each field by its name, as JSON has it."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from memwal_ops.core.documents import document
from memwal_ops.errors import MemwalOpsError, TableNotFoundError


class Decision(enum.StrEnum):
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Part:
    number: int

    def to_json(self) -> dict[str, object]:
        return {"part": self.number}


@dataclass(frozen=True, slots=True)
class Report:
    decision: Decision
    parts: tuple[Part, ...]
    progress: dict[UUID, int]
    stages: dict[str, dict[str, float]]
    written: datetime | None
    error: MemwalOpsError | None
    hidden: object
    commit_conflicts: int = 2
    seconds: float = 0.123456789


def report() -> Report:
    ids = [UUID(int=number) for number in (2, 1)]
    written = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)
    error = TableNotFoundError("No table.", remedy="Make one.")
    return Report(Decision.DONE, (Part(1), Part(2)), dict.fromkeys(ids, 7), {"b": {"s": 0.5}}, written, error, object())


def test_each_kind_of_value() -> None:
    found = document(report(), "hidden", after=(Part(3),), decision=Decision.DONE)
    assert found == {
        "decision": "done",
        "parts": [{"part": 1}, {"part": 2}],
        "progress": {str(UUID(int=1)): 7, str(UUID(int=2)): 7},
        "stages": {"b": {"s": 0.5}},
        "written": "2026-01-02T03:04:05+00:00",
        "error": {"reason": TableNotFoundError.reason, "detail": "No table. Make one.", "remedy": "Make one."},
        "commit_conflicts": 2,
        "lost_races": 2,
        "seconds": 0.123457,
        "after": [{"part": 3}],
    }
    assert [*found["progress"]] == sorted(found["progress"])
    assert type(found["decision"]) is str
    assert json.loads(json.dumps(found)) == found


def test_other_values_stand_for_fields() -> None:
    found = document(report(), "error", hidden=None, written=None)
    assert (found["hidden"], found["written"]) == (None, None)
    assert "error" not in found
