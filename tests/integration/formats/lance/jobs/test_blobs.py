"""Blob columns, wherever their bytes lie: a merge and a compaction change none of them."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from lance.blob import BlobType

from memwal_ops import open_table
from memwal_ops.errors import StorageError
from memwal_ops.formats.lance.engines.merge import passes
from memwal_ops.formats.lance.jobs import expire, merge as merge_job
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.spark import bulk_load, register
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import run_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine

KEY = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
REGION = "00000000-0000-4000-8000-000000000001"
OUTSIDE = b"bytes of a file that the user keeps"
WRITE = {"data_storage_version": "2.2", "allow_external_blob_outside_bases": True}
LEGACY = pa.field("x", pa.large_binary(), metadata={"lance-encoding:blob": "true"})

Blobs = list[lance.Blob | bytes | None]


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    """Inline, empty, null, packed, dedicated; a file outside as a whole and a range of it; one that is not there."""
    (tmp_path / "outside").write_bytes(OUTSIDE)
    outside = f"file://{tmp_path}/outside"
    return [
        b"inline",
        b"",
        None,
        b"packed" * 30_000,
        b"dedicated" * 600_000,
        lance.Blob.from_uri(outside),
        lance.Blob.from_uri(outside, 9, 11),
    ]


def column(values: Sequence[Any]) -> pa.Array:
    return lance.blob_array(list(values))


def in_struct(values: Sequence[Any]) -> pa.Array:
    inner = pa.struct([lance.blob_field("blob"), pa.field("n", pa.int32())])
    children = [lance.blob_array(list(values)), pa.array(range(len(values)), pa.int32())]
    return pa.StructArray.from_arrays(
        children, fields=list(inner), mask=pa.array([n % 5 == 4 for n in range(len(values))])
    )


def in_list(values: Sequence[Any]) -> pa.Array:
    """Each value with its successor; none, and null, in turn."""
    items: list[Any] = []
    offsets, mask = [0], []
    for place, value in enumerate(values):
        if place % 4 < 2:
            items += [value, values[(place + 1) % len(values)]]
        offsets.append(len(items))
        mask.append(place % 4 == 2)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), lance.blob_array(items), mask=pa.array(mask))


def in_list_of_struct(values: Sequence[Any]) -> pa.Array:
    structs = in_struct(values)
    return pa.LargeListArray.from_arrays(pa.array(range(len(values) + 1), pa.int64()), structs)


SHAPES = {"column": column, "struct": in_struct, "list": in_list, "list of struct": in_list_of_struct}


def rows(numbers: range, values: Sequence[Any], shape: Callable[..., pa.Array] = column) -> pa.Table:
    array = shape([values[number % len(values)] for number in numbers])
    field = lance.blob_field("x") if array.type == BlobType() else pa.field("x", array.type)
    return pa.table({"id": pa.array(numbers, pa.int64()), "x": array}, schema=pa.schema([KEY, field]))


def made(path: Path, base: pa.Table, *generations: pa.Table, **options: Any) -> str:
    uri = str(path / "t.lance")
    lance.write_dataset(base, uri, **(WRITE | options)).initialize_mem_wal()
    for one in generations:
        with lance.dataset(uri).mem_wal_writer(REGION) as writer:
            writer.put(one)
            writer.delete(pa.table({"id": pa.array([0], pa.int64())}))
    return uri


def read(uri: str) -> dict[int, Any]:
    """All bytes by key, those of files outside too."""
    table = lance.dataset(uri).scanner(blob_handling="all_binary").to_table()
    assert len(set(table["id"].to_pylist())) == table.num_rows
    return {row["id"]: row["x"] for row in table.to_pylist()}


def as_bytes(path: Path, table: pa.Table) -> dict[int, Any]:
    """The same of rows that were never in a table with MemWAL, by pylance alone."""
    uri = str(path / f"{uuid.uuid4()}.lance")
    lance.write_dataset(table, uri, **WRITE)
    return read(uri)


def kinds(uri: str) -> dict[int, int | None]:
    table = lance.dataset(uri).to_table().to_pylist()
    return {row["id"]: None if row["x"] is None else row["x"]["kind"] for row in table}


def merge(uri: str, engine: MergeEngine | None = None, **options: Any) -> merge_job.MergeReport:
    report = merge_job.apply(open_table(uri), merge_job.MergeOptions(**options), engine=engine)
    assert report.decision == "merged", [one.to_json() for one in report.blocked]
    return report


@pytest.mark.sampled(1)
@pytest.mark.req("S3-021", "S3-035")
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("shape", SHAPES)
def test_merged_and_compacted(
    tmp_path: Path, blobs: Blobs, shape: str, stable: bool, engine: MergeEngine | None
) -> None:
    base, first = rows(range(14), blobs, SHAPES[shape]), rows(range(7, 21), blobs[1:], SHAPES[shape])
    second = rows(range(20, 30), blobs[2:], SHAPES[shape])
    expected = as_bytes(tmp_path, base) | as_bytes(tmp_path, first) | as_bytes(tmp_path, second)
    del expected[0]
    uri = made(tmp_path, base, first, second, enable_stable_row_ids=stable)
    merge(uri, engine)
    assert read(uri) == expected
    assert compact.apply(open_table(uri), compact.CompactOptions()).decision == "compacted"
    assert read(uri) == expected
    expire.apply(open_table(uri), expire.ExpireOptions(timedelta(0), allow_unsafe=True))
    assert read(uri) == expected, "the clean-up of the versions before took no blob along"


def test_where_bytes_lie_stays(tmp_path: Path, blobs: Blobs, engine: MergeEngine | None) -> None:
    missing = lance.Blob.from_uri("file:///nowhere/at/all", 3, 4)
    uri = made(tmp_path, rows(range(1, 2), blobs), rows(range(7), blobs), rows(range(7, 8), [missing]))
    (generation,) = (tmp_path / "t.lance" / "_mem_wal" / REGION).glob("*_gen_1")
    before = kinds(str(generation)) | {7: 3}
    del before[0]
    merge(uri, engine)
    assert kinds(uri) == before
    assert set(before.values()) == {None, 0, 1, 2, 3}
    found = {row["id"]: row["x"] for row in lance.dataset(uri).to_table().to_pylist()}
    assert found[7]["blob_uri"] == "file:///nowhere/at/all", "it was never opened"
    assert (found[7]["position"], found[7]["size"]) == (3, 4)


@pytest.mark.long
def test_a_budget_below_one_blob(tmp_path: Path, blobs: Blobs) -> None:
    added = rows(range(200), [*blobs, *[b"x" * 3000] * 20], in_list)
    uri = made(tmp_path, rows(range(1), blobs, in_list), added)
    merge(uri, max_bytes=1 << 20)
    expected = as_bytes(tmp_path, added)
    del expected[0]
    assert read(uri) == expected


def test_a_base_whose_first_writer_had_no_ranges(tmp_path: Path, blobs: Blobs, engine: MergeEngine | None) -> None:
    """pylance names two storages one type."""
    small = BlobType._from_storage_type(pa.struct([pa.field("data", pa.large_binary()), pa.field("uri", pa.utf8())]))

    def few(numbers: range) -> pa.Table:
        outside = {"data": None, "uri": blobs[5].uri}
        values = [*(None if blob is None else {"data": blob, "uri": None} for blob in blobs[:5]), outside]
        storage = pa.array([values[number % 6] for number in numbers], small.storage_type)
        schema = pa.schema([KEY, pa.field("x", small)])
        return pa.table({"id": numbers, "x": pa.ExtensionArray.from_storage(small, storage)}, schema=schema)

    uri = made(tmp_path, few(range(100, 101)), few(range(6)))
    expected = as_bytes(tmp_path, few(range(6))) | as_bytes(tmp_path, few(range(100, 101)))
    del expected[0]
    merge(uri, engine)
    assert read(uri) == expected


def test_a_storage_base_of_the_table(tmp_path: Path, engine: MergeEngine | None) -> None:
    bases = [lance.DatasetBasePath(str(tmp_path / "files"), name="files", is_dataset_root=False)]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_bytes(OUTSIDE)
    values = [
        lance.Blob.from_uri(f"file://{tmp_path}/files/one"),
        lance.Blob.from_uri(f"file://{tmp_path}/files/one", 1, 2),
    ]
    uri = made(
        tmp_path,
        rows(range(2), values),
        rows(range(1, 5), values),
        initial_bases=bases,
        allow_external_blob_outside_bases=False,
    )
    merge(uri, engine)
    assert read(uri) == {1: OUTSIDE[1:3], 2: OUTSIDE, 3: OUTSIDE[1:3], 4: OUTSIDE}
    assert {row["x"]["blob_uri"] for row in lance.dataset(uri).to_table().to_pylist()} == {"one"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("release", ["2.0", "2.1"])
def test_the_older_blobs(tmp_path: Path, release: str, engine: MergeEngine | None) -> None:
    values = [b"a", None, b"", b"b" * 100_000, b"c" * 5_000_000]

    def some(numbers: range) -> pa.Table:
        chosen = [values[number % 5] for number in numbers]
        return pa.table({"id": numbers, "x": pa.array(chosen, pa.large_binary())}, schema=pa.schema([KEY, LEGACY]))

    uri = made(tmp_path, some(range(10)), some(range(5, 23)), data_storage_version=release)
    (generation,) = (tmp_path / "t.lance" / "_mem_wal" / REGION).glob("*_gen_1")
    expected = read(uri) | read(str(generation))
    del expected[0]
    assert {number: one or None for number, one in expected.items()} == {
        number: values[number % 5] or None for number in range(1, 23)
    }
    merge(uri, engine)
    assert read(uri) == expected


def test_columns_that_changed_since(tmp_path: Path, blobs: Blobs, engine: MergeEngine | None) -> None:
    added = rows(range(7), blobs, in_struct)
    uri = made(tmp_path, rows(range(1, 2), blobs, in_struct), added)
    lance.dataset(uri).alter_columns({"path": "x.blob", "name": "renamed"})
    lance.dataset(uri).add_columns(lance.blob_field("later"))
    expected = as_bytes(tmp_path, added)
    del expected[0]
    merge(uri, engine)
    assert read(uri) == {
        number: None if one is None else {"renamed": one["blob"], "n": one["n"]} for number, one in expected.items()
    }
    assert {row["later"] for row in lance.dataset(uri).to_table().to_pylist()} == {None}


def test_a_commit_that_fails_takes_its_blobs_away(
    tmp_path: Path, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = made(tmp_path, rows(range(1, 2), blobs), rows(range(7), blobs))

    def files() -> set[Path]:
        return {path for path in (tmp_path / "t.lance" / "data").rglob("*") if path.is_file()}

    before = files()

    def fail(*_: Any, **__: Any) -> int:
        assert {path.suffix for path in files() - before} == {".lance", ".blob"}
        raise StorageError("the disk is full")

    monkeypatch.setattr(passes, "commit_strict", fail)
    with pytest.raises(StorageError):
        merge_job.apply(open_table(uri), merge_job.MergeOptions())
    assert files() == before


@pytest.mark.long
def test_all_jobs_of_a_table_with_blobs(tmp_path: Path, blobs: Blobs) -> None:
    uri = made(tmp_path, rows(range(1, 2), blobs), rows(range(7), blobs), rows(range(7), blobs[2:]))
    done = run_process("maintain", uri, "--apply", "--json")
    assert done.code == 0, done.err
    report = gc.apply(open_table(uri), IMMEDIATE)
    assert not report.faults
    assert report.decision in {"deleted", "drained"}
    assert len(read(uri)) == 6


@pytest.mark.long
def test_read_and_loaded_in_spark(tmp_path: Path, blobs: Blobs, spark: Any) -> None:
    base, added = rows(range(7), blobs), rows(range(5, 12), blobs[1:])
    expected = as_bytes(tmp_path, base) | as_bytes(tmp_path, added) | {20: b"loaded", 21: b"", 22: None}
    uri = made(tmp_path, base, added)
    del expected[0]
    bulk_load(spark.createDataFrame([(20, b"loaded"), (21, b""), (22, None)], "id bigint, x binary"), uri)
    register(spark)
    found = spark.read.format("memwal").load(uri).collect()
    assert {row["id"]: None if row["x"] is None else bytes(row["x"]) for row in found} == expected
