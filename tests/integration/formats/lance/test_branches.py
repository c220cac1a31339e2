"""Jobs on a branch that is opened by its path, ``TABLE/tree/NAME``: what keeps its versions is in the root."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.files.datasets import resolve_branch
from memwal_ops.formats.lance.options import ExpireOptions
from memwal_ops.formats.lance.retention.garbage import find_leftovers
from memwal_ops.formats.lance.retention.live_versions import named_versions
from memwal_ops.storage.locations import Location
from memwal_ops.storage.objects import open_store
from tests.support.run_cli import run_here
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    collect,
    free,
    generation_folders,
    grow,
    make,
    merged,
    planned,
    sound,
    table_of,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.plain import PlainTable
from tests.support.tables.reading import open_dataset
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

NOW = ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True)
NAMES = ["dev", "feature/dev"]


def ids(uri: str, reference: object = None) -> list[int]:
    dataset = lance.dataset(uri) if reference is None else lance.dataset(uri).checkout_version(reference)
    return sorted(dataset.to_table(columns=["id"])["id"].to_pylist())


def branched(path: Path, name: str) -> tuple[PlainTable, PlainTable]:
    """A table with two fragments, and a branch of it with four more, in a version each."""
    root = PlainTable(str(path / "t.lance")).create(fragments=2)
    root.dataset.create_branch(name, 2)
    branch = PlainTable(f"{root.uri}/tree/{name}")
    branch.model, branch._next = dict(root.model), 1000
    for _ in range(4):
        branch.append(10)
    return root, branch


@pytest.mark.parametrize("name", NAMES)
def test_an_expiry_keeps_what_tags_and_child_branches_of_the_branch_need(tmp_path: Path, name: str) -> None:
    """Timeline of the loss: tags of the root are taken for main's; ``compact`` and ``expire`` remove their files."""
    root, branch = branched(tmp_path, name)
    root.dataset.tags.create("release", (name, 3))
    root.dataset.tags.create("of-main", 1)
    root.dataset.checkout_version((name, None)).create_branch("child", (name, 5))
    root.dataset.checkout_version(("child", None)).create_branch("grandchild", ("child", 5))
    held = take_hold(open_table(branch.uri), 4, timedelta(hours=1))
    clone = str(tmp_path / "clone.lance")
    root.dataset.tags.create("cloned", (name, 2))
    root.dataset.checkout_version((name, 2)).shallow_clone(clone, (name, 2))
    before = {one: ids(root.uri, one) for one in ("release", "of-main", ("child", None), ("grandchild", None))}
    cloned, main = ids(clone), root.files()
    assert run_job(branch.uri, "compact").decision == "compacted"
    report = run_job(branch.uri, "expire", NOW, apply=True)
    assert report.to_json()["kept"][:4] == [
        {"version": 2, "because": "tag cloned at version 2", "old_enough": None},
        {"version": 3, "because": "tag release at version 3", "old_enough": None},
        {"version": 4, "because": f"hold {held.number} of {held.by} on version 4 until "
                                  f"{held.until:%Y-%m-%d %H:%M} UTC", "old_enough": None},
        {"version": 5, "because": "branch child left from version 5", "old_enough": None},
    ]  # fmt: skip
    assert report.to_json()["expire"]
    assert {one: ids(root.uri, one) for one in before} == before
    assert ids(clone) == cloned
    assert branch.read() == branch.model
    assert root.read() == root.model
    assert {path for path in main if not path.startswith("tree/")} <= root.files()
    for uri in (root.uri, branch.uri):
        assert run_job(uri, "verify", deep=True).decision == "healthy"


