"""Poll a table: read its backlog metrics, and read once what several jobs need."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from memwal_ops.core.options import OptionError
from memwal_ops.core.registry import package_of
from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from memwal_ops.core.options import Options
    from memwal_ops.core.protocols import Table

_T = TypeVar("_T")
_OptionsT = TypeVar("_OptionsT", bound="Options")
_options: ContextVar[Mapping[str, Mapping[str, Any]]] = ContextVar(
    "memwal_ops_polled_options", default=MappingProxyType({})
)
_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("memwal_ops_poll", default=None)


@contextmanager
def poll_cache(options: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[None]:
    """Cache what :func:`cached_for_poll` reads while the block runs; the next poll must see new writes.

    Args:
        options: by job, the options of its runs, by name.
    """
    before, others = _shared.set({}), _options.set(options or {})
    try:
        yield
    finally:
        _shared.reset(before)
        _options.reset(others)


def polled_options(job: str, options: type[_OptionsT]) -> _OptionsT:
    """Return the options of a job's runs, for metrics that depend on them; defaults outside of a supervisor's poll."""
    try:
        return options.read(_options.get().get(job, {}))
    except (OptionError, InvalidUsageError):
        return options()  # of a configuration that was refused


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


def built_in_backlog(table: Table) -> dict[str, float]:
    """The backlog metrics of the jobs of this package: a fault in a job of another one must not fail a summary.

    Raises:
        MemwalOpsError: the table cannot be read.
    """
    figures: dict[str, float] = {}
    for spec in table.jobs.values():
        if spec.backlog_metrics and package_of(spec) is None:
            figures |= spec.job.backlog(table)
    return figures
