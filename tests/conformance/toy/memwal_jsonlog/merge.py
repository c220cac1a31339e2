"""Merge log entries into the base in order, rows and progress in one version."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_jsonlog.table import Rows, blocked_at, log_path, read_json
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import CommitConflictError, ObjectNotFoundError, RegionsBlockedError, TableCorruptError
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_jsonlog.specs import MergeOptions
    from memwal_jsonlog.table import Table
    from memwal_ops.core.context import RunContext


class Decision(enum.StrEnum):
    """The decisions of a merge."""

    MERGED = "merged"
    NOTHING_TO_MERGE = "nothing_to_merge"
    BLOCKED = "blocked"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class Report:
    """``entries``: number merged, or to be merged; ``blocked``: the entry that is missing or damaged."""

    decision: Decision
    entries: int
    version: int
    blocked: int | None = None

    @property
    def exit_code(self) -> int:
        return RegionsBlockedError.exit_code if self.decision is Decision.BLOCKED else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "decision": self.decision.value,
            "entries": self.entries,
            "version": self.version,
            "blocked": [] if self.blocked is None else [blocked_at(self.blocked)],
        }

    def describe(self) -> str:
        stop = "" if self.blocked is None else f" Log entry {self.blocked} is missing or damaged: restore it."
        return f"{self.decision}: {self.entries} log entries; the table is at version {self.version}.{stop}"


def backlog(table: Table) -> Mapping[str, float]:
    waiting, missing = table.waiting()
    return {"entries": len(waiting), "missing": int(missing is not None)}


def plan(table: Table, options: MergeOptions, context: RunContext) -> Report:
    waiting, missing = table.waiting()
    return Report(Decision.DRY_RUN, len(waiting), table.revision, missing)


def apply(table: Table, options: MergeOptions, context: RunContext) -> Report:
    probe_conditional_writes(table.store)
    retry, merged = CommitRetry(), 0
    last = max(table.waiting()[0], default=0)  # with a live writer, an unbounded merge would never return
    while True:
        context.checkpoint()
        waiting, blocked = table.waiting()
        rows, upto, damaged = _merged(table, [one for one in waiting if one <= last][: options.max_entries])
        blocked = damaged or blocked
        if upto > table.merged:
            if table.publish(rows, upto):
                merged += upto - table.merged
                context.figures["entries_merged"] += upto - table.merged
                context.revisions.append(table.revision + 1)
                context.advance("merging", "entries", upto - table.merged)
                table = retry.landed(table)
            else:
                table = retry.conflict(table, CommitConflictError(f"Version {table.revision + 1} was published first."))
        elif blocked is not None and (newest := table.newest()).revision > table.revision:
            table = newest  # not missing: another run merged it, and gc deleted it
        else:
            done = Decision.MERGED if merged else Decision.NOTHING_TO_MERGE
            return Report(Decision.BLOCKED if blocked else done, merged, table.revision, blocked)


def _merged(table: Table, entries: list[int]) -> tuple[Rows, int, int | None]:
    """The rows after these entries, the last entry in them, and the first that cannot be read."""
    rows, upto = dict(table.rows), table.merged
    for number in entries:
        try:
            rows |= read_json(table.store, log_path(number))
        except (ObjectNotFoundError, TableCorruptError):
            return _live(rows), upto, number
        upto = number
    return _live(rows), upto, None


def _live(rows: Rows) -> Rows:
    return {key: row for key, row in rows.items() if row is not None}
