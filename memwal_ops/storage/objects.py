"""Open the store of a location (:func:`open_store`) and check for objects (:func:`is_empty`).

The store on Azure Blob Storage: refuse backslashes in names, and delete singly if batches are not permitted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from urllib.parse import quote

from obstore.exceptions import BaseError
from obstore.store import AzureStore, HTTPStore

from memwal_ops.errors import InvalidUsageError, InvariantViolatedError
from memwal_ops.storage import metering
from memwal_ops.storage.api import Store
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.local import LocalObjectStore
from memwal_ops.storage.locations import Location, bucket_and_prefix
from memwal_ops.storage.object_store import ObjectStore
from memwal_ops.storage.options import redact
from memwal_ops.storage.probe import service_of

# obstore's names of options, and the environment variables that it reads by itself.
_SAS = ("sas_key", ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"))
_ACCOUNT = ("account_name", ("AZURE_STORAGE_ACCOUNT_NAME",))
_ENDPOINT = ("endpoint", ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"))
# If one of these is set, requests are not signed by the SAS, and the SAS must not replace that identity.
_BEFORE_SAS = (
    ("account_key", ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")),
    ("token", ("AZURE_STORAGE_TOKEN",)),
)


class AzureObjectStore(ObjectStore):
    """A container of Azure Blob Storage, or a folder of it.

    Names with a backslash are refused: the service treats it as a slash, so that another object
    would be read, overwritten or deleted.
    """

    def __init__(
        self, client: metering.Client, root: str, *, delete_batch: int, retry: RetryPolicy | None = None
    ) -> None:
        super().__init__(client, root, delete_batch=delete_batch, retry=retry)
        self._single = single_deletes(client) if isinstance(client, AzureStore) else None

    @property
    def _delete_one(self) -> Callable[[str], None] | None:
        single = self._single
        if single is None:
            return None

        def delete(path: str) -> None:
            try:
                metering.delete(single, path)
            except (BaseError, OSError) as exc:
                # This client's errors, unlike AzureStore's, quote the URL with its signature.
                raise type(exc)(redact(str(exc))) from None

        return delete

    def _checked(self, path: str) -> str:
        return super()._checked(without_backslash(path))

    def _folder(self, prefix: str) -> str:
        return super()._folder(without_backslash(prefix))


def without_backslash(path: str) -> str:
    """The path itself; raises ``InvalidUsageError`` if it has a backslash."""
    if "\\" in path:
        raise InvalidUsageError(
            f"{path!r} cannot be a name on Azure, which treats a backslash as a slash: it would be another object.",
            remedy="Use a name without a backslash.",
        )
    return path


def single_deletes(client: AzureStore) -> HTTPStore | None:
    """A client for ``DELETE`` of single blobs with the SAS that ``client`` uses; None if it uses none.

    obstore sends every delete to Azure as a batch. With an account SAS Azurite responds with 500, and
    with a SAS for objects only Azure responds with 403: a batch is a request to the container.
    """
    config: Mapping[str, str] = {str(key): str(value) for key, value in client.config.items()}
    sas = _setting(config, *_SAS)
    if not sas or any(_setting(config, *setting) for setting in _BEFORE_SAS):
        return None
    account, endpoint = _setting(config, *_ACCOUNT), _setting(config, *_ENDPOINT)
    if not endpoint and (not account or "use_emulator" in config or "use_fabric_endpoint" in config):
        return None
    place = "/".join(
        [
            (endpoint or f"https://{account}.blob.core.windows.net").rstrip("/"),
            *(quote(part, safe="") for part in (config["container_name"], *(client.prefix or "").split("/")) if part),
        ]
    )
    return HTTPStore(
        f"{place}?{sas.lstrip('?')}", client_options=client.client_options, retry_config=client.retry_config
    )


def _setting(config: Mapping[str, str], key: str, variables: tuple[str, ...]) -> str | None:
    return config.get(key) or next((os.environ[name] for name in variables if os.environ.get(name)), None)


__all__ = ["ObjectStore", "is_empty", "open_store"]

# The maximum number of objects in a delete request; on GCS, obstore deletes them one by one.
_DELETE_BATCH = {"s3": 1000, "s3+ddb": 1000, "az": 256, "gs": 100, "memory": 1000}


def open_store(location: Location, *, retry: RetryPolicy | None = None) -> ObjectStore:
    """The store at a location; no request is made. Raises ``InvalidUsageError``: an unknown option."""
    if location.scheme in {"file", "memory"}:
        metering.check_known(location.lance_options)
    if location.scheme == "file":
        return LocalObjectStore(location.uri, retry=retry)
    if location.dynamodb_table is not None:
        return _with_entries(location, location.dynamodb_table, retry)
    kind = AzureObjectStore if location.scheme == "az" else ObjectStore
    store = kind(
        metering.remote_client(location), location.uri, delete_batch=_DELETE_BATCH[location.scheme], retry=retry
    )
    store.service = service_of(location)
    return store


def _with_entries(location: Location, table: str, retry: RetryPolicy | None) -> ObjectStore:
    from memwal_ops.storage.dynamodb import VersionEntries  # noqa: PLC0415 - boto3, only for S3
    from memwal_ops.storage.external_manifests import ManifestEntryStore  # noqa: PLC0415 - the same

    if location.aws is None:
        raise InvariantViolatedError(f"{location.uri} has no access to DynamoDB in this process.")
    bucket, prefix = bucket_and_prefix(location)
    store = ManifestEntryStore(
        metering.remote_client(location),
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
