"""catchup by size tiers: which segments an update writes again, and that answers stay right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.jobs.catchup import job as catchup, tiers
from memwal_ops.formats.lance.jobs.catchup.tiers import debts_of
from memwal_ops.formats.lance.options import CatchupOptions
from memwal_ops.formats.lance.policy import SEGMENT_FLOOR as FLOOR, SegmentDebt
from tests.support.tables.stale_indexes import written_by

if TYPE_CHECKING:
    from pathlib import Path

UNIT = 256
BASE = 8 * UNIT
LARGE = FLOOR + 1  # eight of them are two zones of a bloom filter


@pytest.fixture(autouse=True)
def floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest segment that is not merged at once: one unit, of fewer rows than by default."""
    monkeypatch.setattr(tiers.policy, "SEGMENT_FLOOR", UNIT - 1)


def rows(start: int, end: int) -> pa.Table:
    numbers = np.arange(start, end)
    return pa.table(
        {
            "id": numbers,
            "text": [f"u{one} word{one % 13}" for one in numbers],
            "tags": [[f"t{one % 7}"] for one in numbers],
            "in": pa.StructArray.from_arrays([pa.array([f"u{one}" for one in numbers])], ["x"]),
        }
    )


def append(uri: str, rows_: int) -> None:
    first = lance.dataset(uri).count_rows()
    lance.write_dataset(rows(first, first + rows_), uri, mode="append")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A table with the indexes ``by_id`` and ``by_text``, which may have several segments."""
    return tiered(tmp_path, BASE)


def tiered(folder: Path, base: int) -> str:
    uri = str(folder / "t.lance")
    dataset = lance.write_dataset(rows(0, base), uri)
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


@pytest.mark.long
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


@pytest.mark.long
def test_what_is_written_is_reported_and_planned(tmp_path: Path) -> None:
    uri = tiered(tmp_path, 8 * LARGE)
    whole = {one.name: sum(file.size_bytes for entry in one.segments for file in entry.files)
             for one in base_indexes(open_table(uri)).values()}  # fmt: skip
    append(uri, LARGE)
    planned = {one.name: one for one in run_job(uri, "catchup", apply=False).indexes}
    debts = debts_of(open_table(uri), CatchupOptions())
    backlog = catchup.backlog(open_table(uri))
    assert backlog["index_debt"] == sum(one.bytes for one in debts.values())
    assert backlog["uncovered_rows"] == LARGE
    done = {one.name: one for one in run_job(uri, "catchup").indexes}
    for name, size in whole.items():
        assert debts[name] == SegmentDebt(LARGE, 0, planned[name].bytes_written)
        assert 0 < planned[name].bytes_written < size / 2
        assert 0 < done[name].bytes_written < size
        assert done[name].to_json()["bytes_written"] == done[name].bytes_written
        assert done[name].segments == 2
    assert {one.bytes_written for one in run_job(uri, "catchup").indexes} == {0}
    assert {one.bytes for one in debts_of(open_table(uri), CatchupOptions()).values()} == {0}


@pytest.mark.long
def test_what_is_due_by_the_schedule(tmp_path: Path) -> None:
    """An index that is written anew each time waits for a quarter, one that is written by tiers for a sixteenth."""
    uri = tiered(tmp_path, 8 * LARGE)
    lance.dataset(uri).create_scalar_index("tags", "LABEL_LIST", name="by_tag")

    def counts() -> list[float]:
        figures = catchup.backlog(open_table(uri))
        return [figures[name] for name in ("indexes_behind", "indexes_due", "indexes_urgent", "merged_regions")]

    assert counts() == [0, 0, 0, 0]
    append(uri, 900)
    assert counts() == [3, 0, 0, 0]
    append(uri, 200)
    assert counts() == [3, 2, 0, 0]
    append(uri, LARGE)
    assert counts() == [3, 3, 3, 0]


@pytest.mark.long
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


@pytest.mark.long
def test_one_as_the_factor_writes_indexes_anew(uri: str) -> None:
    append(uri, UNIT)
    run_job(uri, "catchup", tier_factor=1)
    assert segments(uri) == segments(uri, "by_text") == [[0, 1]]


def test_few_rows_are_merged(uri: str) -> None:
    for _ in range(3):
        append(uri, 80)
        run_job(uri, "catchup", indexes=("by_id",))
    assert segments(uri) == [[0], [1, 2, 3]]


@pytest.mark.long
def test_segments_without_rows_are_merged(uri: str) -> None:
    append(uri, UNIT)
    run_job(uri, "catchup")
    lance.dataset(uri).delete(f"id >= {BASE}")
    append(uri, UNIT)
    run_job(uri, "catchup")
    assert len(segments(uri)) == 2
    assert_right(uri)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("release", "expected"), [("7.0.0", [[0, 1]]), ("9.0.1", [[0], [1]])])
def test_releases_that_fail_by_several_segments_get_one(uri: str, release: str, expected: list[list[int]]) -> None:
    append(uri, UNIT)
    written_by(uri, release)
    run_job(uri, "catchup", indexes=("by_id",))
    assert segments(uri) == expected


@pytest.mark.long
def test_other_types_keep_one_segment(uri: str) -> None:
    """Why: tests/integration/contracts/test_segments.py."""
    names = ["by_tag", "by_x", "by_zone"]
    lance.dataset(uri).create_scalar_index("tags", "LABEL_LIST", name="by_tag")
    lance.dataset(uri).create_scalar_index("in.x", "NGRAM", name="by_x")
    lance.dataset(uri).create_scalar_index("id", "ZONEMAP", name="by_zone")
    for _ in range(2):
        append(uri, UNIT)
        report = run_job(uri, "catchup", indexes=names)
        assert [(one.name, one.segments) for one in report.indexes] == [(name, 1) for name in names]
    assert_right(uri)


EXACT = {"by_number": ("id", "BTREE"), "by_word": ("text", "BITMAP"), "by_words": ("text", "INVERTED")}


def exact(folder: Path, *, stable: bool = False, base: int = 2) -> str:
    """A table with the indexes of which an answer is what they hold, in fragments of :data:`UNIT` rows."""
    uri = str(folder / "t.lance")
    dataset = lance.write_dataset(rows(0, base * UNIT), uri, max_rows_per_file=UNIT, enable_stable_row_ids=stable)
    for name, (column, kind) in EXACT.items():
        dataset.create_scalar_index(column, kind, name=name)
    return uri


def append_units(uri: str, number: int) -> None:
    first = lance.dataset(uri).count_rows()
    lance.write_dataset(rows(first, first + number * UNIT), uri, mode="append", max_rows_per_file=UNIT)


def caught_up(uri: str) -> list[list[int]]:
    """The segments of these indexes after a run; all have the same."""
    assert run_job(uri, "catchup").decision in {"caught_up", "unchanged"}
    by_number, *others = (segments(uri, name) for name in EXACT)
    assert others == [by_number, by_number]
    return by_number


def change_in_place(uri: str, fragment: int) -> None:
    """Change the indexed columns of some rows where they are: no index claims the fragment any more."""
    dataset = lance.dataset(uri)
    place = next(one for one in dataset.get_fragments() if one.fragment_id == fragment)
    changes = place.to_table(columns=["id"]).slice(0, 200)
    changes = pa.table({"key": changes["id"], "id": pc.add(changes["id"], 10**6), "text": ["later"] * 200})
    changed, fields = place.update_columns(changes, left_on="id", right_on="key")
    operation = lance.LanceOperation.Update(updated_fragments=[changed], fields_modified=fields)
    lance.LanceDataset.commit(uri, operation, read_version=dataset.version)


@pytest.mark.long
def test_what_answers_by_itself_is_written_by_tiers(tmp_path: Path) -> None:
    """After appends, upserts, deletes and compactions, which change no value where it is."""
    uri = exact(tmp_path, base=8)
    append_units(uri, 1)
    assert caught_up(uri) == [[*range(8)], [8]]
    changes = rows(0, UNIT).set_column(1, "text", pa.array([f"later{one} word1" for one in range(UNIT)]))
    lance.dataset(uri).merge_insert("id").when_matched_update_all().execute(changes)
    assert caught_up(uri) == [[*range(8)], [8], [9]]
    lance.dataset(uri).delete("id % 5 = 2")
    append_units(uri, 1)
    assert len(caught_up(uri)) == 4
    assert run_job(uri, "compact").decision == "compacted"
    assert len(caught_up(uri)) == 4
    assert_right(uri)
    append_units(uri, 4)
    assert len(caught_up(uri)) == 2, "four times as large as any of those after the first"
    assert_right(uri)


@pytest.mark.long
@pytest.mark.parametrize("compacted", [False, True], ids=["in place", "compacted since"])
def test_segments_with_values_of_before_are_merged(tmp_path: Path, compacted: bool) -> None:
    """Back to the oldest of them: those before stay as they are."""
    uri = exact(tmp_path, base=20)
    append_units(uri, 6)
    assert caught_up(uri) == [[*range(20)], [*range(20, 26)]]
    append_units(uri, 2)
    assert caught_up(uri) == [[*range(20)], [*range(20, 26)], [26, 27]]
    change_in_place(uri, 20)
    if compacted:
        run_job(uri, "compact")
    append_units(uri, 1)
    assert len(caught_up(uri)) == 2
    assert_right(uri)


def test_the_oldest_segment_may_have_values_of_before(tmp_path: Path) -> None:
    uri = exact(tmp_path, base=8)
    append_units(uri, 1)
    assert len(caught_up(uri)) == 2
    change_in_place(uri, 0)
    assert caught_up(uri) == [[*range(9)]]
    assert_right(uri)


def test_a_poll_finds_what_another_process_claimed(tmp_path: Path) -> None:
    """Before, only the next update healed it, which nothing made due."""
    uri = exact(tmp_path, base=8)
    append_units(uri, 1)
    caught_up(uri)
    change_in_place(uri, 0)
    lance.dataset(uri).optimize.optimize_indices()
    figures = catchup.backlog(open_table(uri))
    assert (figures["uncovered_rows"], figures["indexes_due"] > 0, figures["indexes_urgent"] > 0) == (0, True, True)
    assert caught_up(uri) == [[*range(9)]]
    assert_right(uri)
    figures = catchup.backlog(open_table(uri))
    assert (figures["indexes_due"], figures["indexes_urgent"]) == (0, 0)


@pytest.mark.long
def test_a_run_heals_what_another_process_claimed(tmp_path: Path) -> None:
    """pylance's own update merges the newest segment with the rows that none covers, whatever older ones hold."""
    uri = exact(tmp_path, base=8)
    append_units(uri, 1)
    caught_up(uri)
    change_in_place(uri, 0)
    lance.dataset(uri).optimize.optimize_indices(index_names=["by_number"])
    assert run_job(uri, "verify", answers=True, index=["by_number"]).findings.kept
    append_units(uri, 1)
    assert len(caught_up(uri)) == 1
    assert_right(uri)


@pytest.mark.long
def test_addresses_that_readers_translate_are_not_compared(tmp_path: Path) -> None:
    uri = exact(tmp_path, base=8)
    append_units(uri, 1)
    caught_up(uri)
    lance.dataset(uri).optimize.compact_files(defer_index_remap=True)
    append_units(uri, 1)
    assert len(caught_up(uri)) == 1
    append_units(uri, 1)
    assert len(caught_up(uri)) == 1
    assert_right(uri)


@pytest.mark.long
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
    assert len(segments(uri, "by_btree")) == len(segments(uri, "by_bitmap")) == (1 if stable else 3)
    assert_right(uri)
