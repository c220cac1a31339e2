"""``scan``: one look at tables that nobody maintained, and the configuration that maintains them."""

from __future__ import annotations

import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.scheduling.discovery import discover
from memwal_ops.supervisor.state.history import History
from memwal_ops.text import size_text
from tests.support.run_cli import contents, run_here
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A table that needs everything, one that needs nothing, one with a log, and what is no table."""
    needy = PlainTable(str(tmp_path / "db/needy $x.lance")).create(fragments=6, rows=50, index=True)
    needy.append(20)
    needy.delete(*range(100))
    month_ago = time.time() - timedelta(days=30).total_seconds()
    for path in (tmp_path / "db/needy $x.lance/_versions").iterdir():
        os.utime(path, (month_ago, month_ago))
    PlainTable(str(tmp_path / "db/fine.lance")).create()
    logged = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "db/logged.lance"))
    logged.put([1, 2])
    logged.close()
    (tmp_path / "db/notes").mkdir()
    return tmp_path / "db"


def test_it_shows_what_each_job_would_do(database: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The plans' own figures; nothing is written."""
    before = contents(str(database))
    shown = run_here(capfd, "scan", "--database", str(database), "--json")
    assert shown.code == 0
    by_name = {Path(one["uri"]).stem: one for one in shown.document["tables"]}
    assert [*by_name] == ["fine", "logged", "needy $x"]
    assert by_name["fine"]["needs"] == []
    needs = {one["job"]: one for one in by_name["needy $x"]["needs"]}
    assert [*needs] == ["catchup", "compact", "expire"]
    assert needs["catchup"]["rows"] == 20
    assert needs["compact"]["rows"] == 200, "not those that the index does not cover yet"
    plan = run_job(by_name["needy $x"]["uri"], "expire").to_json()
    assert (needs["expire"]["bytes_freed"], plan["counts"]["expire"]) == (plan["bytes"], 8)
    assert {one["job"]: one["what"] for one in by_name["logged"]["needs"]}["merge"] == "merge 1 generation"
    text = run_here(capfd, "scan", "--database", str(database))
    assert "3 tables: 3 ok; jobs have work on 2" in text.out
    assert "delete 8 versions" in text.out
    assert contents(str(database)) == before


def test_a_row_that_several_indexes_lack_is_counted_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of indexes that lack different rows all are counted; past runs are compared by what each index writes."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": range(100), "b": range(100)}), uri)
    lance.dataset(uri).create_scalar_index("a", "BTREE")
    lance.dataset(uri).create_scalar_index("b", "BTREE")
    lance.write_dataset(pa.table({"a": range(20), "b": range(20)}), uri, mode="append")
    [need] = run_job(uri, "catchup", apply=False).needs()
    assert (need.what, need.rows, need.indexed) == ("update 2 indexes", 20, 40)
    [shown] = [line for line in run_here(capfd, "scan", uri).out.splitlines() if line.split()[:2] == ["t", "catchup"]]
    assert shown.split()[-1] == "20"
    lance.dataset(uri).create_scalar_index("a", "BTREE", replace=True)
    lance.write_dataset(pa.table({"a": range(7), "b": range(7)}), uri, mode="append")
    [need] = run_job(uri, "catchup", apply=False).needs()
    assert (need.rows, need.indexed) == (27, 34)


