"""Plain tables, without a MemWAL index and without a primary key: what the jobs show of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import holds, take_hold
from memwal_ops.errors import TableCorruptError
from memwal_ops.memwal import RegionWriter, create_mem_wal
from tests.support.run_cli import run_here
from tests.support.tables.legacy_table import mem_wal, put_details
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def undecodable(uri: str) -> Iterator[Path]:
    """Damage a page of the second data file until pylance cannot read it; its size and its end are right."""
    path = sorted(Path(uri, "data").glob("*.lance"))[1]
    data = path.read_bytes()
    for at in range(3, len(data) - 200, 40):
        path.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
        try:
            lance.dataset(uri).to_table()
        except BaseException:  # a panic is no Exception
            yield path
            return


@pytest.mark.parametrize("job", ["compact", "catchup", "erase", "merge", "maintain"])
def test_a_job_names_the_file_of_a_page_that_does_not_decode(tmp_path: Path, job: str) -> None:
    """Pylance's error names none: "Encountered corrupt file"; its size and its end are right."""
    uri = str(tmp_path / "t.lance")
    key = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    schema = pa.schema([key, pa.field("t", pa.string())])
    rows = pa.table({"id": range(3000), "t": [f"name{k} {k * 7919 % 1000003}" for k in range(3000)]}, schema)
    lance.write_dataset(rows, uri, max_rows_per_file=1000)
    lance.dataset(uri).create_scalar_index("t", "BTREE")
    if job == "merge":
        create_mem_wal(uri)
        with RegionWriter(uri, "00000000-0000-4000-8000-000000000007") as log:
            log.put(rows.slice(1000, 5))
    path = sorted(Path(uri, "data").glob("*.lance"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:10] + bytes(len(data) * 3 // 5) + data[10 + len(data) * 3 // 5 :])
    options = {"erase": {"where": "t = 'name5 39595'", "apply": True}, "catchup": {"rebuild": True}}
    try:
        said = str(run_job(uri, job, **options.get(job, {})).to_json())
    except TableCorruptError as error:
        said = f"{error} {error.remedy}"
    assert f"data/{path.name} has rows that cannot be decoded" in said
    assert "Restore the file from a backup" in said
    assert "memwal-ops repair URI --deep" in said


@pytest.mark.parametrize("at_once", [True, False])
def test_of_a_fragment_with_two_files_the_damaged_one_is_named(tmp_path: Path, at_once: bool) -> None:
    """Of a branch by its URI, as it is the root's; ``at_once``: by a verification, which looks for all of them."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(2000)}), uri, max_rows_per_file=1000)
    first = {*Path(uri, "data").glob("*.lance")}
    lance.dataset(uri).add_columns({"t": "concat('name', cast(id as string), cast(id * 7919 as string))"})
    lance.dataset(uri).create_branch("dev")
    path = min({*Path(uri, "data").glob("*.lance")} - first)
    data = path.read_bytes()
    path.write_bytes(data[:10] + bytes(len(data) // 2) + data[10 + len(data) // 2 :])
    if at_once:
        (found,) = run_job(f"{uri}/tree/dev", "verify", deep=True).to_json()["findings"]
        assert found["place"] == str(path)
        return
    with pytest.raises(TableCorruptError, match=f"^{re.escape(str(path))} has rows that cannot be decoded"):
        run_job(f"{uri}/tree/dev", "compact")


@pytest.mark.parametrize("layout", ["none", "legacy"])
@pytest.mark.parametrize("version", ["legacy", "2.0", "2.1", "2.2"])
def test_a_deep_verification_reads_every_page(
    tmp_path: Path, version: str, layout: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A page that does not decode shows in no size and at no end: before it was read, such a table was healthy."""
    uri = str(tmp_path / "t.lance")
    rows = pa.table({"id": range(300), "t": [f"name{k} {k * 7919 % 1000003}" for k in range(300)]})
    lance.write_dataset(rows, uri, max_rows_per_file=100, data_storage_version=version)
    if layout == "legacy":
        put_details(uri, [mem_wal("r", 0, "MERGED")])
    whole = run_job(uri, "verify", deep=True)
    assert (whole.decision, whole.to_json()["rows_read"]) == ("healthy", "all")
    (path,) = undecodable(uri)
    assert run_job(uri, "verify").to_json()["rows_read"] == "none"
    report = run_job(uri, "verify", deep=True)
    (found,) = report.to_json()["findings"]
    assert (report.exit_code, found["check"], found["place"]) == (9, "base_file", f"data/{path.name}")
    assert "memwal-ops repair URI --deep" in found["remedy"]
    shown = run_here(capfd, "repair", uri, "--deep").out
    assert "Return to the newest version that does not need the file" in shown


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
