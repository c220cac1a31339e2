"""Pages on whole tables: restore one, move one, take one to another release."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, commit_indexes
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.table import Table
from memwal_ops.formats.lance.wire.memwal_index import with_catchup
from memwal_ops.memwal import RegionWriter
from tests.support.gc_options import IMMEDIATE
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.plain import PlainTable
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import key_of
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.system.drills.page import Page

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
ZERO = timedelta(0)


def write(table: LsmTable, *numbers: int) -> None:
    """A generation in each region, with these keys changed and the next keys new."""
    for at in range(len(table.regions)):
        table.put([number * len(table.regions) + at for number in numbers])
    table.flush()


def merged(uri: str) -> int:
    """Merge and catch up; the version that a reader of the base should have afterwards."""
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    catchup.apply(open_table(uri), catchup.CatchupOptions())
    return int(lance.dataset(uri).version)


def collect(uri: str) -> None:
    """All that may go, goes."""
    expire.apply(open_table(uri), expire.ExpireOptions(older_than=ZERO, allow_unsafe=True))
    gc.apply(open_table(uri), IMMEDIATE)


def generations(table: Workload) -> list[int]:
    """Of the first region, the generations whose folders stand."""
    found = Path(table.uri, "_mem_wal", table.regions[0]).glob("*_gen_*")
    return sorted(int(path.name.rpartition("_")[2]) for path in found)


def test_repair_a_table(tmp_path: Path) -> None:
    table = Workload(1, regions=1, base_rows=40).create(str(tmp_path / "t.lance"))
    write(table, 1, 2, 40)
    assert merge.apply(open_table(table.uri), merge.MergeOptions()).decision == "merged"
    write(table, 3, 41)
    claim_too_much(table.uri)
    hint = Path(table.uri, "_mem_wal", table.regions[0], "manifest/version_hint.json")
    hint.write_bytes(b"")
    with Page("repair-a-table.md", {"URI": table.uri}) as page:
        found, planned = page.run("Look")
        assert "ERROR index_catchup" in found
        assert "PLANNED: write the hint" in planned
        assert "PLANNED: set the catch-up entry" in planned
        assert_same(table.read_lsm(), table.expected())
        done, clean, merged_ = page.run("Do")
        assert done.startswith("repaired: 2 safe fixes")
        assert clean.startswith("healthy")
        assert merged_.startswith("merged")
        assert_same(read_base(table.uri), table.expected())
        records = [json.loads(path.read_text()) for path in Path(table.uri, "_mem_wal_ops/quarantine").rglob("*.json")]
        (name,) = [one["id"] for one in records if one["check"] == "version_hint"]
        shown, undone = page.run("Bring something back", ID=name)
        assert shown.startswith("planned")
        assert undone.startswith("undone")
        assert hint.read_bytes() == b""
        before = table.expected()
        write(table, 4, 42)
        damage.remove_generation(table.uri, table.regions[0], max(generations(table)))
        for entry in Path(table.uri, "_mem_wal", table.regions[0], "wal").iterdir():
            entry.unlink()
        lost, gone_on, merged_ = page.run("Go on without what is gone")
        assert "Lost: what generation" in lost
        assert gone_on.startswith("repaired")
        assert merged_.startswith("merged")
    assert_same(read_base(table.uri), before)


def claim_too_much(uri: str) -> None:
    """The index covers nothing that was merged, and its catch-up entry has all of it."""
    table = open_table(uri)
    assert isinstance(table, Table)
    details = with_catchup(table.index.details, {"id_idx": table.index.merged_generations})
    commit_indexes(table, IndexChange(details), CommitNote("faulty"))


def test_who_made_each_version_of_a_compacted_table(tmp_path: Path) -> None:
    """By itself, pylance cannot read the transaction of a compaction that rewrote an index."""
    table = PlainTable(str(tmp_path / "t.lance")).create(rows=40, fragments=4, index=True)
    assert run_job(table.uri, "compact").decision == "compacted"
    environment = {"URI": table.uri}
    (versions,) = Page("restore-a-table.md", environment).run("Look", 1)
    assert "Rewrite by another writer 160 rows" in versions.splitlines()[-1]
    page = Page("alerts/MemwalOpsConflicts.md", environment)
    (command,) = [command for command in page.left[""] if "transaction_properties" in command]
    made_by = page.follow(command)
    assert made_by is not None
    assert made_by.count("another writer") == len(versions.splitlines())


def test_restore_a_table(tmp_path: Path) -> None:
    table = Workload(1, regions=2, base_rows=60).create(str(tmp_path / "t.lance"))
    backup = shutil.copytree(table.uri, tmp_path / "backup.lance")
    first, second = table.regions
    environment = {"URI": table.uri, "REGION": first, "GONE": "1", "KEPT": "3", "MIXED": str(tmp_path / "mixed.lance")}
    environment |= {"BACKUP": table.uri, "RESTORED": str(tmp_path / "restored.lance")}
    with Page("restore-a-table.md", environment) as page:
        write(table, 1, 2, 40)
        merged(table.uri)
        collect(table.uri)
        write(table, 2, 3, 41)
        right = merged(table.uri)
        lance.dataset(table.uri).delete("id < 30")  # the mistake
        write(table, 3, 4, 42)
        merged(table.uri)
        versions, held = page.run("Look", VERSION=str(right))
        assert [line.split()[0] for line in versions.splitlines()][-1] == str(lance.dataset(table.uri).version)
        assert "Delete by another writer" in versions
        assert f"held: version {right}" in held
        collect(table.uri)
        assert generations(table) == [3]
        assert len(lance.dataset(table.uri).versions()) == 2
        write(table, 4, 5, 43)
        late = open_table(table.uri)
        assert read_base(table.uri) != table.expected()

        page.run("A mistake on the base table", 1)
        restored = open_table(table.uri)
        assert {str(region): top for region, top in restored.index.merged_generations.items()} == dict.fromkeys(
            table.regions, 2
        )
        assert_same(table.read_lsm(), table.expected())
        gc.apply(late, IMMEDIATE)
        assert generations(table) == [3, 4]
        inspected, said, _ = page.run("A mistake on the base table")
        assert "Behind by 4 generations in 2 regions" in inspected
        assert said.startswith("merged")
        assert merge.apply(late, merge.MergeOptions()).decision in {"superseded", "nothing_to_merge"}
        assert wire.progress(Files(table.uri)) == {first: 4, second: 4}
        assert_same(read_base(table.uri), table.expected())

        before = table.expected()
        right = lance.dataset(table.uri).version
        table.delete([2, 4, 6])
        table.put([2 * 44])
        table.flush()
        merged(table.uri)
        assert_same(read_base(table.uri), table.expected())
        new = key_of("int64", 2 * 44)
        after = before | {new: table.expected()[new]}
        which = f"id IN ({', '.join(str(key_of('int64', number)[0]) for number in (2, 4, 6))})"
        page.run("A mistake through a writer", VERSION=str(right), WHICH=which, KEPT="5")
        assert_same(read_base(table.uri), after)

        mixed = Path(page.environment["MIXED"])
        shutil.copytree(backup, mixed, ignore=shutil.ignore_patterns("_mem_wal"))
        shutil.copytree(Path(table.uri, "_mem_wal"), mixed / "_mem_wal")
        needed, _, inspected, refused = page.run("What can be restored when gc has been there", 5)
        assert "needed by " in needed
        assert inspected.count("generation_missing") == 2
        assert "blocked" in refused
        page.run("What can be restored when gc has been there")
        assert_same(read_base(environment["RESTORED"]), after)
        shutil.rmtree(mixed)
        shutil.copytree(table.uri, mixed)
        assert read_base(str(mixed)) == read_base(table.uri)
        inspected, *_ = page.run("In the end")
        assert "Up to date" in inspected
        assert "PROBLEM" not in inspected
    collect(table.uri)
    assert_same(read_base(table.uri), after)
    for one in lance.dataset(table.uri).versions():
        lance.dataset(table.uri, version=one["version"]).to_table()


def test_what_is_restored_after_a_collection_is_merged_again_and_once(tmp_path: Path) -> None:
    """Every version that stands, restored one after the other, with gc between: each leads to the same rows."""
    table = Workload(2, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    for number in range(4):
        write(table, number, 30 + number)
        merged(table.uri)
        if number == 1:
            collect(table.uri)
    standing = [one["version"] for one in lance.dataset(table.uri).versions()]
    assert len(standing) > 3
    assert generations(table) == [3, 4]
    for version in standing:
        lance.dataset(table.uri, version=version).restore()
        gc.apply(open_table(table.uri), IMMEDIATE)
        before = open_table(table.uri).index.merged_generations
        report = merge.apply(open_table(table.uri), merge.MergeOptions(max_generations=1))
        taken = [ref.generation for one in report.passes for ref in one.merge_pass.generations]
        assert taken == list(range(max(before.values()) + 1, 5))
        assert_same(read_base(table.uri), table.expected())
    assert read_backlog(open_table(table.uri)).blocked == ()


def test_move_a_table(tmp_path: Path) -> None:
    table = Workload(3, regions=2, base_rows=60).create(str(tmp_path / "t.lance"))
    for number in range(3):
        write(table, number, 30 + number)
    new = tmp_path / "elsewhere" / "t.lance"
    new.parent.mkdir()
    with Page("move-a-table.md", {"OLD": table.uri, "NEW": str(new)}) as page:
        *_, inspected = page.run("Before")
        assert "Up to date" in inspected
        assert "not flushed yet" not in inspected
        page.run("Copy")
        compare = page.left["Check"][1]
        _, same, probed, said = page.run("Check")
        assert same == ""
        late = shutil.copytree(table.uri, tmp_path / "late.lance")
        with lance.dataset(str(late)).mem_wal_writer(table.regions[0]) as woken:
            woken.put(lance.dataset(str(late)).to_table(limit=1))
        with pytest.raises(AssertionError, match="ended with 1"):
            page.follow(compare, OLD=str(late))
        assert "put-if-absent is enforced" in probed
        assert said.startswith("nothing_to_merge")
        tags, *_ = page.run("Distinguish the copies")
        assert tags.strip() == "moved-away"
        table.uri = str(new)
        write(table, 5, 50)
        inspected, _ = page.run("After")
        assert "Behind by 2 generations in 2 regions" in inspected
    assert_same(read_base(str(new)), table.expected())


def test_move_and_restore_a_table_in_the_region_layout(tmp_path: Path) -> None:
    table = RegionLayout(4, regions=1, base_rows=40).create(str(tmp_path / "t.lance"))
    write(table, 1, 2, 40)
    right = merged(table.uri)
    before = table.expected()
    write(table, 2, 3)
    mistaken = table.expected()
    assert mistaken != before
    (region,) = table.regions
    which = f"id IN ({', '.join(str(key_of('int64', number)[0]) for number in (2, 3))})"
    environment = {"URI": table.uri, "REGION": region, "VERSION": str(right), "WHICH": which, "KEPT": "2", "GONE": "1"}
    environment |= {"BACKUP": table.uri, "RESTORED": str(tmp_path / "restored.lance")}
    heading = "What can be restored when gc has been there"
    with Page("restore-a-table.md", environment) as page:
        page.run("A mistake through a writer")
        assert_same(read_base(table.uri), before)
        with RegionWriter(table.uri, region) as writer:
            writer.put(lance.dataset(table.uri, version=1).to_table(limit=3))
        page.left = {"": [], heading: page.left[heading][-3:]}
        page.run(heading)
    assert merge.apply(open_table(table.uri), merge.MergeOptions()).decision == "merged"
    assert read_base(table.uri) != before
    assert_same(read_base(environment["RESTORED"]), read_base(table.uri))


def test_a_moved_table_in_the_region_layout_needs_nothing_of_the_old_place(tmp_path: Path) -> None:
    table = RegionLayout(5, regions=2, base_rows=60).create(str(tmp_path / "t.lance"))
    for number in range(3):
        write(table, number, 30 + number)
    merged(table.uri)
    new = tmp_path / "new.lance"
    shutil.copytree(table.uri, new)
    shutil.rmtree(table.uri)
    assert_same(read_base(str(new)), table.expected())
    assert merge.apply(open_table(str(new)), merge.MergeOptions()).decision == "nothing_to_merge"
    collect(str(new))
    assert_same(read_base(str(new)), table.expected())


def test_upgrade_pylance(tmp_path: Path) -> None:
    """The table is one that an older release wrote; one environment stands for both."""
    with tarfile.open(ROOT / "tests/system/releases/written-by-12.0.0.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    here = str(Path(sys.executable).parent)
    environment = {
        "URI": str(tmp_path / "t.lance"),
        "COPY": str(tmp_path / "copy.lance"),
        "OLD": here,
        "NEW": here,
        "SOURCE": str(ROOT),
        "PYTEST_ARGS": "-p no:randomly -k the_strict_commit",
    }
    expected = {int(key): row for key, row in json.loads((tmp_path / "t.lance.json").read_text()).items()}
    with Page("upgrade-pylance.md", environment) as page:
        old, *_ = page.run("What runs today")
        assert old.strip() == lance.__version__
        (tested,) = page.run("The contracts")
        assert "2 passed" in tested
        *_, rows, _ = page.run("A trial with both")
        assert int(rows) == len(expected)
        assert not Path(environment["COPY"]).exists()
        assert lance.dataset(environment["URI"]).version < 4, "the trial did not touch the table"
        page.run("Do")
        (inspected,) = page.run("Back")
        assert "Up to date" in inspected
    rows_now = lance.dataset(environment["URI"]).to_table().to_pylist()
    assert {row["id"]: {"b": row["b"], "c": row["c"]} for row in rows_now} == expected
