"""One operator for every job. The report, as ``--json`` prints it, is what the task returns (XCom)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from memwal_ops.airflow.connections import check_public
from memwal_ops.airflow.host import BaseOperator
from memwal_ops.airflow.tasks import end, read_storage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MemWalJobOperator(BaseOperator):
    """Run a job of memwal-ops, or one that a package registers under ``memwal_ops.jobs``, on a table.

    Args:
        job: its name, for example ``merge``.
        uri: the table.
        options: its options, by the names that they have below ``options`` in the supervisor's configuration:
            ``{"max_bytes": "256MiB"}``.
        apply: False: say what it would do, and change nothing. None: a job that deletes only plans, others act.
        storage_conn_id: an Airflow connection that has the store's secrets; without it, the worker's environment
            has them.
        storage_options: options of the store that are no secret, as pylance takes them; a secret is refused.
        soft_fail_on_blocked: skip the task, and do not fail it, where all that is wrong is a blocked region. The
            report stays in XCom.
    """

    template_fields: Sequence[str] = ("uri", "options", "storage_conn_id", "storage_options")
    template_fields_renderers: ClassVar[dict[str, str]] = {"options": "json", "storage_options": "json"}
    ui_color = "#dbeafe"

    def __init__(
        self,
        *,
        job: str,
        uri: str,
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
        self.options = options
        self.apply = apply
        self.storage_conn_id = storage_conn_id
        self.storage_options = storage_options
        self.soft_fail_on_blocked = soft_fail_on_blocked

    def execute(self, context: Any) -> dict[str, Any]:
        """Run it; the report is in XCom even where the task then fails."""
        # pylance, in this process and not before; the process is the task's own, so its allocators are ours to set.
        from memwal_ops.airflow.work import run_job  # noqa: PLC0415
        from memwal_ops.allocators import bound_allocators  # noqa: PLC0415

        bound_allocators()
        storage = read_storage(self.storage_conn_id, self.storage_options)
        outcome = run_job(self.job, self.uri, self._job_options(), apply=self._acts(), storage=storage)
        if outcome.trace is not None:
            self.log.error(outcome.trace)
        if outcome.ending is not None:
            if outcome.document is not None and self.do_xcom_push:
                context["ti"].xcom_push(key="return_value", value=outcome.document)
            end(outcome.ending, skip_blocked=self.soft_fail_on_blocked)
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
    """Bring the base indexes up to what was merged. ``apply=False`` is ``--dry-run``."""

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
    """Plan which old versions go; with ``apply=True``, expire them."""

    def __init__(self, *, apply: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"job": "expire", **kwargs}, apply=apply)


class MemWalGcOperator(MemWalJobOperator):
    """Plan what could be deleted; with ``apply=True``, delete it."""

    def __init__(self, *, apply: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"job": "gc", **kwargs}, apply=apply)


class MemWalMaintainOperator(MemWalJobOperator):
    """All jobs in their order. Those that build act; expire and gc plan only, unless ``apply=True``.

    ``options={"dry_run": True}`` changes nothing at all.
    """

    def __init__(self, *, apply: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"job": "maintain", **kwargs}, apply=apply)

    def _acts(self) -> bool:
        return True

    def _job_options(self) -> dict[str, Any]:
        return {**super()._job_options(), "apply": self.apply}
