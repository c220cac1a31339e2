"""``memwal-ops status``: show the fleet status: which tables are behind, how far, why, and what to do."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from memwal_ops.cli.check import ask_service, backlog_limits
from memwal_ops.cli.config_option import config_option
from memwal_ops.cli.options import Duration, json_output
from memwal_ops.cli.printing import echo, echo_json, echo_result, error_document
from memwal_ops.cli.status_text import describe
from memwal_ops.core.figures import backlog_of
from memwal_ops.errors import InvalidConfigError, InvalidUsageError
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.config.loader import http_of, load_settings
from memwal_ops.supervisor.http.client import ServiceClient
from memwal_ops.supervisor.observe.findings import (
    OK,
    WORDS,
    Limits,
    findings_of,
    level_of_finding,
    no_tables,
    service_findings,
)
from memwal_ops.supervisor.observe.status import FleetStatus
from memwal_ops.supervisor.scheduling.discovery import discover
from memwal_ops.supervisor.state.directory import state_dir

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import timedelta

    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.supervisor.config.effective import Settings
    from memwal_ops.supervisor.observe.findings import Finding, RunErrors
    from memwal_ops.supervisor.scheduling.discovery import Fault, FoundTable


@click.command(short_help="Show all tables of a configuration: what is behind, and why.")
@config_option
@click.option("--table", "only", help="Only this table, by its name or URI, with all of its jobs.")
@backlog_limits
@click.option("--timeout", type=Duration(), default="60s", show_default=True, help="Limit for reading all tables.")
@json_output
def status(file: str, only: str | None, limits: Limits, timeout: timedelta, as_json: bool) -> int:
    """Show every table in FILE: its backlog, blocked parts, the last and next runs, and the holders of leases.

    Reads the tables, the history in the state folder, and the status of the service if it runs. Changes nothing.

    \b
    Examples:
      memwal-ops status --config memwal.yaml
      memwal-ops status --config memwal.yaml --table orders --json

    Exit codes, as of check: 0 OK; 1 warning; 2 critical; 50 the configuration is invalid: then what a service says that
    still runs with it.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    try:
        settings = load_settings(file)
    except InvalidConfigError as error:
        if (document := running_status(file, only, limits, error)) is None:
            raise
        echo_result(document, redact(describe(document, in_full=bool(only))), as_json=as_json)
        if not as_json:
            raise
        return error.exit_code
    found = discover(settings.tables)
    tables = [table for table in found.tables if only in {None, table.name, table.uri}]
    if only is not None and not tables:
        names = ", ".join(sorted(table.name for table in found.tables)) or "none"
        missed = "".join(f" Not all could be found: {fault.pattern}: {fault.why}" for fault in found.faults)
        raise InvalidUsageError(
            f"There is no table {only!r}.", remedy=redact(f"The tables of {file}: {names}.{missed}")
        )
    document = fleet_status(settings, tables, found.faults, limits, timeout)
    if as_json:
        echo_json(document, default=str)
    else:
        echo(redact(describe(document, in_full=bool(only))))
    return int(document["exit_code"])


def fleet_status(
    settings: Settings, tables: Sequence[FoundTable], faults: Sequence[Fault], limits: Limits, timeout: timedelta
) -> dict[str, Any]:
    """Return the document: the keys of ``/api/v1/status`` with the same meaning, and the findings."""
    service, why_not = _service(settings)
    fleet = FleetStatus(settings, service)
    try:
        documents: list[dict[str, Any]] = [{**one} for one in fleet.tables(tables, timeout)]
        _find(documents, fleet, limits, settings.path)
    finally:
        fleet.close()
    found = [*service_findings(None if service is None else service["service"], faults, settings.path)]
    if not tables and not faults:
        found.append(no_tables())
    return {
        "service": None if service is None else service["service"],
        "service_error": why_not or None,
        "history_error": fleet.history_error,
        "discovery_faults": [{"pattern": fault.pattern, "error": fault.why} for fault in faults],
        **_judged(documents, found),
    }


