"""Convert an Airflow connection to storage options, as pylance and memwal-ops take them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.options import RedactedOptions, is_secret_key, looks_secret

# Airflow's names for the fields of an AWS connection, with the names of the storage options.
_AWS_EXTRA = {
    "aws_access_key_id": "aws_access_key_id",
    "aws_secret_access_key": "aws_secret_access_key",
    "aws_session_token": "aws_session_token",
    "region_name": "aws_region",
    "endpoint_url": "aws_endpoint",
    "profile_name": "aws_profile",
    "role_arn": "aws_role_arn",
}
_OWN = "storage_options"


def check_public(options: Any) -> None:
    """Refuse secrets in a task's storage options, or in a template of them: Airflow shows and stores both.

    Raises ``InvalidUsageError``: an option is a secret, or its value has one (``http://user:secret@host``); the message
    has its key, never its value.
    """
    if isinstance(options, Mapping):
        secret = sorted(
            str(key) for key, value in options.items() if is_secret_key(str(key)) or looks_secret(str(value))
        )
    else:
        secret = ["a secret"] if isinstance(options, str) and looks_secret(options) else []
    if secret:
        raise InvalidUsageError(
            f"storage_options must not hold {', '.join(secret)}: Airflow shows and stores the arguments of a task.",
            remedy="Put secrets into a connection and name it by storage_conn_id, or into the workers' environment.",
        )


def storage_options(
    conn_id: str, *, kind: str, login: str | None, password: str | None, extra: Mapping[str, Any]
) -> dict[str, str]:
    """Return the storage options of a connection; their repr shows no secret.

    A connection of type ``aws`` is read as Airflow's own hooks read it. Of any other type, the extra holds storage
    options. In both, those below the key ``storage_options`` of the extra are added as they are. Raises
    ``InvalidUsageError``: a field of the connection would be ignored. The message never contains values.
    """
    rest = dict(extra)
    own = rest.pop(_OWN, {})
    if not isinstance(own, Mapping):
        raise InvalidUsageError(f"Connection {conn_id!r}: {_OWN} in its extra must be an object.")
    if kind == "aws":
        fields = {"aws_access_key_id": login, "aws_secret_access_key": password}
        unknown = sorted(set(rest) - set(_AWS_EXTRA))
        if unknown:
            raise InvalidUsageError(
                f"Connection {conn_id!r}: {', '.join(unknown)} in its extra is not supported.",
                remedy=f"Remove it, or give storage options below {_OWN} in the extra; docs/airflow.md has examples.",
            )
        fields |= {_AWS_EXTRA[key]: value for key, value in rest.items()}
    else:
        if login or password:
            raise InvalidUsageError(
                f"Connection {conn_id!r} of type {kind!r} has a login or password, which only type aws uses.",
                remedy="Put storage options, secrets too, into the connection's extra: Airflow encrypts it.",
            )
        fields = rest
    return RedactedOptions({key: _text(conn_id, key, value) for key, value in {**fields, **own}.items() if value})


def secrets_of(options: Mapping[str, str]) -> list[str]:
    """Return the values that must be masked in logs."""
    return [value for key, value in options.items() if is_secret_key(key)]


def _text(conn_id: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidUsageError(f"Connection {conn_id!r}: {key} must be a string or a number.")
