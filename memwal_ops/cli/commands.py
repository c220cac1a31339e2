"""The group of all commands. Those of the supervisor, and of other packages, are imported when they are called.

What a command imports, every command would wait for: a merge by hand needs no scheduler and no HTTP server.
"""

from __future__ import annotations

import importlib
import signal
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import click

from memwal_ops.errors import JobPluginError
from memwal_ops.jobs.registry import GROUP, is_ours, load_job

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

_LATE = {
    "check": "memwal_ops.cli.check:check",
    "config": "memwal_ops.cli.config:config",
    "history": "memwal_ops.cli.history:history",
    "status": "memwal_ops.cli.status:status",
    "run": "memwal_ops.cli.run:run",
}


class Commands(click.Group):
    """Commands that were added, those of the supervisor, and those of jobs that other packages register."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in order."""
        theirs = [name for name in self._of_packages() if self.get_command(ctx, name) is not None]
        return sorted({*super().list_commands(ctx), *_LATE, *theirs})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name; a package cannot take one of ours."""
        known = super().get_command(ctx, cmd_name)
        if known is not None:
            return known
        if cmd_name in _LATE:
            module, _, name = _LATE[cmd_name].partition(":")
            found = getattr(importlib.import_module(module), name)
            assert isinstance(found, click.Command)  # noqa: S101 - ours
            return found
        entry = self._of_packages().get(cmd_name)
        return None if entry is None else _of_job(entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The service reads its file anyway when it starts: a reload that comes too early must not end it."""
        if args[:1] == ["run"]:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return super().resolve_command(ctx, args)

    def _of_packages(self) -> Mapping[str, EntryPoint]:
        entries = (entry for entry in entry_points(group=GROUP) if not is_ours(entry))
        return {entry.name: entry for entry in entries if entry.name not in {*self.commands, *_LATE}}


def _of_job(entry: EntryPoint) -> click.Command | None:
    """A job's command, if it has one. One that cannot be imported makes trouble to whoever calls it, and no other."""
    try:
        return load_job(entry).command
    except JobPluginError as error:
        return _broken(entry, error)


def _broken(entry: EntryPoint, error: JobPluginError) -> click.Command:
    @click.command(
        entry.name,
        short_help="(cannot be used: call it to see why)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def broken() -> None:
        raise error

    return broken
