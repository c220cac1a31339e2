"""The report of a snapshot run, as JSON and as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.documents import document
from memwal_ops.core.report import Need
from memwal_ops.errors import RegionsBlockedError
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator


class SnapshotDecision(enum.StrEnum):
    """How a snapshot run ended."""

    BUILT = "built"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry of ``_mem_wal/`` that the snapshot lacks. ``path`` is below the table's root."""

    path: str
    reason: str
    detail: str
    is_fault: bool

    def to_json(self) -> dict[str, object]:
        """The ``skipped`` entry of a report; ``fault`` is false if the snapshot is complete without it."""
        return document(self, "is_fault", fault=self.is_fault)


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """Report of a snapshot run.

    ``stored`` is inline or external: where the rows are (dry_run: would be) stored. ``is_current`` is
    false only if a dry run found a snapshot that is missing or behind.
    """

    decision: SnapshotDecision
    run_id: str
    num_regions: int
    stored: str
    wal_hints_updated: int
    skipped: tuple[Skipped, ...]
    version: int
    commit_conflicts: int
    seconds: float
    is_current: bool = True

    @property
    def has_faults(self) -> bool:
        """Whether a region could not be read."""
        return any(entry.is_fault for entry in self.skipped)

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return RegionsBlockedError.exit_code if self.has_faults else 0

    def to_json(self) -> dict[str, object]:
        """The document of ``snapshot --json``."""
        return document(self, "is_current", current=self.is_current)

    def needs(self) -> Iterator[Need]:
        """What a run would store."""
        if not self.is_current and self.num_regions:
            yield Need("snapshot", f"store {counted(self.num_regions, 'region')}")

    def describe(self) -> str:
        """The report as text for people."""
        parts = [_headline(self)]
        if self.wal_hints_updated:
            parts.append(f"Updated the hint to the end of the log of {counted(self.wal_hints_updated, 'region')}.")
        for entry in self.skipped:
            mark = "NOT READ" if entry.is_fault else "skipped"
            parts.append(paragraph(f"{mark}: {entry.path} ({entry.reason}). {entry.detail}", hanging="  "))
        return "\n".join(parts)


def _headline(report: SnapshotReport) -> str:
    regions = counted(report.num_regions, "region")
    where = "inside the index" if report.stored == "inline" else "in a file next to the index"
    match report.decision:
        case "built":
            return f"built: {regions}, {where}, as version {report.version}, {report.seconds:.2f} s."
        case "unchanged":
            return f"unchanged: the stored snapshot of {regions} is current; nothing was committed."
        case _:
            if report.is_current:
                return f"dry_run: the stored snapshot of {regions} is current; there is nothing to do."
            return f"dry_run: would store {regions} {where}; nothing was changed."
