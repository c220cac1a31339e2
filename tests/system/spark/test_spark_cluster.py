"""Jobs on a standalone cluster: drivers and workers are killed while tasks run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import run_job
from tests.support.spark_cluster import Cluster, kill, running, started
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Made = tuple[str, Callable[[], None]]

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def plain(uri: str) -> Made:
    """A table to index and to compact, and a check of its rows."""
    made = PlainTable(uri).create(fragments=4, rows=100).create_indexes("IVF_FLAT")
    for _ in range(4):
        made.append(100)

    def check() -> None:
        assert made.read() == made.model

    return uri, check


def with_log(uri: str) -> Made:
    """A table to merge, and a check of its rows."""
    made = Workload(5, regions=2, base_rows=100).create(uri).step(6)
    made.close()

    def check() -> None:
        run_job(uri, "merge")
        assert_same(read_base(uri), made.model.expected(), seed=made.seed)

    return uri, check


JOBS: dict[str, tuple[Callable[[str], Made], list[str], Callable[[dict[str, Any]], set[str]]]] = {
    "catchup": (plain, [], lambda report: {one["engine"] for one in report["indexes"]}),
    "compact": (plain, ["--target-rows", "200"], lambda report: {report["engine"]}),
    "merge": (with_log, [], lambda report: {report["engine"]}),
}
DONE = {"catchup": "caught_up", "compact": "compacted", "merge": "merged"}


@pytest.mark.parametrize(
    "job", ["catchup", *(pytest.param(one, marks=pytest.mark.campaign) for one in ("compact", "merge"))]
)
def test_a_killed_driver_and_a_killed_worker(cluster: Cluster, tmp_path: Path, job: str) -> None:
    """The first leaves the table as it was, in spite of the second the job ends."""
    make, options, engines = JOBS[job]
    uri, check = make(str(tmp_path / "t.lance"))
    before = lance.dataset(uri).version
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()

    driver = cluster.drive(first, job, uri, *options)
    try:
        started(first)
    finally:
        kill(driver)
    (first / "gate").touch()
    assert lance.dataset(uri).version == before
    assert run_job(uri, "verify").decision == "healthy"

    driver = cluster.drive(second, job, uri, *options)
    try:
        cluster.kill_worker_of(started(second)[0])
        (second / "gate").touch()
        out, _ = driver.communicate(timeout=PATIENCE)
    finally:
        kill(driver)
    assert driver.returncode == 0, (out, (second / "driver.log").read_text()[-3000:])
    report = json.loads(out)
    assert report["decision"] == DONE[job]
    assert engines(report) == {"spark"}
    again = run_job(uri, job, **{"target_rows": 200} if job == "compact" else {})
    assert again.decision in {"unchanged", "nothing_to_merge"}, "nothing is left"
    assert run_job(uri, "verify", answers=True).decision == "healthy"
    check()
