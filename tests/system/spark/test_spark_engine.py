"""What only the Spark engine has to get right: refusals out of tasks, lost races, secrets, a user's session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import structlog

from memwal_ops import open_table
from memwal_ops.core.spark import stages
from memwal_ops.formats.lance.commit.commit import CommitLostError
from memwal_ops.formats.lance.engines.spark import engine
from memwal_ops.formats.lance.engines.spark.engine import DRIVER_KEY_BYTES, SparkMergeEngine
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.spark import bulk_merge
from tests.support.tables import damage
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.unreferenced import unreferenced
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from memwal_ops.core.spark.stages import StageProgress

pytestmark = pytest.mark.timeout(1800)  # the first test starts Spark, on whatever machine this runs


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(5, regions=3, base_rows=300).create(str(tmp_path / "t.lance")).step(14)
    made.close()
    return made


@pytest.fixture(params=[DRIVER_KEY_BYTES, 0], ids=["broadcast", "shuffle"])
def key_bytes(request: pytest.FixtureRequest) -> int:
    """The keys that the driver resolves: all of these small tables, or none."""
    return int(request.param)


def blocked(report: merge.MergeReport) -> list[dict[str, object]]:
    return [one.to_json() for one in report.blocked]


def both(table: str, other: str, spark: SparkSession, key_bytes: int) -> tuple[merge.MergeReport, merge.MergeReport]:
    """The same merge by the local engine and by Spark, each on its own copy."""
    local = merge.apply(open_table(table), merge.MergeOptions())
    merging = SparkMergeEngine(spark, rows_per_task=50, driver_key_bytes=key_bytes)
    return local, merge.apply(open_table(other), merge.MergeOptions(), engine=merging)


@pytest.mark.parametrize("harm", [damage.remove_generation, damage.remove_generation_data])
def test_a_damaged_generation_blocks_its_region_alone(
    table: Workload, spark: SparkSession, tmp_path: Path, harm: Any, key_bytes: int
) -> None:
    harm(table.uri, table.regions[1], 1)
    other = damage.copy_table(table.uri, str(tmp_path / "other.lance"))
    local, bulk = both(table.uri, other, spark, key_bytes)
    assert local.decision == "blocked"
    assert [(one["region_id"], one["generation"], one["reason"]) for one in blocked(bulk)] == [
        (one["region_id"], one["generation"], one["reason"]) for one in blocked(local)
    ]
    assert_same(read_base(other), read_base(table.uri))


def test_a_key_in_two_regions(spark: SparkSession, tmp_path: Path, key_bytes: int) -> None:
    made = Workload(9, regions=3, base_rows=30).create(str(tmp_path / "t.lance"))
    for number in (1, 2, 3, 4, 5):
        made.put([number])
    made.region_of = lambda number: made.regions[0]  # type: ignore[method-assign]
    made.put([4, 3, 1])
    made.close()
    other = damage.copy_table(made.uri, str(tmp_path / "other.lance"))
    local, bulk = both(made.uri, other, spark, key_bytes)
    assert {one["reason"] for one in blocked(local)} == {"duplicate_keys"}
    assert [(one["region_id"], one["reason"]) for one in blocked(bulk)] == [
        (one["region_id"], one["reason"]) for one in blocked(local)
    ]
    for one in blocked(bulk):
        assert re.match(r"(1 key|2 keys) of region", str(one["detail"]))
        assert "{'id': " in str(one["detail"])
    assert_same(read_base(other), read_base(made.uri))


def test_a_conflict_leaves_no_file(
    table: Workload, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, key_bytes: int
) -> None:
    commit = engine.commit_pass
    others: list[merge.MergeReport] = []

    def late(*arguments: Any) -> int:
        if not others:
            others.append(merge.apply(open_table(table.uri), merge.MergeOptions(max_generations=1)))
        return commit(*arguments)

    monkeypatch.setattr(engine, "commit_pass", late)
    report = merge.apply(
        open_table(table.uri), merge.MergeOptions(), engine=SparkMergeEngine(spark, driver_key_bytes=key_bytes)
    )
    assert others[0].decision == "merged"
    assert (report.decision, report.commit_conflicts) == ("superseded", 1)
    assert_same(read_base(table.uri), table.model.expected(), seed=table.seed)
    assert unreferenced(table.uri) == set()


def test_a_pass_that_fails_before_its_commit_takes_its_files_back(
    table: Workload, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, key_bytes: int
) -> None:
    seen: list[set[str]] = []

    def fail(*_: Any) -> None:
        seen.append(unreferenced(table.uri))
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "all_field_ids", fail)
    with pytest.raises(KeyboardInterrupt):
        merge.apply(
            open_table(table.uri), merge.MergeOptions(), engine=SparkMergeEngine(spark, driver_key_bytes=key_bytes)
        )
    assert seen[0], "the premise: fragments and deletion vectors were written"
    assert unreferenced(table.uri) == set()


def test_from_a_session_of_ones_own(table: Workload, spark: SparkSession) -> None:
    conf = spark.conf
    before = {key: conf.get(key) for key in ("spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled")}
    spark.sparkContext.setJobGroup("mine", "what I do")
    report = bulk_merge(spark, table.uri)
    assert (report.decision, report.engine) == ("merged", "spark")
    assert {key: conf.get(key) for key in before} == before
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") == "mine"
    assert spark.catalog.listTables() == []
    assert_same(read_base(table.uri), table.model.expected(), seed=table.seed)
    result = report.passes[0].result
    assert result is not None
    assert {"open", "keys", "delete", "write", "commit"} <= result.phases.keys()
    assert result.metrics["tasks"] >= 2
    assert result.metrics["shuffle_bytes"] == 0
    assert "incomplete" not in result.metrics
    assert bulk_merge(spark, table.uri).decision == "nothing_to_merge"


def test_a_base_with_the_same_key_twice_is_repaired_alike(spark: SparkSession, tmp_path: Path, key_bytes: int) -> None:
    """Landmine 16 leaves such tables; the winner of a key replaces all its rows."""
    made = Workload(7, regions=1, base_rows=60, with_btree=False).create(str(tmp_path / "t.lance"))
    lance.write_dataset(lance.dataset(made.uri).to_table().slice(0, 20), made.uri, mode="append")
    made.put(list(range(10)))
    made.delete([11])
    made.close()
    other = damage.copy_table(made.uri, str(tmp_path / "other.lance"))
    both(made.uri, other, spark, key_bytes)
    rows = [sorted(lance.dataset(uri).to_table().to_pylist(), key=repr) for uri in (made.uri, other)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 60 + 20 - 10 - 2


def test_how_far_each_stage_is(table: Workload, spark: SparkSession, key_bytes: int) -> None:
    told: dict[str, StageProgress] = {}
    merging = SparkMergeEngine(
        spark, rows_per_task=50, driver_key_bytes=key_bytes, on_progress=lambda one: told.update({one.stage: one})
    )
    report = merge.apply(open_table(table.uri), merge.MergeOptions(), engine=merging)
    (result,) = [one.result for one in report.passes]
    assert result is not None
    # The base has one fragment, which one task scans for all keys; a shuffled join has several.
    least = {"write": 2, "delete": 1} if key_bytes else {"keys": 2, "write": 2, "delete": 2}
    for name, count in least.items():
        assert told[name].tasks_done == told[name].tasks >= count
    assert (told["keys"].tasks == 0) == (key_bytes > 0) == (result.metrics["shuffle_bytes"] == 0)
    assert told["keys"].rows == result.rows_read
    assert told["write"].rows == result.rows_upserted
    assert 0 < told["delete"].rows < told["keys"].rows
    assert 16 * result.rows_read <= told["keys"].bytes <= 17 * result.rows_read
    written = lance.dataset(table.uri).get_fragments()
    sizes = {Path(table.uri, "data", file.path).stat().st_size for one in written for file in one.metadata.files}
    assert 0 < told["write"].bytes < sum(sizes)


def test_files_that_a_version_may_name_stay_and_are_named(
    table: Workload, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, key_bytes: int
) -> None:
    """The commit was published, and cleaned up by others: its number is lost, its files may be in use."""
    commit = engine.commit_pass
    lost: list[str] = []

    def late(of: Any, change: Any, *rest: Any) -> int:
        if lost:
            return commit(of, change, *rest)
        lost.extend(change.written_files())
        raise CommitLostError("published and cleaned up by others", files_unreferenced=False)

    monkeypatch.setattr(engine, "commit_pass", late)
    with structlog.testing.capture_logs() as logs:
        report = merge.apply(
            open_table(table.uri), merge.MergeOptions(), engine=SparkMergeEngine(spark, driver_key_bytes=key_bytes)
        )
    assert (report.decision, report.commit_conflicts) == ("merged", 1)
    assert_same(read_base(table.uri), table.model.expected(), seed=table.seed)
    assert unreferenced(table.uri) == set(lost)
    (left,) = [one for one in logs if one["event"] == "files_left"]
    assert left["files"] == lost


def test_no_row_of_payload_crosses_the_shuffle(
    table: Workload, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every column that enters or leaves a task is a key, a number, or the account of what was written."""
    schemas: list[str] = []
    frames = type(spark.range(1))
    real = frames.mapInArrow

    def watched(frame: Any, function: Any, schema: str, *rest: Any) -> Any:
        schemas.append(schema)
        return real(frame, function, schema, *rest)

    monkeypatch.setattr(frames, "mapInArrow", watched)
    merge.apply(open_table(table.uri), merge.MergeOptions(), engine=SparkMergeEngine(spark, driver_key_bytes=0))
    columns = {column.strip() for schema in schemas for column in schema.split(",")}
    assert columns == {"key bigint", "locator bigint", "address bigint", "result string"}
    assert pa.types.is_int64(lance.dataset(table.uri).schema.field("id").type)


