"""The effective configuration: for each table and job one value per key, with its source.

Of four layers the last one wins: ``default`` (of the job itself), ``fleet`` (``defaults`` in the file),
``table`` (its own entry), ``env`` (a value with a substituted environment variable).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from memwal_ops.core.job import JobSpec, Objective
from memwal_ops.core.registry import formats
from memwal_ops.core.triggers import Trigger
from memwal_ops.storage.options import MASK, is_secret_key, redact
from memwal_ops.supervisor.config import model
from memwal_ops.supervisor.config.document import Problem
from memwal_ops.supervisor.scheduling.schedules import Schedule, Window
from memwal_ops.text import duration_text


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Where a value came from: its layer, its line in the file, the substituted environment variables."""

    layer: str
    line: int | None = None
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return for example ``table, line 12``."""
        if self.variables:
            return f"env {', '.join(self.variables)}, line {self.line}"
        return self.layer if self.line is None else f"{self.layer}, line {self.line}"

    def to_json(self) -> dict[str, object]:
        """Return the entry of ``sources``."""
        return {"layer": "env" if self.variables else self.layer, "line": self.line, "variables": list(self.variables)}


DEFAULT = ValueSource("default")


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How one job runs on one table. ``options`` as in the file, validated.

    ``named``: the table's own entry names it, so it is a failure if it does not apply to the table. ``follows_debt``:
    its metrics show what is due, and the file gives it neither a schedule nor a trigger.
    """

    job: JobSpec
    enabled: bool
    apply: bool
    schedule: Schedule | None
    when: Trigger | None
    options: Mapping[str, Any]
    timeout: timedelta | None
    hung_after: timedelta
    windows: tuple[Window, ...]
    zone: ZoneInfo
    budget: model.BudgetConfig | None
    heartbeat_url: str | None
    named: bool = False
    follows_debt: bool = False
    sources: Mapping[str, ValueSource] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Return the job's name."""
        return self.job.name

    @property
    def skips_if_not_due(self) -> bool:
        """Whether its schedule does not run it while nothing is due."""
        return self.follows_debt and self.job.debt is not None and self.job.debt.skips

    def has_nothing_to_do(self, figures: Mapping[str, float]) -> bool:
        """Whether backlog figures show that a run would find nothing to do."""
        return self.job.debt is not None and self.job.debt.has_nothing_to_do(figures)

    def values(self) -> dict[str, Any]:
        """Return every key with its value, as in a file."""
        shown: dict[str, Any] = {"enabled": self.enabled}
        if not self.enabled:
            return shown
        shown["apply"] = self.apply
        shown["schedule"] = None if self.schedule is None else self.schedule.literal()
        shown["when"] = None if self.when is None else self.when.text
        shown |= {f"options.{name}": _plain(value) for name, value in self.options.items()}
        shown["timeout"] = None if self.timeout is None else duration_text(self.timeout)
        shown["hung_after"] = duration_text(self.hung_after)
        shown["windows"] = [window.text for window in self.windows]
        shown["budget"] = (
            None
            if self.budget is None
            else f"{{time: {duration_text(self.budget.time)}, per: {duration_text(self.budget.per)}}}"
        )
        shown["heartbeat_url"] = self.heartbeat_url
        return shown


