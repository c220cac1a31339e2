"""``memwal-ops check --nagios``: one line and an exit code from 0 to 3, for monitoring that speaks no Prometheus."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from memwal_ops.cli.options import Duration, storage_options
from memwal_ops.core.table import open_table
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.jobs import looks
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.config import load_settings

if TYPE_CHECKING:
    from datetime import timedelta

OK, WARNING, CRITICAL, UNKNOWN = range(4)
_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_LATE_WARNING, _LATE_CRITICAL = 3, 10
_FAILURES_CRITICAL = 3
_LONGEST = 300


@dataclass(slots=True)
class Finding:
    """The worst of what was found, in words, and figures for graphs."""

    level: int = OK
    texts: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def add(self, level: int, text: str) -> None:
        """Take a finding; the worst one decides."""
        self.level = max(self.level, level)
        self.texts.append(text)

    def compare(self, name: str, value: float, warning: float, critical: float, unit: str = "") -> None:
        """Compare a figure with its limits."""
        level = CRITICAL if value >= critical else WARNING if value >= warning else OK
        if level:
            self.add(level, f"{name} {value:g}{unit}")
        self.figures.append(f"{name}={value:g}{unit};{warning:g};{critical:g}")

    def line(self, summary: str) -> str:
        """The one line."""
        text = "; ".join(self.texts) or summary
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        return redact(f"MEMWAL {_WORDS[self.level]} - {text} | {' '.join(self.figures)}".replace("\n", " "))


@click.command(short_help="One line and an exit code from 0 to 3, for Nagios and its kin.")
@click.argument("uri", required=False)
@click.option(
    "--config", "file", metavar="FILE", help="Ask the service that runs by this configuration, about all tables."
)
@click.option("--nagios", is_flag=True, help="Required: the form of the answer.")
@click.option(
    "--warn-generations", type=click.IntRange(min=1), default=32, show_default=True, help="Waiting in a table."
)
@click.option(
    "--crit-generations", type=click.IntRange(min=1), default=128, show_default=True, help="Waiting in a table."
)
@click.option("--warn-age", type=Duration(), default="30m", show_default=True, help="Of the oldest that waits.")
@click.option("--crit-age", type=Duration(), default="3h", show_default=True, help="Of the oldest that waits.")
@storage_options
def check(
    uri: str | None,
    file: str | None,
    nagios: bool,
    warn_generations: int,
    crit_generations: int,
    warn_age: timedelta,
    crit_age: timedelta,
    storage_options: dict[str, str],
) -> int:
    """Check the table at URI, or with --config all tables of a service that runs, and say it in one line.

    With --config also: jobs that failed, jobs that are late (3 or 10 times their interval), a bad configuration
    file, and a service that does not answer.

    Exit codes: 0 OK; 1 WARNING; 2 CRITICAL; 3 UNKNOWN.
    """
    if not nagios or (uri is None) == (file is None):
        raise InvalidUsageError("Give --nagios, and either a URI or --config FILE.")
    limits = (warn_generations, crit_generations, warn_age.total_seconds(), crit_age.total_seconds())
    try:
        found, summary = _service(file, limits) if file is not None else _table(str(uri), storage_options, limits)
    except MemwalOpsError as error:
        found, summary = Finding(UNKNOWN, [f"{error.reason}: {error}"]), ""
    click.echo(found.line(summary))
    return found.level


_Limits = tuple[int, int, float, float]


def _table(uri: str, options: dict[str, str], limits: _Limits) -> tuple[Finding, str]:
    figures = looks.merge(open_table(uri, options))
    found = Finding()
    _backlog(found, "", figures, limits)
    return found, f"{figures['generations']:g} generations waiting"


def _backlog(found: Finding, prefix: str, figures: Any, limits: _Limits) -> None:
    found.compare(f"{prefix}generations", figures.get("generations", 0), limits[0], limits[1])
    found.compare(f"{prefix}oldest", round(figures.get("oldest_age", 0)), limits[2], limits[3], "s")
    if figures.get("blocked_regions"):
        found.add(CRITICAL, f"{prefix}{figures['blocked_regions']:g} regions blocked")


def _service(file: str, limits: _Limits) -> tuple[Finding, str]:
    http = load_settings(file).config.http
    if not http.enabled:
        raise InvalidUsageError("The service serves no HTTP (http.enabled: false).", remedy="Check each URI instead.")
    host = "127.0.0.1" if http.host in {"0.0.0.0", "::", ""} else http.host  # noqa: S104 - compared, not bound
    found = Finding()
    try:
        with urllib.request.urlopen(f"http://{host}:{http.port}/api/v1/status", timeout=10) as answer:
            status = json.load(answer)
    except (OSError, ValueError, urllib.error.URLError) as error:
        found.add(CRITICAL, f"the service does not answer on {host}:{http.port} ({error})")
        return found, ""
    if not status["service"]["ready"]:
        found.add(WARNING, "the service is not ready")
    if status["service"]["config"]["error"]:
        found.add(WARNING, "the configuration file is bad, the one from before holds")
    worst = {"generations": 0.0, "oldest_age": 0.0, "blocked_regions": 0.0}
    for table in status["tables"]:
        worst = {name: max(value, table["backlog"].get(name, 0.0)) for name, value in worst.items()}
        if table["look_error"]:
            found.add(WARNING, f"{table['name']} cannot be read: {table['look_error']}")
        for job, state in table["jobs"].items():
            _job(found, f"{table['name']}/{job}", state)
    _backlog(found, "worst_", worst, limits)
    found.figures.append(f"tables={len(status['tables'])}")
    return found, f"{len(status['tables'])} tables, at most {worst['generations']:g} generations waiting in one"


def _job(found: Finding, name: str, state: dict[str, Any]) -> None:
    failures = state["consecutive_failures"]
    if failures:
        level = CRITICAL if failures >= _FAILURES_CRITICAL else WARNING
        found.add(level, f"{name} failed {failures} times in a row")
    every, since = state["schedule_seconds"], state["seconds_since_success"]
    # A run that another supervisor does, or that a window puts off, is none of ours that is late.
    late = since / every if every and state["waiting_for"] not in {"window", "budget"} else 0.0
    if late >= _LATE_WARNING and state["state"] != "running":
        found.add(CRITICAL if late >= _LATE_CRITICAL else WARNING, f"{name} did not succeed for {since:.0f} s")
