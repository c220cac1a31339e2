"""``memwal-ops check --nagios``: one line and an exit code from 0 to 3, for monitoring without Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from http.client import HTTPException
from typing import Any

import click

from memwal_ops import errors
from memwal_ops.cli.options import BRANCH, TABLE, Duration, IntRange, on, storage_options
from memwal_ops.cli.printing import echo
from memwal_ops.cli.process import open_table
from memwal_ops.core.answers import ASKED_BY, bad_answers
from memwal_ops.core.figures import Figures, backlog_of, jobs_of, poll_table, shared_noun
from memwal_ops.core.job import BACKLOG_ROLES, Role
from memwal_ops.core.leases import read_lease
from memwal_ops.core.protocols import Table
from memwal_ops.core.registry import format_errors
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.config.model import HttpConfig
from memwal_ops.supervisor.http.client import ServiceClient, why_silent
from memwal_ops.supervisor.observe import findings
from memwal_ops.supervisor.observe.status_document import applicable_jobs
from memwal_ops.supervisor.state.directory import state_dir
from memwal_ops.text import counted, counted_as, printable

_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_MAX_LENGTH = 300


@dataclass(slots=True)
class CheckResult:
    """The result of a check: its level, messages with their levels, and figures for graphs."""

    level: int = findings.OK
    texts: list[tuple[int, str]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def add(self, level: int, text: str) -> None:
        """Add a message; the level of the check is the worst one."""
        self.level = findings.worst((self.level, level))
        self.texts.append((level, text))

    def compare(
        self, name: str, value: float | None, limits: tuple[float, float], unit: str = "", label: str = ""
    ) -> None:
        """Compare a figure with its two limits; the text has ``label`` or else its name. None: it is not known."""
        warning, critical = limits
        shown = "U" if value is None else f"{round(value):g}{unit}"
        level = findings.OK if value is None else findings.level_of(value, limits)
        if level:
            self.add(level, f"{label or name} {shown}")
        self.figures.append(f"{name}={shown};{warning:g};{critical:g}")

    def line(self, summary: str) -> str:
        """Return the output line: the messages, the worst first, or ``summary``; then the figures."""
        worst_first = sorted(self.texts, key=lambda entry: -findings.severity(entry[0]))
        text = "; ".join(part for _, part in worst_first) or summary
        text = text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH].rstrip()} ..."
        figures = f" | {' '.join(self.figures)}" if self.figures else ""
        return redact(f"MEMWAL {_WORDS[self.level]} - {text}{figures}".replace("\n", " "))


def backlog_limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of :class:`~memwal_ops.supervisor.observe.findings.Limits`, given as ``limits``."""

    @wraps(command)
    def limited(
        *, warn_waiting: int, crit_waiting: int, warn_age: timedelta, crit_age: timedelta, **options: Any
    ) -> Any:
        limits = findings.Limits((warn_waiting, crit_waiting), (warn_age.total_seconds(), crit_age.total_seconds()))
        return command(limits=limits, **options)

    for flag, name, kind, default, text in (
        ("--crit-age", "crit_age", Duration(), "3h", "Age of the oldest unmerged generation."),
        ("--warn-age", "warn_age", Duration(), "30m", "Age of the oldest unmerged generation."),
        ("--crit-generations", "crit_waiting", IntRange(min=1), 128, "Unmerged generations of a table."),
        ("--warn-generations", "warn_waiting", IntRange(min=1), 32, "Unmerged generations of a table."),
    ):
        limited = click.option(flag, name, type=kind, default=default, show_default=True, help=text)(limited)
    return limited


