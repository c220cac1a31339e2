"""Fence posts: whatever writers did and wherever they stalled, none of them finds its position free."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from math import log2

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memwal_ops.formats.lance.jobs.gc.wal import Claim, EpochRun, FencePosts, epoch_runs, unsettled_epochs

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
START = datetime(2026, 1, 1, tzinfo=UTC)
RISING = st.lists(st.integers(1, 6), max_size=60).map(sorted)


def later(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def runs_of(epochs: list[int | None]) -> tuple[EpochRun, ...]:
    ids = array("Q", range(1, len(epochs) + 1))
    return epoch_runs(ids, lambda entry_id: epochs[entry_id - 1])


@UNHURRIED
@given(RISING)
def test_runs_are_those_of_a_whole_reading(epochs: list[int]) -> None:
    naive, at = [], 0
    for epoch, same in groupby(epochs):
        size = len(list(same))
        naive.append(EpochRun(epoch, at, at + size))
        at += size
    assert runs_of([*epochs]) == tuple(naive)


@UNHURRIED
@given(RISING, st.sets(st.integers(0, 59)))
def test_what_cannot_be_read_hides_no_first_entry(epochs: list[int], torn: set[int]) -> None:
    """Every entry that was read and begins an epoch begins a run; the runs are the log without a gap."""
    seen: list[int | None] = [None if at in torn else epoch for at, epoch in enumerate(epochs)]
    runs = runs_of(seen)
    assert [at for run in runs for at in range(run.start, run.end)] == list(range(len(epochs)))
    starts = {run.start for run in runs}
    for epoch in {one for one in seen if one is not None}:
        assert seen.index(epoch) in starts
    for run in runs:
        assert {seen[at] for at in range(run.start, run.end)} - {None} <= {run.epoch}
    posts = FencePosts(range(1, len(epochs) + 1), runs, lambda _: START, {})
    for number, run in enumerate(runs):
        assert run.epoch is not None or posts.post(number, run.start) is not None


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_a_long_log_is_read_by_bisection(epochs: int) -> None:
    asked: list[int] = []
    size = 100_000

    def epoch_of(entry_id: int) -> int:
        asked.append(entry_id)
        return 1 + (entry_id - 1) * epochs // size

    assert len(epoch_runs(array("Q", range(1, size + 1)), epoch_of)) == epochs
    assert len(asked) == len(set(asked)) <= 2 + 2 * epochs * (log2(size) + 1)


def kept(epochs: list[int | None], claims: dict[int, Claim] | None = None, hint: int = 0) -> dict[int, datetime | None]:
    """Per entry that must stay since when; written one a second, entry 1 at 0 s."""
    runs = runs_of(epochs)
    posts = FencePosts(range(1, len(epochs) + 1), runs, later, claims or {}, hint)
    found = {}
    for number, run in enumerate(runs):
        for at in range(run.start, run.end):
            post = posts.post(number, at)
            if post is not None:
                found[at + 1] = post.since
    return found


def test_an_empty_log() -> None:
    assert epoch_runs(array("Q"), lambda _: 1) == ()
    assert kept([]) == {}
    assert unsettled_epochs((), 0, lambda _: False, sentinels=False) == ()
    assert unsettled_epochs((), 2, lambda _: False, sentinels=False) == (1, 2)


def test_first_entries_stay_until_the_next_ones_are_old() -> None:
    # Of the newest two epochs, and the last entry, for ever.
    assert kept([1, 1, 2, 2, 4, 4, 4, 7, 7]) == {1: later(2), 3: later(4), 5: None, 8: None, 9: None}
    assert kept([3, 3]) == {1: None, 2: None}
    assert kept([1, 1, None, 2, 2, 3, 3]) == {1: later(2), 3: None, 4: None, 6: None, 7: None}


def test_what_an_older_epoch_wrote_behind_a_newer_one_stays() -> None:
    found = kept([1, 3, 3, 2, 2, 2, 4, 4, 5, 5])
    assert {number: since for number, since in found.items() if 4 <= number <= 6} == {
        4: later(6),
        5: later(4),
        6: later(5),
    }


def test_runs_of_older_epochs_at_the_end_of_the_log() -> None:
    """The first entry of the last run has no next one that could be old: it stays."""
    assert kept([1, 5, 5, 4, 2, 2, 3, 3, 3]) == {
        1: later(1),
        2: None,
        4: None,
        5: later(6),
        6: later(5),
        7: None,
        8: later(7),
        9: None,
    }


def test_of_several_reasons_the_one_that_lasts_longest_counts() -> None:
    found = kept([1, 1, 1, 2, 3, 4, 4], {5: Claim(2, later(80))})
    assert found == {1: later(3), 3: later(80), 4: later(80), 5: None, 6: None, 7: None}


def test_claims_of_several_writers() -> None:
    """Each keeps what is behind its start; one that wrote an entry keeps nothing from there on."""
    found = kept([1] * 12, {3: Claim(8, later(90)), 4: Claim(3, later(50))})
    assert found == {
        1: None,
        **dict.fromkeys(range(4, 9), later(50)),
        **dict.fromkeys(range(9, 12), later(90)),
        12: None,
    }
    claims = {2: Claim(1, later(50)), 3: Claim(2, later(60))}
    found = kept([1, 1, 1, 2, 3, 4, 4, 5, 5], claims)
    assert found == {1: later(3), 2: later(50), 3: later(60), 4: later(60), 5: later(5), 6: None, 8: None, 9: None}


def test_reasons() -> None:
    runs = runs_of([1, 4, 4, 2, 2, 3, 5, 6])
    claims = {3: Claim(1, later(50)), 7: Claim(6, later(60))}
    posts = FencePosts(range(1, 9), runs, later, claims, hint=2)
    reads = "fence post: writer epoch 3 may still have to read this, it wrote one entry; claimed"
    assert [[post.what for post in posts._posts(run, at)] for run, at in ((0, 0), (2, 4), (4, 6), (5, 7))] == [
        ["fence post: the first entry of writer epoch 1; the next epoch's was written"],
        [
            "fence post: a writer searches for the end of the log after entry 2",
            "fence post: writer epoch 2 wrote this after a newer epoch's entry",
            reads,
        ],
        [
            "fence post: a writer searches for the end of the log after entry 2",
            "fence post: the first entry of writer epoch 5, one of the newest two",
            "fence post: writer epoch 7 may write here, no entry of it was found; claimed",
        ],
        [
            "fence post: the last entry, after which the next writer continues",
            "fence post: a writer searches for the end of the log after entry 2",
            "fence post: the first entry of writer epoch 6, one of the newest two",
            "fence post: writer epoch 7 may write here, no entry of it was found; claimed",
        ],
    ]


def test_nothing_after_the_hint_is_deleted() -> None:
    assert kept([1] * 6, hint=3) == {1: None, 4: None, 5: None, 6: None}
    assert kept([1] * 6, hint=6) == {1: None, 6: None}


def test_entries_after_a_silent_claim_are_kept() -> None:
    claims = {2: Claim(2, later(100)), 3: Claim(3, later(90))}
    assert kept([1] * 6, claims) == {1: None, 3: later(100), 4: later(100), 5: later(100), 6: None}


def test_one_entry_does_not_settle_a_writer_with_sentinels() -> None:
    runs = runs_of([1, 1, 2, 4, 4, 4])
    assert unsettled_epochs(runs, 5, lambda _: False, sentinels=False) == (3, 5)
    assert unsettled_epochs(runs, 5, lambda _: False, sentinels=True) == (2, 3, 5)
    assert unsettled_epochs(runs, 5, lambda at: at < 3, sentinels=True) == (3, 5), "2 wrote longer ago than any stalls"
    # Its claim knew entry 1; it may still walk from there to the place of its sentinel.
    assert kept([1, 1, 1, 2, 4, 4], {2: Claim(1, later(50))}) == {
        1: later(3),
        2: later(50),
        3: later(50),
        4: None,
        5: None,
        6: None,
    }


@dataclass
class Writer:
    """One writer; ``position`` is where it writes next, None before it looked behind ``start``."""

    epoch: int
    start: int
    position: int | None = None
    alive: bool = True


STEPS = st.lists(
    st.tuples(st.sampled_from(["claim", "look", "write", "write"]), st.integers(0, 5), st.integers(0, 3)), max_size=40
)


@pytest.mark.req("S0-209")
@UNHURRIED
@given(STEPS)
def test_no_stalled_writer_finds_its_position_free(steps: list[tuple[str, int, int]]) -> None:
    """Writers claim, look and write in any order, unaware of each other; then all that may go is collected."""
    writers: list[Writer] = []
    log: dict[int, tuple[int, datetime]] = {}
    claims: dict[int, Claim] = {}

    def end_behind(start: int, standing: set[int]) -> int:
        while start + 1 in standing:
            start += 1
        return start + 1

    for at, (what, who, behind) in enumerate(steps):
        if what == "claim" or not writers:
            epoch = len(writers) + 1
            start = max(len(log) - behind, max((one.start for one in claims.values()), default=0))
            claims[epoch] = Claim(start, later(at))
            writers.append(Writer(epoch, start))
            continue
        writer = writers[who % len(writers)]
        if not writer.alive:
            continue
        if writer.position is None:
            writer.position = end_behind(writer.start, set(log))
        elif what == "write" and writer.position not in log:
            log[writer.position] = (writer.epoch, later(at))
            writer.position += 1
        elif what == "write":
            # Taken: by a newer epoch, and it is fenced; by an older one, and it goes on behind that.
            writer.alive = log[writer.position][0] < writer.epoch
            writer.position += 1
    ids = array("Q", sorted(log))
    runs = epoch_runs(ids, lambda entry_id: log[entry_id][0])
    unsettled = unsettled_epochs(runs, len(writers), lambda _: False, sentinels=False)
    posts = FencePosts(ids, runs, lambda at: log[ids[at]][1], {epoch: claims[epoch] for epoch in unsettled})
    left = {
        ids[at]
        for number, run in enumerate(runs)
        for at in range(run.start, run.end)
        if posts.post(number, at) is not None
    }
    for writer in writers:
        if writer.alive:
            position = writer.position or end_behind(writer.start, left)
            assert position not in log or position in left, (writer, log, runs)
