"""erase on S3: of a table with a log, killed and run again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.jobs.erase import job
from memwal_ops.formats.lance.options import EraseOptions
from tests.support.dying_store import DyingStore, Killed
from tests.support.tables import patterns

GONE = [5, 25]
WHERE = "id IN (5, 25)"


def holders(table: Any) -> set[str]:
    wanted = [one for number in GONE for one in patterns.patterns(number).values()]
    return {meta.path for meta in table.store.list() if any(one in table.store.get(meta.path) for one in wanted)}


@pytest.mark.long
@pytest.mark.parametrize("calls", [pytest.param(40, marks=pytest.mark.campaign), 110])
def test_a_table_with_a_log(bucket: tuple[str, dict[str, str]], calls: int) -> None:
    root, options = bucket
    uri = f"{root}/t.lance"
    lance.write_dataset(patterns.rows(range(20), blobs=False), uri, storage_options=options)
    lance.dataset(uri, storage_options=options).create_scalar_index("btree", "BTREE")
    lance.dataset(uri, storage_options=options).initialize_mem_wal()
    with lance.dataset(uri, storage_options=options).mem_wal_writer("00000000-0000-4000-8000-000000000001") as writer:
        writer.put(patterns.rows(range(20, 30), blobs=False))
    table: Any = open_table(uri, options)
    assert holders(table)
    store = DyingStore(table.store, calls, after=True)
    now = EraseOptions(where=WHERE, older_than=timedelta(0), allow_unsafe=True)
    with pytest.raises(Killed):
        job.apply(replace(table, store=store), now)
    for _ in range(4):
        report = run_job(uri, "erase", options=now, apply=True, storage_options=options)
    assert {one.kind for one in report.holders} <= {"leftover"}, report.describe()
    left = {one.name for one in report.holders}
    assert holders(table) <= left
    found = lance.dataset(uri, storage_options=options).to_table(columns=["id"]).column("id").to_pylist()
    assert sorted(found) == [number for number in range(30) if number not in GONE]
