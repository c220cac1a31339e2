"""Serve the pages of all tables, of one table, of a run, and the runbooks: no page reads a table or a store.

What a page needs of the run history is read from its file once after each run. Its buttons are what its viewer may do,
where it does something: a run, a retry and a pause are safe at any time.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import memwal_ops
from memwal_ops.core.answers import ASKED_BY
from memwal_ops.core.cost import money_text
from memwal_ops.core.figures import Figures, backlog_of
from memwal_ops.core.options import describe
from memwal_ops.core.registry import all_job_specs, formats
from memwal_ops.core.table_history import HasRecentHistory
from memwal_ops.errors import runbook
from memwal_ops.pages import rendering
from memwal_ops.pages.charts import story
from memwal_ops.pages.documents import document
from memwal_ops.supervisor.http.access import ANONYMOUS, Viewer
from memwal_ops.supervisor.observe import overview, status_document, table_view
from memwal_ops.supervisor.observe.findings import (
    DEFAULT_LIMITS,
    UNREADABLE,
    WORDS,
    Finding,
    findings_of,
    no_tables,
    poll_error,
    service_findings,
)
from memwal_ops.supervisor.observe.spending import Spending
from memwal_ops.supervisor.observe.status import RunReports
from memwal_ops.supervisor.scheduling.discovery import Fault
from memwal_ops.supervisor.state.samples import BUDGET
from memwal_ops.supervisor.workers.protocol import NOT_APPLICABLE

_MAX_JOBS = 3


def add_buttons(view: dict[str, Any], table: Mapping[str, Any]) -> None:
    """Add the buttons to the view of a table: those of its findings, and of its jobs."""
    jobs = status_document.applicable_jobs(table)
    for finding in view["findings"]:
        named = [name for name in finding["jobs"] if name in jobs and jobs[name]["state"] != "running"]
        finding["buttons"] = [_start(table["name"], name, jobs[name]) for name in named[:_MAX_JOBS]]
    for row in view["job_rows"]:
        job = jobs[row["name"]]
        running = job["state"] == "running"
        if running:
            row["acts"] = [_button(table["name"], row["name"], "cancel", "Cancel")]
        else:
            start = _start(table["name"], row["name"], job, short=True)
            row["acts"] = [start, _button(table["name"], row["name"], "plan", "Plan")]


def table_buttons(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the buttons of the table itself; ``asks``: for how long, and why."""
    base = f"/api/v1/tables/{_segment(table['name'])}"
    hold = {"path": f"{base}/holds", "label": "Hold a version", "asks": "hold"}
    if table.get("paused"):
        return [{"path": f"{base}/resume", "label": "Resume its jobs", "asks": ""}, hold]
    return [{"path": f"{base}/pause", "label": "Pause its jobs", "asks": "pause"}, hold]


def commands_of(table: Mapping[str, Any], file: str) -> Iterator[str]:
    """Yield the commands that do the same as the buttons, for a viewer without them; ``file``: the configuration."""
    given = f"--config {shlex.quote(file)} --table {shlex.quote(table['name'])}"
    for name, job in status_document.applicable_jobs(table).items():
        action = "cancel" if job["state"] == "running" else "retry" if _waits(job) else "run"
        yield f"memwal-ops service {action} {given} --job {name}"
    yield f"memwal-ops service {'resume' if table.get('paused') else 'pause'} {given}"


def _start(table: str, name: str, job: Mapping[str, Any], *, short: bool = False) -> dict[str, Any]:
    if _waits(job):
        return _button(table, name, "retry", "Retry now" if short else f"Retry {name} now")
    return _button(table, name, "run", "Run now" if short else f"Run {name} now")


def _waits(job: Mapping[str, Any]) -> bool:
    return bool(job["backoff_seconds"] or job.get("breaker"))


def _button(table: str, job: str, action: str, label: str) -> dict[str, Any]:
    return {
        "path": f"/api/v1/tables/{_segment(table)}/jobs/{_segment(job)}/{action}",
        "label": label,
        "name": f"{label}: {job}",
    }


def _segment(name: str) -> str:
    return quote(name, safe="", errors="surrogateescape")


