"""The backlog trigger: polls a table from the triggerer, so that a waiting sensor occupies no worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from memwal_ops.airflow import tasks
from memwal_ops.airflow.connections import check_public

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from memwal_ops.airflow.work import Poll


class MemWalBacklogTrigger(tasks.BaseTrigger):
    """Fires when a job's backlog metrics meet ``when``. Its serialized arguments contain no secret.

    The event is ``{"figures": ...}``, or ``{"error": ..., "retry": ...}`` if polling again cannot help.
    """

    def __init__(
        self,
        *,
        uri: str,
        branch: str | None = None,
        job: str = "merge",
        when: str | None = None,
        poke_interval: float = 60.0,
        storage_conn_id: str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        check_public(storage_options)
        self.uri = uri
        self.branch = branch
        self.job = job
        self.when = when
        self.poke_interval = poke_interval
        self.storage_conn_id = storage_conn_id
        self.storage_options = None if storage_options is None else dict(storage_options)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class and its arguments, for another process."""
        kept = ("uri", "branch", "job", "when", "poke_interval", "storage_conn_id", "storage_options")
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {name: getattr(self, name) for name in kept}

    async def run(self) -> AsyncIterator[tasks.TriggerEvent]:
        """Poll every ``poke_interval`` seconds, until there is an event."""
        while True:
            event = self._event(await self._poll())
            if event is not None:
                yield tasks.TriggerEvent(event)
                return
            await asyncio.sleep(self.poke_interval)

    async def _poll(self) -> Poll | tasks.AirflowException:
        try:
            # Read at each poll: credentials may have been replaced meanwhile.
            storage = await tasks.aread_storage(self.storage_conn_id, self.storage_options)
        except tasks.AirflowException as error:
            return error
        # Requests block, and importing pylance takes a second: neither may delay other triggers.
        return await asyncio.to_thread(_poll, self.job, self.uri, self.branch, self.when, storage)

    def _event(self, result: Poll | tasks.AirflowException) -> dict[str, Any] | None:
        if isinstance(result, tasks.AirflowException):
            return {"error": str(result), "retry": False}
        if result.trace is not None:
            self.log.error(result.trace)
        if result.failure is None:
            return {"figures": result.figures} if result.fires else None
        if not result.failure.retry or result.trace is not None:
            return {"error": result.failure.message, "retry": result.failure.retry}
        self.log.warning("Polling again in %s s: %s", self.poke_interval, result.failure.message)
        return None


def _poll(job: str, uri: str, branch: str | None, when: str | None, storage: Mapping[str, str]) -> Poll:
    from memwal_ops.airflow.work import poll  # noqa: PLC0415 - pylance, in a thread of the triggerer and not before

    return poll(job, uri, when, storage=storage, branch=branch)
