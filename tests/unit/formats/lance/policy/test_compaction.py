"""The policy of compactions: its bounds on writes and on fragments, on random histories."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from memwal_ops.formats.lance.policy import FLOOR, FragmentSize, Policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

UNIT = FLOOR + 1
"""The smallest append: at the floor, each is joined."""


class Life:
    """Appends, each followed by a compaction, with the number of times that a row was rewritten at most."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.fragments: list[FragmentSize] = []
        self.rewrites: dict[int, int] = {}
        self.written = 0
        self._ids = iter(range(1 << 30))

    def append(self, size: int) -> None:
        self._add(size, 0)

    def compact(self) -> None:
        """pylance puts new fragments behind all others, so that others may become neighbors: until nothing is due."""
        while groups := self.policy.groups(self.fragments):
            for group in groups:
                assert len(group) > 1
                size = sum(one.bytes for one in group)
                assert size < 2 * self.policy.target_bytes
                self.written += size
                position = self.fragments.index(group[0])
                assert tuple(self.fragments[position : position + len(group)]) == group, "neighbors"
                del self.fragments[position : position + len(group)]
                self._add(size, 1 + max(self.rewrites[one.id] for one in group))

    def small(self) -> int:
        """The longest sequence of fragments below the target."""
        longest = now = 0
        for one in self.fragments:
            now = now + 1 if one.bytes < self.policy.target_bytes else 0
            longest = max(longest, now)
        return longest

    def _add(self, size: int, rewrites: int) -> None:
        made = FragmentSize(next(self._ids), size // 10, 0, size)
        self.rewrites[made.id] = rewrites
        self.fragments.append(made)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [2, 3, 4, 8])
