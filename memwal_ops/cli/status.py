"""``memwal-ops status``: show which tables are behind, how far, why, and what to do, as a document and as text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode

import click

from memwal_ops import text
from memwal_ops.cli import options, printing
from memwal_ops.cli.check import ask_service, backlog_limits
from memwal_ops.core import figures
from memwal_ops.core.outlook import describe_next_run
from memwal_ops.errors import InvalidConfigError, InvalidUsageError, MemwalOpsError
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.effective import Settings
from memwal_ops.supervisor.config.loader import http_of, load_settings
from memwal_ops.supervisor.http.client import ServiceClient
from memwal_ops.supervisor.observe import findings
from memwal_ops.supervisor.observe.status import FleetStatus
from memwal_ops.supervisor.observe.status_document import applicable_jobs, budget_text
from memwal_ops.supervisor.scheduling import discovery
from memwal_ops.supervisor.state.directory import state_dir


def describe(document: Mapping[str, Any], *, in_full: bool) -> str:
    """Return the text: tables, jobs that run or did not succeed, leases that are held; then faults, the worst first.

    ``in_full``: show every job of every table.
    """
    tables = document["tables"]
    parts = [_head(document)]
    if document["service"] is not None and document["service"].get("fleet") is not None:
        parts.append(_fleet(document["service"]["fleet"]))
    if in_full:
        parts.append("\n".join(text.paragraph(_place(table)) for table in tables))
    logged = [table for table in tables if _has_log(table)]
    if logged:
        names = {name for name, job in map(findings.backlog_job, logged) if job is not None} or {"merge"}
        job = names.pop() if len(names) == 1 else "job"
        last = (f"last {job}", f"{job} due")
        parts.append(text.grid((*_HEADINGS, *last), [*map(_cells, logged)], words=("table", "state", *last)))
    if len(logged) < len(tables):
        parts.append(_without_log([table for table in tables if not _has_log(table)]))
    if rows := [row for table in tables for row in _job_rows(table, in_full=in_full)]:
        parts.append(text.grid(_JOB_HEADINGS, rows, words=_JOB_LEFT))
    if in_full and (lines := [line for table in tables for line in _next_runs(table, several=len(tables) > 1)]):
        parts.append("\n".join(lines))
    if leases := [row for table in tables for row in _lease_rows(table)]:
        parts.append(text.grid(_LEASE_HEADINGS, leases, words=_LEASE_HEADINGS))
    wrong: list[tuple[Mapping[str, Any] | None, Mapping[str, Any]]] = [(None, fault) for fault in document["findings"]]
    unknown = findings.WORDS[findings.UNKNOWN]
    wrong += [(table, fault) for table in tables for fault in table["findings"] if fault["level"] != unknown]
    wrong.sort(key=lambda pair: -findings.severity(findings.level_of_finding(pair[1])))
    parts += [_problem(table, finding) for table, finding in wrong]
    return "\n\n".join([*parts, _closing(document)])


_HEADINGS = ("table", "state", "waiting", "rows", "oldest", "blocked")
_JOB_HEADINGS = ("table", "job", "state", "last run", "last success", "failures", "next due")
_JOB_LEFT = ("table", "job", "state", "last run", "last success", "next due")
_MEMBER_HEADINGS = ("member of the fleet", "state", "tables", "last heartbeat", "runs as")
_LEASE_HEADINGS = ("lease on", "job", "held by", "until (UTC)")


def _head(document: Mapping[str, Any]) -> str:
    service = document["service"]
    if service is None:
        why_not = document["service_error"]
        lines = [
            f"{why_not[:1].upper()}{why_not[1:]}: what follows is from the tables and the history.",
            f"Due jobs run only while a service runs: see {printing.page_path('runbooks/alerts/MemwalOpsDown.md')}",
        ]
    else:
        word = "stopping" if service["stopping"] else "runs" if service["ready"] else "is not ready yet"
        lines = [f"Service: {word} as {service['holder']}, since {service['started'][:19].replace('T', ' ')} UTC."]
        lines += _pause_lines(service, document["tables"])
        lines += _event_lines(service.get("events"), document["tables"])
        lines += budget_lines(service.get("budget"), document["tables"])
    if document["history_error"] is not None:
        lines.append(f"{document['history_error']} The times of runs are known from leases only.")
    return "\n".join(text.paragraph(line) for line in lines)


def budget_lines(budget: Mapping[str, Any] | None, tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is used of the budget of the fleet, and what it defers."""
    if budget is None:
        return []
    # A service of an earlier release has no own part.
    shown = [budget_text(budget)] if budget.get("own") and budget["limits"] else []
    if budget["shadow"]:
        return shown
    waiting = sum(job["waiting_for"] == "over_budget" for table in tables for job in applicable_jobs(table).values())
    jobs = text.counted(waiting, "due job")
    if budget["used_up"] is None:
        return [*shown, f"What {jobs} would use does not fit the budget of the fleet now."] if waiting else shown
    until = "" if budget["frees"] is None else f" until {budget['frees'][:16].replace('T', ' ')} UTC"
    limit = budget["used_up"]
    if budget["used"][limit] < budget["limits"][limit] and waiting:
        return [*shown, f"The next run would pass the budget of the fleet ({limit}){until}; it defers {jobs}."]
    return [*shown, f"The budget of the fleet is used up ({limit}){until}; it defers {jobs}."]


