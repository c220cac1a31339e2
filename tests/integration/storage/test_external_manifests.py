"""Manifests with entries in DynamoDB: each point at which a commit can stop, and what readers find then."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from memwal_ops import open_table
from memwal_ops.errors import (
    InvalidUsageError,
    InvariantViolatedError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StoreUnavailableError,
    TableCorruptError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.wire.names import NamingScheme
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.storage.aws import DYNAMODB_ENDPOINT
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.dynamodb import VersionEntries
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.external_manifests import MARK, ManifestEntryStore
from memwal_ops.storage.object_store import ObjectStore
from memwal_ops.storage.objects import open_store
from tests.support.dying_store import Killed
from tests.support.dynamodb_tables import DynamoTable, create_dynamodb_table
from tests.support.s3_server import REGION, s3_client

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.usefixtures("no_aws_environment"), pytest.mark.s3]


def _path(version: int) -> str:
    return version_path(version, NamingScheme.V2)


def _store(table: DynamoTable) -> ManifestEntryStore:
    store = open_store(resolve(table.uri, table.options), retry=RetryPolicy(deadline=0.5, first_wait=0.01))
    assert isinstance(store, ManifestEntryStore)
    return store


def _next_manifest(table: DynamoTable) -> bytes:
    """The bytes of a fourth version, with ten more rows, which is taken back."""
    table.append(30)
    key, client = f"{table.path}/{_path(4)}", s3_client(table.endpoint)
    data = client.get_object(Bucket=table.bucket, Key=key)["Body"].read()
    client.delete_object(Bucket=table.bucket, Key=key)
    table.forget(4)
    return bytes(data)


class _Points:
    """Counts the requests of a commit, and stops at one of them: killed, or without a response."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trail: list[str] = []
        self.stop_at: int | None = None
        self.after = False
        self.error: type[BaseException] = Killed
        for owner, method in (
            (ObjectStore, "put_if_absent"), (ObjectStore, "delete_many"), (ObjectStore, "head"),
            (ManifestEntryStore, "_copy"), (VersionEntries, "create"), (VersionEntries, "finalize"),
            (VersionEntries, "get"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, method, self._wrapped(method, getattr(owner, method)))

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.trail.append(name)
            stops = self.stop_at == len(self.trail)
            if stops and not self.after:
                self.stop_at = None
                raise self.error("stopped")
            result = method(*arguments)
            if stops:
                self.stop_at = None
                raise self.error("stopped")
            return result

        return call

    def run(self, action: Callable[[], Any], at: int | None, *, after: bool, error: type[BaseException]) -> Any:
        self.trail, self.stop_at, self.after, self.error = [], at, after, error
        return action()


@pytest.mark.req("S3-053")
def test_commit_goes_through_the_entry(dynamo_table: DynamoTable) -> None:
    data = _next_manifest(dynamo_table)
    store = _store(dynamo_table)
    assert store.put_if_absent(_path(4), data)
    item = dynamo_table.entries[4]
    assert item["path"]["S"] == f"{dynamo_table.path}/{_path(4)}"
    assert (item["size"]["N"], item["committer"]["S"]) == (str(len(data)), "memwal-ops")
    assert not [name for name in dynamo_table.objects() if re.search(r"manifest-", name)]
    assert dynamo_table.ids() == [*range(40)]
    assert not store.put_if_absent(_path(4), b"other")
    assert not store.put_if_absent(_path(4), data), "another commit, even if it is the same"
    assert dynamo_table.append(40) == 5


@pytest.mark.req("S3-053", "S3-054", "S3-055")
@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [Killed, StoreUnavailableError])
def test_every_point_of_a_commit(
    dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, after: bool
) -> None:
    """Whoever reads next finds version 3, or 4 and all that it has; the next commit follows; nothing is staged."""
    data = _next_manifest(dynamo_table)
    points = _Points(monkeypatch)
    points.run(lambda: _store(dynamo_table).put_if_absent(_path(4), data), None, after=False, error=error)
    trail = [*points.trail]
    assert {"create", "_copy", "finalize"} <= set(trail)
    version = 4
    found = set()
    for at in range(1, len(trail) + 1):
        version += 1
        data = _manifest_of(dynamo_table, version)
        done = None
        with suppress(error):
            store = _store(dynamo_table)
            done = points.run(lambda store=store, data=data, version=version: store.put_if_absent(_path(version), data),
                              at, after=after, error=error)  # fmt: skip
        committed = version in dynamo_table.entries
        assert done is None or done is committed, (at, trail[at - 1])
        found.add(committed)
        reader = ("pylance", "ours", "ours by number")[(at + 2 * after) % 3]
        if reader == "pylance":
            newest = int(dynamo_table.dataset.version)
        elif reader == "ours":
            newest = open_table(dynamo_table.uri, dynamo_table.options).version
        else:
            store = _store(dynamo_table)
            newest = version if store.head(_path(version)) is not None else version - 1
            assert newest < version or store.get(_path(version)) == data
        assert newest == (version if committed else version - 1), (at, trail[at - 1])
        assert dynamo_table.ids() == [*range(30)] + ([*range(30, 40)] if newest > 3 else []), "4 and what repeats it"
        for name in [one for one in dynamo_table.objects() if re.search(r"manifest-", one)]:
            why = _store(dynamo_table).why_staged(f"_versions/{name}")
            assert (why is None) is committed, "of a version that is not committed, it may still be"
        if not committed:
            assert _store(dynamo_table).put_if_absent(_path(version), data)
    assert found == {True, False}


