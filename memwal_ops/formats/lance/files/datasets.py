"""Open Lance datasets below a table's location, with caches that fit into a job's memory budget."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import lance
from packaging.version import InvalidVersion, Version

from memwal_ops.errors import ForeignRootError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import log_folder
from memwal_ops.storage.locations import below, has_scheme
from memwal_ops.storage.metering import LOCAL, REMOTE, Traffic
from memwal_ops.version import OLDEST_PYLANCE

if TYPE_CHECKING:
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.locations import Location

ROW_ADDRESS, ROW_ID = "_rowaddr", "_rowid"
# Decoded file footers and index pages that a dataset may cache. Lance's own limits are gigabytes,
# but a job's memory must depend on its budget, not on the size of an index (docs/architecture.md, "Invariants").
_CACHE_BYTES = 32 << 20
_ON_FILES = ("file:", "memory:")


@cache
def is_supported_pylance(release: str) -> bool:
    """Whether a release of pylance is not older than the pin; one that has no number is taken for a newer one."""
    try:
        return Version(release) >= Version(OLDEST_PYLANCE)
    except InvalidVersion:
        return True


def require_pylance() -> None:
    """Refuse a pylance that is older than the pin, before anything is read by it.

    Raises:
        UnsupportedFeatureError: with both releases.
    """
    if not is_supported_pylance(lance.__version__):
        raise UnsupportedFeatureError(
            f"pylance {lance.__version__} is installed, and memwal-ops needs {OLDEST_PYLANCE} or later: commits and "
            "row ids of older releases differ in ways that lose rows.",
            remedy=f"pip install 'pylance>={OLDEST_PYLANCE}', for memwal-ops alone: clients may stay older, "
            "see docs/compatibility.md.",
        )


def open_dataset(location: Location, folder: str = "", *, version: int | None = None) -> lance.LanceDataset:
    """Open the dataset at ``folder`` below the location (by default the table itself).

    A generation whose manifest names its log by another path, as the table was copied, moved or mounted elsewhere,
    reads the log of this table.

    Raises pylance's own errors; callers translate them with
    :func:`memwal_ops.formats.lance.files.lance_errors.lance_errors`, giving the action for the message.

    Raises:
        ForeignRootError: see :func:`own_log`.
    """
    uri = location.files or location.uri
    uri = below(uri, folder) if folder else uri
    dataset = metered(lance.dataset(uri, version=version, **handle_options(location)))
    bases = dataset.base_paths().values() if folder else ()
    if all(base.path == own_log(location, folder, base.path) for base in bases):
        return dataset
    manifest = table_pb2.Manifest.FromString(dataset._ds.serialized_manifest())  # noqa: SLF001 - it has no other name
    for base in manifest.base_paths:
        base.path = own_log(location, folder, base.path)
    data = manifest.SerializeToString()
    return metered(lance.LanceDataset(uri, dataset.version, serialized_manifest=data, **handle_options(location)))


def own_log(location: Location, folder: str, path: str) -> str:
    """The URI of the log from which a generation is read: its region's, in this table.

    Timeline without it: a table is restored from a backup to another path, and a new table is created at the old one;
    the generations of the first, which name the old path, have the rows of the second.

    Args:
        location: of the table.
        folder: of the generation, relative to the table.
        path: of the log, as the generation's manifest names it.

    Raises:
        ForeignRootError: the path is not that of the region's log, in whichever table.
    """
    log = log_folder(folder)
    if not path.rstrip("/").endswith(f"/{log}"):
        raise ForeignRootError(
            f"{folder} of {location.uri} names {path} as the place of its rows, which is not the log of its region.",
            remedy="Restore the generation's folder, with all its files under the same names, from a backup.",
        )
    return below(location.files or location.uri, log)


def metered(dataset: lance.LanceDataset) -> lance.LanceDataset:
    """The dataset; what pylance sends for it, and for all that is derived from it, is counted from now on."""
    inner: Any = dataset._ds  # noqa: SLF001 - the counts of its store; the meter must not keep the dataset itself

    def read() -> Traffic:
        counts = inner.io_stats_snapshot()
        requests = {"get": counts.read_iops, "put": counts.write_iops}
        return Traffic(requests, counts.read_bytes, counts.written_bytes)

    (REMOTE if has_scheme(dataset.uri) and not dataset.uri.startswith(_ON_FILES) else LOCAL).watch(dataset, read)
    return dataset


class PinnedDataset:
    """pylance's handle on one version. It is opened from its manifest at the first use. Safe in threads.

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
                    self._opened = metered(
                        lance.LanceDataset(
                            self._location.files or self._location.uri,
                            int(self._version.manifest.version),
                            serialized_manifest=self._version.manifest.SerializeToString(),
                            **handle_options(self._location),
                        )
                    )
            return self._opened


def handle_options(location: Location) -> dict[str, Any]:
    """Storage options and limits of caches, as arguments of pylance for a handle on the table at a location."""
    return {
        "storage_options": lance_options(location),
        "index_cache_size_bytes": _CACHE_BYTES,
        "metadata_cache_size_bytes": _CACHE_BYTES,
    }


def lance_options(location: Location) -> dict[str, str] | None:
    """The location's storage options as an argument for pylance."""
    return dict(location.lance_options) or None