def _pause_lines(service: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is paused: nothing is due there, and nothing else shows it."""
    places = [("all tables", service), *((table["name"], table) for table in tables)]
    places += [(f"{table['name']} {name}", job) for table in tables for name, job in table["jobs"].items()]
    for place, pause in ((place, document["paused"]) for place, document in places if document.get("paused")):
        until = "it is resumed" if pause["until"] is None else f"{pause['until'][:16].replace('T', ' ')} UTC"
        yield f"Paused: {place}, by {pause['by']}, until {until}{': ' if pause['reason'] else ''}{pause['reason']}."


def _event_lines(events: Mapping[str, Any] | None, tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether events of the store announce commits; what is wrong with them is a problem below."""
    if events is None or events["state"] == "unreachable":
        return []
    last = events["last_event"]
    when = "none has come yet" if last is None else f"the last one came at {last[:19].replace('T', ' ')} UTC"
    return [f"Events announce the commits of {events['tables']:,} of {text.counted(len(tables), 'table')}; {when}."]


def _fleet(fleet: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{member['name']} (this one)" if member["name"] == fleet["name"] else member["name"],
            fleet["state"] if member["name"] == fleet["name"] else "living" if member["living"] else "dead",
            "?" if member["tables"] is None else f"{member['tables']:,} of {member['known_tables']:,}",
            f"{text.time_text(member['seconds_since_heartbeat'])} ago",
            member["holder"] or "?",
        ]
        for member in fleet["members"]
    ]
    return text.grid(_MEMBER_HEADINGS, rows, words=_MEMBER_HEADINGS)


def _cells(table: Mapping[str, Any]) -> list[str]:
    backlog, (_, job) = figures.backlog_of(table), findings.backlog_job(table)
    waiting = backlog.amount("backlog")
    if waiting is not None:
        known = [f"{int(waiting):,}", f"{int(backlog.values['rows']):,}" if "rows" in backlog.values else ""]
        known += [findings.age_text(backlog), f"{int(backlog.amount('blocked') or 0):,}"]
    else:
        known = ["?" if table["error"] or findings.not_read([table]) else ""] * 4
    ran = ["", ""] if job is None else [_last(job), _next(job)]
    return [table["name"], table["level"], *known, *ran]


def _has_log(table: Mapping[str, Any]) -> bool:
    """Whether something can wait to be merged; also of a table that cannot be read."""
    return bool(table["error"]) or not table["backlog"] or figures.backlog_of(table).amount("backlog") is not None


