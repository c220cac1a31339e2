"""The layout ``legacy``: the MemWAL index of Lance 0.31 to 1.x, whose details are a list of MemWALs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.errors import LegacyLayoutError
from memwal_ops.formats.lance.layouts.api import Layout
from memwal_ops.formats.lance.specs import LEGACY_CODE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location


class LegacyLayout(Layout):
    """Merged, collected, verified and migrated by code of its own; every other job would write details of today's."""

    name = "legacy"

    def why_not(self, location: Location, store: Store, what: str) -> LegacyLayoutError:
        """Names the table, and the way out."""
        del store
        return LegacyLayoutError(
            f"{what} does not apply to {location.uri}: it carries the legacy MemWAL index of Lance 0.31 to 1.x "
            "(mem_wal_list), which current releases of Lance cannot read, and so neither append nor index beside it."
        )

    def jobs(self, registered: Mapping[str, JobSpec]) -> Mapping[str, JobSpec]:
        """Those that have code for this layout."""
        return {name: replace(registered[name], load=load) for name, load in LEGACY_CODE.items() if name in registered}


LEGACY = LegacyLayout()
