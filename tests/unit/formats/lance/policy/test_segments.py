"""The policy of index segments: its bounds on writes and on segments, on random histories."""

from __future__ import annotations

import math
from itertools import count

import pytest
from hypothesis import given, strategies as st

from memwal_ops.formats.lance.policy import SEGMENT_FLOOR as FLOOR, SegmentDebt, SegmentPolicy, SegmentSize

UNIT = FLOOR + 1
"""The smallest append: at the floor, each is merged."""
UNLIMITED = 10_000


class Life:
    """Appends, each followed by a catch-up, with the number of times that a row was written again at most."""

    def __init__(self, policy: SegmentPolicy) -> None:
        self.policy = policy
        self.segments: list[SegmentSize] = []
        self.rewrites: list[int] = []
        self.written = 0
        self.most = 0

    def append(self, *sizes: int) -> Life:
        for new in sizes:
            again = self.policy.merged(self.segments, new)
            kept = len(self.segments) - again
            assert 0 <= kept <= len(self.segments)
            rows = new + sum(one.rows for one in self.segments[kept:])
            rewrites = max((1 + times for times in self.rewrites[kept:]), default=0)
            self.segments[kept:], self.rewrites[kept:] = [SegmentSize(rows)], [rewrites]
            self.written += rows
            self.most = max(self.most, len(self.segments))
        return self


def logarithm(ratio: float, factor: int) -> int:
    """``ceil(log(ratio))``, exactly."""
    return next(times for times in count() if factor**times >= ratio)


def forced(ratio: float, most: int) -> int:
    """How often a row must be written again where no more than ``most`` segments may be."""
    return next(times for times in count() if math.comb(most + times, most) >= ratio)


sizes_of_appends = st.lists(st.sampled_from([1, 1, 1, 2, 3, 5, 20, 100, 1000]), min_size=1, max_size=300)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [2, 3, 4, 8])
@given(appends=sizes_of_appends)
def test_bound_of_writes_of_appends_of_any_size(factor: int, appends: list[int]) -> None:
    life = Life(SegmentPolicy(UNLIMITED, factor)).append(*(units * UNIT for units in appends))
    assert max(life.rewrites) <= logarithm(sum(appends) / min(appends), factor)
    assert life.written <= sum(appends) * UNIT * (1 + logarithm(sum(appends) / min(appends), factor))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [2, 3, 4, 8])
@given(appends=st.integers(1, 400))
def test_bounds_of_appends_of_one_size(factor: int, appends: int) -> None:
    life = Life(SegmentPolicy(UNLIMITED, factor)).append(*[UNIT] * appends)
    assert max(life.rewrites) <= logarithm(appends, factor)
    assert life.most <= (factor - 1) * (math.log(appends, factor) + 1) + 1


@pytest.mark.parametrize("factor", [2, 4, 8])
@given(most=st.integers(1, 10), appends=sizes_of_appends)
def test_there_are_never_more_segments_than_the_limit(factor: int, most: int, appends: list[int]) -> None:
    life = Life(SegmentPolicy(most, factor)).append(*(units * UNIT for units in appends))
    assert life.most <= most


@pytest.mark.parametrize("factor", [2, 3, 4, 8])
@pytest.mark.parametrize("most", [1, 2, 4, 8, 16])
def test_bound_of_writes_at_the_limit(factor: int, most: int) -> None:
    life = Life(SegmentPolicy(most, factor))
    for appends in range(1, 1500):
        life.append(UNIT)
        assert max(life.rewrites) <= logarithm(appends, factor) + 2 * forced(appends, most)


def test_small_appends_to_a_large_index_wait_for_their_like() -> None:
    life = Life(SegmentPolicy(8)).append(200 * UNIT)
    life.written = 0
    life.append(*[UNIT] * 8)
    assert [one.rows // UNIT for one in life.segments] == [200, 4, 4]
    assert life.written == 14 * UNIT


def test_one_as_the_factor_writes_an_index_anew() -> None:
    assert SegmentPolicy(8, 1).merged([SegmentSize(200 * UNIT), SegmentSize(UNIT)], UNIT) == 2


def test_few_rows_are_always_merged() -> None:
    assert SegmentPolicy(8).merged([SegmentSize(FLOOR - 10)], 10) == 1
    assert SegmentPolicy(8).merged([SegmentSize(FLOOR)], 10) == 0
    assert SegmentPolicy(8).merged([SegmentSize(1 << 20), SegmentSize(FLOOR - 10)], 10) == 1


def test_what_covers_no_rows_any_more_is_merged() -> None:
    assert SegmentPolicy(8).merged([SegmentSize(0), SegmentSize(0)], UNIT) == 2


def test_nothing_is_merged_without_new_rows_but_for_the_limit() -> None:
    segments = [SegmentSize(8 * UNIT), *[SegmentSize(UNIT)] * 4]
    assert SegmentPolicy(5).merged(segments, 0) == 0
    assert SegmentPolicy(1).merged(segments, 0) == 5
    assert SegmentPolicy(4).merged(segments, 0) == 4, "they grow most"


def test_the_debt_is_what_a_run_writes() -> None:
    segments = [SegmentSize(200 * UNIT, 20 * UNIT), *[SegmentSize(UNIT, 100)] * 3]
    debt = SegmentPolicy(8).debt(segments, UNIT)
    assert (debt.uncovered_rows, debt.excess) == (UNIT, 0)
    assert debt.bytes == 300 + round(UNIT * (20 * UNIT + 300) / (203 * UNIT))
    assert SegmentPolicy(2).debt(segments, 0) == SegmentDebt(0, 2, 300)
    assert SegmentPolicy(8).debt(segments, 0) == SegmentDebt(0, 0, 0)
    assert SegmentPolicy(8).debt([SegmentSize(UNIT)], UNIT) == SegmentDebt(UNIT, 0, 0), "no release recorded the size"
