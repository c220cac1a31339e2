"""The MemWAL index is removed and made again: lancedb's unset_lsm_write_spec() and set_lsm_write_spec()."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, RegionWriter, create_mem_wal, read
from tests.integration.contracts import small
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import contents, run_here
from tests.support.tables.reading import read_base

if TYPE_CHECKING:
    from pathlib import Path

REGION = uuid.UUID(small.REGION)


@pytest.fixture(params=["ours", "pylance"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return merged_by(request.param, tmp_path)


def merged_by(merger: str, folder: Path) -> str:
    """Generations 1 to 3 are merged, by this project or by pylance's own marked upserts; a user changed row 0 since."""
    made = small.make(folder)
    for number in range(3):
        small.flush(made, small.rows(0, number + 1, 1.0))
        if merger == "pylance":
            small.upsert(lance.dataset(made), small.rows(0, number + 1, 1.0), number + 1)
    merge.apply(open_table(made), merge.MergeOptions())
    small.upsert(lance.dataset(made), small.rows(0, 1, 9.0))
    return made


def unset(uri: str) -> None:
    lance.dataset(uri).drop_index("__lance_mem_wal")


def set_again(uri: str) -> None:
    lance.dataset(uri).initialize_mem_wal(unsharded=True)


def collected(uri: str) -> None:
    """Whatever may be expired and collected at once."""
    catchup.apply(open_table(uri), catchup.CatchupOptions())
    expire.apply(open_table(uri), expire.ExpireOptions(timedelta(0), allow_unsafe=True))
    gc.apply(open_table(uri), IMMEDIATE)


def values(uri: str) -> dict[Any, Any]:
    return {row["id"]: row["val"] for row in read_base(uri).values()}


def progress(uri: str) -> dict[uuid.UUID, int]:
    return dict(open_table(uri).index.merged_generations)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_merging_continues_where_it_was(uri: str, *, drained: bool, waiting: bool, times: int) -> None:
    """No row that was merged is merged again, over a newer one of the base; none is left out."""
    if drained:
        collected(uri)
    if waiting:
        small.flush(uri, small.rows(50, 51, 4.0))
    for _ in range(times):
        unset(uri)
        small.upsert(lance.dataset(uri), small.rows(1, 2, 8.0))
        set_again(uri)
    small.flush(uri, small.rows(60, 61, 5.0))
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    found = values(uri)
    assert (found[0], found[1], found[2]) == (9.0, 8.0, 1.0), "what was merged before is not merged again"
    assert (found[50], found[60]) == (4.0 if waiting else 0.0, 5.0)
    assert progress(uri) == {REGION: 5 if waiting else 4}
    collected(uri)
    small.flush(uri, small.rows(61, 62, 6.0))
    assert run_job(uri, "maintain", apply=True).exit_code == 0
    assert values(uri)[61] == 6.0


def test_restored_before_there_is_anything_to_merge(uri: str) -> None:
    """Otherwise the versions that show it may be expired by then."""
    unset(uri)
    set_again(uri)
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "nothing_to_merge"
    assert progress(uri) == {REGION: 3}
    version = lance.dataset(uri).version
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "nothing_to_merge"
    assert lance.dataset(uri).version == version, "once"
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    small.flush(uri, small.rows(60, 61, 5.0))
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    assert values(uri)[0] == 9.0


def test_a_region_of_which_nothing_was_merged(tmp_path: Path) -> None:
    made = small.make(tmp_path)
    small.flush(made, small.rows(0, 1, 1.0))
    unset(made)
    set_again(made)
    assert merge.apply(open_table(made), merge.MergeOptions()).decision == "merged"
    assert values(made)[0] == 1.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_overwrite_in_between_is_asked(uri: str, when: str) -> None:
    """The rows of the regions are not those of the table that was written over it."""
    if when == "before":
        lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    else:
        unset(uri)
        lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    set_again(uri)
    report = merge.apply(open_table(uri), merge.MergeOptions())
    assert (report.decision, report.blocked[0].error.reason) == ("blocked", "region_replaced")
    assert progress(uri) == {}
    assert lance.dataset(uri).count_rows() == 3
    gc.apply(open_table(uri), IMMEDIATE)
    with pytest.raises(MemwalOpsError, match="index"):
        run_job(uri, "why", target=f"{small.REGION}/1")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drained", [False, True])
