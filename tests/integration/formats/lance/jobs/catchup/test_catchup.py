"""The catch-up job: every index covers what is merged, says so, and answers right; codebooks never change."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import CodebookChangedError, InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, commit_indexes
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.codebook import read_codebook
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import building, job as catchup
from memwal_ops.formats.lance.jobs.catchup.job import CatchupOptions
from memwal_ops.formats.lance.jobs.catchup.report import CatchupReport
from memwal_ops.formats.lance.wire.memwal_index import with_catchup
from tests.support.stores import Beside
from tests.support.tables import damage
from tests.support.tables.files import Files
from tests.support.tables.indexed import (
    REGION,
    VECTOR_KINDS,
    check_claims,
    check_queries,
    claims,
    create,
    expected,
    rows,
    write,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.reading import read_base
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table
    from tests.support.tables.lsm_table import LsmTable


@pytest.mark.long
@pytest.mark.req("S0-014", "S0-068", "S0-078", "S0-112", "S0-179", "S0-180", "S0-181")
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("vector", VECTOR_KINDS)
def test_every_kind_of_index(tmp_path: Path, vector: str, stable: bool) -> None:
    uri = create(str(tmp_path / "t.lance"), vector=vector, stable=stable)
    codebooks = {
        read_codebook(open_table(uri), entry) for entry in base_indexes(open_table(uri))["vector_idx"].segments
    }
    for generation in range(3):
        write(uri, generation)
        before = open_table(uri)
        check_queries(uri, expected(generation + 1))
        figures = catchup.backlog(before)
        assert (figures["indexes_due"], figures["merged_regions"]) == (5, 1), "however few rows they lack"
        report = catchup.apply(before, CatchupOptions())
        assert report.decision == "caught_up"
        assert {one.name: one.decision for one in report.indexes} == dict.fromkeys(
            ["id_idx", "kind_idx", "tags_idx", "text_idx", "vector_idx"], "updated"
        )
        after = open_table(uri)
        for one in report.indexes:
            assert (one.uncovered_fragments, one.uncovered_rows) == (2 if stable else 1, 45)
            assert one.before.get(REGION, 0) == generation
            assert one.after == {REGION: generation + 1}
        assert claims(after) == {name: {REGION: generation + 1} for name in base_indexes(after)}
        check_claims(after)
        check_queries(uri, expected(generation + 1))
        check_queries(uri, expected(generation + 1))
    found = base_indexes(open_table(uri))["vector_idx"]
    assert len(found.segments) == 4
    assert {read_codebook(open_table(uri), entry) for entry in found.segments} == codebooks
    merged = catchup.apply(open_table(uri), CatchupOptions(max_segments=1, indexes=("vector_idx",)))
    assert [(one.decision, one.segments) for one in merged.indexes] == [("updated", 1)]
    found = base_indexes(open_table(uri))["vector_idx"]
    assert {read_codebook(open_table(uri), entry) for entry in found.segments} == codebooks
    check_queries(uri, expected(3))
    lance.dataset(uri).optimize.compact_files()
    check_queries(uri, expected(3))
    assert catchup.apply(open_table(uri), CatchupOptions()).decision == "caught_up"
    check_claims(open_table(uri))
    last = lance.dataset(uri).version
    assert catchup.apply(open_table(uri), CatchupOptions()).decision == "unchanged"
    assert lance.dataset(uri).version == last
    lance.dataset(uri).cleanup_old_versions(retain_versions=1)
    check_queries(uri, expected(3))


@pytest.mark.long
def test_on_s3(bucket: tuple[str, dict[str, str]]) -> None:
    uri, options = f"{bucket[0]}/t.lance", bucket[1]
    create(uri, options=options)
    write(uri, 0, options)
    files = Files(uri, options)
    left = set(files.listing("_transactions"))
    report = catchup.apply(open_table(uri, options), CatchupOptions())
    assert {one.decision for one in report.indexes} == {"updated"}
    check_queries(uri, expected(1), options)
    check_claims(open_table(uri, options))
    assert len(set(files.listing("_transactions")) - left) == 5, "one each, and nothing of the stopped commits"
    assert catchup.apply(open_table(uri, options), CatchupOptions()).decision == "unchanged"


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("external", [False, True], ids=["inline", "external snapshot"])
def test_both_layouts_and_the_stored_index_is_kept(tmp_path: Path, kind: type[LsmTable], external: bool) -> None:
    made = kind(1, regions=3, base_rows=60).create(str(tmp_path / "t.lance")).step(15)
    made.close()
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0 if external else 100))
    merge.apply(open_table(made.uri), merge.MergeOptions())
    before = open_table(made.uri)
    report = catchup.apply(before, CatchupOptions())
    assert [(one.name, one.decision) for one in report.indexes] == [("id_idx", "updated")]
    after = open_table(made.uri)
    check_claims(after)
    assert claims(after) == {"id_idx": dict(after.index.merged_generations)}
    restored = with_catchup(after.index.details, {"id_idx": None})
    assert restored == with_catchup(before.index.details, {"id_idx": None}), "all but the catch-up is as it was"
    assert read_snapshot(after) == read_snapshot(before) is not None
    assert lance.dataset(made.uri).count_rows() == len(made.expected())


def test_v1_names(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    damage.make_v1_named_table(uri, rows(list(range(20)), "old")).create_scalar_index("id", "BTREE")
    lance.dataset(uri).initialize_mem_wal()
    lance.write_dataset(rows(list(range(20, 30)), "new"), uri, mode="append")
    report = catchup.apply(open_table(uri), CatchupOptions())
    assert [one.decision for one in report.indexes] == ["updated"]
    assert coverage(base_indexes(open_table(uri))["id_idx"].covered, open_table(uri).manifest).complete
    assert lance.dataset(uri).count_rows("id = 25") == 1


def test_a_dry_run_and_the_threshold(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    before = Files(uri).listing("")
    report = catchup.plan(open_table(uri), CatchupOptions())
    assert report.decision == "dry_run"
    assert {(one.decision, one.uncovered_fragments, one.uncovered_rows) for one in report.indexes} == {
        ("would_update", 1, 45)
    }
    assert Files(uri).listing("") == before
    few = catchup.apply(open_table(uri), CatchupOptions(min_uncovered_rows=46))
    assert (few.decision, {one.decision for one in few.indexes}) == ("unchanged", {"below_threshold"})
    enough = catchup.apply(open_table(uri), CatchupOptions(min_uncovered_rows=45, indexes=("id_idx",)))
    assert [(one.name, one.decision) for one in enough.indexes] == [("id_idx", "updated")]
    assert set(claims(open_table(uri))) == {"id_idx"}


@pytest.mark.parametrize(
    "options",
    [
        {"min_uncovered_rows": -1},
        {"max_segments": 0},
        {"retrain_imbalance_threshold": 0.5},
        {"retrain_imbalance_threshold": float("nan")},
    ],
)
def test_usage(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsageError):
        CatchupOptions(**options)


def test_an_index_that_does_not_exist(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"))
    with pytest.raises(InvalidUsageError, match="no index nope") as refused:
        catchup.apply(open_table(uri), CatchupOptions(indexes=("id_idx", "nope")))
    assert "id_idx, kind_idx" in refused.value.remedy


def test_no_index_at_all(tmp_path: Path) -> None:
    made = Workload(1, regions=1, base_rows=20, with_btree=False).create(str(tmp_path / "t.lance"))
    assert catchup.apply(open_table(made.uri), CatchupOptions()).decision == "no_indexes"


# -- codebooks


@pytest.mark.sampled(1)
@pytest.mark.req("S0-112")
@pytest.mark.parametrize("vector", VECTOR_KINDS)
def test_an_index_without_a_row_keeps_its_codebook(tmp_path: Path, vector: str) -> None:
    """All rows under it were updated: pylance would train another, and unmerged generations have the old one."""
    uri = create(str(tmp_path / "t.lance"), vector=vector)
    before = open_table(uri)
    codebooks = {read_codebook(before, one) for one in base_indexes(before)["vector_idx"].segments}
    for at in range(10):
        write(uri, at)
    report = run_job(uri, "catchup")
    if vector in {"IVF_SQ", "IVF_HNSW_SQ", "IVF_RQ"}:  # pylance takes no parameters of these quantizers
        assert report.exit_code == CodebookChangedError.exit_code
        return
    assert report.decision == "caught_up"
    after = open_table(uri)
    segments = base_indexes(after)["vector_idx"].segments
    assert len(segments) == 1
    assert {read_codebook(after, one) for one in segments} == codebooks
    check_queries(uri, expected(10))
    check_claims(after)


def test_a_codebook_that_would_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance does change it if it is let (landmine 22); then nothing is published, and the others go on."""
    uri = str(tmp_path / "t.lance")
    old = rows(list(range(1000)), "old")
    dataset = lance.write_dataset(old, uri)
    dataset.create_index("vector", "IVF_FLAT", num_partitions=4)
    dataset.create_scalar_index("id", "BTREE")
    lance.dataset(uri).initialize_mem_wal()
    for at in (1, 2):
        lance.write_dataset(rows(list(range(at * 20_000, at * 20_000 + 12_000)), "new"), uri, mode="append")
        catchup.apply(open_table(uri), CatchupOptions(("vector_idx",) if at == 1 else ("id_idx",)))
    before = open_table(uri)
    files = set(Files(uri).listing("_indices"))
    monkeypatch.setattr("memwal_ops.formats.lance.jobs.catchup.building.segments_to_merge", lambda *_: None)
    report = catchup.apply(before, CatchupOptions())
    assert report.decision == "incomplete"
    failed = {one.name: one for one in report.indexes}["vector_idx"]
    assert failed.decision == "failed"
    assert isinstance(failed.error, CodebookChangedError)
    assert isinstance(failed.to_json()["error"], dict)
    after = open_table(uri)
    assert after.version == before.version
    assert set(Files(uri).listing("_indices")) == files, "what was built is gone again"