@click.command(short_help="One line and an exit code from 0 to 3, for Nagios.")
@click.argument("uri", type=TABLE, required=False)
@click.option("--config", "file", metavar="FILE", help="Check all tables of the service with this configuration.")
@click.option("--branch", metavar="NAME", help=BRANCH)
@click.option("--nagios", is_flag=True, help="Required: the output format.")
@backlog_limits
@storage_options
def check(
    uri: str | None,
    file: str | None,
    branch: str | None,
    nagios: bool,
    limits: findings.Limits,
    storage_options: dict[str, str],
) -> int:
    """Check the table at URI, or with --config all tables of a running service, and print one line.

    With --config also: jobs that failed, jobs that are late (3 or 10 times their interval, at least 3 or 10 minutes),
    a bad configuration file, and a service that does not respond. Tables that the service has not read yet are UNKNOWN.

    \b
    Examples:
      memwal-ops check --nagios s3://bucket/orders.lance
      memwal-ops check --nagios --config memwal.yaml --crit-age 6h

    Exit codes: 0 OK; 1 WARNING; 2 CRITICAL; 3 UNKNOWN.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    if not nagios or (uri is None) == (file is None) or (uri is None and branch is not None):
        raise errors.InvalidUsageError("Give --nagios, and either a URI, with --branch or not, or --config FILE.")
    try:
        if file is not None:
            result, summary = _service(file, limits)
        else:
            result, summary = _table(on(str(uri), branch, storage_options), storage_options, limits)
    except errors.MemwalOpsError as error:
        level = findings.CRITICAL if errors.is_damage(error.exit_code) else findings.UNKNOWN
        result, summary = CheckResult(level, [(level, f"{error.reason}: {error}")]), ""
    echo(printable(result.line(summary)))
    return result.level


def _table(uri: str, options: dict[str, str], limits: findings.Limits) -> tuple[CheckResult, str]:
    table = open_table(uri, options)
    roles = {name: {metric.role for metric in spec.backlog_metrics.values()} for name, spec in table.jobs.items()}
    reporting = [table.jobs[name] for name in table.jobs if roles[name] & {*BACKLOG_ROLES}]
    figures, faults = poll_table(table, reporting)
    if faults:
        raise faults[0]
    result = CheckResult()
    with format_errors(table.format):
        missing = table.format.missing_of(table, table.revision)
    if missing is not None:
        result.add(findings.CRITICAL, f"{missing} is missing or damaged, and revision {table.revision} needs it")
    if not reporting:
        return result, "no log to merge"
    backlog = Figures(figures, table.format.name)
    waiting = backlog.amount("backlog")
    if waiting is None:
        result.add(findings.UNKNOWN, "no job of this table reports a backlog")
        return result, ""
    result.compare("generations", waiting, limits.waiting)
    result.compare("oldest", backlog.amount("age"), limits.age, "s")
    for fault_of_log in findings.writer_findings({"uri": uri, "format": table.format.name, "backlog": figures}):
        result.add(findings.level_of_finding(fault_of_log), fault_of_log["what"])
    if blocked := backlog.amount("blocked"):
        result.add(findings.CRITICAL, f"{counted_as(int(blocked), backlog.noun_of('blocked'))} blocked")
    elif (fault := last_run_fault_of(table, figures)) is not None:
        result.add(*fault)
    return result, f"{counted_as(int(waiting), backlog.noun_of('backlog'))} waiting"


def last_run_fault_of(table: Table, figures: Mapping[str, float]) -> tuple[int, str] | None:
    """Return the fault that a table's lease records of the last run of the job that reduces its backlog."""
    job = next((name for name in jobs_of("backlog") if name in table.jobs), None)
    lease = None if job is None else read_lease(table.store, job)
    last = None if lease is None else lease.last
    backlog = Figures(figures, table.format.name)
    return None if job is None or last is None else findings.last_run_fault(job, last.outcome, backlog)


