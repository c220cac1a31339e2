"""Which WAL entries keep a writer that was fenced from being believed.

A writer learns that it was fenced when its put-if-not-exists finds its position taken. Timeline of
the loss where positions are freed: writer A stalls with position 4 next; writer B claims the region,
writes entry 4, flushes; entry 4 is collected; A wakes and writes entry 4. The put succeeds, A
acknowledges the row, and nobody ever replays position 4 again.

The position at which a stalled writer goes on is one of two:

* it wrote before: the position after its last entry. The entry there, if any, was written by a later
  epoch, and it is that epoch's first;
* it claimed the region and wrote nothing: anything from the end of the log at its claim. An older
  writer, which did not know of the claim, may have written there.

So the first entry of every epoch stays, and, where an epoch has no entry at all, whatever older
epochs wrote since it was claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping
    from datetime import datetime

_ALWAYS = 2


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
    """What is known of a claim: the end of the log that it knew at least, and when it was made."""

    last_known_entry: int
    made: datetime


def epoch_runs(ids: array[int], epoch_of: Callable[[int], int | None]) -> tuple[EpochRun, ...]:
    """The epochs of a log, by bisection: epochs only rise along it (S0-044), so few entries are read.

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


def always_posts(runs: tuple[EpochRun, ...]) -> frozenset[int]:
    """Places of the posts that no age frees: the first entries of the newest two epochs, and what cannot be read."""
    newest = sorted({run.epoch for run in runs if run.epoch is not None})[-_ALWAYS:]
    return frozenset(run.start for run in runs if run.epoch is None or run.epoch in newest)


def silent_epochs(runs: tuple[EpochRun, ...], newest_epoch: int) -> tuple[int, ...]:
    """Epochs that were claimed after the oldest entry's and have no entry, ascending."""
    present = {run.epoch for run in runs if run.epoch is not None}
    oldest = min(present, default=newest_epoch)
    return tuple(epoch for epoch in range(oldest + 1, newest_epoch + 1) if epoch not in present)


def guards_silent_epoch(
    run: EpochRun, entry_id: int, written: datetime, silent: Mapping[int, Claim | None]
) -> int | None:
    """The claimed and silent epoch whose position an entry may hold; None where there is none.

    Args:
        run: the run that the entry is part of.
        written: when, by the store's clock, as the claims.
        silent: per silent epoch its claim; None where the manifest that made it is gone.
    """
    for epoch, claim in silent.items():
        if run.epoch is not None and epoch < run.epoch:
            continue
        if claim is None or (entry_id > claim.last_known_entry and written >= claim.made):
            return epoch
    return None
