"""Options and argument types that several commands share."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from memwal_ops.core.regions import is_beginning
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.options import parse_options
from memwal_ops.units import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.table import Table


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """A number of bytes: ``67108864``, ``64MiB``, ``64M`` (binary) or ``64MB`` (decimal)."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes; fails with a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]  # see Size
    """A span of time: ``90s``, ``15m``, ``2h``, ``3d``, ``1w``, or ``0``."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """The span; fails with a usage error."""
        if isinstance(value, timedelta):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class RegionId(click.ParamType):  # type: ignore[type-arg]  # see Size
    """A region's UUID, or the beginning of one; :func:`region_of` says which region it is."""

    name = "ID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same text in lower case; fails with a usage error."""
        try:
            return str(UUID(str(value)))
        except ValueError:
            if is_beginning(str(value).lower()):
                return str(value).lower()
            form = "a UUID, or its first 8 characters or more"
            self.fail(f"{value!r} is no region id ({form}); memwal-ops inspect URI lists them.", param, ctx)


def region_of(table: Table, text: str) -> UUID:
    """The region of what :class:`RegionId` lets pass.

    Raises:
        InvalidUsageError: no region begins so, or several do.
    """
    if not is_beginning(text):
        return UUID(text)
    found = table.regions.beginning(text)
    if found is None:
        raise InvalidUsageError(
            f"No region of {table.location.uri} begins with {text}.", remedy="memwal-ops inspect URI lists them."
        )
    return found


def _storage_options(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    return parse_options(values)


def storage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--storage-option KEY=VALUE``, repeatable."""
    return click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_storage_options,
        help="An option of the store, as pylance takes it (repeatable); for example aws_endpoint=http://host:9000.",
    )(command)


def json_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(command)
