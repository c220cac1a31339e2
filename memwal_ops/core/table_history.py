"""The history that a table itself records: its revisions and their writers, its log, its indexes and its storage.

For pages and reports; a format that can read it implements :class:`HasRecentHistory`. It reaches back as far as the
table's retention does.

Poll a table: read its backlog metrics, and read once what several jobs need. What jobs return is validated, so that a
fault of another package's job is reported as a fault of that package.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class RevisionRecord:
    """One retained revision.

    Attributes:
        by: the program that made it, for example ``memwal-ops merge`` or ``lance 14.0.2``.
        operation: what kind of change it was, in the format's own word; empty if that is not known.
        rows: its live rows; None if they are not recorded.
        bytes: the size of its data files; None if it is not recorded.
        merged: how many parts of the log it merged.
        merged_rows: their rows; None if one of them has none recorded.
        merged_bytes: their size, likewise.
    """

    revision: int
    committed: datetime | None
    by: str
    operation: str
    rows: int | None
    bytes: int | None
    merged: int = 0
    merged_rows: int | None = 0
    merged_bytes: int | None = 0


@dataclass(frozen=True, slots=True)
class LogRecord:
    """The life of one part of the log, such as a generation.

    Attributes:
        flushed: when it was added to the log; None if that was before what is retained.
        merged: when it was merged; None if it was not, or before what is retained.
        merged_in: the revision that merged it, if that is retained.
        removed: when its entry was removed from the log; its files are deleted later.
    """

    name: str
    rows: int | None
    bytes: int | None
    flushed: datetime | None
    merged: datetime | None
    merged_in: int | None
    removed: datetime | None
    state: str


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """How much of the table an index covers. ``covered`` and ``total`` count parts of the table."""

    name: str
    kind: str
    covered: int
    total: int
    uncovered_rows: int


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """Storage used by objects of one kind. ``held_by`` is why they are kept, or the command that frees them."""

    what: str
    objects: int
    bytes: int
    held_by: str


@dataclass(frozen=True, slots=True)
class TableHistory:
    """The history of one table; lists are ordered newest first.

    ``truncated``: what is included, if something was left out, to be read after "Only"; else empty.
    """

    revisions: tuple[RevisionRecord, ...]
    log: tuple[LogRecord, ...] = ()
    indexes: tuple[IndexRecord, ...] = ()
    storage: tuple[StorageRecord, ...] = ()
    truncated: str = ""

    def to_json(self) -> dict[str, Any]:
        """The history as a JSON document; times are ISO 8601, UTC."""
        document: dict[str, Any] = asdict(self, dict_factory=_jsonable)
        return document


@runtime_checkable
class HasRecentHistory(Protocol):
    """A format that reports the history of its tables; optional."""

    def recent_history(self, table: Any, limit: int) -> TableHistory:
        """The newest ``limit`` revisions of a table, and the generations that they mention. Reads metadata only."""


def history_document(table: Table, limit: int) -> Mapping[str, Any] | None:
    """The history of a table as a JSON document; None if its format does not report one."""
    known = table.format
    return known.recent_history(table, limit).to_json() if isinstance(known, HasRecentHistory) else None


def storage_of_gc(report: Mapping[str, Any]) -> list[StorageRecord]:
    """Sum up the candidates in a document of ``gc --json`` by kind and reason, the largest first."""
    records: dict[tuple[str, str], StorageRecord] = {}
    for verdict in ("delete", "held", "unknown"):
        entries = report.get(verdict)
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict):
                continue
            why = _DELETABLE if verdict == "delete" else str(entry.get("because") or "not recognized")
            kind = str(entry.get("kind", "")).replace("_", " ")
            before = records.get((kind, why), StorageRecord(kind, 0, 0, why))
            objects, size = before.objects + _number(entry, "objects"), before.bytes + _number(entry, "bytes")
            records[kind, why] = StorageRecord(kind, objects, size, why)
    return sorted(records.values(), key=lambda record: -record.bytes)


def _number(one: Mapping[str, Any], name: str) -> int:
    """A number of an entry; 0 for anything else, as the report may be that of another package."""
    value = one.get(name)
    return value if isinstance(value, int) else 0


_DELETABLE = "nothing (memwal-ops gc --apply deletes it)"


def _jsonable(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in pairs}
