"""Turn the status document of a table into what the pages print about it: figures, jobs, leases and findings."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from memwal_ops.core.answers import bad_answers
from memwal_ops.core.cost import money_text
from memwal_ops.core.figures import backlog_of
from memwal_ops.core.outlook import describe_next_run
from memwal_ops.core.table_history import storage_of_gc
from memwal_ops.pages.charts import CHART_WIDTH, bar_chart, time_chart
from memwal_ops.pages.rendering import amount_text, data_uri
from memwal_ops.supervisor.observe.findings import (
    MAX_BLOCKED,
    WORDS,
    due_text,
    holder_text,
    level_of_finding,
    severity,
    waits_text,
    worst,
)
from memwal_ops.supervisor.observe.status_document import applicable_jobs
from memwal_ops.supervisor.state.outcomes import answers_of
from memwal_ops.text import counted_as, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from memwal_ops.core.figures import Figures
    from memwal_ops.core.job import Role, Unit
    from memwal_ops.supervisor.observe.findings import Finding


NOT_IN_A_FILE: Mapping[str, Any] = dict.fromkeys(
    ("runs", "charts", "later", "may_act", "acts", "commands", "ranges", "cost"), None
)
"""The variables of a table's page that only the service has."""


def view_of(table: Mapping[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the variable ``table`` of a page's template.

    Args:
        table: its status document, with ``error`` and ``blocked`` as those of ``memwal-ops status``.
        findings: what is wrong with it.
    """
    backlog = backlog_of(table)
    jobs = applicable_jobs(table)
    return {
        **{name: table[name] for name in ("name", "uri", "version", "looked_at")},
        "blocked": table["blocked"][MAX_BLOCKED:],
        "level": WORDS[worst(map(level_of_finding, findings))],
        "paused": table.get("paused"),
        "findings": sorted(findings, key=lambda finding: -severity(level_of_finding(finding))),
        "noun": backlog.noun_of("backlog"),
        "facts": [*_facts(backlog)],
        "figures": figures_of(backlog),
        "job_rows": [_job_row(name, job) for name, job in jobs.items()],
        "foreign_jobs": sorted(table["jobs"].keys() - jobs.keys()),
    }


_MAX_POINTS = 120
_PLOT = re.compile(rb'translate\(([\d.]+), [\d.]+\)" class="plot"><rect x="0" y="0" width="([\d.]+)"')
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
    """Return the charts of recorded figures, all with the same scale of time; without those of which all is zero.

    Args:
        samples: a figure is as in the last one until the next: those that do not change are recorded rarely.
        start: the left end of the scale, in seconds since 1970.
        end: the right end, which is now.
        now: the figures as last read; None: they were not read.
    """
    charts = []
    for role, name, unit in _FACTS:
        points = [(max(start, float(when)), figures[role]) for when, figures in samples if role in figures]
        current = None if now is None else now.amount(role)
        if current is not None:
            points.append((end, current))
        if any(value for _, value in points):
            steps = steps_of(points)
            image = time_chart({"": steps}, unit=unit, start=start, end=end)
            chart = _chart(name, image, [amount_text(number, unit) for number in _range_of(points)])
            charts.append({**chart, **hover_of(image, points, start, end, partial(amount_text, unit=unit))})
    return charts


def steps_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the line of amounts that hold until the next one."""
    steps = [*points[:1]]
    for (_, before), (when, value) in pairwise(points):
        steps += [(when, before), (when, value)] if value != before else [(when, value)]
    return steps


def hover_of(
    image: bytes, points: Sequence[tuple[float, float]], start: float, end: float, text: Callable[[float], str]
) -> dict[str, str]:
    """Return what console.js shows of a chart on hover and focus: its amounts, and where the image has its plot."""
    plot = _PLOT.search(image)
    if plot is None:
        return {}
    left, width = (float(bound) / CHART_WIDTH for bound in plot.groups())
    shown = [[round(when), text(value)] for when, value in points[:: 1 + len(points) // _MAX_POINTS]]
    return {"points": json.dumps(shown), "plot": json.dumps([left, width, start, end])}


def cost_chart(
    spent: Sequence[tuple[float, float]], currency: str, start: float, end: float, span: timedelta, span_text: str
) -> list[dict[str, str]]:
    """Return the chart of what runs cost over time; none if they cost nothing.

    Args:
        spent: when runs ended, in seconds since 1970, and what each cost.
        currency: of the costs.
        start: the left end of the scale.
        end: the right end.
        span: the chart has the sum of each such time, which is ``span_text`` in words.
    """
    seconds = span.total_seconds()
    sums = [0.0] * math.ceil((end - start) / seconds)
    for when, money in spent:
        if start <= when < end:
            sums[int((when - start) // seconds)] += money
    if not any(sums):
        return []

    def text(amount: float) -> str:
        return money_text(amount, currency)

    points = [(min(end, start + seconds * (at + 0.5)), money) for at, money in enumerate(sums)]
    image = time_chart({"": points}, unit=text, start=start, end=end)
    whole, most = text(sum(sums)), text(max(sums))
    summary = f"{whole} in all, at most {most}"
    return [{"title": f"cost per {span_text}", "summary": summary, "image": data_uri(image)}]


def recall_chart(runs: Sequence[Mapping[str, Any]], start: float, end: float) -> list[dict[str, str]]:
    """Return the chart of the recall of vector indexes over time; none if less than two runs asked them.

    Args:
        runs: the runs that asked the indexes of the table, the newest first.
        start: the left end of the scale, in seconds since 1970.
        end: the right end.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    for run in reversed(runs):
        if run["finished"] is None or not start <= (when := datetime.fromisoformat(run["finished"]).timestamp()) <= end:
            continue
        for answer in answers_of(run["report"], run["finished"]) or ():
            if answer.get("recall") is not None:
                series.setdefault(str(answer["index"]), []).append((when, float(answer["recall"])))
    if max(map(len, series.values()), default=0) <= 1:
        return []
    image = time_chart(series, unit="share", start=start, end=end)
    points = sorted(point for points in series.values() for point in points)
    return [_chart("recall of vector indexes", image, [f"{number:.2f}" for number in _range_of(points)])]


def _range_of(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The least and the largest amount, and the last one."""
    values = [value for _, value in points]
    return min(values), max(values), values[-1]


def budget_chart(
    samples: Sequence[tuple[int, Mapping[str, float]]], budget: Mapping[str, Any], start: float, end: float
) -> list[dict[str, str]]:
    """Return the chart of the part of each limit that was used over time, beside the limit; none without samples.

    Args:
        samples: what was recorded of the budget, by name of a limit.
        budget: of the service's status.
        start: the left end of the scale, in seconds since 1970.
        end: the right end.
    """
    samples = samples[:: 1 + len(samples) // _MAX_POINTS]
    series = {
        name: [(float(when), found[name]) for when, found in samples if name in found] for name in budget["limits"]
    }
    if not any(series.values()):
        return []
    now = ", ".join(f"{name} {points[-1][1]:.0%}" for name, points in series.items() if points)
    drawn = {"limit": [(start, 1.0), (end, 1.0)], **series}
    image = time_chart(drawn, unit="{:.0%}".format, start=start, end=end)
    return [{"title": "budget used", "summary": f"now {now}", "image": data_uri(image)}]


def _chart(title: str, image: bytes, texts: Sequence[str]) -> dict[str, str]:
    least, most, last = texts
    summary = f"now {last}" if least == most else f"{least} to {most}, now {last}"
    return {"title": title, "summary": summary, "image": data_uri(image)}


def cost_view(ledger: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the variable ``cost`` of a table's page; None if no run ended in the time.

    Args:
        ledger: of the table, by jobs, see :func:`memwal_ops.supervisor.observe.spending.ledger_document`.
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
    return {**sums(total), "unmeasured": total["unmeasured"], "saves": saves, "jobs": jobs}


def history_view(history: Mapping[str, Any] | None, gc: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables ``history``, ``merges_chart`` and ``storage`` of a table's page.

    Args:
        history: a document of :class:`memwal_ops.core.table_history.TableHistory`.
        gc: the document of a run or plan of ``gc``.
    """
    revisions = [] if history is None else [*history["revisions"]]
    merges = [revision for revision in reversed(revisions) if revision["merged_rows"]]
    storage: list[Mapping[str, Any]] = [] if history is None else [*history["storage"]]
    storage += [asdict(record) for record in storage_of_gc(gc or {})]
    chart = bar_chart(
        {"rows": [merge["merged_rows"] for merge in merges]}, [str(merge["revision"]) for merge in merges]
    )
    return {
        "history": history,
        "merges_chart": data_uri(chart) if len(merges) > 1 else "",
        "storage": storage,
    }


def answers_view(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the variable ``answers`` of the page of a table, by its status document: how well its indexes answer."""
    bad = {bad_answer.index for bad_answer in bad_answers(table["answers"])}
    return [{**answer, "bad": answer["index"] in bad} for answer in table["answers"]]


def figures_of(figures: Figures) -> list[dict[str, Any]]:
    """Return figures with their names in words, their units and their help."""
    declared = figures.metrics
    return [
        {
            "name": name.replace("_", " "),
            "value": value,
            "unit": declared[name].unit if name in declared else "count",
            "help": declared[name].help if name in declared else "",
        }
        for name, value in figures.values.items()
    ]


def _job_row(name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    lease = job["lease"]
    suffix = " (this service)" if lease["state"] == "held" else ""
    return {
        "name": name,
        "state": job["state"],
        "running": f"running for {time_text(job['running_seconds'])}" if job["state"] == "running" else "",
        "waits": f"due, {waits_text(job)}" if job["waiting_for"] else "",
        "outcome": job["last_outcome"] or "",
        "last": job["last_finished"],
        "success": job["last_success"],
        "failures": job["consecutive_failures"],
        "bad": bool(job["consecutive_failures"]),
        "paused": job.get("paused"),
        "acts": [],
        "due": due_text(job),
        "next_run": describe_next_run(job["next_run"]) if job.get("next_run") else "",
        "lease": "" if lease["state"] == "free" else f"{holder_text(job)}{suffix}",
    }
