"""Which indexes are worth a catch-up, and what that writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal_ops.formats.lance.policy.indexing import IndexSize


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
    assert IndexSize(covered * 10, covered, uncovered, anew=True).is_due == due


@given(covered=st.integers(1, 10**9), uncovered=st.integers(0, 10**9), width=st.integers(0, 1000))
def test_what_is_written_is_as_wide_as_what_there_is(covered: int, uncovered: int, width: int) -> None:
    anew = IndexSize(covered * width, covered, uncovered, anew=True)
    part = IndexSize(covered * width, covered, uncovered, anew=False)
    assert part.bytes_written == uncovered * width
    assert anew.bytes_written == ((covered + uncovered) * width if uncovered else 0)
    assert anew.bytes_read == anew.bytes_written


@given(rows=st.integers(1000, 399_999))
def test_a_growing_index_is_written_five_times_what_it_grows_by_at_most(rows: int) -> None:
    """Of small ones; at 400,000 rows, 100,000 that it lacks are due in any case, so that no query scans more."""
    uncovered = next(lacks for lacks in (rows // 4, 1000, 100_000) if IndexSize(rows, rows, lacks, anew=True).is_due)
    assert IndexSize(rows, rows, uncovered, anew=True).bytes_written <= 5 * max(uncovered, rows // 4) + 5
