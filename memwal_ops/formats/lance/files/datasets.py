"""Open Lance datasets below a table's location, with caches that fit into a job's memory budget."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import lance

from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.locations import Location

ROW_ADDRESS = "_rowaddr"
# Decoded file footers and index pages that a dataset may cache. Lance's own limits are gigabytes,
# but a job's memory must depend on its budget, not on the size of an index (docs/architecture.md, "Invariants").
CACHE_BYTES = 32 << 20


def open_dataset(location: Location, folder: str = "", *, version: int | None = None) -> lance.LanceDataset:
    """Open the dataset at ``folder`` below the location (by default the table itself).

    Raises pylance's own errors; callers translate them with
    :func:`memwal_ops.formats.lance.files.lance_errors.lance_errors`, giving the action for the message.
    """
    root = location.files or location.uri
    return lance.dataset(
        f"{root}/{folder}" if folder else root,
        version=version,
        storage_options=lance_options(location),
        index_cache_size_bytes=CACHE_BYTES,
        metadata_cache_size_bytes=CACHE_BYTES,
    )


class PinnedDataset:
    """pylance's handle on one version, opened from its manifest at the first use. Safe in threads.

    pylance uses the manifest that was read, even if the object at its path was replaced since. Opening takes one
    request; a job that only compares manifests and listings opens nothing.
    """

    def __init__(self, location: Location, version: VersionManifest, opened: lance.LanceDataset | None = None) -> None:
        """``opened``: the handle, if there is one."""
        self._location, self._version, self._opened = location, version, opened
        self._lock = threading.Lock()

    def at(self, location: Location) -> PinnedDataset:
        """The same with other credentials."""
        return self if location is self._location else PinnedDataset(location, self._version)

    def get(self) -> lance.LanceDataset:
        """The handle.

        Raises:
            StorageError: pylance cannot open the version, by kind.
        """
        with self._lock:
            if self._opened is None:
                with lance_errors("open the table", self._location.uri):
                    self._opened = lance.LanceDataset(
                        self._location.files or self._location.uri,
                        int(self._version.manifest.version),
                        storage_options=lance_options(self._location),
                        serialized_manifest=self._version.manifest.SerializeToString(),
                        index_cache_size_bytes=CACHE_BYTES,
                        metadata_cache_size_bytes=CACHE_BYTES,
                    )
            return self._opened


def lance_options(location: Location) -> dict[str, str] | None:
    """The location's storage options as an argument for pylance."""
    return dict(location.lance_options) or None
