"""catchup by size tiers: which segments an update writes again, and that answers stay right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.catchup.tiers import debts_of
from memwal_ops.formats.lance.options import CatchupOptions
from memwal_ops.formats.lance.policy.segments import FLOOR, SegmentDebt
from tests.support.tables.stale_indexes import written_by

if TYPE_CHECKING:
    from pathlib import Path

UNIT = FLOOR + 1
BASE = 8 * UNIT


def rows(start: int, end: int) -> pa.Table:
    numbers = np.arange(start, end)
    return pa.table(
        {
            "id": numbers,
            "text": [f"u{one} word{one % 13}" for one in numbers],
            "in": pa.StructArray.from_arrays([pa.array([f"u{one}" for one in numbers])], ["x"]),
        }
    )


def append(uri: str, rows_: int) -> None:
    first = lance.dataset(uri).count_rows()
    lance.write_dataset(rows(first, first + rows_), uri, mode="append")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A table with the indexes ``by_id`` and ``by_text``, which may have several segments."""
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(rows(0, BASE), uri)
    dataset.create_scalar_index("id", "BLOOMFILTER", name="by_id")
    dataset.create_scalar_index("text", "NGRAM", name="by_text")
    return uri


def segments(uri: str, name: str = "by_id") -> list[list[int]]:
    """By segment, the fragments that it covers."""
    index = next(one for one in lance.dataset(uri).describe_indices() if one.name == name)
    return sorted(sorted(one.fragment_ids) for one in index.segments)


def assert_right(uri: str) -> None:
    report = run_job(uri, "verify", answers=True)
    assert not report.findings.kept, report.describe()
    assert sum(one.queries for one in report.answers) > 50


def test_appends_are_merged_by_tiers(uri: str) -> None:
    """Also where a compaction runs in between, which joins the fragments of one segment."""
    seen = []
    for number in range(5):
        append(uri, UNIT)
        assert run_job(uri, "catchup").decision == "caught_up"
        seen.append(segments(uri, "by_text"))
        if number == 3:
            assert segments(uri) == seen[-1], "all indexes are cut at the same fragments"
            assert run_job(uri, "compact").decision == "compacted"
    assert [len(one) for one in seen] == [2, 3, 4, 2, 3]
    assert seen[0] == [[0], [1]]
    assert len(lance.dataset(uri).get_fragments()) == 3
    assert_right(uri)


def test_what_is_written_is_reported_and_planned(uri: str) -> None:
    whole = {one.name: sum(file.size_bytes for entry in one.segments for file in entry.files)
             for one in base_indexes(open_table(uri)).values()}  # fmt: skip
    append(uri, UNIT)
    planned = {one.name: one for one in run_job(uri, "catchup", apply=False).indexes}
    debts = debts_of(open_table(uri), CatchupOptions())
    backlog = catchup.backlog(open_table(uri))
    assert backlog["index_debt"] == sum(one.bytes for one in debts.values())
    assert backlog["uncovered_rows"] == UNIT
    done = {one.name: one for one in run_job(uri, "catchup").indexes}
    for name, size in whole.items():
        assert debts[name] == SegmentDebt(UNIT, 0, planned[name].bytes_written)
        assert 0 < planned[name].bytes_written < size / 2
        assert 0 < done[name].bytes_written < size
        assert done[name].to_json()["bytes_written"] == done[name].bytes_written
        assert done[name].segments == 2
    assert {one.bytes_written for one in run_job(uri, "catchup").indexes} == {0}
    assert {one.bytes for one in debts_of(open_table(uri), CatchupOptions()).values()} == {0}


def test_the_limit_holds(uri: str) -> None:
    append(uri, UNIT)
    run_job(uri, "catchup")
    append(uri, UNIT)
    run_job(uri, "catchup", max_segments=2)
    assert segments(uri) == [[0], [1, 2]]
    run_job(uri, "catchup", max_segments=1)
    assert segments(uri) == [[0, 1, 2]]
    append(uri, UNIT)
    run_job(uri, "catchup", max_segments=1)
    assert segments(uri) == [[0, 1, 2, 3]]
    assert_right(uri)


def test_one_as_the_factor_writes_indexes_anew(uri: str) -> None:
    append(uri, UNIT)
    run_job(uri, "catchup", tier_factor=1)
    assert segments(uri) == segments(uri, "by_text") == [[0, 1]]


def test_few_rows_are_merged(uri: str) -> None:
    for _ in range(3):
        append(uri, 100)
        run_job(uri, "catchup", indexes=("by_id",))
    assert segments(uri) == [[0], [1, 2, 3]]


def test_segments_without_rows_are_merged(uri: str) -> None:
    append(uri, UNIT)
    run_job(uri, "catchup")
    lance.dataset(uri).delete(f"id >= {BASE}")
    append(uri, UNIT)
    run_job(uri, "catchup")
    assert len(segments(uri)) == 2
    assert_right(uri)


@pytest.mark.parametrize(("release", "expected"), [("7.0.0", [[0, 1]]), ("9.0.1", [[0], [1]])])
def test_releases_that_fail_by_several_segments_get_one(uri: str, release: str, expected: list[list[int]]) -> None:
    append(uri, UNIT)
    written_by(uri, release)
    run_job(uri, "catchup", indexes=("by_id",))
    assert segments(uri) == expected


def test_other_types_keep_one_segment(uri: str) -> None:
    """Why: tests/integration/contracts/test_segments.py."""
    names = ["by_number", "by_words", "by_x", "by_zone"]
    lance.dataset(uri).create_scalar_index("id", "BTREE", name="by_number")
    lance.dataset(uri).create_scalar_index("text", "INVERTED", name="by_words")
    lance.dataset(uri).create_scalar_index("in.x", "NGRAM", name="by_x")
    lance.dataset(uri).create_scalar_index("id", "ZONEMAP", name="by_zone")
    for _ in range(2):
        append(uri, UNIT)
        report = run_job(uri, "catchup", indexes=names)
        assert [(one.name, one.segments) for one in report.indexes] == [(name, 1) for name in names]
    assert_right(uri)


@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_answers_are_right_after_upserts(tmp_path: Path, stable: bool) -> None:
    """An older segment has what the rows were before."""
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(rows(0, BASE), uri, enable_stable_row_ids=stable)
    for kind, column in (("BTREE", "id"), ("INVERTED", "text"), ("NGRAM", "text"), ("BITMAP", "text")):
        dataset.create_scalar_index(column, kind, name=f"by_{kind.lower()}")
    for number in range(2):
        changes = rows(number * UNIT, (number + 1) * UNIT)
        changes = changes.set_column(1, "text", pa.array([f"later{one} word1" for one in range(UNIT)]))
        lance.dataset(uri).merge_insert("id").when_matched_update_all().execute(changes)
        assert run_job(uri, "catchup", answers="strict").decision == "caught_up"
    assert len(segments(uri, "by_ngram")) == 3
    assert_right(uri)
