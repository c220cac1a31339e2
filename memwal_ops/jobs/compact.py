"""The compact job: rewrite small or much-deleted base fragments, and keep what the MemWAL index says.

Planning, rewriting and committing are pylance's own. Its commit is rebased over whatever others
published meanwhile: over a merge that only added rows it lands, and to one that touched a rewritten
fragment, or to a change of indexes, it loses the race; then everything is planned again. Two things
are added to it. A rebase passes over versions that are gone (landmine 24), so that nothing is
committed when one is missing. And pylance clears ``index_catchup`` and gives the MemWAL index
another id, under which a snapshot's file is not found: both are put back by one more commit.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from lance.optimize import Compaction

from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.commit import CommitNote, IndexChange, check_rewritable
from memwal_ops.core.datasets import open_dataset
from memwal_ops.core.lance_errors import is_commit_conflict, lance_errors
from memwal_ops.core.publication import CommitLostError, is_taken, lost, refuse_replaced
from memwal_ops.core.snapshots import is_external, snapshot_path
from memwal_ops.core.versions import read_version_manifest
from memwal_ops.errors import (
    IndexesBehindError,
    InvalidUsageError,
    InvariantViolatedError,
    MemwalOpsError,
    ObjectNotFoundError,
    StorageError,
    TableNotFoundError,
)
from memwal_ops.format._pb import memwal_pb2
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry, with_catchup
from memwal_ops.jobs.index_publishing import publish_change
from memwal_ops.jobs.races import Races
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from lance.optimize import CompactionOptions, CompactionTask, RewriteResult

    from memwal_ops.core.table import Table
    from memwal_ops.format.memwal_index import MemWalIndex
    from memwal_ops.format.version_manifest import VersionManifest

DEFAULT_TARGET_ROWS = 1 << 20
# pylance's own; given with every plan, since the words of "unchanged" rest on it.
MOST_DELETED = 0.1
# A commit holds the old and the new address of every row, to remap the indexes. Each lost race halves
# it, so that beside busy mergers there is less and less to lose.
ROWS_PER_COMMIT = 8 << 20


@dataclass(frozen=True, slots=True)
class CompactOptions:
    """What a user may ask of a compaction.

    Attributes:
        target_rows: rows of a fragment after it; smaller neighbours are joined.
    """

    target_rows: int = DEFAULT_TARGET_ROWS

    def __post_init__(self) -> None:
        if self.target_rows < 1:
            raise InvalidUsageError(f"--target-rows must be at least 1, not {self.target_rows}.")


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What a compaction did. ``decision`` is one of compacted, unchanged, dry_run.

    In a dry run ``fragments_added`` and ``fragments_after`` are what would be expected.

    Attributes:
        why: why nothing was, or would be, rewritten; None where something was.
        bytes_written: size of the new data files; None in a dry run.
        snapshot_lost: the table had a region snapshot in a file, which is found no more.
    """

    decision: str
    run_id: str
    why: str | None
    fragments_before: int
    fragments_after: int
    fragments_removed: int
    fragments_added: int
    rows_rewritten: int
    bytes_written: int | None
    snapshot_lost: bool
    version: int
    lost_races: int
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The document of ``compact --json``."""
        return {
            "decision": self.decision,
            "why": self.why,
            "fragments_before": self.fragments_before,
            "fragments_after": self.fragments_after,
            "fragments_removed": self.fragments_removed,
            "fragments_added": self.fragments_added,
            "rows_rewritten": self.rows_rewritten,
            "bytes_written": self.bytes_written,
            "snapshot_lost": self.snapshot_lost,
            "version": self.version,
            "seconds": round(self.seconds, 6),
            "lost_races": self.lost_races,
            "run_id": self.run_id,
        }


@dataclass(slots=True)
class _Done:
    """What has landed so far."""

    removed: int = 0
    added: int = 0
    rows: int = 0
    bytes: int = 0

    def count(self, results: Collection[RewriteResult]) -> None:
        for result in results:
            self.removed += result.metrics.fragments_removed
            self.added += result.metrics.fragments_added
            self.rows += sum(fragment.physical_rows for fragment in result.new_fragments)
            self.bytes += sum(one.file_size_bytes or 0 for fragment in result.new_fragments for one in fragment.files)


@dataclass(slots=True)
class _Attempt:
    """One commit's worth of work, on a handle of its own: pylance moves a handle to the version that it commits."""

    table: Table
    limit: Collection[int]
    options: CompactOptions
    results: list[RewriteResult] = field(default_factory=list)

    def run(self, budget: int, on_task: Callable[[], None], on_commit: Callable[[], None]) -> int | None:
        """Plan, rewrite and commit; the version that landed, or None where there is nothing to do."""
        table, uri = self.table, self.table.location.uri
        with lance_errors("plan the compaction of", uri):
            dataset = open_dataset(table.location, version=table.version)
            asked = _asked(self.options, _ids(table) - set(self.limit))
            tasks = _first(Compaction.plan(dataset, asked).tasks, table, budget)
        if not tasks:
            return None
        _refuse_broken_indexes(table)
        for task in tasks:
            with lance_errors("write compacted fragments of", uri):
                self.results.append(task.execute(dataset))
            on_task()
        on_commit()
        _refuse_gaps(table)
        with lance_errors("commit the compaction of", uri):
            Compaction.commit(dataset, self.results, asked)
        return int(dataset.version)

    def landed_as(self, newest: Table) -> int | None:
        """The version in which the rewritten files first stand: the commit did land, whatever pylance heard."""
        ours = {one.path for result in self.results for fragment in result.new_fragments for one in fragment.files}
        if not ours or not _names_any(newest.manifest, ours):
            return None
        for version in range(self.table.version + 1, newest.version):
            try:
                manifest = read_version_manifest(newest.store, version, newest.naming)
            except ObjectNotFoundError:
                continue  # cleaned up meanwhile
            if _names_any(manifest, ours):
                return version
        return newest.version


