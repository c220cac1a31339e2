"""Record what a run publishes, so that no error of it reads as if nothing had been changed.

A job may publish several revisions, and fail afterwards. What a format publishes is recorded right after it became
visible; an error that ends the run then names it first, in every front end.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_RUN: ContextVar[list[int] | None] = ContextVar("revisions of the run", default=None)
_NAMED = 5


def record(revision: int) -> None:
    """Record a revision of the run's table that has just become visible; without a run, nothing is recorded."""
    revisions = _RUN.get()
    if revisions is not None and revision not in revisions[-1:]:
        revisions.append(revision)


@contextmanager
def recording(revisions: list[int]) -> Iterator[None]:
    """Record what is published in the block in ``revisions``.

    Raises:
        MemwalOpsError: that of the block; its remedy begins with what was published before.
    """
    before = len(revisions)
    token = _RUN.set(revisions)
    try:
        yield
    except MemwalOpsError as error:
        if published := revisions[before:]:
            error.remedy = f"{_text(published)} {error.remedy}"
        raise
    finally:
        _RUN.reset(token)


def _text(published: Sequence[int]) -> str:
    shown = ", ".join(map(str, published[:_NAMED])) + (" ..." if len(published) > _NAMED else "")
    return f"What this run published before stays: {'revisions' if len(published) > 1 else 'revision'} {shown}."
