"""Rows in a region's log keep the columns that they were written with, until they are flushed, and after."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import SchemaProjectionError
from memwal_ops.memwal import RegionWriter, create_mem_wal, read
from tests.integration.formats.lance.log.test_region_writer import REGION, SCHEMA, writer
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


def test_values_of_another_type_in_a_log(tmp_path: Path) -> None:
    """They are not converted: they are of a column that was dropped."""
    uri = str(tmp_path / "t.lance")
    numbered = pa.schema([SCHEMA.field("id"), pa.field("n", pa.string())])
    lance.write_dataset(numbered.empty_table(), uri)
    create_mem_wal(uri)
    one = writer(uri)
    one.put(pa.table({"id": [1], "n": ["5"]}, schema=numbered))
    lance.dataset(uri).drop_columns(["n"])
    lance.dataset(uri).add_columns(pa.field("n", pa.float64()))
    for reader in (read(uri), read(uri, writer=one)):
        assert reader.scan().to_table().to_pylist() == [{"id": 1, "n": None}]


CHANGES = {
    "added": lambda base: base.add_columns(pa.field("x", pa.int64())),
    "dropped": lambda base: base.drop_columns(["v"]),
    "renamed": lambda base: base.alter_columns({"path": "v", "name": "w"}),
    "again": lambda base: (base.drop_columns(["note"]), base.add_columns(pa.field("note", pa.string()))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", ["region", "shard"])
def test_strong_reads_beside_writers_that_run_on(tmp_path: Path, layout: str, change: str) -> None:
    """Each writer has the columns of the version that it opened; a read has the table's of now."""
    uri = str(tmp_path / "t.lance")
    kind = pa.schema([SCHEMA.field("id"), pa.field("v", pa.int64()), pa.field("note", pa.string())])

    def rows(key: int) -> pa.Table:
        return pa.table({"id": [key], "v": [10 * key], "note": ["n"]}, schema=kind)

    lance.write_dataset(pa.table({"id": [0], "v": [0], "note": [None]}, schema=kind), uri)
    (create_mem_wal(uri) if layout == "region" else lance.dataset(uri).initialize_mem_wal())
    one: Any = RegionWriter(uri, REGION) if layout == "region" else lance.dataset(uri).mem_wal_writer(str(REGION))
    one.put(rows(1))
    time.sleep(0.05)  # files have a coarser clock
    CHANGES[change](lance.dataset(uri))
    expected = {
        key: {
            name: value
            for name, value in (("id", key), ("v", 10 * key), ("w", 10 * key), ("note", note), ("x", None))
            if name in lance.dataset(uri).schema.names
        }
        for key, note in ((0, None), (1, "n"), (2, "n"))
    }
    if change == "again":
        expected[1]["note"] = expected[2]["note"] = None  # the writer has the column that was dropped
    one.put(rows(2))
    readers = [read(uri)] + ([read(uri, writer=one)] if layout == "region" else [])
    for reader in readers:
        found = {row["id"]: row for row in reader.scan().to_table().to_pylist()}
        got = {row["id"]: row for row in reader.get([0, 1, 2]).to_pylist()}
        assert found == got == expected
    one.close()


@pytest.mark.parametrize("times", [True, False], ids=["with file times", "without"])
@pytest.mark.parametrize("flushed", [False, True], ids=["log", "generation"])
@pytest.mark.parametrize("recorded", [True, False], ids=["version recorded", "older release"])
def test_a_copy_brings_no_dropped_values_back(tmp_path: Path, times: bool, flushed: bool, recorded: bool) -> None:
    """A copy may have other file times, and a bucket always has: then only what is inside files decides."""
    uri = str(tmp_path / "t.lance")
    kind = pa.schema([SCHEMA.field("id"), pa.field("note", pa.string())])
    lance.write_dataset(kind.empty_table(), uri)
    create_mem_wal(uri)
    one = RegionWriter(uri, REGION)
    if not recorded:
        forget_opened(one)
    one.put(pa.table({"id": [1], "note": ["dropped"]}, schema=kind))
    if flushed:
        one.flush()
    time.sleep(0.05)  # files have a coarser clock
    lance.dataset(uri).drop_columns(["note"])
    lance.dataset(uri).add_columns(pa.field("note", pa.string()))
    if not times:
        time.sleep(0 if recorded else 1.1)  # nothing but the difference to the times inside shows a copy
        now = time.time()
        for path in Path(uri).rglob("*"):
            copied = now - (0 if "_mem_wal" in path.parts else 0.01)
            os.utime(path, (copied, copied))
    if recorded or times:
        assert read(uri).scan().to_table().to_pylist() == [{"id": 1, "note": None}]
        RegionWriter(uri, REGION).close()
        merged = run_job(uri, "merge")
        assert merged.decision == "merged", merged.describe()
        assert {key: row["note"] for (key,), row in read_base(uri).items()} == {1: None}
        return
    with pytest.raises(SchemaProjectionError, match=f"region {REGION}.*Cannot match the columns 'note'"):
        read(uri).scan().to_table()
    RegionWriter(uri, REGION).close()
    assert run_job(uri, "merge").decision == "blocked"


def forget_opened(one: RegionWriter) -> None:
    """Let a writer record what those of older releases did."""
    one._columns = one._memtable._columns = replace(one._columns, opened=None)
