"""The ``--config`` option of the supervisor's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memwal_ops.cli.completion import FILE
from memwal_ops.places import default_config_path

if TYPE_CHECKING:
    from collections.abc import Callable

config_option = click.option(
    "--config",
    "file",
    type=FILE,
    default=default_config_path,
    metavar="FILE",
    help="The service's configuration.  [default: $MEMWAL_OPS_CONFIG or /etc/memwal-ops/config.yaml]",
)


def config_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command of ``config`` its file as an argument; ``--config`` works, too, as for all other commands."""
    named: str = f"{__name__}.named"

    def note(context: click.Context, _: click.Parameter, value: str | None) -> None:
        context.meta[named] = value

    def choose(context: click.Context, _: click.Parameter, value: str | None) -> str:
        other: str | None = context.meta.get(named)
        if value is not None and other is not None:
            raise click.UsageError(f"Give one file, not {value} and --config {other}.")
        return value or other or default_config_path()

    argument = click.argument("file", type=FILE, required=False, callback=choose)
    option = click.option(
        "--config", type=FILE, expose_value=False, is_eager=True, hidden=True, callback=note, help="As FILE."
    )
    return argument(option(command))
