"""Builds obstore's client for a location, with its own retry switched off.

May not enter: what is done with the client (:mod:`memwal_ops.storage.objects`).
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.errors import translate
from memwal_ops.storage.locations import bucket_and_prefix
from memwal_ops.storage.options import split_for_obstore

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

    from memwal_ops.storage.locations import Location

Client: TypeAlias = "AzureStore | GCSStore | LocalStore | MemoryStore | S3Store"

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def remote_client(location: Location) -> Client:
    """The client of a remote or memory location.

    Two memory locations with one URI are one store, for the life of the process.

    Raises:
        InvalidUsageError: an option that the store does not know or cannot read.
    """
    if location.scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(location.uri, MemoryStore())
    bucket, prefix = bucket_and_prefix(location)
    config, client_options = split_for_obstore(location.lance_options)
    arguments: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": cast("ClientConfig", client_options),
        "retry_config": _no_retry(),
    }
    try:
        if location.scheme == "s3":
            return _s3(location, bucket, config, arguments)
        if location.scheme == "gs":
            return GCSStore(bucket, config=cast("Any", config), **arguments)
        return AzureStore(bucket, config=cast("Any", config), **arguments)
    except Exception as exc:
        # Building does no request: whatever fails here is an option.
        said = translate(exc, path=location.uri, action="read")
        raise InvalidUsageError(f"The storage options cannot be used: {said}") from exc


def local_client(root: str) -> LocalStore:
    """The client of an existing local folder; it removes folders that a delete leaves empty."""
    return LocalStore(root, automatic_cleanup=True)


def _s3(location: Location, bucket: str, config: dict[str, str], arguments: dict[str, Any]) -> S3Store:
    provider = location.aws.provider() if location.aws is not None else None
    if provider is not None:
        # With a provider, obstore must not see the keys as well: they would never be renewed.
        for key in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
            config.pop(key, None)
        arguments["credential_provider"] = provider
    return S3Store(bucket, config=cast("Any", config), **arguments)


def _no_retry() -> RetryConfig:
    return {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
