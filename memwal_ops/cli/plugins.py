"""Commands of jobs that other packages register (``memwal_ops.jobs``), beside our own."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import click

from memwal_ops.errors import JobPluginError
from memwal_ops.jobs.registry import GROUP, is_ours, load_job

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def add_commands_of_jobs(group: click.Group) -> None:
    """Add the command of each job of another package; our own names are not given away.

    A package that cannot be imported makes no trouble but to whoever calls its command.
    """
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        if is_ours(entry) or entry.name in group.commands:
            continue
        try:
            command = load_job(entry).command
        except JobPluginError as error:
            command = _broken(entry, error)
        if command is not None:
            group.add_command(command, entry.name)


def _broken(entry: EntryPoint, error: JobPluginError) -> click.Command:
    @click.command(
        entry.name,
        short_help="(cannot be used: see its error)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def broken() -> None:
        raise error

    return broken
