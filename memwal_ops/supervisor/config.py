"""Read a configuration file: all that is wrong with it at once, each with its line and a fix, or settings."""

from __future__ import annotations

import difflib
import os
import re
import typing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ValidationError

from memwal_ops.errors import InvalidConfigError, InvalidUsageError, JobPluginError
from memwal_ops.jobs.registry import load_jobs
from memwal_ops.storage.redaction import is_secret_key, remember_options
from memwal_ops.supervisor.config_file import Document, Place, Problem, place_text, read_document
from memwal_ops.supervisor.config_model import Config, JobConfig
from memwal_ops.supervisor.job_options import in_config_words, make_options, option_names
from memwal_ops.supervisor.schedules import Schedule, cron_trigger
from memwal_ops.supervisor.settings import DEFAULT, JobSettings, Settings, Source, TableSettings
from memwal_ops.supervisor.triggers import Trigger, TriggerError, parse_trigger
from memwal_ops.supervisor.windows import Window, parse_window

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from memwal_ops.jobs.api import Job
    from memwal_ops.supervisor.config_model import ScheduleConfig, TableConfig

_SCHEMES = frozenset({"file", "s3", "s3a", "gs", "az"})
_WILD = re.compile(r"[*?\[]")
_FIXES = {
    "missing": "Add it; docs/supervisor.md has an example.",
    "literal_error": "Use one of these.",
    "too_short": "List at least one.",
    "list_type": "Write a list: one line each, beginning with '- '.",
    "dict_type": "Write keys below it, indented by two blanks.",
    "model_type": "Write keys below it, indented by two blanks.",
    "string_type": "Write a text; put it in quotes if it looks like a number.",
    "bool_type": "Write true or false.",
    "bool_parsing": "Write true or false.",
    "int_type": "Write a whole number.",
    "int_parsing": "Write a whole number.",
}


def _place_of(problem: Problem) -> tuple[int, str]:
    return problem.line or 0, place_text(problem.place) if problem.place else ""


class ConfigProblemsError(InvalidConfigError):
    """A file that cannot be used, with everything that is wrong with it."""

    def __init__(self, path: str, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_place_of))
        first = self.problems[0]
        line = "" if first.line is None else f":{first.line}"
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        where = f"{place_text(first.place)}: " if first.place else ""
        super().__init__(
            f"{path}{line}: {where}{first.message}{more}", remedy=f"{first.fix} {InvalidConfigError.remedy}"
        )


def load_settings(path: str, environ: Mapping[str, str] | None = None) -> Settings:
    """Read, check and resolve a file. Makes no request to any store.

    Raises:
        ConfigProblemsError: with every problem that can be seen at once.
        JobPluginError: a registered job cannot be used.
    """
    document = read_document(path, environ)
    if document.problems and document.data is None:
        raise ConfigProblemsError(path, document.problems)
    try:
        config = Config.model_validate(document.data)
    except ValidationError as error:
        document.problems += [_explained(document, details) for details in error.errors(include_url=False)]
        raise ConfigProblemsError(path, document.problems) from None
    resolver = _Resolver(document, config, load_jobs())
    settings = resolver.resolve()
    if document.problems:
        raise ConfigProblemsError(path, document.problems)
    return settings


