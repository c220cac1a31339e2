"""The backlog sensor: waits until a table has enough work for a job."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from memwal_ops.airflow.connections import check_public
from memwal_ops.airflow.host import (
    AirflowException,
    AirflowFailException,
    BaseSensorOperator,
    PokeReturnValue,
    default_deferrable,
)
from memwal_ops.airflow.tasks import raise_failure, read_storage
from memwal_ops.airflow.triggers import MemWalBacklogTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MemWalBacklogSensor(BaseSensorOperator):
    """Wait until a job's backlog metrics satisfy ``when``; push their values to XCom.

    Args:
        uri: the table.
        when: a trigger as in the supervisor's configuration: ``generations >= 8 or bytes >= 1GiB``; by default the
            job's own.
        job: the job that defines the metrics: those of ``merge`` are generations, rows, bytes, oldest_age,
            regions_behind and blocked_regions.
        storage_conn_id: see :class:`MemWalJobOperator`.
        storage_options: see :class:`MemWalJobOperator`.
        deferrable: poll once, then wait in the triggerer, which occupies no worker.
    """

    template_fields: Sequence[str] = ("uri", "branch", "when", "storage_conn_id", "storage_options")
    template_fields_renderers: ClassVar[dict[str, str]] = {"storage_options": "json"}
    ui_color = "#e0f2fe"

    def __init__(
        self,
        *,
        uri: str,
        branch: str | None = None,
        when: str | None = None,
        job: str = "merge",
        storage_conn_id: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(storage_options, dict):
            check_public(storage_options)
        self.uri = uri
        self.branch = branch
        self.when = when
        self.job = job
        self.storage_conn_id = storage_conn_id
        self.storage_options = storage_options
        self.deferrable = default_deferrable() if deferrable is None else deferrable

    def execute(self, context: Any) -> Any:
        """Wait in the triggerer if deferrable, else in the worker."""
        if not self.deferrable:
            return super().execute(context)
        result = self.poke(context)
        if result:
            return result.xcom_value
        self.defer(
            trigger=MemWalBacklogTrigger(
                uri=self.uri,
                branch=self.branch,
                job=self.job,
                when=self.when,
                poke_interval=self.poke_interval,
                storage_conn_id=self.storage_conn_id,
                storage_options=self.storage_options,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )
        return None

    def poke(self, context: Any) -> PokeReturnValue:  # noqa: ARG002 - Airflow's signature
        """Poll the backlog once."""
        from memwal_ops.airflow.work import poll  # noqa: PLC0415 - pylance, in this process and not before

        storage = read_storage(self.storage_conn_id, self.storage_options)
        result = poll(self.job, self.uri, self.when, storage=storage, branch=self.branch)
        if result.trace is not None:
            self.log.error(result.trace)
        if result.failure is not None:
            raise_failure(result.failure)
        self.log.info("Backlog of %s: %s", self.uri, result.figures)
        return PokeReturnValue(is_done=result.fires, xcom_value=result.figures)

    def execute_complete(self, context: Any, event: Mapping[str, Any]) -> Any:  # noqa: ARG002 - Airflow's signature
        """Return the figures after the trigger fired, or raise its error."""
        if "error" in event:
            raise (AirflowException if event["retry"] else AirflowFailException)(event["error"])
        return event["figures"]
