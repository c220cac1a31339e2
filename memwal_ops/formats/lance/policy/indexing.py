"""Choose the indexes that are worth a catch-up, by the rows that they lack.

A query scans the rows that an index does not cover; to cover them costs a commit of each index, and for an index that
is written anew all of it. So one is worth a run at once when it lacks a quarter of the rows that it covers: then at
most five bytes are written anew for each byte that it grows by. And at 100,000 rows in any case, so that no query scans
more. An index that is written by tiers costs little more than the rows that it lacks: it is due, which the schedule
waits for, at a sixteenth, and at 10,000 rows. A small index is due at a quarter as well, however few rows that is.

Rows may be wide: any index is due where a query that scans what it lacks may read more than 16 MiB, and four times what
a run writes.
"""

from __future__ import annotations

# An index is worth a run once it lacks one row for so many that it covers: between these two numbers of rows.
_GROWTH = 4
_FEWEST, _MOST = 1000, 100_000
# The same, of an index that is written by tiers, for a run by the schedule.
_TIERS_GROWTH, _TIERS_MOST = 16, 10_000
_SCANNED_BYTES, _SAVING = 16 << 20, 4


def is_urgent(covered_rows: int, uncovered_rows: int) -> bool:
    """Whether the rows that an index lacks are worth a run at once."""
    return uncovered_rows >= min(_MOST, max(_FEWEST, covered_rows // _GROWTH))


def is_due(covered_rows: int, uncovered_rows: int, *, anew: bool) -> bool:
    """Whether they are worth a run by the schedule.

    Args:
        covered_rows: rows that it covers.
        uncovered_rows: rows that it lacks.
        anew: the index is written anew each time, not by tiers.
    """
    if uncovered_rows and uncovered_rows >= covered_rows // _GROWTH:
        return True
    most, growth = (_MOST, _GROWTH) if anew else (_TIERS_MOST, _TIERS_GROWTH)
    return uncovered_rows >= min(most, max(_FEWEST, covered_rows // growth))


def is_costly(uncovered_bytes: int, written_bytes: int) -> bool:
    """Whether what queries may read of fragments that an index lacks is worth a run by the schedule.

    Args:
        uncovered_bytes: of the data files of those fragments.
        written_bytes: what the run would write.
    """
    return uncovered_bytes >= max(_SCANNED_BYTES, _SAVING * written_bytes)
