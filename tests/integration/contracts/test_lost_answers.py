"""What pylance's writer does where the store carried a write out and the answer was lost: asserted AS IT IS."""

from __future__ import annotations

import uuid

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import options_for
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base, read_lsm
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.writers import closed_at_the_end

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("val", pa.int64())])
ROOM = 100


def rows(first: int, end: int) -> pa.Table:
    numbers = np.arange(first, end)
    return pa.table({"id": numbers, "val": numbers}, schema=SCHEMA)


def writer(uri: str, region: str, options: dict[str, str], room: int = ROOM) -> lance.mem_wal.ShardWriter:
    dataset = lance.dataset(uri, storage_options=options)
    return closed_at_the_end(dataset.mem_wal_writer(region, max_memtable_rows=room, max_wal_flush_interval_ms=1))


@pytest.mark.s3
def test_an_unanswered_put_is_in_the_log_twice_and_the_region_needs_more_memory(
    s3_endpoint: str, s3_bucket: str
) -> None:
    """The put fails, as it must; the batch is written again behind itself, and a replay counts both.

    With the writer's own ``max_memtable_rows`` the region cannot be opened any more; with more it can, and
    nothing is lost. A claim that fails so has taken its epoch already.
    """
    with FaultyProxy(s3_endpoint) as proxy:
        options = options_for(proxy.endpoint)
        uri, region = f"s3://{s3_bucket}/t.lance", str(uuid.uuid4())
        lance.write_dataset(rows(0, 1), uri, storage_options=options).initialize_mem_wal()
        first = writer(uri, region, options)
        proxy.faults = [Fault("PUT", "/wal/", "after")]
        with pytest.raises(OSError, match="was taken after a failed PUT"):
            first.put(rows(10, 70))
        with pytest.raises(OSError, match="fenced"):
            first.put(rows(70, 80))
        with pytest.raises(OSError, match="past what the memtable replaying it can hold"):
            writer(uri, region, options)
        second = writer(uri, region, options, 2 * ROOM)
        assert second.memtable_stats()["row_count"] == 120
        second.close()
        found = read_lsm(uri, options)
        assert sorted(key for (key,) in found) == [0, *range(10, 70)]


@pytest.mark.long
@pytest.mark.s3
@pytest.mark.req("S0-049")
def test_an_unanswered_region_manifest_lists_its_generation_twice(s3_endpoint: str, s3_bucket: str) -> None:
    """The put is sent again and finds its own file, which counts as another's: the entry is put behind itself.

    Every later manifest keeps both. They are one generation: it is merged, and gc writes it down once at most.
    """
    with FaultyProxy(s3_endpoint) as proxy:
        options = options_for(proxy.endpoint)
        uri, region = f"s3://{s3_bucket}/t.lance", str(uuid.uuid4())
        lance.write_dataset(rows(0, 1), uri, storage_options=options).initialize_mem_wal()
        first = writer(uri, region, options)
        first.put(rows(10, 70))
        proxy.faults = [Fault("PUT", "/manifest/.*binpb", "after", 500, "InternalError")]
        first.close()
        second = writer(uri, region, options)
        second.put(rows(60, 80))
        second.close()
        listed = [*wire.sub(wire.region_manifest(Files(uri, options), region).fields, 8)]
        assert [wire.get(entry, 1) for entry in listed] == [1, 1, 2]
        assert listed[0] == listed[1]
        wanted = [0, *range(10, 80)]
        assert sorted(key for (key,) in read_lsm(uri, options)) == wanted
        report = merge.apply(open_table(uri, options), merge.MergeOptions())
        assert (report.decision, report.to_json()["passes"][0]["regions"]) == ("merged", {region: [1, 2]})
        assert sorted(key for (key,) in read_base(uri, options)) == wanted
