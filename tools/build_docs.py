"""Make the site's page of all commands.

``--check``: options without a help text, references that lead nowhere, pages whose commands no test runs, remedies that
name no command.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.main import cli
from memwal_ops.core.options import Option, ValueType, describe
from memwal_ops.core.registry import all_job_specs
from tools.registrations import use_registrations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.job import JobSpec

PAGE = Path("docs/cli.md")
_BUILT = Path(__file__).resolve().parent.parent / "build" / "cli.md"
_HEAD = """# Commands

Made from the commands' own options. [jobs.md](jobs.md) explains what the jobs do;
[runbooks/README.md](../runbooks/README.md#you-have-an-exit-code) has the exit codes.
"""
_JOBS = """## Jobs

Each of these commands takes a table's URI, `--json` (one document on stdout) and `--storage-option KEY=VALUE`
(repeatable).

The second column is the name in Python and below `options` in a configuration file; an option of a step of `maintain`
goes into a mapping there (`gc: {max_deletes: 1000}` for `gc.max_deletes`). Texts such as `256MiB` and `15m`
mean the same everywhere.
"""
_OTHERS = """## Other commands

`memwal-ops --log-level debug COMMAND ...` shows more on stderr.
"""
_UNITS = {
    ValueType.SIZE: "size",
    ValueType.DURATION: "duration",
    ValueType.COUNT: "whole number",
    ValueType.NUMBER: "number",
}


def page() -> str:
    """The whole page, with the jobs of pyproject.toml."""
    use_registrations()
    jobs = all_job_specs()
    parts = [_HEAD, _JOBS]
    for name, specs in sorted(jobs.items()):
        parts.append("\n".join(_section(name, specs)))
    parts.append(_OTHERS)
    of_jobs = {spec.command or spec.name for specs in jobs.values() for spec in specs.values()}
    with click.Context(cli, info_name="memwal-ops") as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            if name not in of_jobs and command is not None:
                parts += ["\n".join(_command(one, path)) for path, one in leaves(name, command, context)]
    return "\n".join(parts)


def leaves(path: str, command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group, each with its words; of any other command, itself."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        if inner is not None:
            yield from leaves(f"{path} {name}", inner, context)


def _command(command: click.Command, path: str) -> Iterator[str]:
    """A command that is no job, as its ``--help`` describes it."""
    with click.Context(command, info_name=path) as context:
        arguments = [one.make_metavar(context) for one in command.params if isinstance(one, click.Argument)]
        options = [one.get_help_record(context) for one in command.params if isinstance(one, click.Option)]
    yield f"### {path}\n"
    yield f"`{' '.join(['memwal-ops', path, *arguments])}`\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield "```\n" + paragraph.removeprefix("\b\n") + "\n```\n"
        else:
            yield " ".join(paragraph.split()) + "\n"
    if options:
        yield "| option | |\n|---|---|"
        yield from (f"| `{flags}` | {text} |" for flags, text in filter(None, options))
        yield ""


def _section(name: str, specs: Mapping[str, JobSpec]) -> Iterator[str]:
    first = next(iter(specs.values()))
    yield f"### {name}\n"
    yield first.summary + "\n"
    for format_name, spec in specs.items():
        options = [*_rows(spec)]
        if len(specs) > 1:
            yield f"On {format_name} tables:\n"
        if options:
            yield "| option | in Python and files | value | default | |\n|---|---|---|---|---|"
            yield from options
            yield ""
    if any(spec.from_export for spec in specs.values()):
        yield "`--from FILE` reads the table from a file of `export-support`, instead of a URI.\n"
    if any(spec.deletes for spec in specs.values()):
        yield "Without `--apply` it prints its plan and changes nothing.\n"
    elif not first.reads_only:
        yield "`--dry-run` prints what it would do and changes nothing.\n"


def _rows(spec: JobSpec) -> Iterator[str]:
    for option in describe(spec.options):
        if option.group is not None:
            for inner in describe(option.group):
                if inner.name in option.flat:
                    yield _row(inner, f"{option.name}.{inner.name}")
        else:
            yield _row(option, option.name)


def _row(option: Option, key: str) -> str:
    flags = f"`{option.flags}`" if option.command_line and not option.positional else "(argument)"
    if not option.command_line:
        flags = ""
    value = ", ".join(f"`{one}`" for one in option.choices) or _UNITS.get(option.kind, option.kind.value)
    if option.minimum is not None and option.kind in {ValueType.COUNT, ValueType.NUMBER}:
        value += f" from {option.minimum:g}"
    default = option.default_text()
    shown = "" if default is None or option.kind is ValueType.FLAG else f"`{default}`"
    return f"| {flags} | `{key}` | {value} | {shown} | {option.help} |"


_PACKAGE = Path(__file__).resolve().parent.parent / "memwal_ops"
_REFERENCE = re.compile(r":(?:mod|func|class|meth|data|attr|exc):`~?([\w.]+)`")


def lost_references() -> Iterator[str]:
    """References of docstrings to what is neither in their module nor, by its whole path, in another one."""
    texts = {
        ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(_PACKAGE.rglob("*.py"))
    }
    names = {module: _names(text) for module, text in texts.items()}
    for module, text in texts.items():
        for target in _REFERENCE.findall(text):
            owner, _, name = target.rpartition(".")
            is_elsewhere = target in texts or any(
                name in names.get(one, ()) for one in (owner, owner.rpartition(".")[0])
            )
            if not is_elsewhere and not {target.split(".")[0], target} & (names[module] | {*dir(builtins)}):
                yield f"{module}: {target}"


def _names(text: str) -> set[str]:
    """What a module defines or imports, and what its classes define."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add((alias or name).split(".")[0])
    return names


#: What runs the commands of a page: tests/support/runbook.py, and what drills make of it.
_RUNS = re.compile(r"\b(commands|steps|follow|follow_until|run_line|shell|Page|blocks?|drill)\(|\bdrill: ")
_SHOWN = re.compile(r"^```(sh|python)$", re.MULTILINE)
_TOLD = re.compile(r"memwal-ops ([a-z][a-z-]*(?: [a-z]+)?)((?: (?!memwal)(?:--[a-z][a-z-]*|[\w./:]+))*)")


def unfollowed(root: Path = _PACKAGE.parent) -> Iterator[str]:
    """Pages of runbooks/ and docs/ that show commands which no test runs.

    A page of an error is followed by a test of its name, one of an alert by the drill of that alert; any other page by
    a test that names it, and runs what pages show. That all of a page's commands are run, these tests check themselves.
    """
    drills = [text for path in (root / "tests").rglob("*.py") if _RUNS.search(text := path.read_text())]
    for page_ in sorted([*(root / "runbooks").rglob("*.md"), *(root / "docs").rglob("*.md")]):
        if not _SHOWN.search(page_.read_text()):
            continue
        wanted = rf"[\"/]{re.escape(page_.name)}\""
        if page_.parent.name == "errors":
            wanted = rf"\bdef test_{re.escape(page_.stem.replace('-', '_', 1))}\("
        if page_.parent.name == "alerts":
            wanted = rf"\b{re.escape(page_.stem)}\b"
        if not any(re.search(wanted, text) for text in drills):
            yield str(page_.relative_to(root))


def unknown_commands(root: Path = _PACKAGE) -> Iterator[str]:
    """Commands in the texts of the package, remedies above all, that do not exist, or do not have that option."""
    options: dict[str, set[str]] = {}
    with click.Context(cli, info_name="memwal-ops") as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            for path, one in leaves(name, command, context) if command else ():
                options[path] = {flag for each in one.params for flag in (*each.opts, *each.secondary_opts)} | {
                    "--help"
                }
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            for words, rest in _TOLD.findall(text):
                known = options.get(words, options.get(words.split()[0]))
                flags = {flag for flag in rest.split() if flag.startswith("--")}
                # Without a command's arguments, the name of the program begins a sentence.
                if flags - known if known is not None else flags or rest.startswith(" URI"):
                    yield f"{file.relative_to(root)}: memwal-ops {words}{rest}"


def main() -> None:
    """Entry of ``make docs``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        _BUILT.parent.mkdir(exist_ok=True)
        _BUILT.write_text(text, encoding="utf-8")
        print(_BUILT)
    elif unexplained := [line for line in text.splitlines() if re.search(r"^\| `.*\|\s*(None)?\s*\|$", line)]:
        sys.exit("\n".join(["Options without a help text:", *unexplained]))
    elif lost := [*lost_references()]:
        sys.exit("\n".join(["References that lead nowhere:", *lost]))
    elif alone := [*unfollowed()]:
        sys.exit("\n".join(["Pages with commands that no test runs (tests/system/drills):", *alone]))
    elif unknown := [*unknown_commands()]:
        sys.exit("\n".join(["Texts with commands that do not exist:", *unknown]))


if __name__ == "__main__":
    main()