def _without_log(tables: Sequence[Mapping[str, Any]]) -> str:
    """The metrics of tables without a log, as triggers name them, but for those that are 0 everywhere."""
    backlogs = [figures.backlog_of(table) for table in tables]
    shown = dict.fromkeys(name for backlog in backlogs for name, value in backlog.values.items() if value)
    shown = {name: None for name in shown if not any(_is_detail(backlog, name) for backlog in backlogs)}
    rows = [
        [table["name"], table["level"], *(_figure(backlog, name) for name in shown)]
        for table, backlog in zip(tables, backlogs, strict=True)
    ]
    return text.grid(("table", "state", *shown), rows, words=("table", "state"))


def _is_detail(backlog: figures.Figures, name: str) -> bool:
    spec = backlog.metrics.get(name)
    return spec is not None and spec.detail


def _figure(backlog: figures.Figures, name: str) -> str:
    spec, value = backlog.metrics.get(name), backlog.values.get(name)
    if value is None:
        return ""
    return text.size_text(value) if spec is not None and spec.unit == "bytes" else f"{int(value):,}"


def _place(table: Mapping[str, Any]) -> str:
    version = "" if table["version"] is None else f", version {table['version']}"
    return f"Table {table['name']}: {table['uri']}{version}"


def _job_rows(table: Mapping[str, Any], *, in_full: bool) -> Iterator[list[str]]:
    for name, job in applicable_jobs(table).items():
        if in_full or job["consecutive_failures"] or job["state"] == "running" or job["last_outcome"] == "partial":
            yield [
                table["name"], name, job["waiting_for"] or job["state"], job["last_outcome"] or "none",
                _since(job["last_success"]), str(job["consecutive_failures"] or ""), _next(job),
            ]  # fmt: skip


def _next_runs(table: Mapping[str, Any], *, several: bool) -> Iterator[str]:
    where = f" of {table['name']}" if several else ""
    for name, job in applicable_jobs(table).items():
        if job.get("next_run"):
            yield text.paragraph(f"The next {name}{where}: {describe_next_run(job['next_run'])}.", hanging="  ")


