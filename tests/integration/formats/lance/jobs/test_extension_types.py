"""Extension types, and others that few tables have: a merge, a compaction and gc leave type and values alone."""

from __future__ import annotations

import decimal
import json
import uuid
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.arrow import EncodedImageType, FixedShapeImageTensorType, ImageURIType, bfloat16_array
from lance.file import LanceFileReader

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.memwal import RegionWriter, create_mem_wal, read
from tests.support.gc_options import IMMEDIATE

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine

KEY = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
REGION = "00000000-0000-4000-8000-000000000001"


class Celsius(pa.ExtensionType):
    """A user-defined type, with a parameter."""

    def __init__(self) -> None:
        super().__init__(pa.float32(), "example.org.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps({"scale": 1}).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Celsius:
        del storage_type, serialized
        return cls()


def extension(kind: pa.ExtensionType, storage: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(storage, kind.storage_type))


POINT = pa.struct([pa.field("x", pa.float64(), nullable=False), pa.field("y", pa.float64(), nullable=False)])
LINE = [{"x": 1.0, "y": 2.0}, {"x": 3.0, "y": 4.0}]
UUIDS = [uuid.UUID(int=1).bytes, None, uuid.UUID(int=2**128 - 1).bytes]
TENSOR = pa.fixed_shape_tensor(pa.float32(), [2, 3])
COLUMNS: dict[str, tuple[pa.Array, dict[str, str]]] = {
    "uuid": (extension(pa.uuid(), UUIDS), {}),
    "bool8": (extension(pa.bool8(), [1, 0, None]), {}),
    "opaque": (extension(pa.opaque(pa.binary(), "thing", "vendor"), [b"a", None, b""]), {}),
    "tensor": (extension(TENSOR, [[1.0] * 6, None, [2.0] * 6]), {}),
    "bfloat16": (bfloat16_array([1.5, None, -2.0]), {}),
    "image uri": (extension(ImageURIType(), ["s3://a/b.png", None, ""]), {}),
    "encoded image": (extension(EncodedImageType(), [b"\x89PNG", None, b""]), {}),
    "image": (extension(FixedShapeImageTensorType(pa.uint8(), [2, 2, 1]), [[1, 2, 3, 4], None, [0] * 4]), {}),
    "somebody's own": (extension(Celsius(), [21.5, None, -3.0]), {}),
    "geoarrow by metadata": (
        pa.array([LINE, None, []], pa.list_(POINT)),
        {"ARROW:extension:name": "geoarrow.linestring", "ARROW:extension:metadata": '{"crs": "EPSG:4326"}'},
    ),
    "unknown by metadata": (
        pa.array([b"\x01", None, b""], pa.binary()),
        {"ARROW:extension:name": "example.org.unknown", "ARROW:extension:metadata": "parameters"},
    ),
    "uuid in a struct": (
        pa.StructArray.from_arrays([extension(pa.uuid(), UUIDS), pa.array([1, 2, 3])], names=["u", "n"]),
        {},
    ),
    "dictionary": (pa.array(["a", None, "b"]).dictionary_encode(), {}),
    "dictionary of numbers": (pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int16()), pa.array([7, 9])), {}),
    "large binary": (pa.array([b"x" * 100_000, None, b""], pa.large_binary()), {}),
    "large string": (pa.array(["é" * 10_000, None, ""], pa.large_string()), {}),
    "null": (pa.nulls(3), {}),
    "big decimal": (pa.array([decimal.Decimal(10) ** 60, None, decimal.Decimal(-1)], pa.decimal256(70, 2)), {}),
    "nanoseconds": (pa.array([2**62 + 1, None, -1], pa.timestamp("ns", "Europe/Berlin")), {}),
    "half vector": (pa.array([np.ones(2, np.float16), None, np.zeros(2, np.float16)], pa.list_(pa.float16(), 2)), {}),
    "vector of bytes": (pa.array([[1, 2], None, [255, 0]], pa.list_(pa.uint8(), 2)), {}),
    "list of vectors": (pa.array([[[1.0, 2.0]], None, []], pa.list_(pa.list_(pa.float32(), 2))), {}),
    "duration": (pa.array([1, None, 3], pa.duration("ns")), {}),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def celsius() -> Any:
    """The type is known in this process."""
    pa.register_extension_type(Celsius())
    yield
    pa.unregister_extension_type("example.org.celsius")


def rows(names: list[str], numbers: range) -> pa.Table:
    fields, columns = [KEY], [pa.array(numbers, pa.int64())]
    for name in names:
        array, metadata = COLUMNS[name]
        fields.append(pa.field(name, array.type, metadata=metadata or None))
        columns.append(array.take(pa.array([number % 3 for number in numbers])))
    return pa.table(columns, schema=pa.schema(fields))


