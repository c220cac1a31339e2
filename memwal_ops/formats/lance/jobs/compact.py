"""The compact job: rewrite small or much-deleted base fragments, and preserve the MemWAL index.

Planning, rewriting and committing are pylance's own. Its commit is rebased over concurrent commits:
it succeeds over a merge that only added rows, and conflicts with one that changed a rewritten
fragment, or with a change of indexes; then everything is planned again. Two things
are added to it. A rebase ignores versions that are missing (landmine 24), so nothing is
committed if one is missing. And pylance clears ``index_catchup`` and gives the MemWAL index
another id, under which a snapshot's file is not found: one more commit restores both. A plain table has none.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from lance.optimize import Compaction

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import RunContext
from memwal_ops.errors import (
    IndexesBehindError,
    InvariantViolatedError,
    MemwalOpsError,
    ObjectNotFoundError,
    StorageError,
    TableNotFoundError,
)
from memwal_ops.formats.lance.auto_cleanup import refuse_auto_cleanup
from memwal_ops.formats.lance.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.commit import CommitNote, IndexChange, check_rewritable
from memwal_ops.formats.lance.damage import name_damage, names_damage
from memwal_ops.formats.lance.datasets import open_dataset
from memwal_ops.formats.lance.jobs.compact_report import CompactDecision, CompactReport
from memwal_ops.formats.lance.jobs.index_publishing import publish_change
from memwal_ops.formats.lance.lance_errors import is_commit_conflict, lance_errors
from memwal_ops.formats.lance.memwal.snapshots import is_external, snapshot_path
from memwal_ops.formats.lance.options import DEFAULT_TARGET_ROWS, CompactOptions
from memwal_ops.formats.lance.publication import CommitLostError, refuse_gaps
from memwal_ops.formats.lance.versions import read_version_manifest
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.memwal_index import decode_memwal_index, find_memwal_entry, with_catchup
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from lance.optimize import CompactionOptions, CompactionTask, RewriteResult

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

# pylance's default; given with every plan, since the text of "unchanged" depends on it.
MOST_DELETED = 0.1
# A commit holds the old and the new address of every row, to remap the indexes. Each commit conflict halves
# what is tried next, so that next to busy writers each conflict wastes less work.
ROWS_PER_COMMIT = 8 << 20
# After so many conflicts in a row, fragments that other writers changed meanwhile are left for the next run.
_PATIENCE = 3
_SPENT = "That is all that --max-bytes allows a run; the next run continues."
_BUSY = "Fragments that other writers kept changing are left for the next run."

__all__ = ["CompactOptions", "CompactReport", "apply", "backlog", "plan"]


@dataclass(slots=True)
class _Done:
    """Totals of the commits that were published so far."""

    removed: int = 0
    added: int = 0
    rows: int = 0
    bytes: int = 0

    def count(self, results: Collection[RewriteResult]) -> None:
        for result in results:
            self.removed += result.metrics.fragments_removed
            self.added += result.metrics.fragments_added
            self.rows += sum(fragment.physical_rows for fragment in result.new_fragments)
            self.bytes += sum(file.file_size_bytes or 0 for fragment in result.new_fragments for file in fragment.files)


@dataclass(slots=True)
class _Attempt:
    """The work of one commit, with its own dataset handle: pylance moves a handle to the version that it commits."""

    table: Table
    limit: Collection[int]
    options: CompactOptions
    results: list[RewriteResult] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that it has rewritten."""
        return sum(fragment.physical_rows for result in self.results for fragment in result.new_fragments)

    def run(self, rows: int, max_bytes: int | None, context: RunContext) -> int | None:
        """Plan, rewrite and commit; return the published version, or None if there was nothing to do.

        At least one group of fragments; more only up to so many rows, and bytes.
        """
        table, uri = self.table, self.table.location.uri
        with lance_errors("plan the compaction of", uri):
            dataset = open_dataset(table.location, version=table.version)
            options = _lance_options(self.options, _ids(table) - set(self.limit))
            tasks = _first(Compaction.plan(dataset, options).tasks, table, rows, max_bytes)
        if not tasks:
            return None
        _refuse_broken_indexes(table)
        for task in tasks:
            with lance_errors("write compacted fragments of", uri):
                self.results.append(task.execute(dataset))
            context.advance("rewriting", "groups of fragments")
            context.checkpoint()
        table.guard.check()  # here, since the commit is pylance's own and bypasses our store
        refuse_gaps(table)
        refuse_auto_cleanup(table)
        with lance_errors("commit the compaction of", uri):
            Compaction.commit(dataset, self.results, options)
        return int(dataset.version)

    def landed_as(self, newest: Table) -> int | None:
        """The first version that names the rewritten files, if any: the commit succeeded although pylance raised."""
        files = {file.path for result in self.results for fragment in result.new_fragments for file in fragment.files}
        if not files or not _names_any(newest.manifest, files):
            return None
        for version in range(self.table.version + 1, newest.version):
            try:
                manifest = read_version_manifest(newest.store, version, newest.naming)
            except ObjectNotFoundError:
                continue  # cleaned up meanwhile
            if _names_any(manifest, files):
                return version
        return newest.version


