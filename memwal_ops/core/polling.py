"""Cache, for one poll, what several jobs read from a table: otherwise each job's backlog reads every region again."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

_T = TypeVar("_T")
_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("memwal_ops_poll", default=None)


@contextmanager
def one_poll() -> Iterator[None]:
    """Cache what :func:`shared` reads while the block runs; the next poll must see new writes."""
    before = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(before)


def shared(table: object, what: str, read: Callable[[], _T]) -> _T:
    """``read()``, or what it returned before for the same table object in this poll; outside of a poll ``read()``."""
    known = _shared.get()
    if known is None:
        return read()
    key = (id(table), what)
    if key not in known:
        known[key] = (table, read())  # with the table: its id is not used again while this is known
    found: _T = known[key][1]
    return found
