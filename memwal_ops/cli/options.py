"""Types and options that several commands share: paths that shells complete, ``--config``, ``--json``, stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from memwal_ops.errors import InvalidUsageError
from memwal_ops.places import default_config_path
from memwal_ops.storage.options import parse_options
from memwal_ops.text import parse_duration

BRANCH = "A branch of the table: URI/tree/NAME."


class IntRange(click.IntRange):
    """click's IntRange with the digits 0 to 9 only; Python accepts the digits of other scripts, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fails with a usage error."""
        if isinstance(value, str) and not value.isascii():
            self.fail(f"{value!r} is not a number; write it with the digits 0 to 9.", param, ctx)
        return super().convert(value, param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """A duration: ``90s``, ``15m``, ``2h``, ``3d``, ``1w``, or ``0``."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Return the duration; fails with a usage error."""
        if isinstance(value, timedelta):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _storage_options(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    return parse_options(values)


def storage_parameters() -> list[click.Parameter]:
    """Return the ``--storage-option KEY=VALUE`` parameter, repeatable."""
    option = click.Option(
        ["--storage-option", "storage_options"],
        multiple=True,
        metavar="KEY=VALUE",
        callback=_storage_options,
        help="An option of the store, as pylance takes it (repeatable); for example aws_endpoint=http://host:9000.",
    )
    return [option]


def branch_parameter(*, every: bool = False) -> click.Option:
    """Return the ``--branch NAME`` parameter; ``every``: it may be ``all``."""
    return click.Option(["--branch"], metavar="NAME", help=BRANCH + (" 'all': each of them." if every else ""))


def branch_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--branch`` to a decorated command with ``uri`` and ``storage_options``: it gets the URI of the branch."""

    @wraps(command)
    def on_branch(*, uri: str | None, branch: str | None, storage_options: dict[str, str], **given: Any) -> Any:
        if uri is None and branch is not None:
            raise InvalidUsageError("--branch NAME is that of a table.", remedy="Give its URI, too.")
        opened = None if uri is None else on(uri, branch, storage_options)
        return command(uri=opened, storage_options=storage_options, **given)

    return _with(on_branch, branch_parameter())


def on(uri: str, branch: str | None, storage_options: Mapping[str, str]) -> str:
    """Return the URI of a branch of the table at a URI; None: that of the table.

    Raises ``InvalidUsageError``: there is no such branch.
    """
    if branch is None:
        return uri
    from memwal_ops.core.registry import uri_of_branch  # noqa: PLC0415 - not for --help

    return uri_of_branch(uri, branch, storage_options)


def json_parameter() -> click.Parameter:
    """Return the ``--json`` parameter."""
    return click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document on stdout.")


def storage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--storage-option`` to a decorated command."""
    return _with(command, *storage_parameters())


def json_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` to a decorated command."""
    return _with(command, json_parameter())


def _with(command: Callable[..., Any], *parameters: click.Parameter) -> Callable[..., Any]:
    """Add parameters as click's own decorators do: the command, decorated last, takes them in reverse order."""
    command.__dict__.setdefault("__click_params__", []).extend(parameters)
    return command


class PathText(click.types.StringParamType):
    """Text that shells complete as a path. What else it may be, such as a URI, is left as it is."""

    def __init__(self, kind: str) -> None:
        """Complete paths of that kind: ``dir`` or ``file``."""
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - click's signature
        """The word itself, with the kind by which the shell completes it."""
        return [CompletionItem(incomplete, type=self._kind)]


TABLE = PathText("dir")
FILE = PathText("file")


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
