"""Options and argument types that several commands share."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from memwal_ops.storage.options import parse_options

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """A number of bytes: ``67108864``, ``64MiB``, ``64M`` (binary) or ``64MB`` (decimal)."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes; fails with a usage error."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            self.fail(f"{value!r} is no size; write for example 64MiB, 1GiB or 500MB.", param, ctx)
        try:
            return int(float(match[1]) * _UNITS[match[2].upper()])
        except OverflowError:
            self.fail(f"{value!r} is more than any machine has.", param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]  # see Size
    """A span of time: ``90s``, ``15m``, ``2h``, ``3d``, ``1w``, or ``0``."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """The span; fails with a usage error."""
        if isinstance(value, timedelta):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].lower() not in _SECONDS:
            self.fail(f"{value!r} is no span of time; write for example 90s, 15m, 2h or 3d.", param, ctx)
        if not match[2] and float(match[1]):
            # Seconds or days? What it decides on is deleted.
            self.fail(
                f"{value!r} has no unit; write for example {match[1]}s, {match[1]}m, {match[1]}h or {match[1]}d.",
                param,
                ctx,
            )
        try:
            return timedelta(seconds=float(match[1]) * _SECONDS[match[2].lower()])
        except OverflowError:
            self.fail(f"{value!r} is longer than time can be told here.", param, ctx)


class RegionId(click.ParamType):  # type: ignore[type-arg]  # see Size
    """A region's UUID."""

    name = "ID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> UUID:
        """The UUID; fails with a usage error."""
        if isinstance(value, UUID):
            return value
        try:
            return UUID(str(value))
        except ValueError:
            self.fail(f"{value!r} is no region id (a UUID); memwal-ops inspect URI lists them.", param, ctx)


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