def test_its_configuration_is_valid_and_has_all_tables(
    database: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uris = sorted(str(path) for path in database.glob("*.lance"))
    for arguments in (["--database", str(database)], uris):
        document = run_here(capfd, "scan", *arguments, "--json").document
        file = tmp_path / "c.yaml"
        file.write_text(document["configuration"])
        tables = discover(load_settings(str(file)).tables).tables
        assert sorted(table.uri for table in tables) == uris
        assert sorted(table.name for table in tables) == ["fine", "logged", "needy $x"]
        for table in tables:
            assert table.settings.jobs["expire"].enabled
            assert table.settings.jobs["gc"].apply


def test_a_folder_of_tables_is_none(database: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The error names the option for it, and there is no configuration of what is no table."""
    shown = run_here(capfd, "scan", str(database), str(database / "fine.lance"))
    assert shown.code == 4
    assert "is not a table, but a folder with 3 tables" in " ".join(shown.out.split())
    assert "--database" in shown.out
    assert f'uri: "{database}/fine.lance"' in shown.out
    assert f'uri: "{database}"' not in shown.out
    assert "configuration" not in run_here(capfd, "scan", str(database)).out


def test_a_broken_table_does_not_hide_the_others(database: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (database / "broken.lance").mkdir()
    (database / "broken.lance/junk").write_text("x")
    found = run_here(capfd, "scan", "--database", str(database))
    assert found.code == 4
    assert "NOT SCANNED: broken: not_a_lance_table" in found.out
    assert "delete 8 versions" in found.out


def test_tables_of_namespaces_are_found_and_the_rest_is_named(
    database: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As LanceDB 0.40 stores them: a hash and the id, without a suffix, and the list of them."""
    named = ("23e68cbd_team$t1", "b7669c02_team$t2.lance", "__manifest")
    for name in named:
        PlainTable(str(database / name)).create()
    stub = database / "dropped.lance"
    (stub / "_transactions").mkdir(parents=True)
    (stub / "_transactions/0-a.txn").touch()
    (database / "empty.lance").mkdir()
    (database / "linked.lance").symlink_to(database / "fine.lance")
    shown = run_here(capfd, "scan", "--database", str(database), "--json")
    assert shown.code == 0
    tables = {Path(one["uri"]).name for one in shown.document["tables"]}
    assert tables == {"fine.lance", "logged.lance", "needy $x.lance", *named}
    skipped = {Path(one["uri"]).name: f"{one['why']} {one['remedy']}" for one in shown.document["skipped"]}
    assert skipped.keys() == {"notes", "dropped.lance", "empty.lance", "linked.lance"}
    assert "no table such a name" in skipped["notes"]
    assert "is a stub" in skipped["dropped.lance"]
    assert f"memwal-ops repair {stub}" in skipped["dropped.lance"]
    assert "SKIPPED: dropped: " in " ".join(run_here(capfd, "scan", "--database", str(database)).out.split())
    file = tmp_path / "c.yaml"
    file.write_text(shown.document["configuration"])
    found = discover(load_settings(str(file)).tables).tables
    assert {Path(table.uri).name for table in found} >= tables


def test_rows_without_a_version_are_an_error(database: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(database / "fine.lance/_versions")
    found = run_here(capfd, "scan", "--database", str(database))
    assert found.code == 4
    text = " ".join(found.out.split())
    assert "NOT SCANNED: fine: not_a_lance_table" in text
    assert f"memwal-ops repair {database}/fine.lance" in text


def test_what_is_asked_wrongly_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["uri", "--database", str(tmp_path)]):
        assert run_here(capfd, "scan", *arguments).code == 2
    nothing = run_here(capfd, "scan", "--database", str(tmp_path))
    assert (nothing.code, nothing.out) == (3, "")
    assert "no folder NAME.lance" in nothing.err


def test_what_is_too_young_has_its_bytes_and_date(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also the files of a compaction that was killed, to which no version refers."""
    table = PlainTable(str(tmp_path / "db/t.lance")).create(fragments=4, rows=200)
    run_job(table.uri, "compact")
    killed = tmp_path / "db/t.lance/data/0123456789abcdef.lance"
    killed.write_bytes(next(killed.parent.glob("*.lance")).read_bytes())
    ago = time.time() - timedelta(days=6).total_seconds()
    os.utime(killed, (ago, ago))
    week = datetime.now(UTC) + timedelta(days=7)
    by = run_job(table.uri, "expire", apply=False).to_json()["later"]
    newest = {file.path for one in lance.dataset(table.uri).get_fragments() for file in one.data_files()}
    old = [path for path in killed.parent.glob("*.lance") if path.name not in newest]
    assert killed in old
    assert len(old) == 5
    assert by["bytes"] > sum(path.stat().st_size for path in old)
    assert abs(datetime.fromisoformat(by["by"]) - week) < timedelta(minutes=5)

    document = run_here(capfd, "scan", table.uri, "--json").document
    (need,) = (one for one in document["tables"][0]["needs"] if one["job"] == "expire")
    assert (need["bytes_freed"], need["later"]) == (0, by)
    shown = " ".join(run_here(capfd, "scan", table.uri).out.split())
    assert f"0 B would be freed now, up to {size_text(by['bytes'])} more by {by['by'][:10]}." in shown


def test_it_counts_levels_as_status_does(database: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    configuration = run_here(capfd, "scan", "--database", str(database), "--json").document["configuration"]
    file.write_text(f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\n{configuration}")
    scanned = run_here(capfd, "scan", "--database", str(database)).out
    assert "3 tables: 3 ok; jobs have work on 2;" in scanned
    assert "3 tables: 3 ok;" in run_here(capfd, "status", "--config", str(file)).out


def grown(uri: str) -> PlainTable:
    """A table whose indexes are behind, with fragments to join."""
    table = PlainTable(uri).create(fragments=3, rows=2_000, index=True)
    table.dataset.create_index("vector", "IVF_FLAT", num_partitions=2)
    for _ in range(20):
        table.append(100)
    return table


def weigh(table: PlainTable) -> int:
    return sum((Path(table.uri) / path).stat().st_size for path in table.files())


def test_it_tells_the_space_that_maintenance_needs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As much as it then takes, within a quarter; and until versions of today may be deleted."""
    table = grown(str(tmp_path / "db/t.lance"))
    (scanned,) = run_here(capfd, "scan", table.uri, "--json").document["tables"]
    planned = run_here(capfd, "maintain", table.uri, "--dry-run", "--json").document["outlook"]
    outlook = scanned["outlook"]
    assert outlook["bytes"] == planned["bytes"]
    assert [one["job"] for one in planned["steps"]] == ["catchup", "compact"]
    assert outlook["basis"] == planned["basis"] == "estimate"
    assert outlook["seconds"] > 0
    week = datetime.now(UTC) + timedelta(days=7)
    assert abs(datetime.fromisoformat(outlook["until"]) - week) < timedelta(minutes=5)
    shown = " ".join(run_here(capfd, "scan", table.uri).out.split())
    assert f"up to {size_text(outlook['bytes'])} more space until {outlook['until'][:10]}" in shown
    assert "This is safe beside writers and readers" in shown
    before = weigh(table)
    run_job(table.uri, "maintain")
    assert 0.75 * outlook["bytes"] <= weigh(table) - before <= outlook["bytes"]
    nothing = run_here(capfd, "maintain", table.uri, "--dry-run")
    assert "This is safe" not in nothing.out


@pytest.mark.long
@pytest.mark.parametrize("job", ["all of them", "maintain"])
def test_it_tells_the_time_by_the_last_runs(
    job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the service whose configuration is the default, whether it runs the jobs or maintain."""
    table = grown(str(tmp_path / "db/t.lance"))
    file = tmp_path / "c.yaml"
    only = (
        ""
        if job == "all of them"
        else "defaults: {jobs: {maintain: {enabled: true}, catchup: {enabled: false}, compact: {enabled: false}}}\n"
    )
    file.write_text(f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\n{only}tables: [{{uri: {table.uri}}}]\n")
    monkeypatch.setenv("MEMWAL_OPS_CONFIG", str(file))
    assert run_here(capfd, "run", "--once", "--config", str(file)).code == 0
    for _ in range(20):
        table.append(100)
    for arguments in (["scan", table.uri, "--json"], ["maintain", table.uri, "--dry-run", "--json"]):
        document = run_here(capfd, *arguments).document
        outlook = document["tables"][0]["outlook"] if "tables" in document else document["outlook"]
        bases = {one["job"]: one["basis"] for one in outlook["steps"]}
        assert (bases["catchup"], bases["compact"]) == ("last_run", "last_run")
    file.write_text("tables: 7")
    told = run_here(capfd, "scan", table.uri)
    assert (told.code, "estimated" in told.out) == (0, True), "a history that cannot be found is none"


def test_indexes_that_answer_badly_come_first(
    database: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the service recorded: none is asked here."""
    uri = str(database / "needy $x.lance")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\ntables: [{{uri: '{uri.replace('$', '$$')}'}}]\n"
    )
    monkeypatch.setenv("MEMWAL_OPS_CONFIG", str(file))
    entry = {
        "index": "by_n", "type": "BTree", "queries": 62, "wrong": 3, "recall": None,
        "findings": [{"check": "index_misses_rows", "evidence": "3 rows are missing.",
                      "remedy": "Build it anew: memwal-ops catchup URI --rebuild --index by_n"}],
    }  # fmt: skip
    history = History.open(str(tmp_path / "state/history.sqlite"))
    for number, answers in enumerate(([entry], None)):
        begun = history.begin(
            table="t", uri=uri, job="verify", supervisor="us", why="schedule", plan={}, now=datetime.now(UTC)
        )
        report = None if answers is None else {"seed": 3, "version": 3, "answers": answers}
        history.finish(begun, datetime.now(UTC), "failed" if number else "partial", report=report)
    history.close()
    shown = run_here(capfd, "scan", "--database", str(database), "--json")
    first, *others = shown.document["tables"]
    assert (shown.code, first["uri"]) == (0, uri)
    [bad] = first["bad_answers"]
    assert (bad["index"], bad["kind"], bad["why"]) == ("by_n", "wrong", "3 rows are missing.")
    assert [one["bad_answers"] for one in others] == [[]] * len(others)
    text = run_here(capfd, "scan", "--database", str(database)).out
    assert text.startswith("WRONG: needy $x: the index by_n (BTree) answers wrongly, asked ")
    assert f"memwal-ops catchup '{uri}' --rebuild --index by_n" in " ".join(text.split())
    assert "1 critical" in text
