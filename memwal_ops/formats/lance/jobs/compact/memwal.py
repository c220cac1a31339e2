"""Restore what pylance's compaction changed in the MemWAL index, and check that merge progress did not decrease.

pylance clears ``index_catchup`` and gives the index another id, under which a snapshot's file is not found. One more
commit restores both, with what concurrent commits changed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import InvariantViolatedError, ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange
from memwal_ops.formats.lance.files.versions import read_version_manifest
from memwal_ops.formats.lance.indexes.snapshots import is_external, snapshot_path
from memwal_ops.formats.lance.jobs.catchup.publishing import publish_change
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.memwal_index import decode_memwal_index, find_memwal_entry, with_catchup

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.commit_retry import CommitRetry
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


def check_progress(before: Mapping[UUID, int], after: Mapping[UUID, int], table: Table) -> None:
    """Raise ``InvariantViolatedError`` if the merge progress of a region is lower than before."""
    lower = sorted(region_id for region_id, merged in before.items() if after.get(region_id, 0) < merged)
    if lower:
        raise InvariantViolatedError(
            f"After the compaction of {table.location.uri} the merge progress of {', '.join(map(str, lower))} "
            "is lower than before.",
            remedy="Run memwal-ops merge: merging again is idempotent. Then report this with the table's _versions/.",
        )


def clear_coverage(table: Table, note: CommitNote, retry: CommitRetry) -> Table:
    """Remove the fragment bitmap of the MemWAL index, which Lance refuses to compact; return the newest version.

    Earlier releases of memwal-ops created the index with one (:func:`with_details`).
    """

    def change(newest: Table) -> IndexChange | None:
        entry = find_memwal_entry(newest.manifest.indexes)
        return IndexChange(newest.index.details) if entry is not None and entry.fragment_bitmap else None

    return publish_change(table, change, note, retry)


def restore_memwal_index(table: Table, newest: Table, version: int, note: CommitNote, retry: CommitRetry) -> Table:
    """Undo pylance's changes of the MemWAL index between ``table`` and ``version``; return the resulting version.

    That is ``newest`` itself for a table without such an index.

    A rewrite moves rows without changes, and never joins fragments that different indexes cover, so that the
    ``index_catchup`` of the version before is still correct.
    """
    if find_memwal_entry(table.manifest.indexes) is None:
        return newest
    try:
        wanted, snapshot_id, landed = _replay(table, version)
    except ObjectNotFoundError:
        return newest  # cleaned up already; catch-up and the next snapshot restore it
    after, segments = landed.index, _segments(landed.manifest)

    def change(table: Table) -> IndexChange | None:
        index, current = table.index, _segments(table.manifest)
        details = _with_changes(wanted, after.details, index.details)
        if index.index_catchup == after.index_catchup:
            stale = {
                entry.index_name: None
                for entry in details.index_catchup
                if current.get(entry.index_name, set()) != segments.get(entry.index_name)
            }
            details = with_catchup(details, stale)
        path = snapshot_path(snapshot_id)
        moved = is_external(table) and index.uuid == after.uuid != snapshot_id and table.store.head(path) is not None
        if details == index.details and not moved:
            return None
        return IndexChange(details, uuid=snapshot_id if moved else None)

    return publish_change(newest, change, note, retry)


@dataclass(frozen=True, slots=True)
class _Step:
    """The parts of one version that are compared."""

    manifest: VersionManifest
    index: MemWalIndex

    def is_reservation_after(self, parent: _Step) -> bool:
        """Whether it only reserves fragment ids for pylance, which also rewrites the MemWAL index."""
        mine, other = self.manifest.manifest, parent.manifest.manifest
        return mine.fragments == other.fragments and mine.max_fragment_id > other.max_fragment_id


def _replay(table: Table, version: int) -> tuple[memwal_pb2.MemWalIndexDetails, UUID, _Step]:
    """The details and the id that the MemWAL index would have in ``version`` without the compaction.

    Those of ``table``, with concurrent changes in the versions between; and the version itself.

    Raises:
        ObjectNotFoundError: a version is missing.
        InvariantViolatedError: the version has lower merge progress than the one before.
    """
    details, index_id = table.index.details, table.index.uuid
    parent = step = _Step(table.manifest, table.index)
    for number in range(table.version + 1, version + 1):
        parent, step = step, _read(table, number)
        if number < version and not step.is_reservation_after(parent):
            details = _with_changes(details, parent.index.details, step.index.details)
            if step.index.uuid != parent.index.uuid:
                index_id = step.index.uuid
    check_progress(parent.index.merged_generations, step.index.merged_generations, table)
    return details, index_id, step


def _with_changes(
    details: memwal_pb2.MemWalIndexDetails, old: memwal_pb2.MemWalIndexDetails, new: memwal_pb2.MemWalIndexDetails
) -> memwal_pb2.MemWalIndexDetails:
    """A copy of ``details`` with the value of ``new`` in each field that differs between ``old`` and ``new``."""
    changed = memwal_pb2.MemWalIndexDetails()
    changed.CopyFrom(details)  # also unknown fields, which pylance drops when it rewrites the details
    for field_of in changed.DESCRIPTOR.fields:
        name = field_of.name
        if _only(new, name) != _only(old, name):
            changed.ClearField(name)
            changed.MergeFrom(_only(new, name))
    return changed


def _only(details: memwal_pb2.MemWalIndexDetails, name: str) -> memwal_pb2.MemWalIndexDetails:
    """A copy of the details with one field only."""
    copy = memwal_pb2.MemWalIndexDetails()
    for field_of, value in details.ListFields():
        if field_of.name == name:
            if field_of.is_repeated:
                getattr(copy, name).MergeFrom(value)
            else:
                setattr(copy, name, value)
    return copy


def _read(table: Table, version: int) -> _Step:
    manifest = read_version_manifest(table.store, version, table.naming)
    entry = find_memwal_entry(manifest.indexes)
    if entry is None:
        raise InvariantViolatedError(f"Version {version} of {table.location.uri} has no MemWAL index.")
    return _Step(manifest, decode_memwal_index(entry))


def _segments(manifest: VersionManifest) -> dict[str, set[tuple[bytes, bytes]]]:
    """Ids and fragments of the segments of each index; an update that removes fragments may keep the id."""
    segments: dict[str, set[tuple[bytes, bytes]]] = {}
    for entry in [] if manifest.indexes is None else manifest.indexes.indices:
        segments.setdefault(entry.name, set()).add((entry.uuid.uuid, entry.fragment_bitmap))
    return segments
