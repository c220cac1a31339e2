"""Read which files a snapshot names, from its manifests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyiceberg.manifest import DataFileContent, ManifestEntryStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyiceberg.manifest import DataFile, ManifestEntry, ManifestFile
    from pyiceberg.table.snapshots import Snapshot

    from memwal_iceberg.table import Table


class Missing(Exception):
    """A manifest list or a manifest that is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a snapshot contains: data files with their rows, and files with deletes of them; ``bytes`` of both."""

    files: int = 0
    delete_files: int = 0
    rows: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, files: Iterable[DataFile]) -> Contents:
        """The sums of some files."""
        found = [*files]
        data = [one for one in found if one.content == DataFileContent.DATA]
        rows = sum(one.record_count for one in data)
        return cls(len(data), len(found) - len(data), rows, sum(one.file_size_in_bytes for one in found))


def contents_of(table: Table, snapshot: Snapshot) -> Contents:
    """What a snapshot contains, by its manifests. Raises ``Missing``."""
    manifests = manifests_of(table, snapshot)
    return Contents.of(entry.data_file for one in manifests for entry in live(entries_of(table, one)))


def manifests_of(table: Table, snapshot: Snapshot) -> list[ManifestFile]:
    """The manifests of a snapshot. Raises ``Missing``."""
    try:
        return snapshot.manifests(table.iceberg.io)
    except (OSError, ValueError, EOFError, AssertionError) as error:
        raise Missing(f"The manifest list {snapshot.manifest_list} cannot be read: {error!r}") from error


def entries_of(table: Table, manifest: ManifestFile) -> list[ManifestEntry]:
    """All entries of a manifest, those of deleted files, too. Raises ``Missing``."""
    try:
        return manifest.fetch_manifest_entry(table.iceberg.io, discard_deleted=False)
    except (OSError, ValueError, EOFError, AssertionError) as error:
        raise Missing(f"The manifest {manifest.manifest_path} cannot be read: {error!r}") from error


def live(entries: Iterable[ManifestEntry]) -> list[ManifestEntry]:
    """The entries of files that are part of the snapshot."""
    return [one for one in entries if one.status != ManifestEntryStatus.DELETED]
