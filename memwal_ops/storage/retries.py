"""Retry transient errors with jittered backoff, until a deadline.

These are the only retries of requests: obstore's own is switched off (:mod:`memwal_ops.storage.clients`),
so that the two do not multiply, and no conditional write is repeated without reading back.
:mod:`memwal_ops.storage.errors` defines which errors are transient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from memwal_ops.storage.errors import is_transient, translate

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to retry: all times in seconds.

    ``deadline`` bounds the whole call from its first attempt; no attempt starts after it, and
    a running attempt is not interrupted (the HTTP client's ``timeout``, 30 s by default, bounds it).
    """

    deadline: float = 60.0
    first_wait: float = 0.1
    max_wait: float = 5.0


class _UndecidedError(Exception):
    """A write was refused, but the object was absent when it was read back: only another attempt can decide."""


def retried(attempt: Callable[[], T], again: Callable[[BaseException], bool], policy: RetryPolicy) -> T:
    """Run ``attempt`` again after each error for which ``again`` is true, until the deadline; raise the last error."""
    retrying = Retrying(
        retry=retry_if_exception(again),
        wait=wait_random_exponential(multiplier=policy.first_wait, max=policy.max_wait),
        stop=stop_before_delay(policy.deadline),
        reraise=True,
    )
    return retrying(attempt)


def call(attempt: Callable[[], T], *, path: str, action: str, policy: RetryPolicy) -> T:
    """Run a repeatable request until it succeeds, fails permanently, or reaches the deadline.

    Raises:
        StoreUnavailableError: transient errors continued until the deadline.
        MemwalOpsError: the error's own class, at once, if it is not transient.
    """
    try:
        return retried(attempt, lambda exc: isinstance(exc, _UndecidedError) or is_transient(exc), policy)
    except Exception as exc:
        raise translate(exc, path=path, action=action) from exc


def conditional_write(
    write: Callable[[], bool], read_back: Callable[[], bool | None], *, path: str, policy: RetryPolicy
) -> bool:
    """Make a conditional write; if the store's response is lost, read the object back to determine the outcome.

    Why reading back is needed: (1) version 7 is put if absent; (2) the store writes it and the
    connection breaks; (3) the put is repeated and refused with "already exists"; (4) taking that for a
    commit conflict, the caller would write version 8 with the same content.

    Args:
        write: one attempt; True if it was written, False if the store refused it.
        read_back: after a lost response: True if this write's content is stored, False if other content is, None
            if the condition still holds and nothing was decided.
        path: for messages.
        policy: see :class:`RetryPolicy`.

    A refusal of the first attempt is final and not read back. Equal contents of two
    writers cannot be distinguished after a lost response: a caller for which that matters writes
    something unique into the content.

    Raises:
        StoreUnavailableError: no response before the deadline; whether the write succeeded is unknown.
    """
    response_lost = False

    def attempt() -> bool:
        nonlocal response_lost
        if response_lost:
            stored = read_back()
            if stored is not None:
                return stored
        try:
            written = write()
        except Exception as exc:
            response_lost = response_lost or is_transient(exc)
            raise
        if written or not response_lost:
            return written
        # Refused, but an earlier attempt may have arrived late.
        stored = read_back()
        if stored is None:
            raise _UndecidedError(f"{path} was refused and is absent")
        return stored

    return call(attempt, path=path, action="write", policy=policy)
