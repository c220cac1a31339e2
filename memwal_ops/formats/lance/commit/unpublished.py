"""Let pylance build and open versions that are not published.

In a local folder that has only a manifest: pylance needs no data file to build or to open a version. So for a table in
an object store, both are possible without a request. If anything fails there, they are done at the store instead.

In the table, under a detached name, which no reader opens: to ask an index of a version for rows.
"""

from __future__ import annotations

import tempfile
import uuid
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lance

from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER, version_path
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import DETACHED, detached_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import (
    FRAGMENT_REUSE,
    decode_version_manifest,
    encode_version_manifest,
)
from memwal_ops.storage.locations import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.formats.lance.commit.publication import CommitNote
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


class LocalBuild(NamedTuple):
    """A version that pylance built, and the content of its transaction file."""

    version: VersionManifest
    transaction: bytes


def build_locally(table: Table, transaction: lance.Transaction) -> LocalBuild | None:
    """Let pylance build a version on exactly ``table``'s.

    Returns:
        None: the table is on local files, or pylance needs other files of it.
    """
    try:
        with _folder_with(table, table.manifest) as folder, lance_errors("build the new version of", str(folder)):
            dataset = lance.LanceDataset.commit(lance.dataset(folder), transaction, detached=True)
            name = detached_manifest_name(int(dataset.version))
            built = decode_version_manifest((folder / VERSIONS_FOLDER / name).read_bytes())
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


def open_locally(table: Table, version: VersionManifest) -> tuple[list[int], set[str]] | None:
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
def _folder_with(table: Table, version: VersionManifest) -> Iterator[Path]:
    """A temporary folder with that manifest, byte by byte as it is published."""
    if table.location.scheme in LOCAL:
        raise OSError("a local table is its own folder")
    with tempfile.TemporaryDirectory(prefix="memwal-ops-commit-", ignore_cleanup_errors=True) as name:
        path = Path(name, version_path(int(version.manifest.version), table.naming))
        path.parent.mkdir()
        path.write_bytes(encode_version_manifest(version))
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
    kept = [one for one in table.manifest.index_entries if one.name == FRAGMENT_REUSE]
    section = table_pb2.IndexSection(indices=[*kept, *entries])
    transaction.create_index.new_indices.extend(section.indices)
    manifest = deepcopy(table.manifest.manifest)
    manifest.version = uuid.uuid4().int >> 65 | DETACHED
    manifest.transaction_file = ""
    trial = replace(table.manifest, manifest=manifest, indexes=section, transaction=transaction)
    path = f"{VERSIONS_FOLDER}/{detached_manifest_name(int(manifest.version))}"
    try:
        table.store.put(path, encode_version_manifest(trial))
        with lance_errors("open a version that is not published of", table.location.uri):
            # Of a table with entries in DynamoDB, pylance would record the version there: the newest from then on.
            dataset = open_dataset(table.location.plain, version=int(manifest.version))
        yield dataset
    finally:
        table.discard([path])
