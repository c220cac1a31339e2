"""Evaluate a filter on the followed table: the rows that a search may return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann.source import at_version, matching, read_source

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Filter:
    """The rows that match filters. Keeps the result for the last one.

    Args:
        folder: of an index that follows a table.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._last: tuple[tuple[str, int], NDArray[np.int64]] | None = None

    def rows(self, where: str, followed: int) -> NDArray[np.int64]:
        """The row ids that match, ascending, in the version of the table that the index has.

        Raises:
            InvalidUsageError: the index follows no table, or has no version of it yet; or the filter is not valid.
            StorageError: the table, or that version of it, cannot be read.
        """
        if self._last is not None and self._last[0] == (where, followed):
            return self._last[1]
        source = read_source(self._folder, followed)
        if source is None:
            raise InvalidUsageError(
                f"{self._folder} follows no table on which a filter could be evaluated.",
                remedy="Give the row ids that are allowed, as allow.",
            )
        if not followed:
            raise InvalidUsageError(
                f"{self._folder} has no complete version of the table {source.uri} yet.",
                remedy="Run memwal-ops catchup on it.",
            )
        found = np.sort(matching(at_version(source.open(), followed), source, where))
        self._last = ((where, followed), found)
        return found
