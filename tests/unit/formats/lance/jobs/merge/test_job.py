"""Which generations make a pass."""

from __future__ import annotations

from uuid import UUID

import pytest

from memwal_ops.formats.lance.generations.generation import GenerationRef
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.options import MergeOptions

MIB = 1 << 20


def refs(count: int, rows: int | None, size: int | None) -> list[GenerationRef]:
    return [GenerationRef(UUID(int=1), number, f"gen_{number}", rows, size) for number in range(1, count + 1)]


def passes(waiting: list[GenerationRef], max_bytes: int | None) -> list[int]:
    """Generations of each pass."""
    found = []
    while waiting:
        merged = merge._next_pass(waiting, MergeOptions(max_bytes=max_bytes))
        found.append(len(merged.generations))
        waiting = waiting[len(merged.generations) :]
    return found


@pytest.mark.parametrize(
    ("rows", "size", "max_bytes", "expected"),
    [
        (500_000, 10 * 500_000, None, [4, 4, 2]),  # rows of 10 bytes: what a pass keeps of each row counts
        (5_000_000, 50_000_000, None, [1] * 10),  # a generation is never split
        (100, 100 * MIB, None, [10]),  # rows of 1 MiB: their bytes count
        (100, 300 * MIB, None, [3, 3, 3, 1]),
        (500_000, 10 * 500_000, 4 << 30, [10]),  # more rows with more memory
        (1_000, 10_000, 25_000, [2, 2, 2, 2, 2]),  # a small budget bounds bytes alone
        (None, 200 * MIB, None, [5, 5]),
    ],
)
def test_bytes_and_rows_bound_a_pass(rows: int | None, size: int, max_bytes: int | None, expected: list[int]) -> None:
    assert passes(refs(10, rows, size), max_bytes) == expected
