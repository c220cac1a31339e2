"""Which versions need which generations: read once, by ranges, and right whatever appears and vanishes."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.retention import live_versions as module
from memwal_ops.formats.lance.retention.live_versions import LiveVersions, VersionProgress, named_versions
from memwal_ops.storage.api import ObjectMeta
from tests.support.counting_store import CountingStore
from tests.support.tables.gc_tables import collect, free, generation_folders, make, planned, reasons, sound, table_of
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.formats.lance.table import Table
    from tests.support.tables.lsm_table import LsmTable

REGION = UUID("00000000-0000-4000-8000-00000000000a")
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def refreshed(table: Table, retention: LiveVersions | None = None) -> LiveVersions:
    retention = retention or LiveVersions()
    retention.refresh(table, datetime.now(UTC))
    return retention


# -- many versions, over time


@dataclass
class Listed:
    """One version file as it stands; another incarnation has another tag."""

    progress: Mapping[UUID, int] | None
    uuid: UUID
    tag: str


@contextmanager
def read_from(states: dict[int, Listed], read: list[int]) -> Iterator[None]:
    def outcome(_: object, meta: ObjectMeta) -> VersionProgress:
        version = int(meta.path)
        read.append(version)
        progress = states[version].progress
        return VersionProgress({}, None) if progress is None else VersionProgress(progress, states[version].uuid)

    patch = pytest.MonkeyPatch()
    patch.setattr(module, "_read", outcome)
    try:
        yield
    finally:
        patch.undo()


def check_tree(history: list[dict[int, Listed]], *, reads_once: bool) -> None:
    tree = module._Tree()
    time = datetime(2026, 1, 1, tzinfo=UTC)
    read: list[int] = []
    for states in history:
        listed = {version: ObjectMeta(str(version), 1, time, state.tag) for version, state in states.items()}
        with read_from(states, read):
            tree.refresh(None, listed)  # type: ignore[arg-type]  # nothing is read from it
        for region in (REGION, UUID(int=1)):
            for generation in range(1, 6):
                assert tree.below(region, generation) == [
                    version
                    for version, state in sorted(states.items())
                    if state.progress is not None and state.progress.get(region, 0) < generation
                ], (region, generation, history)
        assert set(tree.index_uuids) == {state.uuid for state in states.values() if state.progress is not None}
        assert tree.all_versions == tuple(sorted(states))
    if reads_once:
        assert len(read) == len(set(read))


PROGRESS = st.one_of(st.none(), st.dictionaries(st.sampled_from([REGION, UUID(int=1)]), st.integers(0, 5), max_size=2))


@pytest.mark.long
@UNHURRIED
@given(st.data())
def test_a_table_that_grows_and_is_expired(data: st.DataObject) -> None:
    """Progress may also fall: restore() makes an old version the newest."""
    standing: dict[int, Listed] = {}
    history: list[dict[int, Listed]] = []
    newest = 0
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 3))):
            newest += 1
            standing[newest] = Listed(data.draw(PROGRESS), UUID(int=data.draw(st.integers(0, 2))), str(newest))
        gone = data.draw(st.sets(st.sampled_from(sorted(standing)))) if standing else set()
        standing = {version: state for version, state in standing.items() if version not in gone or version == newest}
        history.append(dict(standing))
    check_tree(history, reads_once=True)


@pytest.mark.long
@UNHURRIED
@given(st.data())
def test_numbers_that_are_added_and_removed_in_any_order(data: st.DataObject) -> None:
    """Detached versions have random numbers; a number of main may be used again after a clean-up."""
    history: list[dict[int, Listed]] = []
    for at in range(data.draw(st.integers(1, 7))):
        numbers = data.draw(st.sets(st.integers(1, 6), max_size=4))
        again = data.draw(st.sets(st.integers(1, 6)))
        last = history[-1] if history else {}
        history.append(
            {
                number: last[number]
                if number in last and number not in again
                else Listed(data.draw(PROGRESS), UUID(int=10 * at + number), f"{at}-{number}")
                for number in numbers
            }
        )
    check_tree(history, reads_once=False)


def test_detached_versions_that_come_after_others_went() -> None:
    """Their numbers say nothing of their order: the third has as little progress as the second, not as the first."""
    far, near = {REGION: 5}, {REGION: 3}
    seen = [(30, far), (60, near), (40, near)]
    history = [{number: Listed(progress, UUID(int=number), str(number))} for number, progress in seen]
    check_tree([history[0], {}, history[1], {}, history[2]], reads_once=True)


def test_versions_that_are_expired_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need nothing; those that come after them are read as ever, also by a tree that had to begin again."""
    time = datetime(2026, 1, 1, tzinfo=UTC)
    tree = module._Tree()

    def refresh(tag: str, *versions: int, gone: bool) -> None:
        outcome = module._Expired() if gone else VersionProgress({REGION: 2}, UUID(int=5), points_into_mem_wal=True)
        monkeypatch.setattr(module, "_read", lambda *_: outcome)
        listed = {version: ObjectMeta(str(version), 1, time, tag) for version in versions}
        tree.refresh(None, listed)  # type: ignore[arg-type]  # nothing is read from it

    refresh("first", 4, 5, gone=False)
    assert (tree.all_versions, tree.below(REGION, 3), tree.into_mem_wal) == ((4, 5), [4, 5], {4, 5})
    refresh("first", 5, gone=False)
    assert (tree.all_versions, tree.into_mem_wal) == ((5,), {5})
    refresh("second", 4, 5, gone=True)
    assert (tree.all_versions, tree.below(REGION, 3), tree.into_mem_wal, tree.index_uuids) == ((), [], set(), {})
    refresh("second", 1, 5, gone=False)
    assert (tree.all_versions, tree.below(REGION, 3), tree.below(REGION, 2)) == ((1, 5), [1, 5], [])


