"""From a location to its store: :func:`open_store`.

May not enter: how the verbs work (:mod:`memwal_ops.storage.object_store`,
:mod:`memwal_ops.storage.local`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.storage.clients import remote_client
from memwal_ops.storage.local import LocalObjectStore
from memwal_ops.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from memwal_ops.storage.locations import Location
    from memwal_ops.storage.retries import RetryPolicy

__all__ = ["ObjectStore", "open_store"]

# What one delete request of the store takes; GCS has no batch, a request deletes one by one.
_DELETE_BATCH = {"s3": 1000, "az": 256, "gs": 100, "memory": 1000}


def open_store(location: Location, *, retry: RetryPolicy | None = None) -> ObjectStore:
    """The store at a location; no request is made.

    Raises:
        InvalidUsageError: an option that the store does not know.
    """
    if location.scheme == "file":
        return LocalObjectStore(location.uri, retry=retry)
    return ObjectStore(remote_client(location), location.uri, delete_batch=_DELETE_BATCH[location.scheme], retry=retry)
