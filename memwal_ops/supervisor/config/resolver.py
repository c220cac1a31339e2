"""Resolve a file of valid types to settings: merge its layers, and check what types alone cannot express."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Any
from zoneinfo import ZoneInfo

from memwal_ops.core import registry, triggers
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import OptionError, Options, describe
from memwal_ops.core.run import unexpected_error
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.storage import locations
from memwal_ops.storage.catalogs import PROPERTY, is_secret_property
from memwal_ops.storage.options import RedactedOptions, is_secret_key, remember, remember_options
from memwal_ops.supervisor.config import effective, model
from memwal_ops.supervisor.config.document import Document, Place, Problem, place_text, suggest
from memwal_ops.supervisor.scheduling import schedules
from memwal_ops.text import duration_text


def option_names(options: type[Options]) -> list[str]:
    """Return the names of the options of a class."""
    return [option.name for option in describe(options)]


class Layers:
    """The values of one job on one table in the file. The table's own entry comes before the defaults.

    An option or trigger that only the job of that name in another format has is ignored here, if it is in the
    defaults or in an entry of unknown format: it is meant for tables of the other format.

    ``others``: the specs of that name in other formats. ``known``: whether the entry is known to be of this format.
    """

    def __init__(
        self,
        document: Document,
        job: JobSpec,
        others: Iterable[JobSpec],
        config: model.Config,
        number: int,
        *,
        known: bool,
    ) -> None:
        self._document = document
        self._job = job
        name = job.name
        own = {*option_names(job.options)}
        self._foreign = {option for other in others for option in option_names(other.options)} - own
        self._strict = ("table",) if known else ()
        table_jobs, fleet_jobs = config.tables[number].jobs, config.defaults.jobs
        everywhere: list[tuple[str, Place, model.JobConfig | None]] = [
            ("table", ("tables", number, "jobs", name), table_jobs.get(name)),
            ("fleet", ("defaults", "jobs", name), fleet_jobs.get(name)),
        ]
        self._layers = [(layer, place, given) for layer, place, given in everywhere if given is not None]
        self.sources: dict[str, effective.ValueSource] = {}
        self.named = config.tables[number].uri is not None and name in table_jobs

    @property
    def mentioned(self) -> bool:
        """Whether the file names the job at all."""
        return bool(self._layers)

    def get(self, key: str, default: Any, foreign: Callable[[Any], bool] = lambda _: False) -> tuple[Any, Place | None]:
        """Return a value and its path, None for the default. ``foreign`` returns whether it is for other formats."""
        for layer, place, given in self._layers:
            if key in given.model_fields_set:
                if layer not in self._strict and foreign(getattr(given, key)):
                    continue
                where = (*place, key)
                self.sources[key] = effective.ValueSource(
                    layer, self._document.line(where), self._document.variables.get(where, ())
                )
                return getattr(given, key), where
        self.sources[key] = effective.DEFAULT
        return default, None

    def options(self) -> dict[str, Any]:
        """Return the options of both layers, merged by key over those that the job has by default."""
        merged = dict(self._job.named_options if self.mentioned else self._job.unnamed_options)
        self.sources |= {f"options.{key}": effective.DEFAULT for key in merged}
        for layer, place, given in reversed(self._layers):
            for key, value in given.options.items():
                if layer not in self._strict and key in self._foreign:
                    continue
                where = (*place, "options", key)
                merged[key] = value
                self.sources[f"options.{key}"] = effective.ValueSource(
                    layer, self._document.line(where), self._document.variables.get(where, ())
                )
        return merged

    def option_place(self, key: str) -> Place:
        """Return the path of an effective option."""
        for _, place, given in self._layers:
            if key in given.options:
                return (*place, "options", key)
        return self.place("options") or ()

    def place(self, key: str) -> Place | None:
        """Return the path of a key, else of the job."""
        for _, place, given in self._layers:
            if key in given.model_fields_set:
                return (*place, key)
        return self._layers[0][1] if self._layers else None


# The longest time between two polls of an idle table, unless configured: alerts fire at 30 minutes.
_IDLE_FACTOR, _MAX_IDLE_POLL = 10, timedelta(minutes=10)
_SCHEMES = locations.SCHEMES - {"memory"}
_OF_TABLES = ("tables", "defaults")
_WILD = re.compile(r"[*?\[]")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Resolver:
    """Merges the layers of a file, and adds what is invalid to its problems."""

    def __init__(self, document: Document, config: model.Config, jobs: Mapping[str, Mapping[str, JobSpec]]) -> None:
        self._document = document
        self._config = config
        self._jobs = jobs
        self._warnings: list[Problem] = []
        self._reported: set[tuple[Place, str]] = set()
        # The jobs that no entry of a table names itself: they are the same for all tables with these keys.
        self._shared: dict[tuple[str, str, str, bool], effective.JobSettings] = {}
        self._installed = {job for of in jobs.values() for job in of}
        self._units = {
            name: {metric: one.unit for job in of.values() for metric, one in job.backlog_metrics.items()}
            for name, of in jobs.items()
        }

    def resolve(self) -> effective.Settings:
        """Return the settings; what is invalid is added to the document's problems."""
        self._check_secrets(("defaults", "storage_options"), self._config.defaults.storage_options)
        self._check_heartbeat(("heartbeat", "url"), self._config.heartbeat.url)
        self._warn_of_strangers(self._config.http)
        self._check_targets()
        config = self._config.model_copy(update={"fleet": self._fleet(), "events": self._events()})
        self._check_jobs(("defaults", "jobs"), self._config.defaults.jobs)
        names = [self._name(entry) for entry in self._config.tables]
        tables = tuple(self._table(number, name) for number, name in enumerate(names))
        self._check_names(names)
        self._check_duplicates()
        sources = {
            place_text(place): self._source(place, "fleet")
            for place in self._document.lines
            if place and place[0] not in _OF_TABLES
        }
        for number, target in enumerate(config.notify.targets):
            for key in target.model_fields_set:
                sources[f"notify.targets.{target.name}.{key}"] = sources[f"notify.targets[{number}].{key}"]
        return effective.Settings(self._document.path, config, tables, sources, tuple(self._warnings))

    def _table(self, number: int, name: str) -> effective.TableSettings:
        entry, defaults = self._config.tables[number], self._config.defaults
        place: Place = ("tables", number)
        self._check_uri(place, entry)
        self._check_secrets((*place, "storage_options"), entry.storage_options)
        options = {**defaults.storage_options, **entry.storage_options}
        remember_options(options)
        sources: dict[str, effective.ValueSource] = {
            key: self._source((*place, key), "table") for key in entry.model_fields_set
        }
        for key in options:
            own = key in entry.storage_options
            where = (*place, "storage_options", key) if own else ("defaults", "storage_options", key)
            sources[f"storage_options.{key}"] = self._source(where, "table" if own else "fleet")
        included, excluded = entry.include, entry.exclude
        if entry.namespace is not None:
            included, excluded = entry.namespace.include, entry.namespace.exclude
            options |= self._properties(place, entry.namespace, sources)
        for key in ("poll", "idle_poll", "expect_writes_within"):
            if getattr(entry, key) is None and key in defaults.model_fields_set:
                sources[key] = self._source(("defaults", key), "fleet")
        zone_place = (*place, "timezone") if entry.timezone else ("defaults", "timezone")
        zone = self._zone(zone_place, entry.timezone or defaults.timezone)
        format_name = self._format(place, entry)
        self._check_jobs((*place, "jobs"), entry.jobs)
        self._check_applies((*place, "jobs"), entry.jobs, name, format_name)
        described = self._jobs if format_name is None else (format_name,)
        return effective.TableSettings(
            uri=None if entry.uri is None else entry.uri.rstrip("/"),
            pattern=entry.glob,
            database=entry.database is not None,
            branches=None if entry.branches == "all" else tuple(entry.branches),
            name=name,
            include=tuple(included),
            exclude=tuple(excluded),
            max_tables=entry.max_tables,
            storage_options=RedactedOptions(options),
            poll=entry.poll or defaults.poll,
            idle_poll=self._idle_poll(place, entry),
            idle_poll_given=(entry.idle_poll or defaults.idle_poll) is not None,
            expect_writes_within=entry.expect_writes_within or defaults.expect_writes_within,
            format=format_name,
            by_format={
                one: {
                    job.name: self._job_of(number, one, job, zone, known=format_name is not None)
                    for job in jobs.values()
                }
                for one, jobs in self._jobs.items()
                if one in described
            },
            weight=entry.weight,
            objectives=entry.objectives.limits(),
            labels=entry.labels,
            sources=sources,
        )

    def _idle_poll(self, place: Place, entry: model.TableConfig) -> timedelta:
        """Return the longest time between two polls: as configured, else ten times ``poll``, up to 10 minutes."""
        defaults = self._config.defaults
        poll, given = entry.poll or defaults.poll, entry.idle_poll or defaults.idle_poll
        if given is None:
            return max(poll, min(_IDLE_FACTOR * poll, _MAX_IDLE_POLL))
        if given < poll:
            where = place if entry.idle_poll is not None else ("defaults",)
            self._problem(
                (*where, "idle_poll"),
                f"idle_poll ({duration_text(given)}) is shorter than poll ({duration_text(poll)}).",
                "It is the longest time between two polls of an idle table: make it at least poll.",
            )
        return given

    def _properties(
        self, place: Place, namespace: model.NamespaceConfig, sources: dict[str, effective.ValueSource]
    ) -> dict[str, str]:
        above = (*place, "namespace", "properties")
        self._check_secrets(above, namespace.properties)
        remember(namespace.secrets.values())
        found = {key: self._source((*above, key), "table") for key in namespace.properties}
        sources |= {f"storage_options.{PROPERTY}{key}": source for key, source in found.items()}
        shown = [found[key] for key, value in namespace.properties.items() if not is_secret_property(key, value)]
        variables = {name for source in shown for name in source.variables}
        here = self._source((*place, "namespace"), "table")
        sources["pattern"] = replace(here, variables=tuple(sorted(variables)))
        return namespace.secrets

    def _format(self, place: Place, entry: model.TableConfig) -> str | None:
        """Return the table's format: from the file, by the scheme, the only one installed, or that of a local folder.

        No request is sent to a store here: discovery detects the format of other tables.
        """
        if entry.format is not None:
            if entry.format in self._jobs:
                return entry.format
            fix = suggest(entry.format, self._jobs, "The formats that are installed: {}.")
            self._problem((*place, "format"), f"There is no format {entry.format!r}.", fix)
        if entry.uri is not None and (catalog := registry.format_with_catalog(entry.uri)) is not None:
            return catalog.name
        if len(self._jobs) == 1:
            return next(iter(self._jobs))
        if entry.uri is not None and entry.uri.startswith(("/", "~", "file://")):
            return registry.format_of_folder(os.path.expanduser(entry.uri.removeprefix("file://")))
        return None

    def _check_jobs(self, place: Place, jobs: Iterable[str]) -> None:
        for unknown in sorted({*jobs} - self._installed):
            fix = suggest(unknown, self._installed, "The jobs that are installed: {}.")
            self._problem((*place, unknown), f"There is no job {unknown!r}.", fix)

    def _check_applies(self, place: Place, jobs: Iterable[str], name: str, format_name: str | None) -> None:
        own = self._installed if format_name is None else self._jobs[format_name].keys()
        for other in sorted(({*jobs} & self._installed) - own):
            message = f"{other} does not apply to {name}, a {format_name} table."
            self._problem((*place, other), message, f"The jobs that do: {', '.join(sorted(own))}.")

    def _job_of(
        self, number: int, format_name: str, job: JobSpec, zone: ZoneInfo, *, known: bool
    ) -> effective.JobSettings:
        """Return how a job runs on a table; what the table's own entry does not name is resolved once."""
        if job.name in self._config.tables[number].jobs:
            return self._job(number, format_name, job, zone, known=known)
        key = (format_name, job.name, zone.key, known)
        if key not in self._shared:
            self._shared[key] = self._job(number, format_name, job, zone, known=known)
        return self._shared[key]

    def _job(
        self, number: int, format_name: str, job: JobSpec, zone: ZoneInfo, *, known: bool
    ) -> effective.JobSettings:
        others = [jobs[job.name] for name, jobs in self._jobs.items() if name != format_name and job.name in jobs]
        layers = Layers(self._document, job, others, self._config, number, known=known)
        enabled, _ = layers.get("enabled", job.enabled or layers.mentioned)
        apply, _ = layers.get("apply", None)
        schedule, schedule_place = layers.get("schedule", None)
        when, when_place = layers.get("when", job.when, self._is_foreign_trigger(format_name))
        follows_debt = job.debt is not None and schedule_place is None and when_place is None
        if job.debt is not None and follows_debt:
            when = job.debt.when
        windows, windows_place = layers.get("windows", [])
        options = layers.options()
        built_in = schedules.Schedule(job.every, None, job.every * 0.1, zone) if job.every is not None else None
        settings = effective.JobSettings(
            job=job,
            enabled=enabled,
            apply=job.acts(apply=apply),
            schedule=built_in if schedule_place is None else self._schedule(schedule_place, schedule, zone),
            when=None if when is None else self._trigger(when_place, when, format_name),
            options=options,
            timeout=layers.get("timeout", None)[0],
            hung_after=layers.get("hung_after", None)[0] or job.hung_after,
            windows=self._windows(windows_place, windows),
            zone=zone,
            budget=layers.get("budget", None)[0],
            heartbeat_url=layers.get("heartbeat_url", self._config.heartbeat.url)[0],
            named=layers.named,
            follows_debt=follows_debt,
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

    def _schedule(self, place: Place, given: model.ScheduleConfig | None, zone: ZoneInfo) -> schedules.Schedule | None:
        if given is None:
            return None
        if given.cron is not None:
            try:
                fires = schedules.cron_trigger(given.cron, zone).get_next_fire_time(None, datetime.now(UTC))
            except ValueError as error:
                self._problem(place, str(error), "Write for example '*/15 * * * *' or '0 3 * * Mon-Fri'.")
                return None
            if fires is None:
                self._problem(place, f"{given.cron!r} never fires.", "Check the day and the month.")
        return schedules.Schedule(given.every, given.cron, given.jitter, zone)

    def _is_foreign_trigger(self, format_name: str) -> Callable[[Any], bool]:

        def parses(text: str, name: str) -> bool:
            try:
                triggers.parse_trigger(text, self._units[name])
            except triggers.TriggerError:
                return False
            return True

        def foreign(text: Any) -> bool:
            others = [name for name in self._jobs if name != format_name]
            return text is not None and not parses(text, format_name) and any(parses(text, one) for one in others)

        return foreign

    def _trigger(self, place: Place | None, text: str, format_name: str) -> triggers.Trigger | None:
        try:
            return triggers.parse_trigger(text, self._units[format_name])
        except triggers.TriggerError as error:
            # Each format lists metrics of its own in the message.
            fix = "Write for example generations >= 8 or bytes >= 1GiB."
            self._problem(place or (), f"{text!r}: {error}.", fix, once=text)
            return None

    def _windows(self, place: Place | None, texts: Iterable[str]) -> tuple[schedules.Window, ...]:
        found = []
        for number, text in enumerate(texts):
            try:
                found.append(schedules.parse_window(text))
            except ValueError as error:
                self._problem(
                    (*(place or ()), number), str(error), "docs/configuration.md, windows, has more examples."
                )
        return tuple(found)

    def _zone(self, place: Place, name: str) -> ZoneInfo:
        try:
            return ZoneInfo(name)
        except (ValueError, OSError, KeyError):
            self._problem(place, f"There is no time zone {name!r}.", "Write for example UTC or Europe/Berlin.")
            return ZoneInfo("UTC")

    def _check_options(self, job: JobSpec, layers: Layers, options: Mapping[str, Any]) -> None:
        if not self._check_each(job, job.options, layers, (), options):
            return  # what depends on several options is checked once each of them is valid
        try:
            job.options.read(options).validate_repeated()
        except OptionError as error:
            place = layers.option_place(error.names[0]) if error.names else layers.place("options")
            fix = error.remedy if "remedy" in vars(error) else _help(job)
            self._problem(place or (), str(error), fix)
        except InvalidUsageError as error:
            self._problem(layers.place("options") or (), str(error), error.remedy)
        except (TypeError, ValueError) as error:
            self._problem(
                layers.place("options") or (), f"{job.name} refuses its options: {error}.", "See its package."
            )
        except MemwalOpsError:
            raise
        except (Exception, SystemExit) as error:
            raise unexpected_error(error, job) from error

    def _check_each(
        self, job: JobSpec, known: type[Options], layers: Layers, above: tuple[str, ...], given: Mapping[str, Any]
    ) -> bool:
        options = {option.name: option for option in describe(known)}
        good = True
        for key, value in given.items():
            place = (*layers.option_place((*above, key)[0]), *(*above, key)[1:])
            if key not in options:
                good = False
                fix = suggest(str(key), [] if above else option_names(known), "The options of this job: {}.")
                self._problem(place, f"The job {job.name!r} has no option {key!r}.", fix)
            elif (inner := options[key].group) is not None:
                if isinstance(value, dict):
                    good &= self._check_each(job, inner, layers, (*above, str(key)), value)
            else:
                try:
                    options[key].check(options[key].read(value))
                except OptionError as error:
                    good = False
                    # Formats may differ in their bounds: one invalid value is one problem.
                    self._problem(place, str(error), _help(job), once=str(value))
        return good

    def _check_uri(self, place: Place, entry: model.TableConfig) -> None:
        places = (("uri", entry.uri), ("pattern", entry.pattern), ("database", entry.database))
        key, uri = next(((key, uri) for key, uri in places if uri is not None), ("namespace", str(entry.glob)))
        if locations.is_catalog(uri):
            if key in {"pattern", "database"}:
                self._problem(
                    (*place, key), "A catalog has no pattern.", "Write namespace: {impl: ..., properties: ...}."
                )
            return
        if key == "uri" and registry.format_with_catalog(uri) is not None:
            return
        self._check_folder((*place, key), uri)
        uri = locations.split_query(uri)[0]
        if key == "database" and _WILD.search(uri) is not None:
            self._problem((*place, key), f"{uri!r} has a wildcard.", "Give one folder, or a pattern of tables.")
        if key == "uri" and re.search(r"[*?]", uri):
            self._problem((*place, key), f"{uri!r} has a wildcard.", "Call it pattern instead of uri.")
        if key == "pattern" and _WILD.search(uri) is None:
            self._problem((*place, key), f"{uri!r} has no wildcard.", "Call it uri instead of pattern.")
        if key == "pattern" and "**" in uri:
            self._problem((*place, key), "'**' is not supported.", "Give one * for each level of folders.")

    def _check_folder(self, place: Place, uri: str) -> None:
        scheme = uri.split("://", 1)[0] if "://" in uri else ""
        if scheme and scheme not in _SCHEMES:
            fix = suggest(scheme, _SCHEMES, "Use an absolute path or one of {}.")
            self._problem(place, f"The URI scheme {scheme!r} is not known.", fix)
        elif not scheme and not uri.startswith(("/", "~")):
            fix = "Write the absolute path: a service has no working directory of its own."
            self._problem(place, f"{uri!r} is not an absolute path.", fix)

    def _check_names(self, names: Iterable[str]) -> None:
        first: dict[str, int] = {}
        for number, name in enumerate(names):
            if first.setdefault(name, number) != number:
                line = self._document.line(("tables", first[name]))
                message = f"The name {name!r} is already used by the table in line {line}."
                self._problem(("tables", number), message, "Give one of them a name.")

    def _check_duplicates(self) -> None:
        seen: set[str] = set()
        for number, entry in enumerate(self._config.tables):
            text = (entry.uri or entry.glob or "").rstrip("/")
            if text in seen:
                self._problem(("tables", number), f"{text} is in the file more than once.", "Keep one of them.")
            seen.add(text)

    def _fleet(self) -> model.FleetConfig | None:
        fleet, place = self._config.fleet, ("fleet",)
        if fleet is None:
            return None
        options = self._merged_options(place, fleet.storage_options)
        if locations.is_catalog(fleet.uri) or _WILD.search(locations.split_query(fleet.uri)[0]) is not None:
            self._problem((*place, "uri"), f"{fleet.uri!r} is not a folder.", "Give a folder for the members' records.")
        else:
            self._check_folder((*place, "uri"), fleet.uri)
        if not self._config.leases.enabled:
            fix = "Remove leases.enabled: members that take a table over at the same time share its jobs by leases."
            self._problem(("leases", "enabled"), "A fleet needs leases.", fix)
        for number, entry in enumerate(self._config.tables):
            glob = locations.split_query(entry.glob or "")[0].rstrip("/").split("/")
            parts = fleet.uri.rstrip("/").split("/")
            if len(parts) == len(glob) and all(map(fnmatchcase, parts, glob)):
                line = self._document.line(("tables", number))
                fix = f"Give another folder; the pattern of tables in line {line} matches it."
                self._problem((*place, "uri"), f"{fleet.uri} would be taken for a table.", fix)
        return fleet.model_copy(update={"storage_options": options})

    def _events(self) -> model.EventsConfig | None:
        events, place = self._config.events, ("events",)
        if events is None:
            return None
        options = self._merged_options(place, events.storage_options)
        if not any(locations.scheme_of(entry.uri or entry.glob or "") in locations.S3 for entry in self._config.tables):
            what = "No table is in S3, which alone sends events to a queue of SQS."
            fix = "Remove events: the tables of this file are polled."
            self._warnings.append(Problem(place, self._document.line(place), what, fix))
        return events.model_copy(update={"storage_options": options})

    def _merged_options(self, place: Place, own: Mapping[str, str]) -> RedactedOptions:
        self._check_secrets((*place, "storage_options"), own)
        options = {**self._config.defaults.storage_options, **own}
        remember_options(options)
        return RedactedOptions(options)

    def _check_targets(self) -> None:
        for number, target in enumerate(self._config.notify.targets):
            place: Place = ("notify", "targets", number)
            for key in model.TARGET_SECRETS:
                if (value := getattr(target, key)) is not None:
                    remember([value])
                    self._check_secret((*place, key), key)

    def _check_secrets(self, place: Place, options: Mapping[str, str]) -> None:
        for key in options:
            if is_secret_key(key):
                self._check_secret((*place, key), key)

    def _check_secret(self, where: Place, key: str) -> None:
        if where not in self._document.variables:
            what = f"The secret {key} is in the file in plain text."
            fix = "Write ${NAME}, and give the value in the service's environment."
            self._warnings.append(Problem(where, self._document.line(where), what, fix))

    def _warn_of_strangers(self, http: model.HttpConfig) -> None:
        """Warn where other machines reach the service, and read what it sends, or cannot be told from its operators."""
        if not http.enabled or _is_loopback(http.host):
            return
        place: Place = ("http", "host")
        where = f"Other machines reach the service on {http.host or 'all addresses'}"
        line = self._document.line(place)
        if http.token_file is None:
            message = f"{where}, and anyone there reads its status; no http.token_file says who may act, so nobody may."
            fix = "Bind it to 127.0.0.1, or keep strangers out of that network. To act, name a file of tokens."
            self._warnings.append(Problem(place, line, message, fix))
        if http.tls_certificate is None:
            message = f"{where} without TLS: tokens and status cross the network in plain text."
            fix = "Give http.tls_certificate and http.tls_key, or put a proxy with TLS before 127.0.0.1."
            self._warnings.append(Problem(place, line, message, fix))

    def _check_heartbeat(self, place: Place | None, url: str | None) -> None:
        if url is None:
            return
        if not url.startswith(("http://", "https://")):
            self._problem(place or (), "The heartbeat URL is not http or https.", "Write https://host/path.")
        try:
            url.format(table="t", job="j")
        except (KeyError, IndexError, ValueError):
            fix = "Only {table} and {job} are substituted; write {{ and }} for braces."
            self._problem(place or (), "The heartbeat URL has an unknown placeholder.", fix)

    def _name(self, entry: model.TableConfig) -> str:
        if entry.name is not None:
            return entry.name
        if entry.uri is not None:
            return registry.short_name(entry.uri.rstrip("/").rsplit("/", 1)[-1]) or entry.uri
        return str(entry.glob)

    def _source(self, place: Place, layer: str) -> effective.ValueSource:
        return effective.ValueSource(layer, self._document.line(place), self._document.variables.get(place, ()))

    def _problem(self, place: Place, message: str, fix: str, *, once: str | None = None) -> None:
        # A problem in the defaults occurs for every table: report it once (by its message, or by ``once``).
        key = (place, message if once is None else once)
        if key not in self._reported:
            self._reported.add(key)
            self._document.add(place, message, fix)


def _help(job: JobSpec) -> str:
    return f"memwal-ops {job.command or job.name} --help has its options."
