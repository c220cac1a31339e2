"""The Spark engine against the local one: generated backlogs, merged by both, equal row by row."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.engines.spark.engine import DRIVER_KEY_BYTES, SparkMergeEngine
from memwal_ops.formats.lance.jobs import merge
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.tables import wire
from tests.support.tables.damage import copy_table
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import rows_by_key
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import ALL_COLUMNS, ALL_KEYS, WRITER_KEYS, primary_key
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.tables.lsm_table import LsmTable
    from tests.support.tables.model import Rows

pytestmark = pytest.mark.timeout(1800)  # the first test starts Spark, on whatever machine this runs
# make bench and the record in benchmarks/README.md take 200; a test run takes a sample.
BACKLOGS = env_number("SPARK_BACKLOGS", 8)
FIRST = CAMPAIGN_SEED * 1000


def backlog(seed: int, path: Path) -> LsmTable:
    """A table of any key, columns and layout, with a base that has deletions, and a backlog on it."""
    rng = random.Random(seed)
    kind = rng.choice([Workload, RegionLayout])
    table: LsmTable = kind(
        seed,
        key=rng.choice(WRITER_KEYS if kind is Workload else ALL_KEYS),
        columns=rng.choice(ALL_COLUMNS),
        regions=rng.randint(1, 4),
        base_rows=rng.choice([1, 60, 300]),
        stable_row_ids=rng.random() < 0.4,
        with_btree=rng.random() < 0.5,
    )
    table.create(str(path / "t.lance"))
    if rng.random() < 0.4:  # a first merge leaves deletion vectors, small fragments and progress
        table.step(6)
        table.flush()
        merge.apply(open_table(table.uri), merge.MergeOptions())
    table.step(rng.randint(4, 16))
    table.close()
    return table


def rows_of(uri: str) -> Rows:
    """All rows by key, with their stable row ids where they have such."""
    dataset = lance.dataset(uri)
    found = dataset.scanner(with_row_id=dataset.has_stable_row_ids).to_table()
    keys = primary_key(dataset.schema)
    rows = rows_by_key(found, keys)
    if dataset.has_stable_row_ids:
        # New rows are numbered in the order of their fragments, which is not guaranteed.
        before = set(lance.dataset(uri, version=1).scanner([], with_row_id=True).to_table()["_rowid"].to_pylist())
        for row in rows.values():
            row["_rowid"] = row["_rowid"] if row["_rowid"] in before else "new"
    return rows


def totals(report: merge.MergeReport) -> dict[str, Any]:
    results = [one.result for one in report.passes if one.result is not None]
    return {
        name: sum(getattr(result, name) for result in results)
        for name in ("rows_read", "rows_upserted", "rows_deleted", "bytes_read")
    }


@pytest.mark.parametrize("plan", ["broadcast", "shuffle"])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + BACKLOGS))
def test_a_generated_backlog(tmp_path: Path, spark: SparkSession, seed: int, plan: str) -> None:
    table = backlog(seed, tmp_path)
    other = copy_table(table.uri, str(tmp_path / "other.lance"))
    # One budget for both: the passes are then the same.
    options = merge.MergeOptions(max_bytes=64 << 30, max_generations=random.Random(seed).choice([None, None, 3]))
    local = merge.apply(open_table(table.uri), options)
    engine = SparkMergeEngine(
        spark,
        rows_per_task=random.Random(seed).choice([50, 50_000]),
        driver_key_bytes=DRIVER_KEY_BYTES if plan == "broadcast" else 0,
    )
    bulk = merge.apply(open_table(other), options, engine=engine)
    assert (bulk.decision, bulk.version) == (local.decision, local.version)
    assert totals(bulk) == totals(local)
    assert_same(rows_of(other), rows_of(table.uri), seed=seed)
    assert wire.progress(Files(other, None)) == wire.progress(Files(table.uri, None))
    assert_same(
        {key: {name: row[name] for name in row if name != "_rowid"} for key, row in rows_of(other).items()},
        table.model.expected(),
        seed=seed,
    )