def running_status(file: str, only: str | None, limits: Limits, error: MemwalOpsError) -> dict[str, Any] | None:
    """Return the document of a service that runs with a file which has an error now, by the service alone.

    None: no service of that file responds. ``error`` of the document is that of the file.
    """
    http = http_of(file)
    client = ServiceClient(http)
    status = ask_service(http)[0] if http.port else None
    if status is None or status["service"]["config"]["file"] != os.path.abspath(file):
        return None
    documents = [
        {**one, "error": _poll_error(one), "blocked": []}
        for one in status["tables"]
        if only in {None, one["name"], one["uri"]}
    ]
    _find(documents, _Errors(client), limits, file)
    return {
        "service": status["service"],
        "service_error": None,
        "history_error": None,
        "discovery_faults": status["service"]["discovery_faults"],
        **_judged(documents, [*service_findings(status["service"], (), file)]),
        **error_document(error),
        "exit_code": error.exit_code,
    }


@dataclass(frozen=True, slots=True)
class _Errors:
    """The errors of runs, as the service has them."""

    client: ServiceClient

    def last_error(self, uri: str, job: str) -> Mapping[str, Any] | None:
        query = urlencode({"table": uri, "job": job, "failed": "true", "limit": 1})
        try:
            runs = self.client.get(f"/api/v1/runs?{query}")["runs"]
        except (OSError, ValueError, HTTPException, KeyError, TypeError):
            return None
        return {**runs[0]["error"], "exit_code": runs[0]["exit_code"]} if runs and runs[0]["error"] else None

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        del uri, blocked
        return "", ""


def _poll_error(table: Mapping[str, Any]) -> dict[str, Any] | None:
    if table["look_error"] is None:
        return None
    todo = f"See it in full: memwal-ops inspect {shlex.quote(table['uri'])}"
    page = "runbooks/alerts/MemwalOpsPollsFail.md"
    return {"reason": "the last poll failed", "message": table["look_error"], "remedy": todo, "runbook": page}


def _find(documents: Iterable[dict[str, Any]], errors: RunErrors, limits: Limits, file: str) -> None:
    """Add its findings and its level to the document of each table."""
    for one in documents:
        one["findings"] = [*findings_of(one, errors, limits, file)]
        one["level"] = WORDS[max((level_of_finding(finding) for finding in one["findings"]), default=OK)]


def _judged(documents: list[dict[str, Any]], found: list[Finding]) -> dict[str, Any]:
    """Return the keys of all tables and findings: how bad it is, and the exit code."""
    worst = max(
        [
            OK,
            *map(level_of_finding, found),
            *(level_of_finding(one) for table in documents for one in table["findings"]),
        ]
    )
    return {
        "tables": documents,
        "findings": found,
        "summary": _summary(documents),
        "level": WORDS[worst],
        "exit_code": worst,
    }


def _service(settings: Settings) -> tuple[Mapping[str, Any] | None, str]:
    if not settings.config.http.enabled or not settings.config.http.port:
        why = "http.port is 0" if settings.config.http.enabled else "http.enabled is false"
        return None, f"no service to query ({why})"
    service, why_not = ask_service(settings.config.http)
    if service is not None and service["service"]["state_dir"] != state_dir(settings.config):
        theirs = service["service"]["state_dir"]
        return None, f"the service at that address runs another configuration (its state_dir is {theirs})"
    return service, why_not


def _summary(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    tables = [*tables]
    oldest = max(tables, key=lambda one: backlog_of(one).amount("age") or 0.0, default=None)
    age = 0.0 if oldest is None else backlog_of(oldest).amount("age") or 0.0
    return {
        "tables": len(tables),
        **{word: sum(one["level"] == word for one in tables) for word in WORDS.values()},
        "unreadable": sum(one["error"] is not None for one in tables),
        "blocked_regions": int(sum(backlog_of(one).amount("blocked") or 0 for one in tables)),
        "generations": int(sum(backlog_of(one).amount("backlog") or 0 for one in tables)),
        **{name: int(sum(one["backlog"].get(name, 0) for one in tables)) for name in ("rows", "bytes")},
        "oldest_age": age,
        "oldest_table": None if oldest is None or not age else oldest["name"],
    }
