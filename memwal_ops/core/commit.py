"""The one way to publish a base version that carries merge progress: exactly ``V + 1``, or nothing.

Why not pylance's own commit? It rebases: a transaction computed at version V is published as V+n
whenever its conflict check sees no overlap, and that check knows nothing of merging. Three
timelines, each measured and kept as a contract test, that lose or double a row:

1. Merger A plans generations 1-5 at V; B merges 1-3 and inserts key k (put in 2, deleted in 4).
   A's delete found no k at V. A's marked upsert for 5 is rebased over B's commit without a
   conflict: k, deleted, is back, and progress says that nobody will look again.
2. The same race with the indexed join: both insert key k as new, neither sees the other's row, and
   k stands twice.
3. A marker carried by ``execute_uncommitted`` is dropped by ``LanceDataset.commit``: data lands,
   progress does not.

So: pylance builds the new version under a detached name (nobody reads those), we stamp version and
progress into it, pylance opens the stamped manifest once to prove that it reads, and one
put-if-not-exists publishes it as V+1. Whoever is second finds the name taken, re-reads everything
and decides again. Progress, data and deletions of all regions of a pass are one version: there is
no moment in which one is visible without the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import lance

from memwal_ops.core.datasets import lance_options, open_dataset
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER, read_version_manifest, version_path
from memwal_ops.errors import (
    CommitStateUnknownError,
    InvariantViolatedError,
    MemwalOpsError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedFeatureError,
)
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry, stamp_progress
from memwal_ops.format.names import NamingScheme, detached_manifest_name, parse_version_manifest_name
from memwal_ops.format.version_manifest import (
    VersionManifest,
    check_writable,
    decode_version_manifest,
    encode_version_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.table import Table

_HINT = f"{VERSIONS_FOLDER}/latest_version_hint.json"


class CommitLostError(MemwalOpsError):
    """Another writer published ``V + 1`` first: nothing of ours is visible; decide again.

    ``files_are_ours``: no version anywhere names the files that the operation wrote, so they may go.
    """

    exit_code = 30
    reason = "commit_lost"

    def __init__(self, message: str, *, files_are_ours: bool = True) -> None:
        super().__init__(message)
        self.files_are_ours = files_are_ours


@dataclass(frozen=True, slots=True)
class CommitNote:
    """Who commits: goes into the version's transaction properties, for whoever reads the history."""

    job: str
    run_id: str
    release: str

    def properties(self) -> dict[str, str]:
        """The transaction properties of design.md."""
        return {"memwal-ops.job": self.job, "memwal-ops.run_id": self.run_id, "memwal-ops.version": self.release}


def check_committable(table: Table) -> None:
    """Refuse, before any work is done, a table on which the strict commit would be refused.

    Raises:
        UnsupportedFeatureError: V1 naming (pylance makes no detached version there, landmine 11), an
            external manifest store, unknown writer feature flags or manifest fields (S3-013).
    """
    check_writable(table.manifest.manifest)
    encode_version_manifest(table.manifest)
    if "+" in table.location.scheme:
        raise UnsupportedFeatureError(
            f"{table.location.uri} commits through an external manifest store, which memwal-ops cannot reach.",
            remedy="Open it by its plain URI on a store with conditional writes, for all writers alike.",
        )
    if table.naming is not NamingScheme.V2:
        raise UnsupportedFeatureError(
            f"{table.location.uri} names its manifests by the V1 scheme, where Lance makes no detached version.",
            remedy="Run lance.dataset(uri).migrate_manifest_paths_v2() once, with no writer running.",
        )


