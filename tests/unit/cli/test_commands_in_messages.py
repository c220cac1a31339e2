"""Commands that messages name, such as remedies, have only options that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

import memwal_ops
from memwal_ops.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMAND = re.compile(r"memwal-ops ([a-z-]+)((?: (?!memwal-ops)[^\s.;:,)]+(?:\.[a-z]+)?)*)")
_OPTION = re.compile(r"--?[a-z][a-z-]*")


def texts(tree: ast.AST) -> Iterator[str]:
    """All strings of a module; of an f-string its constant parts with X between them."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            yield "".join(str(value.value) if isinstance(value, ast.Constant) else "X" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


@cache
def command_of(name: str) -> click.Command | None:
    """Made once: it takes longer than all else here."""
    return cli.get_command(click.Context(cli), name)


def unknown_options(text: str) -> Iterator[str]:
    """The commands in a text with an option that they do not have; what is no command is not looked at."""
    context = click.Context(cli)
    for match in _COMMAND.finditer(text):
        command, words = command_of(match[1]), match[2].split()
        while isinstance(command, click.Group) and words:
            command = command.get_command(context, words.pop(0))
        if command is not None and not isinstance(command, click.Group):
            known = {"--help", *(name for parameter in command.params for name in parameter.opts)}
            options = (found[0] for word in words if (found := _OPTION.match(word)) is not None)
            yield from (f"{match[0]}: {option}" for option in options if option not in known)


def test_options_in_messages_exist() -> None:
    assert [*unknown_options("Run memwal-ops catchup URI --rebuild --apply: it builds.")]
    assert [*unknown_options("Run memwal-ops lease break URI --by NAME.")]
    root = Path(memwal_ops.__file__).parent
    found = {
        f"{path.relative_to(root)}: {fault}"
        for path in root.rglob("*.py")
        if "memwal-ops" in (source := path.read_text(encoding="utf-8"))
        for text in texts(ast.parse(source))
        if "memwal-ops" in text
        for fault in unknown_options(text)
    }
    assert not found
