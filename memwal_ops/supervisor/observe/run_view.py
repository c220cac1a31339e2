"""Turn a run of the history into what the pages print about it."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from memwal_ops.core.figures import Figures
from memwal_ops.core.options import describe
from memwal_ops.core.registry import all_job_specs
from memwal_ops.errors import runbook
from memwal_ops.supervisor.observe.table_view import figures_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_LEVELS = {"succeeded": "ok", "running": "running", "partial": "warning", "stopped": "warning"}


def run_view(run: Mapping[str, Any], table_format: str | None) -> dict[str, Any]:
    """Return what a page prints about a run on a table of a format."""
    shown = ("id", "started", "job", "why", "outcome", "decision", "seconds", "error")
    figures = {name: value for name, value in (run["figures"] or {}).items() if value}
    return {
        **{name: run[name] for name in shown},
        "versions": run["versions"] or [],
        "figures": figures_of(Figures(figures, table_format, "run")),
    }


def run_page(run: Mapping[str, Any], table_format: str | None) -> dict[str, Any]:
    """Return the variables of the page of one run."""
    plan, phases = run["plan"] or {}, run["phases"] or {}
    whole = sum(phases.values()) or 1.0
    lines = run.get("log")
    return {
        "run": run,
        "level": _LEVELS.get(run["outcome"], "critical"),
        "page": runbook(run["exit_code"] or 0, run["error"]["reason"]) if run["error"] else None,
        "phases": [(name.replace("_", " "), seconds, seconds / whole) for name, seconds in phases.items()],
        "figures": figures_of(Figures(run["figures"] or {}, table_format, "run")),
        "backlog": figures_of(Figures(plan.get("backlog") or {}, table_format)),
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
            parts += [part for one in (value if isinstance(value, list) else [value]) for part in (flag, str(one))]
    if spec is not None and spec.deletes and plan.get("apply"):
        parts.append("--apply")
    return shlex.join(parts)
