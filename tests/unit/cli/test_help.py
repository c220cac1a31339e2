"""The help of each command fits a screen and has two examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.testing import CliRunner

from memwal_ops.cli.commands import _SECTIONS
from memwal_ops.cli.main import cli
from memwal_ops.core.options import describe
from memwal_ops.core.registry import all_job_specs

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES, COLUMNS = 52, 100


def paths(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield path
        return
    with command.make_context("memwal-ops", [], resilient_parsing=True) as context:
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from paths(inner, (*path, name))


def test_the_help_of_each_command() -> None:
    for path in ((), *paths(cli)):
        shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=COLUMNS)
        assert shown.exit_code == 0, path
        lines = shown.output.splitlines()
        assert len(lines) <= LINES, path
        examples = [line for line in lines if line.startswith(" ".join(["    memwal-ops", *path]))]
        assert len(examples) >= 2, lines


def test_the_help_for_tables_of_another_format() -> None:
    """Its own words and its own options; what another format has is not there."""
    shown = CliRunner().invoke(cli, ["merge", "--help-for", "zeppelin"], terminal_width=COLUMNS).output
    assert "fencing token" in shown
    assert "--clusters" in shown
    assert "(zeppelin)" not in shown
    assert "--spark-above" not in shown
    refused = CliRunner().invoke(cli, ["merge", "--help-for", "iceberg"])
    assert refused.exit_code == 2


def test_the_help_has_the_default_of_each_format() -> None:
    different = []
    with cli.make_context("memwal-ops", [], resilient_parsing=True) as context:
        for job, specs in all_job_specs().items():
            command = cli.get_command(context, job)
            assert command is not None
            shown = {parameter.name: getattr(parameter, "help", None) for parameter in command.params}
            first: dict[str, str | None] = {}
            for name, spec in specs.items():
                for option in describe(spec.options):
                    default = first.setdefault(option.name, option.default_text())
                    if option.command_line and option.default_text() not in {None, default}:
                        assert f"; {name}: {option.default_text()}" in (shown[option.name] or ""), job
                        different.append((job, option.name, name))
    assert ("gc", "orphan_min_age", "zeppelin") in different


def test_the_commands_are_grouped_on_one_screen() -> None:
    """A line for each, at the width of a small terminal; every built-in command is in one section."""
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    with cli.make_context("memwal-ops", [], resilient_parsing=True) as context:
        names = cli.list_commands(context)
    listed = [name for section in _SECTIONS.values() for name in section]
    assert sorted(listed) == sorted(names)
    assert [
        line.split()[0] for line in shown.splitlines() if line.startswith("  ") and line.split()[0] in names
    ] == listed
    assert "Other packages" not in shown
    assert len(shown.splitlines()) <= 55
