"""Each page on the situation of which it speaks: brought about, looked at, ended, and nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.leases import Holder, acquire, list_leases
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.support.faulty_proxy import FaultyProxy
from tests.support.gc_options import NONE_PINNED
from tests.support.run_cli import run_process
from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY, options_for, s3_client
from tests.support.service import service
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.support.waiting import PATIENCE, until
from tests.system.drills.page import Page, age

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
ZERO = timedelta(0)
# For workers: a merge that has begun, and does nothing.
ENDLESS = """
import sys
import time
if "memwal_ops.supervisor.workers.worker" in sys.orig_argv:
    from memwal_ops.formats.lance.jobs import merge
    merge.apply = lambda *_: time.sleep(86400)
"""


def configure(folder: Path, table: Workload, jobs: str, name: str = "service", leases: str = "") -> str:
    """A service's configuration, with these jobs and no other; no process serves its port."""
    off = ", ".join(
        f"{job}: {{enabled: false}}" for job in ("merge", "catchup", "compact", "snapshot", "verify") if job not in jobs
    )
    path = folder / f"{name}.yaml"
    path.write_text(
        f"state_dir: {folder}/state-{name}\nhttp: {{port: 1}}\n{leases}\n"
        f"tables: [{{uri: {table.uri}, jobs: {{{jobs}, {off}}}}}]\n"
    )
    return str(path)


def small(tmp_path: Path, *, regions: int = 1) -> Workload:
    return Workload(1, regions=regions, base_rows=40).create(str(tmp_path / "t.lance"))


def write(table: Workload, numbers: list[int]) -> None:
    table.put(numbers)
    table.flush()


def test_backlog_growing(tmp_path: Path) -> None:
    table = small(tmp_path)
    write(table, [1, 2])
    config = configure(tmp_path, table, "merge: {schedule: 1h}")
    assert run_process("run", "--once", "--config", config).code == 0
    for number in range(33):  # the service is gone
        write(table, [number, 100 + number])
    with Page("backlog-growing.md", {"URI": table.uri, "CONFIG": config}) as page:
        line, inspected, answer, history, leases = page.run("Look")
        assert "generations 33" in line
        assert "Behind by 33 generations in 1 region" in inspected
        assert "does not respond" in answer
        assert "succeeded" in history
        assert "released" in leases
        assert_same(table.read_spec(), table.expected())
        page.run("Do", 1)
        write(table, [7, 500])  # the writers are not stopped
        _, line = page.run("Do")
        assert "0 generations waiting" in line
    assert_same(read_base(table.uri), table.expected())


def leave_a_lease(table: Workload, config: str) -> None:
    """A supervisor is killed while it merges: its worker never comes to an end."""
    write(table, [1, 200])
    folder = Path(config).parent / "endless"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ENDLESS)
    with service(Path(config), {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}) as running:
        until(lambda: [*list_leases(open_table(table.uri).store)])
        until(lambda: running.events("run_started"))
        running.kill()
    (lease,) = list_leases(open_table(table.uri).store)
    assert lease.ended is None


def test_stuck_lease(tmp_path: Path) -> None:
    table = small(tmp_path)
    leave_a_lease(table, configure(tmp_path, table, "merge: {schedule: 1h}", "killed", leases="leases: {ttl: 1h}"))
    write(table, [3, 300])
    config = configure(tmp_path, table, "merge: {schedule: 1h}")
    with Page("stuck-lease.md", {"URI": table.uri, "JOB": "merge", "CONFIG": config}) as page:
        listed, tried = page.run("Look")
        assert " held " in listed
        assert "t merge: skipped, its lease is held by " in tried
        assert "done: 0 runs" in tried
        assert read_backlog(open_table(table.uri)).pending
        by_hand, broken = page.run("Do", 2)
        assert by_hand.startswith("merged")
        assert "broken: the lease of merge" in broken
        write(table, [5, 301])
        ran, listed = page.run("Do")
        assert "merge: succeeded, merged" in ran
        assert " released " in listed
    assert_same(read_base(table.uri), table.expected())


