"""Open the store of a location (:func:`open_store`) and check for objects (:func:`is_empty`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import InvariantViolatedError
from memwal_ops.storage.azure import AzureObjectStore
from memwal_ops.storage.clients import check_known, remote_client
from memwal_ops.storage.local import LocalObjectStore
from memwal_ops.storage.locations import bucket_and_prefix
from memwal_ops.storage.object_store import ObjectStore
from memwal_ops.storage.proven_stores import service_of

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location
    from memwal_ops.storage.retries import RetryPolicy

__all__ = ["ObjectStore", "is_empty", "open_store"]

# The maximum number of objects in a delete request; on GCS, obstore deletes them one by one.
_DELETE_BATCH = {"s3": 1000, "s3+ddb": 1000, "az": 256, "gs": 100, "memory": 1000}


def open_store(location: Location, *, retry: RetryPolicy | None = None) -> ObjectStore:
    """The store at a location; no request is made.

    Raises:
        InvalidUsageError: an unknown option.
    """
    if location.scheme in {"file", "memory"}:
        check_known(location.lance_options)
    if location.scheme == "file":
        return LocalObjectStore(location.uri, retry=retry)
    if location.dynamodb_table is not None:
        return _with_entries(location, location.dynamodb_table, retry)
    kind = AzureObjectStore if location.scheme == "az" else ObjectStore
    store = kind(remote_client(location), location.uri, delete_batch=_DELETE_BATCH[location.scheme], retry=retry)
    store.service = service_of(location)
    return store


def _with_entries(location: Location, table: str, retry: RetryPolicy | None) -> ObjectStore:
    from memwal_ops.storage.dynamodb import VersionEntries  # noqa: PLC0415 - boto3, only for S3
    from memwal_ops.storage.external_manifests import ManifestEntryStore  # noqa: PLC0415 - the same

    if location.aws is None:
        raise InvariantViolatedError(f"{location.uri} has no access to DynamoDB in this process.")
    bucket, prefix = bucket_and_prefix(location)
    store = ManifestEntryStore(
        remote_client(location),
        location.uri,
        bucket=bucket,
        prefix=prefix,
        entries=VersionEntries(location.aws, table),
        delete_batch=_DELETE_BATCH[location.scheme],
        retry=retry,
    )
    store.service = service_of(location)
    return store


def is_empty(store: Store, prefix: str = "") -> bool:
    """Whether there is no object below a prefix, by default below the root. One request for a page of a listing."""
    return next(iter(store.list(prefix)), None) is None
