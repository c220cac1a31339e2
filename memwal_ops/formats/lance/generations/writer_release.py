"""Determine the Lance release that wrote a generation, and its differences from the current format.

Measured for each release (tests/integration/contracts/old_pylance.md), because a table may have generations
that were flushed long ago. Read like current ones, two differences would lose data:

* up to release 12, a generation's fields are numbered from 0, regardless of the base table's ids;
* release 7 wrote rows newest first and hid no older ones, so the highest row address of a key is its oldest write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.versions import read_version_manifest, version_path
from memwal_ops.formats.lance.retention.schema_history import OPENED, Flush, WriterVersion
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.formats.lance.wire.names import NamingScheme
from memwal_ops.formats.lance.wire.version_manifest import lance_major

if TYPE_CHECKING:
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import Store

FLUSHED = "memwal-ops.flushed"
"""In the metadata of a generation whose manifest was written again: when the first one was, in nanoseconds."""
_FIRST_WITH_BASE_IDS = 13
_NEWEST_FIRST = 7


@dataclass(frozen=True, slots=True)
class WrittenBy:
    """The release that wrote a generation, and its own manifest.

    Attributes:
        manifest: of the generation's dataset.
        flush: when it was written.
        logged: in the region layout, when the first WAL entry was put to which it refers, by the store's clock; else as
            ``flush``.
        major: major release number of Lance; None if the manifest does not name a Lance release.
    """

    manifest: table_pb2.Manifest
    flush: Flush
    logged: Flush
    major: int | None

    @property
    def numbers_fields_from_zero(self) -> bool:
        """Whether field ids are numbered within the generation, rather than being the base table's."""
        return self.major is not None and self.major < _FIRST_WITH_BASE_IDS

    @property
    def newest_row_first(self) -> bool:
        """Whether the lowest row address of a key is its newest write.

        False in the region layout (generations that refer to ``wal/`` by base paths), for which
        the specification defines the order for every writer (S0-192).
        """
        return self.major == _NEWEST_FIRST and not self.manifest.base_paths


def read_written_by(store: Store, folder: str, version: int) -> WrittenBy:
    """Read the release that wrote the dataset at ``folder``, and the times; two requests, three in the region layout.

    Raises:
        InvalidFormatError: its manifest does not decode.
        ObjectNotFoundError: it has no such version.
    """
    manifest: VersionManifest = read_version_manifest(store, version, folder=folder)
    paths = (version_path(version, naming, folder=folder) for naming in (NamingScheme.V2, NamingScheme.V1))
    meta = next((meta for path in paths if (meta := store.head(path)) is not None), None)
    if meta is None:
        raise ObjectNotFoundError(f"Version {version} of {folder} was removed while it was read.")
    kept = manifest.manifest.table_metadata.get(FLUSHED, "")
    by_store = int(kept) if kept.isdecimal() else nanoseconds(meta.last_modified)
    opened = WriterVersion.parsed(manifest.manifest.table_metadata.get(OPENED))
    flush = Flush(manifest.manifest.timestamp.ToNanoseconds(), by_store, opened)
    logged = _logged(store, folder, manifest.manifest, flush)
    return WrittenBy(manifest.manifest, flush, logged, lance_major(manifest.manifest))


def _logged(store: Store, folder: str, manifest: table_pb2.Manifest, flush: Flush) -> Flush:
    if not manifest.base_paths or not manifest.fragments:
        return flush
    entry = store.head(f"{folder.rpartition('/')[0]}/wal/{manifest.fragments[0].files[0].path}")
    return flush if entry is None else Flush(None, nanoseconds(entry.last_modified), flush.opened)
