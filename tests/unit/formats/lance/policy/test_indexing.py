"""Which indexes are worth a catch-up, at once and by the schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memwal_ops.formats.lance.policy import is_costly, is_due, is_urgent


@pytest.mark.parametrize(
    ("covered", "uncovered", "due"),
    [
        (0, 999, False),
        (0, 1000, True),
        (1_000, 999, False),
        (20_000, 4_999, False),
        (20_000, 5_000, True),
        (100_000_000, 99_999, False),
        (100_000_000, 100_000, True),
    ],
)
def test_an_index_is_due_by_what_it_lacks_against_what_it_has(covered: int, uncovered: int, *, due: bool) -> None:
    assert is_urgent(covered, uncovered) == due


@pytest.mark.parametrize(
    ("covered", "uncovered", "due"),
    [
        (0, 0, False),
        (0, 1, True),
        (300, 74, False),
        (300, 75, True),
        (64_000, 3_999, False),
        (64_000, 4_000, True),
        (100_000_000, 9_999, False),
        (100_000_000, 10_000, True),
    ],
)
def test_the_schedule_runs_for_less_where_less_is_written(covered: int, uncovered: int, *, due: bool) -> None:
    assert is_due(covered, uncovered, anew=False) == due
    assert is_due(covered, uncovered, anew=True) == (is_urgent(covered, uncovered) or (due and covered < 1000))


def test_few_wide_rows_are_due_by_their_bytes() -> None:
    assert is_costly(16 << 20, 1 << 20)
    assert not is_costly((16 << 20) - 1, 0)
    assert not is_costly(16 << 20, 5 << 20)


@given(appends=st.lists(st.integers(1, 30_000), min_size=1, max_size=60))
def test_an_index_that_is_written_anew_is_written_five_times_at_most(appends: list[int]) -> None:
    """Up to 400,000 rows; above that, no query scans more than 100,000."""
    covered = lacks = written = 0
    for rows in appends:
        lacks += rows
        if covered + lacks <= 400_000 and is_urgent(covered, lacks):
            covered, lacks = covered + lacks, 0
            written += covered
    assert written <= 5 * covered