def test_split_membership(tmp_path: Path) -> None:
    table, ops, lost = small(tmp_path), tmp_path / "ops", tmp_path / "lost"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fleet = f"fleet: {{uri: {ops}, name: a, heartbeat: 1s}}"
    config = Path(configure(tmp_path, table, "merge: {schedule: 1h}", leases=fleet))
    config.write_text(config.read_text().replace("port: 1}", f"port: {port}}}"))
    with (
        service(config) as running,
        Page("split-membership.md", {"URI": table.uri, "CONFIG": str(config), "FLEET": str(ops)}) as page,
    ):

        def seen() -> dict[str, Any]:
            return running.get("/api/v1/status")["service"]["fleet"]  # type: ignore[no-any-return]

        until(lambda: seen()["state"] == "joined" and running.runs(job="merge"))
        ops.rename(lost)
        ops.touch()
        until(lambda: seen()["error"])
        (status,) = page.run("Look")
        assert "The store of the fleet cannot be used; this member keeps its 1 tables." in status
        write(table, [1, 200])  # and it still works on them
        ops.unlink()
        lost.rename(ops)
        until(lambda: seen()["state"] == "joined")
        _, status = page.run("Do")
        assert "a (this one)" in status
        assert "1 of 1" in status


def test_writer_fenced(tmp_path: Path) -> None:
    table = small(tmp_path)
    (region,) = table.regions
    firsts = ("10000", "20000")

    def lines(name: str, first: str) -> list[str]:
        path = tmp_path / f"{first}.{name}"
        return path.read_text().splitlines() if path.exists() else []

    command = [sys.executable, "-m", "tests.system.drills.rival", table.uri, region]
    rivals = [subprocess.Popen([*command, first, str(tmp_path)], cwd=ROOT) for first in firsts]
    try:
        until(lambda: all(len(lines("fenced", first)) >= 2 for first in firsts))
        with Page("writer-fenced.md", {"URI": table.uri, "REGION": region, "OTHER": str(rivals[1].pid)}) as page:
            page.run("Look", 1)
            claims = page.run("Look")[-1].splitlines()
            assert len(claims) > 4
            assert claims[-1].startswith("epoch ")
            page.run("Do", 2)
            assert rivals[1].wait(PATIENCE) < 0
            fenced, told = len(lines("fenced", firsts[0])), len(lines("acknowledged", firsts[0]))
            until(lambda: len(lines("acknowledged", firsts[0])) > told + 10)
            assert len(lines("fenced", firsts[0])) <= fenced + 1
            (tmp_path / "stop").touch()
            assert rivals[0].wait(PATIENCE) == 0
            page.run("Do")
    finally:
        for rival in rivals:
            if rival.poll() is None:
                rival.kill()
                rival.wait()
    rows, base = read_base(table.uri), table.expected()
    found = {key for (key,) in rows.keys() - base.keys()}
    acknowledged = {int(key) for first in firsts for key in lines("acknowledged", first)}
    assert len(acknowledged) > 10
    assert acknowledged <= found <= {int(key) for first in firsts for key in lines("tried", first)}
    for key in found:
        assert rows[(key,)] == {"id": key, "val": float(key), "txt": f"by {key // 10_000 * 10_000}"}
    assert_same({key: rows[key] for key in base}, base)


