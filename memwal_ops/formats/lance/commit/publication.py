"""Publish a version under exactly its number, and determine the outcome.

One put-if-absent publishes a version. This module handles the cases in which its response does not
show the outcome: it was lost, a repeated request got "exists", or the number was used and freed
again by a clean-up during a stall. The content of the version is built in
:mod:`memwal_ops.formats.lance.commit.commit`.
"""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core.anchors import Anchor, delete_proven
from memwal_ops.core.context import record
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.files.named_files import damaged_deletions
from memwal_ops.formats.lance.retention.live_versions import named_versions
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.log import get_logger
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table


# Well below the age at which a clean-up deletes files to which no version refers, a week.
_JUST_WRITTEN = 3600.0


class CommitLostError(errors.CommitConflictError):
    """Another writer published ``V + 1`` first. Nothing of this run is visible, and it has to replan.

    ``files_unreferenced``: no version refers to the files that the operation wrote, so they can be deleted.
    """

    remedy = "Run it again: it continues on the newest version."

    def __init__(self, message: str, *, files_unreferenced: bool = True) -> None:
        super().__init__(message)
        self.files_unreferenced = files_unreferenced


class FilesDeletedError(CommitLostError):
    """Files of the run were deleted meanwhile. No version could refer to them yet: it has to write them again."""


def may_be_named(error: BaseException) -> bool:
    """Whether a version may name the files of a commit that failed with this error: then they must be kept.

    So it is if the outcome is unknown, and at Ctrl-C or SIGTERM, which may arrive right after the publication.
    """
    if isinstance(error, CommitLostError):
        return not error.files_unreferenced
    return isinstance(error, errors.CommitStateUnknownError) or not isinstance(error, errors.MemwalOpsError)


@contextmanager
def deleted_unless_named(delete: Callable[[], object]) -> Iterator[None]:
    """Around a commit: if it fails, and no version can name the files that were written for it, delete them.

    If they stayed, each attempt would fill a full disk further.
    """
    try:
        yield
    except errors.MemwalOpsError as error:
        if not may_be_named(error):
            delete()
        raise


@dataclass(frozen=True, slots=True)
class CommitNote:
    """Who commits: job, run and release; recorded in the version's transaction properties. And when the run began."""

    job: str
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    release: str = __version__
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def seconds(self) -> float:
        """How long the run has taken."""
        return time.monotonic() - self.began

    def properties(self) -> dict[str, str]:
        """The transaction properties, which distinguish leftovers from files of other writers (docs/jobs.md)."""
        return {"memwal-ops.job": self.job, "memwal-ops.run_id": self.run_id, "memwal-ops.version": self.release}

    def transaction(self, read_version: int) -> table_pb2.Transaction:
        """A new transaction with them, of a commit on a version, and without an operation yet."""
        made = table_pb2.Transaction(read_version=read_version, uuid=str(uuid.uuid4()))
        made.transaction_properties.update(self.properties())
        return made


def refuse_if_not_newest(table: Table, version: int) -> None:
    """Refuse to publish if another version was published since ``table`` was read: its name may be free again.

    Timeline: a merger stalls at V; others commit V+1 and V+2, a clean-up removes V+1 and the files
    to which only V referred. The name V+1 is free, but a version under it would refer to deleted files.
    """
    listed = version_files.list_page(table.store)
    if newest_version(table, listed) != table.version:
        raise commit_lost(table, version)
    refuse_replaced(table, version, listed)


def added_files(table: Table, built: version_manifest.VersionManifest) -> frozenset[str]:
    """Keys of the files that a version has in addition to those of ``table``."""
    return version_files.references(built).own - version_files.references(table.manifest).own


def refuse_missing_files(table: Table, added: Iterable[str]) -> None:
    """Refuse to publish a version on ``table`` if files that it adds are gone: each must just have been seen.

    Timeline: a merge writes files and is suspended for days; a clean-up deletes them, since no version refers to them;
    the merge resumes, the version that it read is still the newest, and the one that it publishes lists them.

    Args:
        table: the version that everything was decided on.
        added: file keys; indexes may have been built long before ``table`` was read, all else was written after it.
    """
    recent = time.time() - table.listed.at < _JUST_WRITTEN
    doubtful = [key for key in added if not recent or key.startswith(f"{INDICES_FOLDER}/")]
    missing = version_files.missing_files(table.store, doubtful)
    if missing:
        raise FilesDeletedError(
            f"{missing[0]} of {table.location.uri} was deleted before a version could refer to it: the run, or its "
            "machine, was suspended."
        )