def test_files_that_the_newest_version_of_a_child_needs_stay(tmp_path: Path) -> None:
    """Also where the version that the child left is kept by nothing, since another branch between them is gone."""
    root, branch = branched(tmp_path, "dev")
    root.dataset.checkout_version(("dev", None)).create_branch("one", ("dev", 5))
    root.dataset.checkout_version(("one", None)).create_branch("two", ("one", None))
    before = ids(root.uri, ("two", None))
    shutil.rmtree(Path(root.uri, "tree/one"))
    Path(root.uri, "_refs/branches/one.json").unlink()
    assert run_job(branch.uri, "compact").decision == "compacted"
    report = run_job(branch.uri, "expire", NOW, apply=True)
    assert 5 in report.to_json()["expire"]
    assert report.to_json()["branches"]["files_kept"] > 0
    assert ids(root.uri, ("two", None)) == before
    reason = run_job(branch.uri, "why", target=next(path for path in branch.files("data") if path)).describe()
    assert "tree/two/_versions" in reason or "newest" in reason


def test_an_expiry_of_main_does_not_take_the_tags_of_a_branch_for_its_own(tmp_path: Path) -> None:
    root, branch = branched(tmp_path, "dev")
    root.append(10)
    root.append(10)
    root.dataset.tags.create("release", ("dev", 3))
    report = run_job(root.uri, "expire", NOW, apply=True)
    assert report.to_json()["expire"] == [1, 3]
    assert root.read() == root.model
    assert branch.read() == branch.model


