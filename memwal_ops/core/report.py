"""The interface of a job's report, and what the report of a plan says that a table needs.

What the reports of merges share in every format: how a merge ended, and its exit code.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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


_MAX_BYTES = 64 << 10


class Report(Protocol):
    """The result of a plan or a run.

    ``decision`` is a member of an enum of the job (a ``StrEnum``): one word of a fixed set, never a silent no-op.
    """

    @property
    def decision(self) -> str:
        """The outcome in one word."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0, or the code of the error that the report describes."""

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``. Keys with the same meaning are the same in every format."""

    def describe(self) -> str:
        """The report as human-readable text."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a job would do.

    Attributes:
        rows: rows that it would merge, index or rewrite, each counted once; None: not known.
        later: bytes that it can free when they are old enough: of young versions, and of files that no version needs,
            as compactions that were killed leave them.
        by: when all of these are old enough, as ISO 8601; None: there are none.
        versions: versions that it would read or delete.
        indexed: rows that it would index, counted for each index, as past runs count them; 0: ``rows``.
    """

    job: str
    what: str
    rows: int | None = 0
    frees: int = 0
    later: int = 0
    by: str | None = None
    now: bool = True
    versions: int = 0
    indexed: int = 0

    @property
    def work(self) -> int:
        """Its size, as the runs of the job count it: rows, or the bytes that it frees; 0: not known."""
        return self.indexed or self.rows or self.frees

    def to_json(self) -> dict[str, Any]:
        """The ``needs`` entry."""
        now = {"job": self.job, "what": self.what, "rows": self.rows, "bytes_freed": self.frees}
        return {**now, "later": None if self.by is None else {"bytes": self.later, "by": self.by}}


@runtime_checkable
class PlanReport(Report, Protocol):
    """A report whose plan says what the job would do, for ``memwal-ops scan``; optional."""

    def needs(self) -> Iterable[Need]:
        """What the job would do; nothing if the table does not need it. Of the report of a plan."""


def bounded(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of at most 64 KiB: the lists of a larger one are cut, and ``truncated`` is true."""
    if len(json.dumps(report, default=str)) <= _MAX_BYTES:
        return dict(report)
    cut: dict[str, Any] = {key: value[:10] if isinstance(value, list) else value for key, value in report.items()}
    cut["truncated"] = True
    if len(json.dumps(cut, default=str)) <= _MAX_BYTES:
        return cut
    plain = {key: value for key, value in report.items() if isinstance(value, int | float | bool | None)}
    return {**plain, "decision": str(report.get("decision"))[:100], "truncated": True}
