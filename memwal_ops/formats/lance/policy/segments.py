"""Choose the segments of an index that are written again with new rows, by size tiers.

An index that is written anew for each append costs its whole size each time; one that gets a segment for each append
makes each query look into all of them. So new rows become a segment of their own, and the newest segments are merged
with them only once the result is ``tier_factor`` times as large as the largest of them, as fragments are joined
(:mod:`memwal_ops.formats.lance.policy.compaction`). A segment is weighed by its rows, so that all indexes of a table
are cut at the same fragments: a compaction does not join fragments that different segments cover.

With T the factor, M the most segments, and n the rows of the index over those of the smallest append:

* **Writes.** A row of an index is written again at most ``ceil(log_T(n))`` times, as long as there are fewer than M
  segments; of appends of one size in any case at most ``ceil(log_T(n)) + 2 * c`` times, with c the smallest number for
  which ``binomial(M + c, M)`` is n or more. Below :data:`FLOOR`, where a segment costs requests and not its bytes, all
  is merged: at most that many rows more in each run.
* **Segments.** Of appends of one size, at most ``(T - 1) * (log_T(n) + 1)`` and one, and never more than M. Where one
  more would be too many, those are merged of which the largest grows most by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Rows of a segment that cost less to write again than a look into one more segment.
FLOOR = 1024


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """A segment as the policy weighs it: live rows that it covers, and bytes of its files (0: not recorded)."""

    rows: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class SegmentDebt:
    """What the next run would write of one index, and for what.

    Attributes:
        uncovered_rows: rows that queries compare one by one until then.
        excess: segments above the limit.
        bytes: size of the segments that would be written, about.
    """

    uncovered_rows: int
    excess: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SegmentPolicy:
    """When segments of an index are merged.

    Attributes:
        max_segments: an index never has more; 1: it is written anew each time.
        tier_factor: how many times as large as the largest of them the result of merging segments must be.
        floor: rows of a segment up to which all are merged.
    """

    max_segments: int
    tier_factor: int = 4
    floor: int = FLOOR

    @property
    def writes_anew(self) -> bool:
        """Whether each update writes the whole index."""
        return self.max_segments == 1 or self.tier_factor == 1

    def merged(self, segments: Sequence[SegmentSize], new: int) -> int:
        """How many of the newest segments become one, together with the new rows; 0: these get one of their own.

        Args:
            segments: of an index, the oldest first.
            new: rows that none covers; 0: nothing is merged but for the limit.
        """
        too_many = self._too_many(segments, new)
        if not new and not too_many:
            return 0
        rows = [one.rows for one in reversed(segments)]
        sizes = [new + size for size in accumulate(rows)]
        # For each number of segments: how many times as large as the largest of them the result is.
        grown = [
            size / largest if largest else float("inf")
            for size, largest in zip(sizes, accumulate(rows, max), strict=True)
        ]
        due = [at for at, size in enumerate(sizes) if grown[at] >= self.tier_factor or size <= self.floor]
        if due and due[-1] + 1 >= too_many:
            return due[-1] + 1
        return max(range(too_many, len(rows) + 1), key=lambda number: grown[number - 1]) if too_many else 0

    def debt(self, segments: Sequence[SegmentSize], new: int) -> SegmentDebt:
        """What a run would write now; arguments as :meth:`merged`."""
        again = segments[len(segments) - self.merged(segments, new) :]
        rows = sum(one.rows for one in segments)
        width = sum(one.bytes for one in segments) / rows if rows else 0.0
        return SegmentDebt(
            uncovered_rows=new,
            excess=max(0, len(segments) - self.max_segments),
            bytes=sum(one.bytes for one in again) + round(new * width),
        )

    def _too_many(self, segments: Sequence[SegmentSize], new: int) -> int:
        """How many segments must at least be merged, so that there are no more than the limit."""
        if not new and len(segments) <= self.max_segments:
            return 0
        return max(0, len(segments) + 1 - self.max_segments)