@names_damage
def plan(table: Table, options: CompactOptions, context: RunContext | None = None) -> CompactReport:
    """Report what a compaction would do, without writing: decision ``dry_run``."""
    del context
    started = time.monotonic()
    check_rewritable(table)
    refuse_auto_cleanup(table)
    with lance_errors("plan the compaction of", table.location.uri):
        tasks = Compaction.plan(table.dataset, _lance_options(options, ())).tasks
    alive = _alive(table)
    rows = [sum(alive[fragment.id] for fragment in task.fragments) for task in tasks]
    removed = sum(len(task.fragments) for task in tasks)
    # pylance writes no small remainder: a fragment may have up to twice the rows.
    added = sum(max(1, count // options.target_rows) for count in rows if count)
    return CompactReport(
        decision=CompactDecision.DRY_RUN,
        run_id=str(uuid.uuid4()),
        why=None if tasks else _why(table, options),
        fragments_before=len(alive),
        fragments_after=len(alive) - removed + added,
        fragments_removed=removed,
        fragments_added=added,
        rows_rewritten=sum(rows),
        bytes_written=None,
        snapshot_lost=False,
        version=table.version,
        lost_races=0,
        seconds=time.monotonic() - started,
    )


@names_damage
def apply(
    table: Table,
    options: CompactOptions,
    context: RunContext | None = None,
) -> CompactReport:
    """Rewrite small or much-deleted fragments that existed when the call began, a bounded number per commit.

    Fragments that are added meanwhile are left for the next run, so that a run concurrent with a merger ends.
    Files of attempts with a commit conflict are left to pylance's clean-up, which deletes them when no version can
    name them any more.

    Args:
        table: any version of the table; the newest is read after each commit and each conflict.
        options: see :class:`CompactOptions`.
        context: can stop the run after each group of fragments that has been rewritten.

    Returns:
        The report. Its ``why`` is the reason if nothing was rewritten.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
        IndexesBehindError: an index cannot be opened, so that its coverage would be lost.
        InvariantViolatedError: merge progress is lower than it was.
        UnsupportedFeatureError: a table whose manifest must not be rewritten here, or whose setting
            ``lance.auto_cleanup`` would make the commit delete files that must be kept.
    """
    started = time.monotonic()
    context = context or RunContext()
    check_rewritable(table)
    refuse_auto_cleanup(table)
    note = CommitNote.new("compact")
    limit, busy = _ids(table), set[int]()
    before = len(limit)
    had_snapshot = is_external(table) and _has_file(table)
    retry, done = CommitRetry(), _Done()
    if limit:
        probe_conditional_writes(table.store)
    rows = ROWS_PER_COMMIT
    while (left := _left(options, done)) is None or left > 0:
        attempt = _Attempt(table, limit - busy, options)
        try:
            version = attempt.run(rows, left, context)
        except (CommitLostError, StorageError, TableNotFoundError) as error:
            newest = table.newest()
            version = attempt.landed_as(newest)
            if version is None:
                newest = _conflict(retry, table, newest, error)
                if retry.in_a_row >= _PATIENCE:
                    busy |= limit & _changed(table, newest)
                table, rows = newest, min(rows, attempt.rows) // 2
                continue
        else:
            if version is None and busy and not done.removed:
                busy.clear()  # it is these or none
                continue
            if version is None:
                break
            newest = table.newest()
        done.count(attempt.results)
        retry.in_a_row, rows = 0, ROWS_PER_COMMIT
        _check_progress(table.index.merged_generations, newest.index.merged_generations, table)
        if table.memwal is not None:
            newest = _restore_memwal_index(table, newest, version, note, retry)
        table = newest
        get_logger(__name__).info("fragments_compacted", table=table.location.uri, version=table.version)
    context.figures["conflicts"] += retry.conflicts
    context.figures["bytes_compacted"] += done.bytes
    if done.removed:
        context.revisions.append(table.version)
    return CompactReport(
        decision=CompactDecision.COMPACTED if done.removed else CompactDecision.UNCHANGED,
        run_id=note.run_id,
        why=_unfinished(left, busy) if done.removed else _why(table, options),
        fragments_before=before,
        fragments_after=len(table.manifest.manifest.fragments),
        fragments_removed=done.removed,
        fragments_added=done.added,
        rows_rewritten=done.rows,
        bytes_written=done.bytes,
        snapshot_lost=had_snapshot and is_external(table) and not _has_file(table),
        version=table.version,
        lost_races=retry.conflicts,
        seconds=time.monotonic() - started,
    )


def _unfinished(left: int | None, busy: Collection[int]) -> str | None:
    """Why a run that rewrote something did not rewrite all."""
    if left is not None and left <= 0:
        return _SPENT
    return _BUSY if busy else None


def _left(options: CompactOptions, done: _Done) -> int | None:
    """Bytes that the run may still rewrite; None: any number."""
    return None if options.max_bytes is None else options.max_bytes - done.bytes


def _lance_options(options: CompactOptions, excluded: Collection[int]) -> CompactionOptions:
    return {
        "target_rows_per_fragment": options.target_rows,
        "materialize_deletions_threshold": MOST_DELETED,
        "excluded_fragment_ids": sorted(excluded),
    }


def _ids(table: Table) -> set[int]:
    return {fragment.id for fragment in table.manifest.manifest.fragments}


def _changed(old: Table, new: Table) -> set[int]:
    """Fragments of ``old`` that are gone in ``new``, or have other deletions or files."""
    current = {fragment.id: fragment for fragment in new.manifest.manifest.fragments}
    return {one.id for one in old.manifest.manifest.fragments if current.get(one.id) != one}


def _alive(table: Table) -> dict[int, int]:
    """Live rows by fragment."""
    return {
        fragment.id: fragment.physical_rows - fragment.deletion_file.num_deleted_rows
        for fragment in table.manifest.manifest.fragments
    }


def _first(tasks: list[CompactionTask], table: Table, rows: int, max_bytes: int | None) -> list[CompactionTask]:
    """The first tasks up to a budget of rows and bytes; at least one, if there are any."""
    alive = _alive(table)
    left = float("inf") if max_bytes is None else max_bytes
    chosen: list[CompactionTask] = []
    for task in tasks:
        rows -= sum(alive[fragment.id] for fragment in task.fragments)
        left -= sum(file.file_size_bytes or 0 for fragment in task.fragments for file in fragment.files)
        if chosen and (rows < 0 or left < 0):
            break
        chosen.append(task)
    return chosen


def _refuse_broken_indexes(table: Table) -> None:
    """Raise if an index cannot be opened: Lance could not remap its rows, and would only log that it drops them."""
    for name in base_indexes(table):
        try:
            with lance_errors("open an index of", table.location.uri):
                table.dataset.stats.index_stats(name)
        except StorageError as error:
            raise IndexesBehindError(
                f"Index {name} cannot be opened, and a compaction would make pylance drop its coverage: {error}",
                remedy="Nothing was changed. See runbooks/index-behind.md, then run it again.",
            ) from error


def _conflict(retry: CommitRetry, table: Table, newest: Table, error: MemwalOpsError) -> Table:
    """The version to plan on after a commit conflict; raises ``error`` if it is not a conflict."""
    # If there is a newer version, this one was cleaned up meanwhile; else the table is missing.
    gone = isinstance(error, (ObjectNotFoundError, TableNotFoundError)) and newest.version > table.version
    if isinstance(error, CommitLostError) or gone or is_commit_conflict(error):
        # A file to which the newest version refers is missing: to try again on it does not help.
        if gone and (named := name_damage(newest, error)) is not error:
            raise named from error
        return retry.conflict(table, error)
    raise error


def _check_progress(before: Mapping[UUID, int], after: Mapping[UUID, int], table: Table) -> None:
    fallen = sorted(region_id for region_id, merged in before.items() if after.get(region_id, 0) < merged)
    if fallen:
        raise InvariantViolatedError(
            f"After the compaction of {table.location.uri} the merge progress of {', '.join(map(str, fallen))} "
            "is lower than before.",
            remedy="Run memwal-ops merge: merging again is idempotent. Then report this with the table's _versions/.",
        )


def _restore_memwal_index(table: Table, newest: Table, version: int, note: CommitNote, retry: CommitRetry) -> Table:
    """Undo pylance's changes of the MemWAL index between ``table`` and ``version``; return the newest version then.

    A rewrite moves rows without changes, and never joins fragments that different indexes cover, so that the
    ``index_catchup`` of the version before is still correct.
    """
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
    _check_progress(parent.index.merged_generations, step.index.merged_generations, table)
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
    entry = None if manifest.indexes is None else find_memwal_entry(manifest.indexes)
    if entry is None:
        raise InvariantViolatedError(f"Version {version} of {table.location.uri} has no MemWAL index.")
    return _Step(manifest, decode_memwal_index(entry))


def _segments(manifest: VersionManifest) -> dict[str, set[tuple[bytes, bytes]]]:
    """Ids and fragments of the segments of each index; an update that removes fragments may keep the id."""
    segments: dict[str, set[tuple[bytes, bytes]]] = {}
    for entry in [] if manifest.indexes is None else manifest.indexes.indices:
        segments.setdefault(entry.name, set()).add((entry.uuid.uuid, entry.fragment_bitmap))
    return segments


def _names_any(manifest: VersionManifest, files: Collection[str]) -> bool:
    return any(file.path in files for fragment in manifest.manifest.fragments for file in fragment.files)


def _has_file(table: Table) -> bool:
    return table.store.head(snapshot_path(table.index.uuid)) is not None


def _why(table: Table, options: CompactOptions) -> str:
    """The reason why pylance plans nothing for a version."""
    fragments = table.manifest.manifest.fragments
    if not fragments:
        return "The base table has no fragments."
    reason = (
        f"No fragment has more than {MOST_DELETED:.0%} of its rows deleted, and no two neighbours below "
        f"{options.target_rows:,} rows are covered by the same segments of the same indexes."
    )
    if sum(fragment.physical_rows < options.target_rows for fragment in fragments) > 1:
        indexes = base_indexes(table)
        behind = [name for name, index in indexes.items() if not coverage(index.covered, table.manifest).complete]
        split = [name for name, index in indexes.items() if len(index.segments) > 1]
        if behind:
            reason += f" To join more, run memwal-ops catchup first: not all is covered by {', '.join(behind)}."
        if split:
            reason += (
                " To join more, run memwal-ops catchup --max-segments 1: "
                f"there are several segments of {', '.join(split)}."
            )
    return reason


def backlog(table: Table) -> Mapping[str, float]:
    """Number of base fragments, of those below the default target size of a compaction, and of deleted rows."""
    fragments = table.manifest.manifest.fragments
    small = sum(fragment.physical_rows < DEFAULT_TARGET_ROWS for fragment in fragments)
    deleted = sum(fragment.deletion_file.num_deleted_rows for fragment in fragments)
    return {"fragments": len(fragments), "small_fragments": small, "deleted_rows": deleted}
