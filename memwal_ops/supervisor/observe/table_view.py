"""Turn the status document of a table into what the pages print about it: figures, jobs, leases and findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from memwal_ops.core.answers import bad_answers
from memwal_ops.core.cost import money_text
from memwal_ops.core.figures import Figures, backlog_of
from memwal_ops.core.job import Role, Unit
from memwal_ops.core.outlook import describe_next_run
from memwal_ops.core.table_history import storage_of_gc
from memwal_ops.pages.charts import lane, marks, value_ticks
from memwal_ops.pages.rendering import amount_text, compact_text
from memwal_ops.supervisor.observe import findings
from memwal_ops.supervisor.observe.status_document import applicable_jobs
from memwal_ops.supervisor.state.history import FAILURES
from memwal_ops.supervisor.state.outcomes import answers_of
from memwal_ops.text import counted_as, time_text

NOT_IN_A_FILE: Mapping[str, Any] = dict.fromkeys(
    ("runs", "charts", "later", "may_act", "acts", "commands", "ranges", "cost", "asked", "reading"), None
)
"""The variables of a table's page that only the service has."""


def view_of(table: Mapping[str, Any], reported: Sequence[findings.Finding]) -> dict[str, Any]:
    """Return the variable ``table`` of a page's template.

    ``table``: its status document, with ``error`` and ``blocked`` as those of ``memwal-ops status``.
    """
    backlog = backlog_of(table)
    jobs = applicable_jobs(table)
    return {
        **{name: table[name] for name in ("name", "uri", "version", "looked_at")},
        "blocked": table["blocked"][findings.MAX_BLOCKED :],
        "level": findings.WORDS[findings.worst(map(findings.level_of_finding, reported))],
        "verdict": "" if reported or table.get("paused") else _verdict(backlog, jobs),
        "paused": table.get("paused"),
        "state": table.get("state"),
        "findings": sorted(reported, key=lambda finding: -findings.severity(findings.level_of_finding(finding))),
        "noun": backlog.noun_of("backlog"),
        "facts": [*_facts(backlog)],
        "figures": figures_of(backlog),
        "job_rows": [_job_row(name, job) for name, job in jobs.items()],
        "foreign_jobs": sorted(table["jobs"].keys() - jobs.keys()),
    }


def _verdict(backlog: Figures, jobs: Mapping[str, Any]) -> str:
    waiting = int(backlog.amount("backlog") or 0)
    waits = f"{counted_as(waiting, backlog.noun_of('backlog'))} wait, within the limits" if waiting else "nothing waits"
    running = [name for name, job in jobs.items() if job["state"] == "running"]
    then = f" Next: {due} {findings.due_text(jobs[due])}." if (due := findings.next_job(jobs)) else ""
    then = f" Running: {', '.join(running)}." if running else then
    unread = "" if findings.is_verified(jobs) else " No verify has read its files yet."
    return f"Nothing to do: nothing is wrong, and {waits}.{then}{unread}"


