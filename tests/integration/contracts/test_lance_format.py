"""What we rely on in Lance's table format: each statement is read from the bytes that pylance writes."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from pyroaring import BitMap

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, decode_version_manifest
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

_U64 = 2**64 - 1


def rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    vectors = np.arange(count * 4, dtype=np.float32)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "kind": [f"k{number % 3}" for number in numbers],
            "vec": pa.FixedSizeListArray.from_arrays(vectors, 4),
        }
    )


def manifest_of(uri: str, version: int) -> VersionManifest:
    return decode_version_manifest(Path(uri, "_versions", f"{_U64 - version:020}.manifest").read_bytes())


def newest(uri: str) -> pb.Manifest:
    return manifest_of(uri, lance.dataset(uri).version).manifest


def varints(data: bytes) -> Iterator[int]:
    """The unsigned numbers of the varints that some bytes consist of."""
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0


@pytest.fixture
def uri(tmp_path: Path) -> str:
    path = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, 20), path, max_rows_per_file=10)
    return path


@pytest.mark.req("S3-001", "S3-002", "S3-005", "S3-006", "S3-008", "S3-010", "S3-018")
def test_a_version_is_a_manifest(uri: str) -> None:
    lance.write_dataset(rows(20, 5), uri, mode="append")
    dataset = lance.dataset(uri)
    dataset.create_scalar_index("id", "BTREE")
    lance.dataset(uri).delete("id = 3")
    folders = {one.name for one in Path(uri).iterdir() if one.is_dir()}
    assert {"data", "_versions", "_indices", "_deletions"} <= folders
    assert all(one.suffix == ".lance" for one in Path(uri, "data").iterdir())
    assert len(list(Path(uri, "_indices").iterdir())) == 1
    versions = [one["version"] for one in lance.dataset(uri).versions()]
    assert versions == [1, 2, 3, 4]
    assert len(list(Path(uri, "_versions").glob("*.manifest"))) == 4
    for version, fragments in zip(versions, [2, 3, 3, 3], strict=True):
        found = manifest_of(uri, version).manifest
        assert found.version == version
        assert [one.id for one in found.fragments] == [*range(fragments)]
        assert found.writer_version.library == "lance"
        assert re.fullmatch(r"\d+\.\d+\.\d+.*", found.writer_version.version)
        assert abs(found.timestamp.ToNanoseconds() / 1e9 - time.time()) < 600
        assert found.data_format.file_format == "lance"
        kinds = {f"{file.file_major_version}.{file.file_minor_version}" for f in found.fragments for file in f.files}
        assert kinds == {found.data_format.version}


@pytest.mark.req("S3-007", "S3-009")
def test_sections_of_a_manifest_file(uri: str) -> None:
    assert manifest_of(uri, 1).indexes is None
    assert not manifest_of(uri, 1).manifest.HasField("index_section")
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    found = manifest_of(uri, 2)
    assert found.indexes is not None
    assert [one.name for one in found.indexes.indices] == ["id_idx"]
    assert found.manifest.version_aux_data == 0, "a version with auxiliary data cannot be rewritten"


@pytest.mark.req("S3-003", "S3-032")
def test_fields_in_depth_first_order(tmp_path: Path) -> None:
    path = str(tmp_path / "t.lance")
    kind = pa.struct([pa.field("c", pa.list_(pa.int32())), pa.field("d", pa.float64(), nullable=False)])
    schema = pa.schema([pa.field("a", pa.int32(), nullable=False), pa.field("b", kind)])
    lance.write_dataset(
        pa.table({"a": pa.array([1], pa.int32()), "b": pa.array([{"c": [1], "d": 2.0}], kind)}, schema), path
    )
    fields = newest(path).fields
    assert [one.id for one in fields] == [0, 1, 2, 3, 4]
    assert [one.parent_id for one in fields] == [-1, -1, 1, 2, 1]
    assert [one.name for one in fields] == ["a", "b", "c", "item", "d"]
    assert [one.logical_type for one in fields] == ["int32", "struct", "list", "int32", "double"]
    assert [one.nullable for one in fields] == [False, True, True, True, False]


@pytest.mark.req("S3-004", "S3-014", "S3-019", "S3-020")
def test_three_kinds_of_metadata(tmp_path: Path) -> None:
    path = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, 5).replace_schema_metadata({"of": "the schema"}), path)
    lance.dataset(path).update_config({"of": "the configuration"})
    lance.dataset(path).update_metadata({"of": "the table"})
    found = newest(path)
    assert found.schema_metadata["of"] == b"the schema"
    assert found.config["of"] == "the configuration"
    assert found.table_metadata["of"] == "the table"
    assert found.reader_feature_flags == 0
    assert found.writer_feature_flags & 8


@pytest.mark.req("S3-015", "S3-024", "S3-025", "S3-031")
def test_operations_on_fragments(uri: str) -> None:
    assert newest(uri).max_fragment_id == 1
    lance.write_dataset(rows(20, 5), uri, mode="append")
    assert [(one.id, len(one.files)) for one in newest(uri).fragments] == [(0, 1), (1, 1), (2, 1)]
    lance.dataset(uri).add_columns({"more": "id + 1"})
    assert [(one.id, len(one.files)) for one in newest(uri).fragments] == [(0, 2), (1, 2), (2, 2)]
    lance.dataset(uri).optimize.compact_files()
    assert [one.id for one in newest(uri).fragments] == [3]
    lance.dataset(uri).delete("true")
    assert (len(newest(uri).fragments), newest(uri).max_fragment_id) == (0, 3)
    lance.write_dataset(rows(0, 5), uri, mode="overwrite")
    assert [one.id for one in newest(uri).fragments] == [4], "the list is reset, ids are not used again"


@pytest.mark.req("S3-014", "S3-029", "S3-030", "S3-038", "S3-039", "S3-040", "S3-041", "S3-042")
@pytest.mark.parametrize(("size", "gone", "suffix"), [(20, 3, "arrow"), (20_000, 15_000, "bin")])
def test_deletion_files(tmp_path: Path, size: int, gone: int, suffix: str) -> None:
    path = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, size), path)
    assert not newest(path).fragments[0].HasField("deletion_file")
    lance.dataset(path).delete(f"id < {gone}")
    found = newest(path)
    assert found.reader_feature_flags & 1
    (fragment,) = found.fragments
    deletion = fragment.deletion_file
    (file,) = Path(path, "_deletions").iterdir()
    assert file.name == f"{fragment.id}-{deletion.read_version}-{deletion.id}.{suffix}"
    assert deletion.read_version == found.version - 1
    assert fragment.physical_rows == size
    assert deletion.num_deleted_rows == gone
    if suffix == "bin":
        assert deletion.file_type == 1
        offsets = [*BitMap.deserialize(file.read_bytes())]
    else:
        assert deletion.file_type == 0
        batches = pa.ipc.open_file(file).read_all()
        assert (batches.num_columns, batches.schema.types) == (1, [pa.uint32()])
        offsets = batches.column(0).to_pylist()
    assert sorted(offsets) == [*range(gone)]
    left = lance.dataset(path).to_table(columns=["id"], with_row_address=True)
    assert left.num_rows == size - gone
    assert left.column("_rowaddr").to_pylist()[:2] == [fragment.id << 32 | gone, fragment.id << 32 | gone + 1]


@pytest.mark.req("S3-016", "S3-049")
def test_transaction_files(uri: str) -> None:
    lance.dataset(uri).delete("id = 3")
    found = newest(uri)
    version, _, name = found.transaction_file.removesuffix(".txn").partition("-")
    transaction = pb.Transaction.FromString(Path(uri, "_transactions", found.transaction_file).read_bytes())
    assert (int(version), name) == (transaction.read_version, transaction.uuid)
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
    assert transaction.read_version == found.version - 1


@pytest.mark.req("S3-017", "S3-026", "S3-056", "S3-057", "S3-059", "S3-060")
def test_stable_row_ids(tmp_path: Path) -> None:
    path = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, 10), path, enable_stable_row_ids=True)
    lance.write_dataset(rows(10, 5), path, mode="append")
    found = newest(path)
    assert found.reader_feature_flags & 2
    assert found.next_row_id == 15
    assert all(one.HasField("inline_row_ids") for one in found.fragments)
    assert 5 in varints(found.fragments[1].inline_row_ids[-4:]) or 15 in varints(found.fragments[1].inline_row_ids[-4:])
    before = ids(path)
    assert before == {number: number for number in range(15)}
    lance.dataset(path).update({"kind": "'new'"}, "id = 4")
    after = ids(path)
    assert {key for key in before if before[key] != after[key]} <= {4}
    lance.dataset(path).optimize.compact_files()
    assert ids(path) == after, "an address changes, a row id does not"
    assert newest(path).next_row_id >= 15


def ids(path: str) -> dict[int, int]:
    found = lance.dataset(path).to_table(columns=["id"], with_row_id=True)
    return dict(zip(found.column("id").to_pylist(), found.column("_rowid").to_pylist(), strict=True))


@pytest.mark.req("S3-022", "S3-023")
def test_clones_and_branches(uri: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy.lance")
    lance.dataset(uri).shallow_clone(copy, lance.dataset(uri).version)
    found = newest(copy)
    (base,) = found.base_paths
    assert {file.base_id for fragment in found.fragments for file in fragment.files} == {base.id}
    assert base.is_dataset_root
    assert base.path.rstrip("/").endswith("t.lance")
    assert not newest(uri).HasField("branch")
    lance.dataset(uri).create_branch("work")
    (manifest,) = Path(uri, "tree", "work", "_versions").glob("*.manifest")
    assert decode_version_manifest(manifest.read_bytes()).manifest.branch == "work"


@pytest.mark.req("S3-043", "S3-063", "S3-064")
def test_what_an_index_covers(uri: str) -> None:
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    lance.dataset(uri).create_scalar_index("kind", "BITMAP")
    assert covered(uri) == {"id_idx": {0, 1}, "kind_idx": {0, 1}}
    files = {path: path.read_bytes() for path in Path(uri, "_indices").rglob("*") if path.is_file()}
    lance.dataset(uri).update({"kind": "'new'"}, "id = 3")
    assert {path: path.read_bytes() for path in files} == files, "index files never change"
    assert 2 not in covered(uri)["kind_idx"], "its value there is not the one that was indexed"
    assert lance.dataset(uri).to_table(filter="kind = 'new'").column("id").to_pylist() == [3]
    assert lance.dataset(uri).to_table(filter="id = 3").num_rows == 1
    assert lance.dataset(uri).count_rows("kind = 'k0'") == 6
    lance.dataset(uri).optimize.compact_files()
    fragments = {one.id for one in newest(uri).fragments}
    assert not any(one.HasField("deletion_file") for one in newest(uri).fragments)
    assert not {0, 1} & fragments, "the rewritten rows have other addresses"


def covered(uri: str) -> dict[str, set[int]]:
    found = manifest_of(uri, lance.dataset(uri).version).indexes
    assert found is not None
    return {one.name: set(BitMap.deserialize(one.fragment_bitmap)) for one in found.indices}


@pytest.mark.req("S3-033", "S3-034", "S3-036", "S3-037")
def test_a_merge_keeps_how_columns_are_encoded(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        "lance-encoding:compression": "zstd",
        "lance-encoding:compression-level": "3",
        "lance-encoding:structural-encoding": "fullzip",
        "lance-encoding:packed": "true",
    }
    made = Workload(3, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).step(6)
    made.close()
    name = lance.dataset(made.uri).schema.names[-1]
    lance.dataset(made.uri).update_field_metadata({name: wanted})
    before = {one.id: dict(one.metadata) for one in newest(made.uri).fields}
    assert any(value.get("lance-encoding:compression") == b"zstd" for value in before.values())
    assert merge.apply(open_table(made.uri), merge.MergeOptions()).decision == "merged"
    assert {one.id: dict(one.metadata) for one in newest(made.uri).fields} == before


@pytest.mark.req("S3-027", "S3-028")
def test_a_merge_writes_the_sequences_that_track_changes(tmp_path: Path) -> None:
    """``last_updated_at`` (7) and ``created_at`` (9), inline, in every fragment of a table with stable row ids."""
    made = Workload(3, regions=1, base_rows=20, stable_row_ids=True).create(str(tmp_path / "t.lance")).step(6)
    made.close()
    fragments = len(newest(made.uri).fragments)
    assert merge.apply(open_table(made.uri), merge.MergeOptions()).decision == "merged"
    found = newest(made.uri).fragments
    assert len(found) > fragments
    assert [{7, 9} <= {one.field_number for one in UnknownFieldSet(fragment)} for fragment in found] == [True] * len(
        found
    )
    version = lance.dataset(made.uri).version
    changed = lance.dataset(made.uri).to_table(columns=["_row_last_updated_at_version"]).column(0).to_pylist()
    assert max(changed) <= version
