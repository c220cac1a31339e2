"""The backlog trigger: looks at a table from the triggerer, so that a waiting sensor takes no worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from memwal_ops.airflow.host import AirflowException, BaseTrigger, TriggerEvent
from memwal_ops.airflow.tasks import aread_storage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from memwal_ops.airflow.work import Look


class MemWalBacklogTrigger(BaseTrigger):
    """Fires when ``when`` holds for a job's backlog figures. What it is made from holds no secret.

    The event is ``{"figures": ...}``, or ``{"error": ..., "retry": ...}`` where looking again cannot help.
    """

    def __init__(
        self,
        *,
        uri: str,
        job: str = "merge",
        when: str | None = None,
        poke_interval: float = 60.0,
        storage_conn_id: str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.uri = uri
        self.job = job
        self.when = when
        self.poke_interval = poke_interval
        self.storage_conn_id = storage_conn_id
        self.storage_options = None if storage_options is None else dict(storage_options)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and what to make it from again, for another process."""
        kept = ("uri", "job", "when", "poke_interval", "storage_conn_id", "storage_options")
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {name: getattr(self, name) for name in kept}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look, wait, look again."""
        while True:
            event = self._event(await self._look())
            if event is not None:
                yield TriggerEvent(event)
                return
            await asyncio.sleep(self.poke_interval)

    async def _look(self) -> Look | AirflowException:
        try:
            # Every time: credentials may have been replaced while it waited.
            storage = await aread_storage(self.storage_conn_id, self.storage_options)
        except AirflowException as error:
            return error
        # Requests block, and importing pylance takes a second: neither may hold up other triggers.
        return await asyncio.to_thread(_look, self.job, self.uri, self.when, storage)

    def _event(self, found: Look | AirflowException) -> dict[str, Any] | None:
        if isinstance(found, AirflowException):
            return {"error": str(found), "retry": False}
        if found.trace is not None:
            self.log.error(found.trace)
        if found.ending is None:
            return {"figures": found.figures} if found.fires else None
        if not found.ending.retry or found.trace is not None:
            return {"error": found.ending.message, "retry": found.ending.retry}
        self.log.warning("Looking again in %s s: %s", self.poke_interval, found.ending.message)
        return None


def _look(job: str, uri: str, when: str | None, storage: Mapping[str, str]) -> Look:
    from memwal_ops.airflow.work import look  # noqa: PLC0415 - pylance, in a thread of the triggerer and not before

    return look(job, uri, when, storage=storage)