def test_no_row_of_payload_is_broadcast(table: Workload, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys go to the executors, and a bit for each row; what was written comes back."""
    sent: list[Any] = []
    returned: list[dict[str, Any]] = []
    context = type(spark.sparkContext)
    parallelize, sending, run_parts = context.parallelize, context.broadcast, stages.run_parts

    def watched(real: Any) -> Any:
        def watch(self: Any, value: Any, *rest: Any) -> Any:
            sent.append(value)
            return real(self, value, *rest)

        return watch

    def run(*given: Any) -> list[Any]:
        results = run_parts(*given)
        returned.extend(results)
        return results

    monkeypatch.setattr(context, "parallelize", watched(parallelize))
    monkeypatch.setattr(context, "broadcast", watched(sending))
    monkeypatch.setattr(engine.stages, "run_parts", run)
    bulk_merge(spark, table.uri)
    (keys, is_tombstone), fragments, groups = sent
    assert pa.ipc.open_stream(keys).read_all().column_names == ["id"]
    assert is_tombstone.dtype == np.bool_
    assert fragments == [[one.fragment_id for one in lance.dataset(table.uri, version=1).get_fragments()]]
    assert {(mask.dtype.name, one.row_ids) for one in groups for mask in one.masks} == {("uint8", None)}
    assert {name for one in returned for name in one} == {"updated", "removed", "superseded", "deleted", "fragments"}


@pytest.mark.parametrize(("key", "enough", "short"), [("int64", 17, 16.9), ("string", 100, 12)])
def test_keys_that_are_too_many_for_the_driver_are_shuffled(
    spark: SparkSession, tmp_path: Path, key: Any, enough: float, short: float
) -> None:
    """Numbers by their width, before they are read; text while it is read, as nothing tells its length before.

    ``enough`` and ``short``: bytes for each row.
    """
    made = Workload(3, key=key, regions=2, base_rows=30).create(str(tmp_path / "t.lance")).step(8)
    made.close()
    copies = [damage.copy_table(made.uri, str(tmp_path / f"{number}.lance")) for number in range(2)]
    rows = sum(
        one.result.rows_read for one in merge.apply(open_table(made.uri), merge.MergeOptions()).passes if one.result
    )
    shuffled = []
    for copy, width in zip(copies, (enough, short), strict=True):
        merging = SparkMergeEngine(spark, driver_key_bytes=int(rows * width))
        (one,) = merge.apply(open_table(copy), merge.MergeOptions(), engine=merging).passes
        assert one.result is not None
        assert one.result.rows_read == rows
        shuffled.append(one.result.metrics["shuffle_bytes"] > 0)
        assert_same(read_base(copy), made.model.expected(), seed=made.seed)
    assert shuffled == [False, True]
