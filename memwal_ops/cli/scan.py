"""``memwal-ops scan``: what tables need, and the configuration that does it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.printing import echo, echo_json
from memwal_ops.cli.process import open_table
from memwal_ops.core.registry import short_name
from memwal_ops.core.scan import Scanned, scan_table, tables_of_database
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, TableNotFoundError
from memwal_ops.text import counted, grid, paragraph, printable, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command(short_help="Show what tables need, without changing them, and the configuration that does it.")
@click.argument("uris", metavar="[URI]...", nargs=-1)
@click.option("--database", metavar="DIR", help="All tables of this LanceDB folder: DIR/*.lance.")
@storage_options
@json_output
def scan(uris: tuple[str, ...], database: str | None, storage_options: dict[str, str], as_json: bool) -> int:
    """Plan every job on each table, change nothing, and print the configuration of a service that runs them.

    Each job has its default options: expire counts versions older than a week.

    \b
    Examples:
      memwal-ops scan --database /data/lancedb
      memwal-ops scan s3://bucket/orders.lance s3://bucket/users.lance --json

    Exit codes: 0; 3 the folder has no table; else that of the first table that could not be scanned.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    if bool(uris) == (database is not None):
        raise InvalidUsageError("Give URIs of tables, or --database DIR.")
    tables = list(uris) if database is None else tables_of_database(database, storage_options)
    if not tables:
        raise TableNotFoundError(f"No table found in {database}: it has no folder NAME.lance.")
    scanned = [_scan(uri, storage_options) for uri in tables]
    configuration = _configuration(scanned, database)
    if as_json:
        echo_json({"tables": [one.to_json() for one in scanned], "configuration": configuration})
    else:
        echo(_describe(scanned, configuration))
    return next((error.exit_code for one in scanned for _, error in one.errors), 0)


def _scan(uri: str, options: dict[str, str]) -> Scanned:
    try:
        return scan_table(open_table(uri, options))
    except MemwalOpsError as error:
        return Scanned(uri, errors=((None, error),))


def _describe(scanned: Sequence[Scanned], configuration: str) -> str:
    rows = [
        (_name(one.uri), need.job, need.what, f"{need.rows:,}" if need.rows else "", _size(need.frees))
        for one in scanned
        for need in one.needs
    ]
    needy = sum(bool(one.needs) for one in scanned)
    freed = sum(need.frees for one in scanned for need in one.needs)
    needs = "needs" if needy == 1 else "need"
    parts = [f"{counted(len(scanned), 'table')}, {needy:,} {needs} something; {size_text(freed)} would be freed now."]
    if rows:
        headings = ("table", "job", "it would", "rows", "frees")
        parts.append(grid(headings, rows, words=headings[:3]))
    for one in scanned:
        for job, error in one.errors:
            what = f"{_name(one.uri)}, {job}" if job else _name(one.uri)
            parts.append(paragraph(f"NOT SCANNED: {what}: {error.reason}: {error} {error.remedy}", hanging="  "))
    parts.append(f"This configuration does it (memwal-ops run --config FILE):\n\n{configuration}".rstrip())
    return "\n\n".join(parts)


def _name(uri: str) -> str:
    return printable(short_name(uri.rstrip("/").rsplit("/", 1)[-1]))


def _size(count: int) -> str:
    return size_text(count) if count else ""


def _configuration(scanned: Sequence[Scanned], database: str | None) -> str:
    """The YAML of a service. What deletes is off by default, and versions are kept for a week."""
    places = [("uri", one.uri) for one in scanned] if database is None else [("database", database)]
    entries = [f"  - {key}: {_quoted(_absolute(place))}" for key, place in places]
    jobs = ["defaults:", "  jobs:", "    expire: {apply: true}", "    gc: {apply: true}"]
    return "\n".join([*jobs, "tables:", *entries, ""])


def _absolute(place: str) -> str:
    return place.rstrip("/") if "://" in place else os.path.abspath(os.path.expanduser(place))


def _quoted(text: str) -> str:
    """A YAML string; ``$`` is doubled, since a configuration file substitutes variables."""
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)
