"""Poll a table: read its backlog metrics, and read once what several jobs need; find metrics by their meaning.

What jobs return is validated, so that a fault of another package's job is reported as a fault of that package. The
meaning of a metric is its ``MetricSpec.role``, for code that is independent of formats.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from memwal_ops.core import job, registry, run
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import OptionError, Options
from memwal_ops.core.protocols import DetectsChanges, Table
from memwal_ops.core.registry import formats, job_specs
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.objects import open_store


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one table, with the meaning that the jobs of its format give them.

    Two formats may use one name for different things: ``fragments`` of a Lance table are data files, those of a
    Zeppelin namespace wait in its log.

    ``format``: the name of the table's format; None: it is not known, and each name has its meaning in the first format
    that has it. ``kind``: ``backlog``: those of a poll; ``run``: those of a run.
    """

    values: Mapping[str, float]
    format: str | None
    kind: str = "backlog"

    def amount(self, role: job.Role) -> float | None:
        """The value of the metric of a role; None if there is none."""
        name = self.name_of(role)
        return None if name is None else self.values[name]

    def name_of(self, role: job.Role) -> str | None:
        """The name of the metric of a role; None if there is none."""
        return next((name for name in _declared(self.format, self.kind)[1].get(role, ()) if name in self.values), None)

    def noun_of(self, role: job.Role) -> str:
        """What the metric of a role counts, in the plural: ``generations``, ``regions`` of ``blocked_regions``.

        ``parts`` if the metric's name is not a noun, or there is none.
        """
        noun = (self.name_of(role) or "").removeprefix(f"{role}_").replace("_", " ")
        return noun if noun.endswith("s") else "parts"

    @property
    def metrics(self) -> Mapping[str, job.MetricSpec]:
        """The metrics of the format by name."""
        return _declared(self.format, self.kind)[0]


def backlog_of(table: Mapping[str, Any]) -> Figures:
    """The backlog of a table's status document."""
    return Figures(table["backlog"], table.get("format"))


def shared_noun(tables: Iterable[Mapping[str, Any]], role: job.Role) -> str:
    """:meth:`Figures.noun_of` where all status documents have the same, as those of one format do; else ``parts``."""
    nouns = {backlog_of(table).noun_of(role) for table in tables if table["backlog"]}
    return nouns.pop() if len(nouns) == 1 else "parts"


_Declared = tuple[Mapping[str, job.MetricSpec], Mapping[job.Role | None, list[str]]]


def _declared(format_name: str | None, kind: str) -> _Declared:
    """The metrics of a format by name, and their names by role; made once for the specs that are registered."""
    names = formats() if format_name is None else (format_name,)
    specs = [job_specs(name) for name in names]
    known = _KNOWN.get((format_name, kind))
    if known is None or [*map(id, known[0])] != [*map(id, specs)]:
        declared: dict[str, job.MetricSpec] = {}
        for format_ in names:
            declared = {name: metric for _, name, metric in _metrics_of_format(format_, kind)} | declared
        roles = {metric.role for metric in declared.values()}
        by_role = {role: [name for name, metric in declared.items() if metric.role == role] for role in roles}
        known = _KNOWN[format_name, kind] = (specs, (declared, by_role))
    return known[1]


_KNOWN: dict[tuple[str | None, str], tuple[list[Mapping[str, job.JobSpec]], _Declared]] = {}


def jobs_of(role: job.Role, kind: str = "backlog") -> tuple[str, ...]:
    """The jobs that have a metric of a role; ``backlog`` is a metric of the job that reduces it."""
    specs = [job_specs(name) for name in formats()]
    registered, jobs = _JOBS.get((role, kind), ([], ()))
    if [*map(id, registered)] != [*map(id, specs)]:
        jobs = tuple(dict.fromkeys(spec.name for spec, _, metric in _metrics(kind) if metric.role == role))
        _JOBS[role, kind] = specs, jobs
    return jobs


_JOBS: dict[tuple[job.Role, str], tuple[list[Mapping[str, job.JobSpec]], tuple[str, ...]]] = {}


def exported_metrics(kind: str) -> Mapping[str, job.MetricSpec]:
    """Every metric that is exported to Prometheus, by its exported name, as the first job declares it."""
    exported: dict[str, job.MetricSpec] = {}
    for _, _, metric in _metrics(kind):
        if metric.exported is not None:
            exported.setdefault(metric.exported, metric)
    return exported


def _metrics(kind: str) -> Iterator[tuple[job.JobSpec, str, job.MetricSpec]]:
    for format_name in formats():
        yield from _metrics_of_format(format_name, kind)


def _metrics_of_format(format_name: str, kind: str) -> Iterator[tuple[job.JobSpec, str, job.MetricSpec]]:
    for spec in job_specs(format_name).values():
        yield from ((spec, name, metric) for name, metric in spec.metrics.items() if metric.kind == kind)


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
