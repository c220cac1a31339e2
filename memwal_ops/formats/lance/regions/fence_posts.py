"""Determine the fence posts: WAL entries that must be kept so that a fenced writer finds its position taken.

A writer detects that it was fenced when its put-if-absent finds its position taken; docs/protocol.md has the
timeline of the loss if positions are freed.

So an entry is kept as long as a writer may have its position as the next one. How a writer gets a
position, and which entries are kept for it:

* it wrote the previous entry: the entry at its position is of another epoch, and the first of a *run* of that
  epoch's entries. The first entry of each run is kept.
* it found entries of older epochs at its position, and continued at the position after them. They were written by
  writers that claimed before it, and searched for the end of the log only after it had written: runs
  of an older epoch behind one of a newer epoch. They are kept as a whole.
* it claimed the region, and wrote nothing yet. It may search for the end of the log at any time, from
  the ``replay_after`` of its own claim on, and stop at any missing entry. All entries from
  there on are kept: those that existed when it claimed, and those written since.
* it is pylance's, which writes an empty entry when it claims, before it searches: until it wrote a
  second one, all entries between its claim's ``replay_after`` and its first are kept.

The runs are found by bisection, which misses runs of an older epoch between two of the same
newer one. Epochs that are missed are treated as if they wrote nothing.

How long: ``fence_retention``. A run's first entry is kept until the *next* run is that old: as long as it exists, the
next one is recognized as the start of a run. For a writer that searched late, the time counts from its claim.

For future writers: the last entry of the log is always kept, because pylance uses the highest
name as the end of the log and puts its empty entry after it; at too low a position, that entry would not fence
any writer. All entries after ``wal_id_last_seen`` are kept as well: other writers search for the end from there.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

_NEWEST_EPOCHS_KEPT = 2
# One claim every 26 seconds for thirty days; a damaged manifest may have any number.
_MAX_EPOCHS = 100_000
_NO_END = 1 << 64


@dataclass(frozen=True, slots=True)
class EpochRun:
    """Consecutive entries of one epoch, as indexes in the log: ``start`` to before ``end``.

    ``epoch`` is None for an entry that cannot be read: it may be the first of any epoch.
    """

    epoch: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a region. Its writer searches entries after ``start``; it was made at ``made`` or before."""

    start: int
    made: datetime


@dataclass(frozen=True, slots=True)
class Post:
    """Why an entry must be kept. For ``fence_retention`` from ``since`` on; None: always."""

    what: str
    since: datetime | None


def epoch_runs(ids: array[int], epoch_of: Callable[[int], int | None]) -> tuple[EpochRun, ...]:
    """The runs of a log, by bisection: epochs rise along it (S0-044) except for late writers, so few entries are read.

    Args:
        ids: the existing entries, ascending.
        epoch_of: reads the epoch of one entry; None if it cannot be read.
    """
    if not ids:
        return ()
    known: dict[int, int | None] = {}

    def epoch(at: int) -> int | None:
        if at not in known:
            known[at] = epoch_of(ids[at])
        return known[at]

    starts = [0]
    spans = [(0, len(ids) - 1)]
    while spans:
        low, high = spans.pop()
        if low == high or (epoch(low) is not None and epoch(low) == epoch(high)):
            continue
        if high - low == 1:
            starts.append(high)
            continue
        middle = (low + high) // 2
        spans += [(low, middle), (middle, high)]
    starts.sort()
    return tuple(EpochRun(epoch(start), start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True))


def unsettled_epochs(
    runs: Sequence[EpochRun], newest_epoch: int, long_ago: Callable[[int], bool], *, sentinels: bool
) -> tuple[int, ...]:
    """Epochs whose writers may still have to search for the end of the log, ascending.

    Args:
        runs: the runs of the log.
        newest_epoch: of the region's newest manifest.
        long_ago: whether the entry at an index is older than the longest stall of a writer; older epochs are older.
        sentinels: whether writers put an empty entry before they search.
    """
    dead = max((run.epoch for run in runs if run.epoch is not None and long_ago(run.start)), default=0)
    settled = {run.epoch for run in runs if not sentinels or run.end - run.start > 1}
    first = max(dead, newest_epoch - _MAX_EPOCHS) + 1
    return tuple(epoch for epoch in range(first, newest_epoch + 1) if epoch not in settled)


