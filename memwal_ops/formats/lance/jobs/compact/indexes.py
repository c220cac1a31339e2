"""On tables with stable row ids, exclude rows that a compaction dropped from the results of indexes.

On such tables pylance's compaction does not change the files of indexes: a vector or full-text index still has the
dropped rows. A query for the best k rows gets k from the index, then drops those that no longer exist, and so returns
fewer rows, or none. pylance excludes dropped rows beforehand if a fragment that a segment covers has deleted rows,
or does not exist any more. After a compaction neither is the case. Therefore the id of a rewritten fragment that had
deleted rows is added to the segment's bitmap. The bitmap stays correct: the segment covered that fragment, and its
id is never reused. Where nothing was dropped, the bitmap stays as pylance wrote it: searches that exclude rows are
slower, and with an HNSW index those of pylance up to 8 never end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import IndexChange
from memwal_ops.formats.lance.commit.publication import CommitLostError
from memwal_ops.formats.lance.commit.rebased_commit import commit_coverage
from memwal_ops.formats.lance.files.versions import read_version_manifest
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, covered_by
from memwal_ops.formats.lance.indexes.index_arguments import value_kind
from memwal_ops.formats.lance.jobs.catchup.publishing import publish_change
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.version_manifest import STABLE_ROW_IDS, encode_fragment_bitmap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.core.commit_retry import CommitRetry
    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

_FULL_TEXT = "Inverted"
_ZONES = frozenset({"ZONEMAP", "BLOOMFILTER"})
_EARLIER_VERSIONS = 16


def left_behind(table: Table) -> list[BaseIndex]:
    """The indexes that pylance does not move with rows: a compaction takes what it rewrites out of their coverage.

    Those of zones have no addresses of single rows; in an RTREE pylance changes none, where rows have addresses.
    """
    kinds = _ZONES if table.manifest.manifest.reader_feature_flags & STABLE_ROW_IDS else _ZONES | {"RTREE"}
    return [index for index in base_indexes(table).values() if value_kind(index) in kinds]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment's entry, unchanged and with the id of a rewritten fragment in its bitmap."""

    old: table_pb2.IndexMetadata
    new: table_pb2.IndexMetadata


def exclude_dropped_rows(table: Table, before: Table | None, note: CommitNote, retry: CommitRetry) -> Table:
    """Make pylance exclude dropped rows from the results of vector and full-text indexes; return the newest version.

    One commit, if such an index covered fragments that were rewritten, and its bitmap has none of their ids.

    Args:
        table: the newest version.
        before: the version from before the compaction. None: up to 16 earlier versions are read, to finish what a
            killed run left, or another program's compaction.
        note: the job and run of the commit.
        retry: counts commit conflicts and waits after each.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
    """
    if not table.log.strict_commits:
        while segments := _to_change(table, before):
            try:
                commit_coverage(table, [one.old for one in segments], [one.new for one in segments], note)
            except CommitLostError as error:
                table = retry.conflict(table, error)
            else:
                table = retry.landed(table)
        return table

    def change(newest: Table) -> IndexChange | None:
        segments = _to_change(newest, before)
        if not segments:
            return None
        removed = frozenset(UUID(bytes=one.old.uuid.uuid) for one in segments)
        return IndexChange(newest.index.details, added=tuple(one.new for one in segments), removed=removed)

    return publish_change(table, change, note, retry)


def without_dropped_rows(table: Table, before: Table) -> Iterator[table_pb2.IndexMetadata]:
    """The entries of a version that is not published yet which :func:`exclude_dropped_rows` will change, changed."""
    return (one.new for one in _to_change(table, before))


def unchecked_segments(table: Table) -> int:
    """The number of segments for which :func:`exclude_dropped_rows` reads earlier versions. No requests."""
    return len(_entries(table))


def _entries(table: Table) -> dict[bytes, table_pb2.IndexMetadata]:
    """The entries of segments of which all fragments exist, though the table once had others, which were compacted."""
    manifest = table.manifest.manifest
    existing = table.fragment_ids
    if not manifest.reader_feature_flags & STABLE_ROW_IDS or len(existing) > manifest.max_fragment_id:
        return {}
    return {
        entry.uuid.uuid: entry
        for index in base_indexes(table).values()
        if index.is_vector or index.type == _FULL_TEXT
        for entry in index.segments
        if covered_by([entry]) <= existing
    }


def _to_change(table: Table, before: Table | None) -> list[_Segment]:
    entries, existing = _entries(table), table.fragment_ids
    found = []
    for earlier in () if not entries else _earlier(table) if before is None else (before.manifest,):
        for entry in () if earlier.indexes is None else earlier.indexes.indices:
            if entry.uuid.uuid not in entries:
                continue
            rewritten = covered_by([entry]) - existing - _whole(earlier)
            if rewritten:
                old, new = entries.pop(entry.uuid.uuid), table_pb2.IndexMetadata()
                new.CopyFrom(old)
                new.fragment_bitmap = encode_fragment_bitmap(covered_by([old]) | {max(rewritten)})
                found.append(_Segment(old, new))
        if not entries:
            break
    return found


def _whole(manifest: VersionManifest) -> frozenset[int]:
    """Fragments of which no row is deleted: a compaction drops none of theirs."""
    return frozenset(one.id for one in manifest.manifest.fragments if not one.HasField("deletion_file"))


def _earlier(table: Table) -> Iterator[VersionManifest]:
    for version in range(table.version - 1, max(0, table.version - 1 - _EARLIER_VERSIONS), -1):
        try:
            yield read_version_manifest(table.store, version, table.naming)
        except ObjectNotFoundError:
            continue  # expired
