"""``memwal-ops history``: what the supervisor did, and what became of it."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import Any

import click

from memwal_ops.cli.config_option import config_option
from memwal_ops.cli.options import json_output
from memwal_ops.cli.text import grid, paragraph
from memwal_ops.errors import runbook
from memwal_ops.supervisor.config import load_settings
from memwal_ops.supervisor.history import History
from memwal_ops.supervisor.state_dir import history_path

_SHOWN_ERRORS = 5


@click.command(short_help="Show what the supervisor did, and what became of it.")
@config_option
@click.option("--state-dir", metavar="DIR", help="The service's state folder, instead of --config.")
@click.option("--table", help="Only this table, by its name or URI.")
@click.option("--job", help="Only this job.")
@click.option("--failed", is_flag=True, help="Only runs that did not end well.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most N runs.")
@json_output
def history(
    file: str, state_dir: str | None, table: str | None, job: str | None, failed: bool, limit: int, as_json: bool
) -> int:
    """Show runs, the newest first. Reads the service's file; the service may be running or not.

    Exit codes: 0; 50 the configuration is bad; 56 there is no history, or it cannot be read.
    """
    path = history_path(load_settings(file).config) if state_dir is None else os.path.join(state_dir, "history.sqlite")
    account = History.open_to_read(path)
    runs = account.runs(table=table, job=job, failed=failed, limit=limit)
    account.close()
    click.echo(json.dumps({"runs": runs}, indent=2) if as_json else describe(runs))
    return 0


def describe(runs: list[dict[str, Any]]) -> str:
    """The list for a person, and why the first that failed did."""
    if not runs:
        return "No run."
    rows = [
        (
            _ago(one["started"]),
            one["table"],
            one["job"],
            one["outcome"],
            one["decision"] or "",
            "" if one["seconds"] is None else f"{one['seconds']:.1f}",
            ", ".join(map(str, (one["versions"] or [])[-3:])),
        )
        for one in runs
    ]
    headings = ("started (UTC)", "table", "job", "outcome", "decision", "seconds", "versions")
    parts = [grid(headings, rows, words=("started (UTC)", "table", "job", "outcome", "decision", "versions"))]
    parts += _errors([one for one in runs if one["error"] is not None])
    return "\n".join(parts)


def _errors(failed: list[dict[str, Any]]) -> list[str]:
    """Each error once for a table, with the jobs that had it, and its page."""
    jobs: dict[tuple[str, str], dict[str, None]] = {}
    for one in failed:
        error, page = one["error"], runbook(one["exit_code"] or 0)
        text = f"{error['message']} {error['remedy'] or ''} ({error['reason']}{f'; {page}' if page else ''})"
        jobs.setdefault((one["table"], text), {})[one["job"]] = None
    shown = [*jobs.items()][:_SHOWN_ERRORS]
    parts = [paragraph(f"{table} {', '.join(names)}: {text}", hanging="  ") for (table, text), names in shown]
    if len(jobs) > len(shown):
        parts.append(f"and {len(jobs) - len(shown)} more with an error (--json shows all).")
    return parts


def _ago(started: str) -> str:
    return f"{datetime.fromisoformat(started).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
