"""erase on a plain table: what is deleted is in no byte of any file afterwards, and what stays is all there."""

from __future__ import annotations

import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.errors import HeldError, InvalidUsageError, MemwalOpsError, TableCorruptError
from memwal_ops.formats.lance.jobs.erase import job
from memwal_ops.formats.lance.jobs.erase.survey import Surveyor
from tests.support.erasing import Erasing
from tests.support.run_cli import contents
from tests.support.tables import patterns

if TYPE_CHECKING:
    from pathlib import Path

GONE = [5, 250]
WHERE = "id IN (5, 250)"
NOW = {"older_than": "0s", "allow_unsafe": True}


def erase(uri: str, **options: Any) -> Any:
    return run_job(uri, "erase", **{"where": WHERE, "apply": True, **NOW, **options})


def kinds(report: Any) -> set[str]:
    return {one["kind"] for one in report.to_json()["holders"]}


def living(uri: str) -> list[int]:
    return sorted(lance.dataset(uri).to_table(columns=["id"]).column("id").to_pylist())


def check_rows(uri: str, numbers: list[int]) -> None:
    """All rows are there, whole, and found by each index."""
    dataset = lance.dataset(uri)
    assert living(uri) == numbers
    names = [name for name in patterns.SCHEMA.names if name not in {"blob", "vector"}]
    read = dataset.scanner(columns=names).to_table().sort_by("id")
    assert read.equals(patterns.rows(numbers).select(names).cast(read.schema))
    for number in (numbers[0], numbers[-1]):
        for column in ("btree", "bitmap", "zone", "bloom", "ngram"):
            found = dataset.to_table(columns=["id"], filter=f"{column} = '{patterns.pattern(number, column)}'")
            assert found.column("id").to_pylist() == [number], column
        text = dataset.to_table(columns=["id"], full_text_query=patterns.pattern(number, "text"))
        assert text.column("id").to_pylist() == [number]
        near = {"column": "vector", "q": pa.array(patterns.vector(number)), "k": 1, "nprobes": 2}
        assert dataset.to_table(columns=["id"], nearest=near).column("id").to_pylist() == [number]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows 5 and 250 are in fragments 0 and 2; 250 was deleted before; two indexes."""
    uri = patterns.create(str(tmp_path_factory.mktemp("made") / "t.lance"), every_index=False)
    lance.dataset(uri).delete(f"btree = '{patterns.pattern(250, 'btree')}'")
    return uri


@pytest.fixture
def uri(made: str, tmp_path: Path) -> str:
    return str(shutil.copytree(made, tmp_path / "t.lance"))


STAYING = [number for number in range(300) if number not in GONE]


@pytest.mark.long
def test_every_pattern_is_found_before_and_none_after(tmp_path: Path) -> None:
    uri = patterns.create(str(tmp_path / "t.lance"))
    lance.dataset(uri).delete(f"btree = '{patterns.pattern(250, 'btree')}'")
    found = patterns.holders(uri, GONE)
    columns = set().union(*found.values())
    assert columns >= set(patterns.patterns(5)) - {"wide"}
    assert {path.split("/")[0] for path in found} >= {"data", "_indices"}
    assert any("btree" in hits for path, hits in found.items() if path.startswith("_versions/")), "a predicate"
    report = erase(uri)
    assert report.decision == "erased"
    assert report.done["rows_deleted"] == 1
    assert report.done["fragments_rewritten"] == 2, "just those that have such a row"
    assert report.done["indexes_rebuilt"] == 9
    assert patterns.holders(uri, GONE) == {}
    check_rows(uri, STAYING)
    again = erase(uri)
    assert (again.decision, again.done) == ("erased", {})
    assert run_job(uri, "erase", where=WHERE).decision == "erased"


def test_the_table_is_read_once_where_nothing_is_left_to_do(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    erase(uri)
    read: list[int] = []
    whole = Surveyor.survey
    monkeypatch.setattr(Surveyor, "survey", lambda self, table: read.append(table.version) or whole(self, table))
    assert erase(uri).decision == "erased"
    assert len(read) == 1


def test_with_stable_row_ids(tmp_path: Path) -> None:
    uri = patterns.create(str(tmp_path / "t.lance"), stable=True, every_index=False)
    lance.dataset(uri).update({"bitmap": "'another'"}, where="id = 250")
    assert erase(uri).decision == "erased"
    assert patterns.holders(uri, GONE) == {}
    check_rows(uri, STAYING)


def test_a_plan_names_the_holders_and_changes_nothing(uri: str) -> None:
    before = contents(uri)
    report = run_job(uri, "erase", where=WHERE)
    assert contents(uri) == before
    assert (report.decision, report.living, report.exit_code) == ("planned", 1, 0)
    assert kinds(report) == {"fragment", "index", "version", "transaction"}
    assert "1 living row would be deleted" in report.describe()


def test_what_is_young_waits_with_its_date(uri: str) -> None:
    began = datetime.now(UTC)
    report = erase(uri, older_than="3d", allow_unsafe=False)
    assert (report.decision, report.exit_code) == ("waiting", 0)
    assert kinds(report) == {"version"}
    assert timedelta(days=3) - timedelta(minutes=5) < report.until - began < timedelta(days=3, minutes=30)
    assert living(uri) == STAYING
    assert run_job(uri, "erase", where=WHERE, older_than="3d").decision == "waiting"
    assert erase(uri).decision == "erased", "the next run continues"
    assert patterns.holders(uri, GONE) == {}


@pytest.mark.long
def test_a_tag_a_hold_and_a_branch_are_named(uri: str) -> None:
    dataset = lance.dataset(uri)
    dataset.tags.create("before", 1)
    dataset.create_branch("trial", dataset.version)
    hold = take_hold(open_table(uri), 3, timedelta(hours=1), note="a notebook")
    report = erase(uri)
    assert (report.decision, report.exit_code) == ("held", HeldError.exit_code)
    held = {one.kind: one.describe() for one in report.holders if one.blocks}
    assert held.keys() == {"tag", "hold", "branch"}
    assert "tag before at version 1" in held["tag"]
    assert f"hold {hold.number} of" in held["hold"]
    assert "trial" in held["branch"]
    assert living(uri) == STAYING
    release_hold(open_table(uri), hold.number)
    lance.dataset(uri).tags.delete("before")
    report = erase(uri)
    assert (report.decision, {one.kind for one in report.holders if one.blocks}) == ("held", {"branch"})
    run_job(f"{uri}/tree/trial", "erase", where=WHERE, apply=True, **NOW)
    lance.dataset(uri).branches.delete("trial")
    assert erase(uri).decision == "erased"
    assert patterns.holders(uri, GONE) == {}
    check_rows(uri, STAYING)


def test_a_tag_on_a_version_without_such_rows_does_not_matter(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(patterns.rows(range(100)), uri)
    lance.dataset(uri).tags.create("before", 1)
    lance.write_dataset(patterns.rows(range(100, 300)), uri, mode="append")
    assert erase(uri, where="id = 250").decision == "erased"
    assert patterns.holders(uri, [250]) == {}
    assert lance.dataset(uri, version="before").count_rows() == 100


def test_what_was_rewritten_by_others_is_in_indexes_still(uri: str) -> None:
    """A compaction moves rows in an index, and leaves the terms of those that it drops."""
    lance.dataset(uri).delete("id = 5")
    lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    run_job(uri, "expire", apply=True, older_than="0s", allow_unsafe=True)
    report = run_job(uri, "erase", where=WHERE)
    assert (report.decision, report.living, kinds(report)) == ("planned", 0, {"index"})
    report = erase(uri)
    assert report.decision == "erased"
    assert report.done["indexes_rebuilt"] == 2
    check_rows(uri, STAYING)


@pytest.mark.long
def test_all_that_was_deleted_before_a_time(uri: str) -> None:
    dataset = lance.dataset(uri)
    dataset.delete("id = 5")
    time.sleep(0.05)
    cut = datetime.now(UTC)
    time.sleep(0.05)
    dataset.delete("id = 100")
    report = erase(uri, where=None, deleted_before=cut.isoformat())
    assert report.decision == "erased"
    assert report.done["fragments_rewritten"] == 2, "fragment 1 had no deleted row then"
    assert patterns.holders(uri, GONE) == {}
    assert patterns.holders(uri, [100]) != {}
    assert erase(uri, where=None, deleted_before=datetime.now(UTC).isoformat()).decision == "erased"
    assert patterns.holders(uri, [*GONE, 100]) == {}
    check_rows(uri, [number for number in STAYING if number != 100])


def test_the_last_row_of_a_fragment(uri: str) -> None:
    gone = list(range(100, 200))
    report = erase(uri, where="id >= 100 AND id < 200")
    assert report.decision == "erased"
    assert patterns.holders(uri, [100, 150, 199]) == {}
    check_rows(uri, [number for number in range(300) if number not in {*gone, 250}])


def test_files_of_killed_runs_wait_and_what_is_unknown_is_named(uri: str) -> None:
    erase(uri)
    data = next(name for name in os.listdir(f"{uri}/data"))
    shutil.copy(f"{uri}/data/{data}", f"{uri}/data/{'0' * 40}.lance")
    report = run_job(uri, "erase", where=WHERE)
    assert (report.decision, kinds(report)) == ("waiting", {"leftover"})
    with open(f"{uri}/export.csv", "w", encoding="utf-8") as file:
        file.write("a,b")
    report = run_job(uri, "erase", where=WHERE)
    assert (report.decision, kinds(report)) == ("held", {"leftover", "unrecognized"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"where": None}, "where"),
        ({"deleted_before": "2026-01-01"}, "exclude"),
        ({"where": "nothing = 1"}, "does not apply"),
        ({"where": None, "deleted_before": "yesterday"}, "not a time"),
        ({"sign_with": "key.pem"}, "certificate"),
        ({"older_than": "1s", "allow_unsafe": False}, "below 1h"),
    ],
)
def test_bad_options_are_refused(uri: str, options: dict[str, Any], named: str) -> None:
    before = contents(uri)
    with pytest.raises(InvalidUsageError, match=named):
        erase(uri, **options)
    assert contents(uri) == before


@pytest.fixture
def erasing(made: str) -> Erasing:
    return Erasing(job.apply, made, WHERE, GONE, partial(check_rows, numbers=STAYING))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 0.95])
def test_killed_and_run_again(erasing: Erasing, tmp_path: Path, part: float) -> None:
    erasing.killed_at(tmp_path, [int(len(erasing.calls(tmp_path)) * part)])


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(4))
def test_killed_at_every_call_and_run_again(erasing: Erasing, tmp_path: Path, part: int) -> None:
    calls = len(erasing.calls(tmp_path))
    erasing.killed_at(tmp_path, range(1 + part, calls, 4 * max(1, calls // 120)))


def test_a_file_that_cannot_be_read_is_no_mistake_in_the_expression(tmp_path: Path) -> None:
    """A damaged index is not asked; a lost data file ends the run by its own reason."""
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(pa.table({"id": range(10)}), uri)
    dataset.create_scalar_index("id", "BTREE")
    for path in (tmp_path / "t.lance" / "_indices").rglob("*.lance"):
        path.write_bytes(b"damaged")
    with pytest.raises(InvalidUsageError, match="does not apply"):
        run_job(uri, "erase", where="other = 1")
    assert run_job(uri, "erase", where="id = 7").decision == "planned"
    for path in (tmp_path / "t.lance" / "data").iterdir():
        path.unlink()
    with pytest.raises(MemwalOpsError) as failed:
        run_job(uri, "erase", where="id = 7")
    assert failed.value.exit_code == TableCorruptError.exit_code


@pytest.mark.parametrize("by_time", [False, True])
def test_deleted_rows_in_files_of_the_first_format(tmp_path: Path, by_time: bool) -> None:
    """pylance's filters hide them there, even where they are asked for."""
    uri, texts = str(tmp_path / "t.lance"), [f"secret-{number}" for number in range(10)]
    rows = pa.table({"id": range(10), "text": texts, "word": pa.array(["a", "b"] * 5).dictionary_encode()})
    lance.write_dataset(rows, uri, data_storage_version="legacy").delete("id = 3")
    how = {"where": None, "deleted_before": datetime.now(UTC).isoformat()} if by_time else {"where": "id = 3"}
    report = erase(uri, **how, certificate=str(tmp_path / "proof.json"))
    assert report.decision == "erased", report.describe()
    assert report.done["fragments_rewritten"] == 1
    assert living(uri) == [0, 1, 2, *range(4, 10)]
    assert not [path for path, data in contents(uri).items() if b"secret-3" in data[1]]
