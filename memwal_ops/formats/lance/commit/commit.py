"""Commit data and merge progress as exactly version ``V + 1`` of the base table, or not at all.

Why not pylance's own commit? It rebases: a transaction computed at version V is published as V+n
whenever its conflict check finds no overlap, and that check does not consider merge progress. Deleted rows come back,
rows are there twice, or progress is lost; docs/protocol.md has the three timelines, each kept as a contract test.

Therefore pylance builds the new version where no reader opens it; the version number and the progress are stamped into
it; pylance opens the stamped manifest once to verify that it is readable; and one put-if-absent publishes it as V+1.
The second of two writers finds the name taken, reads everything again and replans. Progress, data and deletions of all
regions of a pass are one version: none of them is ever visible without the others.

pylance needs no data file to build or to open a version. So for a table in an object store it does both in a local
folder that has only a manifest, without a request. If that fails, and for a local table, it does them in the table,
under a detached name.

A change of indexes alone (region snapshots, catch-up, an index that was brought up to date) is not built by pylance:
:func:`commit_indexes` copies the newest manifest, including unknown fields, replaces index entries, and publishes in
the same way. pylance's own commit of such a change reverts a concurrent merge's progress without a conflict
(docs/upstream/stale_index_commit_takes_progress_back.py).
"""

from __future__ import annotations

import tempfile
import time
import uuid
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import lance

from memwal_ops.errors import InvariantViolatedError, MemwalOpsError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit.publication import (
    CommitLostError,
    CommitNote,
    added_files,
    advance_hint,
    commit_lost,
    deleted_unless_named,
    is_taken,
    publish,
    refuse_if_not_newest,
    refuse_missing_files,
    refuse_wrong_deletions,
    verify_in_history,
)
from memwal_ops.formats.lance.files.datasets import lance_errors, open_dataset
from memwal_ops.formats.lance.files.version_files import TRANSACTIONS_FOLDER, VERSIONS_FOLDER, version_path
from memwal_ops.formats.lance.generations.backlog import raised
from memwal_ops.formats.lance.retention.merged_since import drop_contradicted
from memwal_ops.formats.lance.wire import memwal_index, version_manifest
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import DETACHED, NamingScheme, detached_manifest_name
from memwal_ops.formats.lance.wire.region_manifest import RegionRecord, with_region_records
from memwal_ops.storage.locations import LOCAL
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.core.commit_retry import CommitRetry
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import memwal_pb2


class LocalBuild(NamedTuple):
    """A version that pylance built, and the content of its transaction file; None: that is in the table."""

    version: version_manifest.VersionManifest
    transaction: bytes | None


def build_locally(table: Table, transaction: lance.Transaction) -> LocalBuild | None:
    """Let pylance build a version on exactly ``table``'s.

    Returns:
        None: the table is on local files, or pylance needs other files of it.
    """
    try:
        with _folder_with(table, table.manifest) as folder, lance_errors("build the new version of", str(folder)):
            dataset = lance.LanceDataset.commit(lance.dataset(folder), transaction, detached=True)
            name = detached_manifest_name(int(dataset.version))
            built = version_manifest.decode_version_manifest((folder / VERSIONS_FOLDER / name).read_bytes())
            if any(map(_lacks_coverage, built.index_entries)):
                return None
            content = (folder / TRANSACTIONS_FOLDER / built.manifest.transaction_file).read_bytes()
            return LocalBuild(built, content)
    except (MemwalOpsError, OSError):
        return None


def _lacks_coverage(entry: table_pb2.IndexMetadata) -> bool:
    """Whether pylance dropped which fragments an index covers, to determine it again from the index's files.

    It does so if no release of Lance that it knows wrote the version.
    """
    return bool(entry.fields) and not entry.fragment_bitmap


def open_locally(table: Table, version: version_manifest.VersionManifest) -> tuple[list[int], set[str]] | None:
    """Fragment ids and names of indexes of a version, as pylance reads them from its manifest.

    Returns:
        None: the table is on local files, or pylance needs other files of it.
    """
    try:
        with _folder_with(table, version) as folder, lance_errors("open the new version of", str(folder)):
            return fragments_and_indexes(lance.dataset(folder, version=int(version.manifest.version)))
    except (MemwalOpsError, OSError):
        return None