def commit_strict(
    table: Table,
    operation: lance.LanceOperation.BaseOperation,
    progress: Mapping[UUID, int],
    note: CommitNote,
) -> int:
    """Publish ``operation``, computed at ``table.version``, as exactly the next version.

    Args:
        table: the pinned version that everything was decided on.
        operation: the change, in terms of that version.
        progress: region id to the generation that is merged once this is visible (S0-067).
        note: who commits.

    Returns:
        The new version, ``table.version + 1``.

    Raises:
        CommitLostError: that version exists already; nothing was published.
        CommitStateUnknownError: the store gave no answer and reading back gave none either.
        UnsupportedFeatureError: see :func:`check_committable`.
        InvariantViolatedError: progress would fall, or the stamped manifest does not read.
    """
    check_committable(table)
    version = table.version + 1
    detached = _build_detached(table, operation, note)
    detached_path = f"{VERSIONS_FOLDER}/{detached_manifest_name(detached)}"
    leftovers = [detached_path]
    try:
        built = decode_version_manifest(table.store.get(detached_path))
        leftovers.append(f"{TRANSACTIONS_FOLDER}/{built.manifest.transaction_file}")
        _refuse_rebased(table, built, version)
        stamped = stamp_progress(built, progress, version=version)
        _prove_readable(table, stamped, detached, detached_path)
        _refuse_overtaken(table, version)
        leftovers.pop()  # from here on a version may name its transaction file
        _publish(table, encode_version_manifest(stamped), version)
    finally:
        table.store.delete_many(leftovers)
    _prove_living(table, stamped, progress)
    _advance_hint(table, version)
    return version


def _build_detached(table: Table, operation: lance.LanceOperation.BaseOperation, note: CommitNote) -> int:
    """Let pylance build the version, under a name that no reader looks at.

    pylance refuses where another writer's commit conflicts with ours; to us that is a lost race
    like any other.
    """
    transaction = lance.Transaction(
        read_version=table.version, operation=operation, transaction_properties=note.properties()
    )
    try:
        with lance_errors("build the new version of", table.location.uri):
            dataset = lance.LanceDataset.commit(
                table.location.uri,
                transaction,
                detached=True,
                storage_options=lance_options(table.location),
            )
            return int(dataset.version)
    except StorageError as error:
        if _is_taken(table, table.version + 1):
            raise _lost(table, table.version + 1) from error
        raise


def _refuse_rebased(table: Table, built: VersionManifest, version: int) -> None:
    """Give up where pylance built on another merger's version.

    Also a detached commit is rebased over whatever was published since ``read_version``, by the
    same conflict check that knows nothing of merging. What it then built is not what was decided.
    """
    entry = None if built.indexes is None else find_memwal_entry(built.indexes)
    if entry is None or decode_memwal_index(entry).merged_generations != table.index.merged_generations:
        raise _lost(table, version)


def _refuse_overtaken(table: Table, version: int) -> None:
    """Give up where anything was published since: its name may be free again.

    Timeline: a merger stalls at V; others commit V+1 and V+2, a clean-up removes V+1 and the files
    that only V named. The name V+1 is free, but a version under it would name files that are gone.
    """
    with lance_errors("find the newest version of", table.location.uri):
        newest = table.dataset.latest_version
    if newest != table.version:
        raise _lost(table, version)


def _is_taken(table: Table, version: int) -> bool:
    return table.store.head(version_path(version, table.naming)) is not None


def _lost(table: Table, version: int, *, files_are_ours: bool = True) -> CommitLostError:
    return CommitLostError(
        f"Version {version} of {table.location.uri} was published by another writer.", files_are_ours=files_are_ours
    )


def _prove_readable(table: Table, stamped: VersionManifest, detached: int, path: str) -> None:
    """Have pylance open what we stamped, still under the detached name, and compare what it sees.

    The manifest is ours by then, not pylance's; if our encoding ever disagreed with a release of
    Lance, this is where it shows, and nothing has been published.
    """
    trial = type(stamped.manifest)()
    trial.CopyFrom(stamped.manifest)
    trial.version = detached
    table.store.put(path, encode_version_manifest(replace(stamped, manifest=trial)))
    with lance_errors("open the stamped version of", table.location.uri):
        dataset = open_dataset(table.location, version=detached)
        seen = sorted(fragment.fragment_id for fragment in dataset.get_fragments())
        names = {index.name for index in dataset.describe_indices()}
    expected = sorted(fragment.id for fragment in stamped.manifest.fragments)
    wanted = {entry.name for entry in stamped.indexes.indices} if stamped.indexes is not None else set()
    if seen != expected or names != wanted:
        raise InvariantViolatedError(
            f"The stamped version of {table.location.uri} does not read back as it was built "
            f"(fragments {seen} for {expected}, indexes {sorted(names)} for {sorted(wanted)})."
        )


