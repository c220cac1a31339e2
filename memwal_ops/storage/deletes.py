"""Delete many objects in batches and report exactly which deletions failed.

obstore reports one error for a whole batch, without the objects that failed. A failed batch
is therefore bisected until each failure has a path; k failures among n objects cost
about k * log2(n) further requests. Deleting an absent object again is harmless. If the store refuses
batches with these credentials, the objects are deleted one by one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError, StorageCredentialsError, StoreUnavailableError, TableNotFoundError
from memwal_ops.storage.api import DeleteReport
from memwal_ops.storage.errors import is_absent, is_whole_request, refuses_batches
from memwal_ops.storage.retries import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memwal_ops.storage.retries import RetryPolicy

_CONCURRENT_DELETES = 8  # single deletes in flight
# Failures of the store, not of one object: the next batch would fail in the same way.
_STORE_FAILURES = (StorageCredentialsError, StoreUnavailableError, TableNotFoundError)


def delete_many(
    paths: Iterable[str],
    *,
    delete: Callable[[Sequence[str]], None],
    check: Callable[[str], str],
    batch_size: int,
    policy: RetryPolicy,
    delete_one: Callable[[str], None] | None = None,
) -> DeleteReport:
    """Delete all ``paths``, at most ``batch_size`` in each request.

    Args:
        paths: consumed lazily.
        delete: sends one request; raises if any of its objects could not be deleted.
        check: raises ``MemwalOpsError`` for a path that must not be deleted.
        batch_size: objects per request.
        policy: for transient errors of one request.
        delete_one: deletes one object by another kind of request, for stores that may refuse batches.

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
            broken = _delete_batch(allowed, delete, delete_one, policy, failed)
            deleted += len(allowed) - (len(failed) - before)
        else:
            failed.update({path: str(broken) for path in allowed})
    return DeleteReport(deleted=deleted, failed=failed)


def _delete_batch(
    batch: list[str],
    delete: Callable[[Sequence[str]], None],
    delete_one: Callable[[str], None] | None,
    policy: RetryPolicy,
    failed: dict[str, str],
) -> MemwalOpsError | None:
    """Delete one batch and add its failures to ``failed``; return the error if it is of the store as a whole."""
    pending = [batch]
    while pending:
        part = pending.pop()
        try:
            taken = call(
                lambda part=part: _taken(delete, part, may_refuse=delete_one is not None),  # type: ignore[misc]
                path=_label(part),
                action="delete",
                policy=policy,
            )
        except MemwalOpsError as exc:
            cause = exc.__cause__ or exc
            if len(part) == 1 and is_absent(cause):
                continue
            if isinstance(exc, _STORE_FAILURES):
                failed.update({path: str(exc) for rest in (part, *pending) for path in rest})
                return exc
            if len(part) == 1 or is_whole_request(cause):
                failed.update({path: str(exc) for path in part})
            else:
                middle = len(part) // 2
                pending += [part[middle:], part[:middle]]
        else:
            if not taken and delete_one is not None:
                broken = _delete_singly(part, delete_one, policy, failed)
                if broken is not None:
                    failed.update({path: str(broken) for rest in pending for path in rest})
                    return broken
    return None


def _taken(delete: Callable[[Sequence[str]], None], part: list[str], *, may_refuse: bool) -> bool:
    """Send one batch request; return False if the store refused it because it is a batch: not to be retried."""
    try:
        delete(part)
    except Exception as exc:
        if may_refuse and refuses_batches(exc):
            return False
        raise
    return True


def _delete_singly(
    paths: list[str], delete_one: Callable[[str], None], policy: RetryPolicy, failed: dict[str, str]
) -> MemwalOpsError | None:
    """Delete one by one, up to 8 concurrently; otherwise like :func:`_delete_batch`."""

    def attempt(path: str) -> MemwalOpsError | None:
        try:
            call(lambda: delete_one(path), path=path, action="delete", policy=policy)
        except MemwalOpsError as exc:
            return None if is_absent(exc.__cause__ or exc) else exc
        return None

    with ThreadPoolExecutor(_CONCURRENT_DELETES) as pool:
        for start in range(0, len(paths), _CONCURRENT_DELETES):
            group = paths[start : start + _CONCURRENT_DELETES]
            errors = list(zip(group, pool.map(attempt, group), strict=True))
            failed.update({path: str(error) for path, error in errors if error is not None})
            broken = next((error for _, error in errors if isinstance(error, _STORE_FAILURES)), None)
            if broken is not None:
                failed.update({path: str(broken) for path in paths[start + _CONCURRENT_DELETES :]})
                return broken
    return None


def _label(part: list[str]) -> str:
    return part[0] if len(part) == 1 else f"{part[0]} and {len(part) - 1} more"
