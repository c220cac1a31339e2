"""The command line: one group, one way for every error to end.

A command prints its result on stdout and raises; this module turns what it raised into a message
on stderr and the exit code of its class. With ``--json`` the error is a document on stdout too, so
that a script never has to parse prose.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click
import structlog

from memwal_ops import log as logging_setup
from memwal_ops.cli import process
from memwal_ops.cli.catchup import catchup
from memwal_ops.cli.commands import Commands
from memwal_ops.cli.compact import compact
from memwal_ops.cli.demo import demo
from memwal_ops.cli.expire import expire
from memwal_ops.cli.gc import gc
from memwal_ops.cli.hold import hold
from memwal_ops.cli.inspect import inspect
from memwal_ops.cli.lease import lease
from memwal_ops.cli.maintain import maintain
from memwal_ops.cli.merge import merge
from memwal_ops.cli.probe import probe
from memwal_ops.cli.snapshot import snapshot
from memwal_ops.cli.why import why
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, runbook
from memwal_ops.storage.redaction import redact
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNEXPECTED = 1
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_ENDED = "{}; nothing is half-written: what a merge had landed stays, and running it again goes on from there."


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="memwal-ops")
@click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="WARNING",
    show_default=True,
    envvar="MEMWAL_OPS_LOG_LEVEL",
    help="Least severe log events to show on stderr.",
)
def cli(log_level: str) -> None:
    """Maintain Lance tables with MemWAL: see what waits, merge it, prove it.

    Try it without a table of your own: memwal-ops demo
    """
    process.prepare()
    logging_setup.configure(level=log_level.upper(), redact=redact)


cli.add_command(catchup)
cli.add_command(compact)
cli.add_command(demo)
cli.add_command(expire)
cli.add_command(gc)
cli.add_command(hold)
cli.add_command(inspect)
cli.add_command(lease)
cli.add_command(maintain)
cli.add_command(merge)
cli.add_command(probe)
cli.add_command(snapshot)
cli.add_command(why)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the code of what happened."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        outcome = cli.main(args=arguments, prog_name="memwal-ops", standalone_mode=False)
    except (click.exceptions.Abort, process.Terminated) as ended:
        terminated = isinstance(ended, process.Terminated)
        click.echo(_ENDED.format("Terminated" if terminated else "Interrupted"), err=True)
        return process.Terminated.exit_code if terminated else _INTERRUPTED
    except click.ClickException as error:
        if "--json" in arguments:
            # click's own text names the usage too; a script gets the sentence.
            _document(InvalidUsageError(error.format_message()))
        error.show()
        # Without any argument a group shows its help: there is nothing to mend.
        if not isinstance(error, click.exceptions.NoArgsIsHelpError):
            _see(error.exit_code)
        return error.exit_code
    except MemwalOpsError as error:
        _report(error, as_json="--json" in arguments)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the last stop: whatever came this far ends as a message and a code
        if not structlog.is_configured():  # a command that cannot even be loaded; stdout belongs to results
            logging_setup.configure(level="WARNING", redact=redact)
        structlog.get_logger(__name__).exception("unexpected_error")
        wrapped = MemwalOpsError(redact(f"Unexpected {type(error).__name__}: {error}"))
        _report(wrapped, as_json="--json" in arguments)
        return _UNEXPECTED
    return outcome if isinstance(outcome, int) else 0


def _report(error: MemwalOpsError, *, as_json: bool) -> None:
    if as_json:
        _document(error)
    click.echo(f"Error ({error.reason}, exit code {error.exit_code}): {redact(str(error))}", err=True)
    click.echo(f"  {redact(error.remedy)}", err=True)
    _see(error.exit_code)


def _see(exit_code: int) -> None:
    page = runbook(exit_code)
    if page is not None:
        click.echo(f"  See {page}", err=True)


def _document(error: MemwalOpsError) -> None:
    said = {"message": redact(str(error)), "remedy": redact(error.remedy)}
    document = {"reason": error.reason, **said, "exit_code": error.exit_code, "runbook": runbook(error.exit_code)}
    click.echo(json.dumps({"error": document}, indent=2))
