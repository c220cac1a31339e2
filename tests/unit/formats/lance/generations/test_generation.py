"""How many rows of a generation are in memory at once."""

from __future__ import annotations

import pytest

from memwal_ops.formats.lance.generations.generation import reading_bounds

MIB = 1 << 20
DECODED_AHEAD = 16  # batches, by Lance


@pytest.mark.parametrize("width", [0, 10, 1_000, 100_000, 1_000_000, 16 * MIB])
@pytest.mark.parametrize("budget", [1, MIB, 64 * MIB, 1 << 30, 1 << 40])
def test_rows_in_flight_follow_bytes(width: int, budget: int) -> None:
    rows, read_ahead = reading_bounds(width, budget)

    assert 1 <= rows <= 8192
    assert read_ahead >= 4 * rows * width  # else a scan would wait for a buffer that is never filled
    # A row is never split; below that, neither the budget nor the width of a row makes it more.
    decoded, most = DECODED_AHEAD * rows * width, min(budget, 256 * MIB)
    assert decoded <= max(most // 8, DECODED_AHEAD * width)
    assert read_ahead <= max(most // 8, 8 * MIB, 4 * width)


def test_narrow_rows_are_read_in_large_batches() -> None:
    assert reading_bounds(10, 1 << 30)[0] == 8192
    assert reading_bounds(1_000_000, 1 << 30)[0] == 2
