"""``memwal-ops run``: run the supervisor."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from memwal_ops import log as logging_setup, text
from memwal_ops.cli.options import config_option
from memwal_ops.cli.printing import echo, echo_json
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.observe.status_document import TableStatus, applicable_jobs
from memwal_ops.supervisor.service import Service
from memwal_ops.supervisor.workers.protocol import NOT_APPLICABLE


@click.command(short_help="Maintain the tables of a configuration file, until stopped.")
@config_option
@click.option("--once", is_flag=True, help="Do what is due, and exit: for cron and Airflow.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print the runs as one JSON document on stdout.")
@click.pass_context
def run(context: click.Context, file: str, once: bool, as_json: bool) -> int:
    """Run the supervisor: maintain the tables in FILE by schedule and by backlog.

    SIGTERM and Ctrl-C let each job finish its current step (stop_grace), a second one stops at once; both are
    safe. SIGHUP reads FILE again; an invalid file changes nothing. docs/configuration.md has every key.

    \b
    Examples:
      memwal-ops run --config memwal.yaml
      memwal-ops run --config memwal.yaml --once --json

    Exit codes: 0 it was stopped, or all due jobs succeeded; with --once the highest exit code of its jobs; 50 the file
    is invalid; 55 another supervisor uses the state folder; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    settings = load_settings(file)
    _configure_log(context, settings.config.log_level)
    service = Service(settings, once=once)
    if not once:
        code = service.run()
        if threading.active_count() > 1:
            os._exit(code)  # all is closed but requests to stores that hang, for which Python would wait
        return code
    code = service.run_once()
    done = service.done
    if as_json:
        echo_json({"exit_code": code, "runs": done, "left": service.leased_elsewhere})
    else:
        done = [ran for ran in done if ran["decision"] != NOT_APPLICABLE]
        for ran in done:
            error = f" ({ran['error']['message']})" if ran["error"] else ""
            echo(
                text.printable(
                    f"{ran['table']} {ran['job']}: {ran['outcome']}, {ran['decision'] or 'no decision'}{error}"
                )
            )
        for leased in service.leased_elsewhere:
            until = "" if leased["expires"] is None else f" until {leased['expires']}"
            holder = leased["holder"] or "another supervisor"
            echo(text.printable(f"{leased['table']} {leased['job']}: skipped, its lease is held by {holder}{until}"))
        if not done and not service.leased_elsewhere:
            echo(_idle(service.status()["tables"]))
        echo(f"done: {text.counted(len(done), 'run')}, exit code {code}.{_left(done)}")
    return code


def _left(done: Sequence[Mapping[str, Any]]) -> str:
    """Return what only its age kept from being deleted, of all tables; empty: nothing."""
    reports = (ran["report"] for ran in done)
    later = [report["later"] for report in reports if isinstance(report, dict) and report.get("later")]
    if not later:
        return ""
    size, by = text.size_text(sum(step["bytes"] for step in later)), max(step["by"] for step in later)
    return f" Up to {size} are left that were too young to be deleted; all are old enough by {by[:10]}."


def _idle(tables: Sequence[TableStatus]) -> str:
    jobs = [(f"{table['name']} {name}", job) for table in tables for name, job in applicable_jobs(table).items()]
    deferred = [f"{name} is due, and waits for: {job['waiting_for']}." for name, job in jobs if job["waiting_for"]]
    if deferred:
        return "\n".join(deferred)
    upcoming = min(((job["next_due"], name) for name, job in jobs if job["next_due"]), default=None)
    if upcoming is None:
        return "Nothing was due: no trigger fires."
    return f"Nothing was due: no trigger fires; the next scheduled run is {upcoming[1]}, at {upcoming[0]}."


def _configure_log(context: click.Context, level: str) -> None:
    """Use the file's log level, unless the command line or the environment sets one."""
    root = context.find_root()
    if root.get_parameter_source("log_level") is ParameterSource.DEFAULT:
        logging_setup.configure(level=level.upper(), redact=redact)
