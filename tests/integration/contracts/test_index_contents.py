"""What pylance takes an index's content for: asserted AS IT IS, as in test_landmines.py.

For us: :mod:`memwal_ops.formats.lance.indexes.index_faults`, and what ``catchup`` refuses.
"""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from tests.support.tables.stale_indexes import compact_and_leave, entries, index_versions, newest, with_index_version

ROWS = 200


def make(folder: Path, kind: str, *, stable: bool) -> str:
    """200 rows in two fragments, the first row deleted."""
    uri = str(folder / "t.lance")
    rows = pa.table({"id": range(ROWS), "v": [0] * ROWS})
    dataset = lance.write_dataset(rows, uri, max_rows_per_file=ROWS // 2, enable_stable_row_ids=stable)
    dataset.create_scalar_index("id", kind, name="by_id")
    lance.dataset(uri).delete("id = 0")
    return uri


def tree_ids(uri: str) -> list[int]:
    [entry] = entries(newest(uri))
    path = f"{uri}/_indices/{UUID(bytes=entry.uuid.uuid)}/page_data.lance"
    ids: list[int] = LanceFileReader(path).read_all().to_table()["ids"].to_pylist()
    return ids


@pytest.mark.parametrize("stable", [False, True])
def test_a_tree_has_addresses_and_says_so_where_rows_have_ids(tmp_path: Path, stable: bool) -> None:
    """Version 1 on tables with stable row ids: releases before 14 know 0 only, whose content is row ids there."""
    uri = make(tmp_path, "BTREE", stable=stable)
    assert index_versions(uri) == {"by_id": int(stable)}
    assert max(tree_ids(uri)) == (1 << 32) + ROWS // 2 - 1


def test_an_update_makes_a_tree_of_row_ids_one_of_addresses(tmp_path: Path) -> None:
    """For us: `catchup` refuses it while older releases write the table. A compaction does not do it."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(ROWS)}), uri, enable_stable_row_ids=True)
    lance.dataset(uri).create_scalar_index("id", "BTREE", name="by_id")
    with_index_version(uri, "by_id", 0)  # in the first fragment, row ids and addresses are the same numbers
    lance.write_dataset(pa.table({"id": range(ROWS, 2 * ROWS)}), uri, mode="append")
    lance.dataset(uri).delete("id < 100")
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=ROWS)
    assert index_versions(uri) == {"by_id": 0}
    assert lance.dataset(uri).count_rows(f"id = {ROWS - 1}") == 1
    lance.dataset(uri).optimize.optimize_indices()
    assert index_versions(uri) == {"by_id": 1}
    assert min(tree_ids(uri)) >= 1 << 32
    assert lance.dataset(uri).count_rows(f"id = {ROWS - 1}") == 1


@pytest.mark.parametrize("kind", ["BTREE", "ZONEMAP", "BLOOMFILTER"])
def test_what_an_index_claims_and_does_not_have_is_not_found(tmp_path: Path, kind: str) -> None:
    """Its claim is believed by queries, by `merge_insert`, which doubles the key, and by `optimize_indices`."""
    uri = make(tmp_path, kind, stable=True)
    compact_and_leave(uri, "by_id")
    assert lance.dataset(uri).count_rows("id = 7") == 0
    lance.dataset(uri).optimize.optimize_indices()
    assert lance.dataset(uri).count_rows("id = 7") == 0
    if kind == "BTREE":
        changed = pa.table({"id": [7], "v": [1]})
        upsert = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        assert upsert.execute(changed)["num_inserted_rows"] == 1
        assert lance.dataset(uri).to_table()["id"].to_pylist().count(7) == 2


@pytest.mark.parametrize("kind", ["BTREE", "ZONEMAP", "BLOOMFILTER"])
@pytest.mark.parametrize("stable", [False, True])
def test_its_own_compaction_leaves_no_such_index(tmp_path: Path, kind: str, stable: bool) -> None:
    uri = make(tmp_path, kind, stable=stable)
    lance.dataset(uri).optimize.compact_files()
    assert [lance.dataset(uri).count_rows(f"id = {number}") for number in (0, 7, ROWS - 1)] == [0, 1, 1]
