"""The inspect job: what a table is, how far behind it is, and what is wrong with it. Reads only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.backlog import Backlog, Blocked, RegionBacklog, read_backlog
from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.generations import generation_ref
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.snapshots import is_external
from memwal_ops.core.wal import last_wal_entry
from memwal_ops.errors import GenerationMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.table import Table
    from memwal_ops.format.region_manifest import FlushedGeneration

_CONCURRENT_LISTINGS = 8
_CONCURRENT_REGIONS = 16


@dataclass(frozen=True, slots=True)
class GenerationState:
    """One listed generation. ``state`` is pending, merged, or missing (pending without a directory)."""

    flushed: FlushedGeneration
    state: str

    def to_json(self) -> dict[str, object]:
        """The ``generations`` entry; ``rows`` and ``bytes`` are null where the writer kept no account."""
        ref = self.flushed
        return {
            "generation": ref.generation,
            "path": ref.path,
            "rows": ref.physical_rows,
            "bytes": ref.accounted_bytes,
            "state": self.state,
        }


@dataclass(frozen=True, slots=True)
class RegionState:
    """One region, and the reason why it cannot be read or merged to its end, as far as a listing shows it.

    ``unflushed_wal_entries``: entries of its log behind the last flushed one, those with which a writer
    claims the region included; None where its manifest cannot be read.
    """

    region_id: UUID
    backlog: RegionBacklog | None
    generations: tuple[GenerationState, ...]
    unflushed_wal_entries: int | None
    fault: Blocked | None

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry."""
        manifest = None if self.backlog is None else self.backlog.manifest
        return {
            "region_id": str(self.region_id),
            "spec_id": None if manifest is None else manifest.region_spec_id,
            "status": "unreadable" if manifest is None else manifest.status.name.lower(),
            "writer_epoch": None if manifest is None else manifest.writer_epoch,
            "manifest_version": None if manifest is None else manifest.version,
            "current_generation": None if manifest is None else manifest.current_generation,
            "replay_after_wal_id": None if manifest is None else manifest.replay_after_wal_id,
            "wal_id_last_seen": None if manifest is None else manifest.wal_id_last_seen,
            "unflushed_wal_entries": self.unflushed_wal_entries,
            "merged_generation": None if self.backlog is None else self.backlog.merged,
            "generations": [one.to_json() for one in self.generations],
            "error": None if self.fault is None else self.fault.to_json(),
        }


@dataclass(frozen=True, slots=True)
class IndexState:
    """One base index, by the fragments that its segments cover."""

    name: str
    type: str
    covered_fragments: int
    uncovered_fragments: int
    uncovered_rows: int
    index_catchup: Mapping[UUID, int]

    def to_json(self) -> dict[str, object]:
        """The ``indexes`` entry."""
        return {
            "name": self.name,
            "type": self.type,
            "covered_fragments": self.covered_fragments,
            "uncovered_fragments": self.uncovered_fragments,
            "uncovered_rows": self.uncovered_rows,
            "caught_up": self.uncovered_fragments == 0,
            "index_catchup": {str(region_id): one for region_id, one in sorted(self.index_catchup.items())},
        }


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that ``inspect`` shows of one version."""

    table: Table
    rows: int
    fragments: int
    regions: tuple[RegionState, ...]
    indexes: tuple[IndexState, ...]
    backlog: Backlog

    def to_json(self) -> dict[str, object]:
        """The document of ``inspect --json``."""
        index = self.table.index
        stored = "external" if is_external(self.table) else "none"
        if index.inline_snapshots is not None:
            stored = "inline"
        return {
            "uri": self.table.location.uri,
            "layout": self.table.layout.value,
            "version": self.table.version,
            "rows": self.rows,
            "fragments": self.fragments,
            "primary_key": list(self.table.primary_key),
            "regions": [one.to_json() for one in self.regions],
            "indexes": [one.to_json() for one in self.indexes],
            "snapshot": {
                "timestamp_millis": index.snapshot_ts_millis,
                "num_regions": index.num_regions,
                "stored": stored,
            },
            "backlog": self.backlog.to_json(),
            "strays": list(self.table.regions.strays),
        }


def inspect(table: Table) -> Inspection:
    """Look at one version of a table and at the newest state of its regions."""
    backlog = read_backlog(table)
    faults = {fault.region_id: fault for fault in backlog.blocked}
    region_ids = sorted({*backlog.regions, *faults})
    with ThreadPoolExecutor(_CONCURRENT_REGIONS) as pool:
        unflushed = pool.map(lambda region_id: _unflushed(table, backlog.regions.get(region_id)), region_ids)
        regions = tuple(
            _region(table, region_id, backlog.regions.get(region_id), entries, faults.get(region_id))
            for region_id, entries in zip(region_ids, unflushed, strict=True)
        )
    with lance_errors("read the fragments of", table.location.uri):
        fragments = {fragment.fragment_id: fragment.count_rows() for fragment in table.dataset.get_fragments()}
    return Inspection(table, sum(fragments.values()), len(fragments), regions, _indexes(table), backlog)


def _unflushed(table: Table, region: RegionBacklog | None) -> int | None:
    if region is None:
        return None
    manifest = region.manifest
    flushed, seen = manifest.replay_after_wal_id, manifest.wal_id_last_seen
    return last_wal_entry(table.store, manifest.region_id, flushed, seen, table.layout) - (flushed or 0)


def _region(
    table: Table, region_id: UUID, backlog: RegionBacklog | None, unflushed: int | None, fault: Blocked | None
) -> RegionState:
    """The region's state, with the first thing that a merge would stop at, as far as a listing shows it."""
    generations = _generations(table, backlog)
    gone = next((one.flushed for one in generations if one.state == "missing"), None)
    if gone is not None and (fault is None or fault.generation is None or gone.generation < fault.generation):
        ref = generation_ref(region_id, gone)
        fault = Blocked(
            region_id, gone.generation, GenerationMissingError(f"The directory of {ref} is not there or empty.")
        )
    return RegionState(region_id, backlog, generations, unflushed, fault)


def _generations(table: Table, region: RegionBacklog | None) -> tuple[GenerationState, ...]:
    if region is None:
        return ()

    def state(flushed: FlushedGeneration) -> GenerationState:
        if flushed.generation <= region.merged:
            return GenerationState(flushed, "merged")
        ref = generation_ref(region.manifest.region_id, flushed)
        stands = next(iter(table.store.list(ref.folder)), None) is not None
        return GenerationState(flushed, "pending" if stands else "missing")

    with ThreadPoolExecutor(_CONCURRENT_LISTINGS) as pool:
        return tuple(pool.map(state, region.manifest.flushed_generations))


def _indexes(table: Table) -> tuple[IndexState, ...]:
    states = []
    for index in base_indexes(table).values():
        behind = coverage(index.covered, table.manifest)
        missing = len(behind.uncovered)
        said = table.index.index_catchup.get(index.name, {})
        states.append(
            IndexState(index.name, index.type, behind.fragments - missing, missing, behind.uncovered_rows, said)
        )
    return tuple(states)
