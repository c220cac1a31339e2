"""repair on a table with the legacy MemWAL index: rows that a state commit dropped come back."""

from __future__ import annotations

from pathlib import Path

from memwal_ops import run_job
from tests.support.legacy_migrations import filled
from tests.support.run_cli import contents
from tests.support.tables.legacy_table import base_rows, empty_by_state_commit, states_of


def test_an_emptied_version_gets_its_rows_back(tmp_path: Path) -> None:
    table = filled(str(tmp_path / "t.lance"))
    rows, states = base_rows(table.uri), states_of(table.uri)
    empty_by_state_commit(table.uri)
    assert run_job(table.uri, "verify").to_json()["counts"]["emptied"] == 1
    before = contents(table.uri)
    plan = run_job(table.uri, "repair").to_json()
    assert contents(table.uri) == before
    fixed = [fix for fix in plan["fixes"] if "state commit" in fix["fix"]]
    assert len(fixed) == 1
    done = run_job(table.uri, "repair", apply=True).to_json()
    (fix,) = [fix for fix in done["fixes"] if "state commit" in fix["fix"]]
    assert fix["outcome"] == "repaired"
    assert (base_rows(table.uri), states_of(table.uri)) == (rows, states)
    assert "emptied" not in run_job(table.uri, "verify").to_json()["counts"]
    assert run_job(table.uri, "repair", apply=True, undo=fix["quarantine"]).decision == "undone"
    assert base_rows(table.uri) == {}
    assert states_of(table.uri) == states


def test_without_the_version_that_has_the_rows_a_person_decides(tmp_path: Path) -> None:
    table = filled(str(tmp_path / "t.lance"))
    version = empty_by_state_commit(table.uri)
    for path in Path(table.uri, "_versions").glob("*.manifest"):
        if path.stem not in {str(version), f"{2**64 - 1 - version:020}"}:
            path.unlink()
    report = run_job(table.uri, "repair", apply=True)
    assert report.exit_code == 9
    assert "emptied" in {one["check"] for one in report.to_json()["decisions"]}
    assert not [fix for fix in report.to_json()["fixes"] if "state commit" in fix["fix"]]
