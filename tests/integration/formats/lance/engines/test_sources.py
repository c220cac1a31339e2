"""Where a reader takes rows from: a writer's memory, and the base where a generation was collected meanwhile."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.formats.lance.engines.read import opened, unmerged
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, RegionWriter, WriterLimits, create_mem_wal, read
from tests.integration.formats.lance.jobs import test_blobs
from tests.integration.formats.lance.log.test_region_writer import REGION, keys, made, rows
from tests.support.gc_options import AT_ONCE

if TYPE_CHECKING:
    from memwal_ops.formats.lance.engines.read.reader import Reader


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return made(tmp_path)


def stamps(reader: Reader, **options: Any) -> dict[int, int]:
    found = reader.scan(**options).to_table()
    assert found.num_rows == len({*found["id"].to_pylist()}), "each key once"
    return {row["id"]: row["n"] - row["id"] * 10 for row in found.to_pylist()}


def looked_up(reader: Reader) -> dict[int, int]:
    return {row["id"]: row["n"] - row["id"] * 10 for row in reader.get(range(20)).to_pylist()}


@pytest.mark.sampled(1)
@pytest.mark.req("S0-194", "S0-195", "S0-199")
@pytest.mark.parametrize("consistency", ["strong", "manifests", "snapshot"])
def test_rows_in_the_memory_of_a_writer(uri: str, consistency: str) -> None:
    slow = WriterLimits(wal_interval=WriterLimits().wal_interval * 1000)
    with RegionWriter(uri, REGION, durable=False, limits=slow) as writer:
        reader = read(uri, consistency, writer=writer)  # type: ignore[arg-type]  # from the parameters
        writer.put(rows(1, 4, stamp=1))
        writer.delete(keys(2))
        assert stamps(reader) == looked_up(reader) == {1: 1, 3: 0, 4: 1}
        assert stamps(read(uri)) == {1: 0, 2: 0, 3: 0}, "not durable yet"
        assert f"    ScanExec: {REGION}[gen=1], memtable, rows=3" in reader.explain().splitlines()
        writer.flush()
        assert stamps(reader) == looked_up(reader) == {1: 1, 3: 0, 4: 1}, "in a generation"
        writer.put(rows(4, 5, stamp=2))
        assert stamps(reader) == looked_up(reader) == {1: 1, 3: 0, 4: 2, 5: 2}, "over it in memory"
        assert stamps(reader, filter="id = 5") == {5: 2}
    assert stamps(read(uri)) == {1: 1, 3: 0, 4: 2, 5: 2}


def test_the_memory_of_a_fenced_writer_does_not_count(uri: str) -> None:
    slow = WriterLimits(wal_interval=WriterLimits().wal_interval * 1000)
    first = RegionWriter(uri, REGION, durable=False, limits=slow)
    first.put(rows(7, stamp=9))
    with RegionWriter(uri, REGION) as second:
        second.put(rows(1, stamp=1))
        assert stamps(read(uri, writer=first)) == looked_up(read(uri, writer=first)) == {1: 1, 2: 0, 3: 0}


def test_a_flush_between_the_manifest_and_the_memory(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeline: the manifest is read; the writer flushes, and puts again; memory is read: the flushed rows are in
    neither, unless the manifest is read again."""
    with RegionWriter(uri, REGION) as writer:
        writer.put(rows(4, 5, stamp=1))
        flushes = [True]
        real = RegionWriter.in_memory

        def in_memory(self: RegionWriter) -> object:
            if flushes:
                flushes.pop()
                self.flush()
                self.put(rows(5, stamp=2))
            return real(self)

        monkeypatch.setattr(RegionWriter, "in_memory", in_memory)
        assert stamps(read(uri, writer=writer)) == {1: 0, 2: 0, 3: 0, 4: 1, 5: 2}


def test_reads_beside_a_writer_that_flushes(uri: str) -> None:
    """Each read sees every write that was made before it began."""
    with RegionWriter(uri, REGION, durable=False) as writer:
        reader, done, wrong = read(uri, writer=writer), threading.Event(), []

        def check() -> None:
            while not done.is_set():
                least = newest[0]
                found = stamps(reader, filter="id = 4").get(4, 0)
                if found < least:
                    wrong.append((found, least))

        newest = [0]
        checking = threading.Thread(target=check)
        checking.start()
        for stamp in range(1, 25):
            writer.put(rows(4, stamp=stamp))
            newest[0] = stamp
            if stamp % 3 == 0:
                writer.flush()
        done.set()
        checking.join()
        assert not wrong


