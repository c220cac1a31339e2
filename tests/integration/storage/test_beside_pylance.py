"""pylance and the stores of this package at the same place: each sees at once what the other writes."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops.formats.lance.files.datasets import lance_options
from memwal_ops.formats.lance.files.version_files import read_version_manifest, version_path
from memwal_ops.formats.lance.wire.names import NamingScheme, parse_version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.integration.storage.conftest import REAL, place_in

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.storage.locations import Location


@pytest.fixture(params=["local", "s3", *REAL])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A place that pylance reaches too; its memory is not ours."""
    if request.param in {"azurite", "rgw"}:
        return place_in(request.getfixturevalue(request.param), "odd ü +&.lance")
    if request.param == "local":
        return resolve(tmp_path / "odd ü +%&.lance")
    bucket = request.getfixturevalue("s3_bucket")
    return resolve(f"s3://{bucket}/some/odd ü +&.lance", request.getfixturevalue("s3_options"))


def numbers(*values: int) -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64())})


def written(shared: Location) -> lance.LanceDataset:
    options = lance_options(shared)
    return lance.write_dataset(numbers(1, 2, 3), shared.uri, storage_options=options, enable_v2_manifest_paths=True)


@pytest.mark.sampled(1)
def test_what_pylance_writes_is_seen_at_once(shared: Location) -> None:
    store = open_store(shared)
    dataset = written(shared)
    for version in (1, 2, 3):
        path = version_path(version, NamingScheme.V2)
        meta = store.head(path)
        assert meta is not None
        assert len(store.get(path)) == meta.size
        assert {meta.path for meta in store.list("_versions")} >= {path}
        assert read_version_manifest(store, version, NamingScheme.V2).manifest.version == version
        dataset = lance.write_dataset(numbers(version), dataset, mode="append")
    files = {meta.path for meta in store.list("data")}
    assert {f"data/{file.path}" for part in dataset.get_fragments() for file in part.metadata.files} == files


def test_pylance_reads_what_was_put_here(shared: Location) -> None:
    """A manifest put by our condition is a version of pylance's; its data file may be ours as well."""
    store = open_store(shared)
    written(shared)
    version = read_version_manifest(store, 1, NamingScheme.V2)
    version.manifest.version = 2
    assert store.put_if_absent(version_path(2, NamingScheme.V2), encode_version_manifest(version)) is True
    (data,) = store.list("data")
    content = store.get(data.path)
    store.delete_many([data.path])
    store.put(data.path, content)
    dataset = lance.dataset(shared.uri, storage_options=lance_options(shared))
    assert (dataset.version, dataset.count_rows()) == (2, 3)
    assert dataset.to_table().column("id").to_pylist() == [1, 2, 3]
    store.delete_many([version_path(2, NamingScheme.V2)])
    assert lance.dataset(shared.uri, storage_options=lance_options(shared)).version == 1


@pytest.mark.req("S3-045")
def test_pylances_commit_and_ours_refuse_each_other(shared: Location) -> None:
    store = open_store(shared)
    dataset = written(shared)
    version = read_version_manifest(store, 1, NamingScheme.V2)
    version.manifest.version = 2
    ours = encode_version_manifest(version)
    lance.write_dataset(numbers(4), dataset, mode="append")
    theirs = store.get(version_path(2, NamingScheme.V2))
    assert store.put_if_absent(version_path(2, NamingScheme.V2), ours) is False
    assert store.get(version_path(2, NamingScheme.V2)) == theirs
    version.manifest.version = 3
    assert store.put_if_absent(version_path(3, NamingScheme.V2), encode_version_manifest(version)) is True
    standing = store.get(version_path(3, NamingScheme.V2))
    operation = lance.LanceOperation.Overwrite(dataset.schema, [])
    options = lance_options(shared)
    # It read version 2 and wants 3, which stands: it takes 4, or gives up; it never writes over ours.
    with contextlib.suppress(OSError):
        lance.LanceDataset.commit(shared.uri, operation, read_version=2, storage_options=options)
    assert store.get(version_path(3, NamingScheme.V2)) == standing


@pytest.mark.sampled(2)
@pytest.mark.req("S3-045")
def test_of_racing_commits_each_version_has_one_winner(shared: Location) -> None:
    store = open_store(shared)
    written(shared)
    options = lance_options(shared)

    def theirs(number: int) -> None:
        lance.write_dataset(numbers(number), shared.uri, mode="append", storage_options=options)

    def ours(number: int) -> int:
        while True:
            newest = max(
                name.version
                for meta in store.list("_versions")
                if (name := parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])) and not name.detached
            )
            version = read_version_manifest(store, newest, NamingScheme.V2)
            version.manifest.version = newest + 1
            version.manifest.tag = f"ours {number}"
            path = version_path(newest + 1, NamingScheme.V2)
            if store.put_if_absent(path, encode_version_manifest(version)):
                return newest + 1

    with ThreadPoolExecutor(6) as pool:
        appends = [pool.submit(theirs, 100 + number) for number in range(6)]
        puts = [pool.submit(ours, number) for number in range(6)]
        landed = sorted(put.result() for put in puts)
        for append in appends:
            append.result()
    assert len(set(landed)) == 6
    tags = [read_version_manifest(store, version, NamingScheme.V2).manifest.tag for version in landed]
    assert sorted(tags) == [f"ours {number}" for number in range(6)], "no version of ours was written over"
    dataset = lance.dataset(shared.uri, storage_options=options)
    assert dataset.version == 13
    assert sorted(dataset.to_table().column("id").to_pylist()) == [1, 2, 3, *range(100, 106)]
