"""What holds in the end: for each table and job one value per key, and where it came from.

Four layers, the later ones win: ``default`` (of the job itself), ``fleet`` (``defaults`` in the file),
``table`` (its own entry), ``env`` (a value that was made from an environment variable).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.storage.redaction import MASK, is_secret_key, redact
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from zoneinfo import ZoneInfo

    from memwal_ops.jobs.api import Job
    from memwal_ops.supervisor.config_file import Problem
    from memwal_ops.supervisor.config_model import BudgetConfig, Config
    from memwal_ops.supervisor.schedules import Schedule
    from memwal_ops.supervisor.triggers import Trigger
    from memwal_ops.supervisor.windows import Window


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from: its layer, its line in the file, the variables that it was made from."""

    layer: str
    line: int | None = None
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        """``table, line 12``."""
        if self.variables:
            return f"env {', '.join(self.variables)}, line {self.line}"
        return self.layer if self.line is None else f"{self.layer}, line {self.line}"

    def to_json(self) -> dict[str, object]:
        """The entry of ``sources``."""
        return {"layer": "env" if self.variables else self.layer, "line": self.line, "variables": list(self.variables)}


DEFAULT = Source("default")


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How one job runs on one table; ``options`` as the file says them, checked."""

    job: Job
    enabled: bool
    apply: bool
    schedule: Schedule | None
    when: Trigger | None
    options: Mapping[str, Any]
    timeout: timedelta | None
    hung_after: timedelta
    windows: tuple[Window, ...]
    zone: ZoneInfo
    budget: BudgetConfig | None
    heartbeat_url: str | None
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    def values(self) -> dict[str, Any]:
        """Every key with its value as a file would say it."""
        shown: dict[str, Any] = {"enabled": self.enabled}
        if not self.enabled:
            return shown
        shown["apply"] = self.apply
        shown["schedule"] = None if self.schedule is None else str(self.schedule)
        shown["when"] = None if self.when is None else self.when.text
        shown |= {f"options.{name}": _plain(value) for name, value in self.options.items()}
        shown["timeout"] = None if self.timeout is None else duration_text(self.timeout)
        shown["hung_after"] = duration_text(self.hung_after)
        shown["windows"] = [window.text for window in self.windows]
        shown["budget"] = (
            None if self.budget is None else f"{duration_text(self.budget.time)} per {duration_text(self.budget.per)}"
        )
        shown["heartbeat_url"] = self.heartbeat_url
        return shown


@dataclass(frozen=True, slots=True)
class TableSettings:
    """One entry of ``tables``: a table by its URI, or a pattern for many."""

    uri: str | None
    pattern: str | None
    name: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    max_tables: int
    storage_options: Mapping[str, str]
    poll: timedelta
    jobs: Mapping[str, JobSettings]
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)

    def values(self) -> dict[str, Any]:
        """Every key of its own with its value, without the jobs."""
        shown: dict[str, Any] = {"uri": self.uri} if self.uri is not None else {"pattern": self.pattern}
        shown["name"] = self.name
        if self.pattern is not None:
            shown |= {"include": list(self.include), "exclude": list(self.exclude), "max_tables": self.max_tables}
        shown |= {f"storage_options.{key}": value for key, value in self.storage_options.items()}
        shown["poll"] = duration_text(self.poll)
        return shown


@dataclass(frozen=True, slots=True)
class Settings:
    """A whole file that was found to be good. ``warnings``: what is allowed, and better otherwise."""

    path: str
    config: Config
    tables: tuple[TableSettings, ...]
    sources: Mapping[str, Source]
    warnings: tuple[Problem, ...] = ()

    def effective(self) -> list[tuple[str, Any, Source]]:
        """Every value that holds, as (key, value, source), secrets masked."""
        lines = [(key, value, self.sources.get(key, DEFAULT)) for key, value in _flat(self.config).items()]
        for table in self.tables:
            prefix = f"tables.{table.name}"
            lines += [
                (f"{prefix}.{key}", value, table.sources.get(key, DEFAULT)) for key, value in table.values().items()
            ]
            for name, job in table.jobs.items():
                lines += [
                    (f"{prefix}.jobs.{name}.{key}", value, job.sources.get(key, DEFAULT))
                    for key, value in job.values().items()
                ]
        return [(key, _masked(key, value, source), source) for key, value, source in lines]


def _masked(key: str, value: Any, source: Source) -> Any:
    if value is not None and (
        source.variables or ("storage_options." in key and is_secret_key(key.rsplit(".", 1)[-1]))
    ):
        return MASK
    return redact(value) if isinstance(value, str) else value


def _flat(config: Config) -> dict[str, Any]:
    """The keys that belong to no table."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name in {"defaults", "tables"}:
            continue
        if name == "pools":
            for pool in type(value).model_fields:
                inner = getattr(value, pool)
                flat |= {f"pools.{pool}.{key}": _plain(getattr(inner, key)) for key in type(inner).model_fields}
        elif hasattr(type(value), "model_fields"):
            flat |= {f"{name}.{key}": _plain(getattr(value, key)) for key in type(value).model_fields}
        else:
            flat[name] = _plain(value)
    return flat


def _plain(value: Any) -> Any:
    return duration_text(value) if isinstance(value, timedelta) else value