def test_the_table_is_maintained_while_it_is_unset(
    uri: str, capfd: pytest.CaptureFixture[str], *, drained: bool
) -> None:
    """All jobs that a plain table has; the regions, and the versions that show what is merged, are kept."""
    if drained:
        collected(uri)
    small.flush(uri, small.rows(50, 51, 4.0))
    unset(uri)
    kept = lance.dataset(uri).version - 1
    for at in range(3):
        lance.write_dataset(small.rows(200 + at, 201 + at), uri, mode="append")
    said = run_here(capfd, "inspect", uri)
    assert said.code == 0
    assert "1 region" in said.out
    assert "MemWAL index was removed after version" in " ".join(said.out.split())
    for command in (("verify",), ("gc",), ("expire",), ("maintain", "--apply"), ("why", small.REGION)):
        ran = run_here(capfd, command[0], uri, *command[1:])
        assert ran.code == 0, (command, ran.err, ran.out)
    ran = run_here(capfd, "maintain", uri, "--apply", "--older-than", "0s", "--orphan-min-age", "0", "--allow-unsafe")
    assert ran.code == 0
    assert next(one["version"] for one in lance.dataset(uri).versions()) == kept
    assert open_table(uri).region(REGION).latest().current_generation == 5
    set_again(uri)
    small.flush(uri, small.rows(60, 61, 5.0))
    assert run_here(capfd, "maintain", uri, "--apply", "--older-than", "0s", "--allow-unsafe").code == 0
    found = values(uri)
    assert (found[0], found[50], found[60], found[200]) == (9.0, 4.0, 5.0, 0.0)
    assert next(one["version"] for one in lance.dataset(uri).versions()) > kept, "it is not needed any more"


@pytest.mark.sampled(1)
def test_an_operator_states_what_is_merged(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The versions that show it are gone, and an earlier answer was that nothing is merged: it blocked for good."""
    unset(uri)
    set_again(uri)
    adopt = ("adopt", uri, "--region", small.REGION[:8])
    if run_here(capfd, *adopt, "--as", "unmerged", "--json").document["decision"] == "planned":
        assert run_here(capfd, *adopt, "--as", "unmerged", "--apply").code == 0
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    unlisted(uri, 1)
    small.flush(uri, small.rows(60, 61, 5.0))
    report = merge.apply(open_table(uri), merge.MergeOptions())
    assert (report.decision, report.blocked[0].error.reason) == ("blocked", "generation_missing")
    for wrong in ("5", "9"):
        assert run_here(capfd, *adopt, "--as", "merged", "--up-to", wrong).code == 2
    assert run_here(capfd, *adopt, "--as", "unmerged", "--up-to", "3").code == 2
    assert run_here(capfd, "adopt", uri, "--as", "merged", "--up-to", "3").code == 2
    before = lance.dataset(uri).version
    planned = run_here(capfd, *adopt, "--as", "merged", "--up-to", "3")
    assert "would be recorded as merged up to generation 3" in " ".join(planned.out.split())
    assert lance.dataset(uri).version == before
    assert run_here(capfd, *adopt, "--as", "merged", "--up-to", "3", "--apply").code == 0
    assert progress(uri) == {REGION: 3}
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    found = values(uri)
    assert (found[0], found[2], found[60]) == (9.0, 1.0, 5.0)
    collected(uri)
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "nothing_to_merge"


def unlisted(uri: str, generation: int) -> None:
    """As gc leaves it."""
    manifests = open_table(uri).region(REGION)
    assert manifests.commit(manifests.latest().next().without_generations({generation}))


def test_a_merge_is_refused_while_it_is_unset(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    small.flush(uri, small.rows(50, 51, 4.0))
    unset(uri)
    ran = run_here(capfd, "merge", uri)
    assert ran.code in {2, 5}
    text = " ".join(ran.err.split())
    assert "move _mem_wal" not in text
    assert "set_lsm_write_spec" in text


def test_init_makes_the_index_again(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With the progress that it had: no read in between has values of merged generations over newer ones."""
    small.flush(uri, small.rows(50, 51, 4.0))
    unset(uri)
    small.upsert(lance.dataset(uri), small.rows(1, 2, 8.0))
    before = contents(uri)
    assert run_here(capfd, "init", uri, "--dry-run").code == 0
    assert contents(uri) == before
    assert run_here(capfd, "init", uri, "--json").document["decision"] == "created"
    assert progress(uri) == {REGION: 3}
    found = {row["id"]: row["val"] for row in read(uri).scan().to_table().to_pylist()}
    assert (found[0], found[1], found[2], found[50]) == (9.0, 8.0, 1.0, 4.0)
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    assert values(uri) == found
    assert progress(uri) == {REGION: 4}


def test_init_is_refused_for_regions_of_another_table(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    unset(uri)
    lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    before = contents(uri)
    assert run_here(capfd, "init", uri).code == 2
    assert contents(uri) == before


def routed(path: Path) -> str:
    """A table of this project's own layout: two specs, generations of either that are merged, and one that is not."""
    uri = f"{path}/t.lance"
    made = lance.write_dataset(small.rows(0, 100), uri)
    made.create_scalar_index("id", "BTREE")
    made.create_scalar_index("val", "BTREE")
    create_mem_wal(
        uri, region_specs=[RegionSpec((RegionField.parse("bucket(id, 2)"),))], maintained_indexes=["val_idx"]
    )
    with RegionRouter(uri) as router:
        router.put(small.rows(0, 4, 1.0))
    for writer in router.writers.values():
        RegionWriter(uri, writer.region_id).seal()
    assert run_job(uri, "merge").decision == "merged"
    create_mem_wal(uri, region_specs=[RegionSpec((RegionField.parse("bucket(id, 4)"),))])
    with RegionRouter(uri) as router:
        router.put(small.rows(0, 8, 2.0))
    assert run_job(uri, "merge").decision == "merged"
    with RegionRouter(uri) as router:
        router.put(small.rows(4, 12, 3.0))
    return uri


@pytest.mark.sampled(1)
@pytest.mark.parametrize("again", ["init", "init with a spec", "pylance, merge", "pylance, init"])
def test_region_specs_are_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str], again: str) -> None:
    """Without its spec, a region has no values, by which a router finds it."""
    uri = routed(tmp_path)
    before = open_table(uri).index
    unset(uri)
    small.upsert(lance.dataset(uri), small.rows(20, 21, 7.0))
    specs = 2
    if again.startswith("pylance"):
        lance.dataset(uri).initialize_mem_wal()
        with pytest.raises(MemwalOpsError, match="no region specs") as refused:
            RegionRouter(uri)
        assert "memwal-ops init" in refused.value.remedy
    if again == "pylance, merge":
        assert run_job(uri, "merge").decision == "merged"
    elif again == "init with a spec":
        ran = run_here(capfd, "init", uri, "--region-field", "bucket(id, 8)", "--json")
        assert ran.document["decision"] == "created"
        specs = 3
    else:
        assert run_here(capfd, "init", uri).code == 0
    index = open_table(uri).index
    assert [one.spec_id for one in index.region_specs] == [*range(1, specs + 1)]
    assert index.region_specs[:2] == before.region_specs
    assert index.maintained_indexes == ("val_idx",)
    assert run_job(uri, "merge").exit_code == 0
    if specs == 2:
        with RegionRouter(uri) as router:
            router.put(small.rows(0, 1, 5.0))
        assert run_job(uri, "merge").decision == "merged"
    found = values(uri)
    assert (found[0], found[3], found[4], found[20]) == (5.0 if specs == 2 else 2.0, 2.0, 3.0, 7.0)
    version = lance.dataset(uri).version
    assert run_here(capfd, "init", uri, "--json").document["decision"] == "unchanged"
    assert lance.dataset(uri).version == version