class _Resolver:
    """Lays the layers over each other, and checks what a type alone cannot tell."""

    def __init__(self, document: Document, config: Config, jobs: Mapping[str, Job]) -> None:
        self._document = document
        self._config = config
        self._jobs = jobs
        self._warnings: list[Problem] = []
        self._told: set[tuple[Place, str]] = set()

    def resolve(self) -> Settings:
        self._check_secrets(("defaults", "storage_options"), self._config.defaults.storage_options)
        self._check_heartbeat(("heartbeat", "url"), self._config.heartbeat.url)
        names = [self._name(one) for one in self._config.tables]
        tables = tuple(self._table(number, name) for number, name in enumerate(names))
        for number, name in enumerate(names):
            first = names.index(name)
            if first != number:
                place: Place = ("tables", number)
                line = self._document.line(("tables", first))
                self._problem(
                    place, f"The name {name!r} is that of the table in line {line}.", "Give one of them a name."
                )
        self._check_twice()
        sources = {
            key: self._source(tuple(key.split(".")), "fleet")
            for key in {place_text(place) for place in self._document.lines if place}
        }
        return Settings(self._document.path, self._config, tables, sources, tuple(self._warnings))

    def _table(self, number: int, name: str) -> TableSettings:
        entry, defaults = self._config.tables[number], self._config.defaults
        place: Place = ("tables", number)
        self._check_uri(place, entry)
        self._check_secrets((*place, "storage_options"), entry.storage_options)
        options = {**defaults.storage_options, **entry.storage_options}
        remember_options(options)
        sources = {key: self._source((*place, key), "table") for key in entry.model_fields_set}
        for key in options:
            own = key in entry.storage_options
            where = (*place, "storage_options", key) if own else ("defaults", "storage_options", key)
            sources[f"storage_options.{key}"] = self._source(where, "table" if own else "fleet")
        if entry.poll is None and "poll" in defaults.model_fields_set:
            sources["poll"] = self._source(("defaults", "poll"), "fleet")
        zone_place = (*place, "timezone") if entry.timezone else ("defaults", "timezone")
        zone = self._zone(zone_place, entry.timezone or defaults.timezone)
        for layer, jobs in ((("defaults", "jobs"), defaults.jobs), ((*place, "jobs"), entry.jobs)):
            for unknown in jobs.keys() - self._jobs.keys():
                fix = _suggest(unknown, self._jobs, "The jobs that are installed: {}.")
                self._problem((*layer, unknown), f"There is no job {unknown!r}.", fix)
        return TableSettings(
            uri=None if entry.uri is None else entry.uri.rstrip("/"),
            pattern=entry.pattern,
            name=name,
            include=tuple(entry.include),
            exclude=tuple(entry.exclude),
            max_tables=entry.max_tables,
            storage_options=options,
            poll=entry.poll or defaults.poll,
            jobs={name: self._job(number, job, zone) for name, job in self._jobs.items()},
            sources=sources,
        )

    def _job(self, number: int, job: Job, zone: ZoneInfo) -> JobSettings:
        layers = _Layers(self._document, job.name, self._config, number)
        enabled, _ = layers.get("enabled", job.enabled or layers.mentioned)
        apply, _ = layers.get("apply", None)
        schedule, schedule_place = layers.get("schedule", None)
        when, when_place = layers.get("when", job.when)
        windows, windows_place = layers.get("windows", [])
        options = layers.options()
        built_in = Schedule(job.every, None, job.every * 0.1, zone) if job.every is not None else None
        settings = JobSettings(
            job=job,
            enabled=enabled,
            apply=not job.deletes if apply is None else apply,
            schedule=built_in if schedule_place is None else self._schedule(schedule_place, schedule, zone),
            when=None if when is None else self._trigger(when_place, when),
            options=options,
            timeout=layers.get("timeout", None)[0],
            hung_after=layers.get("hung_after", None)[0] or job.hung_after,
            windows=self._windows(windows_place, windows),
            zone=zone,
            budget=layers.get("budget", None)[0],
            heartbeat_url=layers.get("heartbeat_url", self._config.heartbeat.url)[0],
            sources=layers.sources,
        )
        self._check_heartbeat(layers.place("heartbeat_url"), settings.heartbeat_url)
        self._check_options(job, layers, options)
        if enabled and settings.schedule is None and settings.when is None:
            self._problem(
                layers.place("schedule") or ("tables", number),
                f"The job {job.name!r} has neither a schedule nor a trigger, and would never run.",
                "Give schedule or when, or enabled: false.",
            )
        return settings

    def _schedule(self, place: Place, given: ScheduleConfig | None, zone: ZoneInfo) -> Schedule | None:
        if given is None:
            return None
        if given.cron is not None:
            try:
                fires = cron_trigger(given.cron, zone).get_next_fire_time(None, datetime.now(UTC))
            except ValueError as error:
                self._problem(place, str(error), "Write for example '*/15 * * * *' or '0 3 * * Mon-Fri'.")
                return None
            if fires is None:
                self._problem(place, f"{given.cron!r} never comes.", "Check the day and the month.")
        return Schedule(given.every, given.cron, given.jitter, zone)

    def _trigger(self, place: Place | None, text: str) -> Trigger | None:
        kinds = {name: kind for job in self._jobs.values() for name, kind in job.figures.items()}
        try:
            return parse_trigger(text, kinds)
        except TriggerError as error:
            self._problem(place or (), f"{text!r}: {error}.", "Write for example generations >= 8 or bytes >= 1GiB.")
            return None

    def _windows(self, place: Place | None, texts: Iterable[str]) -> tuple[Window, ...]:
        found = []
        for number, text in enumerate(texts):
            try:
                found.append(parse_window(text))
            except ValueError as error:
                self._problem((*(place or ()), number), str(error), "docs/supervisor.md, windows, has more examples.")
        return tuple(found)

    def _zone(self, place: Place, name: str) -> ZoneInfo:
        try:
            return ZoneInfo(name)
        except (ValueError, OSError, KeyError):
            self._problem(place, f"There is no time zone {name!r}.", "Write for example UTC or Europe/Berlin.")
            return ZoneInfo("UTC")

    def _check_options(self, job: Job, layers: _Layers, options: Mapping[str, Any]) -> None:
        try:
            make_options(job.options, options)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                key, *rest = details["loc"]
                place = (*layers.option_place(str(key)), *rest)
                if details["type"] == "extra_forbidden":
                    known = option_names(job.options) if not rest else []
                    fix = _suggest(str(details["loc"][-1]), known, "The options of this job: {}.")
                    self._problem(place, f"The job {job.name!r} has no option {details['loc'][-1]!r}.", fix)
                else:
                    told = _told(details)
                    self._problem(
                        place, told, _FIXES.get(details["type"], f"docs/supervisor.md, options of {job.name}.")
                    )
        except InvalidUsageError as error:
            place = layers.place("options") or ()
            self._problem(place, in_config_words(str(error)), in_config_words(error.remedy))
        except (TypeError, ValueError) as error:
            self._problem(
                layers.place("options") or (), f"{job.name} refuses its options: {error}.", "See its package."
            )

    def _check_uri(self, place: Place, entry: TableConfig) -> None:
        key, uri = ("uri", entry.uri) if entry.uri is not None else ("pattern", str(entry.pattern))
        assert uri is not None  # noqa: S101 - one of the two is given
        scheme = uri.split("://", 1)[0] if "://" in uri else ""
        if scheme and scheme not in _SCHEMES:
            fix = _suggest(scheme, _SCHEMES, "Use an absolute path or one of {}.")
            self._problem((*place, key), f"The URI scheme {scheme!r} is not known.", fix)
        elif not scheme and not uri.startswith(("/", "~")):
            fix = "Write the absolute path: a service has no folder of its own."
            self._problem((*place, key), f"{uri!r} is no absolute path.", fix)
        if key == "uri" and re.search(r"[*?]", uri):
            self._problem((*place, key), f"{uri!r} has a wildcard.", "Call it pattern instead of uri.")
        if key == "pattern" and _WILD.search(uri) is None:
            self._problem((*place, key), f"{uri!r} has no wildcard.", "Call it uri instead of pattern.")
        if key == "pattern" and "**" in uri:
            self._problem((*place, key), "'**' is not supported.", "Give one * for each level of folders.")

    def _check_twice(self) -> None:
        seen: set[str] = set()
        for number, one in enumerate(self._config.tables):
            text = (one.uri or one.pattern or "").rstrip("/")
            if text in seen:
                self._problem(("tables", number), f"{text} stands in the file more than once.", "Keep one of them.")
            seen.add(text)

    def _check_secrets(self, place: Place, options: Mapping[str, str]) -> None:
        for key in options:
            where = (*place, key)
            if is_secret_key(key) and where not in self._document.variables:
                self._warnings.append(
                    Problem(
                        where,
                        self._document.line(where),
                        f"{key} stands in the file as it is.",
                        "Write ${NAME}, and give the value in the service's environment.",
                    )
                )

    def _check_heartbeat(self, place: Place | None, url: str | None) -> None:
        if url is None:
            return
        if not url.startswith(("http://", "https://")):
            self._problem(place or (), "The heartbeat is no http or https URL.", "Write https://host/path.")
        try:
            url.format(table="t", job="j")
        except (KeyError, IndexError, ValueError):
            fix = "Only {table} and {job} are filled in; write {{ and }} for braces."
            self._problem(place or (), "The heartbeat URL has braces that mean nothing.", fix)

    def _name(self, entry: TableConfig) -> str:
        if entry.name is not None:
            return entry.name
        if entry.uri is not None:
            return entry.uri.rstrip("/").rsplit("/", 1)[-1].removesuffix(".lance") or entry.uri
        return str(entry.pattern)

    def _source(self, place: Place, layer: str) -> Source:
        return Source(layer, self._document.line(place), self._document.variables.get(place, ()))

    def _problem(self, place: Place, message: str, fix: str) -> None:
        # What is wrong in the defaults is wrong for every table: say it once.
        if (place, message) not in self._told:
            self._told.add((place, message))
            self._document.add(place, message, fix)


