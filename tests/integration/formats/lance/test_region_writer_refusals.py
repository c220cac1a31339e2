"""What a region writer refuses, and what it says."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest

from memwal_ops import WalCorrupt, open_table, run_job
from memwal_ops.errors import (
    InvalidUsageError,
    RegionManifestCorruptError,
    SchemaProjectionError,
    UnsupportedFeatureError,
    WriterFencedError,
)
from memwal_ops.formats.lance.generations.generation_files import read_region_contents
from memwal_ops.formats.lance.layouts import REGION as REGION_LAYOUT, SHARD as SHARD_LAYOUT, MixedLayoutsError
from memwal_ops.formats.lance.log.region_files import entry_path
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.wire.names import region_folder, wal_entry_name
from memwal_ops.formats.lance.wire.region_manifest import RegionStatus
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, create_mem_wal, read
from tests.integration.contracts import small
from tests.integration.formats.lance.log.test_region_writer import REGION, SCHEMA, made, rows, seen, writer
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.schemas import PRIMARY_KEY


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return made(tmp_path)


@pytest.mark.req("S0-125")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rows(1).drop_columns(["n"]), "these are expected"),
        (rows(1).append_column("x", [[1]]), "these are expected"),
        (rows(1).drop_columns(["s"]).append_column("n", [[1]]), "these are expected"),
        (rows(1).set_column(0, "id", [pa.array([None], pa.int64())]), "NULL"),
        (rows(1).set_column(1, "n", [pa.array(["many"])]), "The column n is string"),
        (rows(1).set_column(1, "n", [pa.array([2**40])]), "The column n is int64"),
    ],
)
def test_rows_that_are_refused(uri: str, wrong: pa.Table, message: str) -> None:
    one = writer(uri)
    with pytest.raises(InvalidUsageError, match=message):
        one.put(wrong)
    assert one.unflushed() == ()
    with pytest.raises(InvalidUsageError):
        one.delete(rows(1))
    with pytest.raises(InvalidUsageError, match="NULL"):
        one.delete(pa.table({"id": pa.array([None], pa.int64())}))
    assert one.put(rows(1).select(["s", "id", "n"])) == 1, "any order"


def test_a_closed_writer_and_a_sealed_region(uri: str) -> None:
    one = writer(uri)
    one.close()
    with pytest.raises(InvalidUsageError, match="closed"):
        one.put(rows(1))
    region = open_table(uri).region(REGION)
    assert region.commit(replace(region.latest().next(), status=RegionStatus.SEALED))
    with pytest.raises(InvalidUsageError, match="sealed"):
        writer(uri)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-40], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: data.replace(b"writer_epoch", b"writer_xpoch"), "has no writer epoch"),
        (lambda data: data[:-80] + b"\xff" * 40 + data[-40:], "not a readable Lance file"),
        (None, "is missing"),
    ],
    ids=["cut", "empty", "no epoch", "overwritten", "missing"],
)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.req("S0-031", "S0-046")
def test_an_entry_that_cannot_be_read_is_not_guessed(uri: str, number: int, damage: Any, message: str) -> None:
    """Entries stand behind it: neither a writer nor a reader takes it for the end of the log."""
    one = writer(uri)
    for stamp in (1, 2, 3):
        one.put(rows(stamp, stamp=1))
    path = Path(uri, entry_path(REGION, number))
    good = path.read_bytes()
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(good))
    before = Files(uri).listing(f"_mem_wal/{REGION}/wal")
    for action in (lambda: writer(uri), lambda: read(uri).scan().to_table()):
        with pytest.raises(WalCorrupt, match=message):
            action()
    assert Files(uri).listing(f"_mem_wal/{REGION}/wal") == before
    path.write_bytes(good)
    assert seen(uri) == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize(("left", "seen_before"), [(0, 3), (39, None), (200, None), (-1, 3)])
def test_the_last_entry_cut_short_was_never_acknowledged(uri: str, left: int, seen_before: int | None) -> None:
    """Its writer was stopped in the middle of the put; the next one goes on behind it, and so does the one after."""
    one = writer(uri)
    for number in (1, 2, 3):
        one.put(rows(number, stamp=1))
    if seen_before:
        region = open_table(uri).region(REGION)
        assert region.commit(region.latest().next().with_wal_id_last_seen(seen_before))
    path = Path(uri, entry_path(REGION, 3))
    path.write_bytes(cut := path.read_bytes()[:left])
    assert {row["id"]: row["n"] for row in read(uri).scan().to_table().to_pylist()} == {1: 11, 2: 21, 3: 30}
    two = writer(uri)
    two.put(rows(4, stamp=2))  # and dies
    assert {row["id"]: row["n"] for row in read(uri).scan().to_table().to_pylist()} == {1: 11, 2: 21, 3: 30, 4: 42}
    assert seen(uri) == {1: 1, 2: 1, 3: 0, 4: 2}
    assert path.read_bytes() == cut, "nothing is overwritten"


def test_nothing_but_an_entry_cut_short(uri: str) -> None:
    writer(uri).put(rows(1, stamp=1))
    Path(uri, entry_path(REGION, 1)).write_bytes(b"LANC")
    two = writer(uri)
    assert two.flush() is None
    assert two.put(rows(1, stamp=2)) == 1
    two.close()
    found = wire.region_manifest(Files(uri), str(REGION))
    assert (found.replay_after, sorted(found.generations)) == (2, [1])
    assert seen(uri) == {1: 2, 2: 0, 3: 0}


def test_an_entry_that_was_seen_once_and_is_gone(uri: str) -> None:
    """The last entry is missing, and a snapshot builder saw it: the log does not end there (S0-046)."""
    one = writer(uri)
    one.put(rows(1, stamp=1))
    one.put(rows(2, stamp=1))
    region = open_table(uri).region(REGION)
    assert region.commit(region.latest().next().with_wal_id_last_seen(2))
    Path(uri, entry_path(REGION, 2)).unlink()
    with pytest.raises(WalCorrupt, match="is missing"):
        writer(uri)


def test_an_entry_of_another_writer_of_the_specification(uri: str) -> None:
    writer(uri).put(rows(1, stamp=1))
    path = Path(uri, entry_path(REGION, 1))
    path.write_bytes(path.read_bytes().replace(b"memwal-ops.field_ids", b"memwal-ops.xield_ids"))
    assert seen(uri) == {1: 1, 2: 0, 3: 0}


def test_unknown_columns(uri: str) -> None:
    writer(uri).put(rows(4))
    path = Path(uri, entry_path(REGION, 1))
    path.write_bytes(path.read_bytes().replace(b"memwal-ops.field_ids", b"memwal-ops.xield_ids"))
    lance.dataset(uri).drop_columns(["n"])
    with pytest.raises(UnsupportedFeatureError, match="no field ids"):
        writer(uri)


def test_an_unclaimed_epoch(uri: str) -> None:
    one = writer(uri)
    one.epoch = 9  # its manifest is lost
    one.put(rows(4))
    with pytest.raises(WalCorrupt, match="newest manifest has"):
        writer(uri)


def test_regions_of_pylance_are_left_to_it(tmp_path: Path) -> None:
    uri = small.make(str(tmp_path), small.rows(0, 1))
    small.flush(uri, small.rows(1, 2, 3))
    with pytest.raises(InvalidUsageError, match="written by pylance"):
        RegionWriter(open_table(uri), uuid4())


@pytest.mark.parametrize("region", [REGION, UUID("ffffffff-0000-4000-8000-000000000000")])
def test_a_log_of_two_kinds_of_writers_is_refused_and_kept(uri: str, region: UUID) -> None:
    """pylance's writer opens a region, or another one of the table, whose rows are in the log of the other layout."""
    with writer(uri) as one:
        one.put(rows(1))
    writer(uri).put(rows(2))  # acknowledged, and the process ends
    with lance.dataset(uri).mem_wal_writer(str(region)) as other:
        other.put(rows(3))
    before = Files(uri).listing("_mem_wal")
    merged = run_job(uri, "merge")
    assert merged.exit_code == 10
    blocked = {one["region_id"]: one for one in merged.to_json()["blocked"]}
    assert blocked[str(region)]["reason"] == "unsupported_feature"
    assert "two kinds of writers" in blocked[str(region)]["detail"]
    verified = run_job(uri, "verify")
    assert verified.exit_code == 9
    assert "two kinds of writers" in verified.describe().replace("\n", " ")
    with pytest.raises(MixedLayoutsError, match="two kinds of writers"):
        run_job(
            uri, "gc", apply=True, allow_unsafe=True, reader_grace="0s", fence_retention="0s", drain_after="0s"
        )  # fmt: skip
    inspected = run_job(uri, "inspect")
    assert "two kinds of writers" in inspected.describe().replace("\n", " ")
    if region == REGION:
        assert inspected.to_json()["layout"] == "mixed"
        with pytest.raises(MixedLayoutsError):
            read(uri).scan().to_table()
        with pytest.raises(MixedLayoutsError):
            RegionWriter(open_table(uri), REGION)
    assert Files(uri).listing("_mem_wal") == before


