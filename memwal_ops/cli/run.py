"""``memwal-ops run``: the supervisor."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from memwal_ops import log as logging_setup
from memwal_ops.cli.config_option import config_option
from memwal_ops.cli.text import counted
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.config import load_settings
from memwal_ops.supervisor.service import Service


@click.command(short_help="Maintain many tables by a configuration file, until told to stop.")
@config_option
@click.option("--once", is_flag=True, help="Do what is due, and exit: for cron and Airflow.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print the runs as one JSON document on stdout.")
@click.pass_context
def run(context: click.Context, file: str, once: bool, as_json: bool) -> int:
    """Maintain the tables that FILE names: scheduled, leased, observed, stopped and restarted at will.

    SIGTERM and Ctrl-C let each job finish the step in hand (stop_grace), a second one stops at once; both are
    safe. SIGHUP reads FILE again; a bad file changes nothing. docs/supervisor.md has every key.

    Exit codes: 0 it was told to stop, or all that was due went well; with --once the highest of what its jobs
    exited with; 50 the file is bad; 55 another supervisor uses the state folder; any other code: see the README.
    """
    settings = load_settings(file)
    _configure_log(context, settings.config.log_level)
    service = Service(settings, once=once)
    if not once:
        return service.run()
    code = service.run_once()
    done = service.done
    if as_json:
        click.echo(json.dumps({"exit_code": code, "runs": done, "left": service.left}, indent=2))
    else:
        for one in done:
            said = f" ({one['error']['message']})" if one["error"] else ""
            click.echo(f"{one['table']} {one['job']}: {one['outcome']}, {one['decision'] or 'no decision'}{said}")
        for one in service.left:
            until = "" if one["expires"] is None else f", whose lease ends at {one['expires']}"
            click.echo(f"{one['table']} {one['job']}: left to {one['holder'] or 'another supervisor'}{until}")
        if not done and not service.left:
            click.echo(_idle(service.status()["tables"]))
        click.echo(f"done: {counted(len(done), 'run')}, exit code {code}.")
    return code


def _idle(tables: list[dict[str, Any]]) -> str:
    """Why nothing ran: what is put off, or what comes next."""
    jobs = [(f"{table['name']} {name}", job) for table in tables for name, job in table["jobs"].items()]
    put_off = [f"{name} is due, and waits for: {job['waiting_for']}." for name, job in jobs if job["waiting_for"]]
    if put_off:
        return "\n".join(put_off)
    coming = min(((job["next_due"], name) for name, job in jobs if job["next_due"]), default=None)
    if coming is None:
        return "Nothing was due: no trigger fires."
    return f"Nothing was due: no trigger fires; by schedule {coming[1]} comes next, at {coming[0]}."


def _configure_log(context: click.Context, level: str) -> None:
    """The file's log level, unless the command line or the environment gives one."""
    root = context.find_root()
    if root.get_parameter_source("log_level") is ParameterSource.DEFAULT:
        logging_setup.configure(level=level.upper(), redact=redact)