class _Layers:
    """What the file says of one job on one table: the table's own entry before the defaults."""

    def __init__(self, document: Document, name: str, config: Config, number: int) -> None:
        self._document = document
        table_jobs, fleet_jobs = config.tables[number].jobs, config.defaults.jobs
        everywhere: list[tuple[str, Place, JobConfig | None]] = [
            ("table", ("tables", number, "jobs", name), table_jobs.get(name)),
            ("fleet", ("defaults", "jobs", name), fleet_jobs.get(name)),
        ]
        self._layers = [(layer, place, given) for layer, place, given in everywhere if given is not None]
        self.sources: dict[str, Source] = {}

    @property
    def mentioned(self) -> bool:
        """Whether the file names the job at all."""
        return bool(self._layers)

    def get(self, key: str, default: Any) -> tuple[Any, Place | None]:
        """A value and where it stands; None where it is the default."""
        for layer, place, given in self._layers:
            if key in given.model_fields_set:
                where = (*place, key)
                self.sources[key] = Source(layer, self._document.line(where), self._document.variables.get(where, ()))
                return getattr(given, key), where
        self.sources[key] = DEFAULT
        return default, None

    def options(self) -> dict[str, Any]:
        """The options of both layers, key by key."""
        merged: dict[str, Any] = {}
        for layer, place, given in reversed(self._layers):
            for key, value in given.options.items():
                where = (*place, "options", key)
                merged[key] = value
                self.sources[f"options.{key}"] = Source(
                    layer, self._document.line(where), self._document.variables.get(where, ())
                )
        return merged

    def option_place(self, key: str) -> Place:
        """Where an option stands that holds."""
        for _, place, given in self._layers:
            if key in given.options:
                return (*place, "options", key)
        return self.place("options") or ()

    def place(self, key: str) -> Place | None:
        """Where a key stands, or the job."""
        for _, place, given in self._layers:
            if key in given.model_fields_set:
                return (*place, key)
        return self._layers[0][1] if self._layers else None


