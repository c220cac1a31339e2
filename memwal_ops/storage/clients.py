"""Build obstore's client for a location, with its own retry switched off."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from obstore.exceptions import UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.errors import translate
from memwal_ops.storage.locations import S3, bucket_and_prefix
from memwal_ops.storage.options import is_ours, known_options, split_for_obstore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import ClientConfig, RetryConfig

    from memwal_ops.storage.locations import Location

Client: TypeAlias = "AzureStore | GCSStore | LocalStore | MemoryStore | S3Store"

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def remote_client(location: Location) -> Client:
    """The client of a remote or memory location.

    Memory locations with the same URI share one store, for the life of the process.

    Raises:
        InvalidUsageError: an unknown or invalid option.
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
        if location.scheme in S3:
            return _s3(location, bucket, config, arguments)
        if location.scheme == "gs":
            return GCSStore(bucket, config=cast("Any", config), **arguments)
        return AzureStore(bucket, config=cast("Any", config), **arguments)
    except UnknownConfigurationKeyError as exc:
        for key in config:
            check_known({key: config[key]})
        error = translate(exc, path=location.uri, action="read")
        raise InvalidUsageError(f"The storage options cannot be used: {error}", remedy=known_options()) from exc
    except Exception as exc:
        # Building sends no request: every failure here is due to an option.
        error = translate(exc, path=location.uri, action="read")
        raise InvalidUsageError(f"The storage options cannot be used: {error}") from exc


def check_known(options: Mapping[str, str]) -> None:
    """Refuse an option that no store has. Options of other stores are accepted, as tables may share options.

    Raises:
        InvalidUsageError: an unknown option; the remedy lists the known ones.
    """
    config, _ = split_for_obstore(options)
    for key in config:
        if is_ours(key) or any(_has(kind, key) for kind in (S3Store, AzureStore, GCSStore)):
            continue
        raise InvalidUsageError(f"There is no storage option {key!r}.", remedy=known_options(key))


def _has(kind: Any, key: str) -> bool:
    try:
        kind("bucket", config={key: ""})
    except UnknownConfigurationKeyError:
        return False
    except Exception:  # noqa: BLE001 - the key is known: its value is invalid, or another option is missing
        return True
    return True


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
