"""A word of another tool leads to ours: commands, options and arguments that do not exist."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from memwal_ops.cli import main
from memwal_ops.cli.main import cli
from tests.support.run_cli import run_here


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("optimize t.lance", "memwal-ops maintain does that: see memwal-ops maintain --help."),
        ("cleanup-old-versions t.lance", "memwal-ops expire does that: see memwal-ops expire --help."),
        ("maintian t.lance", "Did you mean memwal-ops maintain? See memwal-ops --help."),
        ("data/t.lance", "Give a command before the URI: memwal-ops inspect data/t.lance"),
        ("xyzzy", "See memwal-ops --help."),
        ("memwal.yaml", "Give a command: memwal-ops run --config memwal.yaml"),
        ("run memwal.yaml", "Give the file as an option: memwal-ops run --config memwal.yaml"),
        ("status memwal.yaml", "Give the file as an option: memwal-ops status --config memwal.yaml"),
        ("history t.lance", "Give the table as an option: memwal-ops history --config FILE --table t.lance"),
        ("cost memwal.yaml", "Give the file as an option: memwal-ops cost --config memwal.yaml"),
        ("config memwal.yaml", "Give a command: memwal-ops config check memwal.yaml"),
        ("compact t.lance --apply", "compact acts by itself; --dry-run plans."),
        ("merge t.lance --yes", "merge acts by itself; --dry-run plans."),
        ("gc t.lance --yes", "gc plans by itself; --apply acts."),
        ("gc t.lance --dry-run", "gc plans by itself; --apply acts."),
        ("inspect t.lance --format json", "--json prints one JSON document."),
        ("merge t.lance -v", "The log is an option of all commands: memwal-ops --log-level debug merge ..."),
        ("inspect t.lance --yes", "See memwal-ops inspect --help."),
        ("merge a b", "See memwal-ops merge --help."),
    ],
)
def test_the_remedy(capfd: pytest.CaptureFixture[str], line: str, remedy: str) -> None:
    outcome = run_here(capfd, *line.split(), "--json")
    assert outcome.code == 2
    assert outcome.document["error"]["remedy"] == remedy


def test_what_is_suggested_exists() -> None:
    context = click.Context(cli, info_name="memwal-ops")
    assert {*main._COMMANDS.values()} <= {*cli.list_commands(context)}
    assert not main._COMMANDS.keys() & {*cli.list_commands(context)}
    assert {*main._OPTIONS.values()} <= main._TEXTS.keys()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one table, as far as a listing shows."""
    versions = tmp_path / "orders.lance/_versions"
    versions.mkdir(parents=True)
    (versions / "1.manifest").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("merge", "{0}/orders"), "Did you mean {0}/orders.lance?"),
        (("merge", "{0}/users"), "Check the URI (and --storage-option endpoint, region) for a typo."),
        (("maintain", "{0}"), "Give one of them; memwal-ops scan --database {0} lists what they need."),
        (("scan", "--database", "{0}/orders.lance"), "It is a table itself: memwal-ops scan {0}/orders.lance"),
    ],
)
def test_a_path_beside_a_table(
    capfd: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], remedy: str
) -> None:
    outcome = run_here(capfd, *(part.format(folder) for part in arguments), "--json")
    assert outcome.document["error"]["remedy"] == remedy.format(folder)


def test_a_folder_of_tables_is_no_table_without_needs(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    outcome = run_here(capfd, "scan", str(folder))
    assert outcome.code == 4
    assert outcome.out.startswith("NOT SCANNED: ")
    assert f"memwal-ops scan --database {folder}" in " ".join(outcome.out.split())