def refuse_wrong_deletions(table: Table, built: version_manifest.VersionManifest, added: frozenset[str]) -> None:
    """Refuse to publish a version on ``table`` if a deletion file that it adds does not read back as it should.

    Raises:
        StorageError: with its name; the store, or what pylance read from it, is at fault.
    """
    with_new_ones = [
        fragment
        for fragment in built.manifest.fragments
        if fragment.HasField("deletion_file")
        and version_files.deletion_path(fragment.id, fragment.deletion_file) in added
    ]
    fresh = table_pb2.Manifest(fragments=with_new_ones, base_paths=built.manifest.base_paths)
    damage = damaged_deletions(table.location, table.store, fresh, table.sound)
    if damage is not None:
        raise errors.StorageError(
            f"{damage.path} {damage.why}; it was just written, and nothing was published.",
            remedy="Run it again. If it happens again, the store returns wrong bytes.",
        )


def newest_version(table: Table, listed: version_files.VersionPage) -> int:
    """The newest version by a new listing; one more request if that does not determine it."""
    if listed.newest is not None:
        return listed.newest
    with lance_errors("find the newest version of", table.location.uri):
        return int(table.handle.get().latest_version)


def refuse_replaced(table: Table, version: int, listed: version_files.VersionPage) -> None:
    """Refuse to publish if the table was replaced by another one at the same version.

    Timeline: a merger reads version 3; the table is removed and created again by the same steps, so that it
    is also at version 3. A version 4 that is built on the first version 3 would refer to files of the removed table.

    The manifest is read again, unless the listings before it was read and now show the same object, by its entity tag.
    """
    if version_files.is_same_file(table.file, listed.versions.get(table.version)):
        return
    try:
        current = version_files.read_version_manifest(table.store, table.version, table.naming)
    except (errors.ObjectNotFoundError, errors.InvalidFormatError) as error:
        raise commit_lost(table, version) from error
    if current != table.manifest:
        raise commit_lost(table, version)


def refuse_gaps(table: Table) -> None:
    """Refuse a commit that pylance rebases if a version since ``table``'s is missing, or the table was replaced.

    A rebase ignores versions that are missing: it would not see their changes
    (docs/upstream/updates_double_rows_beside_a_cleanup.py).
    """
    listed = version_files.list_page(table.store)
    newest = newest_version(table, listed)
    since = range(table.version + 1, newest + 1)
    if not all(version in listed.versions or is_taken(table, version) for version in since):
        raise commit_lost(table, newest)
    refuse_replaced(table, table.version + 1, listed)


def is_taken(table: Table, version: int) -> bool:
    """Whether a version of that number exists."""
    return table.store.head(version_files.version_path(version, table.naming)) is not None


def commit_lost(table: Table, version: int, *, files_unreferenced: bool = True) -> CommitLostError:
    """The error for a version that another writer published first."""
    return CommitLostError(
        f"Version {version} of {table.location.uri} was published by another writer.",
        files_unreferenced=files_unreferenced,
    )


def publish(table: Table, data: bytes, version: int) -> None:
    """Put the manifest ``data`` as ``version``, if that version does not exist.

    Raises:
        CommitLostError: another writer published that version.
        CommitStateUnknownError: the put failed, and reading back does not show whether it succeeded.
        InvariantViolatedError: it has not all values of the table's dictionary columns; nothing was published.
    """
    _refuse_lost_values(table, data)
    path = version_files.version_path(version, table.naming)
    failure: errors.StorageError | None = None
    try:
        published = table.store.put_if_absent(path, data)
    except errors.StorageError as error:
        published, failure = False, error
    if not published:
        stored = _read_back(table, path, failure)
        if stored is None and failure is not None:
            # Not there now, but a request that is still in flight may succeed later: the outcome is unknown, so this
            # run must not report a failure and must not clean up.
            raise errors.CommitStateUnknownError(
                f"Whether version {version} was committed is unknown: {failure}"
            ) from failure
        if stored is None:
            # Taken a moment ago, and absent now: cleaned up, or this read is stale and the manifest is this run's. The
            # files to which it may refer must be kept.
            raise commit_lost(table, version, files_unreferenced=False)
        # Taken, perhaps by this run: a client that repeats a put after a lost response gets "exists". Every build of a
        # version contains its own transaction uuid, so equal bytes were written by this run.
        if stored != data:
            raise commit_lost(table, version)
    record(version)


def _refuse_lost_values(table: Table, data: bytes) -> None:
    """Refuse a manifest that has not the values of the dictionary columns that are inside of ``table``'s.

    Lance reads other bytes as the values then, or none; no row tells that they are wrong.
    """
    before = version_manifest.dictionary_values(table.manifest.manifest, table.manifest.dictionaries)
    if not before:
        return
    manifest = version_manifest.decode_version_manifest(data).manifest
    after = version_manifest.dictionary_values(manifest, data)
    if any(before[column] != after.get(column) for column in before.keys() & {field.id for field in manifest.fields}):
        raise errors.InvariantViolatedError(
            f"The new version of {table.location.uri} would lose values of a dictionary column."
        )


