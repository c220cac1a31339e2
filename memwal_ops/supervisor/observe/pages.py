"""Serve the pages of all tables and of one table, from memory: no page reads a table or a store.

``/`` lists all tables, the worst first, and ``/tables/NAME`` has one table in full. What a page needs of the run
history is read from its file once after each run.
"""

from __future__ import annotations

import shlex
import threading
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import memwal_ops
from memwal_ops.core.bad_answers import ASKED_BY
from memwal_ops.core.figures import Figures, backlog_of, jobs_of
from memwal_ops.core.registry import formats
from memwal_ops.pages.charts import backlog_chart
from memwal_ops.pages.rendering import content_security_policy, data_uri, render
from memwal_ops.supervisor.observe.findings import (
    CRITICAL,
    DEFAULT_LIMITS,
    WARNING,
    WORDS,
    findings_of,
    no_tables,
    service_findings,
)
from memwal_ops.supervisor.observe.table_view import answers_view, figures_of, history_view, view_of
from memwal_ops.supervisor.observe.viewer import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memwal_ops.supervisor.observe.findings import Finding
    from memwal_ops.supervisor.observe.status_document import StatusDocument
    from memwal_ops.supervisor.observe.viewer import Viewer
    from memwal_ops.supervisor.scheduling.discovery import Fault

_RELOAD_SECONDS = 15
_MAX_RUNS = 20
_MAX_ASKED = 60
_BLOCKED_EXIT_CODE = 10
_TABLES, _CHART, _RUNBOOKS = "/tables/", "/backlog.svg", "/runbooks/"
_NO_HISTORY = (
    "Not read yet, or not reported by tables of this format. Opening this page requests it: see the next reload."
)
_SVG_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"


@dataclass(frozen=True, slots=True)
class Page:
    """The response to a request: its type, body, the Content-Security-Policy that it needs, and its status code."""

    kind: str
    body: bytes
    policy: str = "default-src 'none'"
    status: int = 200


