"""What is read of a table's manifest without pylance is what pylance reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from botocore.credentials import RefreshableCredentials

from memwal_ops.core.registry import open_table
from memwal_ops.core.run import run_job
from memwal_ops.errors import StoreUnavailableError, TableCorruptError
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, commit_indexes
from memwal_ops.formats.lance.engines.merge.locate import has_key_index, is_indexed
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.wire.names import NamingScheme
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.storage.api import LinkError
from tests.support.counting_store import CountingStore
from tests.support.run_cli import contents
from tests.support.stores import LyingStore
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

KEY = "lance-schema:unenforced-primary-key"
SCALAR = ["BTREE", "BITMAP", "ZONEMAP", "BLOOMFILTER", "INVERTED", "NGRAM", "LABEL_LIST"]
VECTOR = ["IVF_FLAT", "IVF_PQ", "IVF_SQ", "IVF_RQ", "IVF_HNSW_FLAT", "IVF_HNSW_SQ", "IVF_HNSW_PQ"]


def opened(uri: str) -> Table:
    table: Any = open_table(uri)
    return table


@pytest.mark.parametrize(("rows", "deleted"), [(1 << 33, 0), (1 << 46, 0), (3, 4), (3, 1 << 31)])
def test_impossible_row_counts_of_a_fragment(tmp_path: Path, rows: int, deleted: int) -> None:
    """pylance allocates memory by these counts, until the process is killed."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(3)}), uri)
    path = Path(uri, version_path(1, NamingScheme.V2))
    manifest = decode_version_manifest(path.read_bytes())
    manifest.manifest.fragments[0].physical_rows = rows
    manifest.manifest.fragments[0].deletion_file.num_deleted_rows = deleted
    path.write_bytes(encode_version_manifest(manifest))
    with pytest.raises(TableCorruptError, match="which is impossible"):
        opened(uri)


def test_a_link_in_place_of_the_versions_is_named(tmp_path: Path) -> None:
    """As it is in place of any other folder: a table of no known format seemed to be there."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(3)}), uri)
    Path(uri, "_versions").rename(tmp_path / "moved")
    Path(uri, "_versions").symlink_to(tmp_path / "moved")
    with pytest.raises(LinkError, match="'_versions' is a symbolic link to "):
        opened(uri)


def test_types_of_indexes(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    vectors = pa.FixedSizeListArray.from_arrays(np.random.default_rng(1).random(8 * 300).astype(np.float32), 8)
    columns: dict[str, Any] = {kind: range(300) for kind in ("BTREE", "BITMAP", "ZONEMAP", "BLOOMFILTER")}
    columns |= {kind: [f"some words {at}" for at in range(300)] for kind in ("INVERTED", "NGRAM")}
    columns |= {"LABEL_LIST": [["a"]] * 300} | dict.fromkeys(VECTOR, vectors)
    dataset = lance.write_dataset(pa.table(columns), uri)
    for kind in SCALAR:
        dataset.create_scalar_index(kind, kind)
    for kind in VECTOR:
        options = {"num_sub_vectors": 2} if "PQ" in kind else {}
        dataset.create_index(kind, kind, num_partitions=1, **options)
    table = opened(uri)
    known = {index.name: index.type for index in base_indexes(table).values()}
    assert known == {one.name: one.index_type for one in lance.dataset(uri).describe_indices()}
    assert len(known) == len(SCALAR) + len(VECTOR)
    for name in columns:
        assert is_indexed(table, name) == has_key_index(table.dataset, name), name
    assert is_indexed(table, "BTREE")


@pytest.mark.parametrize(
    ("marks", "key"),
    [
        ({"a": {KEY: "true"}}, ("a",)),
        ({"b": {KEY: "TRUE"}, "a": {KEY: "1"}, "c": {KEY: "false"}}, ("a", "b")),
        ({"a": {f"{KEY}:position": "2"}, "c": {f"{KEY}:position": "1"}}, ("c", "a")),
        ({"a": {KEY: "yes"}, "c": {KEY: "true", f"{KEY}:position": "1"}}, ("c", "a")),
        ({}, ()),
    ],
)
def test_the_primary_key(tmp_path: Path, marks: dict[str, dict[str, str]], key: tuple[str, ...]) -> None:
    nested = pa.struct([pa.field("x", pa.int64())])
    fields = [pa.field(name, pa.int64(), nullable=False, metadata=marks.get(name)) for name in "abc"]
    schema = pa.schema([*fields, pa.field("s", nested)])
    lance.write_dataset(pa.table({"a": [1], "b": [1], "c": [1], "s": [{"x": 1}]}, schema=schema), str(tmp_path))
    assert opened(str(tmp_path)).primary_key == key


def test_the_newest_version_again(tmp_path: Path) -> None:
    """Only a listing, as long as it is the same file; a newer version, and another table, are read."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": [1]}), uri)
    store = CountingStore(opened(uri).store)
    table = replace(opened(uri), store=store)
    assert table.newest().manifest is table.manifest
    assert (store.calls["list"], store.calls["get"]) == (1, 0)
    lance.write_dataset(pa.table({"a": [2]}), uri, mode="append")
    newer = table.newest()
    assert newer.version == 2
    assert newer.dataset.to_table()["a"].to_pylist() == [1, 2]
    assert table.dataset.to_table()["a"].to_pylist() == [1], "pinned, though it was opened later"
    lance.write_dataset(pa.table({"b": [3]}), str(tmp_path / "other.lance"))
    for version in (1, 2):
        (tmp_path / "t.lance" / "_versions" / f"{2**64 - 1 - version}.manifest").unlink()
    other = next((tmp_path / "other.lance" / "_versions").glob("*.manifest"))
    for name in (other.name, "latest_version_hint.json"):
        (tmp_path / "t.lance" / "_versions" / name).write_bytes(other.with_name(name).read_bytes())
    assert [field.name for field in table.newest().manifest.manifest.fields] == ["b"]


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_newest_version_whose_manifest_is_gone(tmp_path: Path, v2: bool, lost: int) -> None:
    """The hint names it: nothing is deleted, published or called healthy on the version before."""
    uri = str(tmp_path / "t.lance")
    for _ in range(4):
        lance.write_dataset(pa.table({"a": [1]}), uri, mode="append", enable_v2_manifest_paths=v2)
    folder = Path(uri, "_versions")
    names = [f"{2**64 - 1 - version:020d}.manifest" if v2 else f"{version}.manifest" for version in range(5)]
    for version in range(5 - lost, 5):
        (folder / names[version]).rename(tmp_path / names[version])
    before = contents(uri)
    options = {"expire": {"apply": True, "older_than": "0s", "allow_unsafe": True}, "maintain": {"apply": True}}
    for job in ("verify", "inspect", "compact", "expire", "maintain"):
        with pytest.raises(TableCorruptError, match=names[4]) as raised:
            run_job(uri, job, **options.get(job, {}))
        assert "latest_version_hint.json" in raised.value.remedy
    assert contents(uri) == before
    (tmp_path / names[4]).rename(folder / names[4])
    assert open_table(uri).revision == 4
    (folder / names[4]).unlink()
    (folder / "latest_version_hint.json").rename(tmp_path / "hint")
    assert open_table(uri).revision == 4 - lost


