"""Which of the three MemWAL layouts a table has, told from its bytes and not from a setting.

All layouts share the wire numbers of their messages; what differs is who wrote the write-ahead
log and what a generation's rows look like (design, "Layouts"). The legacy layout is recognised
while the index details are decoded (``format.memwal_index``) and never reaches this module.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from memwal_ops.format.names import parse_generation_dir, parse_wal_entry_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from memwal_ops.storage.api import Store

MEM_WAL_FOLDER = "_mem_wal"


class Layout(enum.StrEnum):
    """The layouts of design.md; the value is what ``inspect`` prints."""

    SHARD = "shard"
    REGION = "region"


def region_folder(region_id: UUID) -> str:
    """The folder of a region, relative to the table's root (S0-033)."""
    return f"{MEM_WAL_FOLDER}/{region_id}"


def detect_layout(store: Store, region_ids: Iterable[UUID]) -> Layout:
    """Tell the layout from the first region that shows a sign of it.

    A ``.lance`` WAL entry is the region layout (S0-034), an ``.arrow`` one is pylance's shard
    layout. Where all WAL entries are collected, a generation with data files of its own is the
    shard layout: the region layout's generations point into ``wal/`` (S0-147). A table without
    any region is what pylance initialises, hence shard.
    """
    for region_id in region_ids:
        folder = region_folder(region_id)
        for entry in store.list(f"{folder}/wal"):
            name = parse_wal_entry_name(entry.path.rsplit("/", 1)[-1])
            if name is not None:
                return Layout.REGION if name.suffix == "lance" else Layout.SHARD
        for directory in store.list_level(folder).directories:
            if parse_generation_dir(directory.rsplit("/", 1)[-1]) is None:
                continue
            own_data = next(iter(store.list(f"{directory}/data")), None)
            return Layout.SHARD if own_data is not None else Layout.REGION
    return Layout.SHARD
