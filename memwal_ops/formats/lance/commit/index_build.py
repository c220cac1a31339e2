"""Build index segments with pylance without publishing them.

pylance's own commit is not suitable here: a changed codebook must be detected before a reader can see it, and merge
progress must not depend on how a release rebases. So the commit is aborted at its last step. A dataset can be opened
with a commit lock; pylance writes the index files and its transaction, then acquires the lock. The lock function reads
the transaction, which describes the new segments completely, and raises. pylance removes the transaction and fails; the
files remain unreferenced until :func:`memwal_ops.formats.lance.commit.commit.commit_indexes` publishes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn
from uuid import UUID

import lance
from google.protobuf.unknown_fields import UnknownFieldSet
from lance.dataset import Index, IndexFile
from lance.lance import Bitmap

from memwal_ops.errors import MemwalOpsError, ObjectNotFoundError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit.publication import commit_lost
from memwal_ops.formats.lance.files.datasets import handle_options, is_commit_conflict, is_panic, lance_errors, metered
from memwal_ops.formats.lance.files.version_files import TRANSACTIONS_FOLDER, index_key
from memwal_ops.formats.lance.indexes.base_indexes import covered_by
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire._pb import table_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True, slots=True)
class IndexBuild:
    """Segments that are stored but not part of any version.

    Attributes:
        added: their entries.
        removed: ids of the segments that they replace.
    """

    added: tuple[table_pb2.IndexMetadata, ...]
    removed: frozenset[UUID]

    @property
    def covered(self) -> frozenset[int]:
        """Ids of the fragments that the new segments cover."""
        return covered_by(self.added)


def still_fits(build: IndexBuild, built_on: Table, newest: Table, name: str) -> bool:
    """Whether segments that were built on one version are correct on a later one.

    A merge in between only adds fragments and deletes rows: the segments remain correct for the old
    fragments. They are wrong if the index itself was changed, or if a fragment that
    they cover no longer exists or has other data files (compaction, a rewritten column).
    """
    if built_on.version == newest.version:
        return True
    # Of the reuse index: where it changed, rows were moved, and readers translate their addresses.
    if any(
        _segment_ids(newest, index_name) != _segment_ids(built_on, index_name)
        for index_name in (name, version_manifest.FRAGMENT_REUSE)
    ):
        return False
    files = {fragment.id: [*fragment.files] for fragment in newest.manifest.manifest.fragments}
    return all(
        files.get(fragment.id) == [*fragment.files]
        for fragment in built_on.manifest.manifest.fragments
        if fragment.id in build.covered
    )


def _segment_ids(table: Table, name: str) -> set[bytes]:
    return {entry.uuid.uuid for entry in table.manifest.index_entries if entry.name == name}


class _NotToBePublishedError(Exception):
    """Raised by the commit lock; pylance converts it to text."""


def update_index(table: Table, name: str, *, merge: int | None, retrain: bool = False) -> IndexBuild | None:
    """Bring an index up to ``table``'s version with ``optimize_indices``, unpublished.

    Args:
        merge: merge that many of its segments with the new rows; 0: the new rows get a segment of their own; None:
            pylance's default, which must not be used for vector indexes (docs/upstream/optimize_changes_centroids.py).
        retrain: build it anew instead, with new centroids; pylance derives their number from the number of rows.

    Returns the segments; None if pylance had nothing to do. Raises ``CommitLostError``: another process is building the
    same index on the same version, or has changed it; ``StorageError``: pylance failed, for its own reasons.
    """
    options = {"retrain": True} if retrain else {} if merge is None else {"num_indices_to_merge": merge}
    return _unpublished(table, name, lambda dataset: dataset.optimize.optimize_indices(index_names=[name], **options))


def create_index(table: Table, name: str, create: Callable[[lance.LanceDataset], object]) -> IndexBuild | None:
    """Create an index on ``table``'s version with the pylance call ``create``, unpublished."""
    return _unpublished(table, name, create)


def discard(table: Table, build: IndexBuild) -> None:
    """Delete the files of segments that will not be published; nothing refers to them."""
    table.discard([meta.path for entry in build.added for meta in table.store.list(index_key(entry))])


