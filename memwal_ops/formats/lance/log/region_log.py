"""Replay a region's write-ahead log from its last flush to its end (S0-122, S0-142).

A replay that ends too early loses acknowledged rows. A missing entry is therefore the end of the log only if no later
entry exists, and a truncated entry only if it is the last one: its put was never acknowledged.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from memwal_ops.errors import WalCorruptError
from memwal_ops.formats.lance.log.region_files import WalEntry, WalEntryCutError, cut_entry, entry_path, read_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
    from memwal_ops.storage.api import Store

# Entries read concurrently, per step. It begins with two: most logs are short, and the entry after the first missing
# one must be checked anyway.
_READ_AHEAD = (2, 4, 8, 16, 32, 64)


def read_log(store: Store, manifest: RegionManifest) -> Iterator[WalEntry]:
    """Yield the entries after the last flush in ascending order. The last one may be truncated (``cut``, no rows).

    Args:
        manifest: newest manifest of the region.

    Raises:
        WalCorruptError: an entry before the end of the log is missing or unreadable.
    """
    number = (manifest.replay_after_wal_id or 0) + 1
    at = 0
    while True:
        count = _READ_AHEAD[min(at, len(_READ_AHEAD) - 1)]
        at += 1
        numbers = range(number, number + count)
        with ThreadPoolExecutor(_READ_AHEAD[-1] // 4, thread_name_prefix="read-log") as pool:
            found = [*pool.map(lambda one: _read(store, manifest, one), numbers)]
        good = next((place for place, entry in enumerate(found) if entry is None or entry.cut), count)
        entries = [entry for entry in found[:good] if entry is not None]
        yield from entries
        number += good
        if good < count:
            later = any(entry is not None for entry in found[good + 1 :]) or (
                good == count - 1 and store.head(entry_path(manifest.region_id, number + 1)) is not None
            )
            last = found[good]
            if last is not None:
                _refuse_cut(manifest, number, later=later)
                yield last
                return
            if not _is_there_now(store, manifest, number, later=later):
                return


def _read(store: Store, manifest: RegionManifest, number: int) -> WalEntry | None:
    try:
        return read_entry(store, manifest.region_id, number)
    except WalEntryCutError:
        return cut_entry(number)


def _refuse_cut(manifest: RegionManifest, number: int, *, later: bool) -> None:
    """Raise unless the truncated entry is the last one that was ever put."""
    if later or (manifest.wal_id_last_seen or 0) > number:
        raise WalCorruptError(
            f"WAL entry {entry_path(manifest.region_id, number)} is truncated, and later entries exist or existed."
        )


def _is_there_now(store: Store, manifest: RegionManifest, number: int, *, later: bool) -> bool:
    """Whether an entry that was missing exists by now; raises if it is lost.

    A live writer puts entries concurrently: the first of two may be missing when it is read, and both exist afterwards.
    """
    if not later and (manifest.wal_id_last_seen or 0) < number:
        return False
    if store.head(entry_path(manifest.region_id, number)) is not None:
        return True
    raise WalCorruptError(
        f"WAL entry {entry_path(manifest.region_id, number)} is missing, and later entries exist or existed."
    )