def _lease_rows(table: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, job in applicable_jobs(table).items():
        lease = job["lease"]
        if lease["state"] != "free":
            suffix = " (this service)" if lease["state"] == "held" else ""
            yield [table["name"], name, f"{lease['holder']['name']}{suffix}", lease["expires"][11:19]]


def _problem(table: Mapping[str, Any] | None, finding: Mapping[str, Any]) -> str:
    name, uri = ("", "") if table is None else (f" {table['name']}", f" (URI={table['uri']})")
    head = f"{finding['level'].upper()}{name}: {finding['what']}"
    do, command = finding["do"], ""
    if not do.endswith("."):  # a command, which stays on one line so that it can be copied
        do, _, command = do.partition(": ")
    lines = [
        text.paragraph(head, hanging="  "),
        text.paragraph(f"What to do: {do}{':' if command else ''}", indent="  "),
    ]
    if command:
        lines.append(f"    {command}")
    if finding["runbook"]:
        lines.append(f"  See {printing.page_path(finding['runbook'])}{uri}")
    return "\n".join(lines)


def _closing(document: Mapping[str, Any]) -> str:
    summary = document["summary"]
    noun = figures.shared_noun(document["tables"], "backlog")
    words = [
        f"{summary[word]} {word}"
        for level, word in findings.WORDS.items()
        if level != findings.UNKNOWN and summary[word]
    ]
    if unread := summary["not_read"]:
        words.append(findings.not_read_text(unread, summary["tables"]))
    rows = "" if summary["rows"] is None else f" and {text.counted(summary['rows'], 'row')}"
    behind = f"; {text.counted_as(summary['generations'], noun)}{rows} wait"
    if document["tables"] and not any(map(_has_log, document["tables"])):
        behind = ""
    oldest = summary["oldest_table"]
    since = "" if oldest is None else f", the oldest for {text.time_text(summary['oldest_age'])} ({oldest})"
    known = ", as far as can be read" if summary["unreadable"] or unread else ""
    return text.paragraph(
        f"{text.counted(summary['tables'], 'table')}: {', '.join(words) or 'none'}{behind}{since}{known}."
    )


def _last(job: Mapping[str, Any]) -> str:
    """Return when the job last processed its backlog: all of it, or all but what is blocked."""
    if job["last_outcome"] == "partial":
        return _since(job["last_finished"])
    return _since(job["last_success"])


def _since(when: str | None) -> str:
    return "never" if when is None else f"{text.time_text(-findings.seconds_until(when))} ago"


def _next(job: Mapping[str, Any]) -> str:
    if job["waiting_for"] in findings.WAITS:
        return f"waits: {job['waiting_for']}"
    return f"runs: {text.time_text(job['running_seconds'])}" if job["state"] == "running" else findings.due_text(job)


@click.command(short_help="Show all tables of a configuration: what is behind, and why.")
@options.config_option
@click.option("--table", "only", help="Only this table, by its name or URI, with all of its jobs.")
@backlog_limits
@click.option(
    "--timeout", type=options.Duration(), default="60s", show_default=True, help="Limit for reading all tables."
)
@options.json_output
def status(file: str, only: str | None, limits: findings.Limits, timeout: timedelta, as_json: bool) -> int:
    """Show every table in FILE: its backlog, blocked parts, the last and next runs, and the holders of leases.

    Reads the tables, the history in the state folder, and the status of the service if it runs. Changes nothing.

    \b
    Examples:
      memwal-ops status --config memwal.yaml
      memwal-ops status --config memwal.yaml --table orders --json

    Exit codes, as of check: 0 OK; 1 warning; 2 critical; 3 not all tables were read; 50 the configuration is invalid:
    then what a service says that still runs with it.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    try:
        settings = load_settings(file)
    except InvalidConfigError as error:
        if (document := running_status(file, only, limits, error)) is None:
            raise
        printing.echo_result(document, redact(describe(document, in_full=bool(only))), as_json=as_json)
        if not as_json:
            raise
        return error.exit_code
    discovered = discovery.discover(settings.tables)
    tables = [table for table in discovered.tables if only in {None, table.name, table.uri}]
    if only is not None and not tables:
        names = ", ".join(sorted(table.name for table in discovered.tables)) or "none"
        missed = "".join(f" Not all could be found: {fault.pattern}: {fault.why}" for fault in discovered.faults)
        raise InvalidUsageError(
            f"There is no table {only!r}.", remedy=redact(f"The tables of {file}: {names}.{missed}")
        )
    document = fleet_status(settings, tables, discovered.faults, limits, timeout)
    if as_json:
        printing.echo_json(document, default=str)
    else:
        printing.echo(redact(describe(document, in_full=bool(only))))
    return int(document["exit_code"])


def fleet_status(
    settings: Settings,
    tables: Sequence[discovery.FoundTable],
    faults: Sequence[discovery.Fault],
    limits: findings.Limits,
    timeout: timedelta,
) -> dict[str, Any]:
    """Return the document: the keys of ``/api/v1/status`` with the same meaning, and the findings."""
    service, why_not = running_service(settings)
    fleet = FleetStatus(settings, service)
    try:
        documents: list[dict[str, Any]] = [{**table} for table in fleet.tables(tables, timeout)]
        _find(documents, fleet, limits, settings.path)
    finally:
        fleet.close()
    reported = [*findings.service_findings(None if service is None else service["service"], faults, settings.path)]
    if not tables and not faults:
        reported.append(findings.no_tables())
    return {
        "service": None if service is None else service["service"],
        "service_error": why_not or None,
        "history_error": fleet.history_error,
        "discovery_faults": [{"pattern": fault.pattern, "error": fault.why} for fault in faults],
        **_judged(documents, reported),
    }


def running_status(
    file: str, only: str | None, limits: findings.Limits, error: MemwalOpsError
) -> dict[str, Any] | None:
    """Return the document of a service that runs with a file which has an error now, by the service alone.

    None: no service of that file responds. ``error`` of the document is that of the file.
    """
    http = http_of(file)
    client = ServiceClient(http)
    status = ask_service(http)[0] if http.port else None
    if status is None or status["service"]["config"]["file"] != os.path.abspath(file):
        return None
    documents = [
        {**table, "error": findings.poll_error(table), "blocked": []}
        for table in status["tables"]
        if only in {None, table["name"], table["uri"]}
    ]
    _find(documents, _Errors(client), limits, file)
    return {
        "service": status["service"],
        "service_error": None,
        "history_error": None,
        "discovery_faults": status["service"]["discovery_faults"],
        **_judged(documents, [*findings.service_findings(status["service"], (), file)]),
        **printing.error_document(error),
        "exit_code": error.exit_code,
    }


@dataclass(frozen=True, slots=True)
class _Errors:
    """The errors of runs, as the service has them."""

    client: ServiceClient

    def last_error(self, uri: str, job: str) -> Mapping[str, Any] | None:
        query = urlencode({"table": uri, "job": job, "failed": "true", "limit": 1})
        try:
            runs = self.client.get(f"/api/v1/runs?{query}")["runs"]
        except (OSError, ValueError, HTTPException, KeyError, TypeError):
            return None
        return {**runs[0]["error"], "exit_code": runs[0]["exit_code"]} if runs and runs[0]["error"] else None

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        del uri, blocked
        return "", ""


def _find(documents: Iterable[dict[str, Any]], errors: findings.RunErrors, limits: findings.Limits, file: str) -> None:
    for document in documents:
        document["findings"] = [*findings.findings_of(document, errors, limits, file)]
        document["level"] = findings.WORDS[findings.worst(map(findings.level_of_finding, document["findings"]))]


def _judged(documents: list[dict[str, Any]], found: list[findings.Finding]) -> dict[str, Any]:
    """Return the keys of all tables and findings: how bad it is, and the exit code."""
    reported = [*found, *(finding for table in documents for finding in table["findings"])]
    level = findings.worst(map(findings.level_of_finding, reported))
    return {
        "tables": documents,
        "findings": found,
        "summary": _summary(documents),
        "level": findings.WORDS[level],
        "exit_code": level,
    }


def running_service(settings: Settings) -> tuple[Mapping[str, Any] | None, str]:
    """Return the status of the service of a configuration, or None and why it has none."""
    if not settings.config.http.enabled or not settings.config.http.port:
        why = "http.port is 0" if settings.config.http.enabled else "http.enabled is false"
        return None, f"no service to query ({why})"
    return ask_service(settings.config.http, state_dir(settings.config))


def _summary(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    tables = [*tables]
    oldest = max(tables, key=lambda table: figures.backlog_of(table).amount("age") or 0.0, default=None)
    age = 0.0 if oldest is None else figures.backlog_of(oldest).amount("age") or 0.0
    return {
        "tables": len(tables),
        **{word: sum(table["level"] == word for table in tables) for word in findings.WORDS.values()},
        "not_read": findings.not_read(tables),
        "unreadable": sum(table["error"] is not None for table in tables),
        "blocked_regions": int(sum(figures.backlog_of(table).amount("blocked") or 0 for table in tables)),
        "generations": int(sum(figures.backlog_of(table).amount("backlog") or 0 for table in tables)),
        **{name: _total(tables, name) for name in ("rows", "bytes")},
        "oldest_age": age,
        "oldest_table": None if oldest is None or not age else oldest["name"],
    }


def _total(tables: Iterable[Mapping[str, Any]], name: str) -> int | None:
    """Return the sum of a figure over the tables that could be read; None: of what waits in one it is not known."""
    waits = (table["backlog"] for table in tables if figures.backlog_of(table).amount("backlog"))
    return text.known_sum(None if name not in backlog else int(backlog[name]) for backlog in waits)
