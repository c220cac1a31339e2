"""Cache, during one poll, what several jobs read from a table, so that a region is read once and not once per job."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

_T = TypeVar("_T")
_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("memwal_ops_poll", default=None)


@contextmanager
def poll_cache() -> Iterator[None]:
    """Cache what :func:`cached_for_poll` reads while the block runs; the next poll must see new writes."""
    before = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(before)


def cached_for_poll(table: object, what: str, read: Callable[[], _T]) -> _T:
    """Return ``read()``, called once per table object, ``what`` and poll; outside of a poll, called every time."""
    cache = _shared.get()
    if cache is None:
        return read()
    key = (id(table), what)
    if key not in cache:
        cache[key] = (table, read())  # with the table: its id is not reused while it is referenced
    found: _T = cache[key][1]
    return found
