"""Format the document of ``memwal-ops status`` as human-readable text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.cli.printing import page_path
from memwal_ops.core.figures import backlog_of, shared_noun
from memwal_ops.core.next_run import describe_next_run
from memwal_ops.supervisor.observe.findings import (
    WAITS,
    WORDS,
    age_text,
    backlog_job,
    due_text,
    level_of_finding,
    seconds_until,
)
from memwal_ops.supervisor.observe.status_document import budget_text
from memwal_ops.text import counted, counted_as, grid, paragraph, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.core.figures import Figures


def describe(document: Mapping[str, Any], *, in_full: bool) -> str:
    """Return the text: tables, jobs that run or did not succeed, leases that are held; then faults, the worst first.

    ``in_full``: show every job of every table.
    """
    tables = document["tables"]
    parts = [_head(document)]
    if document["service"] is not None and document["service"].get("fleet") is not None:
        parts.append(_fleet(document["service"]["fleet"]))
    if in_full:
        parts.append("\n".join(paragraph(_place(table)) for table in tables))
    logged = [table for table in tables if _has_log(table)]
    if logged:
        names = {name for name, job in map(backlog_job, logged) if job is not None} or {"merge"}
        job = names.pop() if len(names) == 1 else "job"
        last = (f"last {job}", f"{job} due")
        parts.append(grid((*_HEADINGS, *last), [_cells(table) for table in logged], words=("table", "state", *last)))
    if len(logged) < len(tables):
        parts.append(_without_log([table for table in tables if not _has_log(table)]))
    rows = [row for table in tables for row in _job_rows(table, in_full=in_full)]
    if rows:
        parts.append(grid(_JOB_HEADINGS, rows, words=_JOB_LEFT))
    if in_full and (lines := [line for table in tables for line in _next_runs(table, several=len(tables) > 1)]):
        parts.append("\n".join(lines))
    leases = [row for table in tables for row in _lease_rows(table)]
    if leases:
        parts.append(grid(_LEASE_HEADINGS, leases, words=_LEASE_HEADINGS))
    wrong: list[tuple[Mapping[str, Any] | None, Mapping[str, Any]]] = [*((None, one) for one in document["findings"])]
    wrong += [(table, one) for table in tables for one in table["findings"]]
    wrong.sort(key=lambda one: -level_of_finding(one[1]))
    parts += [_problem(table, one) for table, one in wrong]
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
            f"Due jobs run only while a service runs: see {page_path('runbooks/alerts/MemwalOpsDown.md')}",
        ]
    else:
        word = "stopping" if service["stopping"] else "runs" if service["ready"] else "is not ready yet"
        lines = [f"Service: {word} as {service['holder']}, since {service['started'][:19].replace('T', ' ')} UTC."]
        lines += _event_lines(service.get("events"), document["tables"])
        lines += budget_lines(service.get("budget"), document["tables"])
    if document["history_error"] is not None:
        lines.append(f"{document['history_error']} The times of runs are known from leases only.")
    return "\n".join(paragraph(line) for line in lines)


def budget_lines(budget: Mapping[str, Any] | None, tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is used of the budget of the fleet, and what it defers."""
    if budget is None:
        return []
    # A service of an earlier release has no own part.
    shown = [budget_text(budget)] if budget.get("own") and budget["limits"] else []
    if budget["shadow"]:
        return shown
    waiting = sum(job["waiting_for"] == "over_budget" for table in tables for job in table["jobs"].values())
    jobs = counted(waiting, "due job")
    if budget["used_up"] is None:
        return [*shown, f"What {jobs} would use does not fit the budget of the fleet now."] if waiting else shown
    until = "" if budget["frees"] is None else f" until {budget['frees'][:16].replace('T', ' ')} UTC"
    return [*shown, f"The budget of the fleet is used up ({budget['used_up']}){until}; it defers {jobs}."]


