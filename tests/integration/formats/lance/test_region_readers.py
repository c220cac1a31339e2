"""Generations of our writer, as pylance's own readers see them: scan and point lookup."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import LsmPointLookupPlanner

from memwal_ops import run_job
from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter
from memwal_ops.memwal import RegionWriter, create_mem_wal
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base, read_lsm, read_spec, snapshots
from tests.support.tables.schemas import PRIMARY_KEY

DIMENSIONS = 8
KEY = pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY)


def schema(*keys: pa.Field) -> pa.Schema:
    payload = [pa.field("n", pa.int32()), pa.field("v", pa.list_(pa.float32(), DIMENSIONS))]
    return pa.schema([*keys, *payload])


def vector(number: int) -> list[float]:
    return [float((number * 31 + place * 7) % 64) for place in range(DIMENSIONS)]


def rows(numbers: list[int], stamp: int, kind: pa.Schema) -> pa.Table:
    whole = [
        {"id": number, "name": f"k{number}\0", "n": number * 100 + stamp, "v": vector(number + stamp)}
        for number in numbers
    ]
    return pa.Table.from_pylist(whole, schema=kind)


def place(key: pa.Field, number: int) -> pa.Field:
    return key.with_metadata({**PRIMARY_KEY, b"lance-schema:unenforced-primary-key:position": str(number).encode()})


COMPOSITE = schema(place(KEY, 1), place(pa.field("name", pa.string(), nullable=False), 2))


def made(tmp_path: Path, kind: pa.Schema, seed: int = 1) -> str:
    """A base, and three generations of several entries each, with updates, deletes and keys that come again."""
    rng, uri = random.Random(seed), str(tmp_path / "t.lance")
    lance.write_dataset(rows([*range(200)], 0, kind), uri)
    create_mem_wal(uri)
    with RegionWriter(uri) as writer:
        for stamp in range(1, 13):
            writer.put(rows([rng.randrange(300) for _ in range(30)], stamp, kind))
            gone = rows([rng.randrange(300) for _ in range(4)], 0, kind)
            writer.delete(gone.select([one.name for one in kind if one.metadata]))
            if stamp % 4 == 0:
                writer.flush()
    return uri


@pytest.mark.req("S0-035", "S0-036", "S0-038", "S0-145", "S0-192", "S0-193")
@pytest.mark.parametrize("kind", [schema(KEY), COMPOSITE], ids=["one column", "two columns"])
def test_the_scan_of_pylance(tmp_path: Path, kind: pa.Schema) -> None:
    uri = made(tmp_path, kind)
    expected = read_spec(uri)
    assert len(expected) > 200
    assert read_lsm(uri) == expected
    assert run_job(uri, "merge").decision == "merged"
    assert read_base(uri) == expected


@pytest.mark.long
def test_the_point_lookup_of_pylance(tmp_path: Path) -> None:
    """It gives the newest row of a key also where one generation has several."""
    uri = made(tmp_path, schema(KEY))
    expected = read_spec(uri)
    planner = LsmPointLookupPlanner(lance.dataset(uri), snapshots(uri))
    for number in range(0, 300, 4):
        found = planner.plan_lookup(pa.array([number], pa.int64())).to_table().to_pylist()
        row = expected.get((number,))
        assert [one["n"] for one in found] == ([] if row is None else [row["n"]]), number


@pytest.mark.req("S0-035", "S0-114", "S0-140")
def test_what_a_generation_has(tmp_path: Path) -> None:
    """A whole Lance table of its own, with the filter of its keys beside it."""
    uri = made(tmp_path, schema(KEY))
    (region,) = wire.regions(Files(uri))
    for path in wire.region_manifest(Files(uri), region).generations.values():
        folder = Path(uri, "_mem_wal", region, path)
        generation = lance.dataset(str(folder))
        keys: Any = generation.to_table(columns=["id"])["id"].combine_chunks()
        assert len({*keys.to_pylist()}) == len(keys), "older rows of a key are hidden"
        found = BloomFilter.decode((folder / "bloom_filter.bin").read_bytes())
        assert found.may_have([keys]).all()
        assert found.may_have([pa.array(range(1000, 3000))]).mean() < 0.05
        assert sorted(one.name for one in folder.iterdir()) == [
            "_deletions",
            "_pk_index",
            "_versions",
            "bloom_filter.bin",
        ]