@pytest.mark.parametrize("name", NAMES)
def test_verify_of_a_branch_checks_its_own_tags(tmp_path: Path, name: str) -> None:
    """Main's tag, of a version that the branch does not have: deleting it would let main's version expire."""
    root, branch = branched(tmp_path, name)
    root.dataset.tags.create("of-main", 1)
    root.dataset.tags.create("of-branch", (name, 3))
    assert run_job(branch.uri, "verify").decision == "healthy"
    (manifest,) = Path(branch.uri, "_versions").glob(f"{2**64 - 1 - 3:020d}.manifest")
    manifest.unlink()
    found = run_job(branch.uri, "verify").to_json()["findings"]
    assert [one["place"] for one in found if one["check"] == "tag"] == ["the tag 'of-branch'"]
    Path(root.uri, "_refs/tags/of-main.json").write_text("{")
    found = run_job(branch.uri, "verify").to_json()["findings"]
    assert "_refs/tags/of-main.json" in [one["place"] for one in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gc_frees_the_generations_of_a_branch(tmp_path: Path, layout: type[LsmTable]) -> None:
    """Of its own versions and those of its child branches, only a tag of the branch needs one."""
    made = make(tmp_path, layout, generations=0)
    root = made.uri
    made.onto_branch("feature/dev")
    grow(made)
    lance.dataset(root).tags.create("release", ("feature/dev", lance.dataset(made.uri).version))
    lance.dataset(root).tags.create("of-main", lance.dataset(root).version)
    grow(made)
    free(made)
    assert all("tag release" in one.why for one in planned(made) if one.generation in {1, 2})
    assert collect(made).drained == 0
    sound(made)
    lance.dataset(root).tags.delete("release")
    free(made)
    assert collect(made).decision == "deleted"
    assert not generation_folders(made)
    sound(made)
    assert run_job(made.uri, "verify").decision == "healthy"
    report = run_job(made.uri, "maintain", apply=True)
    assert report.exit_code == 0, report.describe()
    sound(made)


def test_a_generation_that_a_child_branch_may_read_is_kept(tmp_path: Path) -> None:
    made = make(tmp_path, generations=0)
    root = made.uri
    made.onto_branch("dev")
    grow(made)
    lance.dataset(root).checkout_version(("dev", None)).create_branch("child", ("dev", None))
    free(made)
    assert all("branch child" in one.why for one in planned(made) if one.generation == 1)
    assert collect(made).drained == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_branch_has_snapshots_holds_and_compactions_of_its_own(tmp_path: Path, layout: type[LsmTable]) -> None:
    made = make(tmp_path, layout, generations=1)
    root = made.uri
    merged(made)
    run_job(root, "snapshot", inline_threshold=0)
    listed = Files(root).listing("_indices")
    made.onto_branch("dev")
    grow(made)
    assert run_job(made.uri, "snapshot", inline_threshold=0).decision == "built"
    for job in ("merge", "catchup", "compact"):
        assert run_job(made.uri, job).exit_code == 0
    report = run_job(made.uri, "verify", deep=True)
    assert report.decision == "healthy", report.describe()
    free(made)
    collect(made)
    assert set(listed) <= set(Files(root).listing("_indices"))
    sound(made)


def test_the_root_of_a_branch_that_its_path_does_not_show(tmp_path: Path) -> None:
    """Its tags are not known: nothing is deleted, and ``verify`` does not call its tags checked."""
    root, branch = branched(tmp_path, "dev")
    root.dataset.tags.create("release", ("dev", 3))
    moved = str(tmp_path / "moved")
    shutil.copytree(branch.uri, moved)
    for job in ("expire", "gc"):
        with pytest.raises(InvalidUsageError, match=r"does not end with /tree/dev"):
            run_job(moved, job, apply=True)
    found = run_job(moved, "verify").to_json()["findings"]
    assert [one["place"] for one in found] == ["tags"]


def test_the_root_of_a_branch_in_a_store(tmp_path: Path) -> None:
    plain = Location("s3://bucket/a b/t.lance/tree/feature/dev", "s3")
    escaped = Location("s3://bucket/a%20b/t.lance/tree/feature%2Fdev", "s3")
    store = open_store(Location(str(tmp_path), "file"))
    roots = {resolve_branch(one, store, "feature/dev").root.root for one in (plain, escaped)}
    assert {root.replace("%20", " ") for root in roots} == {"s3://bucket/a b/t.lance"}


def test_leftovers_that_a_tag_of_the_branch_names(tmp_path: Path) -> None:
    root, branch = branched(tmp_path, "dev")
    root.dataset.tags.create("release", ("dev", 4))
    root.dataset.tags.create("of-main", 1)
    root.dataset.checkout_version(("dev", None)).create_branch("child", ("dev", 5))
    table = open_table(branch.uri)
    assert named_versions(table) == {4, 5}
    assert named_versions(open_table(root.uri)) == {1, 2}
    assert not [*find_leftovers(table)]


def test_the_export_of_a_branch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has no tags: ``verify --from`` reports that they were not checked."""
    root, branch = branched(tmp_path, "dev")
    root.dataset.tags.create("of-main", 1)
    file = str(tmp_path / "t.zip")
    assert run_here(capfd, "export-support", branch.uri, "-o", file).code == 0
    shown = run_here(capfd, "verify", "--from", file)
    assert (shown.code, "tags" in shown.out) == (0, True), shown.out


@pytest.mark.long
@pytest.mark.s3
def test_a_branch_in_a_store(bucket: tuple[str, dict[str, str]]) -> None:
    uri, options = bucket
    made = Workload(1, regions=1, base_rows=30).create(f"{uri}/t.lance", options)
    made.onto_branch("feature/dev")
    grow(made)
    root = lance.dataset(f"{uri}/t.lance", storage_options=options)
    root.tags.create("release", ("feature/dev", table_of(made).version))
    tagged = open_dataset(made.uri, options).version
    merged(made)
    grow(made)
    free(made)
    assert [one["version"] for one in open_dataset(made.uri, options).versions()] == [
        tagged,
        table_of(made).version,
    ]
    assert collect(made).drained == 0
    root.tags.delete("release")
    free(made)
    assert collect(made).decision == "deleted"
    assert not generation_folders(made)
    sound(made)


def test_an_index_that_pylances_compaction_misplaced(tmp_path: Path) -> None:
    """It is in the folder of the branch, where no reader looks (docs/upstream.md): not called missing alone."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(100)}), uri, max_rows_per_file=50).create_scalar_index("id", "BTREE")
    lance.dataset(uri).create_branch("b")
    lance.dataset(f"{uri}/tree/b").optimize.compact_files()
    (finding,) = run_job(uri, "verify", branch="b").findings.kept
    assert "_indices/" in finding.place
    assert "compaction of this branch or clone wrote the index to _indices/" in finding.evidence
    assert "memwal-ops catchup URI --rebuild" in finding.remedy
    run_job(uri, "catchup", branch="b", rebuild=True)
    assert run_job(uri, "verify", branch="b").decision == "healthy"
    assert lance.dataset(f"{uri}/tree/b").count_rows("id = 7") == 1
