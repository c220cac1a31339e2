"""Explain why gc keeps or deletes its candidates, gate by gate: the report of ``why``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.candidates import Candidate, Verdict
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.text import paragraph, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.core.collector import Collector
    from memwal_ops.core.protocols import Table

_VERDICTS = {Verdict.DELETE: "is deletable", Verdict.HELD: "is kept", Verdict.UNKNOWN: "is unknown, and kept"}


@dataclass(frozen=True)
class Explanation:
    """The candidates at the target."""

    target: str
    reasons: tuple[Candidate, ...]

    decision = "explained"
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``why --json``."""
        return {
            "decision": self.decision,
            "target": self.target,
            "reasons": [candidate_json(one) for one in self.reasons],
        }

    def describe(self) -> str:
        """The reasons as human-readable text."""
        return "\n".join(describe_candidate(one, f"{printable(one.path)} ({one.kind})", ".") for one in self.reasons)


def explain(table: Table, target: str, collectors: Iterable[Collector[Candidate]]) -> Explanation:
    """Explain the candidates at, above and below a path.

    Raises:
        ObjectNotFoundError: there is none.
    """
    path = target.strip("/")
    stages = (stage for part in collectors for stage in part.stages())
    found = [one for stage in stages for one in stage.candidates if covers(one, path)]
    if not found:
        raise ObjectNotFoundError(
            f"{table.location.uri} has no gc candidate at {target}.",
            remedy="memwal-ops gc URI --json lists its candidates.",
        )
    return Explanation(target, tuple(found))


def covers(candidate: Candidate, path: str) -> bool:
    """Whether a candidate is at, above or below a path."""
    return candidate.path == path or path.startswith(f"{candidate.path}/") or candidate.path.startswith(f"{path}/")


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """The entry of ``reasons``; ``gates`` has all conditions."""
    return {
        **candidate.to_json(),
        "verdict": candidate.verdict.value,
        "gates": [{"met": gate.met, "text": gate.text} for gate in candidate.gates],
    }


def describe_candidate(candidate: Candidate, name: str, end: str) -> str:
    """The verdict in one line, then one paragraph per gate: ``+`` if it is met, else ``-``."""
    gates = (f"{'+' if gate.met else '-'} {gate.text}" for gate in candidate.gates)
    lines = [paragraph(gate, indent="  ", hanging="  ") for gate in gates]
    return "\n".join([f"{name} {_VERDICTS[candidate.verdict]}{end}", *lines])