def dry_run(table: Table, options: CompactOptions) -> CompactReport:
    """The report of a compaction that writes nothing: decision ``dry_run``."""
    started = time.monotonic()
    check_rewritable(table)
    with lance_errors("plan the compaction of", table.location.uri):
        tasks = Compaction.plan(table.dataset, _asked(options, ())).tasks
    alive = _alive(table)
    rows = [sum(alive[fragment.id] for fragment in task.fragments) for task in tasks]
    removed = sum(len(task.fragments) for task in tasks)
    # pylance leaves no rest: a fragment may have up to twice the rows.
    added = sum(max(1, count // options.target_rows) for count in rows if count)
    return CompactReport(
        decision="dry_run",
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


def apply(
    table: Table,
    options: CompactOptions,
    *,
    on_task: Callable[[], None] = lambda: None,
    on_commit: Callable[[], None] = lambda: None,
) -> CompactReport:
    """Rewrite small or much-deleted fragments that stood when the call began, a bounded number per commit.

    Fragments that others add meanwhile are left for the next run, so that a run beside a merger ends.
    Files of attempts that lost a race are left to pylance's clean-up, which knows when nobody can name them.

    Args:
        table: any version of the table; the newest is read after each commit and each lost race.
        options: see :class:`CompactOptions`.
        on_task: called as each group of fragments has been rewritten, for a progress bar.
        on_commit: called right before each commit, which is pylance's own, so that no store sees it.

    Returns:
        The report. ``unchanged`` says why nothing was rewritten.

    Raises:
        CommitConflictError: too many races were lost in a row.
        IndexesBehindError: an index cannot be opened, so that what it covers would be lost.
        InvariantViolatedError: merge progress is lower than it was.
        UnsupportedFeatureError: a table whose manifest must not be rewritten here.
    """
    started = time.monotonic()
    check_rewritable(table)
    note = CommitNote(job="compact", run_id=str(uuid.uuid4()), release=__version__)
    limit = _ids(table)
    had_snapshot = is_external(table) and _has_file(table)
    races, done = Races(), _Done()
    if limit:
        probe_conditional_writes(table.store)
    while True:
        attempt = _Attempt(table, limit, options)
        try:
            version = attempt.run(ROWS_PER_COMMIT >> races.lost_in_a_row, on_task, on_commit)
        except (CommitLostError, StorageError, TableNotFoundError) as error:
            newest = table.newest()
            version = attempt.landed_as(newest)
            if version is None:
                table = _lose(races, table, newest, error)
                continue
        else:
            if version is None:
                break
            newest = table.newest()
        done.count(attempt.results)
        races.lost_in_a_row = 0
        _check_progress(table.index.merged_generations, newest.index.merged_generations, table)
        table = _put_back(table, newest, version, note, races)
        get_logger(__name__).info("fragments_compacted", table=table.location.uri, version=table.version)
    return CompactReport(
        decision="compacted" if done.removed else "unchanged",
        run_id=note.run_id,
        why=None if done.removed else _why(table, options),
        fragments_before=len(limit),
        fragments_after=len(table.manifest.manifest.fragments),
        fragments_removed=done.removed,
        fragments_added=done.added,
        rows_rewritten=done.rows,
        bytes_written=done.bytes,
        snapshot_lost=had_snapshot and is_external(table) and not _has_file(table),
        version=table.version,
        lost_races=races.lost,
        seconds=time.monotonic() - started,
    )


def _asked(options: CompactOptions, excluded: Collection[int]) -> CompactionOptions:
    return {
        "target_rows_per_fragment": options.target_rows,
        "materialize_deletions_threshold": MOST_DELETED,
        "excluded_fragment_ids": sorted(excluded),
    }


def _ids(table: Table) -> set[int]:
    return {fragment.id for fragment in table.manifest.manifest.fragments}


def _alive(table: Table) -> dict[int, int]:
    """Live rows by fragment."""
    return {
        fragment.id: fragment.physical_rows - fragment.deletion_file.num_deleted_rows
        for fragment in table.manifest.manifest.fragments
    }


def _first(tasks: list[CompactionTask], table: Table, budget: int) -> list[CompactionTask]:
    """The first tasks up to a budget of rows, always at least one of those that there are."""
    alive = _alive(table)
    chosen: list[CompactionTask] = []
    for task in tasks:
        budget -= sum(alive[fragment.id] for fragment in task.fragments)
        if chosen and budget < 0:
            break
        chosen.append(task)
    return chosen


def _refuse_broken_indexes(table: Table) -> None:
    """Lance drops what an index covers, with a warning in its log, where it cannot open it to remap the rows."""
    for name in base_indexes(table):
        try:
            with lance_errors("open an index of", table.location.uri):
                table.dataset.stats.index_stats(name)
        except StorageError as error:
            raise IndexesBehindError(
                f"Index {name} cannot be opened, and a compaction would make pylance drop what it covers: {error}",
                remedy="Nothing was changed. See runbooks/index-behind.md, then run it again.",
            ) from error


def _refuse_gaps(table: Table) -> None:
    """Give up where a version since ``table``'s is gone: the rebase would not see what it changed."""
    with lance_errors("find the newest version of", table.location.uri):
        newest = table.dataset.latest_version
    if not all(is_taken(table, version) for version in range(table.version + 1, newest + 1)):
        raise lost(table, newest)
    refuse_replaced(table, table.version + 1)


def _lose(races: Races, table: Table, newest: Table, error: MemwalOpsError) -> Table:
    """The version to plan on after a lost race; raises whatever is none."""
    # A version that was cleaned up under our feet is told from a table that is not there by the newer one.
    gone = isinstance(error, (ObjectNotFoundError, TableNotFoundError)) and newest.version > table.version
    if isinstance(error, CommitLostError) or gone or is_commit_conflict(error):
        return races.lose(table, error)
    raise error


def _check_progress(before: Mapping[UUID, int], after: Mapping[UUID, int], table: Table) -> None:
    fallen = sorted(region_id for region_id, merged in before.items() if after.get(region_id, 0) < merged)
    if fallen:
        raise InvariantViolatedError(
            f"After the compaction of {table.location.uri} the merge progress of {', '.join(map(str, fallen))} "
            "is lower than before.",
            remedy="Run memwal-ops merge: merging again is idempotent. Then report this with the table's _versions/.",
        )


def _put_back(table: Table, newest: Table, version: int, note: CommitNote, races: Races) -> Table:
    """Undo what pylance did to the MemWAL index between ``table`` and ``version``; the newest version after that.

    A rewrite moves rows and changes none, and never joins fragments that different indexes cover, so
    that what held of an index in the version before holds of it still.
    """
    try:
        wanted, snapshot_id, landed = _replay(table, version)
    except ObjectNotFoundError:
        return newest  # cleaned up already; catch-up and the next snapshot bring it back
    after, segments = landed.index, _segments(landed.manifest)

    def change(table: Table) -> IndexChange | None:
        index, standing = table.index, _segments(table.manifest)
        details = _with_changes(wanted, after.details, index.details)
        if index.index_catchup == after.index_catchup:
            stale = {
                one.index_name: None
                for one in details.index_catchup
                if standing.get(one.index_name, set()) != segments.get(one.index_name)
            }
            details = with_catchup(details, stale)
        path = snapshot_path(snapshot_id)
        moved = is_external(table) and index.uuid == after.uuid != snapshot_id and table.store.head(path) is not None
        if details == index.details and not moved:
            return None
        return IndexChange(details, uuid=snapshot_id if moved else None)

    return publish_change(newest, change, note, races)


@dataclass(frozen=True, slots=True)
class _Step:
    """One version, as far as it matters here."""

    manifest: VersionManifest
    index: MemWalIndex

    def is_reservation_after(self, parent: _Step) -> bool:
        """Whether it is nothing but pylance's taking of fragment ids, which writes the MemWAL index anew too."""
        mine, other = self.manifest.manifest, parent.manifest.manifest
        return mine.fragments == other.fragments and mine.max_fragment_id > other.max_fragment_id


def _replay(table: Table, version: int) -> tuple[memwal_pb2.MemWalIndexDetails, UUID, _Step]:
    """The details and the id that the MemWAL index would have in ``version`` but for the compaction.

    Those of ``table``, with what others changed in the versions between; and the version itself.

    Raises:
        ObjectNotFoundError: a version is gone.
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
    """A copy of ``details`` in which each field is as in ``new`` that is not in ``new`` as in ``old``."""
    changed = memwal_pb2.MemWalIndexDetails()
    changed.CopyFrom(details)  # also what pylance does not know, and leaves out when it writes the details anew
    for field_of in changed.DESCRIPTOR.fields:
        name = field_of.name
        if _only(new, name) != _only(old, name):
            changed.ClearField(name)
            changed.MergeFrom(_only(new, name))
    return changed


def _only(details: memwal_pb2.MemWalIndexDetails, name: str) -> memwal_pb2.MemWalIndexDetails:
    """One field of the details."""
    one = memwal_pb2.MemWalIndexDetails()
    for field_of, value in details.ListFields():
        if field_of.name == name:
            if field_of.is_repeated:
                getattr(one, name).MergeFrom(value)
            else:
                setattr(one, name, value)
    return one


def _read(table: Table, version: int) -> _Step:
    manifest = read_version_manifest(table.store, version, table.naming)
    entry = None if manifest.indexes is None else find_memwal_entry(manifest.indexes)
    if entry is None:
        raise InvariantViolatedError(f"Version {version} of {table.location.uri} has no MemWAL index.")
    return _Step(manifest, decode_memwal_index(entry))


def _segments(manifest: VersionManifest) -> dict[str, set[tuple[bytes, bytes]]]:
    """Ids and fragments of the segments of each index; an update that takes fragments out may keep the id."""
    found: dict[str, set[tuple[bytes, bytes]]] = {}
    for entry in [] if manifest.indexes is None else manifest.indexes.indices:
        found.setdefault(entry.name, set()).add((entry.uuid.uuid, entry.fragment_bitmap))
    return found


def _names_any(manifest: VersionManifest, files: Collection[str]) -> bool:
    return any(one.path in files for fragment in manifest.manifest.fragments for one in fragment.files)


def _has_file(table: Table) -> bool:
    return table.store.head(snapshot_path(table.index.uuid)) is not None


def _why(table: Table, options: CompactOptions) -> str:
    """Why pylance plans nothing for a version."""
    fragments = table.manifest.manifest.fragments
    if not fragments:
        return "The base table has no fragments."
    said = (
        f"No fragment has more than {MOST_DELETED:.0%} of its rows deleted, and no two neighbours below "
        f"{options.target_rows:,} rows are covered by the same segments of the same indexes."
    )
    if sum(fragment.physical_rows < options.target_rows for fragment in fragments) > 1:
        indexes = base_indexes(table)
        behind = [name for name, one in indexes.items() if not coverage(one.covered, table.manifest).complete]
        split = [name for name, one in indexes.items() if len(one.segments) > 1]
        if behind:
            said += f" To join more, run memwal-ops catchup first: not all is covered by {', '.join(behind)}."
        if split:
            said += f" To join more, run memwal-ops catchup --max-segments 1: there are several of {', '.join(split)}."
    return said
