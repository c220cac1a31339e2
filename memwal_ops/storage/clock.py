"""Read the store's clock, by which the ages of objects are measured.

Timeline of the loss that this prevents: the local clock is an hour fast; an object that was written a moment ago is
"older than 15 minutes" by it, and is deleted.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from memwal_ops.storage.api import Store

CLOCK_FOLDER = "_mem_wal_ops/clock"
PLANNED_BY = "Ages and holds are by this machine's clock; --apply goes by the store's where that is behind."
"""What a plan says, since it writes nothing, not even to ask the store for its time."""


def store_time(store: Store) -> datetime:
    """The earlier of the local clock and the store's, aware, in UTC; three requests.

    On local files too: a shared file system has the clock of its server. Raises ``StorageError``: the store cannot be
    written.
    """
    return min(datetime.now(UTC), store_clock(store))


def store_clock(store: Store) -> datetime:
    """The store's clock alone, without the local one; three requests.

    Raises ``StorageError``: the store cannot be written.
    """
    local = datetime.now(UTC)
    path = f"{CLOCK_FOLDER}/{uuid.uuid4().hex}"
    store.put(path, b"")
    try:
        meta = store.head(path)
    finally:
        store.delete_many([path])
    return local if meta is None else meta.last_modified
