"""The layout ``none``: a plain Lance table, without a MemWAL index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError, NoMemWalIndexError
from memwal_ops.formats.lance.layouts.api import Layout
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
from memwal_ops.formats.lance.wire.memwal_index import NO_MEMWAL
from memwal_ops.text import counted, span_text

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.layouts.api import TableWithoutIndex
    from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex
    from memwal_ops.storage.api import Store

_NAMED = 3


class NoLayout(Layout):
    """A table without a log. Jobs that maintain the base table apply, those that need regions do not."""

    name = "none"
    title = "plain table"

    def refusal(self, table: TableWithoutIndex) -> NoMemWalIndexError | None:
        """The error if there are regions of a table that was at this place before, with the remedy; else None.

        No job runs then: an expiry would delete the versions to which the regions belong. If the MemWAL index was
        removed, and the table not overwritten since, the regions are its own, and it is maintained as a plain table.
        """
        regions = table.regions.region_ids
        if not regions or table.index_removed_after is not None:
            return None
        named = "; ".join(_contents(table.store, region_id) for region_id in regions[:_NAMED])
        more = f"; and {len(regions) - _NAMED:,} more" if len(regions) > _NAMED else ""
        return NoMemWalIndexError(
            f"{table.location.uri} is a Lance table without a MemWAL index, but its _mem_wal folder has "
            f"{counted(len(regions), 'region')}: {named}{more}. They belong to the table as it was before it was "
            "overwritten, or before its index was dropped.",
            remedy="Run memwal-ops inspect URI: it lists them. If their rows do not belong to this table: stop their "
            "writers, and move _mem_wal to a place outside the table. To return to the version that they belong to, as "
            "long as it exists: tag the newest version, then dataset.checkout_version(N) and restore(), which discards "
            "what was committed since.",
        )

    def why_not(self, table: TableWithoutIndex, what: str) -> NoMemWalIndexError:
        """The error: there is no log, or no index for it."""
        if (refused := self.refusal(table)) is not None:
            return refused
        applies = f"{what} does not apply to {table.location.uri}: it is a Lance table without a MemWAL index"
        if not table.regions.region_ids:
            return NoMemWalIndexError(f"{applies}, so there is no log to merge.")
        return NoMemWalIndexError(
            f"{applies}: that was removed after version {table.index_removed_after}. The log in _mem_wal is kept.",
            remedy="Make it again, by memwal-ops init URI, lancedb's set_lsm_write_spec() or pylance's "
            "initialize_mem_wal(): then memwal-ops merge continues where it was.",
        )

    def without_index(self, table: TableWithoutIndex) -> MemWalIndex:
        """An empty index."""
        del table
        return NO_MEMWAL


def _contents(store: Store, region_id: UUID) -> str:
    """What a region has: the generations that it lists, as no version shows which of them were merged, and its log."""
    try:
        manifest = RegionManifestStore(store, region_id).latest()
    except MemwalOpsError as error:
        return f"{region_id} (not readable: {error.reason})"
    listed = manifest.flushed_generations
    rows = sum(one.physical_rows or 0 for one in listed)
    numbers = span_text(listed[0].generation, listed[-1].generation) if listed else "none"
    of = f", with {counted(rows, 'row')}" if rows else ""
    return f"{region_id} (flushed generations: {numbers}{of}; written log entries: {manifest.wal_id_last_seen or 0:,})"


NONE = NoLayout()
