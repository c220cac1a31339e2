"""Let pylance build and open a version of a table in a local folder that has only its manifest.

pylance needs only the manifest to build or to open a version, and no data file. So for a table in an object store, both
are possible without a request. If anything fails here, they are done at the store instead.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import lance

from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER, version_path
from memwal_ops.formats.lance.wire.names import detached_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.storage.locations import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


def build_locally(table: Table, transaction: lance.Transaction) -> tuple[VersionManifest, bytes] | None:
    """The version that pylance builds on exactly ``table``'s, and the content of its transaction file.

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
            return built, (folder / TRANSACTIONS_FOLDER / built.manifest.transaction_file).read_bytes()
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
            return described(lance.dataset(folder, version=int(version.manifest.version)))
    except (MemwalOpsError, OSError):
        return None


def described(dataset: lance.LanceDataset) -> tuple[list[int], set[str]]:
    """Fragment ids, and names of indexes."""
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
