"""Tables at ``s3+ddb://``: their versions are recorded in moto's DynamoDB."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY, options_for, s3_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lance
    import pyarrow as pa

TABLE = "manifests"


def create_dynamodb_table(endpoint: str, name: str, keys: tuple[str, str] = ("base_uri", "version")) -> None:
    """A table with a partition key and a numeric sort key; nothing if it is there."""
    client = dynamodb(endpoint)
    if name in client.list_tables()["TableNames"]:
        return
    client.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": key, "KeyType": kind} for key, kind in zip(keys, ("HASH", "RANGE"), strict=True)],
        AttributeDefinitions=[
            {"AttributeName": key, "AttributeType": kind} for key, kind in zip(keys, ("S", "N"), strict=True)
        ],
        BillingMode="PAY_PER_REQUEST",
    )


def dynamodb(endpoint: str) -> Any:
    """A boto3 client, to look at the entries past the code under test."""
    import boto3

    return boto3.client(
        "dynamodb",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


def rows_from(first: int, rows: int) -> pa.Table:
    """Rows with ids from ``first`` on."""
    import pyarrow as pa

    return pa.table({"id": pa.array(range(first, first + rows), pa.int64())})


@dataclass
class DynamoTable:
    """A table at ``s3+ddb://`` that pylance writes; its objects are at ``endpoint``."""

    endpoint: str
    dynamodb_endpoint: str
    bucket: str
    path: str = "folder/orders.lance"

    @property
    def uri(self) -> str:
        return f"s3+ddb://{self.bucket}/{self.path}?ddbTableName={TABLE}"

    @property
    def plain_uri(self) -> str:
        return f"s3://{self.bucket}/{self.path}"

    @property
    def options(self) -> dict[str, str]:
        return {**options_for(self.endpoint), "dynamodb_endpoint": self.dynamodb_endpoint}

    @property
    def dataset(self) -> lance.LanceDataset:
        import lance

        return lance.dataset(self.uri, storage_options=self.options)

    def append(self, first: int, rows: int = 10) -> int:
        """Rows with ids from ``first`` on, by pylance; returns the version."""
        import lance

        data = rows_from(first, rows)
        return int(lance.write_dataset(data, self.uri, mode="append", storage_options=self.options).version)

    def ids(self, uri: str = "", version: int | str | None = None) -> list[int]:
        """The ids that pylance reads, ascending."""
        import lance

        dataset = lance.dataset(uri or self.uri, version, storage_options=self.options)
        return sorted(dataset.to_table(columns=["id"])["id"].to_pylist())

    @property
    def entries(self) -> dict[int, dict[str, Any]]:
        """The items of the table, by version."""
        pages = (
            dynamodb(self.dynamodb_endpoint)
            .get_paginator("query")
            .paginate(
                TableName=TABLE,
                KeyConditionExpression="base_uri = :base",
                ExpressionAttributeValues={":base": {"S": self.path}},
            )
        )
        return {int(item["version"]["N"]): item for page in pages for item in page["Items"]}

    def put_entry(self, item: dict[str, Any]) -> None:
        dynamodb(self.dynamodb_endpoint).put_item(TableName=TABLE, Item=item)

    def forget(self, version: int) -> None:
        """Delete the entry of a version, which neither Lance nor memwal-ops ever does."""
        key = {"base_uri": {"S": self.path}, "version": {"N": str(version)}}
        dynamodb(self.dynamodb_endpoint).delete_item(TableName=TABLE, Key=key)

    def objects(self, folder: str = "_versions") -> list[str]:
        """Names below a folder of the table."""
        prefix = f"{self.path}/{folder}/"
        pages = s3_client(self.endpoint).get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [one["Key"].removeprefix(prefix) for page in pages for one in page.get("Contents", [])]

    def unfinish(self, version: int, *, copied: bool = False) -> str:
        """Leave a version as a writer that was killed after it put the entry; returns the name of the staged manifest.

        ``copied``: it was killed before it replaced the entry.
        """
        item, store = self.entries[version], s3_client(self.endpoint)
        final = item["path"]["S"]
        staged = f"{final}-{uuid.uuid4()}"
        store.copy_object(Bucket=self.bucket, Key=staged, CopySource={"Bucket": self.bucket, "Key": final})
        if not copied:
            store.delete_object(Bucket=self.bucket, Key=final)
        self.put_entry({**item, "path": {"S": staged}})
        return staged.rpartition("/")[2]


@pytest.fixture
def dynamo_table(s3_endpoint: str, s3_bucket: str, moto_endpoint: str) -> Iterator[DynamoTable]:
    """A table of three versions, of ten rows each."""
    import lance

    create_dynamodb_table(moto_endpoint, TABLE)
    table = DynamoTable(s3_endpoint, moto_endpoint, s3_bucket)
    lance.write_dataset(rows_from(0, 10), table.uri, storage_options=table.options)
    table.append(10)
    table.append(20)
    yield table
    client = dynamodb(moto_endpoint)  # its branches' too: the next test's table has the same path, in another bucket
    for page in client.get_paginator("scan").paginate(TableName=TABLE):
        for item in page["Items"]:
            client.delete_item(TableName=TABLE, Key={key: item[key] for key in ("base_uri", "version")})
