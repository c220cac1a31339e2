"""The router: every row comes into the region of its values, and no key into two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError, WriterFencedError
from memwal_ops.formats.lance.log.create import create_mem_wal as create_in
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionStatus
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, RegionWriter, create_mem_wal
from tests.integration.formats.lance.log.test_region_writer import SCHEMA, keys, rows
from tests.support.overtaken import Overtaken
from tests.support.tables.reading import read_base, read_spec

SPEC = RegionSpec((RegionField.parse("bucket(id, 4)"),))


@pytest.fixture
def uri(tmp_path: Path) -> str:
    found = str(tmp_path / "t.lance")
    lance.write_dataset(rows(1, 2, 3), found)
    create_mem_wal(found, [SPEC])
    return found


def stamps(uri: str, read: Any = read_spec) -> dict[int, int]:
    return {key: row["n"] - key * 10 for (key,), row in read(uri).items()}


def regions(uri: str) -> dict[tuple[Any, ...], str]:
    table: Any = open_table(uri)
    found = {}
    for region_id in table.regions.region_ids:
        manifest = table.region(region_id).latest()
        assert manifest.region_spec_id == 1
        assert manifest.region_fields not in found, "two regions of the same values"
        found[manifest.region_fields] = str(region_id)
    return found


def homes(router: RegionRouter) -> dict[int, tuple[Any, ...]]:
    """Per key the values of the region that has it."""
    parts = [(values, part) for values, writer in router.writers.items() for part in writer.unflushed()]
    return {key: values for values, part in parts for key in part["id"].to_pylist()}


@pytest.mark.req("S0-009", "S0-010", "S0-018", "S0-043", "S0-080", "S0-081", "S0-084")
def test_rows_come_into_the_region_of_their_values(uri: str) -> None:
    with RegionRouter(uri) as one:
        one.put(rows(*range(40), stamp=1))
        one.delete(keys(*range(0, 40, 3)))
        one.put(rows(0, 3, stamp=2))
        assert sorted(one.writers) == [(0,), (1,), (2,), (3,)]
        assert all(writer.region_id.version == 4 for writer in one.writers.values())
        where = homes(one)
        assert len(where) == 40
    before = regions(uri)
    assert len(before) == 4
    expected = {**{key: 1 for key in range(40) if key % 3}, 0: 2, 3: 2}
    assert stamps(uri) == expected
    with RegionRouter(uri) as again:
        again.put(rows(7, stamp=3))
        (values,) = again.writers
        assert where[7] == values, "the region of before"
    assert regions(uri) == before
    assert run_job(uri, "merge").decision == "merged"
    assert stamps(uri, read_base) == {**expected, 7: 3}
    assert run_job(uri, "snapshot").decision == "built"


@pytest.mark.req("S0-009", "S0-010")
def test_two_routers_make_one_region(uri: str) -> None:
    """At whatever moment a second one comes, the regions have the same ids, and one of the two is fenced."""
    fenced = 0
    for at in range(1, 30, 3):
        table: Any = open_table(uri)

        def other() -> None:
            with RegionRouter(uri) as second:
                second.put(rows(5, stamp=9))

        mine = RegionRouter(replace(table, store=Overtaken(table.store, at, other)))
        try:
            mine.put(rows(5, stamp=8))
            mine.close()
        except WriterFencedError:
            fenced += 1
        assert len(regions(uri)) == 1
    assert fenced
    assert stamps(uri)[5] in {8, 9}


@pytest.mark.req("S0-009")
def test_a_writer_refuses_rows_of_other_regions(uri: str) -> None:
    with RegionRouter(uri) as router:
        router.put(rows(*range(20)))
        ids = {values: writer.region_id for values, writer in router.writers.items()}
        of = {
            key: values
            for values, writer in router.writers.items()
            for part in writer.unflushed()
            for key in part["id"].to_pylist()
        }
    mine, other = of[0], next(key for key in of if of[key] != of[0])
    with RegionWriter(uri, ids[mine]) as one:
        one.put(rows(0, stamp=4))
        for action in (lambda: one.put(rows(0, other)), lambda: one.delete(keys(other))):
            with pytest.raises(InvalidUsageError, match="do not belong to region"):
                action()
        assert [part["id"].to_pylist() for part in one.unflushed()] == [[0]]
    with pytest.raises(InvalidUsageError, match="new manual region"):
        RegionWriter(uri)


def test_regions_that_could_hold_the_same_keys(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(1, 2, 3), uri)
    create_mem_wal(uri, [SPEC, RegionSpec((RegionField("id", ("id",), "identity"),), 9)])
    with RegionRouter(uri, spec_id=1) as one:
        one.put(rows(1, stamp=1))
    with pytest.raises(InvalidUsageError, match="of another spec"):
        RegionRouter(uri)
    region = open_table(uri).region(open_table(uri).regions.region_ids[0])
    assert region.commit(replace(region.latest().next(), status=RegionStatus.SEALED))
    with pytest.raises(InvalidUsageError, match="not merged"):
        RegionRouter(uri)
    with pytest.raises(InvalidUsageError, match="no region spec 4"):
        RegionRouter(uri, spec_id=4)
    run_job(uri, "merge")
    with RegionRouter(uri) as two:
        two.put(rows(1, stamp=2))
    with pytest.raises(InvalidUsageError, match="of another spec"):
        RegionRouter(uri, spec_id=1)
    assert stamps(uri) == {1: 2, 2: 0, 3: 0}


@pytest.mark.req("S0-009")
def test_a_router_of_an_earlier_spec_creates_no_region_any_more(uri: str) -> None:
    """It began before the next spec was added: its new regions would hold keys of the next one's."""
    old = RegionRouter(uri)
    old.put(rows(1, stamp=1))
    for writer in old.writers.values():
        writer.seal()
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 2)"),))])
    run_job(uri, "merge")
    with RegionRouter(uri) as new:
        new.put(rows(*range(20), stamp=2))
        new.flush()
        run_job(uri, "merge")
        refused = 0
        for number in range(20):
            with pytest.raises(InvalidUsageError, match=r"another region|sealed|closed") as raised:
                old.put(rows(number, stamp=3))
            refused += "another region" in str(raised.value)
        assert refused == 3, "of four buckets one had its region, and each of the others is tried once"
        new.put(rows(*range(20), stamp=4))
    assert stamps(uri) == dict.fromkeys(range(20), 4)
    with RegionRouter(uri) as again:
        again.put(rows(5, stamp=5))
    assert run_job(uri, "merge").decision == "merged"
    assert stamps(uri, read_base) == {**dict.fromkeys(range(20), 4), 5: 5}