@dataclass(frozen=True, slots=True)
class TableSettings:
    """One entry of ``tables``: a table by its URI, or a pattern for many.

    Attributes:
        format: the table's format; None if it must be detected from the table.
        poll: how often its backlog is read; idle_poll: the longest time between two polls while it is idle.
        expect_writes_within: a longer time without a write to its log is a finding; None: any time is as expected.
        branches: of each table those that are maintained, too; None: all.
        weight: how much its savings count, beside those of other tables.
        objectives: what it is to keep, by name.
        labels: by which the list of all tables is searched and grouped.
        database: the pattern is that of a LanceDB folder, which also has tables of namespaces.
    """

    uri: str | None
    pattern: str | None
    name: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    max_tables: int
    storage_options: Mapping[str, str]
    poll: timedelta
    idle_poll: timedelta
    format: str | None
    by_format: Mapping[str, Mapping[str, JobSettings]]
    sources: Mapping[str, ValueSource] = field(default_factory=dict, compare=False)
    database: bool = False
    branches: tuple[str, ...] | None = ()
    expect_writes_within: timedelta | None = None
    weight: float = 1.0
    objectives: Mapping[Objective, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    idle_poll_given: bool = False

    @property
    def jobs(self) -> Mapping[str, JobSettings]:
        """Return the jobs of its format; if that is unknown, the jobs of all formats, the first format first."""
        if self.format is not None:
            return self.by_format[self.format]
        merged: dict[str, JobSettings] = {}
        for jobs in self.by_format.values():
            merged = {**jobs, **merged}
        return merged

    def values(self) -> dict[str, Any]:
        """Return every key of the entry with its value, without the jobs."""
        shown: dict[str, Any] = {"uri": self.uri} if self.uri is not None else {"pattern": self.pattern}
        shown["name"] = self.name
        if self.branches != ():
            shown["branches"] = "all" if self.branches is None else list(self.branches)
        if len(formats()) > 1:
            shown["format"] = self.format
        if self.pattern is not None:
            shown |= {"include": list(self.include), "exclude": list(self.exclude), "max_tables": self.max_tables}
        shown |= {f"storage_options.{key}": value for key, value in self.storage_options.items()}
        shown["poll"] = duration_text(self.poll)
        shown["idle_poll"] = duration_text(self.idle_poll)
        if self.weight != 1:
            shown["weight"] = self.weight
        shown |= {f"objectives.{name}": limit for name, limit in self.objectives.items()}
        shown |= {f"labels.{name}": value for name, value in self.labels.items()}
        shown["expect_writes_within"] = _plain(self.expect_writes_within)
        return shown


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a valid file. ``warnings``: what is allowed, but not recommended."""

    path: str
    config: model.Config
    tables: tuple[TableSettings, ...]
    sources: Mapping[str, ValueSource]
    warnings: tuple[Problem, ...] = ()

    def effective(self) -> list[tuple[str, Any, ValueSource]]:
        """Return every effective value as (key, value, source), secrets masked."""
        lines = [(key, value, self.sources.get(key, DEFAULT)) for key, value in _flat(self.config).items()]
        for table in self.tables:
            prefix = f"tables.{table.name}"
            lines += [
                (f"{prefix}.{key}", value, table.sources.get(key, table.sources.get(key.partition(".")[0], DEFAULT)))
                for key, value in table.values().items()
            ]
            for name, job in table.jobs.items():
                lines += [
                    (f"{prefix}.jobs.{name}.{key}", value, job.sources.get(key, DEFAULT))
                    for key, value in job.values().items()
                ]
        return [(key, _masked(key, value, source), source) for key, value, source in lines]


def _masked(key: str, value: Any, source: ValueSource) -> Any:
    if value is not None and (
        source.variables or ("storage_options." in key and is_secret_key(key.rsplit(".", 1)[-1]))
    ):
        return MASK
    if isinstance(value, list):
        return [_masked(key, item, source) for item in value]
    return redact(value) if isinstance(value, str) else value


def _flat(config: model.Config) -> dict[str, Any]:
    names = [name for name in type(config).model_fields if name not in {"defaults", "tables"}]
    return {key: leaf for name in names for key, leaf in _leaves(name, getattr(config, name)).items()}


def _leaves(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, model.TargetConfig):
        return {f"{name}.{key}": leaf for key, leaf in _of_target(value).items()}
    if name == "notify.targets":
        return {key: leaf for item in value for key, leaf in _leaves(f"{name}.{item.name}", item).items()}
    if isinstance(value, dict):
        return {f"{name}.{key}": leaf for key, leaf in value.items()}
    fields = getattr(type(value), "model_fields", None)
    if fields is None:
        return {name: _plain(value)}
    return {key: leaf for field in fields for key, leaf in _leaves(f"{name}.{field}", getattr(value, field)).items()}


def _of_target(target: model.TargetConfig) -> dict[str, Any]:
    given = {key: value for key, value in target.model_dump().items() if key != "name" and value not in (None, [])}
    return given | {key: MASK for key in model.TARGET_SECRETS if key in given}


def _plain(value: Any) -> Any:
    return duration_text(value) if isinstance(value, timedelta) else value
