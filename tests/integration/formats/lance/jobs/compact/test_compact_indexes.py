"""compact on tables with stable row ids: rows that it dropped take no place in the results of searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.formats.lance.commit.commit import CommitNote
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.jobs.compact import corrections as compact_indexes, job as compact
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.table import Table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
    ]
)


def rows(first: int, last: int) -> pa.Table:
    ids = range(first, last)
    return pa.table({"id": ids, "text": ["word"] * len(ids), "vector": [[float(i)] * 4 for i in ids]}, schema=SCHEMA)


@pytest.fixture(params=[False, True], ids=["plain", "with log"])
def uri(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """100 rows in four fragments under both kinds of index, the first 20 of which are deleted."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, 100), uri, enable_stable_row_ids=True, max_rows_per_file=25)
    if request.param:
        lance.dataset(uri).initialize_mem_wal()
    lance.dataset(uri).create_index("vector", "IVF_FLAT", num_partitions=1, name="near")
    lance.dataset(uri).create_scalar_index("text", "INVERTED", name="words")
    lance.dataset(uri).create_scalar_index("id", "BTREE", name="ids")
    lance.dataset(uri).delete("id < 20")
    return uri


def check(uri: str, *expected: int) -> None:
    dataset = lance.dataset(uri)
    near = dataset.to_table(nearest={"column": "vector", "q": [0.0] * 4, "k": 10}, columns=["id", "_distance"])
    assert near["id"].to_pylist() == [*expected][:10]
    for limit in (10, len(expected)):
        words = dataset.to_table(full_text_query="word", limit=limit, columns=["id", "_score"])
        assert words.num_rows == limit
        assert {*words["id"].to_pylist()} <= {*expected}
    assert sorted(dataset.to_table(columns=["id"])["id"].to_pylist()) == [*expected]


@pytest.mark.sampled(1)
def test_dropped_rows_take_no_place(uri: str) -> None:
    check(uri, *range(20, 100))
    for dropped, after in ((20, 1), (45, 1)):
        report = run_job(uri, "compact")
        assert (report.decision, report.fragments_after) == ("compacted", after)
        check(uri, *range(dropped, 100))
        assert run_job(uri, "verify", deep=True).decision == "healthy"
        lance.dataset(uri).delete("id < 45")


def test_it_is_done_once(uri: str) -> None:
    run_job(uri, "compact")
    version = lance.dataset(uri).version
    assert run_job(uri, "compact").decision == "unchanged"
    assert lance.dataset(uri).version == version
    table = open_table(uri)
    existing = {fragment.id for fragment in table.manifest.manifest.fragments}
    for name, index in base_indexes(table).items():
        # Only fragments that the segment did cover.
        assert len(index.covered - existing) == (name != "ids")
        assert index.covered - existing <= set(range(4))