def test_a_sealed_region_gets_a_successor(uri: str) -> None:
    with RegionRouter(uri) as one:
        one.put(rows(1, stamp=1))
    (first,) = regions(uri).values()
    run_job(uri, "merge")
    region = open_table(uri).region(open_table(uri).regions.region_ids[0])
    assert region.commit(replace(region.latest().next(), status=RegionStatus.SEALED))
    with RegionRouter(uri) as two:
        two.put(rows(1, stamp=2))
        (writer,) = two.writers.values()
        assert str(writer.region_id) != first
    assert stamps(uri) == {1: 2, 2: 0, 3: 0}


def test_what_is_refused_writes_nothing(uri: str, tmp_path: Path) -> None:
    with RegionRouter(uri) as one:
        with pytest.raises(InvalidUsageError, match="NULL"):
            one.put(rows(1, 2).set_column(0, "id", [pa.array([1, None], pa.int64())]))
        with pytest.raises(InvalidUsageError, match="these are expected"):
            one.put(rows(1).drop_columns(["n"]))
        assert one.writers == {}
    assert open_table(uri).regions.region_ids == ()
    bare = str(tmp_path / "bare.lance")
    lance.write_dataset(rows(1), bare)
    create_mem_wal(bare)
    with pytest.raises(InvalidUsageError, match="no region specs"):
        RegionRouter(bare)
    assert SCHEMA.names == rows(1).column_names