def test_a_version_that_cannot_be_read_is_forgotten_once_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, time = module._Tree(), datetime(2026, 1, 1, tzinfo=UTC)
    monkeypatch.setattr(module, "_read", lambda *_: "broken")
    listed = {version: ObjectMeta(f"path {version}", 1, time, None) for version in (4, 5)}
    tree.refresh(None, listed)  # type: ignore[arg-type]  # nothing is read from it
    assert tree.unreadable == {"path 4": "broken", "path 5": "broken"}
    tree.refresh(None, {5: listed[5]})  # type: ignore[arg-type]
    assert (tree.unreadable, tree.all_versions, tree.reads(5)) == ({"path 5": "broken"}, (5,), False)


def test_versions_in_words() -> None:
    assert [module._contains([2, 4], version) for version in range(1, 6)] == [False, True, False, True, False]
    spans = {(3,): "version 3", (3, 4, 5): "versions 3 to 5", (3, 5): "2 versions from 3 to 5"}
    assert {versions: module._span(versions) for versions in spans} == spans


def test_a_hold_is_on_a_version_of_main(tmp_path: Path) -> None:
    made = make(tmp_path, generations=1, regions=1)
    dataset = lance.dataset(made.uri)
    for number in range(2):
        dataset.update_metadata({"number": str(number)})
    side = dataset.create_branch("side", dataset.version - 1)
    side.update_metadata({"on": "side"})
    table = table_of(made)
    assert side.version == table.version
    hold = take_hold(table, table.version, timedelta(hours=1))
    retention = refreshed(table)
    said = retention.needs(UUID(made.regions[0]), 1) or ""
    assert said.count(f"hold {hold.number} of") == 1
    assert f"branch side (versions {side.version - 1} to {side.version})" in said


def test_a_version_is_read_once(tmp_path: Path) -> None:
    made = make(tmp_path)
    table = table_of(made)
    store = CountingStore(table.store)
    retention = refreshed(replace(table, store=store))
    assert store.calls["get"] == table.version
    store.reset()
    refreshed(replace(table, store=store), retention)
    assert set(store.calls) == {"list"}
    merge.apply(table_of(made), merge.MergeOptions(max_generations=1))
    added = table_of(made).version - table.version
    assert added > 0
    store.reset()
    refreshed(replace(table_of(made), store=store), retention)
    assert store.calls["get"] == added


