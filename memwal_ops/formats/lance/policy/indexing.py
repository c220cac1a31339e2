"""Choose the indexes that are worth a catch-up, and estimate what it writes.

A query scans the rows that an index does not cover; to cover them costs writing. An index that an update writes anew
(a scalar one) is due once the rows that it lacks are a quarter of those that it covers, so that at most five bytes are
written for each byte that it grows by; and at 100,000 rows in any case, so that no query scans more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

# An index is due once it lacks one row for so many that it covers: between these two numbers of rows.
_GROWTH = 4
_FEWEST, _MOST = 1000, 100_000


@dataclass(frozen=True, slots=True)
class IndexSize:
    """What a catch-up weighs.

    Attributes:
        bytes: size of the files of all its segments; 0 if no writer recorded it.
        covered_rows: rows of the table that it covers.
        uncovered_rows: rows that it does not cover.
        anew: an update writes all of it, and not only a segment for the rows that it lacks.
    """

    bytes: int
    covered_rows: int
    uncovered_rows: int
    anew: bool

    @property
    def is_due(self) -> bool:
        """Whether the rows that it lacks are worth a run at once."""
        return self.uncovered_rows >= min(_MOST, max(_FEWEST, self.covered_rows // _GROWTH))

    @property
    def bytes_written(self) -> int:
        """About what a catch-up writes: its rows are as wide as those that it has."""
        rows = self.uncovered_rows + (self.covered_rows if self.anew else 0)
        return rows * self.bytes // max(1, self.covered_rows) if self.uncovered_rows else 0

    @property
    def bytes_read(self) -> int:
        """About what a catch-up reads: what it had, if it is written anew, and the values of the rows that it lacks."""
        return self.bytes_written
