"""Commit index segments of a plain table by pylance's own commit, which is rebased over concurrent commits.

There is no merge progress that a rebase could revert, and a commit of exactly V + 1 would starve if writers append
in a loop. pylance's conflict check refuses conflicting changes: another change of the same index, or a rewrite of the
fragments that the segments cover.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import lance

from memwal_ops.core.holds import holds_in_force
from memwal_ops.core.published import record
from memwal_ops.errors import MemwalOpsError, ObjectNotFoundError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit.index_build import to_pylance
from memwal_ops.formats.lance.commit.publication import commit_lost, refuse_gaps, refuse_missing_files
from memwal_ops.formats.lance.files.datasets import lance_options, open_dataset
from memwal_ops.formats.lance.files.lance_errors import is_commit_conflict, lance_errors
from memwal_ops.formats.lance.files.referenced_files import BASE_FOLDERS, index_key
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER, read_version_manifest
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.formats.lance.commit.index_build import IndexBuild
    from memwal_ops.formats.lance.commit.publication import CommitNote
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import Store

_CLEAN_UP = "lance.auto_cleanup."
_REMEDY = "Turn the setting off (dataset.optimize.disable_auto_cleanup()) and let memwal-ops expire do it, or {}."


def commit_segments(table: Table, build: IndexBuild, note: CommitNote) -> None:
    """Publish ``build``, which was built on ``table``, in whichever version comes next.

    Raises:
        CommitLostError: a concurrent commit conflicts with it, or the table was replaced; nothing was published.
        UnsupportedFeatureError: pylance's commit would delete what a hold keeps, or lose a part of an entry.
        MemwalOpsError: the store failed. It is not known whether the segments were published, so that their files
            must be kept.
    """
    current = {one.uuid.uuid: one for one in table.manifest.index_entries}
    operation = lance.LanceOperation.CreateIndex(
        [to_pylance(entry) for entry in build.added], [to_pylance(current[segment.bytes]) for segment in build.removed]
    )
    _check_commit(table)
    refuse_missing_files(table, [index_key(entry) for entry in build.added])
    try:
        _commit(table, operation, note)
    except MemwalOpsError as error:
        published = _is_published(table, build)
        if published:
            return
        if is_commit_conflict(error):
            raise commit_lost(table, table.version + 1, files_unreferenced=published is False) from error
        raise


def commit_coverage(
    table: Table, old: Iterable[table_pb2.IndexMetadata], new: Iterable[table_pb2.IndexMetadata], note: CommitNote
) -> None:
    """Replace entries of ``table``'s indexes by others with the same files, in whichever version comes next.

    Raises:
        CommitLostError: a concurrent commit conflicts with it, or the table was replaced; nothing was published.
        MemwalOpsError: the store failed, or see :func:`commit_segments`; it may have been published.
    """
    operation = lance.LanceOperation.CreateIndex(
        [to_pylance(entry) for entry in new], [to_pylance(entry) for entry in old]
    )
    _commit_or_lose(table, operation, note)


def commit_deletion(table: Table, operation: lance.LanceOperation.Delete, note: CommitNote) -> None:
    """Publish deletions that were computed on ``table``, in whichever version comes next.

    Raises:
        CommitLostError: a concurrent commit conflicts with it; nothing was published.
        MemwalOpsError: the store failed; it may have been published.
    """
    _commit_or_lose(table, operation, note)


def _commit_or_lose(table: Table, operation: lance.LanceOperation.BaseOperation, note: CommitNote) -> None:
    _check_commit(table)
    try:
        _commit(table, operation, note)
    except MemwalOpsError as error:
        if is_commit_conflict(error):
            raise commit_lost(table, table.version + 1) from error
        raise


def _check_commit(table: Table) -> None:
    table.guard.check()  # here, since the commit is pylance's own and bypasses our store
    refuse_gaps(table)
    refuse_auto_cleanup(table)


def _commit(table: Table, operation: lance.LanceOperation.BaseOperation, note: CommitNote) -> None:
    transaction = lance.Transaction(
        read_version=table.version, operation=operation, transaction_properties=note.properties()
    )
    with lance_errors("commit a change of", table.location.uri):
        options = lance_options(table.location)
        record(int(lance.LanceDataset.commit(table.location.uri, transaction, storage_options=options).version))


def lacks_columns(table: Table, index: BaseIndex) -> bool:
    """Whether a column of an index was dropped: pylance's conflict check does not detect that.

    Every query with a filter fails then, also on other columns.
    """
    known = {column.id for column in table.manifest.manifest.fields}
    return any(not known.issuperset(entry.fields) for entry in index.segments)


def drop_index(table: Table, name: str) -> Table:
    """Drop an index whose column is gone; return the newest version."""
    _check_commit(table)
    with lance_errors("drop an index of", table.location.uri):
        dataset = open_dataset(table.location, version=table.version)
        dataset.drop_index(name)
        record(int(dataset.version))
    get_logger(__name__).warning("index_without_column_dropped", table=table.location.uri, index=name)
    return table.newest()


def _is_published(table: Table, build: IndexBuild) -> bool | None:
    """Whether a version after ``table``'s names the segments; None: a version that may have is gone."""
    newest = table.newest()
    if _names(newest.manifest, build):
        return True
    complete = True
    for version in range(table.version + 1, newest.version):
        try:
            if _names(read_version_manifest(newest.store, version, newest.naming), build):
                return True
        except ObjectNotFoundError:
            complete = False
    return False if complete else None


def _names(manifest: VersionManifest, build: IndexBuild) -> bool:
    added = {entry.uuid.uuid for entry in build.added}
    return not added.isdisjoint(entry.uuid.uuid for entry in manifest.index_entries)


def refuse_auto_cleanup(table: Table) -> None:
    """Refuse a commit of pylance's own that may clean up: if a hold is in force, or below the base folders is a link.

    If a table has the setting ``lance.auto_cleanup.*``, pylance deletes old versions in each N-th commit. It respects
    tags and branches, but not holds, and follows symbolic links out of the table. Detached commits do not start it (a
    contract test shows that). All jobs make detached commits, except those that call this.

    Raises:
        UnsupportedFeatureError: with the hold or the link.
    """
    if not any(key.startswith(_CLEAN_UP) for key in table.manifest.manifest.config):
        return
    hold = next(iter(holds_in_force(table.store, datetime.now(UTC))), None)
    if hold is not None:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has the setting lance.auto_cleanup, by which pylance may delete version "
            f"{hold.versions[0]} in this commit, and hold {hold.number} of {hold.by} keeps it.",
            remedy=_REMEDY.format("wait until the hold ends; a tag instead of it is respected"),
        )
    link = _first_link(table.store) if table.location.scheme == "file" else None
    if link is not None:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has the setting lance.auto_cleanup, and pylance's clean-up deletes the files behind "
            f"the symbolic link {link}.",
            remedy=_REMEDY.format("put the files themselves into the table's folder"),
        )


def _first_link(store: Store) -> str | None:
    bases = {VERSIONS_FOLDER, *BASE_FOLDERS}
    if links := bases.intersection(store.list_level("").links):
        return min(links)
    folders = [*bases]
    while folders:
        level = store.list_level(folders.pop())
        if level.links:
            return level.links[0]
        folders += [*level.directories, *level.empty]
    return None
