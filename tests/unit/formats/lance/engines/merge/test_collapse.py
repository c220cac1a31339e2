"""The newest row of each key of a pass, from generations in memory, against a plain model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from memwal_ops.errors import DuplicateKeysError, GenerationCorruptError, InvariantViolatedError
from memwal_ops.formats.lance.engines.merge.collapse import (
    SHOWN_KEYS,
    BlockedRegionsError,
    collapse,
    read_keys,
    shared_keys_error,
)
from memwal_ops.formats.lance.generations.generation import GenerationRef

A, B, C = (UUID(int=number) for number in (1, 2, 3))
Key = tuple[int | None, str]


@dataclass
class Memory:
    """A generation: key of each row as stored, and whether it deletes its key; ``stride`` of the row addresses."""

    region: UUID
    number: int
    rows: list[tuple[Key, bool]]
    newest_row_first: bool = False
    stride: int = 1
    addresses: list[int] | None = None
    fault: Exception | None = None

    @property
    def ref(self) -> GenerationRef:
        return GenerationRef(self.region, self.number, f"gen_{self.number}", len(self.rows), 0)

    def read_keys(self) -> pa.Table:
        if self.fault is not None:
            raise self.fault
        columns: dict[str, Any] = {
            "x": pa.array([key[0] for key, _ in self.rows], pa.int64()),
            "y": pa.array([key[1] for key, _ in self.rows], pa.string()),
            # A null is not a tombstone.
            "_tombstone": pa.array([deleted or None for _, deleted in self.rows], pa.bool_()),
            "_rowaddr": pa.array(self.addresses or [self.stride * at for at in range(len(self.rows))], pa.uint64()),
        }
        return pa.table(columns)


def collapsed(*generations: Memory) -> Any:
    return collapse(generations, ["x", "name"])  # type: ignore[arg-type]


def generation(*keys: int, region: UUID = A, number: int = 1, **options: Any) -> Memory:
    """Upserts of single keys; a negative number deletes its key."""
    return Memory(region, number, [((abs(key), "k"), key < 0) for key in keys], **options)


def found(winners: Any) -> dict[Key, tuple[int, bool]]:
    keys = winners.keys.to_pydict()
    assert list(keys) == ["x", "name"]
    rows = zip(winners.rows.tolist(), winners.is_tombstone.tolist(), strict=True)
    return dict(zip(zip(keys["x"], keys["name"], strict=True), rows, strict=True))


KEYS = st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.sampled_from(["", "a"]))


@st.composite
def passes(draw: st.DrawFn) -> list[Memory]:
    """Generations grouped by region; a second region has keys of its own."""
    made = []
    for region in (A, B)[: draw(st.integers(1, 2))]:
        for number in range(1, draw(st.integers(1, 3)) + 1):
            rows = draw(st.lists(st.tuples(KEYS, st.booleans()), max_size=5))
            if region == B:
                rows = [((key[0], f"{key[1]} of B"), deleted) for key, deleted in rows]
            made.append(
                Memory(region, number, rows, newest_row_first=draw(st.booleans()), stride=draw(st.integers(1, 9)))
            )
    return made


@pytest.mark.req("S0-192")
@settings(deadline=None)
@given(passes())
def test_the_newest_row_of_each_key_wins(generations: list[Memory]) -> None:
    newest: dict[Key, tuple[int, bool]] = {}
    start = 0
    for one in generations:
        ascending = [*enumerate(one.rows, start)]
        for row, (key, deleted) in reversed(ascending) if one.newest_row_first else ascending:
            newest[key] = (row, deleted)
        start += len(one.rows)
    winners = collapsed(*generations)
    assert found(winners) == newest
    assert winners.rows_read == start
    live = {row for row, deleted in newest.values() if not deleted}
    assert winners.num_upserts == len(live)
    start = 0
    for one, mask in zip(generations, winners.upserts, strict=True):
        assert mask.tolist() == [start + at in live for at in range(len(one.rows))]
        start += len(one.rows)


@pytest.mark.req("S0-009")
@pytest.mark.parametrize("newest_row_first", [False, True])
def test_all_regions_that_share_a_key_are_blocked(newest_row_first: bool) -> None:
    """1 is in A and B, 2 in B and C, 4 to 8 in A and C: the rows between the first and the last of a key count, too."""
    generations = [
        generation(1, 3, region=A, newest_row_first=newest_row_first),
        generation(3, -4, 5, 6, 7, 8, region=A, number=2),
        generation(2, -1, region=B, newest_row_first=newest_row_first),
        generation(1, 2, 8, 7, 6, 5, 4, 4, region=C),
    ]
    with pytest.raises(BlockedRegionsError) as raised:
        collapsed(*generations)
    causes = raised.value.causes
    assert {region: number for region, (number, _) in causes.items()} == {A: None, B: None, C: None}
    counts = {A: 6, B: 2, C: 7}
    for region, (_, error) in causes.items():
        assert isinstance(error, DuplicateKeysError)
        assert str(error).startswith(f"{counts[region]} keys of region {region} are in another region as well")
        assert str(error).count("'name': 'k'") == min(counts[region], SHOWN_KEYS)
        assert set(error.args) == {str(error)}


def test_a_region_that_shares_nothing_is_not_blocked() -> None:
    generations = [generation(1, 2), generation(3, region=B), generation(1, region=C)]
    with pytest.raises(BlockedRegionsError) as raised:
        collapsed(*generations)
    assert raised.value.causes.keys() == {A, C}
    expected = "1 key of region {} is in another region as well, for example [{{'x': 1, 'name': 'k'}}]; "
    for region, (_, error) in raised.value.causes.items():
        assert str(error).startswith(expected.format(region))


@pytest.mark.req("S0-009")
@pytest.mark.parametrize("shared", [1, -1])
def test_two_regions_that_share_a_key(shared: int) -> None:
    with pytest.raises(BlockedRegionsError) as raised:
        collapsed(generation(1, 2), generation(shared, 3, region=B))
    assert raised.value.causes.keys() == {A, B}


def test_a_key_that_comes_back_in_its_own_region_is_not_shared() -> None:
    winners = collapsed(generation(1, 2), generation(-1, number=2), generation(3, region=B))
    assert found(winners) == {(2, "k"): (1, False), (1, "k"): (2, True), (3, "k"): (3, False)}


def test_thousands_are_counted_with_commas() -> None:
    assert str(shared_keys_error(A, 1234, [{"x": 1}])).startswith(f"1,234 keys of region {A} are in another region")


@pytest.mark.req("S0-192")
def test_all_generations_that_cannot_be_read_are_named_together() -> None:
    """Of a region the first one; a region whose generations can be read is not named."""
    faults = [GenerationCorruptError(f"fault {number}") for number in range(3)]
    generations = [
        generation(1),
        generation(2, number=2, fault=faults[0]),
        generation(3, number=3, fault=faults[1]),
        generation(4, region=B),
        generation(5, region=C, number=7, fault=faults[2]),
    ]
    with pytest.raises(BlockedRegionsError) as raised:
        collapsed(*generations)
    assert raised.value.causes == {A: (2, faults[0]), C: (7, faults[2])}


@pytest.mark.parametrize("addresses", [[3, 3, 4], [4, 3, 5], [3, 5, 4], [3, 4, 4]])
def test_rows_that_do_not_come_in_the_order_of_their_addresses(addresses: list[int]) -> None:
    one: Any = generation(1, 2, 3, addresses=addresses)
    with pytest.raises(InvariantViolatedError, match="order of its row addresses"):
        read_keys(one, ["x", "name"])


def test_two_keys_that_share_a_row_are_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(collapse.__module__, fromlist=["_ages"])
    monkeypatch.setattr(module, "_ages", lambda _, bounds: np.zeros(bounds[-1], np.int64))
    with pytest.raises(InvariantViolatedError, match="Two keys of a pass share one row"):
        collapsed(generation(1, 2))


def test_nothing_at_all() -> None:
    winners = collapsed(generation())
    assert (winners.rows_read, winners.num_upserts, found(winners)) == (0, 0, {})
