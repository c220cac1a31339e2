"""Errors across the boundary of processes: typed here, text on Spark's side, typed again on the driver.

Spark hands the driver the text of what a task raised, and shows the same text in its UI and its
logs. So a task raises one kind of exception: the message without secrets, and behind a mark what the
driver needs to raise the same error again.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.engines.api import BlockedRegionsError
from memwal_ops.errors import MemwalOpsError, SparkJobFailedError
from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = re.compile(r"memwal-ops-fault<([A-Za-z0-9+/=]+)>")
_SHOWN = 600


class TaskFaultError(Exception):
    """What a task raises: a redacted message with the error behind it."""


@contextmanager
def reported(*, marked: bool = True) -> Iterator[None]:
    """Turn whatever a task's code raises into a :class:`TaskFaultError`.

    Args:
        marked: whether the driver can raise the same error again; without, the text is for people alone.
    """
    try:
        yield
    except MemwalOpsError as error:
        raise TaskFaultError(_encode(error) if marked else _readable(error)) from None
    except Exception as error:  # noqa: BLE001 - any text may quote an option
        raise TaskFaultError(redact(f"{type(error).__name__}: {error}")) from None


@contextmanager
def raised_again(stage: str) -> Iterator[None]:
    """On the driver: turn what Spark raises for a failed stage into the task's own error.

    Raises:
        SparkJobFailedError: Spark gave up for another reason, such as lost executors.
    """
    try:
        yield
    except MemwalOpsError:
        raise
    except Exception as error:
        text = str(error)
        found = _MARK.search(text)
        if found is not None:
            raise _decode(json.loads(base64.b64decode(found[1]))) from error
        brief = redact(" ".join(text.split()))[:_SHOWN]
        raise SparkJobFailedError(f"Spark gave up the stage {stage!r}: {brief}") from error


def _encode(error: MemwalOpsError) -> str:
    document: dict[str, Any] = {"error": _one(error)}
    if isinstance(error, BlockedRegionsError):
        document["causes"] = [
            {"region": str(region_id), "generation": generation, **_one(cause)}
            for region_id, (generation, cause) in error.causes.items()
        ]
    packed = base64.b64encode(json.dumps(document).encode()).decode()
    return f"{_readable(error)} memwal-ops-fault<{packed}>"


def _readable(error: MemwalOpsError) -> str:
    """For people: a read's planning is Spark's, which shows this text and raises an error of its own."""
    return f"{error.reason}: {redact(str(error))} {redact(error.remedy)}"


def _one(error: MemwalOpsError) -> dict[str, str]:
    return {"class": type(error).__name__, "message": redact(str(error)), "remedy": redact(error.remedy)}


def _decode(document: dict[str, Any]) -> MemwalOpsError:
    if "causes" in document:
        return BlockedRegionsError(
            {uuid.UUID(cause["region"]): (cause["generation"], _raise_again(cause)) for cause in document["causes"]}
        )
    return _raise_again(document["error"])


def _raise_again(one: dict[str, str]) -> MemwalOpsError:
    kind: type[MemwalOpsError] = getattr(errors, one["class"], MemwalOpsError)
    return kind(one["message"], remedy=one["remedy"])