@pytest.mark.parametrize("suffix", ["lance", "arrow"])
def test_entries_of_the_other_layout_far_down_the_log_are_no_garbage(uri: str, suffix: str) -> None:
    """Where the first page of the log does not show them, gc, which lists all of it, does."""
    layout = REGION_LAYOUT if suffix == "arrow" else SHARD_LAYOUT
    table = open_table(uri)
    table.store.put(f"{region_folder(REGION)}/wal/{wal_entry_name(9, suffix)}", b"x")
    with pytest.raises(MixedLayoutsError):
        read_region_contents(table.store, REGION, layout)


@pytest.mark.parametrize("flushed", [False, True])
def test_a_region_of_a_table_that_was_created_again(tmp_path: Path, flushed: bool) -> None:
    """Same id, same epoch: a flush of the old writer would take what is logged now for what it flushed."""
    uri = made(tmp_path)
    old = writer(uri)
    old.put(rows(4, stamp=1))
    if flushed:
        old.flush()
    shutil.rmtree(uri)
    made(tmp_path)
    new = writer(uri)
    assert new.epoch == old.epoch, "the premise"
    new.put(rows(5, stamp=2))
    with suppress(WriterFencedError):
        old.put(rows(6, stamp=3))
    with pytest.raises(WriterFencedError):
        old.flush()
    new.put(rows(7, stamp=4))  # and dies
    found = seen(uri)
    assert (found[5], found[7]) == (2, 4)
    assert 4 not in found


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        (pa.dictionary(pa.int8(), pa.string()), "2.1", "The key columns k are dictionaries"),
        (pa.struct([("a", pa.int32())]), "2.0", "The columns v are structs"),
    ],
)
def test_columns_that_cannot_be_merged_or_stored(tmp_path: Path, kind: pa.DataType, version: Any, message: str) -> None:
    """Refused before a row is acknowledged that could never be merged."""
    uri = str(tmp_path / "t.lance")
    in_key = pa.types.is_dictionary(kind)
    key = pa.field("k", kind if in_key else pa.int64(), nullable=False, metadata=PRIMARY_KEY)
    schema = pa.schema([key, pa.field("v", pa.int64() if in_key else kind)])
    lance.write_dataset(schema.empty_table(), uri, data_storage_version=version)
    create_mem_wal(uri)
    with pytest.raises(UnsupportedFeatureError, match=message):
        RegionWriter(open_table(uri))  # type: ignore[arg-type]  # a Lance table
    assert not Path(uri, "_mem_wal").exists(), "no region was claimed"