def fragments_and_indexes(dataset: lance.LanceDataset) -> tuple[list[int], set[str]]:
    """Ids of fragments, ascending, and names of indexes, as pylance reads them from a manifest."""
    fragments = sorted(fragment.fragment_id for fragment in dataset.get_fragments())
    return fragments, {index.name for index in dataset.describe_indices()}


@contextmanager
def _folder_with(table: Table, version: version_manifest.VersionManifest) -> Iterator[Path]:
    """A temporary folder with that manifest, byte by byte as it is published."""
    if table.location.scheme in LOCAL:
        raise OSError("a local table is its own folder")
    with tempfile.TemporaryDirectory(prefix="memwal-ops-commit-", ignore_cleanup_errors=True) as name:
        path = Path(name, version_path(int(version.manifest.version), table.naming))
        path.parent.mkdir()
        path.write_bytes(version_manifest.encode_version_manifest(version))
        yield Path(name)


@contextmanager
def opened_with(
    table: Table, entries: Iterable[table_pb2.IndexMetadata], note: CommitNote
) -> Iterator[lance.LanceDataset]:
    """``table``'s version with these entries as its only index, so that queries are answered by it and no other one.

    Its manifest stands under a detached name, which no reader opens, and is deleted on the way out. If the process is
    killed before, gc finds it by the transaction in it.

    Raises:
        StorageError: the manifest cannot be written or opened.
    """
    transaction = note.transaction(table.version)
    kept = [entry for entry in table.manifest.index_entries if entry.name == version_manifest.FRAGMENT_REUSE]
    section = table_pb2.IndexSection(indices=[*kept, *entries])
    transaction.create_index.new_indices.extend(section.indices)
    manifest = deepcopy(table.manifest.manifest)
    manifest.transaction_file = ""
    trial = replace(table.manifest, manifest=manifest, indexes=section, transaction=transaction)
    with _detached(table, trial) as dataset:
        yield dataset


__all__ = [
    "CommitLostError",
    "CommitNote",
    "IndexChange",
    "check_committable",
    "check_rewritable",
    "check_takes_rows",
    "commit_built",
    "commit_change",
    "commit_details",
    "commit_indexes",
    "commit_strict",
    "fixed_dictionaries",
    "fixed_dictionary_error",
    "next_entry",
    "publish_progress",
]


@dataclass(frozen=True, slots=True)
class IndexChange:
    """A change of indexes alone, relative to the version that it is published on.

    Attributes:
        details: the MemWAL index's new details.
        uuid: the MemWAL entry's new id, which is the name of a snapshot's file. None: unchanged if there is such a
            file, else a random id, by which the version's descendants are identified.
        added: index entries to add, as pylance built them.
        removed: ids of index entries to remove.
        records: the version's records of regions (:mod:`memwal_ops.formats.lance.wire.region_manifest`).
        config: entries of the table's config to set.
    """

    details: memwal_pb2.MemWalIndexDetails
    uuid: UUID | None = None
    added: tuple[table_pb2.IndexMetadata, ...] = ()
    removed: frozenset[UUID] = frozenset()
    records: Mapping[UUID, RegionRecord] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)

    def applied_to(self, manifest: table_pb2.Manifest) -> table_pb2.Manifest:
        """A copy of the manifest with the records and the entries of the config."""
        changed = with_region_records(manifest, self.records)
        if self.config:
            changed.config.update(self.config)
            changed.writer_feature_flags |= version_manifest.TABLE_CONFIG
        return changed


def check_rewritable(table: Table) -> None:
    """Refuse, before any work is done, a table with a manifest that must not be rewritten.

    Raises:
        TableCorruptError: the values of a dictionary column are lost.
        UnsupportedFeatureError: unknown writer feature flags or manifest fields (S3-013).
    """
    version_manifest.check_writable(table.manifest.manifest)
    version_manifest.check_next(table.manifest.manifest)
    version_manifest.encode_version_manifest(table.manifest)


