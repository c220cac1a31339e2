"""What vector and text indexes lack of a version, readers still read from generations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from memwal_ops.formats.lance.retention import live_versions as module
from memwal_ops.formats.lance.wire._pb import table_pb2

A, B = UUID(int=1), UUID(int=2)
FRAGMENTS: Any = [SimpleNamespace(id=1), SimpleNamespace(id=2)]


def section(*indexes: tuple[str, bool]) -> table_pb2.IndexSection:
    """Indexes by name, and whether readers search by them."""
    made = table_pb2.IndexSection()
    for name, searched in indexes:
        kind = module._SEARCHED if isinstance(module._SEARCHED, str) else next(iter(module._SEARCHED))
        made.indices.add(name=name).index_details.type_url = f"/lance{kind}" if searched else "/lance.Other"
    return made


@pytest.mark.req("S0-188")
@pytest.mark.parametrize(
    ("indexes", "catchup", "covered", "without", "expected"),
    [
        ([], {}, {}, {A: 5, B: 3}, {A: 5, B: 3}),
        ([("key", False)], {}, {}, {A: 5, B: 3}, {A: 5, B: 3}),
        ([("v", True)], {"v": {A: 5, B: 3}}, {}, {A: 5, B: 3}, {A: 5, B: 3}),
        ([("v", True)], {}, {"v": {1, 2}}, None, {A: 5, B: 3}),
        ([("v", True)], {}, {"v": {1}}, None, {A: 0, B: 0}),
        ([("v", True)], {"v": {A: 4}}, {"v": {1}}, None, {A: 4, B: 0}),
        ([("v", True)], {"v": {A: 9, B: 2}}, {"v": set()}, None, {A: 5, B: 2}),
        ([("v", True), ("t", True)], {"v": {A: 4, B: 3}, "t": {A: 5, B: 1}}, {}, None, {A: 4, B: 1}),
        ([("v", True), ("v", True)], {}, {"v": {1, 2}}, None, {A: 5, B: 3}),
    ],
)
def test_progress_is_lowered_to_what_indexes_cover(
    indexes: Any, catchup: Any, covered: Any, without: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def covered_by(entries: Any) -> set[int]:
        [name] = {entry.name for entry in entries}
        assert len(entries) == sum(one == name for one, _ in indexes)
        return covered.get(name, set())  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "covered_by", covered_by)
    index: Any = SimpleNamespace(merged_generations={A: 5, B: 3}, index_catchup=catchup)
    assert module._lowered(index, section(*indexes), None) == without
    assert module._lowered(index, section(*indexes), FRAGMENTS) == expected
