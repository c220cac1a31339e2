"""``memwal-ops report``: one file that needs nothing else, and that replaces no other file."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from tests.support.gc_options import AT_ONCE_FLAGS
from tests.support.run_cli import contents, run_here
from tests.support.tables.damage import remove_generation
from tests.support.tables.gc_tables import free, grow, make, merged
from tests.support.tables.lsm_table import LsmTable


@pytest.fixture
def made(tmp_path: Path) -> LsmTable:
    return make(tmp_path)


def test_it_is_one_file_with_the_history(made: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    merged(made)
    grow(made)
    before = contents(made.uri)
    file = tmp_path / "report.html"
    assert run_here(capfd, "report", made.uri, "-o", str(file)).out.startswith(f"written: {file} (")
    assert contents(made.uri) == before
    page = file.read_text()
    assert '>memwal-ops merge</td><td role="cell" data-l="operation">update</td>' in page
    assert '<td role="cell" data-l="state">waiting</td>' in page
    assert '<td role="cell" data-l="state">merged</td>' in page
    assert "Storage, and what holds it" in page
    assert 'http-equiv="refresh"' not in page
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(one.startswith("data:") for one in addresses)
    assert "script" not in re.findall(r"<([a-z]+)", page)
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".report")] == []


def test_stdout_and_json(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    printed = run_here(capfd, "report", made.uri, "-o", "-")
    assert printed.out.startswith("<!doctype html>")
    assert printed.out.rstrip().endswith("</html>")
    document = run_here(capfd, "report", made.uri, "--json", "--limit", "1").document
    assert set(document) == {
        *("uri", "version", "backlog", "blocked", "findings", "leases", "history", "storage", "notes")
    }
    assert [one["revision"] for one in document["history"]["revisions"]] == [document["version"]]
    assert len([one for one in document["history"]["log"] if one["state"] == "waiting"]) == 6


def test_a_file_that_is_no_report_is_kept(made: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for content in ("my notes", "<!doctype html><p>mine", ""):
        other = tmp_path / "other.html"
        other.write_text(content)
        refused = run_here(capfd, "report", made.uri, "-o", str(other))
        assert refused.code == 2
        assert "is not a report of memwal-ops" in refused.err
        assert other.read_text() == content
    assert run_here(capfd, "report", made.uri, "-o", str(other), "--force").code == 0
    assert run_here(capfd, "report", made.uri, "-o", str(other)).code == 0
    for given in ([], ["-o", "x", "--json"], ["-o", str(tmp_path / "none" / "x")], ["-o", str(tmp_path)]):
        assert run_here(capfd, "report", made.uri, *given).code == 2


def test_damage_comes_first(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    remove_generation(made.uri, made.regions[0], 2)
    page = run_here(capfd, "report", made.uri, "-o", "-").out
    assert '<span class="state critical">critical</span>' in page
    first = page.partition('<li class="is-')[2].partition("</li>")[0]
    assert "generation" in first
    assert made.regions[0] in first
    assert "runbooks/errors/13-generation_missing.md" in page


def test_no_row_value_is_in_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "t.lance")
    key = pa.field("id", pa.string(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    rows = pa.table({"id": ["planted-key"], "note": ["planted-row-value"]}, pa.schema([key, ("note", pa.string())]))
    dataset = lance.write_dataset(rows, uri)
    dataset.create_scalar_index("note", "BTREE")
    dataset.initialize_mem_wal(unsharded=True)
    for given in (["-o", "-"], ["--json"]):
        found = run_here(capfd, "report", uri, *given)
        assert found.code == 0, found.err
        assert "planted" not in found.out


def test_the_life_of_a_generation(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    free(made)
    assert run_here(capfd, "gc", made.uri, "--apply", *AT_ONCE_FLAGS).code == 0
    grow(made)
    document = run_here(capfd, "report", made.uri, "--json").document
    states = [one["state"] for one in document["history"]["log"]]
    assert states.count("waiting") == 2
    for one in document["history"]["log"]:
        assert (one["removed"] is not None) == (one["state"] == "removed")
        assert one["removed"] is None or one["flushed"] is None or one["flushed"] <= one["removed"]
