"""Shared code of operators, sensor and trigger: the parts of Airflow that are used, arguments, and how a task fails."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import quote

from memwal_ops.airflow import connections, failures

try:
    from airflow.sdk import BaseOperator, BaseSensorOperator, Connection, PokeReturnValue, conf
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
    from airflow.sdk.log import mask_secret
    from airflow.triggers.base import BaseTrigger, TriggerEvent
except ImportError as error:
    raise ImportError(
        f"memwal_ops.airflow needs Apache Airflow 3.3 or later ({error}). Install memwal-ops into Airflow's own "
        "environment, with Airflow's own constraints: pip install memwal-ops 'apache-airflow==X.Y.Z' -c CONSTRAINTS"
    ) from error

from memwal_ops.core.options import boolean
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.options import RedactedOptions

__all__ = [
    "AirflowException",
    "AirflowFailException",
    "BaseOperator",
    "BaseSensorOperator",
    "BaseTrigger",
    "ChecksArguments",
    "PokeReturnValue",
    "TaskArgumentError",
    "TriggerEvent",
    "aread_storage",
    "check_arguments",
    "default_deferrable",
    "raise_failure",
    "read_storage",
]

_TEXTS = ("job", "uri", "branch", "when", "storage_conn_id")
_NEEDED = frozenset({"job", "uri"})
_OBJECTS = ("options", "storage_options")
_BOOLEANS = {"apply": True, "soft_fail_on_blocked": False, "deferrable": False}


class TaskArgumentError(InvalidUsageError, AirflowFailException):
    """An argument of a task is refused, when the DAG is read or once it is rendered; no retry can help."""


def check_arguments(task: Any, *, rendered: bool) -> None:
    """Refuse arguments of another type, and secrets, which Airflow would store.

    A DAG file's templates are checked once they are rendered. They are texts then, unless the DAG renders them as
    native objects: ``apply="{{ params.apply }}"`` is ``"False"``, which counts as true in Python.

    ``rendered``: its templates are rendered.

    Raises:
        TaskArgumentError: with the name of the argument, and never with a secret.
    """
    try:
        for name, value in _given(task, rendered=rendered):
            if name in _BOOLEANS:
                boolean(name, value, optional=_BOOLEANS[name])
            elif name in _OBJECTS and not isinstance(value, Mapping | None):
                raise InvalidUsageError(f"{name} must be a dictionary, not {_kind(value)}.", remedy=failures.NATIVE)
            elif name in _TEXTS and not isinstance(value, str | os.PathLike if name in _NEEDED else str | None):
                raise InvalidUsageError(f"{name} must be a string, not {_kind(value)}.", remedy=failures.NATIVE)
        connections.check_public(getattr(task, "storage_options", None))
    except InvalidUsageError as error:
        raise TaskArgumentError(failures.from_error(error).message) from None


class ChecksArguments:
    """Checks the arguments of a task, also of a mapped one, once they are rendered and before Airflow stores them."""

    def _do_render_template_fields(self, parent: Any, *args: Any, **named: Any) -> None:
        base: Any = super()
        base._do_render_template_fields(parent, *args, **named)  # noqa: SLF001 - to be overridden, as Airflow says
        if parent is self:
            check_arguments(self, rendered=True)


def _given(task: Any, *, rendered: bool) -> Iterator[tuple[str, Any]]:
    """The arguments of a task, but for those that are rendered later: templates, functions and XComs."""
    for name, value in vars(task).items():
        later = (
            callable(value)
            or hasattr(value, "resolve")
            or (isinstance(value, str) and ("{{" in value or "{%" in value))
        )
        if rendered or not later or name not in task.template_fields:
            yield name, value


def _kind(value: Any) -> str:
    return "text" if isinstance(value, str) else type(value).__name__


def default_deferrable() -> bool:
    """Return Airflow's configured default of ``deferrable``."""
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False))


def _parts(connection: Any) -> Mapping[str, Any]:
    """Return a connection's type, login, password and extra; must not be logged."""
    return {
        "kind": connection.conn_type or "",
        "login": connection.login,
        "password": connection.password,
        "extra": connection.extra_dejson,
    }


def read_storage(conn_id: str | None, options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the storage options of a task, in the worker. Without a connection, the environment has the secrets."""
    return _joined(conn_id, _parts(Connection.get(conn_id)) if conn_id else None, options)


async def aread_storage(conn_id: str | None, options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the storage options of a task, in the triggerer, whose event loop it does not block."""
    return _joined(conn_id, _parts(await Connection.async_get(conn_id)) if conn_id else None, options)


def _joined(conn_id: str | None, parts: Mapping[str, Any] | None, options: Mapping[str, str] | None) -> dict[str, str]:
    try:
        # Checked again: rendered templates may contain secrets that the DAG file did not.
        connections.check_public(options or {})
        secrets = connections.storage_options(str(conn_id), **parts) if parts is not None else {}
    except InvalidUsageError as error:
        raise_failure(failures.from_error(error))
    for secret in connections.secrets_of(secrets):
        # As it is, and as URLs and JSON encode it.
        for form in {secret, quote(secret, safe=""), secret.replace("/", "\\/")}:
            mask_secret(form)
    return RedactedOptions({**secrets, **(options or {})})


def raise_failure(failure: failures.Failure, *, skip_blocked: bool = False) -> NoReturn:
    """End the task: skipped, failed without retries, or failed with Airflow's own retries."""
    if failure.is_blocked and skip_blocked:
        raise AirflowSkipException(failure.message) from None
    raise (AirflowException if failure.retry else AirflowFailException)(failure.message) from None