def test_where_no_row_was_dropped_nothing_is_claimed(tmp_path: Path) -> None:
    """Else each search would exclude rows, and those of pylance up to 8 by an HNSW index would never end."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, 100), uri, enable_stable_row_ids=True, max_rows_per_file=25)
    lance.dataset(uri).create_index("vector", "IVF_HNSW_FLAT", num_partitions=1, name="near")
    lance.dataset(uri).create_scalar_index("text", "INVERTED", name="words")
    for _ in range(2):
        run_job(uri, "compact")
        table = open_table(uri)
        existing = {fragment.id for fragment in table.manifest.manifest.fragments}
        assert {name: index.covered - existing for name, index in base_indexes(table).items()} == {
            "near": set(),
            "words": set(),
        }
    check(uri, *range(100))


def test_a_run_finishes_what_a_killed_one_left(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(table: Table, before: Table | None, note: CommitNote, retry: CommitRetry) -> Table:
        if before is not None:
            raise KeyboardInterrupt
        return table

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(compact.corrections, "exclude_dropped_rows", killed)
        run_job(uri, "compact")
    with pytest.raises(AssertionError):
        check(uri, *range(20, 100))
    run_job(uri, "compact")
    check(uri, *range(20, 100))


def test_a_fragment_that_is_under_way_is_not_claimed(uri: str) -> None:
    """Another compaction reserved an id, and has no fragment of it yet."""
    run_job(uri, "compact")
    lance.write_dataset(rows(100, 140), uri, mode="append", max_rows_per_file=10)
    table = open_table(uri)
    highest = table.manifest.manifest.max_fragment_id
    beside = lance.dataset(uri)
    plan = lance.optimize.Compaction.plan(beside, {"target_rows_per_fragment": 1000})
    results = [task.execute(beside) for task in plan.tasks]
    lance.dataset(uri).delete("id = 30")
    compact_indexes.exclude_dropped_rows(open_table(uri), None, CommitNote("compact"), CommitRetry())
    lance.optimize.Compaction.commit(beside, results)
    after = open_table(uri)
    new = {fragment.id for fragment in after.manifest.manifest.fragments if fragment.id > highest}
    assert new
    assert not any(index.covered & new for index in base_indexes(after).values())


def test_beside_commits_of_others(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others delete and append right before its commit."""
    change, asked = compact_indexes._to_change, []

    def decided(table: Table, before: Table | None) -> object:
        found = change(table, before)
        if found and not asked:
            asked.append(found)
            lance.dataset(uri).delete("id = 50")
            lance.write_dataset(rows(100, 110), uri, mode="append")
        return found

    monkeypatch.setattr(compact_indexes, "_to_change", decided)
    run_job(uri, "compact")
    assert asked
    run_job(uri, "catchup")
    check(uri, *(number for number in range(20, 110) if number != 50))


def test_indexes_that_a_clone_reads_at_its_source(tmp_path: Path) -> None:
    """pylance would write the remapped files into the clone, and look for them at the source."""
    source, clone = str(tmp_path / "source.lance"), str(tmp_path / "clone.lance")
    lance.write_dataset(rows(0, 100), source, max_rows_per_file=25).create_scalar_index("id", "BTREE", name="ids")
    lance.dataset(source).shallow_clone(clone, lance.dataset(source).version)
    for first in (100, 110):
        lance.write_dataset(rows(first, first + 10), clone, mode="append")
    planned = run_job(clone, "compact", apply=False)
    assert (planned.fragments_removed, planned.why) == (2, None)
    report = run_job(clone, "compact")
    assert (report.fragments_removed, report.fragments_after) == (2, 5)
    assert "source of this shallow clone" in str(run_job(clone, "compact").why)
    assert lance.dataset(clone).to_table(filter="id = 7").num_rows == 1
    lance.dataset(clone).create_scalar_index("id", "BTREE", name="ids", replace=True)
    assert run_job(clone, "compact").fragments_after == 1
    for number in (7, 105):
        assert lance.dataset(clone).to_table(filter=f"id = {number}").num_rows == 1
    lance.dataset(clone).delete("id = 8")
    assert lance.dataset(source).count_rows() == 100


def test_indexes_that_wait_for_moved_rows(tmp_path: Path) -> None:
    """pylance would lose their rows; what they do not cover is compacted."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, 100), uri, max_rows_per_file=50).create_scalar_index("id", "BTREE", name="ids")
    lance.dataset(uri).optimize.compact_files(defer_index_remap=True)
    lance.dataset(uri).delete("id < 20")
    for first in (100, 110):
        lance.write_dataset(rows(first, first + 10), uri, mode="append")
    assert run_job(uri, "compact").fragments_after == 2
    assert "defer_index_remap" in str(run_job(uri, "compact").why)
    for number in (50, 105):
        assert lance.dataset(uri).to_table(filter=f"id = {number}").num_rows == 1
    lance.dataset(uri).create_scalar_index("id", "BTREE", name="ids", replace=True)
    assert run_job(uri, "compact").fragments_after == 1
    for number in (50, 105):
        assert lance.dataset(uri).to_table(filter=f"id = {number}").num_rows == 1
