"""``memwal-ops export-support``: write a table's metadata, without values, into a file for support."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from memwal_ops.cli.completion import TABLE
from memwal_ops.cli.doctor import environment_checks
from memwal_ops.cli.options import IntRange, branch_option, json_output, storage_options
from memwal_ops.cli.output_file import check_replaceable, written_file
from memwal_ops.cli.printing import echo_result
from memwal_ops.core.export import ExportsMetadata, export_table
from memwal_ops.core.registry import locate, short_name
from memwal_ops.core.table_history import history_document
from memwal_ops.errors import InvalidUsageError, MemwalOpsError

if TYPE_CHECKING:
    from memwal_ops.core.protocols import TableFormat
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_HISTORY = 100
_SUFFIX = "-support.zip"


@click.command(short_help="Write a table's metadata, without values, into a file.")
@click.argument("uri", type=TABLE)
@click.option("-o", "--output", metavar="FILE", help=f"The file to write.  [default: NAME{_SUFFIX}]")
@click.option("--force", is_flag=True, help="Replace FILE even if it is not an earlier export.")
@click.option("--versions", type=IntRange(min=1), default=1000, show_default=True, help="At most N versions.")
@branch_option
@storage_options
@json_output
def export_support(
    uri: str, output: str | None, force: bool, versions: int, storage_options: dict[str, str], as_json: bool
) -> int:
    """Write the metadata of the table at URI into one file, from which others can reproduce a problem.

    It has manifests, tags, leases and holds, a listing with sizes and times, the history, and this machine's packages.
    It has no rows, keys, region values, filters, notes or credentials: settings that are not Lance's, and everything
    that this release does not know, are left out. inspect --from FILE and verify --from FILE read it.

    \b
    Examples:
      memwal-ops export-support s3://bucket/orders.lance
      memwal-ops export-support orders.lance -o /tmp/orders.zip

    Exit codes: 0; 2 FILE is not an export, or the format cannot be exported; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    found, location, store = locate(uri, storage_options)
    if not isinstance(found, ExportsMetadata):
        raise InvalidUsageError(
            f"{location.uri} is a table of the format {found.name}, which this command does not export.",
            remedy="Send the output of memwal-ops inspect URI --json and verify URI --json instead; check it for "
            "confidential values first.",
        )
    file = output or f"{short_name(os.path.basename(location.uri))}{_SUFFIX}"
    if not force:
        check_replaceable(file, lambda head: b"export.json" in head, "an export")
    more = {"checks": [one.to_json() for one in environment_checks()], "history": _history(found, location, store)}
    with written_file(file) as handle:
        objects, contents = export_table(handle, found, location, store, versions, **more)
    size = os.path.getsize(file)
    document = {"decision": "exported", "file": file, "bytes": size, "objects": objects, "contents": contents}
    text = f"exported: {file} ({size:,} bytes): {objects:,} objects listed, {contents:,} of them with contents."
    echo_result(document, f"{text}\nRead it: memwal-ops verify --from {file}", as_json=as_json)
    return 0


def _history(table_format: TableFormat, location: Location, store: Store) -> Any:
    """The history of the table; or the reason why it cannot be read, which may be the reported problem."""
    try:
        return history_document(table_format.open(location, store), _HISTORY)
    except MemwalOpsError as error:
        return {"error": error.reason}
