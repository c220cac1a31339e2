"""What pylance does with a table at ``s3+ddb://``: asserted AS IT IS, since our jobs rely on it or avoid it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

if TYPE_CHECKING:
    from tests.support.dynamodb_tables import DynamoTable

pytestmark = [pytest.mark.usefixtures("no_aws_environment"), pytest.mark.s3]


@pytest.mark.long
def test_an_entry_has_these_fields(dynamo_table: DynamoTable) -> None:
    """Its path is in the bucket, which it does not name; there is no entity tag."""
    item = dynamo_table.entries[1]
    assert sorted(item) == ["base_uri", "committer", "path", "size", "version"]
    assert item["base_uri"] == {"S": "folder/orders.lance"}
    assert item["path"] == {"S": f"folder/orders.lance/_versions/{2**64 - 2}.manifest"}
    assert item["version"] == {"N": "1"}
    assert list(item["size"]) == ["N"]


def test_clean_up_and_drop_keep_entries(dynamo_table: DynamoTable) -> None:
    """So that a late writer cannot commit an old version again, and a dropped table cannot be created again."""
    dynamo_table.dataset.cleanup_old_versions(retain_versions=1, delete_unverified=True)
    assert len([name for name in dynamo_table.objects() if name.endswith(".manifest")]) == 1
    assert [*dynamo_table.entries] == [1, 2, 3]
    lance.LanceDataset.drop(dynamo_table.uri, storage_options=dynamo_table.options)
    assert [*dynamo_table.entries] == [1, 2, 3]
    with pytest.raises(OSError, match="Commit result for version 1 is unknown"):
        lance.write_dataset(pa.table({"id": [1]}), dynamo_table.uri, storage_options=dynamo_table.options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["commit", "open"])
def test_a_detached_version_becomes_the_newest(dynamo_table: DynamoTable, how: str) -> None:
    """Its number is above all others, and it gets an entry by a commit, and also when it is opened.

    For us: no job commits or opens one by s3+ddb://.
    """
    options = dynamo_table.options
    uri = dynamo_table.uri if how == "commit" else dynamo_table.plain_uri
    dataset = lance.dataset(uri, storage_options=options)
    nothing = lance.LanceOperation.Append([])
    detached = lance.LanceDataset.commit(dataset, lance.Transaction(dataset.version, nothing), detached=True).version
    if how == "open":
        assert detached not in dynamo_table.entries
        lance.dataset(dynamo_table.uri, version=detached, storage_options=options)
    assert detached in dynamo_table.entries
    assert dynamo_table.dataset.version == detached


def test_a_version_of_plain_s3_is_recorded_when_it_is_opened_by_its_number(dynamo_table: DynamoTable) -> None:
    options = dynamo_table.options
    lance.write_dataset(pa.table({"id": [77]}), dynamo_table.plain_uri, mode="append", storage_options=options)
    assert dynamo_table.dataset.version == 3
    assert lance.dataset(dynamo_table.uri, version=4, storage_options=options).count_rows() == 31
    assert dynamo_table.dataset.version == 4


def test_a_log_is_not_flushed(dynamo_table: DynamoTable) -> None:
    """The folder of the generation is appended to the name of the table in DynamoDB, which does not exist.

    For us: a table with a MemWAL at s3+ddb:// is refused.
    """
    keyed = pa.field("id", pa.int64(), nullable=False, metadata={b"lance-schema:unenforced-primary-key": b"true"})
    rows = pa.table({"id": [1, 2]}, schema=pa.schema([keyed]))
    uri = dynamo_table.uri.replace("orders.lance", f"{uuid.uuid4()}.lance")
    dataset = lance.write_dataset(rows, uri, storage_options=dynamo_table.options)
    dataset.initialize_mem_wal()

    def write() -> Any:
        with lance.dataset(uri, storage_options=dynamo_table.options).mem_wal_writer(str(uuid.uuid4())) as log:
            log.put(rows)

    with pytest.raises(Exception, match=r"(?i)dynamodb|ResourceNotFound|ddbTableName|WrappedSdkError"):
        write()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["open", "append", "delete", "overwrite", "restore", "stale append", "stale delete"])
def test_a_path_that_is_no_text_stops_every_writer(dynamo_table: DynamoTable, call: str) -> None:
    """What `migrate --to s3` puts as the entries of the versions to come: nothing is committed, and an error is raised.

    A handle that was opened before gets on with the versions that it lists in S3, if there are any: hence an entry for
    many of them.
    """
    options, stale = dynamo_table.options, dynamo_table.dataset
    for version in (4, 5):
        dynamo_table.put_entry(
            {
                "base_uri": {"S": dynamo_table.path}, "version": {"N": str(version)}, "path": {"NULL": True},
                "committer": {"S": "memwal-ops"}, "size": {"N": "0"}, "moved_to": {"S": "s3://"},
            }
        )  # fmt: skip
    row = pa.table({"id": pa.array([77], pa.int64())})
    calls: dict[str, Any] = {
        "open": lambda: dynamo_table.dataset,
        "append": lambda: lance.write_dataset(row, dynamo_table.uri, mode="append", storage_options=options),
        "overwrite": lambda: lance.write_dataset(row, dynamo_table.uri, mode="overwrite", storage_options=options),
        "delete": lambda: dynamo_table.dataset.delete("id < 5"),
        "restore": lambda: lance.dataset(dynamo_table.uri, version=1, storage_options=options).restore(),
        "stale append": lambda: stale.insert(row),
        "stale delete": lambda: stale.delete("id < 5"),
    }
    with pytest.raises((OSError, ValueError), match=r"not number type|path is not a string|result for version 4 is"):
        calls[call]()
    plain = lance.write_dataset(row, dynamo_table.plain_uri, mode="append", storage_options=options)
    assert (plain.version, plain.count_rows()) == (4, 31)
    with pytest.raises((OSError, ValueError), match=r"not number type|path is not a string|result for version 5 is"):
        calls[call]()
    assert lance.dataset(dynamo_table.plain_uri, storage_options=options).version == 4
