"""Which WAL entries keep a writer that was fenced from being believed.

A writer learns that it was fenced when its put-if-not-exists finds its position taken. Timeline of
the loss where positions are freed: writer A stalls with position 4 next; writer B claims the region,
writes entry 4, flushes; entry 4 is collected; A wakes and writes entry 4. The put succeeds, A
acknowledges the row, and nobody ever replays position 4 again.

So an entry stays as long as somebody may have its position as the next one. How a writer comes to a
position, and what stays for it:

* it wrote the entry before: the entry there is another epoch's, and the first of a *run* of that
  epoch's entries. The first entry of each run stays.
* it found entries of older epochs in its way, and took the position after them. They came from
  writers that claimed before it and looked for the end of the log only after it had written: runs
  of an older epoch behind a newer one's. They stay as a whole.
* it claimed the region, and wrote nothing yet. It may look for the end of the log at any time, from
  the ``replay_after`` of its own claim on, and stop wherever an entry is missing. All entries from
  there on stay; those that somebody found when it claimed, and those that came since.
* it is pylance's, which writes an empty entry when it claims, before it looks: until it wrote a
  second one, all entries between its claim's ``replay_after`` and its first stay.

The runs are found by bisection, which does not see runs of an older epoch between two of the same
newer one. The epochs that are not seen count as those that wrote nothing.

How long: ``fence_retention``. A run's first entry stays until the *next* run is that old: while it
stands, the next one is told to be the beginning of a run. A writer that looked late is counted from
its claim on.

For the writers that come after: the last entry of the log never goes, for pylance takes the highest
name for the end of the log and puts its empty entry behind it; were it put too low, it would fence
nobody. Nor does anything behind ``wal_id_last_seen``, from where others look for the end.
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

_ALWAYS = 2
# One claim every 26 seconds for thirty days; a damaged manifest may say any number.
_MOST_EPOCHS = 100_000
_NO_END = 1 << 64


@dataclass(frozen=True, slots=True)
class EpochRun:
    """Consecutive entries of one epoch: their places in the log, ``start`` to before ``end``.

    ``epoch`` is None for an entry that cannot be read: it may be anybody's first.
    """

    epoch: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What is known of a claim: its writer looks at entries behind ``start``; when it was made, at the latest."""

    start: int
    made: datetime


@dataclass(frozen=True, slots=True)
class Post:
    """Why an entry must stay; from ``since`` on for as long as a writer may stall, or for ever where it is None."""

    what: str
    since: datetime | None


def epoch_runs(ids: array[int], epoch_of: Callable[[int], int | None]) -> tuple[EpochRun, ...]:
    """The runs of a log, by bisection: epochs rise along it (S0-044) but for late writers, so few entries are read.

    Args:
        ids: the entries that stand, ascending.
        epoch_of: reads one entry; None where it cannot be read.
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
    """Epochs whose writers may still have to look for the end of the log, ascending.

    Args:
        runs: who wrote the log.
        newest_epoch: of the region's newest manifest.
        long_ago: whether the entry at a place is older than anybody stalls: older epochs are older still.
        sentinels: whether writers put an empty entry before they look.
    """
    dead = max((run.epoch for run in runs if run.epoch is not None and long_ago(run.start)), default=0)
    settled = {run.epoch for run in runs if not sentinels or run.end - run.start > 1}
    first = max(dead, newest_epoch - _MOST_EPOCHS) + 1
    return tuple(epoch for epoch in range(first, newest_epoch + 1) if epoch not in settled)


@dataclass(frozen=True)
class FencePosts:
    """The posts of one log.

    Attributes:
        ids: the entries that stand, ascending.
        runs: who wrote them.
        written: when the entry at a place was written, by the store's clock, as the claims.
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
        """Work out what every entry asks for."""
        epochs = {run.epoch for run in self.runs if run.epoch is not None}
        first = {run.epoch: self.ids[run.start] for run in reversed(self.runs)}
        highest = accumulate((run.epoch or 0 for run in self.runs), max)
        late = (run.start for run, high in zip(self.runs, highest, strict=True) if (run.epoch or high) < high)
        silent = ((epoch, claim, _NO_END) for epoch, claim in self.claims.items() if epoch not in first)
        looking = ((epoch, claim, first[epoch]) for epoch, claim in self.claims.items() if epoch in first)
        object.__setattr__(self, "_always", frozenset({*sorted(epochs)[-_ALWAYS:], None}))
        object.__setattr__(self, "_late", frozenset(late))
        object.__setattr__(self, "_silent", _Spans(silent))
        object.__setattr__(self, "_looking", _Spans(looking))

    def post(self, run_at: int, at: int) -> Post | None:
        """Why the entry at a place, in the run of that number, must stay; None: nobody has its position.

        Where there are several reasons, the one that lasts longest.
        """
        found = list(self._posts(run_at, at))
        return max(found, key=lambda post: inf if post.since is None else post.since.timestamp(), default=None)

    def _posts(self, run_at: int, at: int) -> Iterable[Post]:
        run, entry_id = self.runs[run_at], self.ids[at]
        if at == len(self.ids) - 1:
            yield Post("fence post: the last entry, behind which the next writer goes on", None)
        if 0 < self.hint < entry_id:
            yield Post(f"fence post: a writer looks for the end of the log behind entry {self.hint}", None)
        if at == run.start and run.epoch in self._always:
            who = "of an unknown epoch" if run.epoch is None else f"of writer epoch {run.epoch}, one of the newest two"
            yield Post(f"fence post: the first entry {who}", None)
        elif at == run.start:
            what = f"fence post: the first entry of writer epoch {run.epoch}; the next epoch's was written"
            yield Post(what, self.written(self.runs[run_at + 1].start) if run_at + 1 < len(self.runs) else None)
        elif run.start in self._late:
            yield Post(f"fence post: writer epoch {run.epoch} wrote this one behind a newer one's", self.written(at))
        silent = self._silent.over(entry_id)
        if silent is not None:
            what = f"fence post: writer epoch {silent[1]} may go on here, it wrote nothing that is seen; claimed"
            yield Post(what, silent[0])
        looking = self._looking.over(entry_id)
        if looking is not None:
            what = f"fence post: writer epoch {looking[1]} may still have to read this, it wrote one entry; claimed"
            yield Post(what, looking[0])


class _Spans:
    """Where writers may have their next position: behind the start of their claims, in front of an end."""

    def __init__(self, claims: Iterable[tuple[int, Claim, int]]) -> None:
        ordered = sorted(claims, key=lambda one: (one[1].start, one[0]))
        self._starts = [claim.start for _, claim, _ in ordered]
        # A later claim begins no earlier and ends no earlier: the last one that begins in front lasts longest.
        self._ends = list(accumulate((end for _, _, end in ordered), max))
        self._youngest = list(accumulate(((claim.made, epoch) for epoch, claim, _ in ordered), max))

    def over(self, entry_id: int) -> tuple[datetime, int] | None:
        """When the epoch was claimed whose position an entry may hold, and which one that is."""
        at = bisect_left(self._starts, entry_id) - 1
        return self._youngest[at] if at >= 0 and entry_id < self._ends[at] else None
