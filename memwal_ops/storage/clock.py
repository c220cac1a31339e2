"""What time it is for a store: ages are told by its own clock, not by ours.

"Older than 15 minutes" by a clock that is an hour fast deletes what was written a moment ago.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

CLOCK_FOLDER = "_mem_wal_ops/clock"


def store_time(store: Store) -> datetime:
    """The earlier of our clock and the store's, aware, in UTC; three requests.

    On local files too: a shared file system has the clock of its server.

    Raises:
        StorageError: nothing can be written there.
    """
    return min(datetime.now(UTC), store_clock(store))


def store_clock(store: Store) -> datetime:
    """The store's clock alone, whatever ours says; three requests.

    Raises:
        StorageError: nothing can be written there.
    """
    ours = datetime.now(UTC)
    path = f"{CLOCK_FOLDER}/{uuid.uuid4().hex}"
    store.put(path, b"")
    try:
        meta = store.head(path)
    finally:
        store.delete_many([path])
    return ours if meta is None else meta.last_modified
