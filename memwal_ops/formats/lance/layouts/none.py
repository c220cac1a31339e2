"""The layout ``none``: a Lance table without a MemWAL index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import NoMemWalIndexError
from memwal_ops.formats.lance.layouts.api import Layout
from memwal_ops.formats.lance.memwal.regions import list_regions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_NAMED = 3


class NoLayout(Layout):
    """A table without MemWAL; no job applies to it."""

    name = "none"

    def refusal(self, location: Location, store: Store) -> NoMemWalIndexError:
        """The error, and the remedy if there are regions of a table that was at this place before."""
        regions = list_regions(store).region_ids
        if not regions:
            return NoMemWalIndexError(f"{location.uri} is a Lance table without a MemWAL index.")
        named = ", ".join(map(str, regions[:_NAMED])) + (", ..." if len(regions) > _NAMED else "")
        return NoMemWalIndexError(
            f"{location.uri} is a Lance table without a MemWAL index, but its _mem_wal folder has regions ({named}): "
            "they belong to the table as it was before it was overwritten, or before its index was dropped.",
            remedy="Do not run initialize_mem_wal yet. If their rows do not belong to this table: stop their writers, "
            "and move _mem_wal to a place outside the table. To return to the version that they belong to: tag the "
            "newest version, then dataset.checkout_version(N) and restore(), which discards what was committed since.",
        )

    def jobs(self, registered: Mapping[str, JobSpec]) -> Mapping[str, JobSpec]:
        """None yet."""
        del registered
        return {}


NONE = NoLayout()
