"""Find metrics of jobs by their meaning (``MetricSpec.role``), for code that is independent of formats.

A table has the metrics of one format, so the first metric of a role that is present is the table's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.registry import formats, job_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memwal_ops.core.job import JobSpec, MetricSpec, Role


def amount(figures: Mapping[str, float], role: Role, kind: str = "backlog") -> float | None:
    """The value of a role among the metrics of a poll (``backlog``) or of a run (``run``); None if there is none."""
    name = name_of(figures, role, kind)
    return None if name is None else figures[name]


def name_of(figures: Mapping[str, float], role: Role, kind: str = "backlog") -> str | None:
    """The name of the metric of a role; None if there is none."""
    declared = metrics_of(figures, kind).items()
    return next((name for name, metric in declared if metric.role == role and name in figures), None)


def noun_of(figures: Mapping[str, float], role: Role) -> str:
    """What the backlog metric of a role counts, in the plural: ``generations``, ``regions`` of ``blocked_regions``.

    ``parts`` if the metric's name is no noun, or there is none.
    """
    noun = (name_of(figures, role) or "").removeprefix(f"{role}_").replace("_", " ")
    return noun if noun.endswith("s") else "parts"


def shared_noun(backlogs: Iterable[Mapping[str, float]], role: Role) -> str:
    """:func:`noun_of` where all backlogs have the same, as those of tables of one format do; else ``parts``."""
    nouns = {noun_of(figures, role) for figures in backlogs if figures}
    return nouns.pop() if len(nouns) == 1 else "parts"


def metrics_of(figures: Mapping[str, float], kind: str = "backlog") -> Mapping[str, MetricSpec]:
    """The metrics of the format whose jobs declare all of these figures, by name; of every format if none does.

    Two formats may use one name for different things: ``fragments`` of a Lance table are data files, those of a
    Zeppelin namespace wait in its log.
    """
    every: dict[str, MetricSpec] = {}
    for format_name in formats():
        declared = _declared(format_name, kind)
        if figures.keys() <= declared.keys():
            return declared
        every = {**declared, **every}
    return every


def _declared(format_name: str, kind: str) -> Mapping[str, MetricSpec]:
    """The metrics of a format by name; made once for the specs that are registered."""
    specs = job_specs(format_name)
    known = _KNOWN.get((format_name, kind))
    if known is None or known[0] is not specs:
        declared = {name: metric for _, name, metric in _metrics_of_format(format_name, kind)}
        known = _KNOWN[format_name, kind] = (specs, declared)
    return known[1]


_KNOWN: dict[tuple[str, str], tuple[Mapping[str, JobSpec], Mapping[str, MetricSpec]]] = {}


def jobs_of(role: Role, kind: str = "backlog") -> tuple[str, ...]:
    """The jobs that have a metric of a role; ``backlog`` is a metric of the job that reduces it."""
    return tuple(dict.fromkeys(spec.name for spec, _, metric in _metrics(kind) if metric.role == role))


def exported_metrics(kind: str) -> Mapping[str, MetricSpec]:
    """Every metric that is exported to Prometheus, by its exported name, as the first job declares it."""
    exported: dict[str, MetricSpec] = {}
    for _, _, metric in _metrics(kind):
        if metric.exported is not None:
            exported.setdefault(metric.exported, metric)
    return exported


def _metrics(kind: str) -> Iterator[tuple[JobSpec, str, MetricSpec]]:
    for format_name in formats():
        yield from _metrics_of_format(format_name, kind)


def _metrics_of_format(format_name: str, kind: str) -> Iterator[tuple[JobSpec, str, MetricSpec]]:
    for spec in job_specs(format_name).values():
        yield from ((spec, name, metric) for name, metric in spec.metrics.items() if metric.kind == kind)
