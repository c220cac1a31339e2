"""Every way to give an id to another column, by operations of Lance, takes as many versions as is assumed."""

from __future__ import annotations

from itertools import chain, combinations
from typing import TYPE_CHECKING, NamedTuple

import pytest

from memwal_ops.formats.lance.retention.schema_recorder import FileIds, fewest_versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KEY = 0


class Version(NamedTuple):
    """Ids of the schema, those of them that are of other columns than at first, and the ids in each data file."""

    ids: frozenset[int]
    others: frozenset[int]
    files: frozenset[frozenset[int]]


def next_id(version: Version) -> int:
    return max(chain(version.ids, *version.files), default=-1) + 1


def subsets(items: Iterable[int]) -> Iterator[frozenset[int]]:
    listed = sorted(items)
    return (frozenset(some) for count in range(len(listed) + 1) for some in combinations(listed, count))


def dropped(version: Version, gone: frozenset[int]) -> Version:
    ids = version.ids - gone
    return Version(ids, version.others - gone, frozenset(file for file in version.files if file & ids))


def following(version: Version) -> Iterator[Version]:
    """What one commit may make of a version."""
    for gone in subsets(version.ids - {KEY}):
        yield dropped(version, gone)
    for files in (frozenset(some) for count in range(4) for some in combinations(version.files, count)):
        yield version._replace(files=files)  # rows are deleted
        yield version._replace(files=files | {version.ids})  # an append, an update, or a compaction of some rows
    new = next_id(version)
    for added in (frozenset({new}), frozenset({new, new + 1})):
        wider = Version(version.ids | added, version.others | added, version.files)
        yield wider  # of NULLs
        yield wider._replace(files=version.files | {added})
        for replaced in subsets(version.ids - {KEY}):
            if len(replaced) == len(added):  # a cast: columns get other ids
                yield dropped(wider, replaced)
                yield dropped(wider._replace(files=version.files | {added}), replaced)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "files",
    [
        [{0, 1, 2}],
        [{0, 1}, {2}],
        [{0, 1}, {0, 1, 2}],
        [{0, 1}],
        [{0}],
        [{0}, {1}, {2}],
        [{0, 1, 2, 3}],
        [{0, 1, 2}, {3}],
        [],
    ],
    ids=str,
)
def test_no_shorter_way(files: list[set[int]]) -> None:
    first = Version(frozenset({0, 1, 2}), frozenset(), frozenset(map(frozenset, files)))
    with_key = max((max(file) for file in first.files if KEY in file), default=-1)
    before = FileIds(with_key, frozenset(map(max, first.files)))
    seen = reached = {first}
    shortest: dict[tuple[int, frozenset[int]], int] = {}
    for count in range(1, 5):
        reached = {later for version in reached for later in following(version)} - seen
        seen = seen | reached
        for version in reached:
            for field_id in version.others & {1, 2}:
                shortest.setdefault((field_id, version.ids), count)
        if len(seen) > 20_000:
            break
    assert shortest, "an id is used again"
    for (field_id, ids), count in shortest.items():
        assert fewest_versions(field_id, before, ids) <= count, (field_id, sorted(ids))


def test_what_it_is_worth() -> None:
    """A column that is in every file: adding one, dropping one and compacting does not explain another one."""
    before = FileIds(2, frozenset({2}))
    assert fewest_versions(2, before, {0, 2, 3}) == 4
    assert fewest_versions(2, before, {0, 1, 2}) == 3
    assert fewest_versions(2, FileIds(1, frozenset({1})), {0, 1, 2}) == 2
