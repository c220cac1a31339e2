"""Flush the log of a region as a writer does, and seal it: no writer can claim it any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.errors import CommitConflictError, InvalidFormatError, MemwalOpsError, ObjectNotFoundError
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.generations.wal import unflushed_entries, unflushed_rows, wal_entry_path
from memwal_ops.formats.lance.log.region_claim import wait
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.wire.names import region_folder
from memwal_ops.formats.lance.wire.region_manifest import RegionStatus

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_ATTEMPTS = 10
_CONCURRENT_READS = 4
# pylance's defaults. It refuses to replay a log of a writer that had higher limits, and more rows or batches.
_REPLAYED_ROWS, _REPLAYED_BATCHES = 100_000, 8_000


def seal_region(table: Table, region_id: UUID) -> RegionManifest:
    """Seal the region, and return its newest manifest: every row that was acknowledged is in a generation.

    Each step may be the last one before a crash, and be repeated by any number of processes at once:

    1. Claim the region as a writer does: its epoch rises, its log is replayed and flushed to a generation, and an
       entry without rows is put at the next position, where a stalled writer detects that it was fenced.
    2. Publish the sealed manifest, unless another writer claimed the region meanwhile: then all is done again.

    Raises:
        CommitConflictError: writers claimed the region repeatedly.
        WalCorruptError, UnsupportedFeatureError: the log cannot be replayed.
        StorageError: the store failed; do it again.
    """
    region = table.region(region_id)
    for attempt in range(_ATTEMPTS):
        newest = region.latest(checked=True)
        if newest.sealed:
            return newest
        try:
            claimed = flush_log(table, newest)
        except MemwalOpsError:
            if region.latest(checked=True).writer_epoch <= newest.writer_epoch + 1:
                raise
        else:
            flushed = region.latest(checked=True)
            # Not claimed since. Timeline without this check: another writer claims after the flush and writes;
            # the region is sealed; the row that it puts next is acknowledged, and in no generation ever.
            if flushed.writer_epoch == claimed and _publish_sealed(table, region, flushed):
                return region.latest(checked=True)
        # Two processes that seal the region fence each other, and a claim is slow.
        wait(attempt, first=0.1, longest=10)
    raise CommitConflictError(f"Region {region_id} is claimed by writers repeatedly; stop them first.")


def _publish_sealed(table: Table, region: RegionManifestStore, flushed: RegionManifest) -> bool:
    replayed = flushed.replay_after_wal_id
    # pylance leaves the empty entry of its claim behind the last flush.
    unflushed = unflushed_entries(table, flushed)
    if unflushed and unflushed_rows(table, flushed):
        return False
    last = (replayed or 0) + unflushed
    sealed = replace(
        flushed.next(),
        status=RegionStatus.SEALED,
        writer_epoch=flushed.writer_epoch + 1,
        replay_after_wal_id=last or replayed,
        wal_id_last_seen=last or flushed.wal_id_last_seen,
    )
    return region.commit(sealed)


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
    rows, batches = _size_of_log(table, manifest)
    with lance_errors("flush the log of", f"{table.location.uri}/{region_folder(manifest.region_id)}"):
        open_dataset(table.location).mem_wal_writer(
            str(manifest.region_id),
            max_memtable_rows=max(_REPLAYED_ROWS, rows),
            max_memtable_batches=max(_REPLAYED_BATCHES, batches),
        ).close()
    return manifest.writer_epoch + 1  # pylance does not report it


def _size_of_log(table: Table, manifest: RegionManifest) -> tuple[int, int]:
    """Rows and batches after the last flush; entries that cannot be read, which pylance refuses, count as empty."""
    layout, first = table.layout_of(manifest.region_id), (manifest.replay_after_wal_id or 0) + 1

    def size(entry: int) -> tuple[int, int]:
        try:
            rows = layout.entry_table(table.store, wal_entry_path(manifest.region_id, entry, layout))
        except (InvalidFormatError, ObjectNotFoundError):
            return 0, 0
        return rows.num_rows, len(rows.to_batches())

    with ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="read-log") as pool:
        sizes = [*pool.map(size, range(first, first + unflushed_entries(table, manifest)))]
    return sum(rows for rows, _ in sizes), sum(batches for _, batches in sizes)
