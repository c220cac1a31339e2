"""The merge against a dictionary: any workload, any slices, both layouts."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_lsm, read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import WRITER_KEYS
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine
    from tests.support.tables.lsm_table import LsmTable

LAYOUTS: dict[str, type[LsmTable]] = {"shard": Workload, "region": RegionLayout}
OTHER_KEYS = ["string", "large_string", "binary", "timestamp", "date", "decimal", "fixed_binary", "int32", "composite"]


def progress(uri: str) -> dict[str, int]:
    return dict(wire.progress(Files(uri, None)))


def read_all(table: LsmTable) -> dict[Any, Any]:
    """What a reader of the whole table sees: pylance's own where it reads the layout, ours by the spec elsewhere."""
    return read_lsm(table.uri) if isinstance(table, Workload) else read_spec(table.uri)


def check(table: LsmTable) -> None:
    """Base = exactly the merged generations; base + the rest = everything that was flushed."""
    merged = progress(table.uri)
    assert_same(read_base(table.uri), table.model.expected(merged), seed=table.seed)
    flushed = {
        region: max(wire.region_manifest(Files(table.uri, None), region).generations, default=0)
        for region in wire.regions(Files(table.uri, None))
    }
    assert_same(read_all(table), table.model.expected(flushed), seed=table.seed)


def make(layout: str, seed: int, path: Path, **options: Any) -> LsmTable:
    table = LAYOUTS[layout](seed, **options)
    return table.create(str(path / "t.lance"))


def random_options(rng: random.Random, regions: list[str], *, fewer: bool) -> merge.MergeOptions:
    some = tuple(UUID(region) for region in regions if rng.random() < 0.7)
    return merge.MergeOptions(
        regions=some if rng.random() < 0.5 else (),
        max_bytes=rng.choice([60_000, 1 << 36] if fewer else [1, 20_000, 200_000, 1 << 30]),
        max_generations=rng.choice([None, 8] if fewer else [None, 1, 2, 5]),
    )


@pytest.mark.req("S0-156", "S0-157", "S0-158", "S0-159", "S0-162", "S0-192", "S0-193")
@pytest.mark.parametrize("layout", ["shard", "region"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_random_workloads_in_random_slices_equal_the_dictionary(
    tmp_path: Path, layout: str, seed: int, engine: MergeEngine | None
) -> None:
    if engine is not None and seed != ["shard", "region"].index(layout):
        pytest.skip("one seed does for Spark: tests/system/spark holds it to the local engine on many backlogs")
    table = make(layout, seed, tmp_path, regions=3, columns="vector" if seed % 2 else "plain")
    rng = random.Random(seed)
    for _ in range(5):
        table.step(rng.randint(2, 8))
        if rng.random() < 0.7:
            table.flush()
        regions = [region for region in table.regions if region in wire.regions(Files(table.uri, None))]
        merge.apply(open_table(table.uri), random_options(rng, regions, fewer=engine is not None), engine=engine)
        check(table)
    table.close()
    report = merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    assert report.backlog_after.to_json()["generations"] == 0
    assert_same(read_base(table.uri), table.model.expected(), seed=seed)
    check(table)


@pytest.mark.sampled(9)
@pytest.mark.req("S0-002")
@pytest.mark.parametrize("key", OTHER_KEYS)
@pytest.mark.parametrize("layout", ["shard", "region"])
def test_every_kind_of_key(tmp_path: Path, layout: str, key: str, engine: MergeEngine | None) -> None:
    if layout == "shard" and key not in WRITER_KEYS:
        pytest.skip("pylance's writer refuses this kind of key")
    table = make(layout, 11, tmp_path, key=key, base_rows=300)
    table.step(12)
    table.close()
    options = merge.MergeOptions(max_generations=2 if engine is None else None)
    assert merge.apply(open_table(table.uri), options, engine=engine).decision == "merged"
    assert_same(read_base(table.uri), table.model.expected(), seed=11)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", ["vector", "nested", "wide"])
@pytest.mark.parametrize("layout", ["shard", "region"])
@pytest.mark.parametrize("stable", [False, True])
def test_every_kind_of_column(
    tmp_path: Path, layout: str, columns: str, stable: bool, engine: MergeEngine | None
) -> None:
    table = make(layout, 5, tmp_path, columns=columns, stable_row_ids=stable, base_rows=300)
    table.step(12)
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions(max_generations=3 if engine is None else None), engine=engine)
    assert_same(read_base(table.uri), table.model.expected(), seed=5)


@pytest.mark.req("S3-056", "S3-058")
def test_a_rewritten_row_keeps_its_stable_row_id(tmp_path: Path, engine: MergeEngine | None) -> None:
    table = make("shard", 1, tmp_path, stable_row_ids=True, regions=1, base_rows=50)
    table.put([3, 4, 70, 71])
    table.delete([5])
    table.close()
    key = table.model.keys[0]
    before = {
        row[key]: row["_rowid"]
        for row in lance.dataset(table.uri).scanner([key], with_row_id=True).to_table().to_pylist()
    }
    merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    after = {
        row[key]: row["_rowid"]
        for row in lance.dataset(table.uri).scanner([key], with_row_id=True).to_table().to_pylist()
    }
    gone = before.keys() - after.keys()
    assert len(gone) == 1
    assert {k: v for k, v in after.items() if k in before} == {k: v for k, v in before.items() if k not in gone}
    fresh = [v for k, v in after.items() if k not in before]
    assert len(fresh) == 2
    assert min(fresh) > max(before.values())


@pytest.mark.parametrize("with_btree", [True, False])
def test_with_and_without_an_index_on_the_key(tmp_path: Path, with_btree: bool, engine: MergeEngine | None) -> None:
    table = make("shard", 2, tmp_path, with_btree=with_btree, base_rows=4000, regions=1)
    table.put([1, 2, 5000])
    table.delete([7])
    table.close()
    report = merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    assert [one.result.use_index for one in report.passes if one.result] == [with_btree]
    assert_same(read_base(table.uri), table.model.expected())


def test_only_tombstones_of_absent_keys(tmp_path: Path, engine: MergeEngine | None) -> None:
    table = make("shard", 3, tmp_path, regions=1, base_rows=10)
    table.delete([1000, 1001])
    table.close()
    report = merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    assert report.decision == "merged"
    assert [(one.result.rows_upserted, one.result.rows_deleted) for one in report.passes if one.result] == [(0, 0)]
    assert progress(table.uri) == {table.regions[0]: 1}
    check(table)


def test_only_tombstones(tmp_path: Path, engine: MergeEngine | None) -> None:
    table = make("shard", 3, tmp_path, regions=1, base_rows=10)
    table.delete(list(range(10)))
    table.close()
    report = merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    assert [(one.result.rows_upserted, one.result.rows_deleted) for one in report.passes if one.result] == [(0, 10)]
    assert read_base(table.uri) == {}
    table.put([1, 2])
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    check(table)


def test_deleted_and_inserted_again_across_generations(tmp_path: Path, engine: MergeEngine | None) -> None:
    table = make("shard", 4, tmp_path, regions=1, base_rows=10)
    for _ in range(3):
        table.put([1, 50])
        table.flush()
        table.delete([1, 50])
        table.flush()
    table.put([50])
    table.flush()
    for _ in range(7):
        merge.apply(open_table(table.uri), merge.MergeOptions(max_generations=1), engine=engine)
    check(table)
    assert len(read_base(table.uri)) == 10  # key 1 of the base is gone, key 50 is new


@pytest.mark.parametrize("layout", ["shard", "region"])
def test_a_key_twice_in_one_generation(tmp_path: Path, layout: str, engine: MergeEngine | None) -> None:
    table = make(layout, 6, tmp_path, regions=1, base_rows=10)
    table.put([1, 2, 1])
    table.put([2, 60])
    table.delete([60])
    table.put([60])
    table.delete([2])
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    check(table)


@pytest.mark.req("S0-168", "S0-212")
def test_a_second_merge_finds_nothing(tmp_path: Path, engine: MergeEngine | None) -> None:
    table = make("shard", 8, tmp_path)
    table.step(5)
    table.close()
    assert merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine).decision == "merged"
    version = lance.dataset(table.uri).version
    assert merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine).decision == "nothing_to_merge"
    assert lance.dataset(table.uri).version == version


