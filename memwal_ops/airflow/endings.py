"""How a run ended that did not end well: one reason, its exit code, and whether trying again can mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.errors import MemwalOpsError, RegionsBlockedError
from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SHOWN = 5
# The store's bad moments, lost races, and what the next run tries again by itself. All else is about the table,
# its regions or the options: only a person changes that.
_WORTH_A_RETRY = frozenset(
    {
        MemwalOpsError,
        errors.IndexesBehindError,
        errors.StorageError,
        errors.StorageCredentialsError,
        errors.StoreUnavailableError,
        errors.ObjectNotFoundError,
        errors.VersionGoneError,
        errors.DeletesFailedError,
        errors.CommitConflictError,
        errors.CommitStateUnknownError,
    }
)
_CLASSES = {
    found.exit_code: found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, MemwalOpsError)
}


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a task fails. ``message`` holds no secret."""

    reason: str
    exit_code: int
    message: str
    retry: bool

    @property
    def is_blocked(self) -> bool:
        """Whether all that is wrong is that regions are blocked; everything else was done."""
        return self.exit_code == RegionsBlockedError.exit_code


def of_error(error: BaseException) -> Ending:
    """The ending of a run that raised."""
    if isinstance(error, MemwalOpsError):
        return _ending(type(error), f"{error} {error.remedy}")
    return _ending(MemwalOpsError, f"Unexpected {type(error).__name__}: {error}")


def of_report(exit_code: int, document: Mapping[str, Any]) -> Ending | None:
    """The ending that a report tells of; None where it tells of none."""
    if not exit_code:
        return None
    kind = _CLASSES.get(exit_code, MemwalOpsError)
    told = list(_troubles(document))
    text = " ".join(told[:_SHOWN])
    if len(told) > _SHOWN:
        text += f" And {len(told) - _SHOWN} more, in the report (XCom)."
    return _ending(kind, f"{text} {kind.remedy}".strip(), exit_code)


def _ending(kind: type[MemwalOpsError], text: str, exit_code: int | None = None) -> Ending:
    code = kind.exit_code if exit_code is None else exit_code
    return Ending(kind.reason, code, f"{kind.reason} (exit code {code}): {redact(text)}", kind in _WORTH_A_RETRY)


def _troubles(document: Mapping[str, Any]) -> Iterator[str]:
    """Everything in a report that did not go well, one sentence each."""
    for one in document.get("blocked", ()):
        at = "" if one["generation"] is None else f", generation {one['generation']}"
        yield f"Region {one['region_id']}{at}: {one['reason']}: {one['detail']}"
    for one in document.get("skipped", ()):
        if one["fault"]:
            yield f"{one['path']}: {one['reason']}: {one['detail']}"
    for one in document.get("indexes", ()):
        if one["error"] is not None:
            yield f"Index {one['name']}: {one['error']['reason']}: {one['error']['detail']}"
    regions = document.get("regions")
    if isinstance(regions, dict):
        for one in regions.get("unreadable", ()):
            yield f"Region {one['region_id']}: {one['error']}"
    for one in document.get("failed", ()):
        yield f"Not deleted: {one['path']}: {one['error']}"
    for step in document.get("steps", ()):
        if step["error"] is not None:
            yield f"{step['step']}: {step['error']['reason']}: {step['error']['message']}"
        elif step["report"] is not None:
            yield from (f"{step['step']}: {told}" for told in _troubles(step["report"]))
