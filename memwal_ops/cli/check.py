"""``memwal-ops check --nagios``: one line and an exit code from 0 to 3, for monitoring that speaks no Prometheus."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from functools import wraps
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import click

from memwal_ops.cli.options import Duration, storage_options
from memwal_ops.cli.text import counted
from memwal_ops.core.table import open_table
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.jobs import looks
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.config import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta

    from memwal_ops.supervisor.config_model import HttpConfig

OK, WARNING, CRITICAL, UNKNOWN = range(4)
_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_LATE_WARNING, _LATE_CRITICAL = 3, 10
_FAILURES_CRITICAL = 3
_LONGEST = 300
_PUT_OFF = frozenset({"window", "budget", "lease", "earlier"})


@dataclass(slots=True)
class Finding:
    """What was found, in words, the worst first, and figures for graphs."""

    level: int = OK
    texts: list[tuple[int, str]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def add(self, level: int, text: str) -> None:
        """Take a finding; the worst one decides."""
        self.level = max(self.level, level)
        self.texts.append((level, text))

    def compare(self, name: str, value: float, limits: tuple[float, float], unit: str = "", said: str = "") -> None:
        """Compare a figure with its two limits; in words it is called ``said``, or by its name."""
        warning, critical = limits
        level = level_of(value, limits)
        if level:
            self.add(level, f"{said or name} {value:g}{unit}")
        self.figures.append(f"{name}={value:g}{unit};{warning:g};{critical:g}")

    def line(self, summary: str) -> str:
        """The one line."""
        worst_first = sorted(self.texts, key=lambda one: -one[0])
        text = "; ".join(said for _, said in worst_first) or summary
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()} ..."
        figures = f" | {' '.join(self.figures)}" if self.figures else ""
        return redact(f"MEMWAL {_WORDS[self.level]} - {text}{figures}".replace("\n", " "))


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on a backlog is worth a word: generations and seconds, each for a warning and for more than that."""

    generations: tuple[int, int]
    age: tuple[float, float]

    def of(self, generations: float, age: float) -> int:
        """The level of a backlog."""
        return max(level_of(generations, self.generations), level_of(age, self.age))


def level_of(value: float, limits: tuple[float, float]) -> int:
    """The level of a figure, by its two limits."""
    warning, critical = limits
    return CRITICAL if value >= critical else WARNING if value >= warning else OK


