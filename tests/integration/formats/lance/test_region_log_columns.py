"""Rows in a region's log keep the columns that they were written with, until they are flushed, and after."""

from __future__ import annotations

import time
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.memwal import create_mem_wal, read
from tests.integration.formats.lance.log.test_region_writer import SCHEMA, writer
from tests.support.tables.reading import read_base


@pytest.mark.parametrize("name", ["note", "email"])
@pytest.mark.parametrize("by", ["the next writer", "its writer"])
def test_an_id_that_was_given_away_before_the_log_was_flushed(tmp_path: Path, name: str, by: str) -> None:
    """Lance gives a dropped column's id to the next one where no data file holds it: also the log's rows are old."""
    uri = str(tmp_path / "t.lance")
    noted = pa.schema([SCHEMA.field("id"), pa.field("note", pa.string())])
    lance.write_dataset(noted.empty_table(), uri)
    create_mem_wal(uri)
    one = writer(uri)
    one.put(pa.table({"id": [1, 2], "note": ["private", "private"]}, schema=noted))
    time.sleep(0.05)  # files have a coarser clock
    lance.dataset(uri).drop_columns(["note"])
    lance.dataset(uri).add_columns(pa.field(name, pa.string()))
    assert [field.id() for field in lance.dataset(uri).lance_schema.fields()] == [0, 1], "the premise"
    if by == "its writer":
        one.flush()
    with writer(uri) as two:
        two.put(
            pa.table({"id": [2, 3], name: ["new", "new"]}, schema=pa.schema([noted[0], pa.field(name, pa.string())]))
        )
    assert run_job(uri, "merge").decision == "merged"
    assert {key: row[name] for (key,), row in read_base(uri).items()} == {1: None, 2: "new", 3: "new"}


def test_a_log_with_values_of_another_type_is_refused(tmp_path: Path) -> None:
    """They would be converted, although they are of a column that was dropped."""
    uri = str(tmp_path / "t.lance")
    numbered = pa.schema([SCHEMA.field("id"), pa.field("n", pa.string())])
    lance.write_dataset(numbered.empty_table(), uri)
    create_mem_wal(uri)
    one = writer(uri)
    one.put(pa.table({"id": [1], "n": ["5"]}, schema=numbered))
    lance.dataset(uri).drop_columns(["n"])
    lance.dataset(uri).add_columns(pa.field("n", pa.float64()))
    for reader in (read(uri), read(uri, writer=one)):
        with pytest.raises(UnsupportedFeatureError):
            reader.scan().to_table()