@given(
    appends=st.lists(st.integers(1, 40).map(lambda units: units * UNIT), min_size=1, max_size=120),
    target=st.integers(1, 400).map(lambda units: units * UNIT),
)
def test_bounds_of_appends_of_any_size(factor: int, appends: list[int], target: int) -> None:
    life = Life(Policy(1 << 40, target, factor, 0.1))
    for size in appends:
        life.append(size)
        life.compact()
    ratio = target / UNIT
    assert max(life.rewrites.values()) <= (math.ceil(math.log(ratio, factor)) if ratio > 1 else 0)
    assert life.written <= sum(appends) * max(life.rewrites.values())
    assert life.small() <= factor + ratio ** (math.log(2) / math.log(2 * factor / (factor - 1)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factor", [2, 3, 4, 8])
@given(appends=st.integers(1, 400), target=st.integers(2, 400))
def test_bounds_of_appends_of_one_size(factor: int, appends: int, target: int) -> None:
    life = Life(Policy(1 << 40, target * UNIT, factor, 0.1))
    for _ in range(appends):
        life.append(UNIT)
        life.compact()
    assert max(life.rewrites.values()) <= math.ceil(math.log(target, factor))
    assert life.small() <= (factor - 1) * (math.log(target, factor) + 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [2, 3, 4, 8])
@given(steps=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=60))
def test_what_a_table_at_rest_writes_is_paid_by_what_was_appended(factor: int, steps: list[tuple[int, bool]]) -> None:
    changing, resting = (Policy(1 << 40, 1 << 60, factor, 0.25, at_rest=rests) for rests in (False, True))
    life = Life(changing)
    for units, rests in steps:
        life.append(units * UNIT)
        life.policy = resting if rests else changing
        life.compact()
    life.policy = resting
    life.compact()
    sizes, appended = [one.rows for one in life.fragments], sum(units for units, _ in steps)
    assert life.written <= (factor + math.ceil(math.log(appended, factor))) * appended * UNIT
    assert len(sizes) == 1 or max(sizes) > (factor - 1) * (sum(sizes) - max(sizes))


def test_deleted_rows_pay_for_joining_their_fragment_with_its_neighbors() -> None:
    def due(deleted: int, *, at_rest: bool) -> list[int]:
        large = FragmentSize(0, 1_000 - deleted, deleted, 100 << 20)
        others = [FragmentSize(number, 100, 0, 10 << 20) for number in (1, 2)]
        policy = Policy(1 << 20, 1 << 30, 4, 0.25, at_rest=at_rest)
        return [len(group) for group in policy.groups([large, *others])]

    assert due(150, at_rest=False) == [], "850 are more than a third of 200 and three times 150"
    assert due(240, at_rest=False) == [3]
    assert due(0, at_rest=True) == [], "1,000 are more than three times 200"
    assert due(150, at_rest=True) == [3]


def test_a_small_append_to_a_large_table_waits_for_its_like() -> None:
    life = Life(Policy(1 << 40, 1 << 30, 4, 0.1))
    life.append(200 << 20)
    for _ in range(12):
        life.append(1 << 20)
        life.compact()
    assert life.written == 12 << 20
    assert [one.bytes >> 20 for one in life.fragments] == [200, 4, 4, 4]


def test_tiny_fragments_are_always_joined() -> None:
    assert [len(group) for group in Policy(1 << 20, 1 << 30, 4, 0.1).groups(sizes(40_000, 1_000))] == [2]
    assert not Policy(1 << 20, 1 << 30, 4, 0.1).groups(sizes(400_000, 1_000))


def test_one_as_the_factor_joins_all_below_the_target() -> None:
    policy = Policy(1 << 20, 10 * UNIT, 1, 0.1)
    assert [[one.id for one in group] for group in policy.groups(sizes(*[3 * UNIT] * 4, 20 * UNIT, UNIT, UNIT))] == [
        [0, 1, 2, 3],
        [5, 6],
    ]


def test_rows_count_as_bytes_do_where_a_size_is_not_known() -> None:
    fragments = [FragmentSize(number, 100, 0, 0) for number in range(8)]
    assert [len(group) for group in Policy(400, 1 << 30, 4, 0.1).groups(fragments)] == [4, 4]


def test_neighbors_in_an_index_are_joined_with_each_other() -> None:
    fragments = [FragmentSize(number, 10, 0, UNIT, number // 4) for number in range(9)]
    assert [[one.id for one in group] for group in Policy(1 << 20, 1 << 30, 4, 0.1).groups(fragments)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(("fraction", "wanted"), [(0.0, [[1, 2]]), (0.1, [[2]]), (0.5, [])])
def test_deleted_rows_are_removed_above_a_fraction(fraction: float, wanted: list[list[int]]) -> None:
    fragments = [FragmentSize(number, 100 - deleted, deleted, 1 << 30) for number, deleted in enumerate([0, 10, 30])]
    groups = Policy(1 << 20, 1 << 30, 4, fraction).groups(fragments)
    assert [[one.id for one in group] for group in groups] == wanted, "what would be below the target is joined at once"


def test_indexes_that_are_built_again_are_part_of_the_price() -> None:
    """Of 100 bytes 30 are freed: more than one in four that are written, and less where an index is as large."""
    policy = Policy(100, 1 << 40, 4, 0.1)
    for again, is_worth in {0: True, 1 << 30: False}.items():
        groups = policy.groups([FragmentSize(0, 700, 300, 1 << 30, indexed_again=again)])
        assert len(groups) == 1, "what the owner's deleted fraction demands is rewritten, if not at once"
        assert bool(policy.worth_a_run(groups)) is is_worth


def test_a_budget_lowers_the_target() -> None:
    policy = Policy(1 << 20, 1 << 30, 4, 0.1)
    fragments = sizes(*[1 << 20] * 100)
    assert len(policy.groups(fragments)) == 1
    groups = policy.within(10 << 20).groups(fragments)
    assert len(groups) == 20
    assert max(sum(one.bytes for one in group) for group in groups) < 10 << 20


def test_many_fragments_are_planned_at_once() -> None:
    groups = Policy(1000, 1 << 40, 4, 0.1).groups([FragmentSize(number, 1, 0, 100_000) for number in range(100_000)])
    assert len(groups) == 100
    decreasing = [FragmentSize(number, 1 << (60 - number), 0, 0) for number in range(60)]
    assert not Policy(1 << 62, 1 << 62, 4, 0.1).groups(decreasing)


def history(draw: st.DrawFn) -> list[FragmentSize]:
    """Fragments as appends, upserts, deletions and catch-ups of indexes leave them; some without a recorded size."""
    rows = st.integers(0, 60)
    kinds = st.tuples(rows, rows, st.sampled_from([0, 1, 100, FLOOR // 8, UNIT // 100]), st.integers(0, 2))
    return [
        FragmentSize(number, live, deleted, (live + deleted) * width, neighbors)
        for number, (live, deleted, width, neighbors) in enumerate(draw(st.lists(kinds, max_size=60)))
        if live + deleted
    ]


policies = st.builds(
    Policy, st.integers(1, 2000), st.integers(1, 400 * UNIT), st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.5, 1.0])
)


@given(fragments=st.composite(history)(), policy=policies)
def test_a_second_run_directly_after_one_finds_nothing(fragments: list[FragmentSize], policy: Policy) -> None:
    left = fragments
    for groups in policy.rounds(fragments):
        before, left = work(policy, left), policy.after(left, groups)
        assert work(policy, left) < before, "so that a run ends"
    assert not policy.groups(left)
    assert sum(one.rows for one in left) == sum(one.rows for one in fragments)
    assert len({one.id for one in left}) == len(left)


@given(fragments=st.composite(history)(), policy=policies, seed=st.randoms(use_true_random=False))
def test_runs_of_one_group_each_come_to_an_end(fragments: list[FragmentSize], policy: Policy, seed: Random) -> None:
    """As ``--max-bytes`` has it: whichever group a run takes."""
    while groups := policy.groups(fragments):
        before, fragments = work(policy, fragments), policy.after(fragments, [seed.choice(groups)])
        assert work(policy, fragments) < before, "so that there are at most as many runs"


def work(policy: Policy, fragments: list[FragmentSize]) -> int:
    """A limit of the groups that are ever rewritten: fragments below the target, and twice those with deletions."""
    small = (one.rows + one.deleted < policy.target_rows and one.bytes < policy.target_bytes for one in fragments)
    return sum(small) + 2 * sum(one.deleted > 0 for one in fragments)


@pytest.mark.parametrize(
    ("fragments", "worth"),
    [
        pytest.param(lambda: sizes(*[UNIT] * 3), [], id="nothing is due"),
        pytest.param(lambda: sizes(*[UNIT] * 4), [0, 1, 2, 3], id="a tier is full"),
        pytest.param(lambda: sizes(*[1000] * 7), [], id="a run costs more requests than it saves"),
        pytest.param(lambda: sizes(*[1000] * 8), [*range(8)], id="many tiny ones"),
        pytest.param(lambda: [FragmentSize(0, 80, 20, 1 << 30)], [], id="some are deleted"),
        pytest.param(lambda: [FragmentSize(0, 75, 25, 1 << 30)], [0], id="as many as a tier"),
        pytest.param(lambda: [FragmentSize(0, 0, 9, 1 << 30)], [0], id="all are deleted"),
        pytest.param(lambda: [FragmentSize(0, 1, 99, 1000)], [], id="of a tiny one"),
        pytest.param(lambda: [FragmentSize(0, 90, 10, 1 << 30, dropped=1 << 27)], [], id="and columns are dropped"),
        pytest.param(lambda: [FragmentSize(0, 90, 10, 1 << 30, dropped=1 << 28)], [0], id="more of them"),
        pytest.param(lambda: [FragmentSize(0, 9, 0, 8 << 20, files=8)], [], id="some files of columns"),
        pytest.param(lambda: [FragmentSize(0, 9, 0, 8 << 20, files=9)], [0], id="many small ones"),
        pytest.param(lambda: [FragmentSize(0, 9, 0, 8 << 30, files=64)], [], id="many large ones"),
        pytest.param(lambda: [FragmentSize(0, 9, 0, 8 << 30, files=65)], [0], id="far too many"),
        pytest.param(lambda: [FragmentSize(one, 10, 0, 0) for one in range(4)], [0, 1, 2, 3], id="no size is recorded"),
    ],
)
def test_what_is_worth_a_run_at_once(fragments: Callable[[], list[FragmentSize]], worth: list[int]) -> None:
    policy = Policy(1 << 20, 1 << 30, 4, 0.1)
    chosen = policy.worth_a_run(policy.groups(fragments()))
    assert [one.id for group in chosen for one in group] == worth


def sizes(*bytes_: int) -> list[FragmentSize]:
    return [FragmentSize(number, max(1, size // 1000), 0, size) for number, size in enumerate(bytes_)]
