"""Detect the layout of a table from its stored bytes, not from a setting; the only module that does so."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.files.versions import PAGE
from memwal_ops.formats.lance.layouts.legacy import LEGACY
from memwal_ops.formats.lance.layouts.none import NONE
from memwal_ops.formats.lance.layouts.region import REGION
from memwal_ops.formats.lance.layouts.shard import SHARD
from memwal_ops.formats.lance.regions.listed_log import log_suffixes
from memwal_ops.formats.lance.wire.memwal_index import is_legacy
from memwal_ops.formats.lance.wire.names import parse_generation_dir, parse_wal_entry_name, region_folder
from memwal_ops.storage.api import LinkError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.layouts.api import Layout
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import Store


def layout_of_entry(entry: table_pb2.IndexMetadata | None) -> Layout | None:
    """The layout, if the MemWAL entry of a version determines it; None: use :func:`layout_of_regions`."""
    if entry is None:
        return NONE
    return LEGACY if is_legacy(entry) else None


# Regions whose layouts are compared where that costs no request.
_COMPARED = 16


class MixedLayoutsError(UnsupportedFeatureError):
    """A table has regions, or log entries in a region, of both layouts that have regions, and no migration record.

    Timeline of the loss: rows are acknowledged in entry 5 of the region layout; pylance's writer, which does not see
    it, writes its own entry 5 and flushes it; the manifest has entry 5 as flushed, so that it is never replayed.
    """

    remedy = (
        "Stop the writers, and keep the regions' folders: runbooks/errors/08-unsupported_feature.md has the commands "
        "that show the rows of both kinds of entries. Restore the table from a backup of before the other writer, and "
        "write what it wrote again, by the writer of the table's layout."
    )


def refuse_mixed(folder: str, suffixes: Collection[str]) -> None:
    """Refuse a region whose log has entries with these suffixes, if they are of several layouts.

    Raises:
        MixedLayoutsError: they are.
    """
    if len(suffixes) > 1:
        raise MixedLayoutsError(
            f"{folder}/wal, or the logs of this table's regions, have entries of the region layout (.lance) and of the "
            "shard layout (.arrow): two kinds of writers wrote to it, and neither sees the other's rows."
        )


def layout_of_regions(store: Store, region_ids: Iterable[UUID]) -> Layout:
    """The layout by the first region whose files determine it.

    A ``.lance`` WAL entry is of the region layout (S0-034), an ``.arrow`` one of pylance's shard
    layout. If all WAL entries are collected, a generation with data files of its own is of the
    shard layout: the region layout's generations refer to ``wal/`` (S0-147). A table without
    regions is one that pylance initialized, hence shard.

    Raises:
        MixedLayoutsError: the log of a region has entries of both, and no other one determines it.
    """
    mixed: MixedLayoutsError | None = None
    for region_id in region_ids:
        try:
            shown = layout_of_region(store, region_id)
        except MixedLayoutsError as error:
            mixed = error
        else:
            if shown is not None:
                return shown
    if mixed is not None:
        raise mixed
    return SHARD


def mixed_regions(store: Store, region_ids: Iterable[UUID], *, migrated: bool) -> Mapping[UUID, MixedLayoutsError]:
    """The regions whose logs have entries of both layouts or, unless ``migrated``, of another one than the first log.

    Of the first regions, as far as no request is necessary; a verification and a collection list all of each log.
    """
    found: dict[UUID, MixedLayoutsError] = {}
    usual: frozenset[str] = frozenset()
    for region_id in islice(region_ids, _COMPARED):
        suffixes = log_suffixes(store, region_id)
        try:
            refuse_mixed(region_folder(region_id), suffixes | usual)
        except MixedLayoutsError as error:
            found[region_id] = error
        else:
            usual = usual if migrated else suffixes or usual
    return found


def layout_of_region(store: Store, region_id: UUID) -> Layout | None:
    """The layout that a region's files determine; None: it has no such files yet.

    Raises:
        MixedLayoutsError: of the first 1,000 entries of its log, some are of each.
    """
    with suppress(LinkError):  # links are not followed; the region is refused when it is read
        return _shown_by(store, region_folder(region_id))
    return None


def layout_named(name: str) -> Layout | None:
    """The layout that a migration recorded; None: this release does not support it."""
    return {one.name: one for one in (REGION, SHARD)}.get(name)


def _shown_by(store: Store, folder: str) -> Layout | None:
    names = (parse_wal_entry_name(meta.path.rsplit("/", 1)[-1]) for meta in islice(store.list(f"{folder}/wal"), PAGE))
    suffixes = {name.suffix for name in names if name is not None}
    refuse_mixed(folder, suffixes)
    if suffixes:
        return REGION if REGION.wal_suffix in suffixes else SHARD
    for directory in store.list_level(folder).directories:
        if parse_generation_dir(directory.rsplit("/", 1)[-1]) is not None:
            own_data = next(iter(store.list(f"{directory}/data")), None)
            return SHARD if own_data is not None else REGION
    return None
