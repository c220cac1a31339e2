"""The one way to change a base version that carries merge progress: exactly ``V + 1``, or nothing.

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

A change of indexes alone (region snapshots, catch-up, an index that was brought up to date) needs
no detached version: :func:`commit_indexes` takes the newest manifest as it is, with every field
that it does not know, replaces index entries, and publishes in the same way. pylance's own commit
of such a change takes a concurrent merge's progress back without a conflict (landmine 1).
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import lance

from memwal_ops.core.datasets import lance_options, open_dataset
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.publication import (
    CommitLostError,
    CommitNote,
    advance_hint,
    is_taken,
    lost,
    prove_living,
    publish,
    refuse_overtaken,
)
from memwal_ops.core.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER
from memwal_ops.errors import (
    CommitStateUnknownError,
    InvariantViolatedError,
    MemwalOpsError,
    StorageError,
    UnsupportedFeatureError,
)
from memwal_ops.format._pb import table_pb2
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry, stamp_progress
from memwal_ops.format.names import NamingScheme, detached_manifest_name
from memwal_ops.format.version_manifest import (
    NO_TRANSACTION_FILES,
    POSITIONS,
    VersionManifest,
    check_writable,
    decode_version_manifest,
    encode_version_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.table import Table
    from memwal_ops.format._pb import memwal_pb2

__all__ = [
    "CommitLostError",
    "CommitNote",
    "IndexChange",
    "check_committable",
    "check_rewritable",
    "commit_indexes",
    "commit_strict",
]


@dataclass(frozen=True, slots=True)
class IndexChange:
    """What an index-only commit changes, in terms of the version that it is published on.

    Attributes:
        details: the MemWAL index's new details.
        uuid: the MemWAL entry's new id, under which a snapshot's file stands. None: as it was where such a
            file has its name, else any, by which the version's descendants are told.
        added: index entries to add, as pylance built them.
        removed: ids of index entries to take away.
    """

    details: memwal_pb2.MemWalIndexDetails
    uuid: UUID | None = None
    added: tuple[table_pb2.IndexMetadata, ...] = ()
    removed: frozenset[UUID] = frozenset()


def check_rewritable(table: Table) -> None:
    """Refuse, before any work is done, a table whose manifest must not be rewritten here.

    Raises:
        UnsupportedFeatureError: an external manifest store, unknown writer feature flags or manifest
            fields (S3-013).
    """
    check_writable(table.manifest.manifest)
    encode_version_manifest(table.manifest)
    if "+" in table.location.scheme:
        raise UnsupportedFeatureError(
            f"{table.location.uri} commits through an external manifest store, which memwal-ops cannot reach.",
            remedy="Open it by its plain URI on a store with conditional writes, for all writers alike.",
        )


def check_committable(table: Table) -> None:
    """Refuse, before any work is done, a table on which :func:`commit_strict` would be refused.

    Raises:
        UnsupportedFeatureError: as :func:`check_rewritable`; V1 naming, where pylance makes no detached
            version (landmine 11).
    """
    check_rewritable(table)
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
        stamped = stamp_progress(built, table.manifest, progress, version=version)
        _prove_readable(table, stamped, detached, detached_path)
        refuse_overtaken(table, version)
        leftovers.pop()  # from here on a version may name its transaction file
        publish(table, encode_version_manifest(stamped), version)
    finally:
        table.store.delete_many(leftovers)
    prove_living(table, stamped, progress)
    advance_hint(table, version)
    return version


def commit_indexes(table: Table, change: IndexChange, note: CommitNote) -> int:
    """Publish a change of index entries alone as exactly the version after ``table.version``.

    Works on both naming schemes. Data, schema and merge progress are those of ``table``.

    Returns:
        The new version, ``table.version + 1``.

    Raises:
        CommitLostError: that version exists already; nothing was published.
        CommitStateUnknownError: the store gave no answer and reading back gave none either.
        InvariantViolatedError: the change would touch merge progress, or an entry that is not there.
        UnsupportedFeatureError: see :func:`check_rewritable`.
    """
    check_rewritable(table)
    version = table.version + 1
    transaction = table_pb2.Transaction(read_version=table.version, uuid=str(uuid.uuid4()))
    transaction.transaction_properties.update(note.properties())
    indexes = _changed_section(table, change, transaction.create_index, version)
    built = _next_version(table.manifest, indexes, transaction)
    data = encode_version_manifest(built)
    _check_only_indexes_changed(table, data, built)
    file = f"{TRANSACTIONS_FOLDER}/{built.manifest.transaction_file}" if built.manifest.transaction_file else None
    if file is not None:
        # Releases that find no transaction inside the manifest look for this file when they rebase.
        table.store.put(file, transaction.SerializeToString(deterministic=True))
    # The file goes only where no version can name it: not when the outcome is unknown, nor at Ctrl-C or
    # SIGTERM, which may come when the version just landed.
    try:
        refuse_overtaken(table, version)
        publish(table, data, version)
    except CommitStateUnknownError:
        raise
    except MemwalOpsError as error:
        if file is not None and not (isinstance(error, CommitLostError) and not error.files_are_ours):
            table.store.delete_many([file])
        raise
    prove_living(table, built, {})
    advance_hint(table, version)
    return version


def _changed_section(
    table: Table, change: IndexChange, operation: table_pb2.CreateIndex, version: int
) -> table_pb2.IndexSection:
    """The index section after ``change``, which ``operation`` is filled to describe."""
    old = table.manifest.indexes or table_pb2.IndexSection()
    removed = [entry for entry in old.indices if entry.uuid.uuid in {one.bytes for one in change.removed}]
    memwal = find_memwal_entry(old)
    if memwal is None or memwal in removed or len(removed) != len(change.removed):
        raise InvariantViolatedError(f"Version {table.version} of {table.location.uri} lacks an index to be replaced.")
    entry = table_pb2.IndexMetadata()
    entry.CopyFrom(memwal)
    if change.uuid is not None:
        entry.uuid.uuid = change.uuid.bytes
    elif change.details.HasField("inline_snapshots") or not change.details.num_regions:
        entry.uuid.uuid = uuid.uuid4().bytes
    entry.dataset_version = version
    entry.index_details.value = change.details.SerializeToString(deterministic=True)
    entry.created_at = int(time.time() * 1000)
    if decode_memwal_index(entry).merged_generations != table.index.merged_generations:
        raise InvariantViolatedError("A change of indexes must not touch the merge progress.")
    operation.removed_indices.extend([memwal, *removed])
    operation.new_indices.extend([entry, *change.added])
    section = table_pb2.IndexSection()
    section.CopyFrom(old)
    del section.indices[:]
    section.indices.extend(one for one in old.indices if one not in (memwal, *removed))
    section.indices.extend(operation.new_indices)
    return section


def _next_version(
    parent: VersionManifest, indexes: table_pb2.IndexSection, transaction: table_pb2.Transaction
) -> VersionManifest:
    """The manifest after ``parent``; its transaction stands where the parent's stands."""
    manifest = table_pb2.Manifest()
    manifest.CopyFrom(parent.manifest)
    manifest.version += 1
    manifest.timestamp.GetCurrentTime()
    files = not manifest.writer_feature_flags & NO_TRANSACTION_FILES
    manifest.transaction_file = f"{transaction.read_version}-{transaction.uuid}.txn" if files else ""
    inline = parent.transaction is not None or not files
    return replace(parent, manifest=manifest, indexes=indexes, transaction=transaction if inline else None)


