"""Find metrics of jobs by their meaning (``MetricSpec.role``), for code that is independent of formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memwal_ops.core import job
from memwal_ops.core.registry import formats, job_specs


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
        declared = self.metrics.items()
        return next((name for name, metric in declared if metric.role == role and name in self.values), None)

    def noun_of(self, role: job.Role) -> str:
        """What the metric of a role counts, in the plural: ``generations``, ``regions`` of ``blocked_regions``.

        ``parts`` if the metric's name is not a noun, or there is none.
        """
        noun = (self.name_of(role) or "").removeprefix(f"{role}_").replace("_", " ")
        return noun if noun.endswith("s") else "parts"

    @property
    def metrics(self) -> Mapping[str, job.MetricSpec]:
        """The metrics of the format by name."""
        if self.format is not None:
            return _declared(self.format, self.kind)
        every: dict[str, job.MetricSpec] = {}
        for name in formats():
            every = {**_declared(name, self.kind), **every}
        return every


def backlog_of(table: Mapping[str, Any]) -> Figures:
    """The backlog of a table's status document."""
    return Figures(table["backlog"], table.get("format"))


def shared_noun(tables: Iterable[Mapping[str, Any]], role: job.Role) -> str:
    """:meth:`Figures.noun_of` where all status documents have the same, as those of one format do; else ``parts``."""
    nouns = {backlog_of(table).noun_of(role) for table in tables if table["backlog"]}
    return nouns.pop() if len(nouns) == 1 else "parts"


def _declared(format_name: str, kind: str) -> Mapping[str, job.MetricSpec]:
    """The metrics of a format by name; made once for the specs that are registered."""
    specs = job_specs(format_name)
    known = _KNOWN.get((format_name, kind))
    if known is None or known[0] is not specs:
        declared = {name: metric for _, name, metric in _metrics_of_format(format_name, kind)}
        known = _KNOWN[format_name, kind] = (specs, declared)
    return known[1]


_KNOWN: dict[tuple[str, str], tuple[Mapping[str, job.JobSpec], Mapping[str, job.MetricSpec]]] = {}


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
