"""Airflow operators, one for each job, and a sensor. A task returns the report, as ``--json`` prints it (XCom)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from memwal_ops.airflow import tasks
from memwal_ops.airflow.failures import from_error
from memwal_ops.airflow.triggers import MemWalBacklogTrigger
from memwal_ops.errors import InvalidUsageError


class MemWalJobOperator(tasks.ChecksArguments, tasks.BaseOperator):
    """Run a job of memwal-ops, or one that a package registers under ``memwal_ops.jobs``, on a table.

    Args:
        job: the name of the job, for example ``merge``.
        uri: the table.
        options: the job's options, with the names that they have below ``options`` in the supervisor's configuration:
            ``{"max_bytes": "256MiB"}``.
        apply: False: report what the job would do, and change nothing. None: a job that deletes only plans, others act.
            A template of it needs a DAG with ``render_template_as_native_obj=True``: the text ``"False"`` is refused.
        storage_conn_id: the Airflow connection with the store's secrets; without it, they come from the worker's
            environment.
        storage_options: options of the store that are not secret, as pylance takes them; a secret is refused.
        soft_fail_on_blocked: skip the task instead of failing it if a blocked region is the only fault. The report
            stays in XCom.
    """

    template_fields: Sequence[str] = ("uri", "branch", "options", "apply", "storage_conn_id", "storage_options")
    template_fields_renderers: ClassVar[dict[str, str]] = {"options": "json", "storage_options": "json"}
    ui_color = "#dbeafe"

    def __init__(
        self,
        *,
        job: str,
        uri: str,
        branch: str | None = None,
        options: Mapping[str, Any] | None = None,
        apply: bool | None = None,
        storage_conn_id: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        soft_fail_on_blocked: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.uri = uri
        self.branch = branch
        self.options = options
        self.apply = apply
        self.storage_conn_id = storage_conn_id
        self.storage_options = storage_options
        self.soft_fail_on_blocked = soft_fail_on_blocked
        tasks.check_arguments(self, rendered=False)

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the job; the report is in XCom even if the task then fails."""
        # Loads pylance, in this process and not before; it is the task's own process, so its allocators may be set.
        from memwal_ops.airflow.work import run_job  # noqa: PLC0415
        from memwal_ops.allocators import bound_allocators  # noqa: PLC0415

        tasks.check_arguments(self, rendered=True)
        bound_allocators()
        storage = tasks.read_storage(self.storage_conn_id, self.storage_options)
        outcome = run_job(
            self.job,
            self.uri,
            self.options or {},
            branch=self.branch,
            apply=self._acts(),
            storage=storage,
            trace=getattr(context.get("ti"), "context_carrier", None),
        )
        if outcome.trace is not None:
            self.log.error(outcome.trace)
        if outcome.failure is not None:
            if outcome.document is not None and self.do_xcom_push:
                context["ti"].xcom_push(key="return_value", value=outcome.document)
            tasks.raise_failure(outcome.failure, skip_blocked=self.soft_fail_on_blocked)
        document = outcome.document or {}
        self.log.info("%s of %s: %s", self.job, self.uri, document.get("decision"))
        return document

    def _acts(self) -> bool | None:
        return self.apply


class MemWalMergeOperator(MemWalJobOperator):
    """Merge flushed generations into the base table. ``apply=False`` is ``--dry-run``."""

    def __init__(self, *, apply: bool = True, **kwargs: Any) -> None:
        super().__init__(**{"job": "merge", **kwargs}, apply=apply)


class MemWalCatchupOperator(MemWalJobOperator):
    """Bring the base indexes up to date with merged rows. ``apply=False`` is ``--dry-run``."""

    def __init__(self, *, apply: bool = True, **kwargs: Any) -> None:
        super().__init__(**{"job": "catchup", **kwargs}, apply=apply)


class MemWalCompactOperator(MemWalJobOperator):
    """Join small fragments. ``apply=False`` is ``--dry-run``."""

    def __init__(self, *, apply: bool = True, **kwargs: Any) -> None:
        super().__init__(**{"job": "compact", **kwargs}, apply=apply)


class MemWalSnapshotOperator(MemWalJobOperator):
    """Store the state of all regions for readers. ``apply=False`` is ``--dry-run``."""

    def __init__(self, *, apply: bool = True, **kwargs: Any) -> None:
        super().__init__(**{"job": "snapshot", **kwargs}, apply=apply)


class MemWalExpireOperator(MemWalJobOperator):
    """Plan which old versions to expire; with ``apply=True``, expire them."""

    def __init__(self, *, apply: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"job": "expire", **kwargs}, apply=apply)


class MemWalGcOperator(MemWalJobOperator):
    """Plan what could be deleted; with ``apply=True``, delete it."""

    def __init__(self, *, apply: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"job": "gc", **kwargs}, apply=apply)


class MemWalMaintainOperator(MemWalJobOperator):
    """Run all jobs in order. Those that build act; expire and gc plan only, unless ``apply=True``.

    ``options={"dry_run": True}`` changes nothing at all.
    """

    def __init__(self, *, apply: bool | None = None, **kwargs: Any) -> None:
        super().__init__(**{"job": "maintain", **kwargs}, apply=apply)

    def _acts(self) -> bool | None:
        """None for False: the steps that build act in any case. Options may say what the argument does not say."""
        given = (self.options or {}).get("apply", self.apply)
        if self.apply is not None and given is not self.apply:
            contradiction = f"apply={self.apply} contradicts options['apply']={given!r}."
            error = InvalidUsageError(contradiction, remedy="Give one of them.")
            raise tasks.TaskArgumentError(from_error(error).message)
        return self.apply or None


class MemWalBacklogSensor(tasks.ChecksArguments, tasks.BaseSensorOperator):
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
        self.uri = uri
        self.branch = branch
        self.when = when
        self.job = job
        self.storage_conn_id = storage_conn_id
        self.storage_options = storage_options
        self.deferrable = tasks.default_deferrable() if deferrable is None else deferrable
        tasks.check_arguments(self, rendered=False)

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

    def poke(self, context: Any) -> tasks.PokeReturnValue:  # noqa: ARG002 - Airflow's signature
        """Poll the backlog once."""
        from memwal_ops.airflow.work import poll  # noqa: PLC0415 - pylance, in this process and not before

        tasks.check_arguments(self, rendered=True)
        storage = tasks.read_storage(self.storage_conn_id, self.storage_options)
        result = poll(self.job, self.uri, self.when, storage=storage, branch=self.branch)
        if result.trace is not None:
            self.log.error(result.trace)
        if result.failure is not None:
            tasks.raise_failure(result.failure)
        self.log.info("Backlog of %s: %s", self.uri, result.figures)
        return tasks.PokeReturnValue(is_done=result.fires, xcom_value=result.figures)

    def execute_complete(self, context: Any, event: Mapping[str, Any]) -> Any:  # noqa: ARG002 - Airflow's signature
        """Return the figures after the trigger fired, or raise its error."""
        if "error" in event:
            raise (tasks.AirflowException if event["retry"] else tasks.AirflowFailException)(event["error"])
        return event["figures"]
