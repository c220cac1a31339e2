"""The write-ahead log of a region: where it ends.

Entries are numbered without a gap (S0-122), and a manifest's ``wal_id_last_seen`` is a hint that
only rises. From there on the end is found by HEAD alone, in steps that double, so that a hint that
is a thousand entries old costs twenty requests and not a thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.layout import Layout, region_folder
from memwal_ops.format.names import wal_entry_name

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.storage.api import Store

_SUFFIX = {Layout.REGION: "lance", Layout.SHARD: "arrow"}


def wal_entry_path(region_id: UUID, entry_id: int, layout: Layout) -> str:
    """Path of a WAL entry, relative to the table's root (S0-034)."""
    return f"{region_folder(region_id)}/wal/{wal_entry_name(entry_id, _SUFFIX[layout])}"


def last_wal_entry(
    store: Store, region_id: UUID, replay_after_wal_id: int | None, wal_id_last_seen: int | None, layout: Layout
) -> int:
    """The id of the region's last WAL entry, at least what its manifest knows (S0-171, S0-172).

    Entries up to ``replay_after_wal_id`` may be collected: what stands at or below the hint is not
    looked at. 0: no entry yet. One request where nothing was written since the hint.
    """
    known = max(wal_id_last_seen or 0, replay_after_wal_id or 0)

    def stands(entry_id: int) -> bool:
        return store.head(wal_entry_path(region_id, entry_id, layout)) is not None

    step = 1
    while stands(known + step):
        known += step
        step *= 2
    while step > 1:
        step //= 2
        if stands(known + step):
            known += step
    return known
