"""Choose by size tiers what is written again: fragments, indexes, and segments of indexes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

# Bytes of a file below which a request for it costs more than to transfer it.
FLOOR = 64 << 10
# A run costs about as many requests as a query saves when that many such files are joined.
_WORTH_A_RUN = 8
# A reader opens each data file of a fragment: more than these are joined if they are small, or far too many.
_COLUMN_FILES, _SMALL_COLUMN_FILE, _TOO_MANY_COLUMN_FILES = 8, 1 << 20, 64


@dataclass(frozen=True, slots=True)
class FragmentSize:
    """What a compaction weighs.

    Attributes:
        id: the fragment's id.
        rows: its rows, without deleted ones.
        deleted: its deleted rows, which its files still have.
        bytes: size of its data files; 0 if no writer recorded it.
        neighbors: fragments are joined only if this is equal: the segments of indexes that cover them.
        dropped: bytes of its data files that are of columns which the table does not have any more.
        files: the number of its data files.
        demanded: whether it is rewritten in any case.
        indexed_again: bytes of indexes that are built again for its rows, since pylance does not move them.
    """

    id: int
    rows: int
    deleted: int
    bytes: int
    neighbors: Hashable = None
    dropped: int = 0
    files: int = 1
    demanded: bool = False
    indexed_again: int = 0

    @property
    def deleted_fraction(self) -> float:
        """Deleted rows over all rows, from 0 to 1."""
        return self.deleted / (self.rows + self.deleted) if self.deleted else 0.0

    @property
    def live_bytes(self) -> float:
        """Size of its rows that are not deleted: about what a rewrite of it writes."""
        kept = self.bytes - self.dropped
        return kept * (1 - self.deleted_fraction) if self.deleted else kept

    @property
    def dead_fraction(self) -> float:
        """What a rewrite of it frees, from 0 to 1: deleted rows and dropped columns."""
        return 1 - self.live_bytes / self.bytes if self.dropped else self.deleted_fraction

    @property
    def yield_fraction(self) -> float:
        """What a rewrite of it frees of all that it costs, indexes included, from 0 to 1."""
        return self.dead_fraction * self.bytes / (self.bytes + self.indexed_again) if self.bytes else self.dead_fraction

    @property
    def is_scattered(self) -> bool:
        """Whether its columns are in too many files."""
        many = self.files > _COLUMN_FILES and 0 < self.bytes < self.files * _SMALL_COLUMN_FILE
        return many or self.files > _TOO_MANY_COLUMN_FILES


Group = tuple[FragmentSize, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """When fragments are rewritten.

    Each byte that is appended costs a write. A compaction that joins all small fragments each time writes the whole
    table for each append. Here adjacent fragments are joined only once the result is ``tier_factor`` times as large as
    the largest of them, or has the target size (universal compaction of RocksDB, size-tiered compaction of Cassandra,
    the binary counter). With T the factor and n the target over the size of an append:

    * **Writes.** A row is rewritten at most ``ceil(log_T(n))`` times until its fragment has the target size, and then
      only where too many of the fragment's rows are deleted. Below :data:`FLOOR`, where a file costs a request and not
      its bytes, all is joined: at most that many bytes more in each run.
    * **Fragments.** What remains has no group to join. Of appends of one size, at most ``(T - 1) * (log_T(n) + 1)``
      fragments below the target remain; of any sizes at most ``T + n ** (log(2) / log(2 * T / (T - 1)))``.

    A fragment alone is rewritten where too much of it is deleted rows and dropped columns, or where its columns are in
    many small files, as ``add_columns`` leaves them.

    pylance puts new fragments behind all others, so that others become neighbors, and may be due in turn. A run
    continues until nothing is due (:meth:`Policy.rounds`): each round leaves fewer fragments, or fewer deleted rows.

    Attributes:
        target_rows: a fragment with that many rows is never joined with others.
        target_bytes: neither is one of that size.
        tier_factor: how many times as large as the largest of them the result of joining fragments must be; 1 joins
            all fragments below the target size.
        at_rest: nothing is appended: neighbors are joined, too, if that writes at most ``tier_factor`` bytes for each
            byte that was appended or deleted since they were joined last.
        deleted_fraction: a fragment of which more is deleted or dropped is rewritten; 0: each one that has any of that.
    """

    target_rows: int
    target_bytes: int
    tier_factor: int
    deleted_fraction: float
    at_rest: bool = False

    def fragments_after(self, group: Sequence[FragmentSize]) -> int:
        """How many fragments a group becomes: one; none if it has no rows; more if a fragment is too large."""
        rows = sum(fragment.rows for fragment in group)
        if not rows:
            return 0
        full = -(-rows // max(1, int(self._size(group))))
        return -(-rows // full)

    def within(self, budget: int) -> Policy:
        """The same, but a group that joins fragments has less than that many bytes; at least 2."""
        return replace(self, target_bytes=max(1, min(self.target_bytes, budget // 2)))

    def groups(self, fragments: Sequence[FragmentSize]) -> list[Group]:
        """The groups of adjacent fragments to rewrite, each into one fragment, in the order of the table.

        A group has at least two fragments, and less than twice the target size; or it is one fragment with too many
        deleted rows, dropped columns or files. ``fragments``: all of the table, in the order of its manifest.
        """
        groups = [group for run in self._runs(fragments) for group in self._joined(run)]
        joined = {fragment.id for group in groups for fragment in group}
        groups += [(fragment,) for fragment in fragments if fragment.id not in joined and self._is_due(fragment)]
        order = {fragment.id: position for position, fragment in enumerate(fragments)}
        return sorted(groups, key=lambda group: order[group[0].id])

    def _is_due(self, fragment: FragmentSize) -> bool:
        return fragment.demanded or fragment.is_scattered or fragment.dead_fraction > self.deleted_fraction

    def rounds(self, fragments: Sequence[FragmentSize]) -> Iterator[list[Group]]:
        """The groups that a run rewrites, by round: those of a round are due once those before are rewritten."""
        while groups := self.groups(fragments):
            yield groups
            fragments = self.after(fragments, groups)

    def after(self, fragments: Sequence[FragmentSize], groups: Sequence[Group]) -> list[FragmentSize]:
        """The fragments once groups of them are rewritten: pylance puts the new ones behind all others."""
        gone = {fragment.id for group in groups for fragment in group}
        left = [fragment for fragment in fragments if fragment.id not in gone]
        number = max((fragment.id for fragment in fragments), default=-1) + 1
        for group in groups:
            parts, rows = self.fragments_after(group), sum(fragment.rows for fragment in group)
            size = sum(fragment.live_bytes for fragment in group)
            full = -(-rows // max(1, parts))
            width = size / max(1, rows)
            for _ in range(parts):
                taken = min(full, rows)
                rows -= taken
                left.append(FragmentSize(number, taken, 0, math.ceil(width * taken), group[0].neighbors))
                number += 1
        return left

    def worth_a_run(self, groups: Sequence[Group]) -> list[Group]:
        """Those of the groups that are worth a run at once, by the bytes that it writes against what it saves.

        * One that joins fragments: it is due only once it has grown by the tier's factor, however often that is asked.
        * A fragment with deleted rows or dropped columns: once they are one in ``tier_factor`` of its bytes and of its
          indexes', so that less than that many bytes are written for each that is dropped.
        * Below :data:`FLOOR`: once there are 8 fragments in all, since each run costs requests, too.

        What else is due waits for a run that comes anyway.
        """
        tiny = [group for group in groups if self._is_tiny(group)]
        enough = sum(map(len, tiny)) >= _WORTH_A_RUN
        share = 1 / max(2, self.tier_factor)
        return [
            group
            for group in groups
            if (
                enough
                if self._is_tiny(group)
                else len(group) > 1 or group[0].is_scattered or group[0].yield_fraction >= share
            )
        ]

    def _is_tiny(self, group: Sequence[FragmentSize]) -> bool:
        """Whether their files cost requests, and not their bytes."""
        return sum(fragment.bytes for fragment in group) <= FLOOR and all(fragment.bytes for fragment in group)

    def _size(self, fragments: Sequence[FragmentSize]) -> float:
        return self._share(
            sum(fragment.rows for fragment in fragments), sum(fragment.live_bytes for fragment in fragments)
        )

    def _share(self, rows: float, size: float) -> float:
        return max(rows / self.target_rows, size / self.target_bytes)

    def _runs(self, fragments: Sequence[FragmentSize]) -> Iterator[list[FragmentSize]]:
        """Longest sequences of fragments below the target size that may be joined with each other."""
        run: list[FragmentSize] = []
        for fragment in fragments:
            # Also where rows of it are deleted: it is not written again before these are too many.
            thinned = self._is_due(fragment)
            full = self._share(fragment.rows, fragment.live_bytes) >= 1 or (
                (fragment.deleted or fragment.dropped)
                and not thinned
                and self._share(fragment.rows + fragment.deleted, fragment.bytes) >= 1
            )
            if run and (full or fragment.neighbors != run[-1].neighbors):
                yield run
                run = []
            if not full:
                run.append(fragment)
        if run:
            yield run

    def _joined(self, run: list[FragmentSize]) -> Iterator[Group]:
        """The groups of a run.

        A run that is too small for its largest fragment has no group with that one in it: such a group would be smaller
        still. So what is before it and what is behind it is looked at, each as a run.
        """
        left, at_rest = [run], self.at_rest
        while left:
            run = left.pop()
            if len(run) < 2:  # noqa: PLR2004 - a fragment alone is not joined
                continue
            grown, at_rest = self._grown(run, at_rest=at_rest), False  # parts of it would be paid for twice
            if grown:
                *full, rest = self._cut(run)
                yield from full
                if full:
                    left.append(list(rest))
                else:
                    yield rest
            else:
                largest = max(range(len(run)), key=lambda position: self._size([run[position]]))
                left += [run[:largest], run[largest + 1 :]]

    def _grown(self, run: Sequence[FragmentSize], *, at_rest: bool) -> bool:
        size = self._size(run)
        if self._is_tiny(run) or size >= 1:
            return True
        largest = max(self._share(fragment.rows, fragment.live_bytes) for fragment in run)
        # What the readers of deleted rows pay is weighed as in a fragment that is rewritten alone.
        saved = self._share(
            sum(fragment.deleted for fragment in run), sum(fragment.bytes - fragment.live_bytes for fragment in run)
        )
        times = self.tier_factor - 1
        if at_rest and pays_at_rest(size, largest, self.tier_factor, saved):
            return True
        return times * largest <= size - largest + times * times * saved

    def _cut(self, run: Sequence[FragmentSize]) -> Iterator[Group]:
        """The run in pieces of the target size, and what is left in the end: a smaller piece, or none."""
        piece: list[FragmentSize] = []
        rows = size = 0.0
        for fragment in run:
            piece.append(fragment)
            rows, size = rows + fragment.rows, size + fragment.live_bytes
            if self._share(rows, size) >= 1:
                yield tuple(piece)
                piece, rows, size = [], 0.0, 0.0
        yield tuple(piece)


def pays_at_rest(size: float, largest: float, tier_factor: int, saved: float = 0.0) -> bool:
    """Whether to join all parts writes the largest of them at most ``tier_factor`` - 1 times for what is new.

    ``size``: of all. ``largest``: of that which is taken to be older than the others. ``saved``: what is left out.
    """
    return 0 < largest <= (tier_factor - 1) * (size - largest + saved)


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

    A query scans the rows that an index does not cover; to cover them costs a commit of each index, and for an index
    that is written anew all of it. So one is worth a run at once when it lacks a quarter of the rows that it covers:
    then at most five bytes are written anew for each byte that it grows by. And at 100,000 rows in any case, so that no
    query scans more. An index that is written by tiers costs little more than the rows that it lacks: it is due, which
    the schedule waits for, at a sixteenth, and at 10,000 rows. A small index is due at a quarter as well, however few
    rows that is.

    ``anew``: the index is written anew each time, not by tiers.
    """
    if uncovered_rows and uncovered_rows >= covered_rows // _GROWTH:
        return True
    most, growth = (_MOST, _GROWTH) if anew else (_TIERS_MOST, _TIERS_GROWTH)
    return uncovered_rows >= min(most, max(_FEWEST, covered_rows // growth))


def is_costly(uncovered_bytes: int, written_bytes: int) -> bool:
    """Whether what queries may read of fragments that an index lacks is worth a run by the schedule, for its writes."""
    return uncovered_bytes >= max(_SCANNED_BYTES, _SAVING * written_bytes)


# Rows of a segment that cost less to write again than a look into one more segment.
SEGMENT_FLOOR = 1024


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """A segment as the policy weighs it: live rows that it covers, and bytes of its files (0: not recorded)."""

    rows: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class SegmentDebt:
    """What the next run would write of one index, about: for rows that it lacks, and segments above the limit."""

    uncovered_rows: int
    excess: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SegmentPolicy:
    """When segments of an index are merged.

    An index that is written anew for each append costs its whole size each time; one that gets a segment for each
    append makes each query look into all of them. So new rows become a segment of their own, and the newest segments
    are merged with them only once the result is ``tier_factor`` times as large as the largest of them, as fragments are
    joined (:class:`Policy`). A segment is weighed by its rows, so that all indexes of a table
    are cut at the same fragments: a compaction does not join fragments that different segments cover.

    With T the factor, M the most segments, and n the rows of the index over those of the smallest append:

    * **Writes.** A row of an index is written again at most ``ceil(log_T(n))`` times, as long as there are fewer than M
      segments; of appends of one size in any case at most ``ceil(log_T(n)) + 2 * c`` times, with c the smallest number
      for which ``binomial(M + c, M)`` is n or more. Below :data:`SEGMENT_FLOOR`, where a segment costs requests and not
      its bytes, all is merged: at most that many rows more in each run.
    * **Segments.** Of appends of one size, at most ``(T - 1) * (log_T(n) + 1)`` and one, and never more than M. Where
      one more would be too many, those are merged of which the largest grows most by it.

    Attributes:
        max_segments: an index never has more; 1: it is written anew each time.
        tier_factor: how many times as large as the largest of them the result of merging segments must be.
        floor: rows of a segment up to which all are merged.
    """

    max_segments: int
    tier_factor: int = 4
    floor: int = SEGMENT_FLOOR

    @property
    def writes_anew(self) -> bool:
        """Whether each update writes the whole index."""
        return self.max_segments == 1 or self.tier_factor == 1

    def merged(self, segments: Sequence[SegmentSize], new: int) -> int:
        """How many of the newest segments become one, together with the new rows; 0: these get one of their own.

        ``segments``: the oldest first. ``new``: rows that none covers; 0: nothing is merged but for the limit.
        """
        too_many = self._too_many(segments, new)
        if not new and not too_many:
            return 0
        rows = [segment.rows for segment in reversed(segments)]
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
        rows = sum(segment.rows for segment in segments)
        width = sum(segment.bytes for segment in segments) / rows if rows else 0.0
        return SegmentDebt(
            uncovered_rows=new,
            excess=max(0, len(segments) - self.max_segments),
            bytes=sum(segment.bytes for segment in again) + round(new * width),
        )

    def _too_many(self, segments: Sequence[SegmentSize], new: int) -> int:
        """How many segments must at least be merged, so that there are no more than the limit."""
        if not new and len(segments) <= self.max_segments:
            return 0
        return max(0, len(segments) + 1 - self.max_segments)