@pytest.mark.s3
def test_conditional_writes(s3_endpoint: str, s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/t.lance"
    table = Workload(1, regions=1, base_rows=40).create(uri, options_for(s3_endpoint))
    write(table, [1, 2, 50])
    client = s3_client(s3_endpoint)

    def objects() -> dict[str, str]:
        return {one["Key"]: one["ETag"] for one in client.list_objects_v2(Bucket=s3_bucket)["Contents"]}

    before = objects()
    with FaultyProxy(s3_endpoint, drop_condition=True) as gateway:
        environment = {
            "URI": uri,
            "ENDPOINT": s3_endpoint,
            "AWS_ENDPOINT_URL": gateway.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }
        with Page("conditional-writes.md", environment) as page:
            said = page.run("Look")
            assert "overwrote an object that was to be created only if absent" in said[0]
            assert "1 generation in 1 region" in said[2]
            assert objects() == before
            tried, merged, inspected = page.run("Do")
            assert "put-if-absent is enforced" in tried
            assert merged.startswith("merged")
            assert "Up to date" in inspected
    assert_same(read_base(uri, options_for(s3_endpoint)), table.expected())


def test_catchup_never_finishes(tmp_path: Path) -> None:
    table = small(tmp_path)
    lance.dataset(table.uri).create_scalar_index("val", "BTREE", name="val_idx")
    described = {one.name: one for one in lance.dataset(table.uri).describe_indices()}
    (broken,) = (segment.uuid for segment in described["val_idx"].segments)
    config = configure(tmp_path, table, "catchup: {options: {min_uncovered_rows: 1000}}")
    write(table, [1, 2, 50])
    merge.apply(open_table(table.uri), merge.MergeOptions())
    assert run_process("run", "--once", "--config", config).code == 0
    shutil.rmtree(Path(table.uri, "_indices", broken))
    environment = {"URI": table.uri, "REGION": table.regions[0], "CONFIG": config}
    more = {"GOOD": "id_idx", "BROKEN": "val_idx"}
    with Page("catchup-never-finishes.md", environment | more) as page:
        inspected, why, history, _ = page.run("Look")
        assert inspected.count(" behind ") == 2
        assert "index id_idx covers generations only up to 0" in why
        assert "unchanged" in history
        *_, inspected, why = page.run("Do")
        assert inspected.count(" caught up ") == 2
        assert "covered by index id_idx, val_idx" in " ".join(why.split())
    assert_same(read_base(table.uri), table.expected())
    for (key,), row in table.expected().items():
        same = "IS NULL" if row["val"] is None else f"= {row['val']!r}"
        assert lance.dataset(table.uri).to_table(filter=f"val {same} AND id = {key}").to_pylist() == [row]


def test_clock_skew(tmp_path: Path) -> None:
    table = small(tmp_path)
    for _ in range(2):
        write(table, [1, 2, 50])
    merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    expire.apply(open_table(table.uri), expire.ExpireOptions(older_than=ZERO, allow_unsafe=True))
    assert gc.apply(open_table(table.uri), NONE_PINNED).decision == "drained"
    acquire(open_table(table.uri).store, "merge", Holder("other", "other@machine"))

    def stand() -> int:
        return len(list(Path(table.uri, "_mem_wal", table.regions[0]).glob("*_gen_*")))

    path = os.pathsep.join([str(Path(__file__).parent / "other_clock"), str(ROOT)])
    with Page("clock-skew.md", {"URI": table.uri, "PYTHONPATH": path, "CLOCK": "3600"}) as page:
        _, probed, leases = page.run("Look")
        assert "This machine's clock is 3,600 s ahead of its clock" in probed
        assert " held " in leases
        age(Path(table.uri, "_mem_wal"), 10 / 60)
        plan, _ = page.run("A machine that is ahead")
        assert plan.startswith("planned: ")
        assert re.search(r"^generations +2 +0 +0$", plan, re.MULTILINE)
        assert stand() == 2
        age(Path(table.uri, "_mem_wal"), 20 / 60)
        page.run("A machine that is behind", CLOCK="-3600")
        assert stand() == 2
        probed, _, inspected = page.run("Do", CLOCK="0")
        assert "Its clock agrees with this machine's" in probed
        assert "Up to date" in inspected
        assert stand() == 0
    assert_same(read_base(table.uri), table.expected())
    assert_same(table.read_lsm(), table.expected())