def _explained(document: Document, details: Any) -> Problem:
    """One of pydantic's errors in our words."""
    place: Place = tuple(part for part in details["loc"] if not str(part).startswith("function-"))
    line = document.line(place)
    if details["type"] == "extra_forbidden":
        model = _model_at(place[:-1])
        known = [] if model is None else list(model.model_fields)
        fix = _suggest(str(place[-1]), known, "The keys here: {}.")
        return Problem(place, line, f"There is no key {place[-1]!r} here.", fix)
    return Problem(place, line, _told(details), _FIXES.get(details["type"], "docs/supervisor.md explains the key."))


def _told(details: Any) -> str:
    if details["type"] == "value_error":
        text = str(details["ctx"]["error"])
    elif details["type"] == "missing":
        text = "It is missing"
    elif details["type"] in {"model_type", "dict_type"}:
        text = "It must have keys of its own"
    else:
        text = details["msg"].replace("Input should be", "It must be")
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def _model_at(place: Place) -> type[BaseModel] | None:
    """The model whose keys stand at a place."""
    current: Any = Config
    for part in place:
        models = _models_in(current)
        if models and isinstance(part, str) and part in models[0].model_fields:
            current = models[0].model_fields[part].annotation
        else:
            arguments = typing.get_args(current)
            current = arguments[-1] if arguments else None
    models = _models_in(current)
    return models[0] if models else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in {list, dict}:
        return []
    return [one for part in typing.get_args(annotation) for one in _models_in(part)]


def _suggest(word: str, known: Collection[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word, known, 1)
    if close:
        return f"Did you mean {close[0]}?"
    return otherwise.format(", ".join(sorted(known))) if known else "Remove it."


def default_config_path() -> str:
    """The file that commands read where none is given."""
    return os.environ.get("MEMWAL_OPS_CONFIG") or "/etc/memwal-ops/config.yaml"


__all__ = ["ConfigProblemsError", "JobPluginError", "default_config_path", "load_settings"]
