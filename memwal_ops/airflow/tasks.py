"""Shared code of operators and sensor: read the storage options, and end a task that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from memwal_ops.airflow.connections import check_public, secrets_of, storage_options
from memwal_ops.airflow.failures import Failure, from_error
from memwal_ops.airflow.host import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    aconnection_parts,
    connection_parts,
    mask_secret,
)
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.redaction import RedactedOptions

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_storage(conn_id: str | None, options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the storage options of a task, in the worker. Without a connection, the environment has the secrets."""
    return _joined(conn_id, connection_parts(conn_id) if conn_id else None, options)


async def aread_storage(conn_id: str | None, options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the storage options of a task, in the triggerer."""
    return _joined(conn_id, await aconnection_parts(conn_id) if conn_id else None, options)


def _joined(conn_id: str | None, parts: Mapping[str, Any] | None, options: Mapping[str, str] | None) -> dict[str, str]:
    try:
        # Checked again: rendered templates may contain secrets that the DAG file did not.
        check_public(options or {})
        found = storage_options(str(conn_id), **parts) if parts is not None else {}
    except InvalidUsageError as error:
        raise_failure(from_error(error))
    for secret in secrets_of(found):
        # As it is, and as URLs and JSON encode it.
        for form in {secret, quote(secret, safe=""), secret.replace("/", "\\/")}:
            mask_secret(form)
    return RedactedOptions({**found, **(options or {})})


def raise_failure(failure: Failure, *, skip_blocked: bool = False) -> NoReturn:
    """End the task: skipped, failed without retries, or failed with Airflow's own retries."""
    if failure.is_blocked and skip_blocked:
        raise AirflowSkipException(failure.message) from None
    raise (AirflowException if failure.retry else AirflowFailException)(failure.message) from None
