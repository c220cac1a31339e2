"""Correct what pylance's compaction leaves wrong beside the rows: indexes, their answers, and the MemWAL index.

Dropped rows. On tables with stable row ids, the compaction does not change the files of indexes: a vector or full-text
index still has the dropped rows. A query for the best k rows gets k from the index, then drops those that no longer
exist, and so returns fewer rows, or none. pylance excludes dropped rows beforehand if a fragment that a segment covers
has deleted rows, or does not exist any more. After a compaction neither is the case. Therefore the id of a rewritten
fragment that had deleted rows is added to the segment's bitmap. The bitmap stays correct: the segment covered that
fragment, and its id is never reused. Where nothing was dropped, the bitmap stays as pylance wrote it: searches that
exclude rows are slower, and with an HNSW index those of pylance up to 8 never end.

The MemWAL index. pylance clears ``index_catchup`` and gives the index another id, under which a snapshot's file is not
found. One more commit restores both, with what concurrent commits changed meanwhile. Merge progress must not have
decreased.

Answers. Nothing is published by which an index would answer worse. Each version that pylance would publish is asked,
also one that it rebased over commits of others, if the entries of the index are not those that were asked before: other
writers change rows, for which an index is not the worse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import InvariantViolatedError, ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, publish_change
from memwal_ops.formats.lance.commit.publication import CommitLostError
from memwal_ops.formats.lance.commit.rebased_commit import commit_checked, commit_coverage
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.files.version_files import TRANSACTIONS_FOLDER, read_version_manifest, references
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, base_indexes, covered_by
from memwal_ops.formats.lance.indexes.index_arguments import value_kind
from memwal_ops.formats.lance.indexes.snapshots import is_external, snapshot_path
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex, decode_memwal_index, find_memwal_entry, with_catchup
from memwal_ops.formats.lance.wire.version_manifest import STABLE_ROW_IDS, VersionManifest, encode_fragment_bitmap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import lance

    from memwal_ops.core.commit_retry import CommitRetry
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.jobs.answers_guard import AnswerComparison
    from memwal_ops.formats.lance.table import Table


_FULL_TEXT = "Inverted"
_ZONES = frozenset({"ZONEMAP", "BLOOMFILTER"})
_EARLIER_VERSIONS = 16


def left_behind(table: Table) -> list[BaseIndex]:
    """The indexes that pylance does not move with rows: a compaction takes what it rewrites out of their coverage.

    Those of zones have no addresses of single rows; in an RTREE pylance changes none, where rows have addresses.
    """
    kinds = _ZONES if table.manifest.manifest.reader_feature_flags & STABLE_ROW_IDS else _ZONES | {"RTREE"}
    return [index for index in base_indexes(table).values() if value_kind(index) in kinds]


def exclude_dropped_rows(table: Table, before: Table | None, note: CommitNote, retry: CommitRetry) -> Table:
    """Make pylance exclude dropped rows from the results of vector and full-text indexes; return the newest version.

    One commit, if such an index covered fragments that were rewritten, and its bitmap has none of their ids.

    ``table``: the newest version. ``before``: the version from before the compaction. None: up to 16 earlier versions
    are read, to finish what a killed run left, or another program's compaction. ``note``: the job and run of the
    commit. ``retry``: counts commit conflicts and waits after each.
    Raises ``CommitConflictError``: too many commit conflicts in a row.
    """
    if not table.log.strict_commits:
        while segments := _to_change(table, before):
            try:
                commit_coverage(table, [old for old, _ in segments], [new for _, new in segments], note)
            except CommitLostError as error:
                table = retry.conflict(table, error)
            else:
                table = retry.landed(table)
        return table

    def change(newest: Table) -> IndexChange | None:
        segments = _to_change(newest, before)
        if not segments:
            return None
        removed = frozenset(UUID(bytes=old.uuid.uuid) for old, _ in segments)
        return IndexChange(newest.index.details, added=tuple(new for _, new in segments), removed=removed)

    return publish_change(table, change, note, retry)


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


def _to_change(table: Table, before: Table | None) -> list[tuple[table_pb2.IndexMetadata, table_pb2.IndexMetadata]]:
    """Entries of segments, each unchanged and with the id of a rewritten fragment in its bitmap."""
    entries, existing = _entries(table), table.fragment_ids
    found = []
    for earlier in () if not entries else _earlier(table) if before is None else (before.manifest,):
        for entry in earlier.index_entries:
            if entry.uuid.uuid not in entries:
                continue
            # Of fragments without a deleted row a compaction drops none.
            whole = {one.id for one in earlier.manifest.fragments if not one.HasField("deletion_file")}
            rewritten = covered_by([entry]) - existing - whole
            if rewritten:
                old, new = entries.pop(entry.uuid.uuid), table_pb2.IndexMetadata()
                new.CopyFrom(old)
                new.fragment_bitmap = encode_fragment_bitmap(covered_by([old]) | {max(rewritten)})
                found.append((old, new))
        if not entries:
            break
    return found


def _earlier(table: Table) -> Iterator[VersionManifest]:
    for version in range(table.version - 1, max(0, table.version - 1 - _EARLIER_VERSIONS), -1):
        try:
            yield read_version_manifest(table.store, version, table.naming)
        except ObjectNotFoundError:
            continue  # expired


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

    Earlier releases of memwal-ops created the index with one.
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
    for entry in manifest.index_entries:
        segments.setdefault(entry.name, set()).add((entry.uuid.uuid, entry.fragment_bitmap))
    return segments


@dataclass(slots=True)
class AnswersGuard:
    """Compares answers before and after each commit.

    ``mode``: off, sample or strict. ``note``: the job and run. ``context``: can stop the run between two queries.
    ``compared``: by index, one comparison for each commit that changed it.
    """

    mode: str
    note: CommitNote
    context: RunContext
    compared: list[tuple[str, AnswerComparison]] = field(default_factory=list)

    def commit(self, table: Table, dataset: lance.LanceDataset, commit: Callable[[lance.LanceDataset], object]) -> int:
        """Commit on ``table``, and return the published version.

        ``table``: the version that the commit was computed on. ``dataset``: a handle on it. ``commit``: commits with a
        handle, as pylance does; it writes nothing before but files that no version names.
        Raises ``AnswersWorseError``: an index would answer worse; the files of the commit are deleted;
        ``StorageError``: pylance's own errors, and those of reading rows.
        """
        if self.mode == "off" or not base_indexes(table):
            with lance_errors("commit the compaction of", table.location.uri):
                commit(dataset)
            return int(dataset.version)
        return commit_checked(table, commit, _Question(self, table))


@dataclass(slots=True)
class _Question:
    """Asked of each version that a commit would publish."""

    guard: AnswersGuard
    before: Table
    asked: dict[str, list[bytes]] = field(default_factory=dict)

    def __call__(self, later: Table) -> None:
        """Ask the indexes that the version changes. Raises ``AnswersWorseError``: one would answer worse."""
        accepted = False
        try:
            for index, entries in _changed(self.before, later):
                if self.asked.get(index.name) != (known := [entry.SerializeToString() for entry in entries]):
                    self._ask(index, entries, later)
                    self.asked[index.name] = known
            accepted = True
        finally:
            if not accepted:
                _discard(self.before, later)

    def _ask(self, index: BaseIndex, entries: list[table_pb2.IndexMetadata], later: Table) -> None:
        from memwal_ops.formats.lance.jobs.answers_guard import compare_answers, refuse_worse  # noqa: PLC0415 - with work

        guard = self.guard
        compared = compare_answers(self.before, index, entries, guard.mode, guard.note, guard.context, later)
        guard.compared.append((index.name, compared))
        remedy = f"Build it anew, then compact again: memwal-ops catchup URI --index {index.name} --rebuild."
        refuse_worse(index, compared, remedy)


def _changed(before: Table, later: Table) -> Iterator[tuple[BaseIndex, list[table_pb2.IndexMetadata]]]:
    """The indexes with other files or another coverage than before, and their entries once the run has ended."""
    final = {new.uuid.uuid: new for _, new in _to_change(later, before)}  # as exclude_dropped_rows will change them
    for name, index in base_indexes(before).items():
        entries = [entry for entry in later.manifest.index_entries if entry.name == name]
        if entries and _state(entries) != _state(index.segments):
            yield index, [final.get(entry.uuid.uuid, entry) for entry in entries]


def _state(entries: Iterable[table_pb2.IndexMetadata]) -> set[tuple[bytes, bytes]]:
    return {(entry.uuid.uuid, entry.fragment_bitmap) for entry in entries}


def _discard(before: Table, later: Table) -> None:
    """Delete the files of a version that is not published: those that the one before it does not name."""
    try:
        parent = read_version_manifest(before.store, later.version - 1, before.naming)
    except ObjectNotFoundError:
        return  # expired meanwhile; without it, files of other writers could not be told apart
    paths = [f"{TRANSACTIONS_FOLDER}/{later.manifest.manifest.transaction_file}"]
    for key in sorted(references(later.manifest).own - references(parent).own):
        folder = key.removesuffix(".lance")  # of a data file: that of its blobs
        paths += [key] * (folder != key) + [meta.path for meta in before.store.list(folder)]
    before.discard(paths)