_LEVELS = {"succeeded": "ok", "running": "running", "partial": "warning", "stopped": "warning"}


def run_view(run: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page prints about a run on a table, by its status document."""
    shown = ("id", "started", "job", "why", "outcome", "decision", "seconds", "error")
    return {
        **{name: run[name] for name in shown},
        "versions": run["versions"] or [],
        "figures": table_view.run_figures(run, table),
    }


def run_page(run: Mapping[str, Any], table_format: str | None) -> dict[str, Any]:
    """Return the variables of the page of one run."""
    plan, phases = run["plan"] or {}, run["phases"] or {}
    whole = max(run["seconds"] or 0.0, sum(phases.values())) or 1.0
    known = {name: value for name, value in (run["figures"] or {}).items() if name != "conflicts"}
    lines = run.get("log")
    return {
        "run": run,
        "level": _LEVELS.get(run["outcome"], "critical"),
        "page": runbook(run["exit_code"] or 0, run["error"]["reason"]) if run["error"] else None,
        "phases": [(name.replace("_", " "), seconds, seconds / whole) for name, seconds in phases.items()],
        "figures": table_view.figures_of(Figures(known, table_format, "run")),
        "backlog": table_view.figures_of(Figures(plan.get("backlog") or {}, table_format)),
        "command": command_of(run),
        "log": "\n".join(map(str, lines)) if isinstance(lines, list) else lines or "",
        "report": json.dumps(run["report"], indent=2, default=str) if run["report"] else "",
    }


def command_of(run: Mapping[str, Any]) -> str:
    """Return the command that does by hand what a run did."""
    plan, job = run["plan"] or {}, run["job"]
    spec = next(iter(all_job_specs().get(job, {}).values()), None)
    options = {} if spec is None else {option.name: option for option in describe(spec.options)}
    parts = ["memwal-ops", (spec and spec.command) or job, run["uri"]]
    for name, value in (plan.get("options") or {}).items():
        flag = options[name].flags if name in options else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parts += [flag] if value else []
        elif value is not None:
            parts += [part for item in (value if isinstance(value, list) else [value]) for part in (flag, str(item))]
    if spec is not None and spec.deletes and plan.get("apply"):
        parts.append("--apply")
    return shlex.join(parts)


_MAX_RUNS = 20
_MAX_ASKED = 200
_MAX_GROUPS = 500
_LARGEST_ID = 2**63 - 1
_TABLES, _RUNS, _RUNBOOKS, _SCRIPT = "/tables/", "/runs/", "/runbooks/", "/assets/console.js"
_HTML = "text/html; charset=utf-8"
RANGES = {
    "1h": (timedelta(hours=1), timedelta(minutes=5), "5 minutes"),
    "24h": (timedelta(days=1), timedelta(hours=1), "hour"),
    "7d": (timedelta(days=7), timedelta(hours=6), "6 hours"),
    "30d": (timedelta(days=30), timedelta(days=1), "day"),
    "90d": (timedelta(days=90), timedelta(days=3), "3 days"),
}
"""What time charts show, and of what time, in words, each cost is the sum."""
_RANGE = "24h"
_FRESH_SECONDS = 2.0
_MIN_SCALE = 600.0


@dataclass(frozen=True, slots=True)
class Page:
    """The response to a request. Its type, body, the Content-Security-Policy that it needs, and its status code.

    ``is_current``: whether it still shows what holds, so that it need not be rendered again.
    """

    kind: str
    body: bytes
    policy: str = "default-src 'none'"
    status: int = 200
    is_current: Callable[[], bool] = lambda: False


class Pages:
    """The pages of a service.

    Args:
        service: returns ``service`` of the document of ``/api/v1/status``.
        runs: returns the newest runs, by table, job, failed and limit.
        run: returns a run by its number; None if there is none.
        samples: returns the recorded figures of a table over time, by its name and since when.
        history: returns the recent history of a table as last read, and requests a new one; None if it is not known.
        format_of: returns the name of the format of a table, by its URI; None if it is not known yet.
        file: the path of the configuration file, for commands to type.
        elsewhere: returns the member of the fleet that maintains a table, by its name; empty: no other one does.
    """

    def __init__(
        self,
        *,
        service: Callable[[], status_document.ServiceStatus],
        tables: overview.Tables,
        runs: Callable[..., list[dict[str, Any]]],
        run: Callable[[int], Mapping[str, Any] | None],
        samples: Callable[[str, datetime], Sequence[tuple[int, Mapping[str, float]]]],
        spending: Spending,
        history: Callable[[str], Mapping[str, Any] | None],
        faults: Callable[[], Sequence[Fault]],
        format_of: Callable[[str], str | None],
        file: str,
        elsewhere: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._service, self._tables, self._run, self._history = service, tables, run, history
        self._samples, self._faults, self._format_of = samples, faults, format_of
        self._spending = spending
        self._runs = _CachedRuns(runs)
        self._file, self._elsewhere = file, elsewhere
        self.overview = overview.Overview(tables, self.findings)

    def page_at(self, path: str, query: str = "", viewer: Viewer = ANONYMOUS) -> Page | None:
        """Return the page of a path and a query string, for someone who looks at it; None if there is none."""
        if path == "/":
            return self.tables(query, viewer)
        if path.startswith(_RUNBOOKS):
            return _runbook(path[1:], viewer)
        if path == _SCRIPT:
            return Page("text/javascript; charset=utf-8", rendering.script())
        if path.startswith(_RUNS):
            return self.run(path.removeprefix(_RUNS), viewer)
        if path.startswith(_TABLES) and path != _TABLES:
            return self.table(unquote(path.removeprefix(_TABLES), errors="surrogateescape"), query, viewer)
        return None

    def sign_in(self, error: str = "") -> Page:
        """Return the page that asks for a token; ``error``: why the last one was refused."""
        return _html("sign_in", _Shell("", "/", ANONYMOUS), error=error)

    def refused(self, status: int, why: str, back: str) -> Page:
        """Return the page that answers a form which was refused; ``back``: a path of this service."""
        return _html("refused", _Shell("", back, ANONYMOUS), status, status=status, why=why, back=back)

    def acted(self, document: Mapping[str, Any], back: str, viewer: Viewer) -> Page | None:
        """Return the page that shows a plan, a hold, or which of several tables refused; None: there is none."""
        if not ({"report", "hold"} & document.keys() or document.get("refused")):
            return None
        table = next(iter(self._tables.status([document["table"]])), None) if "report" in document else None
        run = None if table is None else _start(table["name"], document["job"], table["jobs"][document["job"]])
        report = json.dumps(document.get("report"), indent=2, default=str)
        return _html("acted", _Shell("", back, viewer), done=document, run=run, report=report)

    def tables(self, query: str = "", viewer: Viewer = ANONYMOUS) -> Page:
        """Return the page of all tables."""
        wanted, every = overview.FleetQuery.read(query), self.overview.rows()
        matching = [row for row in every if wanted.matches(row)]
        rows, pages = overview.page_of(matching, wanted)
        service, faults = self._service(), self._faults()
        findings = [*service_findings(service, faults, self._file)]
        if not every and not faults and not service.get("discovery_pending"):
            findings.append(no_tables())
        groups = overview.groups_of(matching, wanted) if wanted.group else []
        shown = self.overview.renewed(rows)
        page = _html(
            "overview",
            _Shell("tables", wanted.link(page=wanted.page), viewer),
            service=service,
            budget=" ".join(status_document.budget_notes(service["budget"])),
            charts=self._budget_chart(service["budget"]),
            service_state="Stopping" if service["stopping"] else "Runs" if service["ready"] else "Not ready yet",
            service_findings=findings,
            query=wanted,
            all=overview.totals(every),
            shown=overview.totals(matching),
            rows=shown,
            page=min(wanted.page, pages),
            pages=pages,
            groups=groups[:_MAX_GROUPS],
            more_groups=max(0, len(groups) - _MAX_GROUPS),
            groups_by=overview.group_names(every),
            formats=sorted({row.format or "unknown" for row in every}),
            has=overview.columns_of(every),
            look=overview.first_look(every),
            week=self._spending.total(),
            may_act=viewer.may_act,
            money=lambda amount: "" if amount is None else money_text(amount, self._spending.currency),
            words=WORDS,
        )
        return replace(page, is_current=self._current([row.name for row in shown], len(every)))

    def _current(self, names: Sequence[str], tables: int | None = None) -> Callable[[], bool]:
        """Whether a page of these tables, and with sums of so many in all, still shows what holds, for two seconds."""
        made, stamps = time.monotonic(), self._tables.stamps(names)

        def is_current() -> bool:
            if time.monotonic() - made > _FRESH_SECONDS or self._tables.stamps(names) != stamps:
                return False
            return tables is None or tables == self.overview.count

        return is_current

    def table(self, name: str, query: str = "", viewer: Viewer = ANONYMOUS) -> Page:
        """Return the page of a table; one with the status 404 if there is no such table."""
        table = next(iter(self._tables.status([name])), None)
        here = f"{_TABLES}{quote(name, safe='', errors='surrogateescape')}"
        shell = _Shell("", f"{here}?{query}" if query else here, viewer)
        if table is None:
            why = "It is not in the configuration, or no pattern matches it any more."
            if member := self._elsewhere(name):
                why = f"The member {member} of the fleet maintains it, and shows it."
            return _html("missing", shell, 404, kind="table", name=name, why=why, back="/", back_text="All tables")
        runs = self._runs.get(_stamp(table), table=name, limit=_MAX_RUNS)
        collected = next(iter(self._runs.get(_stamp(table), table=name, job="gc", limit=1)), None)
        history = table_view.attributed(
            self._history(name), self._runs.get(_stamp(table), table=name, limit=_MAX_ASKED)
        )
        note = "" if history else _why_no_history(table)
        later = self._tables.deletable_later().get(name) or {}
        view = table_view.view_of(self._document(table), self.findings(table))
        if viewer.may_act:
            add_buttons(view, table)
        page = _html(
            "table",
            shell,
            **table_view.history_view(history, None if collected is None else collected["report"]),
            **self._charts(table, history, query, here),
            answers=table_view.answers_view(table),
            history_note=note,
            reading=note == _READING,
            table=view,
            leases=None,
            later=later if later.get("by") else None,
            runs=[run_view(run, table) for run in runs if run["decision"] != NOT_APPLICABLE],
            asked=table_view.asked_view(table, runs),
            may_act=viewer.may_act,
            acts=table_buttons(table) if viewer.may_act else [],
            commands=[*commands_of(table, self._file)],
        )
        return replace(page, is_current=self._current([name]))

    def run(self, number: str, viewer: Viewer = ANONYMOUS) -> Page:
        """Return the page of a run; one with the status 404 if there is no such run."""
        digits = number.isascii() and number.isdigit() and len(number) < len(str(_LARGEST_ID))
        record = self._run(int(number)) if digits else None
        if record is None:
            why = "It was pruned from the history (history.keep, history.max_runs), or never was."
            shell = _Shell("", "/", viewer)
            return _html("missing", shell, 404, kind="run", name=number, why=why, back="/", back_text="All tables")
        table_format = self._format_of(record["uri"])
        return _html("run", _Shell("", f"{_RUNS}{number}", viewer), **run_page(record, table_format))

    def _charts(
        self, table: Mapping[str, Any], history: Mapping[str, Any] | None, query: str, here: str
    ) -> dict[str, Any]:
        given = parse_qs(query).get("range", [""])[-1] if len(query) < _MAX_RUNS * 100 else ""
        wanted = given if given in RANGES else _RANGE
        (span, each, each_text), now, name = RANGES[wanted], datetime.now(UTC), table["name"]
        since = now - span
        samples = self._samples(name, since)
        ledger, ran = self._spending.of(name, span)
        # A young table has no empty left half, nor one vertical line.
        known = [*(float(when) for when, _ in samples[:1]), *(run["finished"] for run in ran[:1])]
        first = max(since.timestamp(), min(known, default=0.0))
        scale = min(first, now.timestamp() - _MIN_SCALE), now.timestamp()
        asked = self._runs.get(_stamp(table), table=name, job=ASKED_BY, limit=_MAX_ASKED)
        lanes = [*table_view.writes_chart(history, *scale), *table_view.runs_chart(ran, table["format"], *scale)]
        lanes += table_view.charts_of(samples, *scale, backlog_of(table) if table["looked_at"] else None)
        lanes += table_view.recall_chart(asked, *scale)
        spent = ((run["finished"], run["money"]) for run in ran)
        lanes += table_view.cost_chart(spent, self._spending.currency, *scale, each, each_text)
        charts = story(lanes, *scale)
        ranges = [(span, here if span == _RANGE else f"{here}?range={span}", span == wanted) for span in RANGES]
        return {"charts": charts, "ranges": ranges, "cost": table_view.cost_view(ledger)}

    def _budget_chart(self, budget: Mapping[str, Any] | None) -> dict[str, Any]:
        now = datetime.now(UTC)
        since = now - timedelta(seconds=_MIN_SCALE if budget is None else budget["per_seconds"])
        scale = since.timestamp(), now.timestamp()
        samples = self._samples(BUDGET, since) if budget is not None else ()
        return story(table_view.budget_chart(samples, budget or {"limits": ()}, *scale), *scale)

    def _reports(self, table: Mapping[str, Any]) -> RunReports:
        return RunReports(partial(self._runs.get, _stamp(table)), self._format_of)

    def _document(self, table: Mapping[str, Any]) -> dict[str, Any]:
        blocked = backlog_of(table).amount("blocked")
        found = self._reports(table).blocked_in_last_run(table["uri"]) if blocked else []
        return {**table, "error": poll_error(table), "blocked": found}

    def findings(self, table: Mapping[str, Any]) -> list[Finding]:
        """Return what is wrong with a table, by its entry in the status."""
        return [*findings_of(self._document(table), self._reports(table), DEFAULT_LIMITS, self._file)]


class _CachedRuns:
    """Cached queries of the run history. An entry is valid until a run of its table begins or ends."""

    def __init__(self, runs: Callable[..., list[dict[str, Any]]]) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], tuple[object, list[dict[str, Any]]]] = {}

    def get(self, stamp: object, **filters: Any) -> list[dict[str, Any]]:
        key = tuple(sorted(filters.items()))
        with self._lock:
            known = self._known.get(key)
        if known is None or known[0] != stamp:
            known = (stamp, self._runs(**filters))
            with self._lock:
                self._known[key] = known
        return known[1]


def _stamp(table: Mapping[str, Any]) -> object:
    return tuple((job["state"] == "running", job["last_finished"]) for job in table["jobs"].values())


_READING = "It is being read, and shown here then."


def _why_no_history(table: Mapping[str, Any]) -> str:
    if table["state"] == UNREADABLE:
        return "It is not known: the table cannot be read."
    table_format = formats().get(table["format"] or "")
    if table_format is not None and not isinstance(table_format, HasRecentHistory):
        return "Tables of this format report none."
    return _READING


@dataclass(frozen=True, slots=True)
class _Shell:
    """What surrounds each page. ``at`` is the part of the service, ``here`` the address of the page."""

    at: str
    here: str
    viewer: Viewer


def _html(template: str, shell: _Shell, status: int = 200, /, **model: Any) -> Page:
    policy = f"{rendering.content_security_policy()}; frame-ancestors 'none'"
    return Page(_HTML, rendering.render(template, shell=shell, **model), policy, status)


def _runbook(path: str, viewer: Viewer) -> Page:
    path = "runbooks/README.md" if path == _RUNBOOKS[1:] else path
    shell = _Shell("runbooks", f"/{path}", viewer)
    if not _is_runbook(path):
        why = "The runbooks of this release have no such page."
        back = {"back": _RUNBOOKS, "back_text": "All runbooks"}
        return _html("missing", shell, 404, kind="page", name=path, why=why, **back)
    text = files(memwal_ops).joinpath(*path.split("/")).read_text(encoding="utf-8")
    return _html("document", shell, title=rendering.runbook_title(path), text=document(text, path, _is_runbook))


def _is_runbook(path: str) -> bool:
    parts = path.split("/")
    if any(part in {"", ".", ".."} or not part.isprintable() for part in parts) or not path.endswith(".md"):
        return False
    return path.startswith(_RUNBOOKS[1:]) and files(memwal_ops).joinpath(*parts).is_file()
