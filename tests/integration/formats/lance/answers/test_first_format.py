"""Files of Lance's first format ("legacy"): pylance returns no row addresses by indexes of such data files.

Releases up to 0.20 wrote files of indexes so, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.indexes.base_indexes import open_index_file
from memwal_ops.formats.lance.wire.lance_file import is_first_format
from memwal_ops.storage.catalogs import resolve

if TYPE_CHECKING:
    from pathlib import Path

INDEXES = {"BTREE": "id", "BITMAP": "word", "LABEL_LIST": "labels", "NGRAM": "word", "ZONEMAP": "id",
           "BLOOMFILTER": "word", "INVERTED": "text"}  # fmt: skip


def _rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "word": [f"word{one % 7}" for one in ids],
            "text": [f"some text of word{one % 7}" for one in ids],
            "labels": [[f"a{one % 3}"] for one in ids],
            "vector": pa.array([[float(one % 50), one % 70, 1.0, 2.0] for one in ids], pa.list_(pa.float32(), 4)),
        }
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stable", [False, True])
def test_indexes_on_data_files_of_the_first_format_are_caught_up_and_not_reported(tmp_path: Path, stable: bool) -> None:
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(
        _rows(0, 300), uri, data_storage_version="legacy", enable_stable_row_ids=stable, max_rows_per_file=100
    )
    for kind, column in INDEXES.items():
        dataset.create_scalar_index(column, kind, name=kind)
    dataset.create_index("vector", "IVF_FLAT", name="VECTOR", num_partitions=2)
    lance.write_dataset(_rows(300, 50), uri, mode="append")
    assert run_job(uri, "catchup").decision == "caught_up"
    report = run_job(uri, "verify", answers=True)
    assert report.decision == "healthy", report.describe()
    assert [one.index for one in report.answers] == sorted([*INDEXES, "VECTOR"])
    assert {one.skipped for one in report.answers} == {
        "pylance has no row addresses for answers from data files of Lance's first format"
    }
    assert run_job(uri, "compact", tier_factor=1).decision == "compacted"
    assert run_job(uri, "verify", answers=True).decision == "healthy"


def test_a_file_of_the_first_format_is_recognized(tmp_path: Path) -> None:
    for version, is_first in (("legacy", True), ("2.0", False), ("2.2", False)):
        uri = str(tmp_path / version)
        lance.write_dataset(_rows(0, 3), uri, data_storage_version=version)
        [file] = (tmp_path / version / "data").iterdir()
        data = file.read_bytes()
        assert is_first_format(data[-64:], len(data)) is is_first
        assert not is_first_format(data[-64:-1], len(data) - 1)
        if is_first:
            with pytest.raises(UnsupportedFeatureError, match="first format") as raised:
                open_index_file(resolve(uri), str(file))
            assert "Create it again" in raised.value.remedy
        else:
            assert open_index_file(resolve(uri), str(file)).num_rows() == 3
            older = data[:-8] + bytes(2) + data[-6:]
            assert not is_first_format(older[-64:], len(older)), "a wrong byte in the version does not make it one"
