"""The drill of runbooks/disk-full.md: ``unshare -Urm python -m tests.system.drills.full_disk FOLDER``.

FOLDER gets a file system of some megabytes, in a mount namespace of this process alone: with a table, a temporary
folder and a service's state on it. It is filled to the last byte, a merge fails, and the page is followed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance

from memwal_ops import open_table
from memwal_ops.errors import CommitStateUnknownError, StorageError
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.support.gc_options import IMMEDIATE
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.system.drills.page import Page, age

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 4096
_ALL_ROWS = range(1500)


def fill(path: Path, left: int) -> None:
    """Write a file until there is no space, then give some blocks back."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(_BLOCK)):
                pass
        except OSError as error:
            assert "No space left" in str(error)
    with path.open("r+b") as file:
        file.truncate(max(0, path.stat().st_size - left * _BLOCK))


def files(uri: str) -> set[str]:
    return {str(path.relative_to(uri)) for path in Path(uri).rglob("*") if path.is_file()}


def leaves_nothing(table: Workload, filler: Path, job: Callable[[], None], *, indexes: bool = False) -> None:
    """Wherever in its course the space ends, and then it comes to its end.

    pylance leaves files of an index that it could not finish, for its own clean-up: ``indexes``.
    """
    before, failures = files(table.uri), set()
    blocks = 1
    while True:
        fill(filler, blocks)
        try:
            job()
        except CommitStateUnknownError:
            failures.add("unknown")
            before = files(table.uri)  # a version may name what it wrote
        except StorageError as error:
            failures.add(str(error).split("'", 1)[0])
            left = files(table.uri) - before
            assert files(table.uri) >= before
            assert all(path.startswith("_indices/") for path in left) if indexes else not left, (blocks, error, left)
        else:
            break
        finally:
            filler.unlink()
        assert_same(table.read_spec(), table.expected())
        blocks += 2 if blocks < 16 else 6
    assert failures


def merge_all(uri: str) -> None:
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"


def catch_up(uri: str) -> None:
    (index,) = catchup.apply(open_table(uri), catchup.CatchupOptions()).indexes
    if index.error is not None:
        raise index.error


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(root)], check=True)
    state, temporary = root / "state", root / "tmp"
    state.mkdir()
    temporary.mkdir()
    (state / "history.sqlite").write_bytes(bytes(_BLOCK))
    table = Workload(1, regions=1, base_rows=1500, max_memtable_rows=1500).create(str(root / "t.lance"))
    (region,) = table.regions
    for _ in range(3):
        table.put(_ALL_ROWS)
        table.flush()
        merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    age(table.uri, 48)
    table.put(_ALL_ROWS)
    table.flush()
    leaves_nothing(table, temporary / "filler", lambda: merge_all(table.uri))
    leaves_nothing(table, temporary / "filler", lambda: catch_up(table.uri), indexes=True)
    table.put(_ALL_ROWS)
    table.flush()

    spilled = temporary / ".tmpWq81xZ"
    spilled.mkdir()
    cut = Path(table.uri, "data", "0101.lance#1")
    cut.write_bytes(bytes(_BLOCK))
    fill(spilled / "part", 0)
    os.utime(spilled, (0, 0))
    age(cut.parent, 48)
    with Page("disk-full.md", {"URI": table.uri, "STATE": str(state), "TMPDIR": str(temporary)}) as page:
        free, _, refused, inspected = page.run("Look")
        assert "100%" in free
        assert "No space left on device" in refused
        assert "See runbooks/disk-full.md" in refused
        assert "1 generation in 1 region" in inspected
        assert_same(table.read_spec(), table.expected())
        page.run("Free a little space first")
        assert not spilled.exists()
        assert not cut.exists()
        expired, drained = page.run("Then delete old versions and generations", 2)
        assert expired.startswith("expired"), expired
        assert " and 2 more (" in drained, drained
        assert "removed from the" in drained, drained
        age(Path(table.uri, "_mem_wal"), 0.5)
        (deleted,) = page.run("Then delete old versions and generations")
        assert deleted.startswith("deleted"), deleted
        said, _, inspected = page.run("Continue")
        assert said.startswith("merged")
        assert "Up to date" in inspected
    assert_same(read_base(table.uri), table.expected())
    zero = timedelta(0)
    expire.apply(open_table(table.uri), expire.ExpireOptions(older_than=zero, allow_unsafe=True))
    report = gc.apply(open_table(table.uri), IMMEDIATE)
    assert report.to_json()["unknown"] == []
    assert len(lance.dataset(table.uri).versions()) == 1
    assert not list(Path(table.uri, "_mem_wal", region).glob("*_gen_*"))
    assert_same(read_base(table.uri), table.expected())


if __name__ == "__main__":
    main()
