"""Plain tables, without a MemWAL index and without a primary key: what the jobs show of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import holds, take_hold
from tests.support.run_cli import run_here
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_inspect_shows_rows_and_indexes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=4, index=True)
    made.append(7)
    shown = run_here(capfd, "inspect", made.uri)
    assert shown.code == 0
    assert "plain table, version 6" in shown.out
    assert "It has no log" in shown.out
    document = run_here(capfd, "inspect", made.uri, "--json").document
    assert (document["layout"], document["primary_key"], document["regions"]) == ("none", [], [])
    (index,) = document["indexes"]
    assert (index["uncovered_fragments"], index["uncovered_rows"]) == (1, 7)


def test_verify_finds_a_missing_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=2)
    for more in ((), ("--deep",)):
        assert run_here(capfd, "verify", made.uri, *more, "--json").document["decision"] == "healthy"
    gone = next((tmp_path / "t.lance/data").iterdir())
    gone.unlink()
    found = run_here(capfd, "verify", made.uri, "--json")
    assert found.code == 9
    assert found.document["findings"][0]["place"] == f"data/{gone.name}"


def test_why_names_the_versions_that_keep_a_data_file(tmp_path: Path) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create()
    (first,) = (tmp_path / "t.lance/data").iterdir()
    made.append(10)

    def why(name: str) -> str:
        return run_job(made.uri, "why", target=f"data/{name}").describe()

    assert "needed by the newest version" in why(first.name)
    run_job(made.uri, "compact")
    older = made.dataset.version - 2
    assert f"needed by version {older + 1} and {older} older ones (memwal-ops expire)" in why(first.name)
    left = first.with_name("00" * 12 + ".lance")
    left.write_bytes(b"of a writer that was killed")
    assert "no version refers to it" in why(left.name)


def test_a_version_is_held_and_why_names_the_hold(tmp_path: Path) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=3)
    table = open_table(made.uri)
    taken = take_hold(table, 1, made.hour)
    assert [one.number for one in holds(table)] == [taken.number]
    why = run_job(table, "why", target=f"_versions/{2**64 - 2}.manifest")
    assert f"hold {taken.number}" in why.describe()


def test_nagios_does_not_alarm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create()
    assert run_here(capfd, "check", "--nagios", made.uri).out == "MEMWAL OK - no log to merge\n"


def test_repair_fixes_what_is_safe_and_names_the_rest(tmp_path: Path) -> None:
    """A transaction file is written again; a data file cannot be, and its loss needs a person."""
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=2)
    assert run_job(made.uri, "repair").decision == "nothing_to_repair"
    name = open_table(made.uri).manifest.manifest.transaction_file
    file = tmp_path / "t.lance/_transactions" / name
    data = file.read_bytes()
    file.unlink()
    assert run_job(made.uri, "repair").decision == "planned"
    assert not file.exists()
    assert run_job(made.uri, "repair", apply=True).decision == "repaired"
    assert file.read_bytes() == data
    next((tmp_path / "t.lance/data").iterdir()).unlink()
    before = made.files()
    report = run_job(made.uri, "repair", apply=True)
    assert report.exit_code == 9
    assert "backup" in report.describe()
    assert made.files() == before
