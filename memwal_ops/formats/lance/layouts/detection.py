"""Detect the layout of a table from its stored bytes, not from a setting; the only module that does so."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.layouts.legacy import LEGACY
from memwal_ops.formats.lance.layouts.none import NONE
from memwal_ops.formats.lance.layouts.region import REGION
from memwal_ops.formats.lance.layouts.shard import SHARD
from memwal_ops.formats.lance.wire.memwal_index import is_legacy
from memwal_ops.formats.lance.wire.names import parse_generation_dir, parse_wal_entry_name, region_folder
from memwal_ops.storage.api import LinkError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from memwal_ops.formats.lance.layouts.api import Layout
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import Store


def layout_of_entry(entry: table_pb2.IndexMetadata | None) -> Layout | None:
    """The layout, if the MemWAL entry of a version determines it; None: use :func:`layout_of_regions`."""
    if entry is None:
        return NONE
    return LEGACY if is_legacy(entry) else None


def layout_of_regions(store: Store, region_ids: Iterable[UUID]) -> Layout:
    """The layout by the first region whose files determine it.

    A ``.lance`` WAL entry is of the region layout (S0-034), an ``.arrow`` one of pylance's shard
    layout. If all WAL entries are collected, a generation with data files of its own is of the
    shard layout: the region layout's generations refer to ``wal/`` (S0-147). A table without
    regions is one that pylance initialized, hence shard.
    """
    for region_id in region_ids:
        if (found := layout_of_region(store, region_id)) is not None:
            return found
    return SHARD


def layout_of_region(store: Store, region_id: UUID) -> Layout | None:
    """The layout that a region's files determine; None: it has no such files yet."""
    with suppress(LinkError):  # links are not followed; the region is refused when it is read
        return _shown_by(store, region_folder(region_id))
    return None


def layout_named(name: str) -> Layout | None:
    """The layout that a migration recorded; None: this release does not support it."""
    return {one.name: one for one in (REGION, SHARD)}.get(name)


def _shown_by(store: Store, folder: str) -> Layout | None:
    for entry in store.list(f"{folder}/wal"):
        name = parse_wal_entry_name(entry.path.rsplit("/", 1)[-1])
        if name is not None:
            return REGION if name.suffix == REGION.wal_suffix else SHARD
    for directory in store.list_level(folder).directories:
        if parse_generation_dir(directory.rsplit("/", 1)[-1]) is not None:
            own_data = next(iter(store.list(f"{directory}/data")), None)
            return SHARD if own_data is not None else REGION
    return None