def check_committable(table: Table) -> None:
    """Refuse, before any work is done, a table on which :func:`commit_strict` would be refused.

    Raises:
        UnsupportedFeatureError: as :func:`check_rewritable`; V1 naming or versions in DynamoDB, with which pylance
            makes no detached version that does no harm.
    """
    check_rewritable(table)
    if table.location.dynamodb_table is not None:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has its versions in DynamoDB, where pylance takes a detached version for the newest."
        )
    if table.naming is not NamingScheme.V2:
        raise UnsupportedFeatureError(
            f"{table.location.uri} names its manifests by the V1 scheme, with which Lance makes no detached version.",
            remedy="Run lance.dataset(uri).migrate_manifest_paths_v2() once, with no writer and no job running.",
        )


def check_takes_rows(table: Table) -> None:
    """Refuse, before any work is done, a table into which no rows of a log can be written.

    Raises:
        UnsupportedFeatureError: it has dictionaries inside its manifests, which are fixed when a table is created.
    """
    if columns := fixed_dictionaries(table):
        raise fixed_dictionary_error(table, columns, "rows of a log cannot be merged into it")


def fixed_dictionaries(table: Table) -> list[str]:
    """The columns whose dictionary is inside the manifests, for all files of the table: of the first format."""
    return [column.name for column in table.manifest.manifest.fields if column.dictionary.length]


def fixed_dictionary_error(table: Table, columns: list[str], so: str) -> UnsupportedFeatureError:
    """What refuses a job that would have to change such a dictionary."""
    return UnsupportedFeatureError(
        f"{table.location.uri} has files of Lance's first format, and the dictionary columns {', '.join(columns)}: "
        f"their values are fixed since the table was created, so that {so}.",
        remedy="Write the rows that lance.dataset(URI) reads, or memwal_ops.memwal.read(URI) where there is a log, "
        'into a new table with data_storage_version="2.1".',
    )


def commit_strict(
    table: Table,
    operation: lance.LanceOperation.BaseOperation,
    progress: Mapping[UUID, int],
    note: CommitNote,
    *,
    records: Mapping[UUID, RegionRecord] = MappingProxyType({}),
) -> int:
    """Publish ``operation``, computed at ``table.version``, as exactly the next version.

    Args:
        table: the pinned version that everything was decided on.
        operation: the change, in terms of that version.
        progress: region id to the highest generation that is merged once this is visible (S0-067).
        records: the identities of the regions to which the progress belongs, recorded in the same version.

    Returns:
        The new version, ``table.version + 1``.

    Raises:
        CommitLostError: that version exists already; nothing was published.
        CommitStateUnknownError: the put failed, and reading back does not show whether it succeeded.
        UnsupportedFeatureError: see :func:`check_committable`.
        InvariantViolatedError: progress would decrease, or pylance does not read the version as it was built.
    """
    check_committable(table)
    with _built_by_pylance(table, operation, note) as built:
        _refuse_rebased(table, built.version, table.version + 1)
        stamped = memwal_index.stamp_progress(
            built.version, table.manifest, progress, version=table.version + 1, records=records
        )
        data = _encoded(table, stamped)
        _refuse_unreadable(table, stamped)
        _publish(table, stamped, data, built.transaction)
    return _published(table, stamped)


def commit_indexes(table: Table, change: IndexChange, note: CommitNote) -> int:
    """Publish a change of index entries alone as exactly the version after ``table.version``.

    Works on both naming schemes. Data, schema and merge progress are those of ``table``.

    Returns:
        The new version, ``table.version + 1``.

    Raises: as :func:`commit_strict`, but refused are only the tables of :func:`check_rewritable`.
    """
    check_rewritable(table)
    version = table.version + 1
    transaction = note.transaction(table.version)
    indexes = _changed_section(table, change, transaction.create_index, version)
    built = _next_version(replace(table.manifest, indexes=indexes), transaction)
    built = replace(built, manifest=change.applied_to(built.manifest))
    data = _encoded(table, built)
    _check_only_indexes_changed(table, data, built, change)
    _publish(table, built, data, _serialized(transaction))
    return _published(table, built)


