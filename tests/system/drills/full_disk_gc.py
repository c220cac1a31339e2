"""gc where not a byte is free: ``unshare -Urm python -m tests.system.drills.full_disk_gc FOLDER``.

Leases and gc's own records need space. A lease does without its superseded numbers; gc deletes first what needs no
record, and that makes room for the rest.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from memwal_ops import open_table
from memwal_ops.core.leases import Holder, acquire, list_leases, release
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.storage.api import DiskFullError
from tests.support.tables.workload import Workload, assert_same
from tests.system.drills.full_disk import fill
from tests.system.drills.page import age

ROWS = range(1500)
OPTIONS = gc.GcOptions(drain_after=timedelta(days=1))


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(root)], check=True)
    table = Workload(1, regions=1, base_rows=1500, max_memtable_rows=1500).create(str(root / "t.lance"))
    for _ in range(2):
        table.put(ROWS)
        table.flush()
        merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    age(table.uri, 48)
    expire.apply(open_table(table.uri), expire.ExpireOptions(older_than=timedelta(days=1)))
    filler = root / "filler"

    # Nothing can go without a record: it says so, and changes nothing.
    fill(filler, 0)
    try:
        gc.apply(open_table(table.uri), OPTIONS)
    except DiskFullError as error:
        assert "disk-full.md" in error.remedy
    else:
        raise AssertionError
    filler.unlink()
    assert gc.apply(open_table(table.uri), OPTIONS).drained

    # What was drained can, and makes room for all that follows.
    age(Path(table.uri, "_mem_wal"), 48)
    table.put(ROWS)
    table.flush()
    fill(filler, 0)
    report = gc.apply(open_table(table.uri), OPTIONS)
    assert report.deleted_bytes > 4096, report
    assert report.failed == {}
    assert_same(table.read_spec(), table.expected())
    filler.unlink()

    # A lease makes room by its own past.
    store, me = open_table(table.uri).store, Holder("me", "me")
    for _ in range(9):
        lease, _ = acquire(store, "gc", me)
        assert lease is not None
        release(store, lease, "succeeded")
    fill(filler, 0)
    assert gc.apply(open_table(table.uri), OPTIONS).exit_code == 0
    assert acquire(store, "gc", me)[0] is not None
    assert [(one.job, one.number) for one in list_leases(store)] == [("gc", 19)]
    assert merge_exit(table.uri) in {0, 20}
    assert_same(table.read_spec(), table.expected())


def merge_exit(uri: str) -> int:
    try:
        return merge.apply(open_table(uri), merge.MergeOptions()).exit_code
    except MemwalOpsError as error:
        return error.exit_code


if __name__ == "__main__":
    main()