def _check_only_indexes_changed(table: Table, data: bytes, built: VersionManifest) -> None:
    """Decode what is about to be published: all but the index section and who wrote it is the parent's."""
    read = decode_version_manifest(data)
    if read.indexes != built.indexes or read.transaction != built.transaction:
        raise InvariantViolatedError(f"The new version of {table.location.uri} does not decode as it was built.")
    both = []
    for version in (read, table.manifest):
        manifest = table_pb2.Manifest()
        manifest.CopyFrom(version.manifest)
        for field in ("version", "timestamp", "transaction_file", *POSITIONS):
            manifest.ClearField(field)
        both.append(manifest)
    if both[0] != both[1]:
        raise InvariantViolatedError(f"The new version of {table.location.uri} differs in more than its indexes.")


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
        if is_taken(table, table.version + 1):
            raise lost(table, table.version + 1) from error
        raise


def _refuse_rebased(table: Table, built: VersionManifest, version: int) -> None:
    """Give up where pylance built on another merger's version.

    Also a detached commit is rebased over whatever was published since ``read_version``, by the
    same conflict check that knows nothing of merging. What it then built is not what was decided.
    """
    entry = None if built.indexes is None else find_memwal_entry(built.indexes)
    if entry is None or decode_memwal_index(entry).merged_generations != table.index.merged_generations:
        raise lost(table, version)


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
