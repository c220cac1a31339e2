"""Searches by vector use the index of each source, and no stale row is found (S0-201, S0-205, S0-217, S0-219)."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from memwal_ops import run_job
from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter
from memwal_ops.memwal import RegionWriter, create_mem_wal, read
from tests.support.tables import damage
from tests.support.tables.schemas import PRIMARY_KEY

WIDTH, PARTITIONS = 16, 4
REGION = UUID(int=7)
KIND = pa.list_(pa.float32(), WIDTH)
SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("n", pa.int32()), pa.field("v", KIND)]
)


class Made:
    """A table with an IVF_PQ index that its generations mirror, and its live rows."""

    def __init__(self, uri: str, base: int) -> None:
        self.uri, self.random = uri, np.random.default_rng(3)
        self.centers = self.random.normal(size=(20, WIDTH)) * 3
        self.live: dict[int, dict[str, object]] = {}
        dataset = lance.write_dataset(self.rows(np.arange(base)), uri)
        dataset.create_index("v", "IVF_PQ", num_partitions=PARTITIONS, num_sub_vectors=8, metric="l2")
        dataset.create_scalar_index("id", "BTREE")
        create_mem_wal(uri, maintained_indexes=["v_idx"])
        self.writer = RegionWriter(uri, REGION)

    def rows(self, ids: np.ndarray) -> pa.Table:
        near = self.centers[self.random.integers(0, len(self.centers), len(ids))]
        vectors = (near + self.random.normal(size=(len(ids), WIDTH))).astype(np.float32)
        numbers = self.random.integers(0, 100, len(ids)).astype(np.int32)
        made = pa.table([pa.array(ids), pa.array(numbers), pa.array(list(vectors), KIND)], SCHEMA)
        self.live.update({row["id"]: row for row in made.to_pylist()})
        return made

    def generation(self, ids: np.ndarray, gone: np.ndarray) -> None:
        self.writer.put(self.rows(ids))
        self.delete(gone)
        self.writer.flush()

    def delete(self, gone: np.ndarray) -> None:
        self.writer.delete(pa.table({"id": pa.array(gone)}))
        for one in gone.tolist():
            self.live.pop(one, None)

    @property
    def table(self) -> pa.Table:
        return pa.Table.from_pylist(list(self.live.values()), SCHEMA)


def exact(live: pa.Table, query: np.ndarray, k: int) -> list[int]:
    vectors = np.stack(live["v"].to_numpy(zero_copy_only=False))
    nearest = np.argsort(((vectors - query) ** 2).sum(axis=1), kind="stable")[:k]
    return [live["id"][int(at)].as_py() for at in nearest]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """3,000 rows of the base, ten generations that replace, add and delete, and a log."""
    one = Made(str(tmp_path_factory.mktemp("made") / "t.lance"), 3000)
    for _ in range(10):
        one.generation(one.random.choice(4000, 100, replace=False), one.random.choice(4000, 20, replace=False))
    one.writer.put(one.rows(one.random.choice(4000, 30, replace=False)))
    return one


@pytest.mark.long
@pytest.mark.req("S0-001", "S0-205", "S0-202", "S0-110")
def test_recall_is_that_of_one_table(made: Made, tmp_path: Path) -> None:
    one = lance.write_dataset(made.table, str(tmp_path / "one.lance"))
    one.create_index("v", "IVF_PQ", num_partitions=PARTITIONS, num_sub_vectors=8, metric="l2")
    reader, live = read(made.uri), made.table
    ours = theirs = 0
    for _ in range(12):
        query = (made.centers[made.random.integers(20)] + made.random.normal(size=WIDTH)).astype(np.float32)
        best = {*exact(live, query, 10)}
        found = reader.nearest("v", query, 10)
        assert found.num_rows == 10
        for row in found.to_pylist():
            assert {name: row[name] for name in ("id", "n", "v")} == made.live[row["id"]], "the newest row"
        assert found["_distance"].to_pylist() == sorted(found["_distance"].to_pylist())
        ours += len(best & {*found["id"].to_pylist()})
        plain = one.to_table(columns=["id"], nearest={"column": "v", "q": query, "k": 10})
        theirs += len(best & {*plain["id"].to_pylist()})
    assert ours >= 0.99 * theirs


@pytest.mark.long
@pytest.mark.req("S0-217", "S0-199")
def test_a_false_positive_of_a_filter_drops_no_row(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    query = made.centers[0].astype(np.float32)
    before = read(made.uri).nearest("v", query, 5)
    monkeypatch.setattr(BloomFilter, "may_have", lambda _, columns: np.ones(len(columns[0]), bool))
    assert read(made.uri).nearest("v", query, 5).equals(before)


def test_a_filter_comes_first(made: Made) -> None:
    query = made.centers[1].astype(np.float32)
    found = read(made.uri).nearest("v", query, 12, filter="n < 7", nprobes=PARTITIONS)
    allowed = made.table.filter(pc.less(made.table["n"], 7))
    assert found.num_rows == 12
    assert all(row["n"] < 7 and made.live[row["id"]]["n"] == row["n"] for row in found.to_pylist())
    assert len({*found["id"].to_pylist()} & {*exact(allowed, query, 12)}) >= 10


def test_a_filter_asks_no_index_that_may_lack_rows(tmp_path: Path) -> None:
    """After a deferred compaction and another one, pylance finds none of these rows by its index (docs/upstream.md)."""
    uri = str(tmp_path / "t.lance")
    one = Made(uri, 1000)
    one.writer.close()
    lance.write_dataset(one.rows(np.arange(1000, 2000)), uri, mode="append").optimize.optimize_indices()
    lance.dataset(uri).optimize.compact_files(defer_index_remap=True)
    lance.dataset(uri).delete("id % 7 = 0")
    lance.dataset(uri).optimize.compact_files()
    query = one.centers[0].astype(np.float32)
    found = read(uri).nearest("v", query, 5, filter="id < 900", nprobes=PARTITIONS)
    assert found.num_rows == 5
    assert all(row["id"] < 900 and row["id"] % 7 for row in found.to_pylist())


@pytest.mark.req("S0-205", "S0-199")
def test_the_plan_names_the_index_of_each_source(made: Made) -> None:
    numbers = range(10, 0, -1)
    filters = ", ".join(f"bf[{REGION}][gen={number}]" for number in numbers)
    assert read(made.uri).explain_nearest("v", [0.0] * WIDTH, 5).splitlines() == [
        "GlobalLimitExec: limit=5",
        "  SortExec: order_by=[_distance ASC]",
        f"    FilterStaleExec: bloom_filters=[{filters}]",
        "      UnionExec",
        "        KNNExec: base_table[gen=-1], index=v_idx, k=5",
        f"        KNNExec: {REGION}[gen=11], log, rows=30, index=flat, k=5",
        *(f"        KNNExec: {REGION}[gen={number}], index=v_idx, k=5" for number in numbers),
    ]


@pytest.mark.timeout(120)
def test_a_damaged_progress(tmp_path: Path) -> None:
    """Its generations are looked up only as far as the first that does not exist."""
    one = Made(str(tmp_path / "t.lance"), 400)
    one.generation(np.arange(400, 450), np.arange(3))
    one.writer.close()
    run_job(one.uri, "merge")
    damage.set_progress(one.uri, 1 << 40, region=b"x" * 16)
    assert "uncovered=flat" in read(one.uri).explain_nearest("v", [0.0] * WIDTH, 5)


@pytest.mark.req("S0-201", "S0-219")
def test_the_timeline_of_the_fourth_appendix(tmp_path: Path) -> None:
    """merged_gen=4, index_gen=3, 5 flushed, 6 active: each by its index, and the active one by its rows."""
    one = Made(str(tmp_path / "t.lance"), 400)
    for number in range(1, 4):
        one.generation(np.arange(400 + 50 * number, 450 + 50 * number), np.arange(number))
    run_job(one.uri, "merge")
    run_job(one.uri, "catchup")
    one.generation(np.arange(600, 650), np.arange(10, 13))
    run_job(one.uri, "merge")
    one.generation(np.arange(650, 700), np.arange(600, 605))
    one.writer.put(one.rows(np.arange(700, 720)))
    one.delete(np.arange(605, 607))
    reader = read(one.uri, writer=one.writer)
    assert reader.explain_nearest("v", [0.0] * WIDTH, 5).splitlines()[4:] == [
        "        KNNExec: base_table[gen=-1], index=v_idx, uncovered=merged generations, k=5",
        f"        KNNExec: {REGION}[gen=6], memtable, rows=22, index=flat, k=5",
        f"        KNNExec: {REGION}[gen=5], index=v_idx, k=5",
        f"        KNNExec: {REGION}[gen=4], index=v_idx, merged, k=5",
    ]
    for query in (
        *one.centers[:4].astype(np.float32),
        *np.stack(one.table["v"].to_numpy(zero_copy_only=False))[-130::30],
    ):
        found = reader.nearest("v", query, 10, nprobes=PARTITIONS, refine_factor=10)
        assert {*found["id"].to_pylist()} == {*exact(one.table, query, 10)}
    # A row that no merge brought is in no generation: then what the index does not cover is scanned.
    lance.write_dataset(one.rows(np.array([9000])), one.uri, mode="append")
    reader = read(one.uri, writer=one.writer)
    assert "uncovered=flat" in reader.explain_nearest("v", [0.0] * WIDTH, 5)
    found = reader.nearest("v", one.live[9000]["v"], 1)  # type: ignore[arg-type]  # a list
    assert found["id"].to_pylist() == [9000]
    one.writer.close()


@pytest.mark.sampled
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable row ids"])
@pytest.mark.parametrize("indexed", [False, True], ids=["no index", "index"])
def test_each_live_row_is_found_once(tmp_path: Path, stable: bool, indexed: bool) -> None:
    """Between merges and catch-ups, after merges that moved rows; with filters that some sources have no row for."""
    uri, random = str(tmp_path / "t.lance"), np.random.default_rng(7)
    kind = pa.schema([SCHEMA.field("id"), pa.field("v", pa.list_(pa.float32(), 2))])
    live: dict[int, list[float]] = {}

    def rows(ids: np.ndarray) -> pa.Table:
        vectors = random.normal(size=(len(ids), 2)).astype(np.float32).tolist()
        live.update(dict(zip(ids.tolist(), vectors, strict=True)))
        return pa.table([pa.array(ids), pa.array(vectors, kind.field("v").type)], kind)

    base = lance.write_dataset(rows(np.arange(40)), uri, enable_stable_row_ids=stable)
    if indexed:
        base.create_index("v", "IVF_FLAT", num_partitions=1, metric="l2")
    create_mem_wal(uri, maintained_indexes=["v_idx"] if indexed else ())
    with RegionWriter(uri, REGION) as writer:
        for step in ("memory", "flush", "merge", "catchup", "memory", "merge", "deletes", "merge", "memory"):
            if step == "memory":
                writer.put(rows(random.choice(50, 25, replace=False)))
            elif step == "deletes":
                gone = random.choice(sorted(live), 5, replace=False)
                writer.delete(pa.table({"id": gone}))
                live = {key: vector for key, vector in live.items() if key not in gone}
            else:
                writer.flush()
            if step in {"merge", "catchup"}:
                run_job(uri, step)
            for condition, wanted in ((None, {*live}), ("id < 9", {*range(9)} & {*live}), ("id > 99", set[int]())):
                found = read(uri, writer=writer).nearest("v", [0.0, 0.0], 12, filter=condition)
                expected = sorted(wanted, key=lambda one: float(np.square(live[one]).sum()))[:12]
                assert found["id"].to_pylist() == expected, (step, condition)


@pytest.mark.parametrize("moved", [0.0, 100.0], ids=["same vectors", "other vectors"])
def test_a_row_of_two_merged_generations_is_found_once(tmp_path: Path, moved: float) -> None:
    """By its vector of now: the earlier generation's would take the place of a row that is near."""
    uri = str(tmp_path / "t.lance")
    kind = pa.schema([SCHEMA.field("id"), pa.field("v", pa.list_(pa.float32(), 1))])

    def rows(first: int, end: int, by: float) -> pa.Table:
        return pa.table(
            [pa.array(range(first, end)), pa.array([[n + by] for n in range(first, end)], kind[1].type)], kind
        )

    lance.write_dataset(rows(0, 10, 0.0), uri).create_index("v", "IVF_FLAT", num_partitions=1, metric="l2")
    create_mem_wal(uri, maintained_indexes=["v_idx"])
    with RegionWriter(uri, REGION) as writer:
        writer.put(rows(10, 15, 0.0))
        writer.flush()
        writer.put(rows(12, 20, moved))
        writer.flush()
    run_job(uri, "merge")
    assert "merged generations" in read(uri).explain_nearest("v", [0.0], 4)
    live = {n: float(n) for n in range(12)} | {n: n + moved for n in range(12, 20)}
    for sought in (14.2, 114.2):
        expected = sorted(live, key=lambda n: abs(live[n] - sought))[:4]
        assert read(uri).nearest("v", [sought], 4)["id"].to_pylist() == expected, sought
