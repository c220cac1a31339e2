"""Indexes that lack rows which they claim to cover: what finds them, who does not ask them, and what builds them anew.

The merges of all engines beside such an index are in jobs/test_odd_data.py.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.maintain import scan_table
from memwal_ops.errors import IndexesBehindError
from memwal_ops.formats.lance.engines.merge.locate import is_indexed
from memwal_ops.formats.lance.indexes import index_faults
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.index_faults import checked_fault, fault_of
from memwal_ops.formats.lance.indexes.snapshots import covered_generations
from memwal_ops.formats.lance.wire.version_manifest import encode_fragment_bitmap
from memwal_ops.memwal import read
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.stale_indexes import (
    compact_and_leave,
    entries,
    index_versions,
    newest,
    with_index_version,
    written_by,
)

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.core.verification import Inconsistency

ROWS = 400
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("v", pa.int64())])


def rows(start: int, end: int) -> pa.Table:
    return pa.table({"id": range(start, end), "v": range(start, end)}, schema=SCHEMA)


def make(folder: Path, kind: str = "BTREE", *, stable: bool = True, memwal: bool = False) -> str:
    """400 rows in four fragments under an index of their ids, and one row deleted."""
    uri = str(folder / "t.lance")
    dataset = lance.write_dataset(rows(0, ROWS), uri, max_rows_per_file=ROWS // 4, enable_stable_row_ids=stable)
    dataset.create_scalar_index("id", kind, name="by_id")
    if memwal:
        lance.dataset(uri).initialize_mem_wal()
    lance.dataset(uri).delete("id = 3")
    return uri


def table_at(uri: str) -> Any:
    return open_table(uri)


def found(uri: str, number: int) -> int:
    return lance.dataset(uri).count_rows(f"id = {number}")


def findings(uri: str) -> list[Inconsistency]:
    report = run_job(uri, "verify")
    return [one for one in report.findings.kept if one.check == "index_rows"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("release", ["13.0.0", lance.__version__])
@pytest.mark.parametrize("memwal", [False, True])
def test_a_tree_of_addresses_that_a_compaction_did_not_remap(tmp_path: Path, memwal: bool, release: str) -> None:
    """Also where a version of this release hides who did it. It is built anew, and finds all rows then."""
    uri = make(tmp_path, memwal=memwal)
    assert findings(uri) == []
    compact_and_leave(uri, "by_id", release=release)
    assert found(uri, 7) == 0, "pylance finds no row by it; if it does, this is no longer needed"
    [finding] = findings(uri)
    assert finding.severity.value == "error"
    assert "fragment 4" in finding.evidence
    assert not is_indexed(table_at(uri), "id")
    [shown] = run_job(uri, "inspect").to_json()["indexes"]
    assert "fragment 4" in shown["problem"]
    assert "PROBLEM: index by_id" in run_job(uri, "inspect").describe()
    assert [one.what for one in scan_table(open_table(uri)).needs if one.job == "catchup"] == ["update 1 index"]
    assert run_job(uri, "catchup").decision == "caught_up"
    assert [found(uri, number) for number in (3, 7, ROWS - 1)] == [0, 1, 1]
    assert all(one.severity.value == "warning" for one in findings(uri))
    assert run_job(uri, "catchup").decision == "unchanged"
    assert is_indexed(table_at(uri), "id") == (release == lance.__version__)


def test_an_update_after_it_hides_nothing(tmp_path: Path) -> None:
    """pylance's own update keeps what the index lacks, under a new id, and claims everything again."""
    uri = make(tmp_path)
    compact_and_leave(uri, "by_id", release=lance.__version__)
    lance.write_dataset(rows(ROWS, ROWS + 5), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices()
    assert (found(uri, 7), found(uri, ROWS)) == (0, 1)
    assert findings(uri) != []
    assert run_job(uri, "catchup").decision == "caught_up"
    assert (found(uri, 7), found(uri, ROWS)) == (1, 1)
    assert findings(uri) == []


def test_a_reader_finds_rows_that_the_index_lacks(tmp_path: Path) -> None:
    uri = make(tmp_path, memwal=True)
    compact_and_leave(uri, "by_id")
    reader = read(uri)
    assert reader.get([3, 7, 8]).to_pydict()["v"] == [7, 8]
    assert reader.scan(filter="id = 7").to_table().num_rows == 1


@pytest.mark.parametrize("kind", ["BTREE", "ZONEMAP"])
def test_it_covers_no_generation(tmp_path: Path, kind: str) -> None:
    """For gc: "every index covers it" is not met before the index is built anew."""
    uri = make(tmp_path, kind, memwal=True)
    region = uuid.UUID(int=7, version=4)
    with lance.dataset(uri).mem_wal_writer(str(region)) as writer:
        writer.put(rows(ROWS, ROWS + 5))
    for job in ("merge", "catchup"):
        run_job(uri, job)
    assert covered_generations(table_at(uri)) == {"by_id": {region: 1}}
    compact_and_leave(uri, "by_id", release=lance.__version__)
    assert covered_generations(table_at(uri)) == {"by_id": {region: 0}}
    run_job(uri, "catchup")
    assert covered_generations(table_at(uri)) == {"by_id": {region: 1}}


def test_an_older_writer_since_the_index_has_its_version(tmp_path: Path) -> None:
    """All rows are in it, and the next compaction of that writer may end that: it is not asked, and reported."""
    uri = make(tmp_path)
    assert is_indexed(table_at(uri), "id")
    lance.write_dataset(rows(ROWS, ROWS + 5), uri, mode="append")
    written_by(uri, "13.0.0")
    assert not is_indexed(table_at(uri), "id")
    [finding] = findings(uri)
    assert finding.severity.value == "warning"
    assert "lance 13.0.0 wrote version 4" in finding.evidence
    lance.write_dataset(rows(ROWS + 5, ROWS + 6), uri, mode="append")
    assert not is_indexed(table_at(uri), "id"), "nor if a younger one wrote last"
    lance.dataset(uri).cleanup_old_versions(older_than=None, retain_versions=1)
    assert is_indexed(table_at(uri), "id"), "of versions that are gone nothing is known"


def test_only_the_last_writers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = make(tmp_path)
    written_by(uri, "13.0.0")
    lance.dataset(uri).delete("id = 4")
    monkeypatch.setattr(index_faults, "_LAST_WRITERS", 2)
    assert not is_indexed(table_at(uri), "id")
    lance.dataset(uri).delete("id = 5")
    assert is_indexed(table_at(uri), "id")


def test_an_index_of_another_version_says_nothing_of_this_one(tmp_path: Path) -> None:
    """The older release made an index of row ids, and wrote the table before it became one of addresses."""
    uri = make(tmp_path)
    lance.dataset(uri).drop_index("by_id")
    written_by(uri, "13.0.0")
    lance.dataset(uri).create_scalar_index("id", "BTREE", name="by_id")
    assert is_indexed(table_at(uri), "id")
    assert findings(uri) == []


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("kind", ["ZONEMAP", "BLOOMFILTER"])
def test_zones_of_fragments_that_are_gone(tmp_path: Path, kind: str, stable: bool) -> None:
    """Reported by the fragments that the index names; reads do not ask it; it is built anew."""
    uri = make(tmp_path, kind, stable=stable)
    assert findings(uri) == []
    compact_and_leave(uri, "by_id", release="10.0.0")
    assert found(uri, 7) == 0, "pylance finds no row by it; if it does, this is no longer needed"
    [finding] = findings(uri)
    assert finding.severity.value == "error"
    assert "claims fragment 4, of which its files have nothing: they name fragments 0, 1, 2, 3" in finding.evidence
    assert index_faults.base_scanner(table_at(uri), filter="id = 7").to_table().num_rows == 1
    lance.write_dataset(rows(ROWS, ROWS + 5), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices()
    assert found(uri, 7) == 0, "an update keeps what is there"
    assert run_job(uri, "catchup").decision == "caught_up"
    assert [found(uri, number) for number in (3, 7, ROWS)] == [0, 1, 1]
    assert findings(uri) == []


def test_a_zone_map_beside_deletions_and_new_fragments_has_no_fault(tmp_path: Path) -> None:
    uri = make(tmp_path, "ZONEMAP")
    lance.dataset(uri).delete(f"id < {ROWS // 4}")
    lance.write_dataset(rows(ROWS, ROWS + 5), uri, mode="append")
    assert findings(uri) == []
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=ROWS)
    assert findings(uri) == []
    assert run_job(uri, "catchup").decision == "caught_up"
    assert findings(uri) == []


def test_a_tree_with_too_few_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no sampled row shows it: here the row is one of the only fragment that the index has."""
    uri = make(tmp_path)
    written = entries(newest(uri))[0]
    lance.write_dataset(rows(ROWS, 2 * ROWS), uri, mode="append")
    table = table_at(uri)
    written.fragment_bitmap = encode_fragment_bitmap(frozenset(range(8)))
    in_it = table.dataset.scanner(filter="id = 7", with_row_address=True).to_table()
    monkeypatch.setattr(index_faults, "_rows_to_find", lambda *_: in_it)
    assert index_faults.sampled_fault(table, "id", entries(newest(uri))) is None
    fault = index_faults.sampled_fault(table, "id", [written])
    assert fault is not None
    assert fault.proven
    assert fault.why == "has 400 entries, fewer than the 799 rows of the fragments that it claims"


@pytest.mark.parametrize("fragments", [1, 2, 70])
def test_every_fragment_is_sampled_up_to_64(tmp_path: Path, fragments: int) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, fragments * 3), uri, max_rows_per_file=3, enable_stable_row_ids=True)
    lance.dataset(uri).delete("id % 3 = 1")
    table = table_at(uri)
    covered = frozenset(range(fragments))
    sampled = index_faults._rows_to_find(table, "id", covered)
    assert sampled is not None
    assert not [number for number in sampled["id"].to_pylist() if number % 3 == 1]
    expected = {row["_rowaddr"]: row["id"] for row in table.dataset.to_table(with_row_address=True).to_pylist()}
    assert all(expected[row["_rowaddr"]] == row["id"] for row in sampled.to_pylist())
    assert len({address >> 32 for address in sampled["_rowaddr"].to_pylist()}) == min(fragments, 64)
    assert max(sampled["_rowaddr"].to_pylist()) >> 32 == fragments - 1


@pytest.mark.parametrize("column", ["number", "word", "half", "day"])
def test_columns_that_can_be_sampled_and_those_that_cannot(tmp_path: Path, column: str) -> None:
    """With NULLs; what has no SQL literal is not sampled."""
    values = {
        "number": pa.array([None, 1, 2, 3] * 10),
        "word": pa.array([None, "a", "o'b", ""] * 10),
        "half": pa.array([None, 0.5, 1.5, 2.5] * 10),
        "day": pa.array([None, 1, 2, 3] * 10, pa.date32()),
    }
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table(values), uri, max_rows_per_file=10, enable_stable_row_ids=True)
    lance.dataset(uri).create_scalar_index(column, "BTREE", name="by_it")
    table = table_at(uri)
    assert checked_fault(table, base_indexes(table)["by_it"]) is None
    compact_and_leave(uri, "by_it", release=lance.__version__)
    table = table_at(uri)
    fault = fault_of(table, base_indexes(table)["by_it"])
    assert (fault is not None and fault.proven) == (column in ("number", "word"))


class TestUpgrade:
    """catchup and a B-tree of row ids, which pylance would make one of addresses."""

    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        """A table as release 13 leaves it: five rows are not indexed yet."""
        uri = str(tmp_path / "t.lance")
        lance.write_dataset(rows(0, ROWS), uri, enable_stable_row_ids=True)
        lance.dataset(uri).create_scalar_index("id", "BTREE", name="by_id")
        lance.dataset(uri).initialize_mem_wal()
        lance.write_dataset(rows(ROWS, ROWS + 5), uri, mode="append")
        with_index_version(uri, "by_id", 0)  # row ids and addresses of the first fragment are the same numbers
        written_by(uri, "13.0.0")
        return uri

    def test_it_is_refused_and_the_remedy_named(self, uri: str) -> None:
        version = lance.dataset(uri).version
        for apply in (False, True):
            report = run_job(uri, "catchup", apply=apply)
            assert report.exit_code == IndexesBehindError.exit_code
            [index] = report.to_json()["indexes"]
            assert (index["decision"], index["error"]["reason"]) == ("failed", "index_upgrade_refused")
            assert "--allow-upgrade" in index["error"]["detail"]
            assert "index_upgrade_refused" in report.describe()
        assert lance.dataset(uri).version == version

    def test_maintain_deletes_nothing_after_it(self, uri: str) -> None:
        """The step ends with a report, not with an error; neither may be followed by a deletion."""
        versions = lance.dataset(uri).versions()
        now = {"older_than": "0s", "allow_unsafe": True}
        report = run_job(uri, "maintain", apply=True, expire=now).to_json()
        steps = {step["step"]: step for step in report["steps"]}
        assert (report["decision"], steps["catchup"]["decision"]) == ("incomplete", "incomplete")
        assert {steps[job]["decision"] for job in ("expire", "gc")} == {"skipped"}
        assert "catchup failed (incomplete, exit code 18)" in steps["expire"]["because"]
        assert lance.dataset(uri).versions()[: len(versions)] == versions
        [need] = [one.what for one in scan_table(open_table(uri)).needs if one.job == "catchup"]
        assert need == "refuse to update by_id: index_upgrade_refused"

    def test_it_is_done_where_it_is_allowed(self, uri: str) -> None:
        assert run_job(uri, "catchup", allow_upgrade=True).decision == "caught_up"
        assert index_versions(uri)["by_id"] == 1

    def test_what_memwal_ops_wrote_does_not_count(self, uri: str) -> None:
        """Its commits of indexes alone repeat the name of the release before."""
        run_job(uri, "snapshot")
        written_by(uri, "13.0.0")
        lance.dataset(uri).cleanup_old_versions(older_than=None, retain_versions=1)
        assert run_job(uri, "catchup").decision == "caught_up"


def deferred(folder: Path, kind: str = "BTREE") -> str:
    """Two fragments under an index, compacted with ``defer_index_remap``."""
    uri = str(folder / "t.lance")
    lance.write_dataset(rows(0, ROWS), uri, max_rows_per_file=ROWS // 2).create_scalar_index("id", kind, name="by_id")
    lance.dataset(uri).optimize.compact_files(defer_index_remap=True)
    return uri


def compacted_again(uri: str) -> int:
    """pylance's own compaction of rows that are partly deleted; how many of those below 100 it has."""
    lance.dataset(uri).delete("id % 7 = 0")
    lance.dataset(uri).optimize.compact_files()
    return sum(number % 7 > 0 for number in range(100))


@pytest.mark.parametrize("kind", ["BTREE", "BITMAP"])
def test_an_index_that_waits_for_moved_rows_is_built_anew(tmp_path: Path, kind: str) -> None:
    """pylance updates nothing of it, and the next compaction by pylance would lose its rows."""
    uri = deferred(tmp_path, kind)
    assert run_job(uri, "catchup", apply=False).to_json()["indexes"][0]["method"] == "rebuild"
    assert run_job(uri, "catchup").decision == "caught_up"
    live = compacted_again(uri)
    assert lance.dataset(uri).count_rows("id < 100") == live
    assert run_job(uri, "catchup").decision == "unchanged"


def test_an_update_that_hides_what_a_deferred_compaction_lost(tmp_path: Path) -> None:
    """The index is younger than the compaction then; a sample shows that rows are missing."""
    uri = deferred(tmp_path)
    live = compacted_again(uri)
    lance.write_dataset(rows(ROWS, ROWS + 50), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices()
    assert lance.dataset(uri).count_rows("id < 100") < live, "pylance loses none; then this is no longer needed"
    assert run_job(uri, "catchup").decision == "caught_up"
    assert lance.dataset(uri).count_rows("id < 100") == live
    assert run_job(uri, "verify").exit_code == 0
