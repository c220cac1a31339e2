"""Indexes of generations: those of the base, with its codebooks and tokenizers; and the filter of the MemTable."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import LsmVectorSearchPlanner

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lance.indexes.codebook import codebook_at
from memwal_ops.memwal import RegionWriter, create_mem_wal
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base, read_lsm, read_spec, snapshots
from tests.support.tables.schemas import PRIMARY_KEY

DIMENSIONS = 16
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("kind", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("txt", pa.string()),
        pa.field("v", pa.list_(pa.float32(), DIMENSIONS)),
    ]
)
WORDS = ["the", "quick", "foxes", "were", "jumping", "over", "lazy", "dogs", "while", "running", "water", "flows"]


def rows(numbers: list[int], stamp: int) -> pa.Table:
    rng = np.random.default_rng(stamp)
    texts = [" ".join(WORDS[(number + at) % len(WORDS)] for at in range(4)) for number in numbers]
    return pa.table(
        [
            pa.array(numbers, pa.int64()),
            [f"k{(number + stamp) % 7}" for number in numbers],
            [[f"t{number % 3}", f"u{stamp}"] for number in numbers],
            texts,
            pa.FixedSizeListArray.from_arrays(pa.array(rng.random(len(numbers) * DIMENSIONS, np.float32)), DIMENSIONS),
        ],
        schema=SCHEMA,
    )


def base(tmp_path: Path) -> str:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows([*range(600)], 0), uri)
    return uri


def written(uri: str, **options: Any) -> dict[int, Path]:
    """Three generations with updates, deletes and keys that come again; their folders."""
    rng = random.Random(5)
    with RegionWriter(uri, **options) as writer:
        for stamp in range(1, 10):
            writer.put(rows([rng.randrange(800) for _ in range(40)], stamp))
            writer.delete(pa.table({"id": pa.array([rng.randrange(800) for _ in range(4)], pa.int64())}))
            if stamp % 3 == 0:
                writer.flush()
    (region,) = wire.regions(Files(uri))
    found = wire.region_manifest(Files(uri), region).generations
    return {number: Path(uri, "_mem_wal", region, path) for number, path in found.items()}


@pytest.mark.req("S0-026", "S0-075", "S0-111", "S0-130", "S0-135", "S0-138", "S0-139", "S0-148")
def test_scalar_and_text_indexes(tmp_path: Path) -> None:
    """Those that are maintained, and the key's; with the base's tokenizer, and the answers that a scan gives."""
    uri = base(tmp_path)
    dataset = lance.dataset(uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("kind", "BITMAP")
    dataset.create_scalar_index("tags", "LABEL_LIST")
    dataset.create_scalar_index(
        "txt",
        "INVERTED",
        base_tokenizer="simple",
        stem=True,
        remove_stop_words=True,
        with_position=True,
        language="English",
    )
    create_mem_wal(uri, maintained_indexes=["kind_idx", "txt_idx"])
    generations = written(uri, indexed=True)
    assert len(generations) == 3
    described = {one.name: one for one in lance.dataset(uri).describe_indices() if one.details is not None}
    for folder in generations.values():
        generation = lance.dataset(str(folder))
        found = {one.name: one for one in generation.describe_indices()}
        assert sorted(found) == ["id_idx", "kind_idx", "txt_idx"]
        assert found["txt_idx"].details == described["txt_idx"].details
        assert all(one.index_type == described[name].index_type for name, one in found.items())
        plan = generation.scanner(filter="kind = 'k3'").explain_plan()
        assert "ScalarIndexQuery" in plan
        plain = [row for row in generation.to_table().to_pylist() if row["kind"] == "k3"]
        assert generation.to_table(filter="kind = 'k3'").to_pylist() == plain
        matches = generation.to_table(full_text_query="jumps")
        assert {*matches["id"].to_pylist()} == {
            row["id"] for row in generation.to_table().to_pylist() if "jumping" in (row["txt"] or "")
        }, "stemmed as the base's"
    assert read_lsm(uri) == read_spec(uri)
    expected = read_spec(uri)
    assert run_job(uri, "merge").decision == "merged"
    assert read_base(uri) == expected


@pytest.mark.sampled(1)
@pytest.mark.req("S0-076", "S0-111", "S0-137", "S0-139")
@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize("kind", ["IVF_FLAT", "IVF_PQ", "IVF_HNSW_FLAT", "IVF_HNSW_PQ"])
def test_vector_indexes_have_the_codebook_of_the_base(tmp_path: Path, kind: str, metric: str) -> None:
    uri = base(tmp_path)
    options = {"num_sub_vectors": 4} if kind.endswith("PQ") else {}
    lance.dataset(uri).create_index("v", kind, num_partitions=4, metric=metric, **options)
    create_mem_wal(uri, maintained_indexes=["v_idx"])
    generations = written(uri, indexed=True)
    table: Any = open_table(uri)

    def codebook(root: str) -> Any:
        (one,) = (one for one in lance.dataset(root).describe_indices() if one.name == "v_idx")
        return codebook_at(table.location, f"{root}/_indices/{one.segments[0].uuid}", "v_idx")

    for folder in generations.values():
        assert codebook(str(folder)) == codebook(uri)
    expected = read_spec(uri)
    if kind == "IVF_FLAT" and metric == "l2":
        planner = LsmVectorSearchPlanner(lance.dataset(uri), snapshots(uri), "v")
        for query in rows([*range(5)], 77)["v"].combine_chunks():
            found = planner.plan_search(query.values, k=5, nprobes=4, overfetch_factor=20.0).to_table()
            wanted = np.array(query.as_py(), np.float32)
            distances = sorted(
                float(((np.array(row["v"], np.float32) - wanted) ** 2).sum()) for row in expected.values()
            )
            assert np.allclose(sorted(found["_distance"].to_pylist()), distances[:5])
    assert run_job(uri, "merge").decision == "merged"
    assert read_base(uri) == expected


@pytest.mark.sampled(1)
@pytest.mark.req("S0-111")
@pytest.mark.parametrize("kind", ["IVF_SQ", "IVF_HNSW_SQ", "IVF_RQ"])
def test_what_pylance_cannot_build_alike_is_refused(tmp_path: Path, kind: str) -> None:
    """An indexed writer refuses it before it claims; another one writes generations without it."""
    uri = base(tmp_path)
    lance.dataset(uri).create_index("v", kind, num_partitions=2)
    lance.dataset(uri).create_scalar_index("kind", "BITMAP")
    create_mem_wal(uri, maintained_indexes=["v_idx", "kind_idx"])
    with pytest.raises(UnsupportedFeatureError, match=f"Index v_idx has a quantizer .{kind}. that pylance trains anew"):
        RegionWriter(uri, indexed=True)
    assert open_table(uri).regions.region_ids == ()
    for folder in written(uri).values():
        assert [one.name for one in lance.dataset(str(folder)).describe_indices()] == ["kind_idx"]


@pytest.mark.sampled(1)
@pytest.mark.req("S0-025", "S0-117", "S0-118", "S0-130", "S0-136")
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_the_filter_of_the_memtable(tmp_path: Path, indexed: bool, durable: bool) -> None:
    uri = base(tmp_path)
    create_mem_wal(uri)
    writer = RegionWriter(uri, indexed=indexed, durable=durable)

    def has(*numbers: int) -> list[bool]:
        return [bool(one) for one in writer.may_have(pa.table({"id": pa.array(numbers, pa.int64())}))]

    assert has(1, 2) == [False, False], "the base's rows are not in it"
    writer.put(rows([1, 1000], 1))
    assert has(1, 2, 1000) == [True, False, True]
    writer.delete(pa.table({"id": pa.array([2], pa.int64())}))
    assert has(1, 2, 3) == [True, True, False]
    if indexed:
        assert writer._filter._fragments == 2, "before the write returned"
    writer.flush()
    assert has(1, 2, 1000) == [False, False, False], "a generation has them"
    for start in (2000, 42_000):
        writer.put(rows([*range(start, start + 40_000)], 2))
    writer.put(rows([2000], 3))
    assert all(has(*range(2000, 82_000))), "more than it was made for"
    assert sum(has(*range(200_000, 210_000))) < 60
    with pytest.raises(InvalidUsageError):
        writer.may_have(rows([1], 1))
    writer.flush_log()
    writer = RegionWriter(uri, open_table(uri).regions.region_ids[0])
    assert has(2000, 5) == [True, False], "what was replayed is in it"
