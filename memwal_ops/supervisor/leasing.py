"""Leases without waiting: requests go out on threads of their own, what came of them is posted back."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from memwal_ops.core import leases
from memwal_ops.core.table import is_absent
from memwal_ops.errors import MemwalOpsError, TableNotFoundError
from memwal_ops.log import get_logger
from memwal_ops.storage.locations import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.redaction import redact
from memwal_ops.storage.retries import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from memwal_ops.core.leases import Holder, Lease
    from memwal_ops.storage.api import Store
    from memwal_ops.supervisor.discovery import FoundTable

_THREADS = 8
# A store that is down must not keep a pool's place for a minute.
_RETRY = RetryPolicy(deadline=10.0)


class LeaseDesk:
    """Takes, renews and gives back leases for one holder.

    Args:
        holder: this supervisor.
        ttl: of every lease.
        post: takes a function, to be called on the supervisor's own thread.
    """

    def __init__(self, holder: Holder, ttl: timedelta, post: Callable[[Callable[[], None]], None]) -> None:
        """No request is made."""
        self.holder = holder
        self.ttl = ttl
        self._post = post
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="leases")
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    def acquire(
        self,
        table: FoundTable,
        job: str,
        then: Callable[[tuple[Lease | None, Lease | None] | None, MemwalOpsError | None], None],
    ) -> None:
        """Take a lease; ``then`` gets what :func:`memwal_ops.core.leases.acquire` returned, or why it failed."""

        def take() -> tuple[Lease | None, Lease | None]:
            store = self._store(table)
            if next(iter(store.list(leases.LEASES_FOLDER)), None) is None and is_absent(store):
                # A lease would make a folder of that name, and others would take it for a table.
                raise TableNotFoundError(f"Nothing stands at {table.uri}.")
            return leases.acquire(store, job, self.holder, self.ttl)

        self._submit(take, then)

    def renew(
        self, table: FoundTable, lease: Lease, then: Callable[[Lease | None, MemwalOpsError | None], None]
    ) -> None:
        """Renew one; ``then`` gets it, or why it failed."""
        self._submit(lambda: leases.renew(self._store(table), lease), then)

    def release(self, table: FoundTable, lease: Lease, outcome: str | None) -> None:
        """Give one back, and say what the run came to. A failure is only logged: it ends by itself."""

        def logged(_: object, error: MemwalOpsError | None) -> None:
            if error is not None:
                get_logger(__name__).warning("lease_not_released", table=table.name, job=lease.job, error=str(error))

        self._submit(lambda: leases.release(self._store(table), lease, outcome), logged)

    def forget_stores(self) -> None:
        """Open them anew from now on: their options may have changed."""
        with self._lock:
            self._stores.clear()

    def close(self, *, wait: bool) -> None:
        """No more requests; ``wait``: until those that were made have ended."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _store(self, table: FoundTable) -> Store:
        options = table.settings.storage_options
        key = json.dumps([table.uri, dict(options)])
        with self._lock:
            found = self._stores.get(key)
        if found is None:
            found = open_store(resolve(table.uri, options), retry=_RETRY)
            with self._lock:
                self._stores[key] = found
        return found

    def _submit(self, work: Callable[[], Any], then: Callable[[Any, MemwalOpsError | None], None]) -> None:
        def do() -> None:
            outcome, refusal = None, None
            try:
                outcome = work()
            except MemwalOpsError as error:
                refusal = error
            except Exception as error:  # noqa: BLE001 - whoever asked must get an answer
                refusal = MemwalOpsError(redact(f"Unexpected {type(error).__name__}: {error}"))
            self._post(lambda: then(outcome, refusal))

        self._pool.submit(do)
