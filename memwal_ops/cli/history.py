"""``memwal-ops history``: show the supervisor's runs, and how each ended."""

from __future__ import annotations

import os
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import click

from memwal_ops.cli import options
from memwal_ops.cli.printing import echo_result
from memwal_ops.errors import InvalidUsageError, runbook
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.state.directory import history_path
from memwal_ops.supervisor.state.history import History
from memwal_ops.text import grid, paragraph

_SHOWN_ERRORS = 5


@click.command(short_help="Show what the supervisor did, and how each run ended.")
@options.config_option
@click.option("--state-dir", metavar="DIR", help="The service's state folder, instead of --config.")
@click.option("--table", help="Only this table, by its name or URI.")
@click.option("--job", help="Only this job.")
@click.option("--failed", is_flag=True, help="Only runs that did not succeed.")
@click.option("--limit", type=options.IntRange(1, 10_000), default=50, show_default=True, help="At most N runs.")
@options.json_output
def history(
    file: str, state_dir: str | None, table: str | None, job: str | None, failed: bool, limit: int, as_json: bool
) -> int:
    """Show runs, the newest first. Reads the service's file, whether the service runs or not.

    \b
    Examples:
      memwal-ops history --config memwal.yaml --failed
      memwal-ops history --config memwal.yaml --table orders --job merge --limit 10

    Exit codes: 0; 2 the service never had that table or job; 50 the configuration is invalid; 56 there is no history,
    or it cannot be read.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    settings = load_settings(file) if state_dir is None else None
    path = os.path.join(state_dir or "", "history.sqlite") if settings is None else history_path(settings.config)
    recorded = History.open_to_read(path)
    configured = () if settings is None else settings.tables
    try:
        uri = next((entry.uri for entry in configured if entry.name == table), None)
        runs = recorded.runs(table=table, uri=uri, job=job, failed=failed, limit=limit)
        if not runs:
            names = [name for entry in configured for name in (entry.name, entry.uri or entry.name)]
            _check_known("table", table, recorded.tables().union(names))
            _check_known("job", job, recorded.jobs().union(*(entry.jobs for entry in configured)))
    finally:
        recorded.close()
    echo_result({"runs": runs}, describe(runs), as_json=as_json)
    return 0


def _check_known(kind: str, name: str | None, known: Collection[str]) -> None:
    """Reject a name that cannot have runs: for a misspelled name, "No run." would look like success."""
    if name is not None and name not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise InvalidUsageError(f"The history has no {kind} {name!r}.", remedy=f"It has these {kind}s: {listed}.")


def describe(runs: list[dict[str, Any]]) -> str:
    """Return the list as human-readable text, and the errors of the first failed runs."""
    if not runs:
        return "No run."
    rows = [
        (
            f"{datetime.fromisoformat(run['started']).astimezone(UTC):%Y-%m-%d %H:%M:%S}",
            run["table"],
            run["job"],
            run["outcome"],
            run["decision"] or "",
            "" if run["seconds"] is None else f"{run['seconds']:.1f}",
            ", ".join(map(str, (run["versions"] or [])[-3:])),
        )
        for run in runs
    ]
    headings = ("started (UTC)", "table", "job", "outcome", "decision", "seconds", "versions")
    table = grid(headings, rows, words=("started (UTC)", "table", "job", "outcome", "decision", "versions"))
    return "\n".join([table, *_errors([run for run in runs if run["error"] is not None])])


def _errors(failed: list[dict[str, Any]]) -> list[str]:
    """Return each error of a table once, with its jobs and its runbook page."""
    jobs: dict[tuple[str, str], dict[str, None]] = {}
    for run in failed:
        error = run["error"]
        page = runbook(run["exit_code"] or 0, error["reason"])
        text = f"{error['message']} {error['remedy'] or ''} ({error['reason']}{f'; {page}' if page else ''})"
        jobs.setdefault((run["table"], text), {})[run["job"]] = None
    shown = [*jobs.items()][:_SHOWN_ERRORS]
    parts = [paragraph(f"{table} {', '.join(names)}: {text}", hanging="  ") for (table, text), names in shown]
    if len(jobs) > len(shown):
        parts.append(f"and {len(jobs) - len(shown)} more with an error (--json shows all).")
    return parts