ITEMS = pa.list_(pa.struct([pa.field("a", pa.int64(), nullable=False)]))
REQUIRED = {
    "v": (pa.int64(), 1, None),
    "s.a": (pa.struct([pa.field("a", pa.int64(), nullable=False)]), {"a": 1}, {"a": None}),
    "l.item.a": (ITEMS, [{"a": 1}], [{"a": 1}, {"a": None}]),
}


@pytest.mark.parametrize("path", REQUIRED)
def test_null_where_a_value_is_required(tmp_path: Path, path: str) -> None:
    """It is refused; where it is in a log already, it stops its region alone, until the column may be NULL."""
    uri, name = str(tmp_path / "t.lance"), path.partition(".")[0]
    kind, good, bad = REQUIRED[path]
    key = SCHEMA.field("id")
    schema = pa.schema([key, pa.field(name, kind, nullable=name != "v")])
    lance.write_dataset(pa.table({"id": [0], name: pa.array([good], kind)}, schema=schema), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 2)"),))])

    def written(number: int, value: Any) -> pa.Table:
        return pa.table({"id": [number], name: pa.array([value], kind)})

    with RegionRouter(uri) as router:
        router.put(written(1, good))
        with pytest.raises(InvalidUsageError, match=f"column {path} is NULL") as refused:
            router.put(written(2, bad))
        assert "alter_columns" in str(refused.value.remedy)
        router.put(written(3, good))
        router.delete(pa.table({"id": [0]}))
        assert {*read(uri, writer=router).scan().to_table()["id"].to_pylist()} == {1, 3}
        if name != "v":  # a struct or list that is NULL as a whole is none of these
            router.put(written(4, None))
            assert read(uri, writer=router).get([4])[name].to_pylist() == [None]
            assert {*read(uri).scan().to_table()["id"].to_pylist()} == {1, 3, 4}
            return  # a log cannot have the others: Lance refuses to write them
        good_rows = [*range(10, 30)]
        for number in good_rows:
            router.put(written(number, good))
        one = next(iter(router.writers.values()))
        assert one._values is not None
        number = next(key for key in good_rows if not one._values.other_values(written(key, good)))
        stored = one._columns.put_rows(written(number, good))
        one.put_routed(stored.set_column(1, stored.schema.field(1), pa.array([bad], kind)))
        with pytest.raises(SchemaProjectionError, match=f"region {one.region_id}.*{path}"):
            read(uri, writer=router).scan().to_table()
    others = [other for other in good_rows if other != number]
    reader = read(uri)
    assert {*reader.get(others)["id"].to_pylist()} == {*others}
    with pytest.raises(SchemaProjectionError, match=f"region {one.region_id}.*{path}"):
        reader.get([number])
    assert "schema_projection" in str(run_job(uri, "verify", deep=True).to_json())
    report = run_job(uri, "merge")
    assert report.decision == "blocked"
    assert [blocked.region_id for blocked in report.blocked] == [one.region_id]
    assert len(report.passes) == 1, "that of the other region"
    lance.dataset(uri).alter_columns({"path": path, "nullable": True})
    assert run_job(uri, "merge").decision == "merged"
    assert lance.dataset(uri).to_table(filter=f"id = {number}")[name].to_pylist() == [bad]


def test_a_damaged_region_refuses_only_rows_that_are_routed_to_it(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([SCHEMA.field("id"), pa.field("n", pa.int64())])
    lance.write_dataset(schema.empty_table(), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 4)"),))])
    with RegionRouter(uri) as router:
        router.put(pa.table({"id": range(40), "n": [1] * 40}, schema=schema))
        router.flush()
        regions = {values: writer.region_id for values, writer in router.writers.items()}
    for damaged in regions.values():
        newest = max(Path(uri, "_mem_wal", str(damaged), "manifest").glob("*.binpb"), key=lambda path: path.name[::-1])
        data = newest.read_bytes()
        newest.write_bytes(data[: len(data) // 2])
        refused = 0
        with RegionRouter(uri) as router:
            for number in range(40):
                try:
                    router.put(pa.table({"id": [number], "n": [2]}, schema=schema))
                except RegionManifestCorruptError as error:
                    assert str(damaged) in str(error)
                    refused += 1
        assert 0 < refused < 40
        newest.write_bytes(data)
