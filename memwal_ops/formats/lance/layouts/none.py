"""The layout ``none``: a plain Lance table, without a MemWAL index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError, NoMemWalIndexError
from memwal_ops.formats.lance.layouts.api import Layout
from memwal_ops.formats.lance.memwal.regions import RegionManifestStore, list_regions
from memwal_ops.formats.lance.wire.memwal_index import NO_MEMWAL
from memwal_ops.text import counted, span_text

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_NAMED = 3


class NoLayout(Layout):
    """A table without a log: jobs that maintain the base table apply, but none that needs regions."""

    name = "none"

    def refusal(self, location: Location, store: Store) -> NoMemWalIndexError | None:
        """The error if there are regions of a table that was at this place before, with the remedy; else None.

        No job runs then: an expiry would delete the versions to which the regions belong.
        """
        regions = list_regions(store).region_ids
        if not regions:
            return None
        named = "; ".join(_contents(store, region_id) for region_id in regions[:_NAMED])
        more = f"; and {len(regions) - _NAMED:,} more" if len(regions) > _NAMED else ""
        return NoMemWalIndexError(
            f"{location.uri} is a Lance table without a MemWAL index, but its _mem_wal folder has "
            f"{counted(len(regions), 'region')}: {named}{more}. They belong to the table as it was before it was "
            "overwritten, or before its index was dropped.",
            remedy="Do not run memwal-ops init yet. If their rows do not belong to this table: stop their writers, "
            "and move _mem_wal to a place outside the table. To return to the version that they belong to: tag the "
            "newest version, then dataset.checkout_version(N) and restore(), which discards what was committed since.",
        )

    def why_not(self, location: Location, store: Store, what: str) -> NoMemWalIndexError:
        """The error: there is no log."""
        return self.refusal(location, store) or NoMemWalIndexError(
            f"{what} does not apply to {location.uri}: it is a Lance table without a MemWAL index, so there is no log "
            "to merge."
        )

    def without_index(self, location: Location, store: Store) -> MemWalIndex:
        """An empty index."""
        del location, store
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
