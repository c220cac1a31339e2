"""The inspect job of tables with the legacy MemWAL index: every MemWAL, and what FLUSHED means for it. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.formats.lance.jobs.inspect.job import index_states
from memwal_ops.formats.lance.jobs.legacy.merge import backlog_json
from memwal_ops.formats.lance.legacy.index import (
    BlockedMemWal,
    Emptied,
    FlushedMeaning,
    Meanings,
    RegionWork,
    find_emptied,
    live_rows,
    mem_wals_of,
    read_work,
)
from memwal_ops.formats.lance.legacy.states import disorder
from memwal_ops.formats.lance.options import InspectOptions
from memwal_ops.formats.lance.retention.damage import VersionsCheck, check_versions, names_damage
from memwal_ops.formats.lance.wire.legacy_index import MemWal, State
from memwal_ops.text import counted, grid, paragraph

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.jobs.inspect.report import IndexState
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True, slots=True)
class MemWalState:
    """One MemWAL, and what FLUSHED means for it; None unless it is FLUSHED."""

    mem_wal: MemWal
    flushed: FlushedMeaning | None

    def to_json(self) -> dict[str, Any]:
        """The ``mem_wals`` entry."""
        mem_wal, entries, flushed = self.mem_wal, self.mem_wal.wal_entries, self.flushed
        first = entries.spans[0][0] if entries.spans else None
        log = {"encoding": entries.encoding, "count": entries.count, "first": first, "last": entries.highest}
        return document(
            mem_wal,
            *("id", "source"),
            region=mem_wal.id.region,
            generation=mem_wal.id.generation,
            state=mem_wal.state.name,
            wal_entries={**log, "holes": entries.holes},
            flushed_means=None if flushed is None else flushed.meaning or "unknown",
            writer_release=None if flushed is None else flushed.release,
        )


@dataclass(frozen=True, slots=True)
class LegacyInspection:
    """The report of ``inspect`` for one version of a legacy table."""

    table: Table
    mem_wals: tuple[MemWalState, ...]
    work: Mapping[str, RegionWork]
    emptied: Emptied | None
    indexes: tuple[IndexState, ...]
    versions: VersionsCheck
    limit: int

    decision = "inspected"
    exit_code = 0

    @property
    def faults(self) -> tuple[BlockedMemWal, ...]:
        """The faults of the regions that have one."""
        return tuple(work.blocked for work in self.work.values() if work.blocked is not None)

    @property
    def rows(self) -> int:
        """Rows of the base table, by its manifest."""
        return live_rows(self.table.manifest.manifest.fragments)

    def to_json(self) -> dict[str, Any]:
        """The document of ``inspect --json``."""
        emptied = self.emptied
        return {
            "uri": self.table.location.uri,
            "layout": self.table.layout.name,
            "version": self.table.version,
            "rows": self.rows,
            "fragments": len(self.table.manifest.manifest.fragments),
            "primary_key": list(self.table.primary_key),
            "regions": [self._region(region) for region in self.work.values()],
            "mem_wals": [state.to_json() for state in self.mem_wals[: self.limit]],
            "indexes": [index.to_json() for index in self.indexes],
            "backlog": backlog_json(self.work),
            "emptied": None if emptied is None else document(emptied, "source", restore=emptied.source),
            "versions": self.versions.to_json(),
            "truncated": len(self.mem_wals) > self.limit,
        }

    def _region(self, work: RegionWork) -> dict[str, Any]:
        states = Counter(mem_wal.state for mem_wal in work.mem_wals)
        done = [mem_wal.id.generation for mem_wal in work.mem_wals if mem_wal.state is State.MERGED]
        return {
            "region_id": work.region,
            "merged_generation": max(done, default=None),
            "current_generation": work.mem_wals[-1].id.generation,
            "generation_counts": {state.name.lower(): states[state] for state in State},
            "out_of_order": disorder(work.mem_wals, work.region),
            "error": None if work.blocked is None else work.blocked.to_json(),
        }

    def describe(self) -> str:
        """The inspection as text for people."""
        table = self.table
        key = ", ".join(table.primary_key) or "none is marked"
        fragments = counted(len(table.manifest.manifest.fragments), "fragment")
        rows = f"{counted(self.rows, 'row')} in {fragments}"
        about = f"legacy layout, version {table.version}, {rows}, primary key: {key}"
        lines = [table.location.uri, paragraph(about, indent="  "), paragraph(self._behind(), indent="  ")]
        if self.emptied is not None:
            error = self.emptied.error("merge")
            lines += ["", paragraph(f"PROBLEM: {error} {error.remedy}")]
        if self.mem_wals:
            lines += ["", self._grid()]
            lines += self._notes()
        for work in self.work.values():
            if work.blocked is not None:
                fault = work.blocked.error
                what = f"PROBLEM in region {work.region!r} ({fault.reason}): {fault} {fault.remedy}"
                lines += ["", paragraph(what)]
            elif (problem := disorder(work.mem_wals, work.region)) is not None:
                lines += ["", paragraph(f"PROBLEM in region {work.region!r}: {problem}")]
        return "\n".join(lines)

    def _behind(self) -> str:
        pending = sum(len(region_work.pending) for region_work in self.work.values())
        waiting = sum(len(region_work.waiting) for region_work in self.work.values())
        more = f" {counted(waiting, 'MemWAL')} not flushed yet." if waiting else ""
        if not pending:
            return f"No flushed MemWAL is unmerged.{more} Current pylance cannot write to this table: migrate it."
        waits = f"{counted(pending, 'flushed MemWAL')} to be merged"
        return f"{waits}.{more} Current pylance cannot write: merge and migrate."

    def _grid(self) -> str:
        rows = [
            (
                state.mem_wal.id.region,
                str(state.mem_wal.id.generation),
                state.mem_wal.state.name,
                state.mem_wal.owner_id,
                state.mem_wal.wal_entries.text(),
                state.mem_wal.wal_entries.encoding,
                str(state.mem_wal.last_updated_dataset_version),
                "" if state.flushed is None else state.flushed.meaning or "unknown",
            )
            for state in self.mem_wals[: self.limit]
        ]
        columns = ("region", "generation", "state", "owner", "WAL entries", "encoding", "version", "FLUSHED means")
        shown = grid(columns, rows, words=("region", "state", "owner", "WAL entries", "encoding", "FLUSHED means"))
        more = len(self.mem_wals) - self.limit
        return shown + (f"\nand {more:,} more (--limit)." if more > 0 else "")

    def _notes(self) -> list[str]:
        """The locations of each MemWAL's rows and log, and the reason for the meaning of FLUSHED."""
        lines = [""]
        for state in self.mem_wals[: self.limit]:
            mem_wal = state.mem_wal
            where = f"{mem_wal.id.region} {mem_wal.id.generation}: MemTable {mem_wal.mem_table_location}"
            lines.append(paragraph(f"{where}, WAL {mem_wal.wal_location}", indent="  ", hanging="  "))
        releases = sorted({state.flushed.release or "unknown" for state in self.mem_wals if state.flushed is not None})
        if releases:
            text = "FLUSHED means merged for Lance 0.31 to 0.35, and not merged yet since 0.36; these were written by"
            lines += ["", paragraph(f"{text} {', '.join(releases)}.")]
        return lines


@names_damage
def plan(table: Table, options: InspectOptions | None = None, context: RunContext | None = None) -> LegacyInspection:
    """One version of a table. Raises ``TableCorruptError`` where its legacy details do not decode."""
    del context
    mem_wals = mem_wals_of(table)
    meanings = Meanings(table)
    states = tuple(
        MemWalState(mem_wal, meanings.of(mem_wal) if mem_wal.state is State.FLUSHED else None)
        for mem_wal in sorted(mem_wals, key=lambda mem_wal: mem_wal.id)
    )
    work, limit = read_work(mem_wals, meanings), (options or InspectOptions()).limit
    emptied, indexes, versions = find_emptied(table), index_states(table, {}), check_versions(table)
    return LegacyInspection(table, states, work, emptied, indexes, versions, limit)


apply = plan