def test_a_hint_beside_writers_is_no_damage(tmp_path: Path) -> None:
    """It may be newer than the listing that was made before it was read."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": [1]}), uri)

    def write() -> None:
        for _ in range(40):
            lance.write_dataset(pa.table({"a": [1]}), uri, mode="append")
            lance.dataset(uri).cleanup_old_versions(timedelta(0), delete_unverified=False)

    with ThreadPoolExecutor() as pool:
        writer, seen = pool.submit(write), [0]
        while not writer.done():
            seen.append(open_table(uri).revision)
        writer.result()
    assert seen == sorted(seen)


@pytest.mark.s3
def test_what_a_commit_made_is_known(bucket: tuple[str, dict[str, str]]) -> None:
    """Without a request, where the entity tag proves it; it is what would be read."""
    uri, options = f"{bucket[0]}/t.lance", bucket[1]
    rows = pa.table({"id": [1]}, schema=pa.schema([pa.field("id", pa.int64(), nullable=False, metadata={KEY: "true"})]))
    lance.write_dataset(rows, uri, storage_options=options).initialize_mem_wal()
    table: Any = open_table(uri, options)
    commit_indexes(table, IndexChange(table.index.details), CommitNote("snapshot", "a run", "0.0"))
    made, read = table.committed(), table.newest()
    assert made.version == table.version + 1
    assert (made.manifest, made.file, made.primary_key) == (read.manifest, read.file, read.primary_key)
    assert made.dataset.to_table() == rows
    assert table.committed() is None, "once"


@pytest.mark.s3
def test_what_a_commit_made_has_renewed_credentials(bucket: tuple[str, dict[str, str]]) -> None:
    """Each pass of a merge begins with such a table; pylance keeps the credentials with which it opened."""
    uri, options = f"{bucket[0]}/t.lance", bucket[1]
    rows = pa.table({"id": [1]}, schema=pa.schema([pa.field("id", pa.int64(), nullable=False, metadata={KEY: "true"})]))
    lance.write_dataset(rows, uri, storage_options=options).initialize_mem_wal()
    tokens = iter(f"session-token-{number:03}" for number in range(100))

    def short_lived() -> dict[str, str]:
        ends = datetime.now(UTC) + timedelta(minutes=5)
        return {"access_key": "a-key", "secret_key": "a-secret", "token": next(tokens), "expiry_time": ends.isoformat()}

    credentials = RefreshableCredentials.create_from_metadata(short_lived(), short_lived, "a test")
    table: Any = open_table(uri, options)
    location = replace(table.location, aws=replace(table.location.aws, credentials=credentials)).refreshed()
    table = replace(table, location=location)
    commit_indexes(table, IndexChange(table.index.details), CommitNote("snapshot", "a run", "0.0"))
    made = table.committed()
    assert made.location.lance_options["aws_session_token"] > location.lance_options["aws_session_token"]
    assert made.handle is made.handle.at(made.location), "the handle opens with them"


@pytest.mark.parametrize("seen", ["nothing", "what was there before"])
def test_a_listing_that_falls_behind_during_a_run_is_no_missing_table(tmp_path: Path, seen: str) -> None:
    """The run has published; the store's next listings do not show it, and the URI has no typo."""
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    before, behind = [*opened(made.uri).store.list("_versions")], 0
    made.put([1])
    made.flush()
    run_job(made.uri, "merge")
    table = opened(made.uri)

    def stale(prefix: str = "", **named: Any) -> Any:
        nonlocal behind
        behind -= prefix == "_versions"
        shown = before if prefix == "_versions" and seen != "nothing" else []
        return iter(shown) if behind >= 0 else table.store.list(prefix, **named)

    known = replace(table, store=LyingStore(table.store, list=stale))
    behind = 3
    assert known.newest().version == table.version
    behind = 100
    with pytest.raises(StoreUnavailableError, match=f"lacks its version {table.version}, which exists"):
        known.newest()
