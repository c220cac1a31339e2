"""The backlog figures of our own jobs: what triggers compare and metrics show. Reads only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.backlog import read_backlog
from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.generations import generation_ref
from memwal_ops.core.versions import VERSIONS_FOLDER
from memwal_ops.format.names import parse_version_manifest_name
from memwal_ops.jobs.compact import DEFAULT_TARGET_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.backlog import RegionBacklog
    from memwal_ops.core.generations import GenerationRef
    from memwal_ops.core.table import Table

MERGE = {
    "generations": "count",
    "rows": "count",
    "bytes": "bytes",
    "oldest_age": "seconds",
    "regions_behind": "count",
    "blocked_regions": "count",
}
CATCHUP = {"uncovered_rows": "count", "uncovered_fragments": "count"}
COMPACT = {"fragments": "count", "small_fragments": "count"}
SNAPSHOT = {"snapshot_age": "seconds"}
EXPIRE = {"versions": "count"}
_MOST_ASKED = 4
GC = {"merged_generations": "count"}


def merge(table: Table) -> Mapping[str, float]:
    """What waits to be merged, and since when the oldest of it does."""
    backlog = read_backlog(table)
    sizes = backlog.to_json()
    ages: list[float] = []
    gone: set[UUID] = set()
    for region_id, region in backlog.regions.items():
        for ref in _waiting(region)[:_MOST_ASKED]:
            age = _age(table, ref)
            if age is not None:
                ages.append(age)
                break
            gone.add(region_id)
    return {
        "generations": sizes["generations"],
        "rows": sizes["rows"],
        "bytes": sizes["bytes"],
        "oldest_age": max(ages, default=0.0),
        "regions_behind": sizes["regions"],
        "blocked_regions": len({fault.region_id for fault in backlog.blocked} | gone),
    }


def catchup(table: Table) -> Mapping[str, float]:
    """Rows and fragments that an index does not cover; those of the index that is furthest behind."""
    behind = [coverage(index.covered, table.manifest) for index in base_indexes(table).values()]
    return {
        "uncovered_rows": max((one.uncovered_rows for one in behind), default=0),
        "uncovered_fragments": max((len(one.uncovered) for one in behind), default=0),
    }


def compact(table: Table) -> Mapping[str, float]:
    """Base fragments, and those below the size that a compaction aims at by default."""
    fragments = table.manifest.manifest.fragments
    small = sum(fragment.physical_rows < DEFAULT_TARGET_ROWS for fragment in fragments)
    return {"fragments": len(fragments), "small_fragments": small}


def snapshot(table: Table) -> Mapping[str, float]:
    """How old the snapshot of the regions is; where there is none, as old as time."""
    taken = (table.index.snapshot_ts_millis or 0) / 1000
    return {"snapshot_age": max(0.0, datetime.now(UTC).timestamp() - taken)}


def expire(table: Table) -> Mapping[str, float]:
    """Base versions that stand."""
    names = (parse_version_manifest_name(meta.path.rsplit("/", 1)[-1]) for meta in table.store.list(VERSIONS_FOLDER))
    return {"versions": sum(name is not None and not name.detached for name in names)}


def gc(table: Table) -> Mapping[str, float]:
    """Generations that are merged, and still on a region's list."""
    regions = read_backlog(table).regions.values()
    return {
        "merged_generations": sum(
            flushed.generation <= region.merged for region in regions for flushed in region.manifest.flushed_generations
        )
    }


def _waiting(region: RegionBacklog) -> list[GenerationRef]:
    """What a region lists above its progress, in order; what waits behind one that is missing has an age, too."""
    listed = sorted(region.manifest.flushed_generations, key=lambda flushed: flushed.generation)
    region_id = region.manifest.region_id
    return [generation_ref(region_id, flushed) for flushed in listed if flushed.generation > region.merged]


def _age(table: Table, ref: GenerationRef) -> float | None:
    """Seconds since a generation was flushed, by its oldest file; None where it has none: it is gone."""
    written = [meta.last_modified for meta in table.store.list(ref.folder)]
    return max(0.0, (datetime.now(UTC) - min(written)).total_seconds()) if written else None
