"""``memwal-ops probe``: before a table is put somewhere, and where something is wrong with a store."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from memwal_ops.cli import doctor as command
from tests.support.run_cli import contents, run_here


def test_a_folder_that_is_no_table_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = run_here(capfd, "probe", str(tmp_path), "--json")
    assert (found.code, found.document) == (
        0,
        {
            "uri": str(tmp_path),
            "conditional_writes": "enforced",
            "compare_and_swap": "unsupported",
            "clock_skew_seconds": 0.0,
        },
    )
    assert contents(str(tmp_path)) == {}
    said = run_here(capfd, "probe", str(tmp_path)).out
    swap = "Compare-and-swap is not supported; Lance tables do not need it."
    assert said == f"{tmp_path}: put-if-absent is enforced. {swap} Its clock agrees with this machine's.\n"


def test_nothing_is_created_where_nothing_exists(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(capfd, "probe", str(tmp_path / "typo"), "--json").document["error"]["reason"] == "table_not_found"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("hours", "word"), [(-1, "ahead of"), (1, "behind")])
def test_a_store_whose_clock_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, hours: int, word: str
) -> None:
    monkeypatch.setattr(command, "store_clock", lambda _: datetime.now(UTC) + timedelta(hours=hours))
    assert f"This machine's clock is 3,600 s {word} its clock." in run_here(capfd, "probe", str(tmp_path)).out
    skew = run_here(capfd, "probe", str(tmp_path), "--json").document["clock_skew_seconds"]
    assert abs(skew + 3600 * hours) < 1


def test_a_file_system_without_hard_links(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("memwal_ops.storage.probe._proven", set())
    assert run_here(capfd, "probe", str(tmp_path)).code == 23
    assert contents(str(tmp_path)) == {}
