"""``memwal-ops init``: prepare a table for the jobs of its format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from memwal_ops import errors
from memwal_ops.cli import job_command
from memwal_ops.cli.options import TABLE, branch_parameter, json_parameter, on, storage_parameters
from memwal_ops.cli.printing import echo_result
from memwal_ops.core import registry
from memwal_ops.core.job import InitSpec
from memwal_ops.core.options import describe
from memwal_ops.core.protocols import TableFormat
from memwal_ops.storage.api import Store
from memwal_ops.storage.locations import Location

_HELP = """Prepare the table at URI for the jobs of its format.

{}

A table that is already prepared with these options is not changed. A Lance table with other ones keeps them, and gets
what it lacks: another region spec, more maintained indexes. Safe to kill, and to run twice.

\b
Examples:
  memwal-ops init s3://bucket/orders.lance --primary-key id --dry-run
  memwal-ops init s3://bucket/orders.lance --region-field "bucket(id, 16)"
  memwal-ops init vectors.lmd --table s3://bucket/orders.lance --column vec

Exit codes: 0 created, added, unchanged or dry_run; others: runbooks/README.md."""


def _command() -> click.Command:
    specs = {name: one.init for name, one in registry.formats().items() if one.init is not None}

    @click.pass_context
    def run(
        context: click.Context,
        /,
        uri: str,
        branch: str | None,
        format_name: str | None,
        dry_run: bool,
        storage_options: dict[str, str],
        as_json: bool,
        **given: Any,
    ) -> int:
        chosen = job_command.chosen_options(context, given)
        found, location, store = _place(
            on(uri, branch, storage_options), format_name, _only_format(specs, chosen), storage_options
        )
        spec = specs.get(found.name)
        if spec is None:
            raise errors.InvalidUsageError(
                f"Tables of the format {found.name} are not prepared by this command.",
                remedy=f"It prepares those of {', '.join(specs)}.",
            )
        report = spec.function(location, store, job_command.read_options(spec, chosen), dry_run=dry_run)
        echo_result(report.to_json(), report.describe(), as_json=as_json)
        return report.exit_code

    return click.Command(
        "init",
        callback=run,
        short_help="Prepare a table for its jobs.",
        help=_HELP.format("\n\n".join(f"{name}: {one.summary}" for name, one in specs.items())),
        params=[
            click.Argument(["uri"], type=TABLE),
            click.Option(
                ["--format", "format_name"],
                type=click.Choice(sorted(specs)),
                help="The table's format; needed if nothing is at URI yet and no option implies it.",
            ),
            *job_command.option_parameters(specs),
            click.Option(["--dry-run"], is_flag=True, help="Show what it would do and change nothing."),
            branch_parameter(),
            *storage_parameters(),
            json_parameter(),
        ],
    )


def _only_format(specs: Mapping[str, InitSpec], chosen: Mapping[str, Any]) -> str | None:
    """The only format that has all of these options; None: there are none, or several have them."""
    options = {name: {option.name for option in describe(spec.options)} for name, spec in specs.items()}
    names = [name for name, known in options.items() if chosen.keys() <= known]
    return names[0] if len(names) == 1 else None


def _place(
    uri: str, format_name: str | None, implied: str | None, storage: dict[str, str]
) -> tuple[TableFormat, Location, Store]:
    """The format, and the place: of the table that is there, or that is to be made. Raises if that is not clear."""
    from memwal_ops.storage.objects import open_store  # noqa: PLC0415 - the clients of stores: not for --help

    try:
        found, location, store = registry.locate(uri, storage)
    except (errors.TableNotFoundError, errors.NotALanceTableError):
        made = format_name or implied
        if made is None:
            raise
        location = registry.location_of(uri, storage)
        return registry.formats()[made], location, open_store(location)
    if format_name not in {None, found.name}:
        raise errors.InvalidUsageError(f"{location.uri} is a table of the format {found.name}, not {format_name}.")
    return found, location, store


init = _command()
