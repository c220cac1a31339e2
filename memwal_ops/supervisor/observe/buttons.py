"""Say which buttons a page has: what its viewer may do with a table, and only where it is safe and does something.

A run, a retry and a pause are safe at any time: jobs may be killed, repeated, and run twice.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAX_JOBS = 3


def add_buttons(view: dict[str, Any], table: Mapping[str, Any]) -> None:
    """Add the buttons to the view of a table: those of its findings, and of its jobs."""
    jobs = {name: job for name, job in table["jobs"].items() if job.get("applies", True)}
    for one in view["findings"]:
        named = [name for name in one["jobs"] if name in jobs and jobs[name]["state"] != "running"]
        one["buttons"] = [_start(table["name"], name, jobs[name]) for name in named[:_MAX_JOBS]]
    for row in view["job_rows"]:
        job = jobs[row["name"]]
        running = job["state"] == "running"
        row["acts"] = [_button(table["name"], row["name"], "cancel", "Cancel") if running else _start(
            table["name"], row["name"], job, short=True
        )]  # fmt: skip


def table_buttons(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the buttons of the table itself; one ``asks`` for how long, and why."""
    base = f"/api/v1/tables/{_segment(table['name'])}"
    if table.get("paused"):
        return [{"path": f"{base}/resume", "label": "Resume its jobs", "asks": False}]
    return [{"path": f"{base}/pause", "label": "Pause its jobs", "asks": True}]


def commands_of(table: Mapping[str, Any], file: str) -> Iterator[str]:
    """Yield the commands that do the same as the buttons, for a viewer without them; ``file``: the configuration."""
    given = f"--config {shlex.quote(file)} --table {shlex.quote(table['name'])}"
    for name, job in table["jobs"].items():
        if job.get("applies", True):
            action = "cancel" if job["state"] == "running" else "retry" if _waits(job) else "run"
            yield f"memwal-ops service {action} {given} --job {name}"
    yield f"memwal-ops service {'resume' if table.get('paused') else 'pause'} {given}"


def _start(table: str, name: str, job: Mapping[str, Any], *, short: bool = False) -> dict[str, Any]:
    if _waits(job):
        return _button(table, name, "retry", "Retry now" if short else f"Retry {name} now")
    return _button(table, name, "run", "Run now" if short else f"Run {name} now")


def _waits(job: Mapping[str, Any]) -> bool:
    """Whether a job is in backoff, or its circuit breaker is open."""
    return bool(job["backoff_seconds"] or job.get("breaker"))


def _button(table: str, job: str, action: str, label: str) -> dict[str, Any]:
    return {"path": f"/api/v1/tables/{_segment(table)}/jobs/{_segment(job)}/{action}", "label": label}


def _segment(name: str) -> str:
    return quote(name, safe="", errors="surrogateescape")
