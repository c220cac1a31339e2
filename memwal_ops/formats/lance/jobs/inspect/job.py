"""The inspect job: report a table's state, its backlog, and its faults. Reads only."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.generations.backlog import Backlog, Blocked, RegionBacklog, backlog_of, with_listed_log
from memwal_ops.formats.lance.generations.generation_files import checked_backlog
from memwal_ops.formats.lance.generations.wal import unflushed_entries
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.index_faults import fault_of
from memwal_ops.formats.lance.indexes.snapshots import is_external
from memwal_ops.formats.lance.jobs.inspect.text import describe
from memwal_ops.formats.lance.options import DEFAULT_INSPECT_LIMIT, InspectOptions
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.formats.lance.retention.unreadable_versions import check_versions
from memwal_ops.storage.api import LinkError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.generations.generation_files import CheckedBacklog, GenerationFiles
    from memwal_ops.formats.lance.indexes.index_faults import IndexFault
    from memwal_ops.formats.lance.retention.unreadable_versions import VersionsCheck
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration

# If not all generations fit the limit, the first ones in this order are reported.
_STATES = ("missing", "damaged", "pending", "merged")
_CONCURRENT_REGIONS = 16


@dataclass(frozen=True, slots=True)
class GenerationState:
    """One listed generation.

    ``state``: pending; merged; missing (not merged, and without a directory); damaged (not merged, with a manifest that
    does not decode, or a file that is missing or has another size).
    """

    flushed: FlushedGeneration
    state: str

    def to_json(self) -> dict[str, object]:
        """The ``generations`` entry; ``rows`` and ``bytes`` are null if the writer did not record them."""
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
    """One region, and the first fault in its listing that prevents reading or merging it.

    ``unflushed_wal_entries``: entries of its log after the last flushed one, including those with which a writer
    claims the region; None if its manifest cannot be read. ``counts``: per state how many generations
    the region lists, of which ``generations`` are the first.
    """

    region_id: UUID
    backlog: RegionBacklog | None
    counts: Mapping[str, int]
    generations: tuple[GenerationState, ...]
    unflushed_wal_entries: int | None
    fault: Blocked | None

    @property
    def truncated(self) -> bool:
        """Whether the region lists more than ``generations``."""
        return sum(self.counts.values()) > len(self.generations)

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
            "generation_counts": {state: self.counts.get(state, 0) for state in _STATES},
            "generations": [generation.to_json() for generation in self.generations],
            "truncated": self.truncated,
            "error": None if self.fault is None else self.fault.to_json(),
        }


@dataclass(frozen=True, slots=True)
class IndexState:
    """One base index, by the fragments that its segments cover; ``fault``: why it may lack rows of them."""

    name: str
    type: str
    covered_fragments: int
    uncovered_fragments: int
    uncovered_rows: int
    index_catchup: Mapping[UUID, int]
    fault: IndexFault | None

    def to_json(self) -> dict[str, object]:
        """The ``indexes`` entry."""
        return {
            "name": self.name,
            "type": self.type,
            "covered_fragments": self.covered_fragments,
            "uncovered_fragments": self.uncovered_fragments,
            "uncovered_rows": self.uncovered_rows,
            "caught_up": self.uncovered_fragments == 0,
            "index_catchup": {
                str(region_id): generation for region_id, generation in sorted(self.index_catchup.items())
            },
            "problem": None if self.fault is None else f"It {self.fault.why}.",
        }


@dataclass(frozen=True, slots=True)
class Inspection:
    """The report of ``inspect`` for one version."""

    table: Table
    rows: int
    fragments: int
    regions: tuple[RegionState, ...]
    indexes: tuple[IndexState, ...]
    backlog: Backlog
    versions: VersionsCheck
    limit: int

    decision = "inspected"
    exit_code = 0

    @property
    def faults(self) -> tuple[Blocked, ...]:
        """The faults of the regions that have one."""
        return tuple(region.fault for region in self.regions if region.fault is not None)

    def describe(self) -> str:
        """The inspection as text for people."""
        return describe(self)

    def to_json(self) -> dict[str, object]:
        """The document of ``inspect --json``."""
        index = self.table.index
        stored = "external" if is_external(self.table) else "none"
        if index.inline_snapshots is not None:
            stored = "inline"
        return {
            "uri": self.table.location.uri,
            "layout": self.table.layout.name,
            "version": self.table.version,
            "rows": self.rows,
            "fragments": self.fragments,
            "primary_key": list(self.table.primary_key),
            "regions": [region.to_json() for region in self.regions],
            "indexes": [index.to_json() for index in self.indexes],
            "snapshot": {
                "timestamp_millis": index.snapshot_ts_millis,
                "num_regions": index.num_regions,
                "stored": stored,
            },
            "backlog": self.backlog.to_json(),
            "versions": self.versions.to_json(),
            "strays": list(self.table.regions.strays[: self.limit]),
            "truncated": len(self.table.regions.strays) > self.limit
            or any(region.truncated for region in self.regions),
        }


@names_damage
def plan(table: Table, options: InspectOptions | None = None, context: RunContext | None = None) -> Inspection:
    """One version of a table, and the newest state of its regions."""
    del context
    return inspect(table, limit=(options or InspectOptions()).limit)


apply = plan


def inspect(table: Table, *, limit: int = DEFAULT_INSPECT_LIMIT) -> Inspection:
    """One version of a table, and the newest state of its regions.

    Args:
        limit: the maximum of generations, and of strays, in the report; missing and unmerged generations come first.

    Requests: those of the backlog; for each region with unmerged generations a listing, and one for each of these; and
    for every region those to find the end of its log.
    """
    table = with_listed_log(table)
    checked = checked_backlog(table, backlog_of(table))
    backlog = checked.backlog
    faults = {fault.region_id: fault for fault in backlog.blocked}
    region_ids = sorted({*backlog.regions, *faults})
    with ThreadPoolExecutor(_CONCURRENT_REGIONS) as pool:
        unflushed = pool.map(lambda region_id: _unflushed(table, backlog.regions.get(region_id)), region_ids)
        regions = tuple(
            _region(region_id, backlog.regions.get(region_id), entries, faults.get(region_id), checked, limit)
            for region_id, entries in zip(region_ids, unflushed, strict=True)
        )
    regions = _bounded(regions, limit)
    versions = check_versions(table)
    fragments = len(table.manifest.manifest.fragments)
    return Inspection(table, _rows(table), fragments, regions, _indexes(table), backlog, versions, limit)


def _rows(table: Table) -> int:
    fragments = table.manifest.manifest.fragments
    if all(one.physical_rows for one in fragments):
        return sum(one.physical_rows - one.deletion_file.num_deleted_rows for one in fragments)
    with lance_errors("read the fragments of", table.location.uri):  # older releases did not record their rows
        return int(table.dataset.count_rows())


def _bounded(regions: tuple[RegionState, ...], limit: int) -> tuple[RegionState, ...]:
    """At most ``limit`` generations of all regions together."""
    ranked = [
        (_STATES.index(generation.state), at, generation)
        for at, region in enumerate(regions)
        for generation in region.generations
    ]
    kept: dict[int, list[GenerationState]] = {}
    for _, at, generation in sorted(ranked, key=lambda entry: entry[:2])[:limit]:
        kept.setdefault(at, []).append(generation)
    return tuple(
        replace(
            region, generations=tuple(sorted(kept.get(at, ()), key=lambda kept_state: kept_state.flushed.generation))
        )
        for at, region in enumerate(regions)
    )


def _unflushed(table: Table, region: RegionBacklog | None) -> int | LinkError | None:
    if region is None:
        return None
    try:
        return unflushed_entries(table, region.manifest)
    except LinkError as error:
        return error


def _region(
    region_id: UUID,
    backlog: RegionBacklog | None,
    unflushed: int | LinkError | None,
    fault: Blocked | None,
    checked: CheckedBacklog,
    limit: int,
) -> RegionState:
    """The region's state, with the first fault that would block a merge, as far as it shows without reading rows."""
    if isinstance(unflushed, LinkError):
        fault, unflushed = fault or Blocked(region_id, None, unflushed), None
    counts, generations = _generations(backlog, checked.files.get(region_id), limit)
    return RegionState(region_id, backlog, counts, generations, unflushed, fault)


def _generations(
    region: RegionBacklog | None, files: GenerationFiles | None, limit: int
) -> tuple[Mapping[str, int], tuple[GenerationState, ...]]:
    """The number of generations per state, and the first ``limit`` of each."""
    if region is None:
        return {}, ()
    counts: Counter[str] = Counter()
    first: list[GenerationState] = []
    for flushed in region.manifest.flushed_generations:
        state = "merged" if flushed.generation <= region.merged or files is None else files.state(flushed.generation)
        counts[state] += 1
        if counts[state] <= limit:
            first.append(GenerationState(flushed, state))
    return counts, tuple(first)


def _indexes(table: Table) -> tuple[IndexState, ...]:
    states = []
    for index in base_indexes(table).values():
        covers = coverage(index.covered, table.manifest)
        missing = len(covers.uncovered)
        recorded = table.index.index_catchup.get(index.name, {})
        covered, fault = covers.fragments - missing, fault_of(table, index)
        states.append(IndexState(index.name, index.type, covered, missing, covers.uncovered_rows, recorded, fault))
    return tuple(states)
