"""What the reports of merges share in every format: how a merge ended, and its exit code."""

from __future__ import annotations

import enum

from memwal_ops.errors import RegionsBlockedError


class MergeDecision(enum.StrEnum):
    """How a merge has ended."""

    MERGED = "merged"
    NOTHING_TO_MERGE = "nothing_to_merge"
    SUPERSEDED = "superseded"
    """Another merger merged all that was unmerged when this one began."""
    BLOCKED = "blocked"
    """At least one part of the log is blocked; the others are merged."""
    DRY_RUN = "dry_run"


class MergeOutcome:
    """The outcome of one merge: what a report adds to its ``decision``."""

    decision: MergeDecision

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 10 where a part of the log is blocked, 0 for a dry run."""
        return RegionsBlockedError.exit_code if self.decision is MergeDecision.BLOCKED else 0