def backlog_limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options from which :class:`Limits` are made, as ``limits``."""

    @wraps(command)
    def limited(
        *, warn_generations: int, crit_generations: int, warn_age: timedelta, crit_age: timedelta, **options: Any
    ) -> Any:
        limits = Limits((warn_generations, crit_generations), (warn_age.total_seconds(), crit_age.total_seconds()))
        return command(limits=limits, **options)

    for name, kind, default, text in (
        ("--crit-age", Duration(), "3h", "Of the oldest that waits."),
        ("--warn-age", Duration(), "30m", "Of the oldest that waits."),
        ("--crit-generations", click.IntRange(min=1), 128, "Waiting in a table."),
        ("--warn-generations", click.IntRange(min=1), 32, "Waiting in a table."),
    ):
        limited = click.option(name, type=kind, default=default, show_default=True, help=text)(limited)
    return limited


@click.command(short_help="One line and an exit code from 0 to 3, for Nagios and its kin.")
@click.argument("uri", required=False)
@click.option(
    "--config", "file", metavar="FILE", help="Ask the service that runs by this configuration, about all tables."
)
@click.option("--nagios", is_flag=True, help="Required: the form of the answer.")
@backlog_limits
@storage_options
def check(
    uri: str | None,
    file: str | None,
    nagios: bool,
    limits: Limits,
    storage_options: dict[str, str],
) -> int:
    """Check the table at URI, or with --config all tables of a service that runs, and say it in one line.

    With --config also: jobs that failed, jobs that are late (3 or 10 times their interval), a bad configuration
    file, and a service that does not answer.

    Exit codes: 0 OK; 1 WARNING; 2 CRITICAL; 3 UNKNOWN.
    """
    if not nagios or (uri is None) == (file is None):
        raise InvalidUsageError("Give --nagios, and either a URI or --config FILE.")
    try:
        found, summary = _service(file, limits) if file is not None else _table(str(uri), storage_options, limits)
    except MemwalOpsError as error:
        found, summary = Finding(UNKNOWN, [(UNKNOWN, f"{error.reason}: {error}")]), ""
    click.echo(found.line(summary))
    return found.level


def _table(uri: str, options: dict[str, str], limits: Limits) -> tuple[Finding, str]:
    figures = looks.merge(open_table(uri, options))
    found = Finding()
    found.compare("generations", figures["generations"], limits.generations)
    found.compare("oldest", round(figures.get("oldest_age", 0)), limits.age, "s")
    if figures.get("blocked_regions"):
        found.add(CRITICAL, f"{counted(int(figures['blocked_regions']), 'region')} blocked")
    return found, f"{counted(int(figures['generations']), 'generation')} waiting"


def _service(file: str, limits: Limits) -> tuple[Finding, str]:
    http = load_settings(file).config.http
    if not http.enabled:
        raise InvalidUsageError("The service serves no HTTP (http.enabled: false).", remedy="Check each URI instead.")
    found = Finding()
    status, why = ask_service(http)
    if status is None:
        found.add(CRITICAL, why)
        return found, ""
    if not status["service"]["ready"]:
        found.add(WARNING, "the service is not ready")
    refused = status["service"]["config"]["error"]
    if refused:
        found.add(WARNING, f"the configuration file was not taken up, or not all of it: {refused}")
    if status["service"].get("state_error"):
        found.add(WARNING, str(status["service"]["state_error"]))
    for fault in status["service"].get("discovery_faults", ()):
        found.add(WARNING, f"{fault['pattern']}: {fault['error']}")
    tables = status["tables"]
    if not tables:
        found.add(WARNING, "no table is maintained: no pattern finds any")
    for table in tables:
        for level, text in trouble(table):
            found.add(level, text)
    most, where = _worst(tables, "generations")
    found.compare("worst_generations", most, limits.generations, said=f"{where}: generations")
    oldest, which = _worst(tables, "oldest_age")
    found.compare("worst_oldest", round(oldest), limits.age, "s", said=f"{which}: oldest")
    found.figures.append(f"tables={len(tables)}")
    behind = f", at most {counted(int(most), 'generation')} waiting in one"
    return found, f"{counted(len(tables), 'table')}{behind}{f' ({where})' if most else ''}"


def _worst(tables: list[dict[str, Any]], figure: str) -> tuple[float, str]:
    """The highest value of a figure, and the table that has it."""
    return max(((table["backlog"].get(figure, 0.0), table["name"]) for table in tables), default=(0.0, ""))


def ask_service(http: HttpConfig) -> tuple[dict[str, Any] | None, str]:
    """The status of the service that serves there, or None and why there is none."""
    host = "127.0.0.1" if http.host in {"0.0.0.0", "::", ""} else http.host  # noqa: S104 - compared, not bound
    try:
        with urllib.request.urlopen(f"http://{host}:{http.port}/api/v1/status", timeout=10) as answer:
            status = json.load(answer)
    except (OSError, ValueError, HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        why = (isinstance(why, OSError) and why.strerror) or why
        return None, f"the service does not answer on {host}:{http.port} ({why})"
    if not isinstance(status, dict) or not {"service", "tables"} <= status.keys():
        return None, f"what answers on {host}:{http.port} is no memwal-ops"
    return status, ""


def trouble(table: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """What is wrong with a table of a status document: its level, and a sentence."""
    blocked = int(table["backlog"].get("blocked_regions", 0))
    if blocked:
        yield CRITICAL, f"{table['name']}: {counted(blocked, 'region')} blocked"
    if table["look_error"]:
        yield WARNING, f"{table['name']} cannot be read: {table['look_error']}"
    for job, state in table["jobs"].items():
        yield from job_trouble(f"{table['name']}/{job}", state)


def job_trouble(name: str, state: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The same of one of its jobs."""
    failures = state["consecutive_failures"]
    if failures:
        level = CRITICAL if failures >= _FAILURES_CRITICAL else WARNING
        yield level, f"{name} failed {counted(failures, 'time')} in a row"
    every, since = state["schedule_seconds"], state["seconds_since_success"]
    # A run that another supervisor does, or that a window puts off, is none of ours that is late.
    late = since / every if every and state["waiting_for"] not in _PUT_OFF else 0.0
    if late >= _LATE_WARNING and state["state"] != "running":
        yield CRITICAL if late >= _LATE_CRITICAL else WARNING, f"{name} did not succeed for {since:.0f} s"