class Pages:
    """The pages of a service.

    Args:
        status: returns the document of ``/api/v1/status``.
        runs: returns the newest runs, by table, job, failed and limit.
        samples: returns the amounts of a table's backlog over time, by its name.
        history: returns the recent history of a table as last read, and requests a new one; None if it is not known.
        faults: returns the patterns that could not be expanded.
        format_of: returns the name of the format of a table, by its URI; None if it is not known yet.
        file: the path of the configuration file, for commands to type.
    """

    def __init__(
        self,
        *,
        status: Callable[[], StatusDocument],
        runs: Callable[..., list[dict[str, Any]]],
        samples: Callable[[str], Sequence[tuple[float, float]]],
        history: Callable[[str], Mapping[str, Any] | None],
        faults: Callable[[], Sequence[Fault]],
        format_of: Callable[[str], str | None],
        file: str,
    ) -> None:
        """Render nothing yet."""
        self._history = history
        self._status, self._samples, self._faults, self._format_of = status, samples, faults, format_of
        self._runs = _CachedRuns(runs)
        self._file = file
        self._charts: dict[str, tuple[float, bytes]] = {}

    def page_at(self, path: str, query: str = "", viewer: Viewer = ANONYMOUS) -> Page | None:
        """Return the page of a path and a query string, for someone who looks at it; None if there is none."""
        del query, viewer  # no page depends on them yet
        if path == "/":
            return Page("text/html; charset=utf-8", self.fleet(), _with_ancestors())
        if path.startswith(_RUNBOOKS):
            return _runbook(path[1:])
        if not path.startswith(_TABLES):
            return None
        name = unquote(path.removeprefix(_TABLES).removesuffix(_CHART), errors="surrogateescape")
        if path.endswith(_CHART):
            samples = self._samples(name)
            return Page("image/svg+xml", self._chart(name, samples), _SVG_POLICY) if samples else None
        body = self.table(name)
        return None if body is None else Page("text/html; charset=utf-8", body, _with_ancestors())

    def sign_in(self, error: str = "") -> Page:
        """Return the page that asks for a token; ``error``: why the last one was refused."""
        return Page("text/html; charset=utf-8", render("sign_in", error=error, refresh=None), _with_ancestors())

    def fleet(self) -> bytes:
        """Return the page of all tables, the worst first."""
        status = self._status()
        service = status["service"]
        views = [self._view(table) for table in status["tables"]]
        views.sort(key=lambda view: (-_LEVELS[view["level"]], view["name"]))
        for view in views:
            samples = self._samples(view["name"])
            view["chart"] = ""
            if len(samples) > 1:
                name = quote(view["name"], safe="", errors="surrogateescape")
                view["chart"] = f"{_TABLES}{name}{_CHART}?t={samples[-1][0]:.0f}"
        found = [*service_findings(service, self._faults(), self._file)]
        if not views and not self._faults():
            found.append(no_tables())
        state = "stopping" if service["stopping"] else "runs" if service["ready"] else "not ready yet"
        return render(
            "fleet",
            service=service,
            state=f"Service: {state}",
            service_findings=found,
            tables=views,
            critical=sum(view["level"] == WORDS[CRITICAL] for view in views),
            warning=sum(view["level"] == WORDS[WARNING] for view in views),
            refresh=_RELOAD_SECONDS,
        )

    def table(self, name: str) -> bytes | None:
        """Return the page of a table; None if there is no such table."""
        table = next((one for one in self._status()["tables"] if one["name"] == name), None)
        if table is None:
            return None
        samples = self._samples(name)
        chart = data_uri(backlog_chart(samples, small=False)) if len(samples) > 1 else ""
        runs = self._runs.get(_stamp(table), table=name, limit=_MAX_RUNS)
        history = self._history(name)
        collected = next(iter(self._runs.get(_stamp(table), table=name, job="gc", limit=1)), None)
        asked = self._runs.get(_stamp(table), table=name, job=ASKED_BY, limit=_MAX_ASKED)
        return render(
            "table",
            **answers_view(table, asked),
            **history_view(history, None if collected is None else collected["report"]),
            history_note="" if history else _NO_HISTORY,
            table=self._view(table),
            home=True,
            backlog_chart=chart,
            leases=None,
            runs=[run_view(run, table["format"]) for run in runs],
            refresh=_RELOAD_SECONDS,
        )

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name of the part of a table that a ``blocked`` entry is about, and the place in it."""
        table_format = formats().get(self._format_of(uri) or "")
        return ("", "") if table_format is None else table_format.part_of(blocked)

    def _view(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return view_of(self._document(table), self.findings(table), self._samples(table["name"]))

    def _document(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {**table, "error": _read_error(table), "blocked": self._blocked(table)}

    def findings(self, table: Mapping[str, Any]) -> list[Finding]:
        """Return what is wrong with a table, by its entry in the status."""
        document = self._document(table)
        return [*findings_of(document, _Errors(self, table), DEFAULT_LIMITS, self._file)]

    def _blocked(self, table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return what the last run reported as blocked, if anything still is."""
        found: list[Mapping[str, Any]] = []
        for job in jobs_of("blocked", "run") if backlog_of(table).amount("blocked") else ():
            for run in self._runs.get(_stamp(table), table=table["uri"], job=job, limit=1):
                entries = (run["report"] or {}).get("blocked") if run["exit_code"] == _BLOCKED_EXIT_CODE else None
                found += [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
        return found

    def last_error(self, table: Mapping[str, Any], job: str) -> Mapping[str, Any] | None:
        """Return the error of a job's last failure."""
        runs = self._runs.get(_stamp(table), table=table["uri"], job=job, failed=True, limit=1)
        return {**runs[0]["error"], "exit_code": runs[0]["exit_code"]} if runs and runs[0]["error"] else None

    def _chart(self, name: str, samples: Sequence[tuple[float, float]]) -> bytes:
        drawn = self._charts.get(name)
        if drawn is None or drawn[0] != samples[-1][0]:
            drawn = self._charts[name] = (samples[-1][0], backlog_chart(samples, small=True))
        return drawn[1]


_LEVELS = {word: level for level, word in WORDS.items()}


@dataclass(frozen=True, slots=True)
class _Errors:
    """The errors of one table, for its findings."""

    pages: Pages
    table: Mapping[str, Any]

    def last_error(self, uri: str, job: str) -> Mapping[str, Any] | None:
        del uri
        return self.pages.last_error(self.table, job)

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        return self.pages.part_of(uri, blocked)


class _CachedRuns:
    """Cached queries of the run history; an entry is valid until a run of its table begins or ends."""

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


def run_view(run: Mapping[str, Any], table_format: str | None) -> dict[str, Any]:
    """Return what a page prints about a run on a table of a format."""
    shown = ("started", "job", "why", "outcome", "decision", "seconds", "error")
    figures = {name: value for name, value in (run["figures"] or {}).items() if value}
    return {
        **{name: run[name] for name in shown},
        "versions": run["versions"] or [],
        "figures": figures_of(Figures(figures, table_format, "run")),
    }


def _stamp(table: Mapping[str, Any]) -> object:
    """Return a value that changes whenever a run of the table begins or ends."""
    return tuple((job["state"] == "running", job["last_finished"]) for job in table["jobs"].values())


def _read_error(table: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if table["look_error"] is None:
        return None
    todo = f"See it in full: memwal-ops inspect {shlex.quote(table['uri'])}"
    page = "runbooks/alerts/MemwalOpsPollsFail.md"
    return {"reason": "the last poll failed", "message": table["look_error"], "remedy": todo, "runbook": page}


def _with_ancestors() -> str:
    return f"{content_security_policy()}; frame-ancestors 'none'"


def _runbook(path: str) -> Page | None:
    """Return a page of the runbooks as text, from the installed package."""
    root = files(memwal_ops)
    parts = path.split("/")
    if any(part in {"", ".", ".."} or not part.isprintable() for part in parts) or not path.endswith(".md"):
        return None
    page = root.joinpath(*parts)
    return Page("text/plain; charset=utf-8", page.read_bytes()) if page.is_file() else None