def test_a_router_has_the_rows_of_all_its_writers(tmp_path: Path) -> None:
    uri = made(tmp_path)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 4)"),))])
    with RegionRouter(uri, durable=False) as router:
        reader = read(uri, writer=router)
        router.put(rows(1, 4, 5, 6, stamp=3))
        assert stamps(reader) == looked_up(reader) == {1: 3, 2: 0, 3: 0, 4: 3, 5: 3, 6: 3}


@pytest.mark.sampled(2)
@pytest.mark.req("S0-197")
@pytest.mark.parametrize("consistency", ["strong", "snapshot"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_generation_that_was_collected_since(uri: str, consistency: str, listed: bool) -> None:
    """Its rows are in the base by then: of a newer version than the one that the reader opened."""
    with RegionWriter(uri, REGION) as writer:
        writer.put(rows(1, 4, stamp=1))
        writer.delete(keys(2))
        writer.flush()
        run_job(uri, "snapshot")
        reader = read(uri, consistency)  # type: ignore[arg-type]  # from the parameters
        expected = stamps(reader) if listed else {1: 1, 3: 0, 4: 1}
        run_job(uri, "merge")
        run_job(uri, "expire", older_than=timedelta(0), allow_unsafe=True, apply=True)
        for _ in range(2):
            run_job(uri, "gc", apply=True, **AT_ONCE)
        (region,) = (path for path in Path(uri, "_mem_wal").iterdir())
        assert not [*region.glob("*_gen_1")]
        assert stamps(reader) == expected == {1: 1, 3: 0, 4: 1}
        assert looked_up(reader) == expected


@pytest.mark.req("S0-214")
def test_a_scan_streams(uri: str) -> None:
    with RegionWriter(uri, REGION) as writer:
        writer.put(rows(*range(4, 40), stamp=1))
        writer.flush()
        batches = read(uri).scan(["n"], "id >= 2").to_batches()
        assert isinstance(batches, pa.RecordBatchReader)
        assert batches.schema.names == ["n"]
        parts = [*batches]
        assert sum(one.num_rows for one in parts) == 38
        assert len(parts) > 1, "source by source"


def test_columns_of_an_older_generation(uri: str) -> None:
    """Its column was renamed since, and one was added: a filter has the base's names."""
    with RegionWriter(uri, REGION) as writer:
        writer.put(rows(2, 4, stamp=5))
        writer.flush()
    lance.dataset(uri).alter_columns({"path": "n", "name": "m"})
    lance.dataset(uri).add_columns(pa.field("later", pa.int32()))
    assert sorted(read(uri).scan(["id"], "m % 10 = 5 AND later IS NULL").to_table()["id"].to_pylist()) == [2, 4]
    assert read(uri).scan(["later", "m"], "id = 4").to_table().to_pylist() == [{"later": None, "m": 45}]
    assert read(uri).get([4])["m"].to_pylist() == [45]


def test_blobs_are_bytes(tmp_path: Path) -> None:
    values = [b"inline", b"", None, b"long" * 9]
    base, newer = (test_blobs.rows(range(*ends), values[::step]) for ends, step in (((6,), 1), ((3, 9), -1)))
    reader = read(test_blobs.made(tmp_path, base, newer), "manifests")
    expected = test_blobs.as_bytes(tmp_path, pa.concat_tables([base.slice(1, 2), newer]))
    assert {row["id"]: row["x"] for row in reader.scan().to_table().to_pylist()} == expected
    assert {row["id"]: row["x"] for row in reader.scan(filter="id > 3").to_table().to_pylist()} == {
        key: value for key, value in expected.items() if key > 3
    }
    assert {row["id"]: row["x"] for row in reader.get(range(9)).to_pylist()} == expected


def test_the_limits_of_what_a_reader_keeps(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "_MAX_OPEN", 2)
    with RegionWriter(uri, REGION) as writer:
        for stamp in range(1, 5):
            writer.put(rows(stamp, stamp=stamp))
            writer.flush()
        reader = read(uri, writer=writer)
        for _ in range(2):
            assert stamps(reader) == {1: 1, 2: 2, 3: 3, 4: 4}
        assert len(reader._opened._generations._kept) == 2


def test_the_region_of_a_writer_that_reads_see_first(uri: str) -> None:
    """It was made after the reader listed the regions."""
    reader = read(uri)
    _ = reader.table.regions
    with RegionWriter(uri, durable=False) as writer:
        writer.put(rows(8, stamp=1))
        found = unmerged.read_unmerged(reader.table, "strong", writers=[writer])
        assert [one.region_id for one in found.regions] == [writer.region_id]
