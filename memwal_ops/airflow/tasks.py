"""What operators and the sensor share: the table they are about, its options, and how a bad end is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from memwal_ops.airflow.connections import check_public, secrets_of, storage_options
from memwal_ops.airflow.endings import Ending, of_error
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
    """The storage options of a task, in the worker. Without a connection, the environment has the rest."""
    return _joined(conn_id, connection_parts(conn_id) if conn_id else None, options)


async def aread_storage(conn_id: str | None, options: Mapping[str, str] | None) -> dict[str, str]:
    """The same, in the triggerer."""
    return _joined(conn_id, await aconnection_parts(conn_id) if conn_id else None, options)


def _joined(conn_id: str | None, parts: Mapping[str, Any] | None, options: Mapping[str, str] | None) -> dict[str, str]:
    try:
        # Again: templates may have put in what was not there when the DAG was read.
        check_public(options or {})
        found = storage_options(str(conn_id), **parts) if parts is not None else {}
    except InvalidUsageError as error:
        end(of_error(error))
    for secret in secrets_of(found):
        # As it is, and as URLs and JSON write it.
        for form in {secret, quote(secret, safe=""), secret.replace("/", "\\/")}:
            mask_secret(form)
    return RedactedOptions({**found, **(options or {})})


def end(ending: Ending, *, skip_blocked: bool = False) -> NoReturn:
    """End the task: skipped, failed for good, or failed with Airflow's own retries."""
    if ending.is_blocked and skip_blocked:
        raise AirflowSkipException(ending.message) from None
    raise (AirflowException if ending.retry else AirflowFailException)(ending.message) from None
