"""Airflow operators, one for each job. A task returns the report, as ``--json`` prints it (XCom)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from memwal_ops.airflow.connections import check_public
from memwal_ops.airflow.host import BaseOperator
from memwal_ops.airflow.tasks import raise_failure, read_storage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MemWalJobOperator(BaseOperator):
    """Run a job of memwal-ops, or one that a package registers under ``memwal_ops.jobs``, on a table.

    Args:
        job: the name of the job, for example ``merge``.
        uri: the table.
        branch: a branch of it.
        options: the job's options, with the names that they have below ``options`` in the supervisor's configuration:
            ``{"max_bytes": "256MiB"}``.
        apply: False: report what the job would do, and change nothing. None: a job that deletes only plans, others act.
        storage_conn_id: the Airflow connection with the store's secrets; without it, they come from the worker's
            environment.
        storage_options: options of the store that are not secret, as pylance takes them; a secret is refused.
        soft_fail_on_blocked: skip the task instead of failing it if a blocked region is the only fault. The report
            stays in XCom.
    """

    template_fields: Sequence[str] = ("uri", "branch", "options", "storage_conn_id", "storage_options")
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
        if isinstance(storage_options, dict):
            check_public(storage_options)
        self.job = job
        self.uri = uri
        self.branch = branch
        self.options = options
        self.apply = apply
        self.storage_conn_id = storage_conn_id
        self.storage_options = storage_options
        self.soft_fail_on_blocked = soft_fail_on_blocked

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the job; the report is in XCom even if the task then fails."""
        # Loads pylance, in this process and not before; it is the task's own process, so its allocators may be set.
        from memwal_ops.airflow.work import run_job  # noqa: PLC0415
        from memwal_ops.allocators import bound_allocators  # noqa: PLC0415

        bound_allocators()
        storage = read_storage(self.storage_conn_id, self.storage_options)
        outcome = run_job(
            self.job,
            self.uri,
            self._job_options(),
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
            raise_failure(outcome.failure, skip_blocked=self.soft_fail_on_blocked)
        document = outcome.document or {}
        self.log.info("%s of %s: %s", self.job, self.uri, document.get("decision"))
        return document

    def _acts(self) -> bool | None:
        return self.apply

    def _job_options(self) -> dict[str, Any]:
        return dict(self.options or {})


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

    def __init__(self, *, apply: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"job": "maintain", **kwargs}, apply=apply)

    def _acts(self) -> None:
        """Return None: the steps that build always act, and ``apply`` is an option of the job."""

    def _job_options(self) -> dict[str, Any]:
        return {**super()._job_options(), "apply": self.apply}
