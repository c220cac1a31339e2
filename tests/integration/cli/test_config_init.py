"""``config init``: what it writes is valid, finds the tables, and replaces nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.scheduling.discovery import discover
from tests.support.catalog_server import TOKEN, catalog_server
from tests.support.run_cli import run_here
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], str]:
    def made(name: str) -> str:
        return PlainTable(str(tmp_path / name)).create(rows=2).uri

    return made


def written(capfd: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> Path:
    file = folder / "memwal.yaml"
    outcome = run_here(capfd, "config", "init", *arguments, "--output", str(file))
    assert outcome.code == 0, outcome
    return file


def found(file: Path, environ: dict[str, str] | None = None) -> dict[str, str]:
    return {one.name: one.uri for one in discover(load_settings(str(file), environ or {}).tables).tables}


@pytest.mark.long
def test_a_database(tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Callable[[str], str]) -> None:
    uris = {name: make(f"db/{name}.lance") for name in ("orders", "users")}
    file = written(capfd, tmp_path, "--database", str(tmp_path / "db"))
    assert run_here(capfd, "config", "check", str(file)).code == 0
    assert found(file) == uris
    assert "Finds 2 tables now" in file.read_text()
    assert "  #   orders.lance\n  #   users.lance\n" in file.read_text()
    settings = load_settings(str(file), {})
    assert settings.warnings == ()
    assert {name: settings.tables[0].jobs[name].apply for name in ("merge", "expire", "gc")} == dict.fromkeys(
        ("merge", "expire", "gc"), True
    )
    uris["later"] = make("db/later.lance")
    assert found(file) == uris
    assert run_here(capfd, "run", "--config", str(file), "--once").code == 0


def test_tables_of_one_name_get_names_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Callable[[str], str]
) -> None:
    uris = [make("a/orders.lance"), make("b $x/orders.lance"), make("b $x/users.lance")]
    file = written(capfd, tmp_path, *uris, uris[0])
    assert sorted(found(file).values()) == sorted(uris)
    assert "users" in found(file)


def test_a_catalog_whose_secret_stays_in_the_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Callable[[str], str]
) -> None:
    with catalog_server() as server:
        server.tables["docs"] = make("docs.lance")
        file = written(
            capfd, tmp_path, "--namespace", f"lance+namespace://rest/prod?uri={server.url}",
            "--storage-option", f"namespace.header.Authorization=Bearer {TOKEN}",
            "--storage-option", "aws_secret_access_key=hunter22", "--storage-option", "aws_region=eu",
        )  # fmt: skip
        text = file.read_text()
        assert TOKEN not in text
        assert "hunter22" not in text
        assert "#\n# Set in the environment of the service (systemd: EnvironmentFile=): " in text
        assert yaml.safe_load(text)["defaults"]["storage_options"]["aws_region"] == "eu"
        given = {"HEADER_AUTHORIZATION": f"Bearer {TOKEN}", "AWS_SECRET_ACCESS_KEY": "x"}
        assert [*found(file, given)] == ["docs"]


def test_what_a_configuration_takes_for_a_pattern_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Callable[[str], str]
) -> None:
    bracket = make("a[1].lance")
    assert found(written(capfd, tmp_path, bracket, "--force")) == {"a[1]": bracket}
    make("d[1]/a.lance")
    for arguments in ((make("a?.lance"),), (make("a*.lance"),), ("--database", str(tmp_path / "d[1]"))):
        refused = run_here(capfd, "config", "init", *arguments)
        assert (refused.code, "has a wildcard" in refused.err, refused.out) == (2, True, "")


def test_nothing_is_replaced_without_force(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memwal.yaml"
    file.write_text("mine\n")
    refused = run_here(capfd, "config", "init", "--output", str(file))
    assert (refused.code, "--force" in refused.err, file.read_text()) == (2, True, "mine\n")
    assert run_here(capfd, "config", "init", "--output", str(file), "--force").code == 0
    assert run_here(capfd, "config", "check", str(file)).code == 0
    printed = run_here(capfd, "config", "init", "--json").document
    assert yaml.safe_load(printed["configuration"]) == yaml.safe_load(file.read_text())


@pytest.mark.parametrize("arguments", [("--database", "{}"), ("{}/none.lance",)])
def test_where_there_is_no_table(arguments: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = [one.format(tmp_path) for one in arguments]
    outcome = run_here(capfd, "config", "init", *given, "--output", str(tmp_path / "new.yaml"))
    assert (outcome.code, (tmp_path / "new.yaml").exists()) == (3, False)


def test_more_tables_than_an_entry_finds_by_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(1001):
        (tmp_path / f"db/t{number:04}.lance/_versions").mkdir(parents=True)
        (tmp_path / f"db/t{number:04}.lance/_versions/1.manifest").touch()
    file = written(capfd, tmp_path, "--database", str(tmp_path / "db"))
    assert load_settings(str(file), {}).tables[0].max_tables == 2002
    assert "  #   and 971 more\n" in file.read_text()


def test_the_verdict_of_a_configuration_is_its_first_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memwal.yaml"
    file.write_text(f"tables:\n  - uri: {tmp_path}/a.lance\n")
    good = run_here(capfd, "config", "check", str(file))
    assert good.out.startswith("valid: 1 entry in tables. ")
    file.write_text(f"log_levle: info\ntables:\n  - uri: {tmp_path}/a.lance\n")
    bad = run_here(capfd, "config", "check", str(file))
    assert (bad.code, bad.out.splitlines()[0]) == (50, "invalid: 1 error.")
    assert bad.out.splitlines()[1].startswith(f"{file}:1: error: log_levle: ")
