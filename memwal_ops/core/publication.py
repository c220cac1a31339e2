"""Publish a version under exactly its number, and find out what became of it.

One put-if-not-exists makes a version. Around it lie the cases in which its answer is not the
truth: the answer was lost, a repeated request is told "exists", the number was used and freed
again by a clean-up while we stalled. May not enter: what the version says, and how it was built
(:mod:`memwal_ops.core.commit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.versions import VERSIONS_FOLDER, read_version_manifest, version_path
from memwal_ops.errors import (
    CommitStateUnknownError,
    InvalidFormatError,
    MemwalOpsError,
    ObjectNotFoundError,
    StorageError,
)
from memwal_ops.format.names import parse_version_manifest_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.table import Table
    from memwal_ops.format.version_manifest import VersionManifest

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


def refuse_overtaken(table: Table, version: int) -> None:
    """Give up where anything was published since: its name may be free again.

    Timeline: a merger stalls at V; others commit V+1 and V+2, a clean-up removes V+1 and the files
    that only V named. The name V+1 is free, but a version under it would name files that are gone.
    """
    with lance_errors("find the newest version of", table.location.uri):
        newest = table.dataset.latest_version
    if newest != table.version:
        raise lost(table, version)
    refuse_replaced(table, version)


def refuse_replaced(table: Table, version: int) -> None:
    """Give up where another table stands at this place by now, by chance at the same version.

    Timeline: a merger reads version 3; the table is removed and made anew by the same steps, so that it
    is at version 3, too. A version 4 made from what was read would name files that went with the old one.
    """
    try:
        standing = read_version_manifest(table.store, table.version, table.naming)
    except (ObjectNotFoundError, InvalidFormatError) as error:
        raise lost(table, version) from error
    if standing != table.manifest:
        raise lost(table, version)


def is_taken(table: Table, version: int) -> bool:
    """Whether a version of that number stands."""
    return table.store.head(version_path(version, table.naming)) is not None


def lost(table: Table, version: int, *, files_are_ours: bool = True) -> CommitLostError:
    """The error of whoever was second."""
    return CommitLostError(
        f"Version {version} of {table.location.uri} was published by another writer.", files_are_ours=files_are_ours
    )


def publish(table: Table, data: bytes, version: int) -> None:
    """Put the manifest ``data`` where nothing stood, as ``version``.

    Raises:
        CommitLostError: another writer's version stands there.
        CommitStateUnknownError: the store gave no answer and reading back gave none either.
    """
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
                raise lost(table, version, files_are_ours=False)
            published = standing == data
    if not published:
        raise lost(table, version)


def _read_back(table: Table, path: str, cause: StorageError | None) -> bytes | None:
    try:
        return table.store.get(path)
    except ObjectNotFoundError:
        return None
    except StorageError as error:
        raise CommitStateUnknownError(f"The store gave no answer to the commit at {path}: {error}") from (
            cause or error
        )


def prove_living(table: Table, published: VersionManifest, progress: Mapping[UUID, int]) -> None:
    """Make sure that what was published is part of the table's living history.

    :func:`refuse_overtaken` leaves the moment of the put itself: whoever is stalled there publishes
    a version that nobody builds on. Reporting success would be a lie, and the version is broken.

    No file is deleted here, whatever the proof says: a version of the living history may name it.

    Raises:
        CommitLostError: it is not.
        CommitStateUnknownError: the table could not be read. To the caller this must not look like a
            refusal: the version stands and names its files.
    """
    try:
        _prove_living(table, published, progress)
    except CommitLostError:
        raise
    except MemwalOpsError as error:
        raise CommitStateUnknownError(
            f"Version {published.manifest.version} was published, but whether others went on from it "
            f"cannot be read: {error}"
        ) from error


def _prove_living(table: Table, published: VersionManifest, progress: Mapping[UUID, int]) -> None:
    version = int(published.manifest.version)
    newest = table.newest()
    ours = _names(published) - _names(table.manifest)
    if newest.version <= version or ours & _names(newest.manifest):
        return
    if ours and _was_published_late(table, version, ours):
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


def _was_published_late(table: Table, version: int, ours: set[tuple[object, ...]]) -> bool:
    """Whether a later version stood first: older by the store's clock, and not built on ours.

    The clock alone is no proof: on a shared file system it is that of whoever wrote.
    """
    standing = {
        name.version: meta.last_modified
        for meta in table.store.list(VERSIONS_FOLDER)
        if (name := parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])) is not None and not name.detached
    }
    at = standing.get(version)
    older = [later for later, time in standing.items() if at is not None and later > version and time < at]
    return bool(older) and ours.isdisjoint(_names(read_version_manifest(table.store, min(older), table.naming)))


def _names(version: VersionManifest) -> set[tuple[object, ...]]:
    """What tells a version's descendants: data files, deletion vectors and indexes, each named like no other.

    Also the indexes that the version itself took away: it was built on a version that had them.
    """
    fragments = version.manifest.fragments
    indexes = [] if version.indexes is None else [*version.indexes.indices]
    if version.transaction is not None:
        indexes += version.transaction.create_index.removed_indices
    return (
        {(file.path,) for fragment in fragments for file in fragment.files}
        | {
            (fragment.id, fragment.deletion_file.read_version, fragment.deletion_file.id)
            for fragment in fragments
            if fragment.HasField("deletion_file")
        }
        | {("index", entry.uuid.uuid) for entry in indexes}
    )


def advance_hint(table: Table, version: int) -> None:
    """Move pylance's local hint forward, best effort: readers probe onward from an older one."""
    try:
        if table.store.head(_HINT) is not None:
            table.store.put(_HINT, b'{"version":%d}' % version)
    except StorageError:
        return