def test_every_retained_version_reads_as_it_did(tmp_path: Path, engine: MergeEngine | None) -> None:
    table = make("shard", 9, tmp_path)
    table.step(10)
    table.close()
    seen = {v["version"]: read_base(table.uri, version=v["version"]) for v in lance.dataset(table.uri).versions()}
    merge.apply(open_table(table.uri), merge.MergeOptions(max_generations=1), engine=engine)
    for version, rows in seen.items():
        assert_same(read_base(table.uri, version=version), rows)


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    table = make("shard", 10, tmp_path)
    table.step(5)
    table.close()
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "t.lance").rglob("*"))
    report = merge.plan(open_table(table.uri), merge.MergeOptions(max_generations=1))
    assert report.decision == "dry_run"
    assert report.passes
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "t.lance").rglob("*")) == before


def test_a_writer_that_continues_sees_its_rows(tmp_path: Path) -> None:
    table = make("shard", 12, tmp_path, regions=2)
    assert isinstance(table, Workload)
    for _ in range(4):
        table.step(4)
        table.flush(table.regions[0])
        merge.apply(open_table(table.uri), merge.MergeOptions())
        table.step(2)
        seen = table.read_open(table.regions[0])
        mine = {operation.key for operation in table.model.log if operation.region == table.regions[0]}
        expected = {key: row for key, row in table.model.expected().items() if key in mine}
        assert_same({key: row for key, row in seen.items() if key in mine}, expected)
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions())
    assert_same(read_base(table.uri), table.model.expected())


def test_an_empty_base_table(tmp_path: Path, engine: MergeEngine | None) -> None:
    table = make("region", 13, tmp_path, base_rows=1)
    lance.dataset(table.uri).delete("true")
    table.model.base.clear()
    table.step(6)
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions(), engine=engine)
    assert_same(read_base(table.uri), table.model.expected())


@pytest.mark.long
def test_a_program_that_uses_it_keeps_its_stdout(tmp_path: Path) -> None:
    table = make("shard", 14, tmp_path)
    table.step(5)
    table.close()
    code = "from memwal_ops import open_table; from memwal_ops.formats.lance.jobs import merge; "
    code += f"assert merge.apply(open_table({table.uri!r}), merge.MergeOptions()).decision == 'merged'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
