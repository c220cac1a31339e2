"""Read and encode region snapshots, and verify the catch-up entries of indexes: both are in the MemWAL index.

A snapshot speeds up reads and may be stale; each region's manifest is authoritative (S0-017). With it, a reader finds
the regions by opening the table, without a listing. It is stored inside the index or in a file of it.

A catch-up entry (``index_catchup``) must never exceed the coverage of its index. Not all writers maintain the list:
pylance derives it at some commits, clears it at others, and leaves it unchanged when an update moves rows out of an
index; older releases and the region layout do not derive it at all. So the fragments are authoritative here.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.blobs import lance_bytes, lance_rows
from memwal_ops.formats.lance.files.version_files import list_versions, read_version_manifest
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, base_indexes, coverage
from memwal_ops.formats.lance.indexes.index_faults import fault_of
from memwal_ops.formats.lance.wire import memwal_index
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


# Readable by every release with MemWAL.
_FILE_VERSION = "2.0"
_WHAT = "the region snapshot"


@dataclass(frozen=True)
class Snapshot:
    """The region snapshot of one version.

    ``timestamp_millis``: when it was taken, Unix milliseconds. ``stored``: ``inline`` or ``external``. ``rows``: as
    stored, one per region.
    """

    timestamp_millis: int
    stored: str
    rows: pa.Table

    @cached_property
    def regions(self) -> tuple[memwal_index.RegionRow, ...]:
        """The regions, in the order of the rows."""
        return memwal_index.decode_rows(self.rows)


def snapshot_path(uuid: UUID) -> str:
    """The path of the rows of a snapshot that is not inline (S0-104)."""
    return f"{INDICES_FOLDER}/{uuid}/index.lance"


def is_external(table: Table) -> bool:
    """Whether, according to the MemWAL index, the rows are in a file named by the index's id."""
    return table.index.inline_snapshots is None and table.index.num_regions > 0


def read_snapshot(table: Table) -> Snapshot | None:
    """The table's region snapshot; None if none was taken yet. At most one request.

    Raises ``InvalidFormatError``: the stored bytes are not a Lance file, or have columns of neither layout.
    """
    index = table.index
    if index.inline_snapshots is not None:
        return Snapshot(index.snapshot_ts_millis or 0, "inline", decode_file(index.inline_snapshots))
    if not is_external(table):
        return None
    try:
        data = table.store.get(snapshot_path(index.uuid))
    except ObjectNotFoundError:
        return None  # a release that records the number of regions without a snapshot
    return Snapshot(index.snapshot_ts_millis or 0, "external", decode_file(data))


@dataclass(frozen=True, slots=True)
class Known:
    """A region's state in a snapshot. By it an unchanged manifest is recognized.

    ``row`` is its row; the other attributes are those of the manifest.
    """

    version: int
    replay_after_wal_id: int | None
    wal_id_last_seen: int | None
    row: memwal_index.Row


def known_regions(snapshot: Snapshot) -> Mapping[UUID, Known]:
    """Per region its state in the snapshot.

    Rows of the region layout contain it. Rows of the shard layout do not: there it is in the schema's metadata, which
    snapshots of other programs do not have. Raises ``InvalidFormatError``: a row does not decode.
    """
    states = memwal_index.states_of(snapshot.rows)
    known: dict[UUID, Known] = {}
    for region, row in zip(snapshot.regions, memwal_index.as_rows(snapshot.rows), strict=True):
        if region.state is not None:
            state = region.state
            known[region.region_id] = Known(state.version, state.replay_after_wal_id, state.wal_id_last_seen, row)
        elif str(region.region_id) in states:
            version, replayed, seen = states[str(region.region_id)]
            known[region.region_id] = Known(version, replayed, seen, row)
    return known


def rows_without_values(rows: pa.Table) -> pa.Table:
    """The rows without the columns of region values, and without the metadata of other programs.

    Raises ``InvalidFormatError``: the columns are of no known layout.
    """
    return memwal_index.with_states_alone(memwal_index.without_fields(rows), rows)


def encode_file(rows: pa.Table) -> bytes:
    """Encode the rows as a Lance file; without rows, an empty file with the schema (S0-070)."""
    return lance_bytes(rows, _FILE_VERSION, _WHAT)


def decode_file(data: bytes) -> pa.Table:
    """Decode the rows of a Lance file. Raises ``InvalidFormatError`` if it is not one."""
    return lance_rows(data, _WHAT, max_rows=len(data))


def catchup_entry(table: Table, covered: frozenset[int], *, progress_when_built: Mapping[UUID, int]) -> dict[UUID, int]:
    """The correct catch-up entry of an index that covers ``covered`` in ``table``'s version.

    ``table``: the version for which the entry is. ``covered``: fragment ids. ``progress_when_built``: merge progress of
    a version of which it covers all fragments that still exist.
    """
    merged = table.index.merged_generations
    if coverage(covered, table.manifest).complete:
        return dict(merged)
    return _at_most(progress_when_built, merged)


