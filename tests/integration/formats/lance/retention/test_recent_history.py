"""The retained history of a Lance table: who made each version, what it merged, the life of generations."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from memwal_ops.core.table_history import HasRecentHistory, TableHistory
from tests.support.tables import damage
from tests.support.tables.gc_tables import caught_up, grow, make, merged, table_of
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.lsm_table import LsmTable
from tests.support.tables.workload import Workload


def history(made: LsmTable, limit: int = 50) -> TableHistory:
    table = table_of(made)
    assert isinstance(table.format, HasRecentHistory)
    return table.format.recent_history(table, limit)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_versions_and_generations(kind: type[LsmTable], tmp_path: Path) -> None:
    made = make(tmp_path, kind, generations=2)
    merged(made)
    merge_version = table_of(made).version
    grow(made)
    found = history(made)
    newest = found.revisions[0]
    assert (newest.revision, newest.by, newest.operation) == (merge_version, "memwal-ops merge", "update")
    assert newest.rows == table_of(made).dataset.count_rows()
    assert [one.revision for one in found.revisions] == list(range(merge_version, 0, -1))
    by_merge = {one.revision: one for one in found.revisions if one.by == "memwal-ops merge"}
    assert sum(one.merged for one in by_merge.values()) == 4
    if kind is Workload:  # pylance's writer records the sizes of generations
        assert all(one.merged_rows > 0 for one in by_merge.values())
    others = [one for one in found.revisions if one.revision not in by_merge]
    assert all(one.merged == 0 and one.by.startswith(("lance", "memwal-ops init")) for one in others)
    by_name = {one.name: one for one in found.log}
    assert len(by_name) == 6
    for region in made.regions:
        short = str(UUID(str(region)))[:8]
        for generation in (1, 2):
            one = by_name[f"{short}/{generation}"]
            assert one.state == "merged"
            assert one.merged == by_merge[one.merged_in or 0].committed
            assert one.flushed is None or one.merged is None or one.flushed <= one.merged
        last = by_name[f"{short}/3"]
        assert (last.state, last.merged, last.merged_in, last.removed) == ("waiting", None, None, None)
    assert found.truncated == ""


def test_an_impossible_merge_progress(tmp_path: Path) -> None:
    """What a damaged version claims to have merged is counted, and not listed one by one."""
    made = make(tmp_path, generations=2)
    merged(made)
    damage.set_progress(made.uri, 1 << 40)
    assert history(made).revisions[0].merged > 1 << 39
    damage.set_progress(made.uri, (1 << 64) - 1)
    assert history(made).revisions[0].merged > 1 << 63


def test_indexes_and_storage(tmp_path: Path) -> None:
    made = make(tmp_path)
    table_of(made).dataset.create_scalar_index("id", "BTREE", name="by_id")
    merged(made)
    behind = history(made)
    index = next(one for one in behind.indexes if one.name == "by_id")
    assert index.kind == "BTree"
    assert index.covered < index.total
    assert index.uncovered_rows > 0
    data = behind.storage[0]
    assert (
        data.bytes == sum(path.stat().st_size for path in Path(made.uri, "data").iterdir()) == behind.revisions[0].bytes
    )
    caught_up(made)
    assert all((one.covered, one.uncovered_rows) == (one.total, 0) for one in history(made).indexes)


def test_a_damaged_version_is_left_out(tmp_path: Path) -> None:
    made = make(tmp_path)
    merged(made)
    whole = [one.revision for one in history(made).revisions]
    named = (path for path in Path(made.uri, "_versions").iterdir() if path.name[0].isdigit())
    oldest = max(named, key=lambda path: path.name)
    oldest.write_bytes(b"damaged")
    assert [one.revision for one in history(made).revisions] == whole[:-1]


def test_the_limit(tmp_path: Path) -> None:
    made = make(tmp_path)
    merged(made)
    (newest,) = history(made, limit=1).revisions
    assert (newest.by, newest.merged) == ("memwal-ops merge", 6)