def publish_change(
    table: Table, change: Callable[[Table], IndexChange | None], note: CommitNote, retry: CommitRetry
) -> Table:
    """Compute a change on the newest version and publish it; again after each commit conflict.

    ``table``: the newest version that the caller has read; returned if no change was needed on it.
    ``change``: returns the change for a version, or None if none is needed.
    Raises ``CommitConflictError``: too many commit conflicts in a row.
    """
    while (wanted := change(table)) is not None:
        try:
            commit_indexes(table, wanted, note)
        except CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return retry.landed(table)
    return table


def commit_built(table: Table, content: version_manifest.VersionManifest, transaction: table_pb2.Transaction) -> int:
    """Publish a version that was built here, and not by pylance, as exactly the version after ``table.version``.

    Args:
        table: the pinned version that everything was decided on.
        content: fields, fragments, indexes and configuration of the new version; its number and time are set here.
        transaction: what it does, for writers that commit later.

    Returns and raises: as :func:`commit_indexes`.
    """
    check_rewritable(table)
    built = _next_version(replace(content, manifest=_numbered(content.manifest, table.version)), transaction)
    data = _encoded(table, built)
    _refuse_unreadable(table, built)
    _publish(table, built, data, _serialized(transaction))
    return _published(table, built)


def commit_change(table: Table, change: IndexChange, note: CommitNote) -> int:
    """Publish a change of the MemWAL index and of the config as the next version, which it returns; probe the store."""
    probe_conditional_writes(table.store)
    manifest = change.applied_to(table.manifest.manifest)
    return commit_details(table, manifest, change.details.SerializeToString(deterministic=True), note)