@pytest.mark.long
def test_an_index_that_lacks_merged_rows_is_not_caught_up(tmp_path: Path) -> None:
    """By the specification, an index without an entry is: a query by it would find the rows nowhere."""
    uri = routed(tmp_path)
    assert run_job(uri, "merge").decision == "merged"
    unset(uri)
    create_mem_wal(uri)
    index = open_table(uri).index
    assert index.merged_generations
    covered = index.index_catchup.get("val_idx", index.merged_generations)
    assert all(covered[one] < merged for one, merged in index.merged_generations.items())
    assert run_job(uri, "catchup").exit_code == 0
    assert open_table(uri).index.index_catchup["val_idx"] == index.merged_generations


def test_what_shows_that_unmerged_regions_are_the_tables_own_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is merged, so that no version shows progress; without the index, they would be of another table."""
    made = small.make(tmp_path)
    small.flush(made, small.rows(0, 1, 1.0))
    unset(made)
    for at in range(3):
        lance.write_dataset(small.rows(200 + at, 201 + at), made, mode="append")
    ran = run_here(capfd, "expire", made, "--older-than", "0s", "--keep", "1", "--apply", "--allow-unsafe")
    assert ran.code == 0
    set_again(made)
    assert run_job(made, "merge").decision == "merged"
    assert values(made)[0] == 1.0


def test_by_lancedb(tmp_path: Path) -> None:
    """Its own unset and set, with an index added in between, as its documentation asks for."""
    lancedb: Any = pytest.importorskip("lancedb", reason="lancedb is not installed; pylance does the same above")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])

    def rows(keys: range, text: str) -> pa.Table:
        return pa.table({"id": [*keys], "text": [text] * len(keys)}, schema=schema)

    def put(keys: range, text: str) -> None:
        table = database.open_table("t")
        table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows(keys, text))
        table.close_lsm_writers()

    database = lancedb.connect(str(tmp_path))
    made = database.create_table("t", rows(range(10), "base"))
    made.set_unenforced_primary_key("id")
    made.set_lsm_write_spec(lancedb.LsmWriteSpec.unsharded())
    uri = str(tmp_path / "t.lance")
    put(range(5, 15), "first")
    assert run_job(uri, "maintain", apply=True).exit_code == 0
    put(range(14, 16), "second")
    made = database.open_table("t")
    made.unset_lsm_write_spec()
    assert run_job(uri, "maintain", apply=True).exit_code == 0
    made.create_index("text", config=pytest.importorskip("lancedb.index").BTree())
    put(range(1), "unset")
    made.set_lsm_write_spec(lancedb.LsmWriteSpec.unsharded())
    put(range(20, 21), "third")
    assert run_job(uri, "merge").decision == "merged"
    expected = dict.fromkeys(range(10), "base") | dict.fromkeys(range(5, 15), "first") | {0: "unset", 20: "third"}
    expected |= dict.fromkeys(range(14, 16), "second")
    found = database.open_table("t").search().limit(100).to_list()
    assert {row["id"]: row["text"] for row in found} == expected
    assert len(found) == len(expected)
    assert lance.dataset(uri).count_rows() == len(expected)