def _unpublished(table: Table, name: str, action: Callable[[lance.LanceDataset], object]) -> IndexBuild | None:
    prefix = f"{TRANSACTIONS_FOLDER}/{table.version}-"
    before = set(_names(table, prefix))
    operations: list[table_pb2.CreateIndex] = []
    lock_outcomes: list[BaseException | None] = []

    def lock(_: int) -> NoReturn:
        failure = None
        try:
            operations.extend(_operations(table, name, sorted(set(_names(table, prefix)) - before)))
        except BaseException as error:  # noqa: BLE001 - pylance would turn Ctrl-C into text, and the run would continue
            failure = error
        lock_outcomes.append(failure)
        raise _NotToBePublishedError

    table.refuse_damaged_deletions()
    with lance_errors("build index", name):
        dataset = metered(
            lance.dataset(table.location.uri, version=table.version, commit_lock=lock, **handle_options(table.location))
        )
    try:
        with lance_errors("build index", name):
            action(dataset)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if lock_outcomes and lock_outcomes[-1] is not None:
            raise lock_outcomes[-1] from error
        if lock_outcomes and not operations:
            raise _no_transaction_file(table, name) from error
        if not operations and is_commit_conflict(error):
            # pylance found before the lock that the index was changed; its files are left to its own clean-up.
            raise commit_lost(table, table.version + 1, files_unreferenced=False) from error
        if not operations:
            raise
    else:
        if not operations:
            return None
    if len(operations) > 1:
        # It cannot be determined which of them is this run's, so none is published, and none deleted.
        raise commit_lost(table, table.version + 1, files_unreferenced=False)
    operation = operations[0]
    return IndexBuild(
        tuple(operation.new_indices), frozenset(UUID(bytes=entry.uuid.uuid) for entry in operation.removed_indices)
    )


def _no_transaction_file(table: Table, name: str) -> MemwalOpsError:
    """The error for a build without a transaction file. pylance commits without the file if it cannot write it."""
    uri = table.location.uri
    if table.manifest.manifest.writer_feature_flags & version_manifest.NO_TRANSACTION_FILES:
        return UnsupportedFeatureError(
            f"{uri} is set to commit without transaction files, which are needed to build an index."
        )
    return StorageError(
        f"Index {name} of {uri} was built, but the transaction file that describes it could not be written.",
        remedy="Check whether the disk or the bucket's quota is full (runbooks/disk-full.md), and run it again.",
    )


def _names(table: Table, prefix: str) -> Iterator[str]:
    for meta in table.store.list(TRANSACTIONS_FOLDER, after=prefix):
        if meta.path.startswith(prefix):
            yield meta.path


def _operations(table: Table, name: str, paths: list[str]) -> Iterator[table_pb2.CreateIndex]:
    """The index builds of that name among the transactions that are about to be committed."""
    for path in paths:
        try:
            transaction = table_pb2.Transaction.FromString(table.store.get(path))
        except ObjectNotFoundError:
            continue  # another process's, aborted
        if any(entry.name == name for entry in transaction.create_index.new_indices):
            yield transaction.create_index


def to_pylance(entry: table_pb2.IndexMetadata) -> Index:
    """An entry as an argument for pylance.

    Raises:
        UnsupportedFeatureError: it has fields that this release does not define, and would drop.
    """
    if len(UnknownFieldSet(entry)):
        raise UnsupportedFeatureError(f"The entry of index {entry.name} has fields that this release does not define.")
    return Index(
        uuid=str(UUID(bytes=entry.uuid.uuid)),
        name=entry.name,
        fields=[*entry.fields],
        dataset_version=entry.dataset_version,
        fragment_ids=Bitmap(version_manifest.decode_fragment_bitmap(entry.fragment_bitmap)),
        index_version=entry.index_version,
        created_at=datetime.fromtimestamp(entry.created_at / 1000, UTC) if entry.created_at else None,
        base_id=entry.base_id if entry.HasField("base_id") else None,
        files=[IndexFile(file.path, file.size_bytes) for file in entry.files] or None,
        index_details=(entry.index_details.type_url, entry.index_details.value),
    )


def from_pylance(index: Index) -> table_pb2.IndexMetadata:
    """The entry of a segment that pylance wrote without publishing it.

    Raises:
        UnsupportedFeatureError: it has columns beside those that are indexed, which this release does not define.
    """
    if index.covering_fields:
        raise UnsupportedFeatureError(f"Index {index.name} covers columns, which this release does not define.")
    entry = table_pb2.IndexMetadata(
        fields=index.fields,
        name=index.name,
        dataset_version=index.dataset_version,
        fragment_bitmap=version_manifest.encode_fragment_bitmap(frozenset(index.fragment_ids)),
        index_version=index.index_version,
    )
    entry.uuid.uuid = UUID(index.uuid).bytes
    if index.index_details is not None:
        entry.index_details.type_url, entry.index_details.value = index.index_details
    if index.created_at is not None:
        entry.created_at = int(index.created_at.timestamp() * 1000)
    for file in index.files or ():
        entry.files.add(path=file.path, size_bytes=file.size_bytes)
    return entry
