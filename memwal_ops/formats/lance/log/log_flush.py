"""Claim a region and flush its log to a generation, as a writer of the region's layout does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.wire.names import region_folder

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest


def flush_log(table: Table, manifest: RegionManifest) -> int:
    """Claim a region, flush its log to a generation, and put an entry at which earlier writers detect the fence.

    Returns:
        The writer epoch of the claim, if no other writer claimed the region since ``manifest``. If one did, the
        newest manifest may have another epoch.

    Raises:
        WriterFencedError: another writer claimed the region meanwhile.
        WalCorruptError, UnsupportedFeatureError: the log cannot be replayed.
        StorageError: the store failed, or, of the shard layout, any of these.
    """
    table.guard.check()
    return (
        _by_pylance(table, manifest) if table.layout_of(manifest.region_id).claims_with_entry else _own(table, manifest)
    )


def _own(table: Table, manifest: RegionManifest) -> int:
    """Claim the region, replay its log, fence the writer before by an entry without rows, and flush."""
    with RegionWriter(table, manifest.region_id) as writer:
        writer.fence()
    return writer.epoch


def _by_pylance(table: Table, manifest: RegionManifest) -> int:
    """Pylance's writer fences the current one, replays the log and flushes it."""
    with lance_errors("flush the log of", f"{table.location.uri}/{region_folder(manifest.region_id)}"):
        open_dataset(table.location).mem_wal_writer(str(manifest.region_id)).close()
    return manifest.writer_epoch + 1  # pylance does not report it
