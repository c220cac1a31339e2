"""What gc asks of the store: per run and per region, where nothing is to be done and for one generation's end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.gc import IMMEDIATE, deletable, steps
from benchmarks.server import BUCKET, counting_server
from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.jobs.gc.job import GcOptions
from memwal_ops.formats.lance.layouts import REGION, SHARD, Layout
from memwal_ops.storage.probe import probe_conditional_writes
from tests.support.counting_store import CountingStore
from tests.support.tables.many_regions import make_regions

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from memwal_ops.formats.lance.jobs.gc.job import GcReport
    from memwal_ops.formats.lance.table import Table

pytestmark = pytest.mark.long

REGIONS = 40

# Of each step the most for the run, and the most for each region; the server sees pylance's own, too, and the probe.
# Opening lists the table's root once, which tells its format. Writers put two log entries or three, as their clock
# ticks: up to two requests a region. What the table and the region are is read once for a run and a region, and
# again right before each deletion. Before the first drain or deletion, three folders of the base are listed, and its
# deletion file is opened once.
LIFE = {
    "plan, a generation to drain": ((12, 4), (16, 4)),
    "apply, drains it": ((16, 20), (20, 21)),
    "plan, a generation to delete": ((12, 9), (16, 9)),
    "apply, deletes it": ((16, 25), (20, 27)),
    "plan, nothing to do": ((9, 7), (13, 7)),
    "apply, nothing to do": ((13, 7), (17, 7)),
}
DECISIONS = ["planned", "drained", "planned", "deleted", "nothing_to_delete", "nothing_to_delete"]


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[dict[str, str], Counter[str]]]:
    """A server that counts."""
    with counting_server() as server:
        yield server


def calls(
    table: Table, run: Callable[[Table, GcOptions], GcReport], options: GcOptions
) -> tuple[GcReport, CountingStore]:
    store = CountingStore(table.store)
    return run(replace(table, store=store), options), store


@pytest.mark.parametrize("run", [gc.plan, gc.apply])
@pytest.mark.parametrize("layout", [SHARD, REGION])
def test_regions_where_nothing_is_flushed(tmp_path: Path, layout: Layout, run: Callable[..., GcReport]) -> None:
    uri = str(tmp_path / "t.lance")
    make_regions(uri, REGIONS, layout)
    gc.apply(open_table(uri), GcOptions())  # the store's proof is once per process
    report, store = calls(open_table(uri), run, GcOptions())
    assert (report.decision, report.regions) == ("nothing_to_delete", REGIONS)
    assert store.calls["list"] <= REGIONS + 7, "each folder once"
    assert store.calls["get"] <= 2 * REGIONS + 2 + (run is gc.apply), "the hint, the newest manifest; what the table is"
    assert store.calls["head"] == REGIONS + 2 * (run is gc.apply), (
        "is there a newer one; the store's clock, and the table"
    )
    assert store.calls.total() <= 4 * REGIONS + 10 + 5 * (run is gc.apply)
    assert store.bytes_written == 0


@pytest.mark.parametrize("run", [gc.plan, gc.apply])
def test_regions_where_nothing_is_flushed_on_s3(
    counted: tuple[dict[str, str], Counter[str]], run: Callable[..., GcReport]
) -> None:
    options, requests = counted
    uri = f"s3://{BUCKET}/{run.__name__}.lance"
    make_regions(uri, REGIONS, REGION, options)
    gc.apply(open_table(uri, options), GcOptions())
    table = open_table(uri, options)
    requests.clear()
    assert run(table, GcOptions()).decision == "nothing_to_delete"
    assert requests["HEAD"] <= REGIONS + 1 + (run is gc.apply), "and one for the store's clock, one for the table"
    assert requests["GET"] <= 3 * REGIONS + 12 + (run is gc.apply), "the listing, the hint, and the newest manifest"
    assert requests["PUT"] + requests["POST"] + requests["DELETE"] == (0 if run is gc.plan else 2), "the store's clock"


@pytest.mark.parametrize("where", ["local files", "S3"])
def test_the_end_of_a_generation(tmp_path: Path, counted: tuple[dict[str, str], Counter[str]], where: str) -> None:
    """One generation in each region, from merged to gone, and the runs behind it that find nothing."""
    options, requests = counted
    local = where == "local files"
    for regions in (1, 4):
        base = tmp_path if local else f"s3://{BUCKET}"
        found = list(steps(f"{base}/{regions}.lance", None if local else options, requests, regions))
        assert [step.decision for step in found] == DECISIONS
        for step in found:
            run, region = LIFE[step.name][0 if local else 1]
            made = step.calls if local else sum(step.requests.values())
            assert made <= run + region * regions, (step, regions)
            if not local and step.name.startswith("plan"):
                assert step.requests.keys() <= {"GET", "HEAD"}, "a plan reads"


@pytest.mark.parametrize("scale", [20, 4])
def test_requests_of_deletes(tmp_path: Path, scale: int) -> None:
    """Local files: per folder a listing; a thousand objects to a request, and a proof for each of these."""
    table = deletable(str(tmp_path / "t.lance"), None, scale)
    probe_conditional_writes(table.store)  # once per process and table
    report, store = calls(table, gc.apply, IMMEDIATE)
    folders, log = 1_000 // scale, 2_000 // scale
    assert report.counts[CandidateKind.ORPHAN][Verdict.DELETE] == folders
    assert report.counts[CandidateKind.WAL_ENTRY][Verdict.DELETE] >= log - 4
    assert store.objects_deleted == report.deleted_objects + 1, "and the object that told the store's time"
    thousands = report.deleted_objects // 1_000
    assert store.calls["delete_many"] <= thousands + 2 + 3, "folders, log, old manifests one by one"
    assert store.calls["list"] <= folders + 20 + 2 * thousands
    assert store.calls["get"] <= 15 + 2 * thousands
    assert store.calls["head"] <= 8 + 2 * store.calls["delete_many"], "the table, and the region, before each deletion"
    assert store.calls["get_range"] <= 3, "who wrote the log is told by a few entries"


def test_requests_of_deletes_on_s3(counted: tuple[dict[str, str], Counter[str]]) -> None:
    """Folders share the pages of one listing: twice as many of them take no more requests, in the same batches."""
    options, requests = counted
    made = {}
    for scale in (20, 10):
        table = deletable(f"s3://{BUCKET}/folders-{scale}.lance", options, scale)
        probe_conditional_writes(table.store)
        requests.clear()
        report = gc.apply(table, IMMEDIATE)
        assert report.counts[CandidateKind.ORPHAN][Verdict.DELETE] == 1_000 // scale
        made[scale] = requests.total()
    assert made[10] <= made[20] + 1 <= 60, "the listing of the region has a second page"
