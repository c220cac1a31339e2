"""Acquire, renew and release leases asynchronously: requests run on threads, results are posted back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any

from memwal_ops.core import leases
from memwal_ops.core.registry import location_of
from memwal_ops.errors import MemwalOpsError, TableNotFoundError
from memwal_ops.log import get_logger
from memwal_ops.storage.api import Store
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.objects import is_empty, open_store
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.state.history import COMPLETED

_THREADS = 8
# A store that is down must not occupy a slot of a pool for a minute.
_RETRY = RetryPolicy(deadline=10.0)


class LeaseClient:
    """Acquires, renews and releases leases for one holder. ``post``: calls a function on the scheduler's thread."""

    def __init__(self, holder: leases.Holder, ttl: timedelta, post: Callable[[Callable[[], None]], None]) -> None:
        self.holder = holder
        self.ttl = ttl
        self._post = post
        self._pool = futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="leases")
        self._requests: set[futures.Future[None]] = set()
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    def acquire(
        self,
        table: FoundTable,
        job: str,
        then: Callable[[tuple[leases.Lease | None, leases.Lease | None] | None, MemwalOpsError | None], None],
    ) -> None:
        """Acquire a lease; ``then`` gets the result of :func:`memwal_ops.core.leases.acquire`, or the error."""

        def take() -> tuple[leases.Lease | None, leases.Lease | None]:
            store = self._store(table)
            if is_empty(store, leases.LEASES_FOLDER) and is_empty(store):
                # A lease would create a folder, which other programs would list as a table.
                raise TableNotFoundError(f"No table found at {table.uri}: the prefix is empty.")
            return leases.acquire(store, job, self.holder, self.ttl)

        self._submit(take, then)

    def renew(
        self, table: FoundTable, lease: leases.Lease, then: Callable[[leases.Lease | None, MemwalOpsError | None], None]
    ) -> None:
        """Renew a lease; ``then`` gets the renewed lease, or the error."""
        self._submit(lambda: leases.renew(self._store(table), lease), then)

    def release(self, table: FoundTable, lease: leases.Lease, outcome: str | None) -> None:
        """Release a lease, and record the outcome of the run. A failure is only logged: the lease expires by itself.

        After a run that did not succeed, leases are removed instead if the table was removed.
        """

        def logged(_: object, error: MemwalOpsError | None) -> None:
            if error is not None:
                get_logger(__name__).warning("lease_not_released", table=table.name, job=lease.job, error=str(error))

        def end() -> None:
            store = self._store(table)
            if outcome in COMPLETED or not leases.delete_if_table_removed(store):
                leases.release(store, lease, outcome)

        self._submit(end, logged)

    def forget_stores(self) -> None:
        """Close the cached stores: their options may have changed."""
        with self._lock:
            self._stores.clear()

    def close(self, seconds: float) -> None:
        """Accept no more requests; those in flight have so long to end: of a store that hangs, leases expire."""
        self._pool.shutdown(wait=False)
        futures.wait([*self._requests], seconds)

    def _store(self, table: FoundTable) -> Store:
        options = table.settings.storage_options
        key = json.dumps([table.uri, dict(options)])
        with self._lock:
            store = self._stores.get(key)
        if store is None:
            location = location_of(table.uri, options)
            store = open_store(location, retry=_RETRY)
            if location.catalog is None:  # which may move the table, and vend other credentials
                with self._lock:
                    self._stores[key] = store
        return store

    def _submit(self, work: Callable[[], Any], then: Callable[[Any, MemwalOpsError | None], None]) -> None:
        def do() -> None:
            result, failure = None, None
            try:
                result = work()
            except MemwalOpsError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - without a result the job would wait forever
                failure = MemwalOpsError(redact(f"Unexpected {type(error).__name__}: {error}"))
            self._post(lambda: then(result, failure))

        request = self._pool.submit(do)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