def _event_lines(events: Mapping[str, Any] | None, tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether events of the store announce commits; what is wrong with them is a problem below."""
    if events is None or events["state"] == "unreachable":
        return []
    last = events["last_event"]
    when = "none has come yet" if last is None else f"the last one came at {last[:19].replace('T', ' ')} UTC"
    return [f"Events announce the commits of {events['tables']:,} of {counted(len(tables), 'table')}; {when}."]


def _fleet(fleet: Mapping[str, Any]) -> str:
    """The members of the fleet, each with its share of the tables."""
    rows = [
        [
            f"{one['name']} (this one)" if one["name"] == fleet["name"] else one["name"],
            fleet["state"] if one["name"] == fleet["name"] else "living" if one["living"] else "dead",
            "?" if one["tables"] is None else f"{one['tables']:,} of {one['known_tables']:,}",
            f"{time_text(one['seconds_since_heartbeat'])} ago",
            one["holder"] or "?",
        ]
        for one in fleet["members"]
    ]
    return grid(_MEMBER_HEADINGS, rows, words=_MEMBER_HEADINGS)


def _cells(table: Mapping[str, Any]) -> list[str]:
    backlog, (_, job) = backlog_of(table), backlog_job(table)
    waiting = backlog.amount("backlog")
    if waiting is not None:
        known = [f"{int(waiting):,}", f"{int(backlog.values['rows']):,}" if "rows" in backlog.values else ""]
        known += [age_text(backlog), f"{int(backlog.amount('blocked') or 0):,}"]
    else:
        known = ["?" if table["error"] else ""] * 4
    ran = ["", ""] if job is None else [_last(job), _next(job)]
    return [table["name"], table["level"], *known, *ran]


def _has_log(table: Mapping[str, Any]) -> bool:
    """Whether something can wait to be merged; also of a table that cannot be read."""
    return bool(table["error"]) or not table["backlog"] or backlog_of(table).amount("backlog") is not None


def _without_log(tables: Sequence[Mapping[str, Any]]) -> str:
    """The metrics of tables without a log, as triggers name them, but for those that are 0 everywhere."""
    backlogs = [backlog_of(table) for table in tables]
    shown = dict.fromkeys(name for backlog in backlogs for name, value in backlog.values.items() if value)
    shown = {name: None for name in shown if not any(_is_detail(backlog, name) for backlog in backlogs)}
    rows = [
        [table["name"], table["level"], *(_figure(backlog, name) for name in shown)]
        for table, backlog in zip(tables, backlogs, strict=True)
    ]
    return grid(("table", "state", *shown), rows, words=("table", "state"))


def _is_detail(backlog: Figures, name: str) -> bool:
    spec = backlog.metrics.get(name)
    return spec is not None and spec.detail


def _figure(backlog: Figures, name: str) -> str:
    spec, value = backlog.metrics.get(name), backlog.values.get(name)
    if value is None:
        return ""
    return size_text(value) if spec is not None and spec.unit == "bytes" else f"{int(value):,}"


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


def _next_runs(table: Mapping[str, Any], *, several: bool) -> Iterator[str]:
    where = f" of {table['name']}" if several else ""
    for name, job in table["jobs"].items():
        if job.get("next_run"):
            yield paragraph(f"The next {name}{where}: {describe_next_run(job['next_run'])}.", hanging="  ")


def _lease_rows(table: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, job in table["jobs"].items():
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
    lines = [paragraph(head, hanging="  "), paragraph(f"What to do: {do}{':' if command else ''}", indent="  ")]
    if command:
        lines.append(f"    {command}")
    if finding["runbook"]:
        lines.append(f"  See {page_path(finding['runbook'])}{uri}")
    return "\n".join(lines)


def _closing(document: Mapping[str, Any]) -> str:
    summary = document["summary"]
    noun = shared_noun(document["tables"], "backlog")
    words = [f"{summary[word]} {word}" for word in WORDS.values() if summary[word]]
    behind = f"; {counted_as(summary['generations'], noun)} and {counted(summary['rows'], 'row')} wait"
    if document["tables"] and not any(map(_has_log, document["tables"])):
        behind = ""
    oldest = summary["oldest_table"]
    since = "" if oldest is None else f", the oldest for {time_text(summary['oldest_age'])} ({oldest})"
    known = ", as far as can be read" if summary["unreadable"] else ""
    return paragraph(f"{counted(summary['tables'], 'table')}: {', '.join(words) or 'none'}{behind}{since}{known}.")


def _last(job: Mapping[str, Any]) -> str:
    """Return when the job last processed its backlog: all of it, or all but what is blocked."""
    if job["last_outcome"] == "partial":
        return _since(job["last_finished"])
    return _since(job["last_success"])


def _since(when: str | None) -> str:
    return "never" if when is None else f"{time_text(-seconds_until(when))} ago"


def _next(job: Mapping[str, Any]) -> str:
    if job["waiting_for"] in WAITS:
        return f"waits: {job['waiting_for']}"
    return f"runs: {time_text(job['running_seconds'])}" if job["state"] == "running" else due_text(job)
