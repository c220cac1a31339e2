"""Base indexes after a merge: no stale hit, no missing row, and time travel through them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from tests.support.tables.indexed import REGION, create, rows

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=[False, True], ids=["addresses", "stable ids"])
def merged(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """400 base rows with five indexes; 150 updated, 50 new, 20 deleted; merged in two passes."""
    uri = str(tmp_path / "t.lance")
    create(uri, stable=request.param)
    for numbers, gone in (
        ([*range(100, 200), *range(400, 430)], range(10)),
        ([*range(150, 250), *range(430, 450)], range(190, 200)),
    ):
        with lance.dataset(uri).mem_wal_writer(str(REGION)) as writer:
            writer.put(rows(numbers, "new"))
            writer.delete(pa.table({"id": pa.array(list(gone), pa.int64())}))
    before = lance.dataset(uri).version
    assert len(merge.apply(open_table(uri), merge.MergeOptions(max_generations=1)).passes) == 2
    assert lance.dataset(uri, version=before).count_rows("kind = 'new0'") == 0
    assert lance.dataset(uri, version=before).count_rows() == 400
    return uri


def expected() -> dict[int, str]:
    found = dict.fromkeys(range(10, 400), "old")
    found |= dict.fromkeys([*range(100, 250), *range(400, 450)], "new")
    return {number: stamp for number, stamp in found.items() if number not in range(190, 200)}


def check(uri: str) -> None:
    dataset = lance.dataset(uri)
    want = expected()
    everything = {row["id"]: row for row in dataset.to_table().to_pylist()}
    assert {number: row["tags"][0] for number, row in everything.items()} == want

    def ids(**query: Any) -> list[int]:
        return sorted(dataset.to_table(columns=["id"], **query).column("id").to_pylist())

    for number in (5, 50, 120, 195, 220, 430, 999):
        assert ids(filter=f"id = {number}") == ([number] if number in want else [])
    for stamp in ("old", "new"):
        assert ids(filter=f"kind = '{stamp}3'") == sorted(n for n, s in want.items() if s == stamp and n % 5 == 3)
        assert ids(filter=f"array_has(tags, '{stamp}')") == sorted(n for n, s in want.items() if s == stamp)
        assert ids(full_text_query=stamp, limit=1000) == sorted(n for n, s in want.items() if s == stamp)
    for number in (50, 120, 220, 440):
        near = {"column": "vector", "q": everything[number]["vector"], "k": 500, "nprobes": 2, "refine_factor": 50}
        found = dataset.to_table(columns=["id"], nearest=near).column("id").to_pylist()
        assert sorted(found) == sorted(want), "every row once, no row that is gone"
        assert found[0] == number


@pytest.mark.sampled(1)
def test_every_index_answers_right_before_and_after_it_is_caught_up(merged: str) -> None:
    check(merged)
    lance.dataset(merged).optimize.optimize_indices()
    check(merged)
    lance.dataset(merged).optimize.compact_files()
    check(merged)
