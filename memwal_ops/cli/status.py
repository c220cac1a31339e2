"""``memwal-ops status``: one page over all tables: which is behind, how far, why, and what to do."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from memwal_ops.cli.check import CRITICAL, OK, WARNING, Limits, ask_service, backlog_limits, job_trouble
from memwal_ops.cli.config_option import config_option
from memwal_ops.cli.options import Duration, json_output
from memwal_ops.cli.text import counted, grid, paragraph, time_text
from memwal_ops.errors import InvalidUsageError, runbook
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.config import load_settings
from memwal_ops.supervisor.discovery import discover
from memwal_ops.supervisor.state_dir import state_dir
from memwal_ops.supervisor.survey import Survey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from memwal_ops.supervisor.discovery import Fault, FoundTable
    from memwal_ops.supervisor.settings import Settings

_WORDS = {OK: "ok", WARNING: "warning", CRITICAL: "critical"}
_BEHIND = "runbooks/backlog-growing.md"
_MOST_BLOCKED = 3


@click.command(short_help="Show all tables of a configuration: which is behind, why, and what to do.")
@config_option
@click.option("--table", "only", help="Only this table, by its name or URI, with all of its jobs.")
@backlog_limits
@click.option("--timeout", type=Duration(), default="60s", show_default=True, help="For all tables to answer.")
@json_output
def status(file: str, only: str | None, limits: Limits, timeout: timedelta, as_json: bool) -> int:
    """Show every table that FILE names: what waits, what blocks it, the last runs and the next, and who holds leases.

    Asks the tables themselves, the history in the state folder, and the service, where one runs. Changes nothing.

    Exit codes, as of check: 0 all is well; 1 something to look at; 2 something to act on; 50 the configuration is bad.
    """
    settings = load_settings(file)
    found = discover(settings.tables)
    tables = [table for table in found.tables if only in {None, table.name, table.uri}]
    if only is not None and not tables:
        names = ", ".join(sorted(table.name for table in found.tables)) or "none"
        raise InvalidUsageError(f"There is no table {only!r}.", remedy=f"The tables of {file}: {names}.")
    document = survey(settings, tables, found.faults, limits, timeout)
    click.echo(
        json.dumps(document, indent=2, default=str) if as_json else redact(describe(document, in_full=bool(only)))
    )
    return int(document["exit_code"])


def survey(
    settings: Settings, tables: Sequence[FoundTable], faults: Sequence[Fault], limits: Limits, patience: timedelta
) -> dict[str, Any]:
    """The document: the keys of ``/api/v1/status`` where they mean the same, and what is wrong."""
    told, why_not = _service(settings)
    asked = Survey(settings, told)
    try:
        documents = asked.tables(tables, patience)
        for one in documents:
            one["findings"] = [*_findings(one, asked, limits, settings.path)]
            one["level"] = _WORDS[max((_level(finding) for finding in one["findings"]), default=OK)]
    finally:
        asked.close()
    found = [
        _finding(WARNING, f"{fault.pattern}: {fault.why}", "Mend the entry, or its store.", runbook(fault.exit_code))
        for fault in faults
    ]
    if not tables:
        found.append(_finding(WARNING, "There is no table: no pattern finds any.", "Check the patterns.", None))
    refused = None if told is None else told["service"]["config"]["error"]
    if refused:
        page = "runbooks/alerts/MemwalOpsConfigBad.md"
        what = f"The service did not take up the file, or not all of it: {refused}"
        checked = f"memwal-ops config check {shlex.quote(settings.path)}"
        todo = f"Mend what this names, and have the file read again by SIGHUP: {checked}"
        found.append(_finding(WARNING, what, todo, page))
    lost = None if told is None else told["service"].get("state_error")
    if lost:
        page = "runbooks/errors/56-history.md"
        found.append(_finding(WARNING, f"What the service does is not written down: {lost}", "Mend the folder.", page))
    worst = max([OK, *map(_level, found), *(_level(one) for table in documents for one in table["findings"])])
    return {
        "service": None if told is None else told["service"],
        "service_error": why_not or None,
        "history_error": asked.history_error,
        "discovery_faults": [{"pattern": fault.pattern, "error": fault.why} for fault in faults],
        "tables": documents,
        "findings": found,
        "summary": _summary(documents),
        "level": _WORDS[worst],
        "exit_code": worst,
    }


def _service(settings: Settings) -> tuple[Mapping[str, Any] | None, str]:
    if not settings.config.http.enabled or not settings.config.http.port:
        why = "http.port is 0" if settings.config.http.enabled else "http.enabled is false"
        return None, f"no service can be asked ({why})"
    told, why_not = ask_service(settings.config.http)
    if told is not None and told["service"]["state_dir"] != state_dir(settings.config):
        theirs = told["service"]["state_dir"]
        return None, f"the service that answers is that of another configuration (its state_dir is {theirs})"
    return told, why_not


# -- what is wrong


def _finding(level: int, what: str, do: str, page: str | None) -> dict[str, Any]:
    return {"level": _WORDS[level], "what": what, "do": do, "runbook": page}


def _level(finding: Mapping[str, Any]) -> int:
    return next(level for level, word in _WORDS.items() if word == finding["level"])


def _findings(table: Mapping[str, Any], asked: Survey, limits: Limits, file: str) -> Iterator[dict[str, Any]]:
    error, backlog = table["error"], table["backlog"]
    if error is not None:
        part = "cannot be read" if not backlog else "cannot be read as a whole"
        yield _finding(CRITICAL, f"It {part}: {error['reason']}. {error['message']}", error["remedy"], error["runbook"])
    blocked = table["blocked"]
    for one in blocked[:_MOST_BLOCKED]:
        where = "" if one["generation"] is None else f" at generation {one['generation']}"
        what = f"Region {one['region_id']} is blocked{where}: {one['reason']}. {one['detail']}"
        todo = f"Mend that; nothing more of this region is merged before. See it: memwal-ops inspect {table['uri']}"
        yield _finding(CRITICAL, what, todo, _MERGE_BLOCKED)
    regions = int(backlog.get("blocked_regions", 0))
    if regions and len(blocked) != min(regions, _MOST_BLOCKED):
        what = f"{counted(regions, 'region')} in all cannot be merged to the end."
        yield _finding(CRITICAL, what, f"See which: memwal-ops inspect {table['uri']}", _MERGE_BLOCKED)
    for name, job in table["jobs"].items():
        yield from _of_job(table, name, job, asked, file)
    behind = limits.of(backlog.get("generations", 0), backlog.get("oldest_age", 0))
    if behind:
        waits = f"{counted(int(backlog['generations']), 'generation')} wait, the oldest for {_age(backlog)}"
        why, todo = _why_behind(table, file)
        yield _finding(behind, f"It is behind: {waits}. {why}", todo, _BEHIND)


_MERGE_BLOCKED = "runbooks/merge-blocked.md"


def _of_job(
    table: Mapping[str, Any], name: str, job: Mapping[str, Any], asked: Survey, file: str
) -> Iterator[dict[str, Any]]:
    for level, what in job_trouble(name, job):
        error = asked.last_error(table["name"], name) if job["consecutive_failures"] else None
        if not job["consecutive_failures"]:
            yield _finding(level, f"{what}.", _ask_history(file, table, name, ""), _JOB_LATE)
        elif error is None:
            yield _finding(level, f"{what}.", _ask_history(file, table, name, " --failed"), _JOB_FAILING)
        elif table["error"] is None or table["error"]["reason"] != error["reason"]:
            why = f"{what}, last with {error['reason']}: {error['message']}"
            page = runbook(error["exit_code"] or 0) or _JOB_FAILING
            yield _finding(level, why, error["remedy"] or _ask_history(file, table, name, " --failed"), page)
        if job["consecutive_failures"]:
            return  # that it is late, too, is no news


_JOB_LATE, _JOB_FAILING = "runbooks/alerts/MemwalOpsJobLate.md", "runbooks/alerts/MemwalOpsJobFailing.md"


def _ask_history(file: str, table: Mapping[str, Any], job: str, more: str = "") -> str:
    which = f"--config {shlex.quote(file)} --table {shlex.quote(table['name'])} --job {job}{more}"
    return f"See how its runs ended: memwal-ops history {which}"


def _why_behind(table: Mapping[str, Any], file: str) -> tuple[str, str]:
    """Why, and what to do."""
    job = table["jobs"].get("merge")
    if job is None:
        by_hand = f"memwal-ops merge {table['uri']}"
        return "No merge is configured for it.", f"Enable it in {file}, or merge by hand: {by_hand}"
    ran = _ask_history(file, table, "merge")
    reasons = (
        (table["backlog"].get("blocked_regions"), "A region is blocked.", "Mend what blocks it."),
        (job["state"] == "running", f"A merge has been running for {time_text(job['running_seconds'])}.", ran),
        (
            job["lease"]["state"] != "free",
            f"The lease of its merge is that of {_holder(job)}.",
            f"See whether that one gets on: memwal-ops lease list {table['uri']}",
        ),
        (job["consecutive_failures"], "Its merges fail.", ran),
        (job["waiting_for"], f"A merge is due, and {_waits(job)}.", ran),
    )
    return next(((why, todo) for holds, why, todo in reasons if holds), (f"The next merge is due: {_due(job)}.", ran))


# -- for a person


def describe(document: Mapping[str, Any], *, in_full: bool) -> str:
    """One page: the tables, the jobs that are worth a look, who holds leases; what is wrong, the worst of it first.

    ``in_full``: every job of every table.
    """
    tables = document["tables"]
    parts = [_head(document)]
    if in_full:
        parts.append("\n".join(paragraph(_place(table)) for table in tables))
    if tables:
        parts.append(grid(_HEADINGS, [_cells(table) for table in tables], words=_LEFT))
    rows = [row for table in tables for row in _job_rows(table, in_full=in_full)]
    if rows:
        parts.append(grid(_JOB_HEADINGS, rows, words=_JOB_LEFT))
    leases = [row for table in tables for row in _lease_rows(table)]
    if leases:
        parts.append(grid(_LEASE_HEADINGS, leases, words=_LEASE_HEADINGS))
    wrong: list[tuple[Mapping[str, Any] | None, Mapping[str, Any]]] = [*((None, one) for one in document["findings"])]
    wrong += [(table, one) for table in tables for one in table["findings"]]
    wrong.sort(key=lambda one: -_level(one[1]))
    parts += [_problem(table, one) for table, one in wrong]
    return "\n\n".join([*parts, _closing(document["summary"])])


_HEADINGS = ("table", "state", "waiting", "rows", "oldest", "blocked", "last merge", "merge due")
_LEFT = ("table", "state", "last merge", "merge due")
_JOB_HEADINGS = ("table", "job", "state", "last run", "last success", "failures", "next due")
_JOB_LEFT = ("table", "job", "state", "last run", "last success", "next due")
_LEASE_HEADINGS = ("lease on", "job", "held by", "until (UTC)")


def _head(document: Mapping[str, Any]) -> str:
    service = document["service"]
    if service is None:
        why_not = document["service_error"]
        lines = [
            f"{why_not[:1].upper()}{why_not[1:]}: what follows is from the tables and the history.",
            "What is due is run only where a service runs: see runbooks/alerts/MemwalOpsDown.md",
        ]
    else:
        word = "stopping" if service["stopping"] else "runs" if service["ready"] else "is not ready yet"
        lines = [f"Service: {word} as {service['holder']}, since {service['started'][:19].replace('T', ' ')} UTC."]
    if document["history_error"] is not None:
        lines.append(f"{document['history_error']} When jobs ran is known from their leases alone.")
    return "\n".join(paragraph(line) for line in lines)


def _cells(table: Mapping[str, Any]) -> list[str]:
    backlog, merge = table["backlog"], table["jobs"].get("merge")
    if "generations" in backlog:
        known = [f"{int(backlog[name]):,}" for name in ("generations", "rows")]
        known += [_age(backlog), f"{int(backlog['blocked_regions']):,}"]
    else:
        known = ["?", "?", "?", "?"]
    ran = ["", ""] if merge is None else [_last(merge), _next(merge)]
    return [table["name"], table["level"], *known, *ran]


def _place(table: Mapping[str, Any]) -> str:
    version = "" if table["version"] is None else f", version {table['version']}"
    return f"Table {table['name']}: {table['uri']}{version}"


def _job_rows(table: Mapping[str, Any], *, in_full: bool) -> Iterator[list[str]]:
    for name, job in table["jobs"].items():
        if in_full or job["consecutive_failures"] or job["state"] == "running" or job["last_outcome"] == "partial":
            yield [
                table["name"], name, job["waiting_for"] or job["state"], job["last_outcome"] or "none",
                _since(job["last_success"]), str(job["consecutive_failures"] or ""), _next(job),
            ]  # fmt: skip


def _lease_rows(table: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, job in table["jobs"].items():
        lease = job["lease"]
        if lease["state"] != "free":
            ours = " (this service)" if lease["state"] == "held" else ""
            yield [table["name"], name, f"{lease['holder']['name']}{ours}", lease["expires"][11:19]]


def _problem(table: Mapping[str, Any] | None, finding: Mapping[str, Any]) -> str:
    name, uri = ("", "") if table is None else (f" {table['name']}", f" (URI={table['uri']})")
    head = f"{finding['level'].upper()}{name}: {finding['what']}"
    do, command = finding["do"], ""
    if not do.endswith("."):  # a command, which stays on one line so that it can be copied
        do, _, command = do.partition(": ")
    lines = [paragraph(head, hanging="  "), paragraph(f"What to do: {do}{':' if command else ''}", indent="  ")]
    if command:
        lines.append(f"    {command}")
    if finding["runbook"]:
        lines.append(f"  See {finding['runbook']}{uri}")
    return "\n".join(lines)


def _summary(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    tables = [*tables]
    oldest = max(tables, key=lambda one: one["backlog"].get("oldest_age", 0.0), default=None)
    return {
        "tables": len(tables),
        **{word: sum(one["level"] == word for one in tables) for word in _WORDS.values()},
        "unreadable": sum(one["error"] is not None for one in tables),
        "blocked_regions": int(sum(one["backlog"].get("blocked_regions", 0) for one in tables)),
        **{name: int(sum(one["backlog"].get(name, 0) for one in tables)) for name in ("generations", "rows", "bytes")},
        "oldest_age": 0.0 if oldest is None else oldest["backlog"].get("oldest_age", 0.0),
        "oldest_table": None if oldest is None or not oldest["backlog"].get("oldest_age") else oldest["name"],
    }


def _closing(summary: Mapping[str, Any]) -> str:
    words = [f"{summary[word]} {word}" for word in _WORDS.values() if summary[word]]
    behind = f"{counted(summary['generations'], 'generation')} and {counted(summary['rows'], 'row')} wait"
    oldest = summary["oldest_table"]
    since = "" if oldest is None else f", the oldest for {time_text(summary['oldest_age'])} ({oldest})"
    known = ", as far as can be read" if summary["unreadable"] else ""
    return paragraph(f"{counted(summary['tables'], 'table')}: {', '.join(words) or 'none'}; {behind}{since}{known}.")


def _age(backlog: Mapping[str, float]) -> str:
    return time_text(backlog["oldest_age"]) if backlog.get("oldest_age") else ""


def _last(merge: Mapping[str, Any]) -> str:
    """When it merged something: all of it, or all but what is blocked."""
    if merge["last_outcome"] == "partial":
        return _since(merge["last_finished"])
    return _since(merge["last_success"])


def _since(when: str | None) -> str:
    return "never" if when is None else f"{time_text(-_ahead(when))} ago"


def _ahead(when: str) -> float:
    return (datetime.fromisoformat(when) - datetime.now(UTC)).total_seconds()


def _next(job: Mapping[str, Any]) -> str:
    if job["waiting_for"] in _WAITS:
        return f"waits: {job['waiting_for']}"
    return f"runs: {time_text(job['running_seconds'])}" if job["state"] == "running" else _due(job)


_WAITS = {
    "worker": "a worker",
    "lease": "its lease",
    "window": "its window",
    "budget": "its budget",
    "earlier": "another job's first run",
}


def _waits(job: Mapping[str, Any]) -> str:
    return f"waits for {_WAITS.get(job['waiting_for'], job['waiting_for'])}"


def _due(job: Mapping[str, Any]) -> str:
    if job["backoff_seconds"]:
        return f"in {time_text(job['backoff_seconds'])}"
    if job["next_due"] is None:
        return f"when {job['when']}" if job["when"] else "never"
    seconds = _ahead(job["next_due"])
    return "now" if seconds <= 0 else f"in {time_text(seconds)}"


def _holder(job: Mapping[str, Any]) -> str:
    lease = job["lease"]
    if lease["state"] == "free":
        return "nobody"
    return f"{lease['holder']['name']}, to {lease['expires'][11:19]} UTC"