@pytest.mark.req("S0-043", "S0-081", "S0-082", "S0-084")
def test_a_spec_that_is_added_later(tmp_path: Path) -> None:
    """A manual region first, then a spec, then another one: ids rise, and what is there stays as it is."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(1, 2, 3), uri)
    lance.dataset(uri).create_scalar_index("n", "BTREE")
    create_mem_wal(uri)
    with RegionWriter(uri) as manual:
        manual.put(rows(1, stamp=1))
    assert open_table(uri).region(manual.region_id).latest().region_spec_id == 0
    run_job(uri, "merge")
    by_id = RegionSpec((RegionField("id", ("id",), "identity"),))
    create_mem_wal(uri, [SPEC])
    create_mem_wal(uri, [SPEC, by_id], ["n_idx"])
    table = open_table(uri)
    assert [one.spec_id for one in table.index.region_specs] == [1, 2]
    assert table.index.maintained_indexes == ("n_idx",)
    assert table.index.merged_generations == {manual.region_id: 1}, "progress stays"
    version = table.version
    create_mem_wal(uri, [by_id, SPEC], ["n_idx"])
    assert open_table(uri).version == version, "all of it is there"
    with pytest.raises(InvalidUsageError, match="earlier region spec"):
        create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 9)"),), 2)])
    with pytest.raises(InvalidUsageError, match=r"has the type int(32|64) in one spec"):
        create_mem_wal(uri, [RegionSpec((RegionField("id", ("id",), "bucket", parameters={"num_buckets": "3"}),))])
    with pytest.raises(InvalidUsageError, match="already"):
        create_mem_wal(uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 9)"),), 7)])
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 5)"),))])
    assert [one.spec_id for one in open_table(uri).index.region_specs] == [1, 2, 7, 8]


@pytest.mark.req("S0-082")
def test_the_id_of_a_region_is_not_given_again(uri: str) -> None:
    """Its spec is gone from the index: a new spec of that id would take the region for its own."""
    table: Any = open_table(uri)
    region = table.region(uuid4())
    manifest = RegionManifest(region.region_id, 1, 5, 1, None, None, 1, (), RegionStatus.ACTIVE, ())
    assert region.commit(manifest)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 9)"),))])
    assert [one.spec_id for one in open_table(uri).index.region_specs] == [1, 6]


def test_a_spec_that_is_added_beside_commits(uri: str) -> None:
    """Another process commits at every moment: both are there in the end."""
    at = 1
    while True:
        table: Any = open_table(uri)
        store = Overtaken(table.store, at, lambda: lance.write_dataset(rows(9), uri, mode="append"), writes=True)
        wanted = RegionSpec((RegionField.parse(f"bucket(id, {90 + at})"),))
        create_in(table.location, store, region_specs=[wanted])
        if store._others is not None:
            break
        at += 1
    assert at > 1
    assert [one.spec_id for one in open_table(uri).index.region_specs] == [*range(1, at + 2)]
    assert lance.dataset(uri).count_rows() == 3 + at - 1


def test_from_one_spec_to_the_next(uri: str) -> None:
    """The regions of the first one are sealed and merged; then the second one takes all rows."""
    with RegionRouter(uri) as one:
        one.put(rows(*range(8), stamp=1))
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 2)"),))])
    with pytest.raises(InvalidUsageError, match="of another spec"):
        RegionRouter(uri)
    with RegionRouter(uri, spec_id=1) as last:
        last.put(rows(1, stamp=2))
    for region_id in open_table(uri).regions.region_ids:
        writer = RegionWriter(uri, region_id)
        writer.put(rows(*[key for key in (2,) if writer.region_id in of_key(uri, key)], stamp=3))
        writer.seal()
        with pytest.raises(InvalidUsageError, match="closed"):
            writer.flush()
    with pytest.raises(InvalidUsageError, match="not merged"):
        RegionRouter(uri)
    run_job(uri, "merge")
    with RegionRouter(uri) as two:
        two.put(rows(1, stamp=4))
    assert stamps(uri) == {0: 1, 1: 4, 2: 3, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}


def of_key(uri: str, key: int) -> set[Any]:
    """The region that a generation puts the key into."""
    table: Any = open_table(uri)
    return {
        region_id
        for region_id in table.regions.region_ids
        for one in table.region(region_id).latest().flushed_generations
        if key in lance.dataset(f"{uri}/_mem_wal/{region_id}/{one.path}").to_table()["id"].to_pylist()
    }