def _manifest_of(table: DynamoTable, version: int) -> bytes:
    """The rows of the newest version, under the next number."""
    found = decode_version_manifest(_store(table).get(_path(version - 1)))
    found.manifest.version = version
    return encode_version_manifest(found)


def test_of_two_commits_at_once_one_wins(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance commits between the staged manifest and its entry."""
    data, create = _next_manifest(dynamo_table), VersionEntries.create

    def beside(self: VersionEntries, *arguments: Any) -> bool:
        monkeypatch.setattr(VersionEntries, "create", create)
        dynamo_table.append(100)
        return self.create(*arguments)

    monkeypatch.setattr(VersionEntries, "create", beside)
    assert not _store(dynamo_table).put_if_absent(_path(4), data)
    assert dynamo_table.ids() == [*range(30), *range(100, 110)]
    assert not [name for name in dynamo_table.objects() if "manifest-" in name]


@pytest.mark.long
def test_a_lost_response_is_read_back(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry was put, and the answer is lost: committed. It was not, and the entry cannot be read: unknown."""
    data, create, get = _next_manifest(dynamo_table), VersionEntries.create, VersionEntries.get

    def lost(self: VersionEntries, *arguments: Any) -> bool:
        create(self, *arguments)
        raise StoreUnavailableError("no response")

    monkeypatch.setattr(VersionEntries, "create", lost)
    assert _store(dynamo_table).put_if_absent(_path(4), data)
    assert dynamo_table.ids() == [*range(40)]

    def refused(*_: Any) -> bool:
        raise StoreUnavailableError("no response")

    monkeypatch.setattr(VersionEntries, "create", refused)
    store = _store(dynamo_table)
    with pytest.raises(StoreUnavailableError):
        store.put_if_absent(_path(5), data)
    assert [name for name in dynamo_table.objects() if "manifest-" in name], "the request may still arrive"
    monkeypatch.setattr(VersionEntries, "get", get)


@pytest.mark.sampled(1)
@pytest.mark.req("S3-054", "S3-055")
@pytest.mark.parametrize("copied", [False, True])
def test_readers_finish_an_unfinished_commit(dynamo_table: DynamoTable, *, copied: bool) -> None:
    staged = dynamo_table.unfinish(3, copied=copied)
    assert staged in dynamo_table.objects()
    assert open_table(dynamo_table.uri, dynamo_table.options).version == 3
    assert dynamo_table.entries[3]["path"]["S"] == f"{dynamo_table.path}/{_path(3)}"
    assert staged not in dynamo_table.objects()
    assert dynamo_table.ids() == [*range(30)]


@pytest.mark.sampled(1)
@pytest.mark.req("S3-055")
@pytest.mark.parametrize("beside", [False, True])
def test_a_listing_shows_unfinished_versions_before_the_newest(
    dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """A writer that cannot copy its manifest goes on with the next version. Beside: another process finishes it."""
    dynamo_table.unfinish(2)
    if beside:
        finished = ManifestEntryStore._finished

        def other_first(self: ManifestEntryStore, path: str) -> bool:
            monkeypatch.setattr(ManifestEntryStore, "_finished", finished)
            assert self._finished(path)
            return self._finished(path)

        monkeypatch.setattr(ManifestEntryStore, "_finished", other_first)
    listed = [meta.path for meta in _store(dynamo_table).list("_versions")]
    assert {_path(1), _path(2), _path(3)} <= {*listed}
    assert dynamo_table.entries[2]["path"]["S"] == f"{dynamo_table.path}/{_path(2)}"


@pytest.mark.long
@pytest.mark.req("S3-054")
def test_a_commit_that_cannot_be_finished_is_refused(dynamo_table: DynamoTable) -> None:
    staged = dynamo_table.unfinish(3)
    s3_client(dynamo_table.endpoint).delete_object(
        Bucket=dynamo_table.bucket, Key=f"{dynamo_table.path}/_versions/{staged}"
    )
    with pytest.raises(TableCorruptError, match=r"Version 3 .* is not finished"):
        open_table(dynamo_table.uri, dynamo_table.options)
    with pytest.raises(ValueError, match="not found"):
        _ = dynamo_table.dataset
    dynamo_table.forget(3)
    assert open_table(dynamo_table.uri, dynamo_table.options).version == 2
    assert dynamo_table.ids() == [*range(20)]


@pytest.mark.long
def test_a_deleted_manifest_does_not_come_back(dynamo_table: DynamoTable) -> None:
    """The entry of version 2 still names a staged manifest: a reader would undo a deletion of the final one."""
    staged = dynamo_table.unfinish(2, copied=True)
    store = _store(dynamo_table)
    assert not store.delete_many([_path(2)]).failed
    assert staged not in dynamo_table.objects()
    assert store.head(_path(2)) is None
    with pytest.raises(ObjectNotFoundError):
        store.get(_path(2))
    with pytest.raises(ValueError, match="not found"):
        lance.dataset(dynamo_table.uri, 2, storage_options=dynamo_table.options)
    assert 2 in dynamo_table.entries, "a late writer must not commit it again"
    assert not store.put_if_absent(_path(2), b"late")


def test_a_stalled_reader_does_not_bring_a_deleted_manifest_back(
    dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the entry before another process finished the commit, which was killed before its last step."""
    staged = dynamo_table.unfinish(2)
    copy = ManifestEntryStore._copy

    def beside(self: ManifestEntryStore, *arguments: str) -> None:
        monkeypatch.setattr(ManifestEntryStore, "_copy", copy)
        with monkeypatch.context() as killed, suppress(Killed):
            killed.setattr(ObjectStore, "delete_many", _killed)
            _store(dynamo_table).head(_path(2))
        assert staged in dynamo_table.objects()
        assert not _store(dynamo_table).delete_many([_path(2)]).failed
        self._copy(*arguments)

    monkeypatch.setattr(ManifestEntryStore, "_copy", beside)
    assert _store(dynamo_table).head(_path(2)) is None
    names = dynamo_table.objects()
    assert _path(2).rpartition("/")[2] not in names
    assert staged not in names


def _killed(*_: object) -> None:
    raise Killed


def test_an_expired_version_is_put_back(dynamo_table: DynamoTable) -> None:
    store = _store(dynamo_table)
    data = store.get(_path(2))
    store.delete_many([_path(2)])
    assert store.put_back(_path(2), data)
    assert not store.put_back(_path(2), data)
    assert dynamo_table.ids(version=2) == [*range(20)]
    assert dynamo_table.ids() == [*range(30)]


def test_manifests_are_written_by_commits_alone(dynamo_table: DynamoTable) -> None:
    store = _store(dynamo_table)
    with pytest.raises(InvariantViolatedError):
        store.put(_path(4), b"x")
    with pytest.raises(InvariantViolatedError):
        store.compare_and_swap(_path(3), b"x", "tag")


@pytest.mark.long
def test_a_version_beside_dynamodb_is_refused(dynamo_table: DynamoTable) -> None:
    """And recorded by the remedy of the error, with nothing lost."""
    rows = pa.table({"id": pa.array([77], pa.int64())})
    lance.write_dataset(rows, dynamo_table.plain_uri, mode="append", storage_options=dynamo_table.options)
    with pytest.raises(TableCorruptError, match=r"Version 4 .* beside DynamoDB") as refused:
        open_table(dynamo_table.uri, dynamo_table.options)
    assert "version=4" in refused.value.remedy
    lance.dataset(dynamo_table.uri, version=4, storage_options=dynamo_table.options)
    assert open_table(dynamo_table.uri, dynamo_table.options).version == 4
    assert dynamo_table.append(100) == 5
    assert dynamo_table.ids() == [*range(30), 77, *range(100, 110)]


@pytest.mark.long
def test_entries_of_a_dropped_table_are_named(dynamo_table: DynamoTable) -> None:
    """pylance keeps them, and cannot create the table again; after the remedy it can."""
    lance.LanceDataset.drop(dynamo_table.uri, storage_options=dynamo_table.options)
    store = _store(dynamo_table)
    with pytest.raises(TableCorruptError, match=r"version 3, and its manifest .* does not exist"):
        list(store.list("_versions"))
    for version in dynamo_table.entries:
        dynamo_table.forget(version)
    lance.write_dataset(pa.table({"id": [1]}), dynamo_table.uri, storage_options=dynamo_table.options)
    assert open_table(dynamo_table.uri, dynamo_table.options).version == 1


@pytest.mark.long
def test_a_version_that_expires_while_it_is_found(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 3 is the newest entry; before its manifest is looked for, 4 is committed, and 3 expires."""
    newest = VersionEntries.newest

    def beside(self: VersionEntries, base: str) -> Any:
        found = newest(self, base)
        monkeypatch.setattr(VersionEntries, "newest", newest)
        dynamo_table.append(30)
        _store(dynamo_table).delete_many([_path(3)])
        return found

    monkeypatch.setattr(VersionEntries, "newest", beside)
    assert open_table(dynamo_table.uri, dynamo_table.options).version == 4


def test_detached_entries_are_named(dynamo_table: DynamoTable) -> None:
    dynamo_table.put_entry({**dynamo_table.entries[3], "version": {"N": str(2**63 + 5)}})
    with pytest.raises(TableCorruptError, match="detached version"):
        open_table(dynamo_table.uri, dynamo_table.options)


@pytest.mark.long
def test_the_plain_uri_is_refused_after_a_job(dynamo_table: DynamoTable) -> None:
    """A table that no job has written shows nothing, unless a commit is unfinished."""
    plain, options = dynamo_table.plain_uri, dynamo_table.options
    assert open_table(plain, options).version == 3
    dynamo_table.unfinish(3, copied=True)
    with pytest.raises(UnsupportedFeatureError, match="recorded in DynamoDB"):
        open_table(plain, options)
    table = open_table(dynamo_table.uri, options)
    assert open_table(plain, options).version == 3, "finished, and reading leaves no mark"
    table.store.put("_mem_wal_ops/probe/x", b"x")
    assert MARK in dynamo_table.objects()
    with pytest.raises(UnsupportedFeatureError, match="recorded in DynamoDB") as refused:
        open_table(plain, options)
    assert dynamo_table.uri in refused.value.remedy
    client, prefix = s3_client(dynamo_table.endpoint), f"{dynamo_table.path}/"
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=dynamo_table.bucket, Prefix=prefix):
        for one in page["Contents"]:
            source = {"Bucket": dynamo_table.bucket, "Key": one["Key"]}
            key = f"copy.lance/{one['Key'].removeprefix(prefix)}"
            client.copy_object(Bucket=dynamo_table.bucket, Key=key, CopySource=source)
    assert open_table(f"s3://{dynamo_table.bucket}/copy.lance", options).version == 3, "the mark is of another table"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", ["", "?ddbTableName=", "?ddbTableName=a&ddbTableName=b", "?table=manifests", "?"])
def test_a_uri_without_the_table_is_refused(dynamo_table: DynamoTable, path: str) -> None:
    uri = f"s3+ddb://{dynamo_table.bucket}/{dynamo_table.path}{path}"
    with pytest.raises(InvalidUsageError, match="does not name the table in DynamoDB"):
        open_table(uri, dynamo_table.options)


@pytest.mark.long
def test_the_table_in_dynamodb_must_be_there_and_have_the_keys(dynamo_table: DynamoTable) -> None:
    base = dynamo_table.uri.partition("=")[0]
    with pytest.raises(InvalidUsageError, match="There is no table nothing in DynamoDB"):
        open_table(f"{base}=nothing", dynamo_table.options)
    create_dynamodb_table(dynamo_table.dynamodb_endpoint, "others", ("table", "number"))
    with pytest.raises(InvalidUsageError, match="other keys than Lance expects"):
        open_table(f"{base}=others", dynamo_table.options)
    with pytest.raises(InvalidUsageError, match="other keys"):
        _store_at(f"{base}=others", dynamo_table).probe_commits()
    _store(dynamo_table).probe_commits()


def _store_at(uri: str, table: DynamoTable) -> ManifestEntryStore:
    store = open_store(resolve(uri, table.options))
    assert isinstance(store, ManifestEntryStore)
    return store


@pytest.mark.long
def test_another_table_in_dynamodb_is_refused(dynamo_table: DynamoTable) -> None:
    """It has no entry of the table. With the entry that the remedy makes, the mark of a job tells them apart."""
    create_dynamodb_table(dynamo_table.dynamodb_endpoint, "others-too")
    other, options = dynamo_table.uri.replace("=manifests", "=others-too"), dynamo_table.options
    with pytest.raises(InvalidUsageError, match=r"others-too in DynamoDB has no entry .* has version 3") as refused:
        open_table(other, options)
    assert "lance.dataset(URI, version=3)" in refused.value.remedy
    lance.dataset(other, version=3, storage_options=options)
    assert open_table(other, options).version == 3
    store = open_table(dynamo_table.uri, options).store
    store.put("_mem_wal_ops/probe/x", b"x")
    store.put("_mem_wal_ops/probe/x", b"x")
    with pytest.raises(InvalidUsageError, match="names manifests"):
        open_table(other, options).store.put("_mem_wal_ops/probe/y", b"y")


@pytest.mark.long
def test_the_mark_of_a_copy(dynamo_table: DynamoTable) -> None:
    """At another path the mark is replaced; in another bucket, at the same path, the entries are the original's."""
    options, client = dynamo_table.options, s3_client(dynamo_table.endpoint)
    open_table(dynamo_table.uri, options).store.put("_mem_wal_ops/probe/x", b"x")
    client.create_bucket(Bucket=f"{dynamo_table.bucket}-2", CreateBucketConfiguration={"LocationConstraint": REGION})
    there = replace(dynamo_table, bucket=f"{dynamo_table.bucket}-2")
    copy = replace(dynamo_table, path="folder/copy.lance")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=dynamo_table.bucket, Prefix=dynamo_table.path):
        for one in page["Contents"]:
            name = one["Key"].removeprefix(dynamo_table.path)
            for target in (there, copy):
                source = {"Bucket": dynamo_table.bucket, "Key": one["Key"]}
                client.copy_object(Bucket=target.bucket, Key=target.path + name, CopySource=source)
    with pytest.raises(InvalidUsageError, match=f"names that table in the bucket {dynamo_table.bucket}"):
        open_table(there.uri, options).store.put("_mem_wal_ops/probe/x", b"x")
    lance.dataset(copy.uri, version=3, storage_options=options)
    open_table(copy.uri, options).store.put("_mem_wal_ops/probe/x", b"x")
    with pytest.raises(UnsupportedFeatureError, match="recorded in DynamoDB"):
        open_table(copy.plain_uri, options)
    copy.forget(3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("code", ["AccessDeniedException", "UnrecognizedClientException"])
def test_missing_rights_are_named(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def refuse(**_: Any) -> None:
                response = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
                raise ClientError(response, name)  # type: ignore[arg-type]

            return refuse

    monkeypatch.setattr(VersionEntries, "_client", lambda _: Refusing())
    with pytest.raises(StorageCredentialsError) as refused:
        open_table(dynamo_table.uri, dynamo_table.options)
    assert "dynamodb:GetItem" in refused.value.remedy


def test_dynamodb_that_does_not_answer(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def refuse(**_: Any) -> None:
                raise EndpointConnectionError(endpoint_url="http://x")

            return refuse

    monkeypatch.setattr(VersionEntries, "_client", lambda _: Silent())
    with pytest.raises(StoreUnavailableError):
        open_table(dynamo_table.uri, dynamo_table.options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variable", ["DYNAMODB_ENDPOINT", "AWS_ENDPOINT_URL_DYNAMODB", "AWS_ENDPOINT_URL"])
def test_the_endpoint_from_the_environment(
    dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, dynamo_table.dynamodb_endpoint)
    options = {key: value for key, value in dynamo_table.options.items() if key != "dynamodb_endpoint"}
    table = open_table(dynamo_table.uri, options)
    assert (table.version, table.dataset.count_rows()) == (3, 30)
    assert DYNAMODB_ENDPOINT in table.location.lance_options
