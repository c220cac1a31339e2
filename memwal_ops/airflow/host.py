"""Import the parts of Airflow that are used, or raise an ImportError that tells how to install it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AirflowException",
    "AirflowFailException",
    "AirflowSkipException",
    "BaseOperator",
    "BaseSensorOperator",
    "BaseTrigger",
    "PokeReturnValue",
    "TriggerEvent",
    "aconnection_parts",
    "connection_parts",
    "default_deferrable",
    "mask_secret",
]


def default_deferrable() -> bool:
    """Return Airflow's configured default of ``deferrable``."""
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False))


def connection_parts(conn_id: str) -> Mapping[str, Any]:
    """Return a connection's type, login, password and extra; must not be logged."""
    return _parts(Connection.get(conn_id))


async def aconnection_parts(conn_id: str) -> Mapping[str, Any]:
    """As :func:`connection_parts`, in a trigger, without blocking its event loop."""
    return _parts(await Connection.async_get(conn_id))


def _parts(connection: Any) -> Mapping[str, Any]:
    return {
        "kind": connection.conn_type or "",
        "login": connection.login,
        "password": connection.password,
        "extra": connection.extra_dejson,
    }
