"""Explain why objects of a namespace are kept or deletable: every gate of each. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.candidates import Candidate, Verdict
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.zeppelin.jobs.gc import Judge, Objects, Revisions
from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.options import WhyOptions

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


def plan(table: Namespace, options: WhyOptions, context: RunContext | None = None) -> Explanation:
    """Explain ``options.target``: a fragment's key, an object of a segment, a revision's record.

    Raises:
        ObjectNotFoundError: it does not exist, or is not an object that gc collects.
    """
    del context
    judge = Judge.of(table, options, datetime.now(UTC))
    objects = Objects(table, judge)
    wanted = options.target.strip("/")
    found = [
        one
        for part in (objects, Revisions(table, judge, objects))
        for stage in part.stages()
        for one in stage.candidates
        if one.path == wanted or wanted.startswith(f"{one.path}/") or one.path.startswith(f"{wanted}/")
    ]
    if not found:
        raise ObjectNotFoundError(
            f"{table.location.uri} has no object at {options.target} that gc collects.",
            remedy="memwal-ops gc URI --json lists its candidates.",
        )
    return Explanation(options.target, tuple(found))


apply = plan
