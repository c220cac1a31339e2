"""pylance's writer where the store loses an answer: whatever it acknowledged is merged, and nothing stays behind."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.integration.contracts.test_lost_answers import rows
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.gc_options import IMMEDIATE
from tests.support.s3_server import options_for
from tests.support.tables.reading import read_base, read_lsm, read_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Read = Callable[[str, Mapping[str, str]], Mapping[tuple[int], object]]

pytestmark = pytest.mark.s3

# So many requests write something while a writer opens a region, puts twice and closes it.
PUTS = 17


@dataclass
class NthPut(FaultyProxy):
    """Loses the answer to one of the next PUTs: the ``nth`` from now, by ``status`` or a reset."""

    nth: int = 0
    status: int | None = None
    lost: list[str] = field(default_factory=list)

    def next_fault(self, method: str, path: str) -> Fault | None:
        if method != "PUT":
            return None
        self.nth -= 1
        if self.nth:
            return None
        self.lost.append(path)
        return Fault(method, path, "after", self.status)


@dataclass
class Acknowledged:
    """Keys that must be there, and those that may."""

    sure: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)

    def look(self, read: Read, uri: str, options: Mapping[str, str]) -> None:
        found = [key for (key,) in read(uri, options)]
        assert len(found) == len(set(found))
        assert not self.sure - set(found)
        assert not set(found) - self.sure - self.tried


def write(uri: str, options: Mapping[str, str], region: str, acknowledged: Acknowledged, *firsts: int) -> None:
    """One writer's life; it ends where the writer fails."""
    with suppress(OSError):
        dataset = lance.dataset(uri, storage_options=dict(options))
        writer = dataset.mem_wal_writer(region, max_memtable_rows=400, max_wal_flush_interval_ms=1)
        with suppress(OSError):
            for first in firsts:
                acknowledged.tried |= {*range(first, first + 10)}
                writer.put(rows(first, first + 10))
                acknowledged.sure |= {*range(first, first + 10)}
        writer.close()


@pytest.mark.timeout(1800)
def test_of_every_put(s3_endpoint: str, s3_bucket: str) -> None:
    """One region for each, by a reset or a 500 in turn; its writers before and after that one are answered."""
    uri, options = f"s3://{s3_bucket}/t.lance", options_for(s3_endpoint)
    lance.write_dataset(rows(0, 5), uri, storage_options=options).initialize_mem_wal()
    acknowledged = Acknowledged({*range(5)})
    with NthPut(s3_endpoint) as proxy:
        for number in range(PUTS):
            region, first = str(uuid.uuid4()), 100 * (1 + number)
            write(uri, options, region, acknowledged, first)
            proxy.nth, proxy.status = 1 + number, 500 if number % 2 else None
            write(uri, options_for(proxy.endpoint), region, acknowledged, first + 5, first + 12)
            write(uri, options, region, acknowledged, first + 20)
        assert len(proxy.lost) >= PUTS - 1, "a writer that gives up early writes no more"
        kinds = ("manifest/", "version_hint.json", "/wal/", "/data/", "/_versions/", "_deletions/", "_pk_index/")
        assert all(any(kind in path for path in proxy.lost) for kind in kinds)
    acknowledged.look(read_lsm, uri, options)
    acknowledged.look(read_spec, uri, options)
    report = merge.apply(open_table(uri, options), merge.MergeOptions())
    assert (report.decision, report.blocked) == ("merged", ())
    acknowledged.look(read_base, uri, options)
    snapshot.apply(open_table(uri, options), snapshot.SnapshotOptions())
    for _ in range(4):
        collected = gc.apply(open_table(uri, options), IMMEDIATE)
        assert not collected.failed
    assert collected.decision == "nothing_to_delete"
    assert not collected.to_json()["unknown"]
    acknowledged.look(read_spec, uri, options)