def _service(file: str, limits: findings.Limits) -> tuple[CheckResult, str]:
    config = load_settings(file).config
    if not config.http.enabled:
        raise errors.InvalidUsageError(
            "The service does not serve HTTP (http.enabled: false).", remedy="Check each URI instead."
        )
    result = CheckResult()
    status, why = ask_service(config.http, config.state_dir and state_dir(config))  # a default is that of its user
    if status is None:
        result.add(findings.CRITICAL, why)
        return result, ""
    if not status["service"]["ready"]:
        result.add(findings.WARNING, "the service is not ready")
    refused = status["service"]["config"]["error"]
    if refused:
        result.add(findings.WARNING, f"the configuration file was not applied, or only in part: {refused}")
    if status["service"].get("state_error"):
        result.add(findings.WARNING, str(status["service"]["state_error"]))
    for fault in status["service"].get("discovery_faults", ()):
        result.add(findings.WARNING, f"{fault['pattern']}: {fault['error']}")
    for fault in findings.event_findings(status["service"]):
        result.add(findings.level_of_finding(fault), fault["what"])
    tables = status["tables"]
    if pending := findings.pending_text(status["service"]):
        result.add(findings.UNKNOWN, pending)
    elif not tables:
        result.add(findings.WARNING, "no table is maintained: no pattern matches any")
    for table in tables:
        for level, text in table_faults(table):
            result.add(level, text)
    return result, _compared(result, tables, limits)


def _compared(found: CheckResult, tables: list[dict[str, Any]], limits: findings.Limits) -> str:
    """Compare the largest backlog with its limits, and return the summary of all tables."""
    most, where = _worst(tables, "backlog")
    noun, unread = shared_noun(tables, "backlog"), findings.not_read(tables)
    if unread:
        found.add(findings.UNKNOWN, findings.not_read_text(unread, len(tables)))
    if unread < len(tables) or not tables:
        found.compare("worst_generations", most, limits.waiting, label=f"{where}: {noun}")
        oldest, which = _worst(tables, "age")
        found.compare("worst_oldest", oldest, limits.age, "s", label=f"{which}: oldest")
    found.figures += [f"tables={len(tables)}", f"not_read={unread}"]
    behind = f", at most {counted_as(int(most), noun)} waiting in one"
    return f"{counted(len(tables), 'table')}{behind}{f' ({where})' if most else ''}"


def _worst(tables: list[dict[str, Any]], role: Role) -> tuple[float, str]:
    return max(((backlog_of(table).amount(role) or 0.0, table["name"]) for table in tables), default=(0.0, ""))


def ask_service(http: HttpConfig, folder: str | None = None) -> tuple[dict[str, Any] | None, str]:
    """Return the status of the service at an address, which has the state folder, or None and the reason."""
    client = ServiceClient(http)
    try:
        status = client.get("/api/v1/status")
    except (OSError, ValueError, HTTPException) as error:
        return None, f"the service does not respond on {client.address} ({why_silent(error)})"
    try:
        known = isinstance(status["service"]["instance"], str) and isinstance(status["tables"], list)
    except (KeyError, TypeError):
        known = False
    if not known:
        return None, f"the server on {client.address} is not memwal-ops"
    if folder and (theirs := status["service"].get("state_dir", folder)) != folder:
        return None, f"the service at that address runs another configuration (its state_dir is {theirs})"
    return status, ""


def table_faults(table: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the faults of a table in a status document: level and text."""
    backlog = backlog_of(table)
    blocked = int(backlog.amount("blocked") or 0)
    name, job = findings.backlog_job(table)
    fault = None
    if job is not None and not job["consecutive_failures"]:
        fault = findings.last_run_fault(name, job["last_outcome"], backlog)
    if blocked:
        yield findings.CRITICAL, f"{table['name']}: {counted_as(blocked, backlog.noun_of('blocked'))} blocked"
    elif fault is not None:
        yield fault[0], f"{table['name']}: {fault[1]}"
    bad_indexes = bad_answers(table.get("answers", ()))
    for bad in bad_indexes:
        yield findings.CRITICAL if bad.wrong else findings.WARNING, f"{table['name']}: {bad.describe()}"
    for fault_of_log in findings.writer_findings(table):
        yield findings.level_of_finding(fault_of_log), f"{table['name']}: {fault_of_log['what']}"
    if table["look_error"]:
        yield findings.state_level(table), f"{table['name']} cannot be read: {table['look_error']}"
    for other, state in applicable_jobs(table).items():
        yield from findings.job_findings(f"{table['name']}/{other}", state)
        if state["last_outcome"] == "partial" and other != name and not (other == ASKED_BY and bad_indexes):
            level, what = findings.partial_fault(other)
            yield level, f"{table['name']}: {what}"