def test_a_codebook_that_cannot_be_read_is_not_risked(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    table = open_table(uri)
    (entry,) = base_indexes(table)["vector_idx"].segments
    (Path(uri) / "_indices" / str(UUID(bytes=entry.uuid.uuid)) / "index.idx").write_bytes(b"of another format")
    report = catchup.apply(table, CatchupOptions())
    assert {one.name: one.decision for one in report.indexes} == {
        "id_idx": "updated",
        "kind_idx": "updated",
        "tags_idx": "updated",
        "text_idx": "updated",
        "vector_idx": "failed",
    }
    assert report.decision == "incomplete"
    assert report.failures
    after = open_table(uri)
    assert "vector_idx" not in claims(after)
    assert base_indexes(after)["vector_idx"].segments == (entry,)


@pytest.mark.req("S4-038")
def test_imbalance_is_reported(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(list(range(300)), "old"), uri).create_index("vector", "IVF_FLAT", num_partitions=3)
    lance.dataset(uri).initialize_mem_wal()
    balanced = catchup.apply(open_table(uri), CatchupOptions()).indexes[0].partitions
    assert balanced is not None
    assert (balanced.count, balanced.largest + balanced.smallest <= 300) == (3, True)
    assert not balanced.to_json()["retrain"]
    lance.write_dataset(rows(list(range(300, 20_000)), "new"), uri, mode="append")
    lopsided = catchup.apply(open_table(uri), CatchupOptions()).indexes[0].partitions
    assert lopsided is not None
    assert lopsided.largest > 10_000, "one partition gets most of what is far from all"
    assert replace(lopsided, threshold=2.0).to_json()["retrain"]
    assert lopsided.imbalance == lopsided.largest / lopsided.smallest
    assert replace(lopsided, smallest=0).imbalance == lopsided.largest
    assert not replace(lopsided, threshold=1e9).to_json()["retrain"]


# -- what index_catchup says


def forget(uri: str, **said: dict[UUID, int]) -> None:
    """Clear index_catchup, as pylance's compaction may, or let it say something else."""
    table = open_table(uri)
    claims = {name: said.get(name) for name in base_indexes(table)}
    change = IndexChange(with_catchup(table.index.details, claims))
    commit_indexes(table, change, CommitNote("test", "a run", "0"))


@pytest.mark.long
def test_claims_that_pylance_cleared_or_left_are_set_right(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    catchup.apply(open_table(uri), CatchupOptions())
    forget(uri)
    version = open_table(uri).version
    report = catchup.apply(open_table(uri), CatchupOptions())
    assert {one.decision for one in report.indexes} == {"recorded"}
    assert open_table(uri).version == version + 1, "one commit for all"
    check_claims(open_table(uri))
    write(uri, 1)
    few = catchup.apply(open_table(uri), CatchupOptions(min_uncovered_rows=1000))
    assert few.decision == "unchanged"
    assert {claim[REGION] for claim in claims(open_table(uri)).values()} == {1}, "that much it does cover"


def test_an_index_that_lost_coverage_claims_nothing(tmp_path: Path) -> None:
    """A column that is rewritten in place takes its fragments out of its index; not every release tells."""
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    catchup.apply(open_table(uri), CatchupOptions())
    fragment = lance.dataset(uri).get_fragments()[0]
    ids = fragment.to_table(columns=["id"], with_row_address=True)
    other = pa.table({"_rowaddr": ids["_rowaddr"], "kind": pa.array(["x"] * ids.num_rows)})
    changed, fields = fragment.update_columns(other.to_reader(), left_on="_rowaddr", right_on="_rowaddr")
    operation = lance.LanceOperation.Update(updated_fragments=[changed], fields_modified=fields)
    lance.LanceDataset.commit(uri, operation, read_version=lance.dataset(uri).version)
    table = open_table(uri)
    assert coverage(base_indexes(table)["kind_idx"].covered, table.manifest).uncovered
    forget(uri, kind_idx={REGION: 1}, id_idx={REGION: 1})
    table = open_table(uri)
    catchup.apply(table, CatchupOptions(min_uncovered_rows=10**6))
    assert claims(open_table(uri))["kind_idx"] == {REGION: 0}
    assert claims(open_table(uri))["id_idx"] == {REGION: 1}, "this one still covers it"
    report = catchup.apply(open_table(uri), CatchupOptions())
    assert {one.name: one.decision for one in report.indexes if one.decision != "unchanged"} == {"kind_idx": "updated"}
    check_claims(open_table(uri))
    assert lance.dataset(uri).count_rows("kind = 'x'") == ids.num_rows


def test_the_region_layouts_absent_index_is_not_taken_for_caught_up(tmp_path: Path) -> None:
    """The specification reads it so (S0-079)."""
    made = RegionLayout(1, regions=1, base_rows=60).create(str(tmp_path / "t.lance")).step(4)
    made.close()
    merge.apply(open_table(made.uri), merge.MergeOptions())
    assert claims(open_table(made.uri)) == {}
    catchup.apply(open_table(made.uri), CatchupOptions(min_uncovered_rows=10**6))
    said = claims(open_table(made.uri))
    assert said == {"id_idx": dict.fromkeys(open_table(made.uri).index.merged_generations, 0)}


# -- beside others


def run_beside(uri: str, others: Any, options: CatchupOptions) -> CatchupReport:
    """Catch up while others work right before the first version is put."""
    table = open_table(uri)
    store = Beside(table.store, "put_if_absent", lambda path, _: path.startswith("_versions"), others)
    return catchup.apply(replace(table, store=store), options)


def test_a_merge_in_between_costs_no_second_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    builds, merged = [], []

    def others() -> None:
        write(uri, 1)
        merged.append(open_table(uri).version)

    real = building.update_index
    monkeypatch.setattr(building, "update_index", lambda *a, **k: (builds.append(a[1]), real(*a, **k))[1])
    report = run_beside(uri, others, CatchupOptions(indexes=("id_idx",)))
    assert builds == ["id_idx"]
    assert report.commit_conflicts == 1
    table = open_table(uri)
    assert table.index.merged_generations == {REGION: 2}
    assert claims(table)["id_idx"] == {REGION: 1}, "built before generation 2 was merged"
    assert [table.version - 1] == merged, "no version claimed more, to be corrected by the next"
    check_queries(uri, expected(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["compaction", "optimize", "replaced", "dropped", "rewritten"])
def test_an_index_that_others_change_meanwhile_is_built_again(tmp_path: Path, what: str) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)

    def others() -> None:
        dataset = lance.dataset(uri)
        if what == "compaction":
            dataset.optimize.compact_files()
        elif what == "optimize":
            dataset.optimize.optimize_indices(index_names=["kind_idx"])
        elif what == "replaced":
            dataset.create_scalar_index("kind", "BTREE", name="kind_idx", replace=True)
        elif what == "dropped":
            dataset.drop_index("kind_idx")
        else:
            dataset.update({"kind": "'z'"}, where="id = 300")

    report = run_beside(uri, others, CatchupOptions(indexes=("kind_idx",)))
    (one,) = report.indexes
    table = open_table(uri)
    want = expected(1)
    dataset = lance.dataset(uri)
    for stamp in ("old", "new"):
        found = sorted(dataset.to_table(columns=["id"], filter=f"kind = '{stamp}0'").column("id").to_pylist())
        gone = {300} if what == "rewritten" else set()
        assert found == sorted(n for n, s in want.items() if s == stamp and n % 5 == 0 and n not in gone)
    assert one.decision == ("dropped" if what == "dropped" else one.decision)
    if what != "dropped":
        index = base_indexes(table)["kind_idx"]
        behind = coverage(index.covered, table.manifest)
        assert behind.complete or what == "rewritten"
        if behind.complete:
            assert claims(table)["kind_idx"] == {REGION: 1}
    for version in {one["version"] for one in dataset.versions()}:
        lance.dataset(uri, version=version).to_table(filter="kind = 'old0'")


def test_a_build_that_pylance_gives_up_for_a_compaction_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at what was committed meanwhile before it says what it built; we began at an older version."""
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    write(uri, 1)
    real = building.update_index
    builds: list[int] = []

    def late(table: Table, name: str, **options: Any) -> Any:
        if not builds:
            assert lance.dataset(uri).optimize.compact_files().fragments_removed
        builds.append(table.version)
        return real(table, name, **options)

    monkeypatch.setattr(building, "update_index", late)
    report = catchup.apply(open_table(uri), CatchupOptions(indexes=("kind_idx",)))
    assert [one.decision for one in report.indexes] == ["updated"]
    assert report.commit_conflicts == 1
    assert builds[0] < builds[1]
    assert claims(open_table(uri))["kind_idx"] == {REGION: 2}


def test_a_table_that_must_not_be_written(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    damage.set_feature_flag(uri, reader=False)
    with pytest.raises(UnsupportedFeatureError):
        catchup.apply(open_table(uri), CatchupOptions())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["ä b", "100%25", "a#b"])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    uri = create(str(tmp_path / f"{name}.lance"))
    write(uri, 0)
    want = read_base(uri)
    assert {one.decision for one in catchup.apply(open_table(uri), CatchupOptions()).indexes} == {"updated"}
    assert snapshot.apply(open_table(uri), snapshot.SnapshotOptions(0)).decision == "built"
    assert read_base(uri) == want
    shutil.rmtree(uri)
