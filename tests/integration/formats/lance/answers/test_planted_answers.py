"""verify --answers finds indexes that answer wrongly, and is silent on those that do not."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lance.indices import IndexConfig

from memwal_ops import run_job
from tests.support.tables.answering import (
    DIMENSION,
    SCALARS,
    VECTORS,
    WORDS,
    folders,
    index_json,
    json_rows,
    make_scalars,
    make_vectors,
    rebuilt_elsewhere,
    replace_files,
    rows,
    swap,
    vectors,
)

COUNT = 4_000
KINDS = {"index_misses_rows", "index_returns_dead_rows", "index_recall_low", "index_coverage_wrong"}


def checked(uri: str, **options: Any) -> Any:
    return run_job(uri, "verify", answers=True, **options)


def found(report: Any) -> set[tuple[str, str]]:
    return {(one.about, one.check) for one in report.findings.kept if one.check in KINDS}


def assert_silent(uri: str) -> Any:
    report = checked(uri)
    assert not report.findings.kept, report.describe()
    return report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
@pytest.mark.parametrize("stable", [False, True])
def test_silent_on_healthy_scalar_indexes(tmp_path: Path, version: str, stable: bool) -> None:
    uri = str(tmp_path / "t.lance")
    make_scalars(uri, np.random.default_rng(1), COUNT, data_storage_version=version, enable_stable_row_ids=stable)
    report = assert_silent(uri)
    answers = {one.index: one for one in report.answers}
    assert answers.keys() == {*SCALARS, "by_phrase"}
    assert not [one.skipped for one in answers.values() if one.skipped]
    assert min(one.queries for one in answers.values()) >= 15
    entry = answers["by_number"].to_json()
    assert (entry["wrong"], entry["recall"], entry["rows_compared"] > 0) == (0, None, True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", VECTORS)
def test_silent_on_healthy_vector_indexes(tmp_path: Path, kind: str) -> None:
    uri = str(tmp_path / "t.lance")
    make_vectors(uri, np.random.default_rng(2), COUNT, kind)
    [answers] = assert_silent(uri).to_json()["answers"]
    assert (answers["type"], answers["segments"], answers["wrong"]) == (kind, 2, 0)
    assert answers["recall_low"] <= answers["recall"] <= answers["recall_high"]
    assert answers["recall"] > 0.3
    assert answers["built_rows_recall"] > 0.3
    assert answers["appended_rows_recall"] > 0.3


def test_silent_where_vectors_repeat(tmp_path: Path) -> None:
    """Of rows at one distance, any are the nearest, old or new; so nothing is trained anew for those that are found."""
    uri = str(tmp_path / "t.lance")

    def append(start: int, end: int) -> None:
        numbers = np.arange(start, end)
        own = np.stack([numbers % 7, numbers % 5, numbers * 0, numbers * 0 + 2], axis=1).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(own.ravel()), 4)
        lance.write_dataset(pa.table({"vector": column}), uri, mode="append" if start else "create")

    append(0, 1000)
    lance.dataset(uri).create_index("vector", "IVF_FLAT", name="one", num_partitions=2)
    append(1000, 1500)
    run_job(uri, "catchup")
    for seed in (1, 2, 3):
        report = checked(uri, seed=seed)
        assert not report.findings.kept, report.describe()
    append(1500, 1600)
    [index] = run_job(uri, "catchup", retrain="auto").to_json()["indexes"]
    assert (index["decision"], index["method"]) == ("updated", "update"), index["why"]


def test_silent_on_the_index_of_a_key_whose_fragments_are_too_large_to_read(tmp_path: Path) -> None:
    """Of such a fragment only drawn rows are looked up, as of any with a million rows before a catch-up publishes."""
    uri, marked = str(tmp_path / "t.lance"), {"lance-schema:unenforced-primary-key": "true"}
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=marked)])
    table = pa.table({"id": range(400_000)}, schema=schema)
    lance.write_dataset(table, uri, max_rows_per_file=200_000).create_scalar_index("id", "BTREE", name="by_id")

    report = checked(uri, max_bytes=1 << 20)

    assert not report.findings.kept, report.describe()
    [answers] = report.answers
    assert answers.queries > 0, report.describe()


def test_json_paths_are_asked(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    index_json(lance.write_dataset(json_rows(1000), uri, max_rows_per_file=300))
    report = assert_silent(uri)
    assert {one.index: one.queries > 5 for one in report.answers} == {"by_x": True, "by_y": True}


TYPES = [
    *(pa.time32(unit) for unit in ("s", "ms")),
    *(pa.time64(unit) for unit in ("us", "ns")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    pa.timestamp("us", "UTC"),
    pa.date32(),
    pa.date64(),
    pa.decimal128(12, 2),
    pa.decimal256(40, 2),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_lost_value_of_every_type(tmp_path: Path, kind: pa.DataType) -> None:
    uri = str(tmp_path / "t.lance")
    counted = pa.array(range(1, 1001), pa.int32() if kind.bit_width == 32 else pa.int64())
    if pa.types.is_date64(kind):
        counted = pc.multiply(counted, 86_400_000)
    values = counted.cast(pa.decimal128(20, 0)).cast(kind) if pa.types.is_decimal(kind) else counted.cast(kind)
    lance.write_dataset(pa.table({"value": values}), uri, max_rows_per_file=250).create_scalar_index(
        "value", "BTREE", name="b"
    )
    [answers] = assert_silent(uri).answers
    assert answers.queries > 20
    lance.dataset(uri).drop_index("b")

    def without(table: pa.Table) -> pa.Table:
        kept = pc.if_else(pc.not_equal(pa.array(range(1000)), 333), table["value"], None)
        return pa.table({"value": kept})

    rebuilt_elsewhere(uri, str(tmp_path / "aside"), "b", "value", "BTREE", without)
    report = checked(uri)
    assert ("b", "index_misses_rows") in found(report), report.describe()


def test_a_dictionary_is_asked_by_its_values(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    words = pa.array([f"word{n % 50}" for n in range(1000)]).dictionary_encode()
    lance.write_dataset(pa.table({"word": words}), uri).create_scalar_index("word", "ZONEMAP", name="z")
    [answers] = assert_silent(uri).answers
    assert answers.queries > 20


def nested_rows(random: np.random.Generator) -> pa.Table:
    """Rows of a struct in which every value, and the struct itself, is sometimes NULL."""
    number = np.arange(COUNT)
    inner = pa.StructArray.from_arrays([pa.array(number % 70)], ["deep"], mask=pa.array(number % 7 == 0))
    parts = {
        "n": pa.array(random.permutation(COUNT), mask=number % 5 == 0),
        "text": pa.array([f"t{n % 90} word{n % 7}" for n in number]),
        "in": inner,
        "a.b": pa.array(number % 60),
        "vector": vectors(random, COUNT),
    }
    outer = pa.StructArray.from_arrays([*parts.values()], [*parts], mask=pa.array(number % 11 == 0))
    return pa.table({"s": outer, "id": number})


NESTED = [("s.n", "BTREE"), ("s.n", "BITMAP"), ("s.n", "ZONEMAP"), ("s.in.deep", "BTREE"), ("s.`a.b`", "BTREE"),
          ("s.text", "INVERTED"), ("s.text", "MINHASHLSH"), ("s.vector", "IVF_FLAT")]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize(("path", "kind"), NESTED)
def test_nested_fields_are_asked(tmp_path: Path, path: str, kind: str, stable: bool) -> None:
    uri = str(tmp_path / "t.lance")
    table = nested_rows(np.random.default_rng(10))
    dataset = lance.write_dataset(table, uri, max_rows_per_file=1000, enable_stable_row_ids=stable)
    if kind.startswith("IVF"):
        dataset.create_index(path, kind, name="x", num_partitions=4)
    else:
        dataset.create_scalar_index(path, kind, name="x")
    dataset.delete("id % 97 = 3")
    [answers] = assert_silent(uri).answers
    assert (answers.skipped, answers.queries > 20) == ("", True)
    assert answers.rows_compared == lance.dataset(uri).count_rows()
    replace_files(folders(uri, "x")[0], other_index(table, str(tmp_path / "aside.lance"), path, kind))
    assert found(checked(uri)) & {("x", "index_misses_rows"), ("x", "index_recall_low")}


def other_index(table: pa.Table, aside: str, path: str, kind: str) -> Path:
    """Files of an index of the same rows in another order."""
    order = np.random.default_rng(11).permutation(COUNT)
    dataset = lance.write_dataset(table.take(pa.array(order)), aside, max_rows_per_file=1000)
    if kind.startswith("IVF"):
        dataset.create_index(path, kind, name="x", num_partitions=4)
    else:
        dataset.create_scalar_index(path, kind, name="x")
    return folders(aside, "x")[0]


def geometries(kind: str) -> pa.Table:
    """Geometries of a kind, with NULL where it can be, under the column ``place``."""
    random = np.random.default_rng(12)
    x, y = 100 * random.random(COUNT), 100 * random.random(COUNT)
    gone = np.arange(COUNT) % 10 == 0
    if kind == "point":
        array = pa.StructArray.from_arrays([pa.array(x), pa.array(y)], ["x", "y"], mask=pa.array(gone))
    elif kind == "wkb":
        texts = [None if gone[n] else struct.pack("<BIdd", 1, 1, x[n], y[n]) for n in range(COUNT)]
        array = pa.array(texts, pa.binary())
    elif kind == "wkt":
        array = pa.array([f"POINT({x[n]} {y[n]})" for n in range(COUNT)])
    elif kind == "box":
        sides = [pa.array(one) for one in (x, y, x + 1, y + 1)]
        array = pa.StructArray.from_arrays(sides, ["xmin", "ymin", "xmax", "ymax"])
    else:
        ends = [pa.array(np.repeat(x, 2)), pa.array(np.repeat(y, 2) + np.tile([0, 1], COUNT))]
        points = pa.StructArray.from_arrays(ends, fields=[pa.field(name, pa.float64(), False) for name in "xy"])
        array = pa.ListArray.from_arrays(pa.array(2 * np.arange(COUNT + 1), pa.int32()), points)
    metadata = {b"ARROW:extension:name": f"geoarrow.{kind}".encode()}
    return pa.table([array], schema=pa.schema([pa.field("place", array.type, metadata=metadata)]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("kind", ["point", "linestring", "box", "wkb", "wkt"])
def test_geometries_are_asked(tmp_path: Path, kind: str, stable: bool) -> None:
    uri = str(tmp_path / "t.lance")
    options = {"data_storage_version": "2.1", "enable_stable_row_ids": stable}
    table = geometries(kind)
    dataset = lance.write_dataset(table.slice(0, COUNT // 2), uri, **options)
    dataset.insert(table.slice(COUNT // 2))
    parts = [dataset.create_index_uncommitted("place", "RTREE", name="x", fragment_ids=[one]) for one in (0, 1)]
    dataset.commit_existing_index_segments("x", "place", parts)
    lance.dataset(uri).delete("_rowid % 97 = 3")
    [answers] = assert_silent(uri).answers
    assert (answers.skipped, answers.queries > 20) == ("", True)
    first, second = folders(uri, "x")
    replace_files(second, first)
    assert ("x", "index_misses_rows") in found(checked(uri))


@pytest.mark.parametrize("stable", [False, True])
def test_similar_texts_are_asked(tmp_path: Path, stable: bool) -> None:
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(13)
    texts = [" ".join(random.choice(WORDS, 8)) for _ in range(COUNT // 4)]
    texts += [f"{one} more" for one in texts for _ in range(3)]
    texts[3], texts[4] = "", None
    dataset = lance.write_dataset(pa.table({"text": texts}), uri, max_rows_per_file=500, enable_stable_row_ids=stable)
    kind = IndexConfig("minhashlsh", {"num_hashes": 64, "num_bands": 8, "shingle_size": 2})
    dataset.create_scalar_index("text", kind, name="x")
    dataset.delete("_rowid % 97 = 5")
    [answers] = assert_silent(uri).answers
    assert (answers.skipped, answers.queries > 20) == ("", True)
    if not stable:
        dataset = lance.dataset(uri)
        kept = [one.fragment_id for one in dataset.get_fragments()]
        half = dataset.create_index_uncommitted("text", kind, name="half", fragment_ids=kept[: len(kept) // 2])
        replace_files(folders(uri, "x")[0], Path(uri) / "_indices" / half.uuid)
        assert ("x", "index_misses_rows") in found(checked(uri))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("merged", [0, 1])
def test_dot_product_after_optimize_indices(tmp_path: Path, merged: int) -> None:
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(3)
    centers = 3 * random.normal(size=(30, DIMENSION))
    dataset = lance.write_dataset(
        pa.table({"vector": vectors(random, COUNT, centers=centers)}), uri, max_rows_per_file=1000
    )
    dataset.create_index("vector", "IVF_PQ", name="v", metric="dot", num_partitions=8, num_sub_vectors=8)
    assert_silent(uri)
    dataset.insert(pa.table({"vector": vectors(random, 400, centers=centers)}))
    dataset.optimize.optimize_indices(num_indices_to_merge=merged)
    report = checked(uri)
    assert found(report) == {("v", "index_recall_low")}, report.describe()
    assert report.exit_code == 9
    assert "--rebuild --index v" in report.findings.kept[0].remedy


@pytest.mark.long
@pytest.mark.parametrize("kind", ["positive", "any sign", "unit"])
def test_dot_product_where_every_row_was_encoded_again(tmp_path: Path, kind: str) -> None:
    """pylance's update joins the partitions: rows of every age are found equally badly."""
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(7)

    def rows(count: int) -> pa.Table:
        drawn = random.random((count, 32)) if kind == "positive" else random.normal(size=(count, 32))
        if kind == "unit":
            drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        return pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array(drawn.ravel(), pa.float32()), 32)})

    dataset = lance.write_dataset(rows(COUNT), uri, max_rows_per_file=1000)
    dataset.create_index("vector", "IVF_PQ", name="v", metric="dot", num_partitions=16, num_sub_vectors=8)
    [answers] = assert_silent(uri).answers
    assert answers.probed_recall == answers.codes_recall is not None
    dataset.insert(rows(COUNT // 20))
    dataset.optimize.optimize_indices()
    report = checked(uri)
    assert found(report) == {("v", "index_recall_low")}, report.describe()
    assert run_job(uri, "catchup", rebuild=True, indexes=("v",)).decision == "caught_up"
    assert_silent(uri)


def test_foreign_centroids(tmp_path: Path) -> None:
    uri, aside = str(tmp_path / "t.lance"), str(tmp_path / "aside.lance")
    random = np.random.default_rng(4)
    centers = 3 * random.normal(size=(100, DIMENSION))
    for place in (uri, aside):
        dataset = lance.write_dataset(pa.table({"vector": vectors(random, COUNT, centers=centers)}), place)
        dataset.create_index("vector", "IVF_FLAT", name="v", num_partitions=100)
    assert_silent(uri)
    [place], [other] = folders(uri, "v"), folders(aside, "v")
    (place / "index.idx").write_bytes((other / "index.idx").read_bytes())
    report = checked(uri)
    assert found(report) == {("v", "index_recall_low")}, report.describe()


def test_bitmap_that_lost_a_value(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    kinds = pa.table({"kind": [f"kind{n % 500}" for n in range(20_000)]})
    lance.write_dataset(kinds, uri, max_rows_per_file=5000)

    def without(table: pa.Table) -> pa.Table:
        kept = pc.if_else(pc.equal(table["kind"], "kind77"), "kind78", table["kind"])
        return pa.table({"kind": kept})

    rebuilt_elsewhere(uri, str(tmp_path / "aside"), "b", "kind", "BITMAP", without)
    report = checked(uri)
    assert found(report) == {("b", "index_misses_rows"), ("b", "index_returns_dead_rows")}, report.describe()
    [entry] = report.to_json()["answers"]
    assert entry["wrong"] > 0
    assert all(isinstance(one, int) for one in entry["examples_missing"])
    assert "kind77" not in report.describe()
    assert "kind77" in checked(uri, show_values=True).describe()


def test_inverted_list_that_lost_a_document(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    table = rows(np.random.default_rng(5), 0, COUNT).select(["text"])
    lance.write_dataset(table, uri, max_rows_per_file=1000)

    def without(table: pa.Table) -> pa.Table:
        texts = table["text"].to_pylist()
        texts[1234] = None
        return pa.table({"text": texts})

    rebuilt_elsewhere(uri, str(tmp_path / "aside"), "i", "text", "INVERTED", without)
    report = checked(uri)
    assert ("i", "index_misses_rows") in found(report), report.describe()
    assert report.answers[0].examples_missing == [(1 << 32) + 234]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["BTREE", "BITMAP", "ZONEMAP", "BLOOMFILTER", "IVF_PQ"])
def test_swapped_segments(tmp_path: Path, kind: str) -> None:
    uri = str(tmp_path / "t.lance")
    two_segments(uri, kind)
    assert_silent(uri)
    swap(*folders(uri, "x"))
    report = checked(uri)
    assert ("x", "index_coverage_wrong") in found(report), report.describe()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["BTREE", "BITMAP", "ZONEMAP", "BLOOMFILTER", "IVF_PQ"])
def test_a_fragment_that_it_does_not_hold(tmp_path: Path, kind: str) -> None:
    uri = str(tmp_path / "t.lance")
    two_segments(uri, kind)
    first, second = folders(uri, "x")
    replace_files(second, first)
    report = checked(uri)
    assert found(report) & {("x", "index_misses_rows"), ("x", "index_coverage_wrong")}, report.describe()


def test_a_segment_of_another_index(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(6)
    table = pa.table({"a": random.permutation(COUNT), "b": random.permutation(COUNT)})
    dataset = lance.write_dataset(table, uri, max_rows_per_file=1000)
    for column in "ab":
        dataset.create_scalar_index(column, "BTREE", name=f"by_{column}")
    assert_silent(uri)
    [place], [other] = folders(uri, "by_a"), folders(uri, "by_b")
    replace_files(place, other)
    assert {name for name, _ in found(checked(uri))} == {"by_a"}


def two_segments(uri: str, kind: str) -> None:
    random = np.random.default_rng(7)

    def some(first: int) -> pa.Table:
        return pa.table({"n": pa.array(range(first, first + COUNT), pa.int64()), "v": vectors(random, COUNT)})

    dataset = lance.write_dataset(some(0), uri)
    dataset.insert(some(COUNT))
    parts = [
        dataset.create_index_uncommitted(
            "v" if kind.startswith("IVF") else "n",
            kind,
            name="x",
            fragment_ids=[fragment],
            **({"num_partitions": 4, "num_sub_vectors": 4} if kind.startswith("IVF") else {}),
        )
        for fragment in (0, 1)
    ]
    dataset.commit_existing_index_segments("x", "v" if kind.startswith("IVF") else "n", parts)


@pytest.mark.parametrize("stable", [False, True])
def test_recall_of_the_fragments_that_the_budget_lets_be_read(tmp_path: Path, stable: bool) -> None:
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(8)
    table = pa.table({"v": vectors(random, 40_000, centers=3 * random.normal(size=(30, DIMENSION)))})
    dataset = lance.write_dataset(table, uri, max_rows_per_file=5000, enable_stable_row_ids=stable)
    dataset.create_index("v", "IVF_FLAT", name="v", num_partitions=8)
    [part] = checked(uri, max_bytes=1 << 20).answers
    assert 0 < part.rows_compared < 40_000
    assert part.recall is not None
    assert part.recall.value == 1, "eight partitions, and twenty are probed"
    assert part.bytes_at_most <= 1 << 20


@pytest.mark.long
@pytest.mark.parametrize("name", ["by_number", "by_text"])
def test_drawn_rows_are_looked_up_beyond_the_budget(tmp_path: Path, name: str) -> None:
    uri = str(tmp_path / "t.lance")
    make_scalars(uri, np.random.default_rng(9), 40_000)
    [answers] = checked(uri, index=[name], max_bytes=1 << 20).answers
    assert (answers.wrong, answers.queries > 4) == (0, True)
    assert answers.rows_compared < 40_000


@pytest.mark.long
def test_memory_does_not_grow_with_fragments_that_are_not_indexed(tmp_path: Path) -> None:
    """Fragments that are allowed whole cost half a gigabyte each, where rows of any are deleted."""
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(9)
    dataset = lance.write_dataset(
        pa.table({"n": range(1200), "vector": vectors(random, 1200)}), uri, max_rows_per_file=100
    )
    dataset.create_index("vector", "IVF_PQ", name="v", num_partitions=4, num_sub_vectors=8)
    dataset.delete("n % 5 = 0")
    dataset.insert(pa.table({"n": range(10), "vector": vectors(random, 10)}))
    # Not ru_maxrss, which begins with what the parent had.
    script = "import re, sys; from memwal_ops import run_job; run_job(sys.argv[1], 'verify', answers=True); "
    script += "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) >> 10)"
    done = subprocess.run([sys.executable, "-c", script, uri], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 1024, f"{done.stdout.strip()} MiB"