@dataclass(frozen=True)
class FencePosts:
    """The fence posts of one log.

    Attributes:
        ids: the existing entries, ascending.
        runs: the runs of these entries.
        written: when the entry at an index was written, by the store's clock, like the claims.
        claims: of the unsettled epochs, ascending.
        hint: ``wal_id_last_seen`` of the newest manifest; 0: none.
    """

    ids: Sequence[int]
    runs: Sequence[EpochRun]
    written: Callable[[int], datetime]
    claims: Mapping[int, Claim]
    hint: int = 0
    _always: frozenset[int | None] = field(init=False)
    _late: frozenset[int] = field(init=False)
    _silent: _Spans = field(init=False)
    _looking: _Spans = field(init=False)

    def __post_init__(self) -> None:
        """Compute the spans in which entries must be kept."""
        epochs = {run.epoch for run in self.runs if run.epoch is not None}
        first = {run.epoch: self.ids[run.start] for run in reversed(self.runs)}
        highest = accumulate((run.epoch or 0 for run in self.runs), max)
        late = (run.start for run, high in zip(self.runs, highest, strict=True) if (run.epoch or high) < high)
        silent = ((epoch, claim, _NO_END) for epoch, claim in self.claims.items() if epoch not in first)
        looking = ((epoch, claim, first[epoch]) for epoch, claim in self.claims.items() if epoch in first)
        object.__setattr__(self, "_always", frozenset({*sorted(epochs)[-_NEWEST_EPOCHS_KEPT:], None}))
        object.__setattr__(self, "_late", frozenset(late))
        object.__setattr__(self, "_silent", _Spans(silent))
        object.__setattr__(self, "_looking", _Spans(looking))

    def post(self, run_at: int, at: int) -> Post | None:
        """Why the entry at index ``at``, in the run with index ``run_at``, must be kept; None: it need not be.

        If there are several reasons, the one that lasts longest.
        """
        found = list(self._posts(run_at, at))
        return max(found, key=lambda post: inf if post.since is None else post.since.timestamp(), default=None)

    def _posts(self, run_at: int, at: int) -> Iterable[Post]:
        run, entry_id = self.runs[run_at], self.ids[at]
        if at == len(self.ids) - 1:
            yield Post("fence post: the last entry, after which the next writer continues", None)
        if 0 < self.hint < entry_id:
            yield Post(f"fence post: a writer searches for the end of the log after entry {self.hint}", None)
        if at == run.start and run.epoch in self._always:
            who = "of an unknown epoch" if run.epoch is None else f"of writer epoch {run.epoch}, one of the newest two"
            yield Post(f"fence post: the first entry {who}", None)
        elif at == run.start:
            what = f"fence post: the first entry of writer epoch {run.epoch}; the next epoch's was written"
            yield Post(what, self.written(self.runs[run_at + 1].start) if run_at + 1 < len(self.runs) else None)
        elif run.start in self._late:
            yield Post(f"fence post: writer epoch {run.epoch} wrote this after a newer epoch's entry", self.written(at))
        silent = self._silent.over(entry_id)
        if silent is not None:
            what = f"fence post: writer epoch {silent[1]} may write here, no entry of it was found; claimed"
            yield Post(what, silent[0])
        looking = self._looking.over(entry_id)
        if looking is not None:
            what = f"fence post: writer epoch {looking[1]} may still have to read this, it wrote one entry; claimed"
            yield Post(what, looking[0])


class _Spans:
    """The positions that writers may have next. After the start of their claims, before an end."""

    def __init__(self, claims: Iterable[tuple[int, Claim, int]]) -> None:
        ordered = sorted(claims, key=lambda one: (one[1].start, one[0]))
        self._starts = [claim.start for _, claim, _ in ordered]
        # A later claim neither starts nor ends earlier: of those that start before, the last one ends last.
        self._ends = list(accumulate((end for _, _, end in ordered), max))
        self._youngest = list(accumulate(((claim.made, epoch) for epoch, claim, _ in ordered), max))

    def over(self, entry_id: int) -> tuple[datetime, int] | None:
        """The youngest claim whose writer may have an entry's position next: its time and epoch; else None."""
        at = bisect_left(self._starts, entry_id) - 1
        return self._youngest[at] if at >= 0 and entry_id < self._ends[at] else None
