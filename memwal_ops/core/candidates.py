"""Candidates for deletion, and the conditions (gates) that each of them has to meet.

A candidate is deletable only if every gate is met; the sentences of the met gates are then its proof, and those of
the others are the reasons why it is kept. An unrecognized object has the kind ``unknown`` and is kept.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

UNKNOWN = "unknown"
"""The kind of unrecognized objects; every format has it."""


class Verdict(enum.StrEnum):
    """Whether a candidate is deleted, held or unrecognized."""

    DELETE = "delete"
    HELD = "held"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition of a deletion.

    It is met or not, by a sentence with the reason; one by time says also when it will be.
    """

    met: bool
    text: str
    until: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object, or several objects that are deleted together. A format derives a class with its own labels.

    Attributes:
        kind: a member of the format's ``StrEnum`` of kinds; the value is what ``gc --json`` prints.
        path: below the table's root, without a trailing slash; a candidate that is not an object has a name of the
            same form.
        bytes: total size of its objects.
        objects: number of its objects.
        gates: the conditions of its deletion.
        drain: whether it is kept only by its entry in a list that readers follow, and by its age.
    """

    kind: str
    path: str
    bytes: int
    objects: int
    gates: tuple[Gate, ...]
    drain: bool = False

    @property
    def verdict(self) -> Verdict:
        """``DELETE`` if every gate is met; without gates, ``HELD``."""
        if self.kind == UNKNOWN:
            return Verdict.UNKNOWN
        return Verdict.DELETE if self.gates and all(gate.met for gate in self.gates) else Verdict.HELD

    @property
    def why(self) -> str:
        """The proof if it is deletable; otherwise the gates that are not met."""
        wanted = self.verdict is Verdict.DELETE
        return "; ".join(gate.text for gate in self.gates if gate.met is wanted)

    def labels(self) -> Mapping[str, Any]:
        """Additional JSON keys of the format that identify the candidate."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The candidate as an entry of ``delete``, ``held`` or ``unknown``."""
        return {
            "kind": str(self.kind),
            "path": self.path,
            **self.labels(),
            "bytes": self.bytes,
            "objects": self.objects,
            "proof" if self.verdict is Verdict.DELETE else "because": self.why,
        }


def unrecognized(path: str, size: int, why: str) -> Candidate:
    """A candidate for an object that cannot be classified; it is kept."""
    return Candidate(UNKNOWN, path, size, 1, (Gate(met=False, text=why),))


def age_gate(what: str, written: datetime, limit: timedelta, now: datetime) -> Gate:
    """A gate that is met once ``limit`` has passed since ``written``.

    Args:
        what: what happened at ``written``; the text continues with ``, 3 h ago``.
        written: by the store's clock.
        limit: how long the object is kept; zero is always met, even if ``written`` is in the future.
        now: by the slower of the local clock and the store's: an object must not seem older than it is.
    """
    age = now - written
    met = age >= limit or not limit
    text = f"{what}, {_short(max(age, timedelta()))} ago; kept for {_short(limit)}"
    return Gate(met, text, None if met else written + limit)


def _short(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
