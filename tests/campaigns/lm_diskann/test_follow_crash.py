"""A catch-up with a table, ended at each durable step while the table goes on: it ends with the table's rows."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.source import Source
from memwal_ops.formats.lm_diskann.table import create
from tests.campaigns.lm_diskann.test_sweep_crash import run
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_sound

if TYPE_CHECKING:
    from pathlib import Path


def data(ids: np.ndarray, vectors: np.ndarray) -> pa.Table:
    flat = pa.array(vectors.astype(np.float32).ravel())
    return pa.table({"id": pa.array(ids), "vec": pa.FixedSizeListArray.from_arrays(flat, 16)})


@pytest.mark.parametrize("key", ["id", None])
def test_ended_at_each_step_and_the_table_goes_on(
    folder: str, tmp_path: Path, vectors: np.ndarray, key: str | None
) -> None:
    uri = str(tmp_path / "rows.lance")
    lance.write_dataset(data(np.arange(1100), vectors[:1100]), uri, enable_stable_row_ids=True, max_rows_per_file=400)
    create(folder, dimension=16, R=8, L=30, follows=Source(uri, "vec", key))
    assert run(folder, "catchup")[0] is not None
    lance.dataset(uri).delete("id < 90")
    lance.write_dataset(data(np.arange(5000, 5100), vectors[2000:2100]), uri, mode="append")
    backups = {path: f"{path}.backup" for path in (folder, uri)}
    for path, backup in backups.items():
        shutil.copytree(path, backup)
    _, steps = run(folder, "catchup", max_rows=40)
    for last in range(0, steps.count, 2):
        for path, backup in backups.items():
            shutil.rmtree(path)
            shutil.copytree(backup, path)
        assert run(folder, "catchup", last, max_rows=40)[0] is None
        lance.dataset(uri).delete("id >= 5050")  # rows that the killed run may have inserted
        report, _ = run(folder, "catchup", max_rows=40)
        assert report is not None
        table = lance.dataset(uri)
        rows = table.scanner(with_row_id=True).to_table().to_pylist()
        view = View(folder)
        assert view.followed == table.version
        assert view.live_rows() == {one[key or "_rowid"]: tuple(one["vec"]) for one in rows}, last
    check_sound(folder)
    with lm_diskann.open(folder) as index:
        assert len(index) == len(rows)
