"""Choose the indexes that are worth a catch-up at once, by the rows that they lack.

A query scans the rows that an index does not cover; to cover them costs a commit of each index, and for an index that
is written anew all of it. So one is due once it lacks a quarter of the rows that it covers: then at most five bytes are
written anew for each byte that it grows by. And at 100,000 rows in any case, so that no query scans more.
"""

from __future__ import annotations

# An index is due once it lacks one row for so many that it covers: between these two numbers of rows.
_GROWTH = 4
_FEWEST, _MOST = 1000, 100_000


def is_worth_a_run(covered_rows: int, uncovered_rows: int) -> bool:
    """Whether the rows that an index lacks are worth a run at once."""
    return uncovered_rows >= min(_MOST, max(_FEWEST, covered_rows // _GROWTH))
