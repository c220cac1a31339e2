"""Indexes whose column was changed in place: what their files have of the fragment before must not count again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.jobs.catchup.job import backlog as poll

if TYPE_CHECKING:
    from pathlib import Path

CONDITIONS = ["c IS NULL", "c IS NOT NULL", "c = 1002", "c < 20"]


def _found(uri: str, *, by_index: bool) -> list[list[int]]:
    dataset = lance.dataset(uri)
    return [
        sorted(dataset.scanner(columns=["id"], filter=one, use_scalar_index=by_index).to_table()["id"].to_pylist())
        for one in CONDITIONS
    ]


@pytest.mark.parametrize("kind", ["ZONEMAP", "BLOOMFILTER"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["as it is", "updated by another program"])
def test_zones_of_a_fragment_that_was_changed_in_place_do_not_count_again(
    tmp_path: Path, kind: str, elsewhere: bool
) -> None:
    uri = str(tmp_path / "t.lance")
    values = [None if one % 4 == 0 else one for one in range(60)]
    dataset = lance.write_dataset(pa.table({"id": range(60), "c": values}), uri, max_rows_per_file=30)
    dataset.create_scalar_index("c", kind, name="by_c")
    changed = pa.table({"id": range(30), "c": [one + 1000 if one % 5 else None for one in range(30)]})
    fragment, fields = lance.dataset(uri).get_fragments()[0].update_columns(changed, "id", "id")
    operation = lance.LanceOperation.Update(updated_fragments=[fragment], fields_modified=fields)
    lance.LanceDataset.commit(uri, operation, read_version=lance.dataset(uri).version)
    if elsewhere:
        lance.dataset(uri).optimize.optimize_indices()
        assert _found(uri, by_index=True) != _found(uri, by_index=False)
    assert poll(open_table(uri))["indexes_due"] == 1

    [planned] = run_job(uri, "catchup", apply=False).to_json()["indexes"]
    [index] = run_job(uri, "catchup", answers="off").to_json()["indexes"]
    for one in (planned, index):
        assert (one["method"], one["why"]) == ("rebuild", "its files have outdated zones of fragment 0")
    assert index["decision"] == "updated"
    assert _found(uri, by_index=True) == _found(uri, by_index=False)
    assert poll(open_table(uri))["indexes_due"] == 0
    assert run_job(uri, "verify", answers=True).decision == "healthy"

    lance.write_dataset(pa.table({"id": range(60, 80), "c": range(60, 80)}), uri, mode="append")
    [index] = run_job(uri, "catchup").to_json()["indexes"]
    assert (index["decision"], index["method"]) == ("updated", "update")
    assert _found(uri, by_index=True) == _found(uri, by_index=False)
