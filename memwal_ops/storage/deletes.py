"""Deleting many objects: batches, and who exactly failed.

obstore reports one error for a whole batch and does not say which objects it concerns. A batch
that failed is therefore halved until each failure has a name; k failures among n objects cost
about k * log2(n) further requests. Deleting again what is gone is harmless. May not enter:
what may be deleted.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError, StorageCredentialsError, StoreUnavailableError, TableNotFoundError
from memwal_ops.storage.api import DeleteReport
from memwal_ops.storage.errors import is_absent, is_whole_request
from memwal_ops.storage.retries import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memwal_ops.storage.retries import RetryPolicy

# Of the store, not of one object: the next batch would fail alike.
_OF_THE_STORE = (StorageCredentialsError, StoreUnavailableError, TableNotFoundError)


def delete_many(
    paths: Iterable[str],
    *,
    delete: Callable[[Sequence[str]], None],
    check: Callable[[str], str],
    batch_size: int,
    policy: RetryPolicy,
) -> DeleteReport:
    """Delete all ``paths``, each at most ``batch_size`` to a request.

    Args:
        paths: consumed lazily.
        delete: one request; raises if any of its objects could not be deleted.
        check: raises ``MemwalOpsError`` for a path that may not be touched.
        batch_size: objects per request.
        policy: for transient errors of one request.

    Memory holds one batch and the failures.
    """
    deleted = 0
    failed: dict[str, str] = {}
    broken: MemwalOpsError | None = None
    remaining = iter(paths)
    while batch := list(dict.fromkeys(islice(remaining, batch_size))):
        allowed = []
        for path in batch:
            try:
                check(path)
            except MemwalOpsError as exc:
                failed[path] = str(exc)
            else:
                allowed.append(path)
        if broken is None and allowed:
            before = len(failed)
            broken = _delete_batch(allowed, delete, policy, failed)
            deleted += len(allowed) - (len(failed) - before)
        else:
            failed.update({path: str(broken) for path in allowed})
    return DeleteReport(deleted=deleted, failed=failed)


def _delete_batch(
    batch: list[str], delete: Callable[[Sequence[str]], None], policy: RetryPolicy, failed: dict[str, str]
) -> MemwalOpsError | None:
    """Delete one batch, add to ``failed``; returns the store's own failure if that is what it was."""
    pending = [batch]
    while pending:
        part = pending.pop()
        try:
            call(lambda part=part: delete(part), path=_label(part), action="delete", policy=policy)  # type: ignore[misc]
        except MemwalOpsError as exc:
            cause = exc.__cause__ or exc
            if len(part) == 1 and is_absent(cause):
                continue
            if isinstance(exc, _OF_THE_STORE):
                failed.update({path: str(exc) for rest in (part, *pending) for path in rest})
                return exc
            if len(part) == 1 or is_whole_request(cause):
                failed.update({path: str(exc) for path in part})
            else:
                middle = len(part) // 2
                pending += [part[middle:], part[:middle]]
    return None


def _label(part: list[str]) -> str:
    return part[0] if len(part) == 1 else f"{part[0]} and {len(part) - 1} more"
