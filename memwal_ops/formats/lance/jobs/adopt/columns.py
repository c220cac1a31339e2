"""``adopt --same-columns``: record an operator's decision that columns are those of generations that wait.

Whether a column is the one that a generation was flushed with is shown by the table's versions
(:mod:`memwal_ops.formats.lance.retention.schema_history`). Where others deleted those versions, only a person can
tell. The decision is a number in the table's config, published as exactly the version after the one that was read: no
drop of a column can come between. It counts for generations that were flushed before, and for fields that exist
since.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.documents import document
from memwal_ops.errors import GenerationCorruptError, GenerationMissingError, SchemaProjectionError
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, check_rewritable
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.generations.generation import open_generation, read_flush
from memwal_ops.formats.lance.generations.projection import UndecidedColumnsError
from memwal_ops.formats.lance.jobs.catchup.publishing import publish_change
from memwal_ops.formats.lance.retention.schema_history import SAME_COLUMNS, SchemaHistory
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted, paragraph, span_text

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class UndecidedRegion:
    """Generations of one region that wait for the decision.

    Attributes:
        region_id: the region.
        generations: their numbers, ascending.
        columns: the columns in question, each with its name in the generation if that is another one.
        flushed: when the oldest of them was written.
    """

    region_id: UUID
    generations: tuple[int, ...]
    columns: tuple[str, ...]
    flushed: datetime

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry of a report."""
        return document(self)


@dataclass(frozen=True, slots=True)
class SameColumnsReport:
    """Report of a run. ``decision`` is planned, adopted or nothing_to_adopt."""

    decision: str
    run_id: str
    regions: tuple[UndecidedRegion, ...]
    version: int
    seconds: float

    exit_code = 0

    def to_json(self) -> dict[str, object]:
        """The document of ``adopt --same-columns --json``."""
        return document(self, **{"as": "same_columns"})

    def describe(self) -> str:
        """The report as text for people: what the decision asserts."""
        if not self.regions:
            return "nothing_to_adopt: no generation waits for a decision about its columns."
        count = sum(len(region.generations) for region in self.regions)
        since = min(region.flushed for region in self.regions)
        columns = dict.fromkeys(name for region in self.regions for name in region.columns)
        parts = [f"{self.decision}: {counted(count, 'generation')} of {counted(len(self.regions), 'region')}."]
        parts += [paragraph(_described(region), hanging="  ") for region in self.regions]
        done = self.decision == "adopted"
        parts.append(
            paragraph(
                f"{'You have asserted' if done else 'With --apply, you assert'}: since {since:%Y-%m-%d %H:%M:%S} UTC, "
                "this table was not removed and created again, and none of these columns was dropped, replaced by a "
                f"restore, or added again: {', '.join(columns)}. What is written as 'is' was renamed, and is the same "
                "column. So the generations' values belong into them."
            )
        )
        if done:
            parts.append(f"Recorded in version {self.version}. Run memwal-ops merge.")
        else:
            parts.append(
                paragraph(
                    "If one of them was dropped and added again, first copy it to a new column, drop it, and rename "
                    "the copy: then it has another field id, and the generations' values are ignored. If the table was "
                    "created again, do not use --apply: move the region's folder to a place outside the table."
                )
            )
            parts.append("Add --apply to do it.")
        return "\n".join(parts)


def _described(region: UndecidedRegion) -> str:
    numbers = region.generations
    return (
        f"region {region.region_id}: {counted(len(numbers), 'generation')} ({span_text(numbers[0], numbers[-1])}), "
        f"flushed since {region.flushed:%Y-%m-%d %H:%M:%S} UTC; columns {', '.join(region.columns)}."
    )


def plan_same_columns(table: Table) -> SameColumnsReport:
    """What :func:`apply_same_columns` would record; reads only. Requests: some per unmerged generation."""
    started = time.monotonic()
    check_rewritable(table)
    regions = undecided_regions(table)
    decision = "planned" if regions else "nothing_to_adopt"
    return SameColumnsReport(decision, str(uuid.uuid4()), regions, table.version, time.monotonic() - started)


def apply_same_columns(table: Table) -> SameColumnsReport:
    """Record the decision. Safe to kill, to repeat and to run twice concurrently.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
        CommitStateUnknownError: the outcome of the commit is unknown; run it again.
    """
    started = time.monotonic()
    check_rewritable(table)
    probe_conditional_writes(table.store)
    note = CommitNote.new("adopt")
    regions: tuple[UndecidedRegion, ...] = ()

    def change(newest: Table) -> IndexChange | None:
        nonlocal regions  # computed again on each version: it may be the one in which a column was dropped
        regions = undecided_regions(newest)
        return IndexChange(newest.index.details, config={SAME_COLUMNS: str(newest.version)}) if regions else None

    table = publish_change(table, change, note, CommitRetry())
    decision = "adopted" if regions else "nothing_to_adopt"
    return SameColumnsReport(decision, note.run_id, regions, table.version, time.monotonic() - started)


def undecided_regions(table: Table) -> tuple[UndecidedRegion, ...]:
    """The unmerged generations whose columns nothing proves to be the base's, by region."""
    history = SchemaHistory(table)
    found: dict[UUID, list[tuple[int, tuple[str, ...], int]]] = {}
    for ref in read_backlog(table).pending:
        try:
            open_generation(table, ref, history)
        except UndecidedColumnsError as error:
            flushed = read_flush(table, ref)
            if flushed is not None:
                found.setdefault(ref.region_id, []).append((ref.generation, error.columns, flushed))
        except (GenerationMissingError, GenerationCorruptError, SchemaProjectionError):
            continue  # no decision helps; merge and inspect name it
    return tuple(
        UndecidedRegion(
            region_id,
            tuple(generation for generation, _, _ in rows),
            tuple(dict.fromkeys(name for _, names, _ in rows for name in names)),
            datetime.fromtimestamp(min(flushed for _, _, flushed in rows) / _NANOSECONDS, UTC),
        )
        for region_id, rows in found.items()
    )