def plain(dataset: lance.LanceDataset) -> dict[int, list[str]]:
    table = dataset.to_table().combine_chunks()
    columns = [column.chunk(0) for column in table.drop_columns(["id"]).columns]
    # Of the storage, as not each type can show a null.
    columns = [one.storage if isinstance(one, pa.ExtensionArray) else one for one in columns]
    values = zip(*(map(repr, one.to_pylist()) for one in columns), strict=True)
    return dict(zip(table["id"].to_pylist(), map(list, values), strict=True))


def stays(path: Path, names: list[str], engine: MergeEngine | None) -> None:
    uri = str(path / "t.lance")
    lance.write_dataset(rows(names, range(6)), uri, data_storage_version="2.2").initialize_mem_wal()
    before = lance.dataset(uri)
    for numbers in (range(4, 9), range(8, 12)):
        with lance.dataset(uri).mem_wal_writer(REGION) as writer:
            writer.put(rows(names, numbers))
            writer.delete(pa.table({"id": pa.array([0], pa.int64())}))
    alone = lance.write_dataset(rows(names, range(1, 12)), str(path / "alone.lance"), data_storage_version="2.2")
    report = merge.apply(open_table(uri), merge.MergeOptions(), engine=engine)
    assert report.decision == "merged", [one.to_json() for one in report.blocked]
    assert plain(lance.dataset(uri)) == plain(alone)
    assert lance.dataset(uri).schema.equals(before.schema, check_metadata=True)
    assert lance.dataset(uri).to_table().schema.equals(before.to_table().schema, check_metadata=True)
    assert compact.apply(open_table(uri), compact.CompactOptions()).decision == "compacted"
    assert plain(lance.dataset(uri)) == plain(alone)
    cleaned = gc.apply(open_table(uri), IMMEDIATE)
    assert not cleaned.faults


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", COLUMNS)
def test_type_and_values_stay(tmp_path: Path, name: str) -> None:
    stays(tmp_path, [name], None)


def test_all_of_them_in_one_table(tmp_path: Path, engine: MergeEngine | None) -> None:
    stays(tmp_path, list(COLUMNS), engine)


def test_json(tmp_path: Path, engine: MergeEngine | None) -> None:
    """The writer takes it in Lance's own encoding, and a scan gives text."""
    uri = str(tmp_path / "t.lance")
    texts = ['{"a":1}', None, '["b",2.5]']
    schema = pa.schema([KEY, pa.field("x", pa.json_())])
    table = pa.table([pa.array([1, 2, 3]), pa.array(texts, pa.json_())], schema=schema)
    lance.write_dataset(table, uri).initialize_mem_wal()
    (file,) = (tmp_path / "t.lance" / "data").iterdir()
    encoded = LanceFileReader(str(file)).read_all().to_table()["x"]
    encoded = encoded.cast(pa.large_binary()) if encoded.type != pa.large_binary() else encoded
    with lance.dataset(uri).mem_wal_writer(REGION) as writer:
        writer.put(pa.table({"id": pa.array([3, 4, 5], pa.int64()), "x": encoded}))
    before = lance.dataset(uri).schema
    assert merge.apply(open_table(uri), merge.MergeOptions(), engine=engine).decision == "merged"
    assert lance.dataset(uri).schema.equals(before, check_metadata=True)
    assert plain(lance.dataset(uri)) == {
        number: [repr(text)] for number, text in zip([1, 2, 3, 4, 5], [texts[0], None, *texts], strict=True)
    }


def test_json_in_the_log_of_a_region(tmp_path: Path) -> None:
    """A log has it in Lance's own encoding: a reader gets texts, also after the writer was killed."""
    uri = str(tmp_path / "t.lance")
    inner = pa.struct([pa.field("deep", pa.json_())])
    schema = pa.schema([KEY, pa.field("x", pa.json_()), pa.field("y", inner)])

    def rows(*numbers: int) -> pa.Table:
        texts = [f'{{"a":{number}}}' if number != 2 else None for number in numbers]
        deep = pa.StructArray.from_arrays([pa.array(texts, pa.json_())], fields=[*inner])
        return pa.table([pa.array(numbers, pa.int64()), pa.array(texts, pa.json_()), deep], schema=schema)

    lance.write_dataset(rows(1, 2), uri, data_storage_version="2.1")
    create_mem_wal(uri)
    log = RegionWriter(uri, REGION)
    log.put(rows(2, 3))
    log.delete(pa.table({"id": pa.array([1], pa.int64())}))
    del log
    expected = rows(2, 3).to_pylist()
    assert read(uri).scan().to_table().sort_by("id").to_pylist() == expected
    RegionWriter(uri, REGION).close()  # replays, and flushes
    assert run_job(uri, "merge").decision == "merged"
    assert lance.dataset(uri).to_table().sort_by("id").to_pylist() == expected
