"""Indexes of several segments: where pylance answers by them as by one, and where it does not.

`catchup` lets new rows have a segment of their own, and merges segments by size tiers. Releases 9 to 13 were seen to
answer by such indexes, and to update and compact them; 7.0.0 answers rightly, and fails in its own `optimize_indices()`
("Index with id ... does not exist", "not implemented").

A segment keeps what it has of a fragment that it does not claim any more, or of a row that moved and kept its id. With
one segment that is left out, since no segment claims the place. With two, the newer one claims it, and rows are found
by values that they had before. So `catchup` reads from the files of BTREE, BITMAP and INVERTED indexes whose rows they
hold, and merges the segments back to the oldest that holds such ones: a merge leaves them out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

BASE, ADDED, TIMES = 2000, 200, 4
CHANGED = 300
_CONDITIONS: dict[str, tuple[str, Any, list[str]]] = {
    "BTREE": (
        "id",
        "BTREE",
        ["id = 5", "id > 2700", "id != 2100", "NOT (id > 10)", "id IN (7, 2100)", "id IS NOT NULL"],
    ),
    "BITMAP": ("id", "BITMAP", ["id = 5", "id > 2700", "id != 2100", "id IN (7, 2100)", "id IS NOT NULL"]),
    "NGRAM": ("text", "NGRAM", ["contains(text, 'u2100')", "contains(text, 'u19')", "contains(text, 'u2799')"]),
    "BLOOMFILTER": ("id", "BLOOMFILTER", ["id = 5", "id = 2100", "id = 2799"]),
    "ZONEMAP": ("id", "ZONEMAP", ["id = 5", "id > 2700"]),
}
# By type: the column, a condition that the changed rows do not fulfil any more.
_CHANGED = {
    "BTREE": ("number", "number < 20"),
    "BITMAP": ("kind", "kind = 'k3'"),
    "LABEL_LIST": ("tags", "array_has_any(tags, ['t3'])"),
    "NGRAM": ("text", "contains(text, 'old u7')"),
    "BLOOMFILTER": ("number", "number = 7"),
}


def rows(start: int, end: int) -> pa.Table:
    numbers = range(start, end)
    words = pa.array([f"u{one} common {'even' if one % 2 == 0 else 'odd'}" for one in numbers])
    inner = pa.StructArray.from_arrays([pa.array(numbers), words], ["x", "words"])
    return pa.table({"id": numbers, "text": words, "in": inner})


def states(count: int, state: str) -> pa.Table:
    """The first rows of a table, as they are before or after a change."""
    later = 100_000 * (state == "new")
    vectors = np.random.default_rng(later).random((count, 8), dtype=np.float32) + later
    return pa.table(
        {
            "id": range(count),
            "number": [one + later for one in range(count)],
            "kind": [f"k{(one + later) % 7}" for one in range(count)],
            "tags": [[f"t{(one + later) % 7}"] for one in range(count)],
            "text": [f"{state} u{one}" for one in range(count)],
            "vector": pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), 8),
        }
    )


def make(folder: Path, column: str, kind: Any, *, stable: bool = False, segments: int = TIMES + 1) -> str:
    """A table whose index has that many segments; those after the first each cover one append."""
    uri = str(folder / "t.lance")
    dataset = lance.write_dataset(rows(0, BASE), uri, enable_stable_row_ids=stable, data_storage_version="2.2")
    dataset.create_scalar_index(column, kind, name="one")
    for at in range(TIMES):
        first = BASE + at * ADDED
        dataset = lance.write_dataset(rows(first, first + ADDED), uri, mode="append")
        merged = max(0, at + 2 - segments)
        dataset.optimize.optimize_indices(num_indices_to_merge=merged)
    return uri


def covered(uri: str) -> list[list[int]]:
    [index] = lance.dataset(uri).describe_indices()
    return sorted(sorted(one.fragment_ids) for one in index.segments)


def index_files(uri: str) -> dict[str, int]:
    return {str(one): one.stat().st_size for one in Path(uri, "_indices").rglob("*") if one.is_file()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("kind", _CONDITIONS)
def test_several_segments_answer_as_a_scan(tmp_path: Path, kind: str, stable: bool) -> None:
    column, index, conditions = _CONDITIONS[kind]
    uri = make(tmp_path, column, index, stable=stable)
    assert covered(uri) == [[0], [1], [2], [3], [4]]

    def check() -> None:
        for condition in conditions:
            asked = {"columns": ["id"], "filter": condition}
            found = lance.dataset(uri).scanner(**asked, fast_search=True).to_table()["id"].to_pylist()
            right = lance.dataset(uri).scanner(**asked, use_scalar_index=False).to_table()["id"].to_pylist()
            assert sorted(found) == sorted(right), condition
            assert right

    check()
    lance.dataset(uri).delete("id % 10 = 3")
    lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    check()
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=3)
    assert len(covered(uri)) == 3
    check()


def scores(uri: str, word: str) -> list[tuple[int, float]]:
    asked = {"columns": ["id", "_score"], "full_text_query": word, "limit": 20 * BASE, "fast_search": True}
    found = lance.dataset(uri).to_table(**asked)
    return sorted(zip(found["id"].to_pylist(), [round(one, 4) for one in found["_score"].to_pylist()], strict=True))


def test_texts_have_the_scores_that_they_have_by_one_segment(tmp_path: Path) -> None:
    uris = [make(tmp_path / str(number), "text", "INVERTED", segments=number) for number in (1, TIMES + 1)]

    def check() -> None:
        assert [len(covered(uri)) for uri in uris] == [1, 5]
        for word in ("u5", "u2100", "odd", "even u2799"):
            one, several = (scores(uri, word) for uri in uris)
            assert one == several
            assert one

    check()
    for uri in uris:
        lance.dataset(uri).delete("id % 10 = 3")
    check()
    for uri in uris:
        lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    check()


def move(uri: str, column: str) -> None:
    """Change rows as an upsert does: they move to a new fragment."""
    del column
    changes = states(CHANGED, "new")
    lance.dataset(uri).merge_insert("id").when_matched_update_all().execute(changes)


def rewrite(uri: str, column: str, fragment: int = 0) -> None:
    """Change a column of the first rows of a fragment where it is: no index claims the fragment any more."""
    dataset = lance.dataset(uri)
    place = next(one for one in dataset.get_fragments() if one.fragment_id == fragment)
    first = place.to_table(columns=["id"])["id"][0].as_py()
    changes = states(first + CHANGED, "new").slice(first).select(["id", column])
    fragment_, fields = place.update_columns(changes, left_on="id", right_on="id")
    operation = lance.LanceOperation.Update(updated_fragments=[fragment_], fields_modified=fields)
    lance.LanceDataset.commit(uri, operation, read_version=dataset.version)


def changed(folder: Path, column: str, kind: str, how: Any, *, stable: bool, segments: int) -> str:
    """2,000 rows in two fragments under an index, 300 changed, and the index updated."""
    uri = str(folder / f"{segments}.lance")
    dataset = lance.write_dataset(states(BASE, "old"), uri, max_rows_per_file=1000, enable_stable_row_ids=stable)
    if column == "vector":
        dataset.create_index(column, kind, name="one", num_partitions=4)
    else:
        dataset.create_scalar_index(column, kind, name="one")
    how(uri, column)
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=2 - segments)
    assert len(covered(uri)) == segments
    return uri


def answers_differ(uri: str, condition: str) -> bool:
    scanner = lance.dataset(uri).scanner
    found = scanner(columns=["id"], filter=condition).to_table()["id"].to_pylist()
    right = scanner(columns=["id"], filter=condition, use_scalar_index=False).to_table()["id"].to_pylist()
    return sorted(found) != sorted(right)


def wrong(uri: str, kind: str, condition: str | None = None) -> int:
    """Rows that a query finds by the index, and that do not match."""
    dataset = lance.dataset(uri)
    if kind == "INVERTED":
        found = dataset.to_table(columns=["id"], full_text_query="old", limit=2 * BASE).num_rows
        return found - sum(one.startswith("old") for one in dataset.to_table(columns=["text"])["text"].to_pylist())
    asked = {"columns": ["id"], "filter": condition or _CHANGED[kind][1]}
    return int(
        dataset.scanner(**asked).to_table().num_rows
        - dataset.scanner(**asked, use_scalar_index=False).to_table().num_rows
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "column", "how", "stable"),
    [
        ("BTREE", "number", rewrite, False),
        ("BITMAP", "kind", rewrite, False),
        ("INVERTED", "text", rewrite, False),
        ("BITMAP", "kind", move, True),
        ("LABEL_LIST", "tags", move, True),
        ("INVERTED", "text", move, True),
    ],
)
def test_rows_are_found_by_values_that_they_had(tmp_path: Path, kind: str, column: str, how: Any, stable: bool) -> None:
    """By one segment they are not: so these types keep one on tables with stable row ids."""
    assert wrong(changed(tmp_path, column, kind, how, stable=stable, segments=1), kind) == 0
    assert wrong(changed(tmp_path, column, kind, how, stable=stable, segments=2), kind) > 0


@pytest.mark.parametrize(("kind", "column"), [("BTREE", "number"), ("BITMAP", "kind"), ("INVERTED", "text")])
def test_rows_that_moved_to_another_address_are_found_by_what_they_are(tmp_path: Path, kind: str, column: str) -> None:
    assert wrong(changed(tmp_path, column, kind, move, stable=False, segments=2), kind) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moved", [False, True], ids=["in place", "compacted since"])
@pytest.mark.parametrize(("kind", "column"), [("BTREE", "number"), ("BITMAP", "kind"), ("INVERTED", "text")])
def test_a_merge_leaves_out_what_a_segment_does_not_claim(tmp_path: Path, kind: str, column: str, moved: bool) -> None:
    """Of segments that are older than those which it merges, it leaves out nothing."""
    uris = [str(tmp_path / f"{merged}.lance") for merged in (1, 2, 3)]
    for merged, uri in enumerate(uris, 1):
        dataset = lance.write_dataset(states(BASE, "old"), uri)
        dataset.create_scalar_index(column, kind, name="one")
        for first in (BASE, BASE + 600):
            appended = states(first + 600, "old").slice(first)
            dataset = lance.write_dataset(appended, uri, mode="append", max_rows_per_file=300)
            dataset.optimize.optimize_indices(num_indices_to_merge=0)
        rewrite(uri, column, fragment=1)
        if moved:
            lance.dataset(uri).delete("id % 10 = 3")
            lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
        lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=merged)
        assert len(covered(uri)) == 4 - merged
    condition = f"{column} = {BASE + 7}" if kind == "BTREE" else None
    assert wrong(uris[0], kind, condition) > 0
    assert wrong(uris[1], kind, condition) == wrong(uris[2], kind, condition) == 0


def test_lists_that_were_changed_in_place_stay_claimed(tmp_path: Path) -> None:
    """By one segment, too, until an update reads all rows again: so labels keep one, which each update writes anew."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(states(BASE, "old"), uri).create_scalar_index("tags", "LABEL_LIST", name="one")
    rewrite(uri, "tags")
    assert covered(uri) == [[0]]
    assert answers_differ(uri, _CHANGED["LABEL_LIST"][1])
    lance.write_dataset(states(BASE + 300, "old").slice(BASE), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=0)
    assert answers_differ(uri, _CHANGED["LABEL_LIST"][1])
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=2)
    assert not answers_differ(uri, _CHANGED["LABEL_LIST"][1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("how", [move, rewrite])
@pytest.mark.parametrize("kind", ["NGRAM", "BLOOMFILTER"])
def test_what_is_compared_with_the_rows_is_right(tmp_path: Path, kind: str, how: Any, stable: bool) -> None:
    assert wrong(changed(tmp_path, _CHANGED[kind][0], kind, how, stable=stable, segments=2), kind) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("how", [move, rewrite])
@pytest.mark.parametrize("kind", ["IVF_FLAT", "IVF_HNSW_SQ"])
def test_no_vector_is_found_where_it_was(tmp_path: Path, kind: str, how: Any, stable: bool) -> None:
    uri = changed(tmp_path, "vector", kind, how, stable=stable, segments=2)
    for vector in states(CHANGED, "old")["vector"].to_pylist()[::30]:
        nearest = {"column": "vector", "q": vector, "k": 10, "nprobes": 4}
        found = lance.dataset(uri).to_table(columns=["id", "_distance"], nearest=nearest)
        assert min(found["id"].to_pylist()) >= CHANGED


@pytest.mark.long
def test_a_merge_writes_only_what_it_merges(tmp_path: Path) -> None:
    """The last segments, in the order of the manifest, with the rows that none covers."""
    uri = make(tmp_path, "text", "NGRAM")
    lance.write_dataset(rows(BASE + TIMES * ADDED, BASE + 5 * ADDED), uri, mode="append")
    before = index_files(uri)
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=2)
    written = sum(size for path, size in index_files(uri).items() if path not in before)
    assert covered(uri) == [[0], [1], [2], [3, 4, 5]]
    assert written < sum(before.values()) / 3


@pytest.mark.long
def test_a_nested_field_gets_no_segment_of_its_own(tmp_path: Path) -> None:
    """pylance looks for a column of the field's last name: such an index is written anew each time."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, BASE), uri).create_scalar_index("in.words", "NGRAM", name="one")
    dataset = lance.write_dataset(rows(BASE, BASE + ADDED), uri, mode="append")
    with pytest.raises(OSError, match="No column with name words"):
        dataset.optimize.optimize_indices(num_indices_to_merge=0)
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=1)
    assert covered(uri) == [[0, 1]]


def test_a_segment_of_a_zone_map_is_no_smaller_than_the_whole(tmp_path: Path) -> None:
    """So it is written anew each time: a query pays for each segment, and nobody gains."""
    uri = make(tmp_path, "id", "ZONEMAP")
    folders: dict[str, int] = {}
    for path, size in index_files(uri).items():
        folders[path.rsplit("/", 2)[-2]] = size
    first, *others = folders.values()
    assert min(others) > first / 2
