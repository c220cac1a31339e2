"""The options of ``repair`` for tables of every format, and the help that its commands share."""

from __future__ import annotations

from dataclasses import dataclass

from memwal_ops.core.options import count, text
from memwal_ops.core.verification import VerifyOptions


@dataclass(frozen=True, kw_only=True)
class RepairOptions(VerifyOptions):
    """Options of every repair."""

    max_findings: int = count(1000, minimum=1, metavar="N", help="Repair at most N findings of a check in one run.")
    undo: str = text("", metavar="ID", help="Restore what the repair with that id replaced; do nothing else.")
