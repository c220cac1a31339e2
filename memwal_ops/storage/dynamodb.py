"""Read and write the entries of versions in DynamoDB, as Lance does for tables at ``s3+ddb://``.

An item for each version: ``base_uri`` (the table's path in its bucket) and ``version`` are its key, ``path`` is the key
of the manifest in the bucket, ``size`` its bytes, ``committer`` its writer. Entries are never deleted, as Lance's own
clean-up deletes none: that of an expired version keeps a late writer from committing that version again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from memwal_ops import errors
from memwal_ops.storage import aws
from memwal_ops.storage.api import VersionEntry, results_of
from memwal_ops.storage.errors import translate

_COMMITTER = "memwal-ops"
_MOVED = "moved_to"
_LAST = "last_fence"
_KEYS = {"base_uri": "HASH", "version": "RANGE"}
_TYPES = {"base_uri": "S", "version": "N"}
_TIMEOUTS = Config(retries={"mode": "standard", "total_max_attempts": 6}, connect_timeout=10, read_timeout=10)
# The maximum of one transaction, in which one item checks the newest version.
_TRANSACTION = 100
_CONCURRENT = 16
_ABSENT = "attribute_not_exists(base_uri) AND attribute_not_exists(version)"


class VersionEntries:
    """The entries of all tables that one table in DynamoDB has. Safe to use from several threads."""

    def __init__(self, access: aws.AwsAccess, table: str) -> None:
        self.table = table
        self._access = access
        self._made: Any = None
        self._lock = threading.Lock()

    def newest(self, base: str) -> VersionEntry | None:
        """The entry with the highest version; None: the table has no entries."""
        response = self._query(base, ScanIndexForward=False, Limit=1)
        return next((self._entry(item) for item in response["Items"]), None)

    def all(self, base: str) -> Iterator[VersionEntry]:
        """All entries of a table, ascending by version."""
        start: Mapping[str, Any] = {}
        while True:
            page = self._query(base, **start)
            yield from map(self._entry, page["Items"])
            if "LastEvaluatedKey" not in page:
                return
            start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}

    def get(self, base: str, version: int) -> VersionEntry | None:
        """The entry of one version."""
        response = self._send("read", "get_item", Key=_key(base, version), ConsistentRead=True)
        return self._entry(response["Item"]) if "Item" in response else None

    def create(self, base: str, entry: VersionEntry) -> bool:
        """Put an entry if its version has none (S3-053); False if it has one, which may be this one.

        Raises ``StoreUnavailableError``: no response; it may have been written.
        """
        return self._put(_item(base, entry), _ABSENT, {})

    def finalize(self, base: str, staged: VersionEntry, path: str, size: int) -> None:
        """Replace an entry with a staged path by one with the final path, unless another process did."""
        final = VersionEntry(staged.version, path, size)
        self._put(_item(base, final), "#path = :staged", {":staged": {"S": staged.path}}, {"#path": "path"})

    def fence(self, base: str, newest: VersionEntry, versions: int, moved_to: str) -> bool:
        """Fence the versions after the newest, so that no commit of them succeeds; False if that is not the newest.

        The first hundred are fenced together, and only if the newest version is final: that decides.
        """
        first, end = newest.version + 1, newest.version + 1 + versions
        check = {
            "Key": _key(base, newest.version),
            "ConditionExpression": "#path = :path",
            "ExpressionAttributeNames": {"#path": "path"},
            "ExpressionAttributeValues": {":path": {"S": newest.path}},
        }
        fences = [self._fence(base, version, moved_to, end - 1) for version in range(first, end)]
        together = [{"Put": fence} for fence in fences[: _TRANSACTION - 1]]
        try:
            self._send("write", "transact_write_items", named=False, TransactItems=[
                {"ConditionCheck": {"TableName": self.table, **check}}, *together
            ])  # fmt: skip
        except _RefusedError:
            return False
        self._put_each(fences[len(together) :])
        return True

    def complete_fence(self, base: str) -> None:
        """Put what is missing of a fence, as its process was killed."""
        fences = {entry.version: entry for entry in self.all(base) if entry.moved_to is not None}
        if not fences:
            return
        first, *_ = fences.values()
        missing = sorted(set(range(first.version, (first.last_fence or 0) + 1)).difference(fences))
        self._put_each([self._fence(base, version, first.moved_to or "", first.last_fence) for version in missing])

    def _put_each(self, fences: Iterable[Mapping[str, Any]]) -> None:
        results_of(lambda fence: self._put(fence["Item"], _ABSENT, {}), fences, threads=_CONCURRENT)

    def check(self) -> None:
        """Verify that the table in DynamoDB exists and has the keys that Lance expects.

        Raises ``InvalidUsageError``: it does not.
        """
        described = self._send("read", "describe_table")["Table"]
        keys = {key["AttributeName"]: key["KeyType"] for key in described["KeySchema"]}
        types = {
            attribute["AttributeName"]: attribute["AttributeType"] for attribute in described["AttributeDefinitions"]
        }
        if keys != _KEYS or {name: types.get(name) for name in _KEYS} != _TYPES:
            raise self._wrong_schema()

    def probe(self, base: str) -> bool:
        """Whether a second put of an entry is refused. Two puts and a delete, of an entry of no table.

        It stays there if it may not be deleted: nothing else needs that right.
        """
        entry = VersionEntry(1, base, 0)
        try:
            return self.create(base, entry) and not self.create(base, entry)
        finally:
            with suppress(errors.MemwalOpsError):
                self._send("delete", "delete_item", Key=_key(base, 1))

    def _fence(self, base: str, version: int, moved_to: str, last: int | None) -> dict[str, Any]:
        # A path that is not text: no release of Lance takes such an entry for a manifest, or repairs it.
        item = {**_item(base, VersionEntry(version, "", 0)), "path": {"NULL": True}, _MOVED: {"S": moved_to}}
        item |= {} if last is None else {_LAST: {"N": str(last)}}
        return {"TableName": self.table, "Item": item, "ConditionExpression": _ABSENT}

    def _entry(self, item: Mapping[str, Any]) -> VersionEntry:
        try:
            version = int(item["version"]["N"])
            if _MOVED in item:
                return VersionEntry(version, "", 0, item[_MOVED]["S"], int(item[_LAST]["N"]) if _LAST in item else None)
            size = item.get("size")
            return VersionEntry(version, item["path"]["S"], None if size is None else int(size["N"]))
        except (KeyError, ValueError, TypeError) as error:
            raise errors.TableCorruptError(
                f"An entry of {item.get('base_uri')} in the DynamoDB table {self.table} cannot be read: {error!r}.",
                remedy="Compare it with the other entries of that base_uri; Lance cannot read it either.",
            ) from error

    def _query(self, base: str, **more: Any) -> Any:
        return self._send(
            "read", "query", ConsistentRead=True, KeyConditionExpression="base_uri = :base",
            ExpressionAttributeValues={":base": {"S": base}}, **more,
        )  # fmt: skip

    def _put(
        self, item: Mapping[str, Any], condition: str, values: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> bool:
        more: dict[str, Any] = {"ExpressionAttributeValues": values} if values else {}
        if names:
            more["ExpressionAttributeNames"] = names
        try:
            self._send("write", "put_item", Item=item, ConditionExpression=condition, **more)
        except _RefusedError:
            return False
        return True

    def _send(self, action: str, method: str, *, named: bool = True, **arguments: Any) -> Any:
        named_table = {"TableName": self.table} if named else {}
        try:
            return getattr(self._client(), method)(**named_table, **arguments)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in _REFUSALS:
                raise _RefusedError from error
            raise self._translated(error, action) from error
        except (BotoCoreError, OSError) as error:
            raise self._translated(error, action) from error

    def _translated(self, error: Exception, action: str) -> errors.MemwalOpsError:
        code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
        if code == "ResourceNotFoundException":
            return errors.InvalidUsageError(
                f"There is no table {self.table} in DynamoDB (region {self._access.region}).",
                remedy="Write ddbTableName as the table's writers do; check the region, and dynamodb_endpoint.",
            )
        if code == "ValidationException":
            return self._wrong_schema()
        translated = translate(error, path=f"DynamoDB table {self.table}", action=action)
        if isinstance(translated, (errors.ReadOnlyStoreError, errors.StorageCredentialsError)):
            translated.remedy = (
                "Give this job dynamodb:GetItem, Query, PutItem and DescribeTable on that table, and what it needs on "
                "the bucket; check the profile, role or keys."
            )
        return translated

    def _wrong_schema(self) -> errors.InvalidUsageError:
        return errors.InvalidUsageError(
            f"The table {self.table} in DynamoDB has other keys than Lance expects.",
            remedy="Its partition key must be base_uri (string), its sort key version (number).",
        )

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = aws.session_with(self._access.credentials).client(
                    "dynamodb",
                    region_name=self._access.region,
                    endpoint_url=self._access.others.get(aws.DYNAMODB_ENDPOINT),
                    config=_TIMEOUTS,
                )
            return self._made


class _RefusedError(Exception):
    """The condition of a write does not hold."""


_REFUSALS = frozenset({"ConditionalCheckFailedException", "TransactionCanceledException"})


def _key(base: str, version: int) -> dict[str, Any]:
    return {"base_uri": {"S": base}, "version": {"N": str(version)}}


def _item(base: str, entry: VersionEntry) -> dict[str, Any]:
    return {
        **_key(base, entry.version),
        "path": {"S": entry.path},
        "committer": {"S": _COMMITTER},
        "size": {"N": str(entry.size)},
    }
