"""Poll a table: read its backlog metrics, and read once what several jobs need.

What jobs return is validated, so that a fault of another package's job is reported as a fault of that package.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

from memwal_ops.core import registry, run
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import OptionError, Options
from memwal_ops.core.protocols import DetectsChanges, Table
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.objects import open_store

_T = TypeVar("_T")

_OURS = "memwal_ops."

_OptionsT = TypeVar("_OptionsT", bound="Options")

_options: ContextVar[Mapping[str, Mapping[str, Any]]] = ContextVar(
    "memwal_ops_polled_options", default=MappingProxyType({})
)

_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("memwal_ops_poll", default=None)


@contextmanager
def poll_cache(options: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[None]:
    """Cache what :func:`cached_for_poll` reads while the block runs; the next poll must see new writes.

    ``options``: by job, the options of its runs, by name.
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
    value: _T = cache[key][1]
    return value


def built_in_backlog(table: Table) -> dict[str, float]:
    """The backlog metrics of the jobs of this package: a fault in a job of another one must not fail a summary.

    Raises ``MemwalOpsError``: the table cannot be read.
    """
    figures: dict[str, float] = {}
    for spec in table.jobs.values():
        if spec.backlog_metrics and registry.package_of(spec) is None:
            figures |= spec.job.backlog(table)
    return figures


def checked_figures(job: JobSpec, figures: object) -> dict[str, float]:
    """Return the backlog figures of a job.

    Raises ``JobPluginError``: they are not a mapping of declared names to numbers.
    """
    if not hasattr(figures, "items"):
        raise run.interface_error(job, f"its backlog is {figures!r:.80}, not a mapping")
    for name, value in figures.items():
        if name not in job.backlog_metrics:
            raise run.interface_error(job, f"its backlog has the figure {name!r:.80}, which it does not declare")
        if not run.is_amount(value):
            raise run.interface_error(job, f"its backlog has {value!r:.80} for {name}, not a number")
    return {name: run.plain(value) for name, value in figures.items()}


def poll_table(
    table: Table, jobs: Iterable[JobSpec], options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Mapping[str, float], list[MemwalOpsError]]:
    """Return the figures of all jobs, and the errors: the failure of one job does not hide the figures of others.

    ``options``: by job, the options of its runs, by name.
    """
    figures: dict[str, float] = {}
    faults: list[MemwalOpsError] = []
    with poll_cache(options):
        for job in jobs:
            try:
                if job.backlog_metrics:
                    figures |= checked_figures(job, job.job.backlog(table))
            except MemwalOpsError as error:
                faults.append(error)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - code of another package, or a bug of ours
                get_logger(__name__).exception("unexpected_error", job=job.name)
                faults.append(run.unexpected_error(error, job))
    return figures, faults


def fingerprint_of(table: Table, jobs: Iterable[JobSpec]) -> str | None:
    """Return the fingerprint for :func:`is_unchanged`, taken before the figures of ``jobs`` are read.

    None if there is none: the format has no fingerprints, or a job of another package may read anything else.
    """
    kind: object = table.format
    foreign = any(job.backlog_metrics and not job.load.startswith(_OURS) for job in jobs)
    if foreign or not isinstance(kind, DetectsChanges):
        return None
    try:
        fingerprint = kind.fingerprint(table)
    except MemwalOpsError:
        return None  # the poll itself reports the error
    return None if fingerprint is None else f"{table.format.name} {fingerprint}"


def is_unchanged(uri: str, storage_options: Mapping[str, str], fingerprint: str) -> bool:
    """Return whether a table still has a fingerprint of :func:`fingerprint_of`; it is not opened. False if unknown."""
    name, _, known = fingerprint.partition(" ")
    kind: object = registry.formats().get(name)
    if not isinstance(kind, DetectsChanges):
        return False
    try:
        return kind.is_unchanged(open_store(registry.location_of(uri, storage_options)), known)
    except MemwalOpsError:
        return False
