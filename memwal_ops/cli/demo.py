"""``memwal-ops demo``: make a table of a format, maintain it, and prove that no row was lost."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import click

from memwal_ops.cli.printing import echo
from memwal_ops.core.demo import DemoRun
from memwal_ops.core.registry import formats

_SPECS = {name: format_.demo for name, format_ in formats().items() if format_.demo is not None}


_HELP = """Make a table with a writer of its format, maintain it, and prove that nothing was lost.

--layout none makes a table as LanceDB leaves it after months, maintains it beside a writer, and compares sizes and
queries before and after (half a minute). Without it, the table has a log, which is merged.

The table is kept afterwards, for experiments; an existing one is never changed. With --no-merge nothing is maintained,
so that you can try the commands on it.

\b
Examples:
  memwal-ops demo --layout none
  memwal-ops demo
  memwal-ops demo --layout region
  memwal-ops demo --format zeppelin --no-merge --dir /tmp/items"""


@click.command(short_help="Make a table, maintain it, and prove that nothing was lost.", help=_HELP)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(sorted(_SPECS)),
    default="lance",
    show_default=True,
    help="The format of the table.",
)
@click.option(
    "--layout",
    type=click.Choice(sorted({layout for spec in _SPECS.values() for layout in spec.layouts})),
    help="The layout of the table, where its format has several.",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to make the table.  [default: a new temporary folder]",
)
@click.option("--no-merge", is_flag=True, help="Stop before the maintenance.")
def demo(format_name: str, layout: str | None, folder: Path | None, no_merge: bool) -> int:
    """Run the demo of a format."""
    place = folder or Path(tempfile.mkdtemp(prefix="memwal-ops-demo-"))
    for chapter in _SPECS[format_name].steps(DemoRun(place, folder is None, not no_merge, _command()), layout):
        echo(chapter)
    return 0


def _command() -> str:
    """Return how to call this command: by its path if the shell would not find it by its name."""
    called = Path(sys.argv[0])
    program = shutil.which("memwal-ops")
    if called.name != "memwal-ops" or (program is not None and Path(program).samefile(called)):
        return "memwal-ops"
    with contextlib.suppress(ValueError):
        return str(called.absolute().relative_to(Path.cwd()))
    return str(called)