def test_who_needs_a_generation_is_named(tmp_path: Path) -> None:
    made = make(tmp_path, regions=1)
    region = UUID(made.regions[0])
    old = table_of(made).version
    dataset = lance.dataset(made.uri)
    for name in "abcd":
        dataset.tags.create(name, old)
    take_hold(table_of(made), old, timedelta(hours=1))
    dataset.create_branch("side", old)
    merge.apply(table_of(made), merge.MergeOptions())
    retention = refreshed(table_of(made))
    said = retention.needs(region, 1)
    assert said is not None
    for part in (f"version {old}", "tag a at", "tag b at", "tag c at", "and 2 more", "branch side"):
        assert part in said
    assert "tag d" not in said
    assert f"branch side left from version {old}" in retention.protected()[old]
    assert retention.without(retention.versions).needs(region, 1) is not None, "the branch stands by itself"
    assert retention.needs(region, 1) == said, "only the copy is without"
    dataset.branches.delete("side")
    refreshed(table_of(made), retention)
    without = retention.without({old})
    assert without.needs(region, 1) is None
    assert retention.needs(UUID(int=5), 1) is not None, "a region that no version knows"


def test_tags_are_read_once_however_many_versions_have_one(tmp_path: Path) -> None:
    """Once for each of them, the plan of 180 generations took as long as 180 x 180 x 180 steps."""

    class Read(dict[str, tuple[str | None, int]]):
        def items(self) -> Any:
            read.append("items")
            return super().items()

    made = make(tmp_path, regions=1)
    dataset = lance.dataset(made.uri)
    for number in range(20):
        dataset.update_metadata({"number": str(number)})
        dataset.tags.create(f"tag-{number}", dataset.version)
    merge.apply(table_of(made), merge.MergeOptions())
    retention = refreshed(table_of(made))
    retention.tags, read = Read(retention.tags), list[str]()
    assert "and 17 more" in (retention.needs(UUID(made.regions[0]), 1) or "")
    assert len(retention.protected()) == 20
    assert len(read) <= 5, "by each, and for each tree of versions"


def test_a_tag_whose_name_is_not_ascii_protects_its_version(tmp_path: Path) -> None:
    """pylance writes it, opens it and deletes it, but lists no tag of such a table."""
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(pa.table({"id": range(3)}), uri)
    for _ in range(3):
        dataset = lance.write_dataset(pa.table({"id": range(4)}), uri, mode="overwrite")
    dataset.tags.create("täglich", 1)
    dataset.tags.create("daily", 2)
    with pytest.raises(ValueError, match="Not found"):
        dataset.tags.list()
    every = {"older_than": "0s", "allow_unsafe": True, "apply": True}
    assert run_job(uri, "expire", **every).decision == "expired"
    assert [one["version"] for one in lance.dataset(uri).versions()] == [1, 2, 4]
    assert dataset.checkout_version("täglich").count_rows() == 3
    assert run_job(uri, "verify").decision == "healthy"
    dataset.tags.delete("täglich")
    run_job(uri, "expire", **every)
    assert [one["version"] for one in lance.dataset(uri).versions()] == [2, 4]


def test_what_protects_a_version(tmp_path: Path) -> None:
    """Tags, branches and holds of main: those of a branch have numbers of its own. Holds protect while they last."""
    uri = Workload(1, regions=1, base_rows=3).create(str(tmp_path / "t.lance")).uri
    dataset = lance.dataset(uri)
    for number in range(6):
        dataset.update_metadata({"number": str(number)})
    tagged, branched, plain, held, ended, released, _ = range(dataset.version - 6, dataset.version + 1)
    dataset.tags.create("monthly", tagged)
    side = dataset.create_branch("side", branched)
    side.update_metadata({"on": "side"})
    assert side.version == plain, "the tag of the branch has a number that main has, too"
    dataset.tags.create("on-side", ("side", side.version))
    dataset.create_branch("second", ("side", side.version))
    table = open_table(uri)
    hold = take_hold(table, held, timedelta(days=2))
    take_hold(table, ended, timedelta(hours=1))
    release_hold(table, take_hold(table, released, timedelta(days=2)).number)

    now, later = datetime.now(UTC), datetime.now(UTC) + timedelta(hours=2)
    retention = LiveVersions()
    retention.refresh(table, now)
    assert retention.protected().keys() == {tagged, branched, held, ended}
    retention.refresh(table, later)
    assert retention.protected() == {
        tagged: f"tag monthly at version {tagged}",
        branched: f"branch side left from version {branched}",
        held: f"hold {hold.number} of {hold.by} on version {held} until {hold.until:%Y-%m-%d %H:%M} UTC",
    }
    assert retention.branches == 2
    assert named_versions(table) == {tagged, branched, held, ended}