def asked_view(table: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the variable ``asked`` of a table's page: the runs that users requested, those not ended first."""
    shown: dict[str, dict[str, Any]] = {}
    for name, job in applicable_jobs(table).items():
        if (asked := job.get("asked")) is None:
            continue
        doing = job.get("progress") or {}
        text = f"running for {time_text(job['running_seconds'])}{_progress(job, ', ')}"
        text = text if job["state"] == "running" else findings.waits_text(job)
        share = doing["done"] / doing["total"] if doing.get("total") else None
        shown[name] = {"job": name, **asked, "text": text, "busy": True, "run": None, "share": share}
    for run in runs:
        by, ended = (run["plan"] or {}).get("asked_by"), run["finished"]
        if not by or ended is None or run["job"] in shown or findings.seconds_until(ended) < -_ASKED_SECONDS:
            continue
        result = ", ".join(f"{one['name']} {amount_text(one['value'], one['unit'])}" for one in run_figures(run, table))
        why = run["error"]["message"] if run["error"] else (run["decision"] or "").replace("_", " ")
        only = (run["plan"].get("options") or {}).get("answers_only")
        why += "; only its indexes were asked" if only and not run["error"] else ""
        text = f"{run['outcome']}: {why}{f' ({result})' if result else ''}"
        about = {"job": run["job"], "by": by, "since": run["started"], "text": text}
        shown[run["job"]] = {**about, "busy": False, "run": run["id"], "share": None}
    return [*shown.values()]


def run_figures(run: Mapping[str, Any], table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of a run that are not 0."""
    return figures_of(Figures({name: at for name, at in (run["figures"] or {}).items() if at}, table["format"], "run"))


def _progress(job: Mapping[str, Any], before: str = "") -> str:
    doing = job.get("progress")
    if not doing:
        return ""
    unit, done, total = doing["unit"], doing["done"], doing["total"]
    amount = partial(amount_text, unit="bytes" if unit == "bytes" else "count")
    parts = [
        amount(done),
        *([f"of {amount(total)}"] if total is not None else []),
        *([unit] if unit != "bytes" else []),
    ]
    text = f"{doing['activity']} {' '.join(parts)}" if unit else str(doing["activity"])
    left = doing["seconds_left"]
    return f"{before}{text}{f', about {time_text(left)} left' if left is not None else ''}"


_ASKED_SECONDS = 3600.0
_OURS = "memwal-ops"
_MAX_RUNS = 200
# What runs reduce: its name in ``achieved``, the role that the backlog has it by, and the word for it.
_ACHIEVED: tuple[tuple[str, Role, str], ...] = (
    ("fragments", "parts", "fragments"), ("versions", "versions", "versions"),
    ("rows_indexed", "uncovered", "rows not indexed"),
)  # fmt: skip
_RUN_LEVELS = {**dict.fromkeys(FAILURES, "critical"), "partial": "warning"}
_FACTS: tuple[tuple[Role, str, Unit], ...] = (
    ("table_rows", "rows", "count"),
    ("table_bytes", "size", "bytes"),
    ("held", "held by old versions", "bytes"),
    ("parts", "fragments", "count"),
    ("versions", "versions", "count"),
    ("backlog", "waiting", "count"),
    ("age", "the oldest waits", "seconds"),
    ("indexes", "indexes", "count"),
    ("uncovered", "rows not indexed", "count"),
    ("lookup", "reads per look-up", "count"),
)
"""What a table's page says first, by role, and what its charts show."""


def _facts(backlog: Figures) -> Iterator[dict[str, str]]:
    for role, name, unit in _FACTS:
        value = backlog.amount(role)
        if value is not None:
            note = backlog.noun_of(role) if role == "backlog" else ""
            yield {"name": name, "text": amount_text(value, unit), "note": note}
    blocked = backlog.amount("blocked")
    if blocked:
        yield {"name": "blocked", "text": counted_as(int(blocked), backlog.noun_of("blocked")), "note": ""}


def charts_of(
    samples: Sequence[tuple[int, Mapping[str, float]]], start: float, end: float, now: Figures | None = None
) -> list[dict[str, Any]]:
    """Return the lanes of recorded figures; without those of which all is zero.

    ``samples``: a figure is as in the last one until the next: those that do not change are recorded rarely. ``now``:
    the figures as last read; None: they were not read.
    """
    lanes = []
    for role, name, unit in _FACTS:
        points = [(max(start, float(when)), figures[role]) for when, figures in samples if role in figures]
        current = None if now is None else now.amount(role)
        if current is not None:
            points.append((end, current))
        values = [value for _, value in points]
        if any(values):
            text, most = partial(amount_text, unit=unit), value_ticks(values, unit)[-1]
            short = compact_text(most) if unit == "count" else ""
            lanes.append(lane(name, points, text, start, end, most=most, top_text=short))
    return lanes


def cost_chart(
    spent: Iterable[tuple[float, float]], currency: str, start: float, end: float, span: timedelta, span_text: str
) -> list[dict[str, Any]]:
    """Return the lane of what runs cost over time; none if they cost nothing.

    ``spent``: when runs ended, in seconds since 1970, and what each cost. ``span``: the lane has the sum of each such
    time, which is ``span_text`` in words.
    """
    seconds = span.total_seconds()
    sums = [0.0] * math.ceil((end - start) / seconds)
    for when, money in spent:
        if start <= when < end:
            sums[int((when - start) // seconds)] += money
    text = partial(money_text, currency=currency)
    points = [(start + seconds * at, money) for at, money in enumerate(sums)]
    summary = f"{text(sum(sums))} in all, at most {text(max(sums))}"
    return [lane(f"cost per {span_text}", points, text, start, end, summary=summary)] if any(sums) else []


def recall_chart(runs: Sequence[Mapping[str, Any]], start: float, end: float) -> list[dict[str, Any]]:
    """Return the lanes of the recall of vector indexes over time; none if less than two runs asked them.

    ``runs``: the runs that asked the indexes of the table, the newest first.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    for run in reversed(runs):
        if run["finished"] is None or not start <= (when := datetime.fromisoformat(run["finished"]).timestamp()) <= end:
            continue
        for answer in answers_of(run["report"], run["finished"]) or ():
            if answer.get("recall") is not None:
                series.setdefault(str(answer["index"]), []).append((when, float(answer["recall"])))
    title = "recall of vector indexes"
    return [
        lane(title if len(series) == 1 else f"{title}: {name}", points, "{:.2f}".format, start, end, most=1.0)
        for name, points in series.items()
        if len(points) > 1
    ]


def budget_chart(
    samples: Sequence[tuple[int, Mapping[str, float]]], budget: Mapping[str, Any], start: float, end: float
) -> list[dict[str, Any]]:
    """Return a lane for each limit of the budget with the part of it that was used; none without samples."""
    series = {
        name: [(float(when), found[name]) for when, found in samples if name in found] for name in budget["limits"]
    }
    return [
        lane(
            *("budget used", points, "{:.0%}".format, start, end),
            most=max(1.0, *(share for _, share in points)), summary=f"now {name} {points[-1][1]:.0%}",
        )
        for name, points in series.items()
        if points
    ]  # fmt: skip


def runs_chart(
    runs: Iterable[Mapping[str, Any]], table_format: str | None, start: float, end: float
) -> list[dict[str, Any]]:
    """Return the lane of what runs achieved, and of those that failed; none without such a run.

    ``runs``: of the ledger of the table, the oldest first.
    """
    events = [
        (run["finished"], _RUN_LEVELS.get(run["outcome"], "ok"), f"{run['job']}: {text}")
        for run in runs
        if run["finished"] >= start and (text := achieved_text(run, table_format))
    ][-_MAX_RUNS:]
    return [marks("runs", events, start, end, f"the last: {events[-1][2]}")] if events else []


def achieved_text(run: Mapping[str, Any], table_format: str | None) -> str:
    """Return what a run of the ledger achieved: ``fragments 1,181 -> 38``; that it failed; empty: nothing."""
    if run["outcome"] in FAILURES:
        return str(run["outcome"])
    if run["outcome"] == "partial" and not run["achieved"]:
        return "left a part undone"
    achieved, before = run["achieved"] or {}, Figures((run["plan"] or {}).get("backlog") or {}, table_format)
    parts = []
    for name, role, words in _ACHIEVED:
        gone, had = achieved.get(name), before.amount(role)
        if gone and had is not None and had >= gone:
            parts.append(f"{words} {had:,.0f} -> {had - gone:,.0f}")
        elif gone:
            parts.append(f"{abs(gone):,.0f} {words} {'fewer' if gone > 0 else 'more'}")
    if achieved.get("rows_merged"):
        parts.append(f"{achieved['rows_merged']:,.0f} rows merged")
    if achieved.get("bytes_freed"):
        parts.append(f"freed {amount_text(achieved['bytes_freed'], 'bytes')}")
    if "recall_before" in achieved:
        parts.append(f"recall {achieved['recall_before']:.2f} -> {achieved['recall_after']:.2f}")
    return ", ".join(parts)


def writes_chart(history: Mapping[str, Any] | None, start: float, end: float) -> list[dict[str, Any]]:
    """Return the lane of versions that no job of ours committed, and of what was flushed; none without one."""
    known = {"revisions": (), "log": ()} if history is None else history
    texts = [
        (one["committed"], f"version {one['revision']}, {one['operation'] or 'commit'} by {one['by']}")
        for one in known["revisions"]
        if not str(one["by"]).startswith(_OURS)
    ]
    texts += [
        (one["flushed"], f"{one['name']} flushed" + ("" if one["rows"] is None else f", {one['rows']:,} rows"))
        for one in known["log"]
    ]
    events = sorted(
        (at, "running", text)
        for when, text in texts
        if when is not None and start <= (at := datetime.fromisoformat(when).timestamp()) <= end
    )
    return [marks("writes", events, start, end, f"the last: {events[-1][2]}")] if events else []


def attributed(history: Mapping[str, Any] | None, runs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return a history in which versions that runs published are those of their jobs: pylance commits some for us."""
    if history is None:
        return None
    jobs = {version: f"{_OURS} {run['job']}" for run in runs for version in run["versions"] or ()}
    made = [
        one if str(one["by"]).startswith(_OURS) else {**one, "by": jobs.get(one["revision"], one["by"])}
        for one in history["revisions"]
    ]
    return {**history, "revisions": made}


def cost_view(ledger: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the variable ``cost`` of a table's page; None if no run ended in the time.

    ``ledger``: of the table, by jobs, see :func:`memwal_ops.supervisor.observe.spending.ledger_document`.
    """

    def sums(one: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{name: one[name] for name in ("runs", "failed", "bytes_read", "bytes_written", "cpu_seconds")},
            "money": money_text(one["money"], ledger["currency"]),
            "requests": sum(one["requests"].values()),
        }

    total = ledger["total"]
    if not total["runs"]:
        return None
    saves = money_text(total["saves_monthly"], ledger["currency"]) if total["saves_monthly"] else ""
    jobs = [{"job": group["job"], **sums(group)} for group in ledger["groups"]]
    return {**sums(total), "costs": total["money"] > 0, "unmeasured": total["unmeasured"], "saves": saves, "jobs": jobs}


def history_view(history: Mapping[str, Any] | None, gc: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables ``history``, ``storage`` and its note of a table's page.

    ``history``: a document of :class:`memwal_ops.core.table_history.TableHistory`. ``gc``: the document of a run or
    plan of ``gc``.
    """
    storage: list[Mapping[str, Any]] = [] if history is None else [*history["storage"]]
    storage += [asdict(record) for record in storage_of_gc(gc or {})]
    note = "" if gc else "These are data files alone: no gc has listed the log and what else there is."
    return {"history": history, "storage": storage, "storage_note": note}


def answers_view(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the variable ``answers`` of the page of a table, by its status document: how well its indexes answer."""
    bad = {bad_answer.index for bad_answer in bad_answers(table["answers"])}
    return [{**answer, "bad": answer["index"] in bad} for answer in table["answers"]]


def figures_of(figures: Figures) -> list[dict[str, Any]]:
    """Return figures with their names in words, their units and their help."""
    known = {name: {"unit": spec.unit, "help": spec.help} for name, spec in figures.metrics.items()}
    plain = {"unit": "count", "help": ""}
    return [
        {"name": name.replace("_", " "), "value": value, **known.get(name, plain)}
        for name, value in figures.values.items()
    ]


def _job_row(name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    lease = job["lease"]
    suffix = " (this service)" if lease["state"] == "held" else ""
    return {
        "name": name, "state": job["state"], "progress": _progress(job), "acts": [],
        "due": "now" if job["waiting_for"] and not job["backoff_seconds"] else findings.due_text(job),
        "running": f"running for {time_text(job['running_seconds'])}" if job["state"] == "running" else "",
        "waits": f"due, {findings.waits_text(job)}" if job["waiting_for"] else "", "outcome": job["last_outcome"] or "",
        "last": job["last_finished"], "success": job["last_success"], "failures": job["consecutive_failures"],
        "bad": bool(job["consecutive_failures"]), "paused": job.get("paused"),
        "next_run": describe_next_run(job["next_run"]) if job.get("next_run") else "",
        "lease": "" if lease["state"] == "free" else f"{findings.holder_text(job)}{suffix}",
    }  # fmt: skip