def publish_progress(
    table: Table,
    progress: Mapping[UUID, int],
    records: Mapping[UUID, RegionRecord],
    note: CommitNote,
    config: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Publish more progress, and entries of the config, as exactly the next version, without a change of rows.

    Raises:
        CommitLostError: another writer published that version.
        InvariantViolatedError: the progress is not more than the table has.
    """
    commit_change(
        table, IndexChange(raised(table, table.index.details, progress), records=records, config=config), note
    )


def commit_details(table: Table, manifest: table_pb2.Manifest, details: bytes, note: CommitNote) -> int:
    """Publish other details of the MemWAL index, and another configuration, as exactly the next version.

    Args:
        table: the pinned version that everything was decided on.
        manifest: its manifest with the new configuration; rows and columns are as in ``table``, key marks may differ.

    Returns: the new version. Raises: as :func:`commit_built`.
    """
    old = memwal_index.find_memwal_entry(table.manifest.indexes)
    if old is None:
        raise InvariantViolatedError(f"Version {table.version} of {table.location.uri} has no MemWAL index.")
    new = next_entry(old, details, table.version)
    kept = [entry for entry in table.manifest.index_entries if entry.name != old.name]
    transaction = note.transaction(table.version)
    transaction.create_index.new_indices.append(new)
    transaction.create_index.removed_indices.append(old)
    section = table_pb2.IndexSection(indices=[*kept, new])
    return commit_built(table, replace(table.manifest, manifest=manifest, indexes=section), transaction)


def next_entry(old: table_pb2.IndexMetadata, details: bytes, read_version: int) -> table_pb2.IndexMetadata:
    """The MemWAL entry with other details, under a new id, as Lance writes it at each change."""
    entry = memwal_index.with_details(old, details, read_version)
    entry.uuid.uuid = uuid.uuid4().bytes
    entry.created_at = int(time.time() * 1000)
    return entry


def _numbered(manifest: table_pb2.Manifest, version: int) -> table_pb2.Manifest:
    numbered = deepcopy(manifest)
    numbered.version = version
    return numbered


def _serialized(transaction: table_pb2.Transaction) -> bytes:
    return transaction.SerializeToString(deterministic=True)


def _publish(table: Table, built: version_manifest.VersionManifest, data: bytes, transaction: bytes | None) -> None:
    """Publish ``data`` as the version after ``table``'s, right after a check that all it is built on is there.

    ``transaction`` is the content of its transaction file; None: pylance wrote that. Releases that find no transaction
    inside the manifest look for this file when they rebase.
    """
    files = []
    if transaction is not None and built.manifest.transaction_file:
        files = [f"{TRANSACTIONS_FOLDER}/{built.manifest.transaction_file}"]
        table.store.put(files[0], transaction)
    with deleted_unless_named(lambda: table.discard(files)):
        added = added_files(table, built)
        refuse_missing_files(table, added)
        refuse_wrong_deletions(table, built, added)
        if _raised_progress(table, built):
            drop_contradicted(table, memwal_index.merge_progress(table.manifest.indexes))
        refuse_if_not_newest(table, table.version + 1)
        publish(table, data, table.version + 1)


def _published(table: Table, built: version_manifest.VersionManifest) -> int:
    """The number of the published version, once it is known to be in the table's history."""
    verify_in_history(table, built, _raised_progress(table, built))
    advance_hint(table, table.version + 1)
    return table.version + 1


def _raised_progress(table: Table, built: version_manifest.VersionManifest) -> Mapping[UUID, int]:
    before = memwal_index.merge_progress(table.manifest.indexes)
    return {
        region_id: generation
        for region_id, generation in memwal_index.merge_progress(built.indexes).items()
        if generation > before.get(region_id, 0)
    }


def _changed_section(
    table: Table, change: IndexChange, operation: table_pb2.CreateIndex, version: int
) -> table_pb2.IndexSection:
    """The index section after ``change``, which ``operation`` is filled to describe."""
    old = table.manifest.indexes or table_pb2.IndexSection()
    removed = [entry for entry in old.indices if entry.uuid.uuid in {removed_id.bytes for removed_id in change.removed}]
    memwal = memwal_index.find_memwal_entry(old)
    if memwal is None or memwal in removed or len(removed) != len(change.removed):
        raise InvariantViolatedError(f"Version {table.version} of {table.location.uri} lacks an index to be replaced.")
    entry = memwal_index.with_details(memwal, change.details.SerializeToString(deterministic=True), version)
    if change.uuid is not None:
        entry.uuid.uuid = change.uuid.bytes
    elif change.details.HasField("inline_snapshots") or not change.details.num_regions:
        entry.uuid.uuid = uuid.uuid4().bytes
    entry.created_at = int(time.time() * 1000)
    if memwal_index.decode_memwal_index(entry).merged_generations != table.index.merged_generations:
        raise InvariantViolatedError("A change of indexes must not change the merge progress.")
    operation.removed_indices.extend([memwal, *removed])
    operation.new_indices.extend([entry, *change.added])
    section = deepcopy(old)
    del section.indices[:]
    section.indices.extend(kept for kept in old.indices if kept not in (memwal, *removed))
    section.indices.extend(operation.new_indices)
    return section


def _next_version(
    parent: version_manifest.VersionManifest, transaction: table_pb2.Transaction
) -> version_manifest.VersionManifest:
    """The manifest after ``parent``; its transaction is stored in the same place as the parent's."""
    manifest = deepcopy(parent.manifest)
    manifest.version += 1
    manifest.timestamp.GetCurrentTime()
    files = not manifest.writer_feature_flags & version_manifest.NO_TRANSACTION_FILES
    manifest.transaction_file = f"{transaction.read_version}-{transaction.uuid}.txn" if files else ""
    inline = parent.transaction is not None or not files
    return replace(parent, manifest=manifest, transaction=transaction if inline else None)


def _check_only_indexes_changed(
    table: Table, data: bytes, built: version_manifest.VersionManifest, change: IndexChange
) -> None:
    """Decode the manifest before it is published, and verify that nothing but ``change`` and transaction is new."""
    read = version_manifest.decode_version_manifest(data)
    if read.indexes != built.indexes or read.transaction != built.transaction:
        raise InvariantViolatedError(f"The new version of {table.location.uri} does not decode as it was built.")
    both = []
    for manifest in (with_region_records(read.manifest, {}), change.applied_to(table.manifest.manifest)):
        for name in ("version", "timestamp", "transaction_file", *version_manifest.POSITIONS):
            manifest.ClearField(name)
        both.append(manifest)
    if both[0] != both[1]:
        raise InvariantViolatedError(f"The new version of {table.location.uri} differs in more than its indexes.")


@contextmanager
def _built_by_pylance(
    table: Table, operation: lance.LanceOperation.BaseOperation, note: CommitNote
) -> Iterator[LocalBuild]:
    """The version that pylance builds on ``table``'s, in a local folder, or under a detached name until the end."""
    wanted = lance.Transaction(
        read_version=table.version, operation=operation, transaction_properties=note.properties()
    )
    if (local := build_locally(table, wanted)) is not None:
        yield local
        return
    path = f"{VERSIONS_FOLDER}/{detached_manifest_name(_build_detached(table, wanted))}"
    try:
        built = version_manifest.decode_version_manifest(table.store.get(path))
        transaction_file = f"{TRANSACTIONS_FOLDER}/{built.manifest.transaction_file}"
        with deleted_unless_named(lambda: table.discard([transaction_file])):
            yield LocalBuild(built, None)
    finally:
        table.discard([path])


def _build_detached(table: Table, transaction: lance.Transaction) -> int:
    """Let pylance build the version under a detached name, which no reader opens.

    pylance refuses if another writer's commit conflicts; that is handled like any other commit conflict.
    """
    try:
        with lance_errors("build the new version of", table.location.uri):
            return int(lance.LanceDataset.commit(table.handle.get(), transaction, detached=True).version)
    except StorageError as error:
        if is_taken(table, table.version + 1):
            raise commit_lost(table, table.version + 1) from error
        raise


def _refuse_rebased(table: Table, built: version_manifest.VersionManifest, version: int) -> None:
    """Refuse the version if pylance built it on another merger's version.

    A detached commit made through a URI is also rebased over every version published since ``read_version``, with the
    same conflict check, which does not consider merge progress; its result is not the planned one. Through a pinned
    handle, as here, pylance 14.0 does not rebase; if another release does, its version is refused here.
    """
    entry = memwal_index.find_memwal_entry(built.indexes)
    if entry is None or memwal_index.decode_memwal_index(entry).merged_generations != table.index.merged_generations:
        raise commit_lost(table, version)


def _encoded(table: Table, built: version_manifest.VersionManifest) -> bytes:
    """The bytes to be published. Raises ``UnsupportedFeatureError`` if this release would refuse the table then."""
    data = version_manifest.encode_version_manifest(built)
    read = version_manifest.decode_version_manifest(data)
    try:
        version_manifest.check_writable(read.manifest)
    except UnsupportedFeatureError as error:
        raise UnsupportedFeatureError(
            f"The new version of {table.location.uri} was not published, as this release would refuse it: {error}"
        ) from error
    return data


def _refuse_unreadable(table: Table, built: version_manifest.VersionManifest) -> None:
    """Let pylance open the manifest, in a local folder or under a detached name, and compare fragments and indexes.

    It was encoded here, not by pylance: if the encoding ever disagrees with a release of Lance, this check fails before
    anything is published.
    """
    read = open_locally(table, built)
    if read is None:
        with _detached(table, built) as dataset:
            read = fragments_and_indexes(dataset)
    _compare(table, built, *read)


@contextmanager
def _detached(table: Table, built: version_manifest.VersionManifest) -> Iterator[lance.LanceDataset]:
    """A version opened under a detached name, which no reader opens, and which is deleted on the way out."""
    trial = deepcopy(built.manifest)
    trial.version = uuid.uuid4().int >> 65 | DETACHED
    path = f"{VERSIONS_FOLDER}/{detached_manifest_name(int(trial.version))}"
    try:
        table.store.put(path, version_manifest.encode_version_manifest(replace(built, manifest=trial)))
        with lance_errors("open a version that is not published of", table.location.uri):
            # Of a table with entries in DynamoDB, pylance would record the version there: the newest from then on.
            dataset = open_dataset(table.location.plain, version=int(trial.version))
        yield dataset
    finally:
        table.discard([path])


def _compare(table: Table, stamped: version_manifest.VersionManifest, fragments: list[int], indexes: set[str]) -> None:
    built_fragments = sorted(fragment.id for fragment in stamped.manifest.fragments)
    built_indexes = {entry.name for entry in stamped.index_entries}
    if fragments != built_fragments or indexes != built_indexes:
        raise InvariantViolatedError(
            f"The stamped version of {table.location.uri} does not read back as it was built "
            f"(fragments {fragments} for {built_fragments}, indexes {sorted(indexes)} for {sorted(built_indexes)})."
        )
