"""Explain why gc keeps or deletes its candidates, gate by gate: the report of ``why``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memwal_ops import text
from memwal_ops.core.candidates import Candidate, Verdict
from memwal_ops.core.collector import Collector
from memwal_ops.core.protocols import Table
from memwal_ops.errors import ObjectNotFoundError

_VERDICTS = {Verdict.DELETE: "is deletable", Verdict.HELD: "is kept", Verdict.UNKNOWN: "is unknown, and kept"}


@dataclass(frozen=True, slots=True)
class Reason:
    """A candidate, or ``count`` candidates with the same gates, of which ``candidate`` is the first."""

    candidate: Candidate
    count: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The entry of ``why --json``; ``gates`` has all conditions."""
        candidate = self.candidate
        gates = [{"met": gate.met, "text": gate.text} for gate in candidate.gates]
        return {
            **candidate.to_json(),
            "verdict": candidate.verdict.value,
            "gates": gates,
            "items": self.count,
            "bytes": self.bytes,
        }

    def describe(self) -> str:
        """The verdict in one line, then one paragraph per gate: ``+`` if it is met, else ``-``."""
        more = "" if self.count == 1 else f" and {text.counted(self.count - 1, 'more like it', 'more like it')}"
        name = f"{text.printable(self.candidate.path)}{more} ({text.size_text(self.bytes)})"
        gates = (f"{'+' if gate.met else '-'} {gate.text}" for gate in self.candidate.gates)
        lines = [text.paragraph(gate, indent="  ", hanging="  ") for gate in gates]
        return "\n".join([f"{name} {_VERDICTS[self.candidate.verdict]}:", *lines])


@dataclass(frozen=True)
class Explanation:
    """The candidates at the target."""

    target: str
    reasons: tuple[Reason, ...]

    decision = "explained"
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``why --json``."""
        return {
            "decision": self.decision,
            "target": self.target,
            "reasons": [reason.to_json() for reason in self.reasons],
        }

    def describe(self) -> str:
        """The reasons as human-readable text."""
        return "\n\n".join(reason.describe() for reason in self.reasons)


def explain(table: Table, target: str, collectors: Iterable[Collector[Candidate]]) -> Explanation:
    """Explain the candidates at, above and below a path. Raises ``ObjectNotFoundError``: there is none."""
    path = target.strip("/")
    stages = (stage for part in collectors for stage in part.stages())
    candidates = [candidate for stage in stages for candidate in stage.candidates if covers(candidate, path)]
    if not candidates:
        raise ObjectNotFoundError(
            f"{table.location.uri} has no gc candidate at {target}.",
            remedy="memwal-ops gc URI --json lists its candidates.",
        )
    return Explanation(target, tuple(Reason(candidate, 1, candidate.bytes) for candidate in candidates))


def covers(candidate: Candidate, path: str) -> bool:
    """Whether a candidate is at, above or below a path."""
    return candidate.path == path or path.startswith(f"{candidate.path}/") or candidate.path.startswith(f"{path}/")
