"""Explain why a deleted node or a file of an index folder is kept or deletable: every gate. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.candidates import Candidate, Verdict
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lm_diskann.jobs.gc import opened
from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import WhyOptions
    from memwal_ops.formats.lm_diskann.table import Table

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
        reasons = [
            {
                **one.to_json(),
                "verdict": one.verdict.value,
                "gates": [{"met": gate.met, "text": gate.text} for gate in one.gates],
            }
            for one in self.reasons
        ]
        return {"decision": self.decision, "target": self.target, "reasons": reasons}

    def describe(self) -> str:
        """The reasons as text for people."""
        lines = []
        for one in self.reasons:
            lines.append(f"{one.path} ({one.kind}) {_VERDICTS[one.verdict]}.")
            lines += [paragraph(f"{'+' if gate.met else '-'} {gate.text}", indent="  ") for gate in one.gates]
        return "\n".join(lines)


def plan(table: Table, options: WhyOptions, context: RunContext | None = None) -> Explanation:
    """Explain ``options.target``: ``nodes/ID``, the end of the graph, or a file of a view or reader.

    Raises:
        IndexBusyError: another writer or job has the index.
        ObjectNotFoundError: there is no such candidate.
    """
    del context
    wanted = options.target.strip("/")
    with opened(table, options) as collectors:
        found = [
            one for part in collectors for stage in part.stages() for one in stage.candidates
            if one.path == wanted or one.path.startswith(f"{wanted}/")
        ]  # fmt: skip
    if not found:
        raise ObjectNotFoundError(
            f"{table.location.uri} has nothing at {options.target} that gc collects.",
            remedy="memwal-ops gc URI --json lists its candidates.",
        )
    return Explanation(options.target, tuple(found))


apply = plan
