"""Turn the status document of a table into what the pages print about it: figures, jobs, leases and findings."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.bad_answers import bad_answers
from memwal_ops.core.figures import backlog_of
from memwal_ops.core.next_run import describe_next_run
from memwal_ops.core.table_history import storage_of_gc
from memwal_ops.pages.charts import bar_chart, shares_chart
from memwal_ops.pages.rendering import data_uri
from memwal_ops.supervisor.observe.findings import (
    OK,
    WORDS,
    due_text,
    holder_text,
    level_of_finding,
    waits_text,
)
from memwal_ops.supervisor.state.outcomes import answers_of
from memwal_ops.text import counted_as, time_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memwal_ops.core.figures import Figures
    from memwal_ops.supervisor.observe.findings import Finding


def view_of(
    table: Mapping[str, Any], findings: Sequence[Finding], samples: Sequence[tuple[float, float]] = ()
) -> dict[str, Any]:
    """Return the variable ``table`` of a page's template.

    Args:
        table: its status document, with ``error`` and ``blocked`` as those of ``memwal-ops status``.
        findings: what is wrong with it.
        samples: amounts of its backlog over time.
    """
    backlog = backlog_of(table)
    blocked = backlog.amount("blocked")
    return {
        **{name: table[name] for name in ("name", "uri", "version", "looked_at", "blocked")},
        "level": WORDS[max(map(level_of_finding, findings), default=OK)],
        "findings": sorted(findings, key=lambda one: -level_of_finding(one)),
        "waiting": backlog.amount("backlog"),
        "noun": backlog.noun_of("backlog"),
        "age": backlog.amount("age"),
        "blocked_parts": counted_as(int(blocked), backlog.noun_of("blocked")) if blocked else "",
        "figures": figures_of(backlog),
        "job_rows": [_job_row(name, job) for name, job in table["jobs"].items()],
        "most": max((number for _, number in samples), default=0.0),
        "since": f"in the last {time_text(samples[-1][0] - samples[0][0])}" if samples else "",
    }


def history_view(history: Mapping[str, Any] | None, gc: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables ``history``, ``merges_chart`` and ``storage`` of a table's page.

    Args:
        history: a document of :class:`memwal_ops.core.table_history.TableHistory`.
        gc: the document of a run or plan of ``gc``.
    """
    revisions = [] if history is None else [*history["revisions"]]
    merges = [one for one in reversed(revisions) if one["merged_rows"]]
    storage: list[Mapping[str, Any]] = [] if history is None else [*history["storage"]]
    storage += [asdict(one) for one in storage_of_gc(gc or {})]
    chart = bar_chart({"rows": [one["merged_rows"] for one in merges]}, [str(one["revision"]) for one in merges])
    return {
        "history": history,
        "merges_chart": data_uri(chart) if len(merges) > 1 else "",
        "storage": storage,
    }


def answers_view(table: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the variables ``answers`` and ``recall_chart`` of a table's page: how well its indexes answer.

    Args:
        table: its status document.
        runs: the runs that asked its indexes, the newest first.
    """
    bad = {one.index for one in bad_answers(table["answers"])}
    rows = [{**one, "bad": one["index"] in bad} for one in table["answers"]]
    series: dict[str, list[tuple[float, float]]] = {}
    for run in reversed(runs):
        for one in answers_of(run["report"], run["finished"]) or ():
            if one.get("recall") is not None and run["finished"] is not None:
                when = datetime.fromisoformat(run["finished"]).timestamp()
                series.setdefault(str(one["index"]), []).append((when, float(one["recall"])))
    drawn = max(map(len, series.values()), default=0) > 1
    return {"answers": rows, "recall_chart": data_uri(shares_chart(series)) if drawn else ""}


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
        "failing": bool(job["consecutive_failures"]),
        "due": due_text(job),
        "next_run": describe_next_run(job["next_run"]) if job.get("next_run") else "",
        "lease": "" if lease["state"] == "free" else f"{holder_text(job)}{suffix}",
    }
