"""Write the manual page ``memwal-ops.1`` from the commands' own help."""

from __future__ import annotations

import argparse
import inspect
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memwal_ops import errors
from memwal_ops.cli.main import cli
from memwal_ops.version import __version__
from tools.build_docs import leaves

if TYPE_CHECKING:
    from collections.abc import Iterator


def page(epoch: int) -> str:
    """Return the page in man(7)'s macros; ``epoch``: its date, in seconds since 1970."""
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    return "\n".join([*_head(day), *_commands(), *_exit_codes()]) + "\n"


def _head(day: str) -> Iterator[str]:
    yield f'.TH MEMWAL-OPS 1 "{day}" "memwal-ops {__version__}" "User Commands"'
    yield ".SH NAME"
    yield rf"memwal-ops \- {_escaped(_first_sentence(cli.help or '').rstrip('.'))}"
    yield ".SH SYNOPSIS"
    yield r".B memwal-ops"
    yield _escaped("[OPTIONS] COMMAND [ARGUMENTS] ...")
    yield ".SH DESCRIPTION"
    yield from _paragraphs(cli.help or "")
    yield ".SH OPTIONS"
    with click.Context(cli, info_name="memwal-ops") as context:
        yield from _options(cli, context)


def _commands() -> Iterator[str]:
    yield ".SH COMMANDS"
    with click.Context(cli, info_name="memwal-ops") as root:
        for name in cli.list_commands(root):
            command = cli.get_command(root, name)
            if command is None:
                continue
            for path, one in leaves(name, command, root):
                with click.Context(one, info_name=path) as context:
                    arguments = [each.make_metavar(context) for each in one.params if isinstance(each, click.Argument)]
                    yield f".SS {_escaped(' '.join(['memwal-ops', path, *arguments]))}"
                    yield from _paragraphs(one.help or "")
                    yield from _options(one, context)


def _exit_codes() -> Iterator[str]:
    yield ".SH EXIT STATUS"
    yield from (".TP", ".B 0", "Done.")
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.MemwalOpsError)]
    for error in sorted({*found}, key=lambda one: one.exit_code):
        yield from (".TP", f".B {error.exit_code}", _escaped(f"{error.reason}: {_first_sentence(error.__doc__ or '')}"))


def _paragraphs(text: str) -> Iterator[str]:
    """Each paragraph; lines that the help keeps as they are stay so."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield from (".PP", ".nf", *map(_escaped, paragraph.removeprefix("\b\n").splitlines()), ".fi")
        else:
            yield from (".PP", _escaped(" ".join(paragraph.split())))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None:
            yield from (".TP", f".B {_escaped(record[0])}", _escaped(record[1]))


def _first_sentence(text: str) -> str:
    """Without reStructuredText's marks, and the numbers of the specification's statements."""
    sentence = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.sub(r" \(S\d-[^)]*\)", "", sentence.replace("``", ""))


def _escaped(text: str) -> str:
    """Text that troff prints as it is: no escape, no request at the start of a line, hyphens that can be copied."""
    plain = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain


def main() -> None:
    """Write the page into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--epoch", type=int, default=int(time.time()))
    given = parser.parse_args()
    given.file.parent.mkdir(parents=True, exist_ok=True)
    given.file.write_text(page(given.epoch), encoding="utf-8")


if __name__ == "__main__":
    main()
