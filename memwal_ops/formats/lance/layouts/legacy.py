"""The layout ``legacy``: the MemWAL index of Lance 0.31 to 1.x, whose details are a list of MemWALs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import LegacyLayoutError
from memwal_ops.formats.lance.layouts.api import Layout

if TYPE_CHECKING:
    from memwal_ops.formats.lance.layouts.api import TableWithoutIndex


class LegacyLayout(Layout):
    """Has its own merge, gc, verify and migrate jobs. Every other job would write the current kind of details."""

    name = "legacy"
    title = "legacy layout"

    def why_not(self, table: TableWithoutIndex, what: str) -> LegacyLayoutError:
        """The error, with the remedy."""
        return LegacyLayoutError(
            f"{what} does not apply to {table.location.uri}: it carries the legacy MemWAL index of Lance 0.31 to 1.x "
            "(mem_wal_list), which current releases of Lance cannot read, and so neither append nor index beside it."
        )


LEGACY = LegacyLayout()
