"""Read the legacy MemWAL index of a table version: its MemWALs, what FLUSHED means for each, and the unmerged ones."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from memwal_ops import errors
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.files.version_files import read_version_manifest, transaction_of
from memwal_ops.formats.lance.generations.backlog import blocked_entry
from memwal_ops.formats.lance.legacy.states import Change
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.legacy_index import MemWal, State, decode_mem_wals, encode_mem_wals
from memwal_ops.formats.lance.wire.memwal_index import MEMWAL_INDEX_NAME, find_memwal_entry, is_legacy
from memwal_ops.formats.lance.wire.version_manifest import DELETION_FILES, STABLE_ROW_IDS, VersionManifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Store


Meaning = Literal["merged", "unmerged"]
_FLUSHED_IS_UNMERGED_SINCE = (0, 36)
_RELEASE = re.compile(r"(\d+)\.(\d+)\.")


def legacy_entry(table: Table) -> table_pb2.IndexMetadata:
    """The MemWAL entry of a table of the legacy layout. Raises ``NoMemWalIndexError``: a plain table."""
    entry = find_memwal_entry(table.manifest.indexes)
    if entry is None:
        table.require_memwal("A reader or writer of MemWAL")
    if entry is None or not is_legacy(entry):
        raise errors.InvariantViolatedError(f"{table.location.uri} has no legacy MemWAL index.")
    return entry


def mem_wals_of(table: Table) -> tuple[MemWal, ...]:
    """The MemWALs of a table version, in their stored order. Raises ``TableCorruptError``."""
    return decode_mem_wals(legacy_entry(table).index_details.value)


@dataclass(frozen=True, slots=True)
class FlushedMeaning:
    """What FLUSHED means for a MemWAL, and the release of Lance that wrote the state, if it is known.

    ``meaning``: merged: the rows are in the table already (Lance 0.31 to 0.35, S1-021). unmerged: they are on disk only
    (from 0.36, S1-019). None: it is not known.
    """

    meaning: Meaning | None
    release: str | None


class Meanings:
    """What FLUSHED means. It follows from the release that wrote the version in which a MemWAL changed last.

    ``given``: the user's ``--flushed-means``, used if the release is not known.
    """

    def __init__(self, table: Table, given: str | None = None) -> None:
        """Nothing is read yet."""
        self._table, self._given = table, given
        self._release = lru_cache(maxsize=None)(self._read_release)

    def of(self, mem_wal: MemWal) -> FlushedMeaning:
        """The meaning for one MemWAL; one request for each version that none of the others named."""
        release = self._release(mem_wal.last_updated_dataset_version)
        match = None if release is None else _RELEASE.match(release)
        if match is None:
            return FlushedMeaning(self._given, release)  # type: ignore[arg-type]  # the option has these two words
        since = (int(match[1]), int(match[2])) >= _FLUSHED_IS_UNMERGED_SINCE
        return FlushedMeaning("unmerged" if since else "merged", release)

    def unknown(self, mem_wal: MemWal) -> errors.FlushedMeaningUnknownError:
        """The error of a MemWAL whose meaning is None."""
        return errors.FlushedMeaningUnknownError(
            f"Generation {mem_wal.id.generation} of region {mem_wal.id.region!r} is FLUSHED since version "
            f"{mem_wal.last_updated_dataset_version}, which does not exist or does not record the Lance release that "
            "wrote it: before 0.36 that means merged, and since 0.36 not."
        )

    def _read_release(self, version: int) -> str | None:
        table = self._table
        made_by = table.manifest if version == table.version else table.manifest_of(version)
        if made_by is None:
            return None
        writer = made_by.manifest.writer_version
        return writer.version if writer.library == "lance" else None


@dataclass(frozen=True, slots=True)
class BlockedMemWal:
    """Why a region cannot be merged completely. ``generation`` is the first faulty one, None: the whole region."""

    region: str
    generation: int | None
    error: errors.MemwalOpsError

    def to_json(self) -> dict[str, object]:
        """The ``blocked`` entry of a report."""
        return blocked_entry(self.region, self.generation, self.error)


@dataclass(frozen=True, slots=True)
class RegionWork:
    """The work of a merge in one region.

    Attributes:
        mem_wals: all of it, ascending.
        pending: FLUSHED and not merged, in the order in which they are to be merged; before the first fault.
        merged_already: FLUSHED by a release for which that means merged: only their state is to be changed.
        blocked: why no more of it can be merged.
    """

    region: str
    mem_wals: tuple[MemWal, ...]
    pending: tuple[MemWal, ...]
    merged_already: tuple[MemWal, ...]
    blocked: BlockedMemWal | None

    @property
    def waiting(self) -> tuple[MemWal, ...]:
        """Those that a writer has not flushed yet."""
        return tuple(mem_wal for mem_wal in self.mem_wals if mem_wal.state < State.FLUSHED)


def read_work(mem_wals: Sequence[MemWal], meanings: Meanings) -> Mapping[str, RegionWork]:
    """The work of each region, by name: its lowest FLUSHED generation first, and none above one that waits."""
    regions = sorted({mem_wal.id.region for mem_wal in mem_wals})
    return {region: _work(region, mem_wals, meanings) for region in regions}


def _work(region: str, mem_wals: Sequence[MemWal], meanings: Meanings) -> RegionWork:
    ascending = sorted((mem_wal for mem_wal in mem_wals if mem_wal.id.region == region), key=lambda mem_wal: mem_wal.id)
    pending: list[MemWal] = []
    already: list[MemWal] = []
    fault: BlockedMemWal | None = None
    done = last_done(ascending)
    waits: MemWal | None = None
    for mem_wal in ascending:
        if mem_wal.state < State.FLUSHED:
            waits = waits or mem_wal
        elif mem_wal.state is State.FLUSHED:
            meaning = meanings.of(mem_wal).meaning
            error = meanings.unknown(mem_wal) if meaning is None else None if waits is None else _ahead(mem_wal, waits)
            if error is not None:
                fault = BlockedMemWal(region, mem_wal.id.generation, error)
                break
            (already if meaning == "merged" else pending).append(mem_wal)
    done = max([done, *(mem_wal.id.generation for mem_wal in already)])
    late = next((mem_wal for mem_wal in pending if mem_wal.id.generation < done), None)
    if late is not None:
        fault = BlockedMemWal(region, late.id.generation, _late(late, done))
        pending = [mem_wal for mem_wal in pending if mem_wal.id < late.id]
    return RegionWork(region, tuple(ascending), tuple(pending), tuple(already), fault)


@dataclass(frozen=True, slots=True)
class UnmergedMemWals:
    """The unmerged MemWALs of a region, flushed or not.

    ``mem_wals``: ascending; empty where there is a fault. ``done``: the highest generation whose rows are in the base
    table; -1: none. ``fault``: why it is not known which rows are newer.
    """

    mem_wals: tuple[MemWal, ...]
    done: int
    fault: BlockedMemWal | None = None


def unmerged(mem_wals: Sequence[MemWal], region: str, meanings: Meanings) -> UnmergedMemWals:
    """The unmerged MemWALs of a region, in the order in which they were written."""
    ascending = sorted((mem_wal for mem_wal in mem_wals if mem_wal.id.region == region), key=lambda mem_wal: mem_wal.id)
    done = last_done(ascending)
    waiting: list[MemWal] = []

    def blocked(one: MemWal, error: errors.MemwalOpsError) -> UnmergedMemWals:
        return UnmergedMemWals((), done, BlockedMemWal(region, one.id.generation, error))

    for mem_wal in ascending:
        meaning = meanings.of(mem_wal).meaning if mem_wal.state is State.FLUSHED else "unmerged"
        if meaning is None:
            return blocked(mem_wal, meanings.unknown(mem_wal))
        if meaning == "merged":
            done = max(done, mem_wal.id.generation)
        elif mem_wal.state is not State.MERGED:
            waiting.append(mem_wal)
    unsealed = [mem_wal for mem_wal in waiting if mem_wal.state is State.OPEN]
    if len(unsealed) > 1:
        numbers = ", ".join(str(mem_wal.id.generation) for mem_wal in unsealed)
        error = errors.MemWalOrderError(f"Region {region!r} has several OPEN generations: {numbers}.")
        return blocked(unsealed[1], error)
    if waiting and waiting[0].id.generation < done:
        return blocked(waiting[0], _late(waiting[0], done))
    return UnmergedMemWals(tuple(waiting), done)


def _late(mem_wal: MemWal, done: int) -> errors.MemWalOrderError:
    return errors.MemWalOrderError(
        f"Generation {mem_wal.id.generation} of region {mem_wal.id.region!r} is not merged, and generation {done} "
        "after it is: its rows would replace newer ones."
    )


def last_done(ascending: Sequence[MemWal]) -> int:
    """The highest generation of a region that is MERGED, or was: one that is missing is trimmed; -1: none."""
    merged = [mem_wal.id.generation for mem_wal in ascending if mem_wal.state is State.MERGED]
    trimmed = [b.id.generation - 1 for a, b in pairwise(ascending) if b.id.generation - a.id.generation > 1]
    return max([ascending[0].id.generation - 1, *merged, *trimmed])


def _ahead(mem_wal: MemWal, waits: MemWal) -> errors.MemWalOrderError:
    return errors.MemWalOrderError(
        f"Generation {mem_wal.id.generation} of region {mem_wal.id.region!r} is FLUSHED, and generation "
        f"{waits.id.generation} before it only {waits.state.name}: merged first, its rows would be replaced by older "
        "ones.",
        remedy=f"Let the writer of the region, {waits.owner_id!r}, flush generation {waits.id.generation}; or, if it "
        "will never run again, let memwal-ops migrate replay its log.",
    )


@dataclass(frozen=True, slots=True)
class Emptied:
    """A newest version that state commits emptied.

    Releases of Lance with the legacy index drop the fragments when they commit only a change of states (lance#8438):
    the version that records the change has no rows. Older versions still have them, until they are cleaned up. A merge
    or a migration on top of such a version would make the loss permanent.

    ``source``: the newest earlier version that has rows; None: earlier versions no longer exist, so it is not known
    whether there were any.
    """

    version: int
    source: int | None
    rows: int

    def error(self, job: str) -> errors.TableCorruptError:
        """The refusal of a job, which names the restore."""
        if self.source is None:
            return errors.TableCorruptError(
                f"Version {self.version} has no rows: a commit of MemWAL states may have dropped them, and the "
                "versions before it no longer exist.",
                remedy="Restore the table from a backup; or, if it never had rows, append one and run the command "
                "again.",
            )
        return errors.TableCorruptError(
            f"Version {self.version} has no rows, because a commit of MemWAL states dropped them (lance#8438); version "
            f"{self.source} has {self.rows:,}.",
            remedy=f"Run memwal-ops {job} URI --restore: a new version then has the rows of version {self.source} and "
            f"the MemWALs of version {self.version}. Let no clean-up of old versions run before that.",
        )


def find_emptied(table: Table) -> Emptied | None:
    """Whether the table's version was emptied; one or two requests for each state commit since, none if it has rows."""
    newest, version = table.manifest, table.version
    if newest.manifest.fragments:
        return None
    while version > 1:
        if (before := table.manifest_of(version - 1)) is None:
            return Emptied(table.version, None, 0) if commits_states(table.store, newest, None) else None
        if not commits_states(table.store, newest, before):
            return None
        if before.manifest.fragments:
            return Emptied(table.version, version - 1, live_rows(before.manifest.fragments))
        newest, version = before, version - 1
    return None


def restore_emptied(table: Table, emptied: Emptied, note: commit.CommitNote) -> int:
    """Publish a version with the rows and indexes of ``emptied.source``, and the MemWALs as they are now.

    Raises ``TableCorruptError``: the source is gone, or has other columns; and as :func:`publish`.
    """
    if emptied.source is None:
        raise emptied.error(note.job)
    source = read_version_manifest(table.store, emptied.source, table.naming)
    if list(source.manifest.fields) != list(table.manifest.manifest.fields):
        raise errors.TableCorruptError(
            f"Version {emptied.source}, which has the rows that a commit of MemWAL states dropped, has other columns.",
            remedy=f"Restore it by dataset.checkout_version({emptied.source}) and restore(), which also reverts the "
            "MemWALs' states: stop their writers before, and let them replay their logs after.",
        )
    rows = draft_of(source)
    highest = draft_of(table.manifest).max_fragment_id
    known = [fragment_id for fragment_id in (rows.max_fragment_id, highest) if fragment_id is not None]
    return publish(table, Change(), note, Draft(rows.fragments, max(known, default=None), rows.indexes))


def commits_states(store: Store, version: VersionManifest, before: VersionManifest | None) -> bool:
    """Whether a version was made by a change of MemWAL states; by what changed, where its transaction is gone."""
    transaction = transaction_of(store, version)
    if transaction is not None:
        return transaction.HasField("update_mem_wal_state")
    return before is None or _index_id(version) not in {None, _index_id(before)}


def _index_id(version: VersionManifest) -> bytes | None:
    entry = find_memwal_entry(version.indexes)
    return None if entry is None or entry.name != MEMWAL_INDEX_NAME else entry.uuid.uuid


_DELETION_TYPES = {"array": 0, "bitmap": 1}


@dataclass(frozen=True, slots=True)
class Draft:
    """The next version, before its states are in it.

    pylance 14 builds no version of such a table: it decodes the details as those of the current layouts. So the
    manifest is built here, from V's own, and published by the same put-if-absent as every other commit
    (:mod:`memwal_ops.formats.lance.commit.commit`).

    Its transaction is an ``UpdateMemWalState``, also where rows come with it. Writers that began at V and commit later
    compare theirs with it: appends, updates and merges of the same MemWAL are then refused. As an ``Update`` of other
    fragments, a second merge of the same generation would pass, and insert its rows twice.
    """

    fragments: tuple[table_pb2.DataFragment, ...]
    max_fragment_id: int | None
    indexes: tuple[table_pb2.IndexMetadata, ...]


def check_mergeable(table: Table) -> None:
    """Refuse, before any work, a table to which :func:`merge_draft` cannot add rows.

    Raises ``UnsupportedFeatureError``: as :func:`commit.check_rewritable`, :func:`commit.check_takes_rows`; stable row
    ids, whose versions Lance keeps beside rows.
    """
    commit.check_rewritable(table)
    commit.check_takes_rows(table)
    if table.manifest.manifest.writer_feature_flags & STABLE_ROW_IDS:
        raise errors.UnsupportedFeatureError(
            f"{table.location.uri} has stable row ids, which cannot be assigned while its MemWAL index is legacy.",
            remedy="Run memwal-ops migrate --apply, and then memwal-ops merge: it merges what the migration adopts.",
        )


def draft_of(version: VersionManifest) -> Draft:
    """The content of a version."""
    manifest = version.manifest
    return Draft(
        tuple(manifest.fragments),
        manifest.max_fragment_id if manifest.HasField("max_fragment_id") else None,
        tuple(version.index_entries),
    )


def merge_draft(table: Table, change: Rewrite) -> Draft:
    """The content of the next version after a pass: new fragments, deletion vectors, and no fragment without rows."""
    before = draft_of(table.manifest)
    deletions = {fragment.id: fragment.to_json()["deletion_file"] for fragment in change.updated_fragments}
    kept = []
    for fragment in before.fragments:
        if fragment.id in change.removed_fragment_ids:
            continue
        copied = deepcopy(fragment)
        if fragment.id in deletions:
            known = {name: value for name, value in deletions[fragment.id].items() if value is not None}
            known["file_type"] = _DELETION_TYPES[known["file_type"]]
            copied.deletion_file.CopyFrom(table_pb2.DeletionFile(**known))
        kept.append(copied)
    highest = max([-1 if before.max_fragment_id is None else before.max_fragment_id, *(mem_wal.id for mem_wal in kept)])
    for number, fragment_made in enumerate(change.new_fragments, highest + 1):
        made = fragment_made.to_json()
        fragment = table_pb2.DataFragment(id=number, physical_rows=made["physical_rows"])
        if made["deletion_file"] is not None or made["row_id_meta"] is not None:
            raise errors.InvariantViolatedError("A fragment that was just written has deletions, or row ids.")
        for file in made["files"]:
            fragment.files.add(**{name: value for name, value in file.items() if value is not None})
        kept.append(fragment)
    last = highest + len(change.new_fragments)
    return Draft(tuple(kept), last if last >= 0 else None, before.indexes)


def publish(table: Table, change: Change, note: commit.CommitNote, draft: Draft | None = None) -> int:
    """Publish a change of states as exactly the next version, with the data of ``draft``; by default V's own.

    Returns and raises: as :func:`memwal_ops.formats.lance.commit.commit.commit_built`.
    """
    commit.check_rewritable(table)
    version = table.version + 1
    draft = draft or draft_of(table.manifest)
    manifest = deepcopy(table.manifest.manifest)
    del manifest.fragments[:]
    manifest.fragments.extend(draft.fragments)
    if draft.max_fragment_id is not None:
        manifest.max_fragment_id = draft.max_fragment_id
    if any(fragment.HasField("deletion_file") for fragment in draft.fragments):
        manifest.reader_feature_flags |= DELETION_FILES
        manifest.writer_feature_flags |= DELETION_FILES
    old = legacy_entry(table)
    details = encode_mem_wals(change.applied(mem_wals_of(table), version))
    indexes = [index for index in draft.indexes if index.name != old.name]
    section = table_pb2.IndexSection(indices=[*indexes, commit.next_entry(old, details, table.version)])
    transaction = note.transaction(table.version)
    transaction.update_mem_wal_state.CopyFrom(change.message(version))
    return commit.commit_built(table, replace(table.manifest, manifest=manifest, indexes=section), transaction)


def live_rows(fragments: Iterable[table_pb2.DataFragment]) -> int:
    """Rows that no deletion vector hides, by the manifest."""
    return sum(fragment.physical_rows - fragment.deletion_file.num_deleted_rows for fragment in fragments)
