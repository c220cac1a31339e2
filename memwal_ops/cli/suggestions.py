"""What to give instead of a command, an option or an argument that does not exist: the remedy of a usage error.

The words are those of other tools. An option is looked up among those of the command, so that one line of a table
serves all commands.
"""

from __future__ import annotations

import difflib
import re
import shlex
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMMANDS: Mapping[str, str] = {
    "clean": "gc",
    "cleanup": "expire",
    "cleanup_old_versions": "expire",
    "compact_files": "compact",
    "describe": "inspect",
    "explain": "why",
    "fsck": "verify",
    "index": "catchup",
    "info": "inspect",
    "list": "scan",
    "ls": "scan",
    "optimize": "maintain",
    "optimize_indices": "catchup",
    "prune": "expire",
    "reindex": "catchup",
    "serve": "run",
    "show": "inspect",
    "start": "run",
    "stats": "inspect",
    "vacuum": "expire",
    "validate": "verify",
}
_OPTIONS: Mapping[str, str] = {
    "--confirm": "--apply",
    "--execute": "--apply",
    "--force": "--apply",
    "--format": "--json",
    "--no-dry-run": "--apply",
    "--output": "--json",
    "--plan": "--dry-run",
    "--yes": "--apply",
    "-f": "--apply",
    "-n": "--dry-run",
    "-o": "--json",
    "-y": "--apply",
}
_TEXTS: Mapping[str, str] = {
    "--apply": "{command} plans by itself; --apply acts.",
    "--dry-run": "{command} acts by itself; --dry-run plans.",
    "--json": "--json prints one JSON document.",
}
_OPPOSITES: Mapping[str, str] = {"--apply": "--dry-run", "--dry-run": "--apply"}
_LOG_OPTIONS = frozenset({"--debug", "--verbose", "-v", "-vv"})

_NO_COMMAND = re.compile(r"No such command '(.+?)'")
_EXTRA = re.compile(r"Got unexpected extra arguments? \((\S+?)\)")
_FILES = (".yaml", ".yml")


def suggestion(error: click.UsageError) -> str | None:
    """Return what to give instead, for the remedy of the error; None if nothing is known."""
    context = error.ctx
    if context is None:
        return None
    if isinstance(error, click.NoSuchOption):
        return _instead_of_option(error.option_name, context)
    if match := _NO_COMMAND.search(error.message):
        return _instead_of_command(match[1], context)
    if match := _EXTRA.search(error.message):
        return _instead_of_argument(match[1], context)
    return None


def _instead_of_option(given: str, context: click.Context) -> str | None:
    known = {name for parameter in context.command.params for name in parameter.opts}
    wanted = _OPTIONS.get(given, given)
    for option in (wanted, _OPPOSITES.get(wanted)):
        if option in known and option in _TEXTS:
            return _TEXTS[option].format(command=context.command.name)
    if given in _LOG_OPTIONS:
        return f"The log is an option of all commands: memwal-ops --log-level debug {context.command.name} ..."
    return None


def _instead_of_command(given: str, context: click.Context) -> str | None:
    group, path = context.command, context.command_path
    assert isinstance(group, click.Group)  # noqa: S101 - only a group has commands
    known = group.list_commands(context)
    meant = _COMMANDS.get(given.lower().replace("-", "_"))
    if meant in known:
        return f"{path} {meant} does that: see {path} {meant} --help."
    if given.endswith(_FILES):
        return (
            f"Give a command: {path} {'check' if 'check' in known and 'run' not in known else 'run --config'} {given}"
        )
    if "/" in given and "inspect" in known:
        return f"Give a command before the URI: {path} inspect {shlex.quote(given)}"
    close = difflib.get_close_matches(given, known, 1)
    return f"Did you mean {path} {close[0]}? See {path} --help." if close else None


def _instead_of_argument(given: str, context: click.Context) -> str | None:
    options = {name for parameter in context.command.params for name in parameter.opts}
    if "--config" in options:
        return f"Give the file as an option: {context.command_path} --config {shlex.quote(given)}"
    return None
