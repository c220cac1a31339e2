"""Rows with and without keys: bitmaps for integers, hash tables for all else, the same result."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from memwal_ops.formats.lance.engines.merge import locate
from memwal_ops.formats.lance.engines.merge.locate import batches_without_keys, chunks_with_keys, in_chunks

_LOW, _HIGH = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def _without(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Table:
    batches = batches_without_keys(rows.to_batches(max_chunksize=7), keys, key, chunk_bytes=100)
    return pa.Table.from_batches(batches, schema=rows.schema)


def _with(rows: pa.Table, keys: pa.Table, key: list[str], chunk_bytes: int = 100) -> pa.Table:
    chunks = chunks_with_keys(rows.to_batches(max_chunksize=7), keys, key, chunk_bytes=chunk_bytes)
    return pa.concat_tables([rows.slice(0, 0), *chunks])


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.string(), pa.date32()])
@pytest.mark.parametrize("spread", [1, 3, 10_000_000])
def test_rows_with_and_without_keys_are_those_of_a_set(kind: pa.DataType, spread: int) -> None:
    random = np.random.default_rng(spread)
    bound = 127 if kind == pa.int8() else 400

    def numbers(count: int) -> list[int]:
        drawn = random.integers(0 if kind in {pa.uint64(), pa.date32()} else -bound, bound, count)
        return [int(one) * (1 if kind == pa.int8() else min(spread, 1000)) for one in drawn]

    def table(values: list[int]) -> pa.Table:
        return pa.table(
            {"k": pa.array(values, pa.int64()).cast(pa.int32() if kind == pa.date32() else kind).cast(kind)}
        )

    rows, keys = table(numbers(300)).append_column("n", pa.array(range(300))), table(numbers(60))
    gone = {*keys["k"].to_pylist()}
    assert _without(rows, keys, ["k"]).to_pylist() == [one for one in rows.to_pylist() if one["k"] not in gone]
    for chunk_bytes in (100, 1000, 1_000_000):
        found = _with(rows, keys, ["k"], chunk_bytes)
        assert found.to_pylist() == [one for one in rows.to_pylist() if one["k"] in gone]


@pytest.mark.parametrize("keys", [[_LOW, _LOW + 2], [_HIGH - 1], [0, 1, 2], [_LOW, _HIGH]])
def test_the_ends_of_the_numbers_are_no_neighbours(keys: list[int]) -> None:
    rows = pa.table({"k": pa.array([_LOW, _LOW + 1, _LOW + 2, -1, 0, 1, 2, 3, _HIGH - 1, _HIGH])})
    left = _without(rows, pa.table({"k": pa.array(keys)}), ["k"])
    assert left["k"].to_pylist() == [one for one in rows["k"].to_pylist() if one not in keys]
    found = _with(rows, pa.table({"k": pa.array(keys)}), ["k"])
    assert found["k"].to_pylist() == [one for one in rows["k"].to_pylist() if one in keys]


def test_a_null_is_none_of_the_keys() -> None:
    rows = pa.table({"k": pa.array([None, 0, 1, None, 2])})
    left = _without(rows, pa.table({"k": pa.array([0, 2])}), ["k"])
    assert left["k"].to_pylist() == [None, 1, None]
    assert _with(rows, pa.table({"k": pa.array([0, 2])}), ["k"])["k"].to_pylist() == [0, 2]
    assert _with(rows, pa.table({"k": pa.array([0, 2**40])}), ["k"])["k"].to_pylist() == [0]


@pytest.mark.parametrize(
    ("keys", "max_bytes", "exact"),
    [([5, 6, 12], 2, True), ([5, 6, 11], 1, True), ([5, 6, 12], 1, False), ([5, 6, 7, 8, 13], 1, None),
     ([0, 10**9], 100, False), ([0, 10**9], 1, False)],
)  # fmt: skip
def test_a_bitmap_takes_at_most_the_bytes_that_it_may(keys: list[int], max_bytes: int, exact: bool | None) -> None:
    bitmap = locate._Bitmap.of(pa.chunked_array([keys]), max_bytes)
    assert (None if bitmap is None else bitmap.exact) is exact
    if bitmap is not None:
        assert len(bitmap._bytes) <= max_bytes
        assert bitmap.found(pa.array(keys)).all()


@pytest.mark.parametrize("step", [1, 1000, 4096, 1_000_003, 1 << 32, 999_999_999_989])
def test_most_keys_that_are_not_in_a_hashed_bitmap_are_not_found(step: int) -> None:
    """Multiples of a number are keys that a simple product hashes badly."""
    numbers = np.random.default_rng(1).permutation(400_000) * step
    bitmap = locate._Bitmap.of(pa.chunked_array([numbers[:10_000]]), 45_000)
    assert bitmap is not None and not bitmap.exact
    assert bitmap.found(pa.array(numbers[:10_000])).all()
    assert bitmap.found(pa.array(numbers[10_000:])).mean() < 0.08


def test_keys_of_two_columns() -> None:
    rows = pa.table({"a": [1, 1, 2, 2, 3], "b": ["x", "y", "x", "y", "x"], "n": range(5)})
    left = _without(rows, pa.table({"a": [1, 2, 3], "b": ["y", "x", "y"]}), ["a", "b"])
    assert left["n"].to_pylist() == [0, 3, 4]
    found = _with(rows, pa.table({"a": [1, 2, 3], "b": ["y", "x", "y"]}), ["a", "b"])
    assert found["n"].to_pylist() == [1, 2]


@pytest.mark.parametrize(("chunk", "rows"), [(1, [1, 1, 1, 1]), (16, [2, 2]), (17, [3, 1]), (24, [3, 1]), (999, [4])])
def test_batches_are_gathered(chunk: int, rows: list[int]) -> None:
    """Of eight bytes each."""
    batches = [pa.record_batch({"id": pa.array([number], pa.int64())}) for number in range(4)]
    chunks = [*in_chunks(batches, chunk)]
    assert [one.num_rows for one in chunks] == rows
    assert pa.concat_tables(chunks)["id"].to_pylist() == [0, 1, 2, 3]