def test_versions_by_the_store(tmp_path: Path) -> None:
    made = make(tmp_path, generations=1)
    table = table_of(made)
    retention = refreshed(table)
    meta = table.store.head(version_path(table.version, table.naming))
    assert meta is not None
    assert retention.written(table.version) == meta.last_modified
    assert retention.written(table.version).tzinfo is UTC
    assert retention.manifest_bytes(table.version) == meta.size
    assert table.index.uuid is not None
    assert retention.names_index(table.index.uuid)
    assert not retention.names_index(UUID(int=1))


def test_a_tag_or_branch_whose_version_is_not_listed(tmp_path: Path) -> None:
    """It may be behind a link, or the listing be stale: it may need every generation, and refer to every index."""
    made = make(tmp_path, generations=1)
    region = UUID(made.regions[0])
    dataset = lance.dataset(made.uri)
    dataset.tags.create("gone", dataset.version)
    dataset.update_metadata({"a": "b"})
    dataset.create_branch("side", dataset.version)
    table = table_of(made)
    assert refreshed(table).unreadable == {}
    path = version_path(table.version - 1, table.naming)
    Path(made.uri, path).unlink()
    shutil.rmtree(Path(made.uri, "tree/side/_versions"))
    retention = refreshed(table)
    assert retention.unreadable == {
        "_refs/tags/gone.json": f"the tag refers to version {table.version - 1}, "
        "which is not in the listing, or cannot be read",
        "tree/side": "the branch has no version that is in the listing",
    }
    assert "may need it" in (retention.needs(region, 1) or "")
    assert retention.names_index(UUID(int=1))
    assert named_versions(table) >= {table.version - 1}


@pytest.mark.long
@pytest.mark.req("S0-189")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_restored_version_holds_again(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    region, old = UUID(made.regions[0]), table_of(made).version
    merge.apply(table_of(made), merge.MergeOptions())
    catchup.apply(table_of(made), catchup.CatchupOptions())
    retention = refreshed(table_of(made))
    assert retention.without(range(1, table_of(made).version)).needs(region, 1) is None
    lance.dataset(made.uri).checkout_version(old).restore()
    assert table_of(made).index.merged_generations == {}
    expire.apply(table_of(made), expire.ExpireOptions(timedelta(0), allow_unsafe=True))
    refreshed(table_of(made), retention)
    # Versions since the oldest flush that waits are kept: they tell which columns its values are for.
    assert retention.versions[-1] == table_of(made).version
    said = retention.needs(region, 1)
    assert said is not None
    assert "version" in said
    folders = generation_folders(made)
    assert len(folders) == 6
    assert collect(made).drained == 0
    assert generation_folders(made) == folders
    free(made)
    collect(made)
    assert generation_folders(made) == set()
    sound(made)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", ["cut", "of another version"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_version_that_cannot_be_read_holds_everything(tmp_path: Path, kind: type[LsmTable], damage: str) -> None:
    made = make(tmp_path, kind)
    free(made)
    lance.dataset(made.uri).update_metadata({"a": "b"})
    table = table_of(made)
    path = version_path(table.version - 1, table.naming)
    data = table.store.get(path)
    other = table.store.get(version_path(table.version, table.naming))
    Path(made.uri, path).write_bytes(data[: len(data) // 2] if damage == "cut" else other)
    folders = generation_folders(made)
    retention = refreshed(table)
    assert set(retention.unreadable) == {path}
    assert retention.names_index(UUID(int=1))
    report = collect(made)
    assert report.drained == 0
    assert generation_folders(made) == folders
    items = planned(made)
    assert all(path in why for why in reasons(items, CandidateKind.GENERATION).values())
    assert path in reasons(items, CandidateKind.UNKNOWN)
    Path(made.uri, path).write_bytes(data)
    refreshed(table, retention)
    assert retention.unreadable == {}
    collect(made)
    assert generation_folders(made) == set()
