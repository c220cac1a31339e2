"""URIs of tables whose versions DynamoDB records."""

from __future__ import annotations

import pytest

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.catalogs import branch_uri, resolve
from memwal_ops.storage.locations import below, split_query
from memwal_ops.storage.probe import service_of

URI = "s3+ddb://bucket/a/t.lance?ddbTableName=manifests"
_KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region": "eu-west-1"}

pytestmark = pytest.mark.usefixtures("no_aws_environment")


def test_a_location() -> None:
    location = resolve("S3+DDB://bucket/a/t.lance/?ddbTableName=manifests", _KEYS)
    assert (location.uri, location.scheme) == (URI, "s3+ddb")
    assert (location.folder, location.dynamodb_table) == ("s3://bucket/a/t.lance", "manifests")
    assert (location.plain.uri, location.plain.scheme, location.plain.dynamodb_table) == (location.folder, "s3", None)
    assert location.lance_options["aws_region"] == "eu-west-1"
    plain = resolve("s3://bucket/a/t.lance", _KEYS)
    assert (plain.folder, plain.plain, plain.dynamodb_table) == (plain.uri, plain, None)
    assert service_of(location) != service_of(plain)


def test_a_folder_below() -> None:
    assert (
        below(URI, "tree/dev") == branch_uri(URI, "dev") == "s3+ddb://bucket/a/t.lance/tree/dev?ddbTableName=manifests"
    )
    assert below("s3://bucket/a?b", "c") == "s3://bucket/a?b/c"
    assert split_query(URI) == ("s3+ddb://bucket/a/t.lance", "?ddbTableName=manifests")
    assert split_query("s3+ddb://bucket/a?/*?ddbTableName=m") == ("s3+ddb://bucket/a?/*", "?ddbTableName=m")
    assert split_query("/a?ddbTableName=m") == ("/a?ddbTableName=m", "")


@pytest.mark.parametrize(
    "uri",
    [
        "s3+ddb://bucket/a", "s3+ddb://bucket/a?ddbTableName=", "s3+ddb://bucket/a?ddbTableName=m%2F",
        "s3+ddb://bucket/a?ddbTableName=m&x=y", "s3+ddb://bucket?ddbTableName=m", "s3+ddb://bucket/?ddbTableName=m",
        "s3+ddb:///a?ddbTableName=m", "s3+ddb://bucket/../a?ddbTableName=m", "s3+ddb://u:p@bucket/a?ddbTableName=m",
    ],
)  # fmt: skip
def test_refused(uri: str) -> None:
    with pytest.raises(InvalidUsageError):
        resolve(uri, _KEYS)


def test_an_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(InvalidUsageError, match="endpoint of DynamoDB"):
        resolve(URI, {**_KEYS, "dynamodb_endpoint": "localhost:8000"})