def _publish(table: Table, data: bytes, version: int) -> None:
    path = version_path(version, table.naming)
    try:
        published = table.store.put_if_absent(path, data)
    except StorageError as error:
        standing = _read_back(table, path, error)
        if standing is None:
            # Not there now, but a request that is still on its way may land yet: only a later
            # reader can tell, so this run must not say "failed" and must not clean up.
            raise CommitStateUnknownError(
                f"The store gave no answer to the commit of version {version}: {error}"
            ) from error
        published = standing == data
    else:
        if not published:
            # The name is taken, perhaps by ourselves: a client that repeats a put whose answer was
            # lost is told "exists". Every build of a version has its own transaction uuid inside,
            # so equal bytes are our bytes.
            standing = _read_back(table, path, None)
            if standing is None:
                # Taken a moment ago, and not there: cleaned up, or this answer is out of date and
                # the manifest is ours. Files that it may name must stay.
                raise _lost(table, version, files_are_ours=False)
            published = standing == data
    if not published:
        raise _lost(table, version)


def _read_back(table: Table, path: str, cause: StorageError | None) -> bytes | None:
    try:
        return table.store.get(path)
    except ObjectNotFoundError:
        return None
    except StorageError as error:
        raise CommitStateUnknownError(f"The store gave no answer to the commit at {path}: {error}") from (
            cause or error
        )


def _prove_living(table: Table, published: VersionManifest, progress: Mapping[UUID, int]) -> None:
    """Make sure that what was published is part of the table's living history.

    :func:`_refuse_overtaken` leaves the moment of the put itself: whoever is stalled there publishes
    a version that nobody builds on. Reporting success would be a lie, and the version is broken.

    No file is deleted here, whatever the proof says: a version of the living history may name it.
    """
    version = int(published.manifest.version)
    newest = table.newest()
    ours = _files(published) - _files(table.manifest)
    if newest.version <= version or ours & _files(newest.manifest):
        return
    if _was_published_late(table, version, ours):
        table.store.delete_many([version_path(version, table.naming)])
        raise CommitLostError(
            f"Version {version} of {table.location.uri} was published and cleaned up by others.",
            files_are_ours=False,
        )
    if any(newest.index.merged_generations.get(region_id, 0) < merged for region_id, merged in progress.items()):
        # A later version took progress back (a plain commit of the MemWAL index does that,
        # landmine 1), or nothing is left to tell which stood first. Merging again is idempotent.
        raise CommitLostError(
            f"Version {newest.version} of {table.location.uri} took back the merge progress of version {version}.",
            files_are_ours=False,
        )


def _was_published_late(table: Table, version: int, files: set[tuple[object, ...]]) -> bool:
    """Whether a later version stood first: older by the store's clock, and without our files.

    The clock alone is no proof: on a shared file system it is that of whoever wrote.
    """
    standing = {
        name.version: meta.last_modified
        for meta in table.store.list(VERSIONS_FOLDER)
        if (name := parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])) is not None and not name.detached
    }
    ours = standing.get(version)
    older = [later for later, at in standing.items() if ours is not None and later > version and at < ours]
    return bool(older) and files.isdisjoint(_files(read_version_manifest(table.store, min(older), table.naming)))


def _files(version: VersionManifest) -> set[tuple[object, ...]]:
    """What names a version's data files and deletion vectors, each in a way that no other file shares."""
    fragments = version.manifest.fragments
    return {(file.path,) for fragment in fragments for file in fragment.files} | {
        (fragment.id, fragment.deletion_file.read_version, fragment.deletion_file.id)
        for fragment in fragments
        if fragment.HasField("deletion_file")
    }


def _advance_hint(table: Table, version: int) -> None:
    """Move pylance's local hint forward, best effort: readers probe onward from an older one."""
    try:
        if table.store.head(_HINT) is not None:
            table.store.put(_HINT, b'{"version":%d}' % version)
    except StorageError:
        return
