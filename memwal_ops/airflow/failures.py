"""Classify the failures of runs: one reason, its exit code, and whether a retry can help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memwal_ops import errors
from memwal_ops.core.options import NotABooleanError
from memwal_ops.storage.api import DiskFullError
from memwal_ops.storage.options import redact

PartOf = Callable[[Mapping[str, Any]], tuple[str, str]]

NATIVE = "Give one; a template gives text, unless its DAG has render_template_as_native_obj=True."
_OF_ARGUMENTS = "docs/airflow.md explains the arguments of a task."
_SHOWN = 5
# Transient faults of the store, commit conflicts, and what the next run repeats by itself. All other errors are about
# the table, its parts or the options, and need an operator.
_RETRYABLE = frozenset(
    {
        errors.MemwalOpsError,
        errors.IndexesBehindError,
        errors.StorageError,
        DiskFullError,
        errors.StorageCredentialsError,
        errors.StoreUnavailableError,
        errors.ObjectNotFoundError,
        errors.VersionGoneError,
        errors.DeletesFailedError,
        errors.TableReplacedError,
        errors.CommitConflictError,
        errors.CommitStateUnknownError,
    }
)
_ERRORS_BY_CODE = {
    kind.exit_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.MemwalOpsError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a task fails. ``message`` contains no secret."""

    reason: str
    exit_code: int
    message: str
    retry: bool

    @property
    def is_blocked(self) -> bool:
        """Whether blocked parts are the only fault; everything else was done."""
        return self.exit_code == errors.RegionsBlockedError.exit_code


def from_error(error: BaseException) -> Failure:
    """Return the failure of a run that raised ``error``."""
    if isinstance(error, errors.MemwalOpsError):
        return _failure(type(error), f"{error} {_remedy(error)}")
    return _failure(errors.MemwalOpsError, f"Unexpected {type(error).__name__}: {error}")


def _remedy(error: errors.MemwalOpsError) -> str:
    if isinstance(error, NotABooleanError):
        return NATIVE
    return _OF_ARGUMENTS if error.remedy == errors.InvalidUsageError.remedy else error.remedy


def from_report(exit_code: int, document: Mapping[str, Any], part_of: PartOf) -> Failure | None:
    """Return the failure in a report; None if it has none. ``part_of``: the table format's function."""
    if not exit_code:
        return None
    kind = _ERRORS_BY_CODE.get(exit_code, errors.MemwalOpsError)
    messages = list(_messages(document, part_of))
    text = " ".join(messages[:_SHOWN])
    if len(messages) > _SHOWN:
        text += f" And {len(messages) - _SHOWN} more, in the report (XCom)."
    return _failure(kind, f"{text} {kind.remedy}".strip(), exit_code)


def _failure(kind: type[errors.MemwalOpsError], text: str, exit_code: int | None = None) -> Failure:
    code = kind.exit_code if exit_code is None else exit_code
    return Failure(kind.reason, code, f"{kind.reason} (exit code {code}): {redact(text)}", kind in _RETRYABLE)


def _messages(document: Mapping[str, Any], part_of: PartOf) -> Iterator[str]:
    for blocked in document.get("blocked", ()):
        part, place = part_of(blocked)
        yield f"{', '.join(filter(None, (part, place)))}: {blocked['reason']}: {blocked['detail']}"
    for skipped in document.get("skipped", ()):
        if skipped["fault"]:
            yield f"{skipped['path']}: {skipped['reason']}: {skipped['detail']}"
    for index in document.get("indexes", ()):
        if index["error"] is not None:
            yield f"Index {index['name']}: {index['error']['reason']}: {index['error']['detail']}"
    parts = document.get("regions")
    if isinstance(parts, dict):
        for region in parts.get("unreadable", ()):
            yield f"Region {region['region_id']}: {region['error']}"
    yield from filter(None, [document.get("replaced")])
    for candidate in document.get("failed", ()):
        yield f"Not deleted: {candidate['path']}: {candidate['error']}"
    for step in document.get("steps", ()):
        if step["error"] is not None:
            yield f"{step['step']}: {step['error']['reason']}: {step['error']['message']}"
        elif step["report"] is not None:
            yield from (f"{step['step']}: {message}" for message in _messages(step["report"], part_of))
