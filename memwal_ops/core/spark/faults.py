"""Carry typed errors from Spark's tasks to the driver, as text.

Spark gives the driver the text of the exception that a task raised, and shows the same text in its UI and its
logs. So a task raises one kind of exception: the message without secrets, then a mark and the encoded error, from
which the driver raises the same error again.
"""

from __future__ import annotations

import base64
import json
import re
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.errors import MemwalOpsError, SparkJobFailedError
from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MARK = re.compile(r"memwal-ops-fault<([A-Za-z0-9+/=]+)>")
_NO_RESPONSE = re.compile(r"An error occurred while calling \S+")
_CRASHED = re.compile(
    r"Python worker exited unexpectedly|Python worker.* crashed|ExecutorLostFailure|SparkContext was shut down"
)
_SHOWN = 600


# Errors with more than a message: by the name of the class, to a document and from it.
_carried: dict[str, tuple[Callable[[Any], Any], Callable[[Any], MemwalOpsError]]] = {}


def carry(kind: type[MemwalOpsError], pack: Callable[[Any], Any], unpack: Callable[[Any], MemwalOpsError]) -> None:
    """Carry errors of this class with more than their message: ``pack`` gives a JSON document, ``unpack`` the error."""
    _carried[kind.__name__] = (pack, unpack)


class TaskFaultError(Exception):
    """The exception that a task raises: a redacted message, and the encoded error."""


@contextmanager
def reported(*, marked: bool = True) -> Iterator[None]:
    """Turn any exception of a task's code into a :class:`TaskFaultError`.

    Args:
        marked: whether the driver can raise the same error again; if not, the text is for people only.
    """
    try:
        yield
    except MemwalOpsError as error:
        raise TaskFaultError(_encode(error) if marked else _readable(error)) from None
    except Exception as error:  # noqa: BLE001 - any text may quote an option
        raise TaskFaultError(redact(f"{type(error).__name__}: {error}")) from None


@contextmanager
def raised_again(stage: str) -> Iterator[None]:
    """On the driver: turn Spark's exception for a failed stage into the task's own error.

    Raises:
        SparkJobFailedError: Spark failed for another reason, such as lost executors.
    """
    try:
        yield
    except MemwalOpsError:
        raise
    except Exception as error:
        text = str(error)
        match = _MARK.search(text)
        if match is not None:
            raise _decode(json.loads(base64.b64decode(match[1]))) from error
        raise SparkJobFailedError(f"Spark failed in the stage {stage!r}: {brief(error)}") from error


@contextmanager
def between_stages() -> Iterator[None]:
    """On the driver: turn Spark's exceptions outside of stages, as when its JVM was killed, into our error.

    Raises:
        SparkJobFailedError: for an error of PySpark, Py4J or the connection to the JVM; others pass.
    """
    try:
        yield
    except Exception as error:
        if not is_gone(error) and not type(error).__module__.startswith(("pyspark", "py4j")):
            raise
        raise SparkJobFailedError(f"Spark failed between two stages: {brief(error)}") from error


def is_gone(error: BaseException) -> bool:
    """Whether an error of Py4J means that the JVM of the driver has ended."""
    # For a call in progress, Py4J itself then returns this text, without a reason.
    return isinstance(error, (ConnectionError, EOFError)) or _NO_RESPONSE.fullmatch(str(error).strip()) is not None


def is_crash(error: BaseException) -> bool:
    """Whether a job failed because a process of Spark's ended: a JVM, an executor, a Python worker."""
    return is_gone(error) or _CRASHED.search(str(error)) is not None


def brief(error: BaseException) -> str:
    """Spark's message in one line, without secrets and without Java's stack frames."""
    if is_gone(error):
        return "the JVM of the driver ended: it was killed (mostly for its memory) or crashed."
    lines = takewhile(lambda line: not line.startswith("at "), map(str.strip, str(error).splitlines()))
    return redact(" ".join(" ".join(lines).split()))[:_SHOWN]


def _encode(error: MemwalOpsError) -> str:
    pack, _ = _carried.get(type(error).__name__, (to_document, None))
    document = {"kind": type(error).__name__, "error": pack(error)}
    packed = base64.b64encode(json.dumps(document).encode()).decode()
    return f"{_readable(error)} memwal-ops-fault<{packed}>"


def _readable(error: MemwalOpsError) -> str:
    """The text for people: while a read is planned, Spark shows this text and raises an error of its own."""
    return f"{error.reason}: {redact(str(error))} {redact(error.remedy)}"


def to_document(error: MemwalOpsError) -> dict[str, Any]:
    """An error as text: its class in :mod:`memwal_ops.errors`, message and remedy, without secrets."""
    return {"class": type(error).__name__, "message": redact(str(error)), "remedy": redact(error.remedy)}


def _decode(document: dict[str, Any]) -> MemwalOpsError:
    _, unpack = _carried.get(document["kind"], (None, from_document))
    return unpack(document["error"])


def from_document(one: Any) -> MemwalOpsError:
    """The reverse of :func:`to_document`."""
    kind: type[MemwalOpsError] = getattr(errors, one["class"], MemwalOpsError)
    return kind(one["message"], remedy=one["remedy"])
