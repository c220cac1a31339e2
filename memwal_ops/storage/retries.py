"""Trying again: transient errors only, with jitter, until a deadline.

This is the only retry there is: obstore's own is switched off (:mod:`memwal_ops.storage.clients`),
so that the two do not multiply and so that no conditional write is repeated behind our back.
May not enter: which errors are transient (:mod:`memwal_ops.storage.errors`).
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
    """How long to go on: all times in seconds.

    ``deadline`` bounds the whole call from its first attempt; no attempt starts after it, and
    one that runs is not cut (the HTTP client's ``timeout``, 30 s unless given, does that).
    """

    deadline: float = 60.0
    first_wait: float = 0.1
    longest_wait: float = 5.0


class _UndecidedError(Exception):
    """A refused write whose object is gone by the time we look: only another attempt can tell."""


def call(attempt: Callable[[], T], *, path: str, action: str, policy: RetryPolicy) -> T:
    """Run a repeatable request until it succeeds, fails for good, or the deadline is near.

    Raises:
        StoreUnavailableError: transient errors did not end before the deadline.
        MemwalOpsError: the error's own class, at once, where it is not transient.
    """
    retrying = Retrying(
        retry=retry_if_exception(lambda exc: isinstance(exc, _UndecidedError) or is_transient(exc)),
        wait=wait_random_exponential(multiplier=policy.first_wait, max=policy.longest_wait),
        stop=stop_before_delay(policy.deadline),
        reraise=True,
    )
    try:
        return retrying(attempt)
    except Exception as exc:
        raise translate(exc, path=path, action=action) from exc


def conditional_write(
    write: Callable[[], bool], read_back: Callable[[], bool | None], *, path: str, policy: RetryPolicy
) -> bool:
    """A conditional write whose answer may be lost, decided by what then stands there.

    Why reading back is needed: (1) we put version 7 if absent; (2) the store writes it and the
    connection breaks; (3) we put it again and are told that it exists; (4) taking that for a
    lost race we would write version 8 with the same content.

    Args:
        write: one attempt; True where it landed, False where the store refused it.
        read_back: after a lost answer: True if our content stands, False if another's, None
            if the condition still holds and nothing was decided.
        path: for messages.
        policy: see :class:`RetryPolicy`.

    A refusal of the first attempt is definite and not looked at again. Equal contents of two
    writers cannot be told apart after a lost answer: a caller for whom that matters writes
    something of its own into the content.

    Raises:
        StoreUnavailableError: no answer before the deadline; whether the write landed is unknown.
    """
    answer_lost = False

    def attempt() -> bool:
        nonlocal answer_lost
        if answer_lost:
            found = read_back()
            if found is not None:
                return found
        try:
            landed = write()
        except Exception as exc:
            answer_lost = answer_lost or is_transient(exc)
            raise
        if landed or not answer_lost:
            return landed
        # Refused, but an earlier request of ours may have arrived late.
        found = read_back()
        if found is None:
            raise _UndecidedError(f"{path} was refused and is absent")
        return found

    return call(attempt, path=path, action="write", policy=policy)