def _read_back(table: Table, path: str, cause: errors.StorageError | None) -> bytes | None:
    try:
        return table.store.get(path)
    except errors.ObjectNotFoundError:
        return None
    except errors.StorageError as error:
        raise errors.CommitStateUnknownError(f"Whether the commit at {path} succeeded is unknown: {error}") from (
            cause or error
        )


def verify_in_history(table: Table, published: version_manifest.VersionManifest, progress: Mapping[UUID, int]) -> None:
    """Verify that the published version is in the table's history: later versions are built on it.

    :func:`refuse_if_not_newest` does not cover the put itself: a run that stalls between the two publishes
    a version on which no later version is built. It must not report success, and the version may be broken.

    Only a version that cannot be read is deleted here, and none to which a tag, a branch or a hold refers: whether it
    was late is decided by modification times, and the clock of another machine may be behind. All other versions are
    kept and logged. No other file is deleted in any case: a version in the history may refer to it.

    Raises:
        CommitLostError: it is not in the history.
        CommitStateUnknownError: the table could not be read. The caller must not treat this as a
            refusal: the version exists and refers to its files.
    """
    try:
        _verify_in_history(table, published, progress)
    except CommitLostError:
        raise
    except errors.MemwalOpsError as error:
        raise errors.CommitStateUnknownError(
            f"Version {published.manifest.version} was published, but whether later versions are built on it "
            f"could not be verified: {error}"
        ) from error


def _verify_in_history(table: Table, published: version_manifest.VersionManifest, progress: Mapping[UUID, int]) -> None:
    version = int(published.manifest.version)
    listed = version_files.list_page(table.store)
    if newest_version(table, listed) <= version:
        table.remember(published, listed)
        return
    newest = table.newest()
    added = _names(published) - _names(table.manifest)
    if newest.version <= version or added & _names(newest.manifest):
        return
    if added and _was_published_late(table, version, added):
        # Times may be wrong, so later versions may be built on this one. Replanning loses nothing.
        kept = not _delete_unreadable(newest, published)
        get_logger(__name__).warning("published_late", table=table.location.uri, version=version, kept=kept)
        raise CommitLostError(
            f"Version {version} of {table.location.uri} was published after a later version.", files_unreferenced=False
        )
    if any(newest.index.merged_generations.get(region_id, 0) < merged for region_id, merged in progress.items()):
        # A later version reverted the progress (a plain commit of the MemWAL index does that),
        # or it cannot be determined which was published first. Merging again is idempotent.
        raise CommitLostError(
            f"Version {newest.version} of {table.location.uri} reverted the merge progress of version {version}.",
            files_unreferenced=False,
        )


def _was_published_late(table: Table, version: int, added: set[tuple[object, ...]]) -> bool:
    """Whether a later version was published first: it is older by the store's clock, and not built on this one.

    The clock alone is not a proof: on a shared file system it is the writing machine's clock.
    """
    published = {
        number: meta.last_modified for number, meta in version_files.list_versions(table.store).numbered.items()
    }
    at = published.get(version)
    older = [later for later, time in published.items() if at is not None and later > version and time < at]
    return bool(older) and added.isdisjoint(
        _names(version_files.read_version_manifest(table.store, min(older), table.naming))
    )


def _delete_unreadable(newest: Table, published: version_manifest.VersionManifest) -> bool:
    """Whether the published version was deleted: files that it needs are missing, and no holder refers to it."""
    version = int(published.manifest.version)
    path = version_files.version_path(version, newest.naming)
    try:
        needed = version_files.references(published).own - version_files.references(newest.manifest).own
    except errors.InvalidFormatError:
        return False  # written by a release with more kinds of files
    if not version_files.missing_files(newest.store, needed) or version in named_versions(newest):
        return False
    meta = newest.store.head(path)
    if meta is None or newest.store.get(path) != version_manifest.encode_version_manifest(published):
        return False  # expired meanwhile, or another writer's
    try:
        return not delete_proven(newest.store, [path], [Anchor(f"Version {version}", meta)]).failed
    except errors.TableReplacedError:
        return False


def _names(version: version_manifest.VersionManifest) -> set[tuple[object, ...]]:
    """The unique names by which a version's descendants are recognized: data files, deletion vectors and indexes.

    This includes indexes that the version itself removed: it was built on a version that had them.
    """
    fragments = version.manifest.fragments
    indexes = [*version.index_entries]
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
    """Advance pylance's hint of the newest version, best effort: readers probe onward from an older one.

    Object stores have none; the listing from which the table was opened shows whether there is one.

    Errors are ignored, because the version is published. Timeline of the loss that this prevents: a merger publishes
    V+1, its lease is lost, the write of the hint is denied, and the caller treats that as a failed commit and deletes
    the files of V+1.
    """
    try:
        hinted = table.listed.has_hint()
        if hinted or (hinted is None and table.store.head(version_files.VERSION_HINT) is not None):
            table.store.put(version_files.VERSION_HINT, b'{"version":%d}' % version)
    except (errors.StorageError, errors.LeaseLostError):
        return
