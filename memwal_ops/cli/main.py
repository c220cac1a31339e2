"""The entry point of the command line: run a command, and report errors in one way.

A command prints its result on stdout and raises errors; this module prints an error on stderr and exits with the exit
code of its class. With ``--json`` the error is also a document on stdout, so that scripts need not parse prose. Of an
error of usage, the remedy has what to give instead: the words of other tools are known.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

import click
import structlog

from memwal_ops import errors, log as logging_setup
from memwal_ops.cli import printing, process
from memwal_ops.cli.commands import Commands
from memwal_ops.storage.options import redact
from memwal_ops.version import __version__

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
    if "--config" not in options:
        return None
    if "--table" in options and not given.endswith(_FILES):
        return f"Give the table as an option: {context.command_path} --config FILE --table {shlex.quote(given)}"
    return f"Give the file as an option: {context.command_path} --config {shlex.quote(given)}"


_UNEXPECTED = 1
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_ENDED = "{}; nothing is half-written: what the command published stays, and running it again continues from there."


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="memwal-ops")
@click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="WARNING",
    metavar="LEVEL",
    envvar="MEMWAL_OPS_LOG_LEVEL",
    help="Logs on stderr, from DEBUG, INFO, WARNING (default) or ERROR on.",
)
def cli(log_level: str) -> None:
    """Keep LanceDB, Lance (also MemWAL), Zeppelin and LM-DiskANN tables fast and small, beside writers.

    \b
    Examples:
      memwal-ops scan --database /data/lancedb
      memwal-ops maintain /data/lancedb/docs.lance --dry-run
    """  # noqa: D301 - all commands fit a screen, line by line; click keeps the lines of a block that begins so
    process.prepare()
    logging_setup.configure(level=log_level.upper(), redact=redact)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        outcome = cli.main(args=arguments, prog_name="memwal-ops", standalone_mode=False)
    except (click.exceptions.Abort, process.Terminated) as ended:
        terminated = isinstance(ended, process.Terminated)
        printing.echo(_ENDED.format("Terminated" if terminated else "Interrupted"), err=True)
        return process.Terminated.exit_code if terminated else _INTERRUPTED
    except click.ClickException as error:
        if "--json" in arguments:
            # click's own text contains the usage too; a script gets only the sentence.
            printing.echo_json(printing.error_document(_usage(error)))
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()  # without arguments a group shows its help: this is not an error
        else:
            _report(_usage(error), as_json=False)
        return error.exit_code
    except errors.MemwalOpsError as error:
        _report(error, as_json="--json" in arguments)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - every error is reported by a message and an exit code
        if not structlog.is_configured():  # the command could not be loaded; logs must not go to stdout
            logging_setup.configure(level="WARNING", redact=redact)
        structlog.get_logger(__name__).exception("unexpected_error")
        wrapped = errors.MemwalOpsError(redact(f"Unexpected {type(error).__name__}: {error}"))
        _report(wrapped, as_json="--json" in arguments)
        return _UNEXPECTED
    return outcome if isinstance(outcome, int) else 0


def _usage(error: click.ClickException) -> errors.InvalidUsageError:
    """Convert click's error to an InvalidUsageError; the remedy has what to give instead, or names the help."""
    context, instead = None, None
    message = error.format_message()
    if isinstance(error, click.UsageError):
        context, instead = error.ctx, suggestion(error)
        message = error.message if instead else message  # without click's own suggestions
    path = context.command_path if context is not None else "memwal-ops"
    return errors.InvalidUsageError(" ".join(message.split()), remedy=instead or f"See {path} --help.")


def _report(error: errors.MemwalOpsError, *, as_json: bool) -> None:
    if as_json:
        printing.echo_json(printing.error_document(error))
    # Indented, so that the lines of a store's message do not look like output of memwal-ops.
    message, remedy = (redact(text).replace("\n", "\n  ") for text in (str(error), error.remedy))
    printing.echo(f"Error ({error.reason}, exit code {error.exit_code}): {message}", err=True)
    printing.echo(f"  {printing.with_pages(remedy)}", err=True)
    page = errors.runbook(error.exit_code, error.reason)
    if page is not None:
        printing.echo(f"  See {printing.page_path(page)}", err=True)