def covered_generations(table: Table) -> dict[str, dict[UUID, int]]:
    """Per base index and region the generation up to which a query by that index needs no generation (S0-184, S0-188).

    The lower of the generation by its fragments and by ``index_catchup``, if that has an entry: a
    reader that uses the list would read the generation. None of an index that lacks rows which it claims to cover.
    """
    merged = table.index.merged_generations
    if not merged:
        return {name: {} for name in base_indexes(table)}
    generations: dict[str, dict[UUID, int]] = {}
    for name, index in base_indexes(table).items():
        fault = fault_of(table, index)
        if fault is not None and fault.proven:
            generations[name] = dict.fromkeys(merged, 0)
            continue
        uncovered = coverage(index.covered, table.manifest).uncovered
        reached = dict(merged) if not uncovered else _at_most(_progress_covered(table, index.covered)[0], merged)
        recorded = table.index.index_catchup.get(name)
        generations[name] = reached if recorded is None else _at_most(recorded, reached)
    return generations


def stale_entries(table: Table, names: Iterable[str]) -> dict[str, dict[UUID, int]]:
    """The stale catch-up entries of the indexes ``names``, each with the correct entry.

    An absent index is caught up according to the specification (S0-079), and not caught up
    according to pylance; in the region layout, absence is therefore stale if the index is behind.
    """
    indexes = base_indexes(table)
    stale: dict[str, dict[UUID, int]] = {}
    for name in names:
        if name not in indexes or not table.index.merged_generations:
            continue
        recorded = table.index.index_catchup.get(name)
        correct = _correct_entry(table, indexes[name], recorded)
        if correct is not None and correct != recorded:
            stale[name] = correct
    return stale


def history_shows_coverage(table: Table, index: BaseIndex) -> bool:
    """Whether the versions that are left show up to where an index covers what was merged.

    They do not where the fragments of earlier versions were rewritten since, or such versions have expired.
    """
    return _progress_covered(table, index.covered)[1]


def _correct_entry(table: Table, index: BaseIndex, recorded: Mapping[UUID, int] | None) -> dict[UUID, int] | None:
    """The correct entry of an index; None: the recorded one is kept."""
    merged = table.index.merged_generations
    uncovered = coverage(index.covered, table.manifest).uncovered
    if not uncovered:
        return dict(merged)
    if recorded is None and not table.layout.unlisted_index_is_caught_up:
        return None
    if recorded is not None and not any(recorded.values()):
        return None  # already zero for all regions
    allowed, is_exact = _progress_covered(table, index.covered)
    # The history does not reach back that far, or lacks versions that may have had more. A fragment that is newer
    # than all covered ones was added later; an older one was covered when the entry was written, and is not any more.
    if not is_exact and recorded is not None and min(uncovered) > max(index.covered, default=-1):
        return None
    if recorded is not None and all(recorded[region_id] <= allowed.get(region_id, 0) for region_id in recorded):
        return None
    return _at_most(allowed if recorded is None else recorded, _at_most(allowed, merged))


def _at_most(progress: Mapping[UUID, int], limit: Mapping[UUID, int]) -> dict[UUID, int]:
    """Each region of ``limit`` with its progress, or the limit where that is lower."""
    return {region_id: min(progress.get(region_id, 0), generation) for region_id, generation in limit.items()}


def _progress_covered(table: Table, covered: frozenset[int]) -> tuple[Mapping[UUID, int], bool]:
    """Merge progress of the newest version left whose fragments are all covered, and whether no later one is missing.

    Otherwise it is the least that it may be: later versions were expired, or none at all is left (empty).

    A fragment's id does not determine the age of its rows: a compaction moves old rows to a new id, so the
    version before the oldest uncovered fragment may have had the same rows under another id that is not
    covered either. Each such version is found by bisection (ids only rise), one manifest for each step;
    if it has uncovered fragments, those are older, and the search continues before them.
    """
    versions = sorted(version for version in list_versions(table.store).numbered if version < table.version)
    known: dict[int, VersionManifest | None] = {table.version: table.manifest}

    def read(version: int) -> VersionManifest | None:
        if version not in known:
            try:
                known[version] = read_version_manifest(table.store, version, table.naming)
            except ObjectNotFoundError:
                known[version] = None  # cleaned up meanwhile, with all older ones
        return known[version]

    candidate, is_exact = table.manifest, True
    while uncovered := coverage(covered, candidate).uncovered:
        oldest = min(uncovered)
        # No later version: there a compaction may have removed the fragment, and the search would never end.
        low, high = 0, (top := bisect_left(versions, candidate.manifest.version))
        while low < high:
            middle = (low + high) // 2
            version = read(versions[middle])
            if version is not None and any(fragment.id == oldest for fragment in version.manifest.fragments):
                high = middle
            else:
                low = middle + 1
        # The versions before ``low`` did not have it yet, or no longer exist.
        manifests = (read(number) for number in reversed(versions[:low]))
        earlier = next((manifest for manifest in manifests if manifest is not None), None)
        if earlier is None or any(fragment.id == oldest for fragment in earlier.manifest.fragments):
            return {}, False  # no version is left; or the ids are not in order here, as a version was restored
        first_with_it = versions[low] if low < top else candidate.manifest.version
        is_exact = is_exact and earlier.manifest.version + 1 == first_with_it
        candidate = earlier
    return memwal_index.merge_progress(candidate.indexes), is_exact
