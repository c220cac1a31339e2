"""``memwal-ops report``: write a table's page as one self-contained file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

from memwal_ops import errors
from memwal_ops.cli import printing
from memwal_ops.cli.check import last_run_fault_of
from memwal_ops.cli.options import TABLE, IntRange, branch_option, json_output, storage_options
from memwal_ops.cli.process import open_table
from memwal_ops.core.leases import list_leases
from memwal_ops.core.protocols import Table
from memwal_ops.core.registry import short_name
from memwal_ops.core.run import run_job
from memwal_ops.core.table_history import history_document, storage_of_gc
from memwal_ops.core.verification import Severity
from memwal_ops.pages.rendering import render
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.observe import findings, table_view

_MARK = b'<meta name="generator" content="memwal-ops">'
_LEVELS = {Severity.ERROR: findings.CRITICAL, Severity.WARNING: findings.WARNING, Severity.INFO: findings.OK}


@click.command(short_help="Write one HTML page about a table, with its history.")
@click.argument("uri", type=TABLE)
@click.option("-o", "--output", metavar="FILE", help="The file to write; - is stdout. An earlier report is replaced.")
@click.option("--force", is_flag=True, help="Replace FILE even if it is not an earlier report.")
@click.option("--limit", type=IntRange(1, 1000), default=100, show_default=True, help="At most N versions.")
@branch_option
@storage_options
@json_output
def report(
    uri: str, output: str | None, force: bool, limit: int, storage_options: dict[str, str], as_json: bool
) -> int:
    """Write a page about the table at URI: backlog, blocked parts, leases, versions and who made them, merges and
    their sizes, the life of the log, index coverage, storage and what holds it.

    The file needs no network and runs no script; it has no rows and no credentials. It reads metadata, verifies
    it, and plans a gc to see what holds the storage. --json prints the same as a document.

    \b
    Examples:
      memwal-ops report s3://bucket/orders.lance -o orders.html
      memwal-ops report orders.lance --json

    Exit codes: 0; 2 FILE is not a report; others: runbooks/README.md.
    """  # noqa: D205, D301 - click shows the first paragraph and keeps the lines of a block that begins so
    if (output is None) != as_json:
        raise errors.InvalidUsageError("Give -o FILE, or --json; not both.")
    if output not in {None, "-"} and not force:
        printing.check_replaceable(str(output), lambda head: _MARK in head, "a report")
    read = _read(open_table(uri, storage_options), limit)
    if output is None:
        printing.echo_json(read.document)
        return 0
    page = read.page()
    if output == "-":
        sys.stdout.buffer.write(page)
        sys.stdout.buffer.flush()
        return 0
    with printing.written_file(output) as file:
        file.write(page)
    printing.echo(f"written: {output} ({len(page):,} bytes).")
    return 0


class _Reading:
    """What was read about a table."""

    def __init__(self, table: Table) -> None:
        summary = table.format.summarize(table)
        self._table = table
        self.history: Mapping[str, Any] | None = None
        self.gc: Mapping[str, Any] | None = None
        self.notes: list[str] = []
        now = datetime.now(UTC)
        self.leases = [
            {"job": lease.job, "holder": lease.holder.name, "expires": lease.expires.isoformat()}
            for lease in list_leases(table.store)
            if lease.in_force(now)
        ]
        self.state: dict[str, Any] = {
            "name": short_name(table.location.uri.rpartition("/")[2]),
            "uri": table.location.address,
            "format": table.format.name,
            "version": summary.revision,
            "backlog": dict(summary.backlog),
            "state": findings.READ,
            "looked_at": now.isoformat(timespec="milliseconds"),
            "error": None,
            "blocked": [dict(part.document) for part in summary.blocked],
            "answers": [],
            "jobs": {},
        }
        self.findings = [*findings.findings_of(self.state, self, findings.DEFAULT_LIMITS, "")]
        fault = None if summary.blocked else last_run_fault_of(table, summary.backlog)
        if fault is not None:
            self.findings.append(findings.last_run_finding(self.state, fault))

    def verify(self) -> None:
        """Add the findings of ``verify``, which checks the metadata of the whole table."""
        for stated in run_job(self._table, "verify").to_json()["findings"]:
            what = f"{stated['check']}: {stated['place']}: {stated['evidence']} {stated['consequence']}"
            self.findings.append(
                findings.finding(_LEVELS[stated["severity"]], what, stated["remedy"], stated["runbook"])
            )

    def last_error(self, table: str, job: str) -> None:
        """Return None: a table alone has no run history."""
        del table, job

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """Return the part of a ``blocked`` entry."""
        del uri
        return self._table.format.part_of(blocked)

    @property
    def document(self) -> dict[str, Any]:
        """The document of ``--json``."""
        history = dict(self.history or {})
        storage = [*history.pop("storage", ()), *(asdict(record) for record in storage_of_gc(self.gc or {}))]
        keys = {name: self.state[name] for name in ("uri", "version", "backlog", "blocked")}
        document = {**keys, "findings": self.findings, "leases": self.leases, "history": history or None}
        return {**document, "storage": storage, "notes": self.notes}

    def page(self) -> bytes:
        """The page."""
        return render(
            "table",
            answers=table_view.answers_view(self.state),
            **table_view.history_view(self.history, self.gc),
            history_note=" ".join(self.notes),
            table=table_view.view_of(self.state, self.findings),
            leases=self.leases,
            **table_view.NOT_IN_A_FILE,
        )


def _read(table: Table, limit: int) -> _Reading:
    """Read a table; an error in its history or storage becomes a note, so that the rest is still reported."""
    reading = _Reading(table)
    try:
        reading.history = history_document(table, limit)
        if reading.history is None:
            reading.notes.append(f"Tables of the format {table.format.name} report no history.")
    except errors.MemwalOpsError as error:
        reading.notes.append(redact(f"The history cannot be read: {error} {error.remedy}"))
    try:
        if "verify" in table.jobs:
            reading.verify()
    except errors.MemwalOpsError as error:
        if isinstance(error, errors.BusyError):
            reading.notes.append(redact(f"It cannot be verified: {error} {error.remedy}"))
        else:
            what = redact(f"It cannot be verified: {error.reason}. {error}")
            reading.findings.append(
                findings.finding(findings.CRITICAL, what, redact(error.remedy), errors.runbook(error.exit_code))
            )
    try:
        if "gc" in table.jobs:
            reading.gc = run_job(table, "gc", apply=False).to_json()
    except errors.MemwalOpsError as error:
        reading.notes.append(redact(f"gc cannot be planned: {error} {error.remedy}"))
    return reading
