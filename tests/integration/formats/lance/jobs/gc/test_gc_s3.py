"""The collector on S3: drained, deleted, expired, held, and every kind of thing once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from memwal_ops.core.candidates import Verdict
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.formats.lance.indexes.snapshots import snapshot_path
from memwal_ops.formats.lance.jobs import expire, snapshot
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.jobs.gc.job import GcOptions
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from tests.support.gc_options import IMMEDIATE, NONE_PINNED
from tests.support.stores import refusing
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    ZERO,
    caught_up,
    collect,
    entries,
    epochs_of,
    expired,
    firsts,
    free,
    generation_folders,
    grow,
    merged,
    paths,
    planned,
    reasons,
    sound,
    table_of,
    versions,
    write,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.reading import open_dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table
    from tests.support.tables.lsm_table import LsmTable

pytestmark = [pytest.mark.s3, pytest.mark.long]


@pytest.fixture(params=LAYOUTS)
def made(request: pytest.FixtureRequest, bucket: tuple[str, dict[str, str]]) -> LsmTable:
    uri, options = bucket
    table = request.param(1, regions=1, base_rows=30).create(f"{uri}/deep/t.lance", options)
    for _ in range(3):
        grow(table)
    return table  # type: ignore[no-any-return]


@pytest.mark.req("S0-183", "S0-185", "S0-186", "S0-187")
def test_the_whole_way(made: LsmTable) -> None:
    (region,) = made.regions
    files = Files(made.uri, made.storage_options)
    folders = generation_folders(made)
    posts, last = firsts(epochs_of(made, region)), max(entries(made, region))
    assert all("not merged yet" in why for why in reasons(planned(made), CandidateKind.GENERATION).values())
    assert collect(made).counts[CandidateKind.GENERATION] == Counter({Verdict.HELD: 3})
    merged(made)
    assert all("index id_idx" in why for why in reasons(planned(made), CandidateKind.GENERATION).values())
    caught_up(made)
    assert all("needed by version" in why for why in reasons(planned(made), CandidateKind.GENERATION).values())
    expired(made)
    orphan = write(made, f"_mem_wal/{region}/0badcafe_gen_9/data/x.lance")
    strange = write(made, f"_mem_wal/{region}/note")
    drained = collect(made, NONE_PINNED)
    assert (drained.decision, drained.drained, drained.deleted_objects) == ("drained", 3, 0)
    assert wire.region_manifest(files, region).generations == {}
    assert generation_folders(made) == {*folders, orphan.rsplit("/", 2)[0]}
    assert collect(made, NONE_PINNED).decision == "nothing_to_delete"
    sound(made)
    done = collect(made)
    assert (done.decision, done.failed) == ("deleted", {})
    assert done.counts[CandidateKind.ORPHAN] == Counter({Verdict.DELETE: 1})
    assert set(reasons(done.items[Verdict.UNKNOWN], CandidateKind.UNKNOWN)) == {strange}
    assert generation_folders(made) == set()
    assert set(entries(made, region)) == {*posts.values(), last}
    assert len(versions(made, region)) == 3  # the last one fences a flush that would publish the orphan
    assert files.listing("_mem_wal_ops/clock") == []
    sound(made)
    assert collect(made).decision == "deleted"
    assert len(versions(made, region)) == 2
    assert collect(made).decision == "nothing_to_delete"
    grow(made)
    merged(made)
    sound(made)


def test_holds_tags_and_branches(made: LsmTable) -> None:
    table = table_of(made)
    dataset = open_dataset(made.uri, made.storage_options)
    dataset.tags.create("audit", table.version)
    hold = take_hold(table, table.version, timedelta(hours=1))
    free(made)
    why = reasons(planned(made), CandidateKind.GENERATION)
    assert len(why) == 3
    for said in (f"tag audit at version {table.version}", f"hold {hold.number} of "):
        assert all(said in text for text in why.values())
    assert collect(made).drained == 0
    dataset.tags.delete("audit")
    expired(made)
    assert all("hold 1 of" in text for text in reasons(planned(made), CandidateKind.GENERATION).values())
    dataset.create_branch("side", table.version)
    release_hold(table, hold.number)
    expired(made)
    assert all("branch side" in text for text in reasons(planned(made), CandidateKind.GENERATION).values())
    open_dataset(made.uri, made.storage_options).branches.delete("side")
    report = expire.apply(table_of(made), expire.ExpireOptions(ZERO, allow_unsafe=True))
    assert (report.decision, report.frees[0]) == ("expired", 3)
    assert collect(made).counts[CandidateKind.GENERATION] == Counter({Verdict.DELETE: 3})
    sound(made)


def test_external_snapshots(made: LsmTable) -> None:
    snapshot.apply(table_of(made), snapshot.SnapshotOptions(0))
    named = snapshot_path(table_of(made).index.uuid)
    data = Files(made.uri, made.storage_options).get(named)
    left = write(made, snapshot_path(uuid4()), data)
    torn = write(made, snapshot_path(uuid4()), data[:50])
    assert "a commit may be in progress" in reasons(planned(made, GcOptions()), CandidateKind.SNAPSHOT)[left]
    items = planned(made)
    assert paths(items, CandidateKind.SNAPSHOT, Verdict.DELETE) == {left}
    assert set(reasons(items, CandidateKind.SNAPSHOT)) == {named}
    assert set(reasons(items, CandidateKind.UNKNOWN)) == {torn}
    collect(made)
    standing = Files(made.uri, made.storage_options).listing("_indices/")
    assert (left in standing, named in standing, torn in standing) == (False, True, True)


def test_refusals_and_limits(made: LsmTable) -> None:
    free(made)
    folder = min(generation_folders(made))
    stuck = next(
        path for path in Files(made.uri, made.storage_options).listing(f"{folder}/") if path.endswith(".manifest")
    )
    report = collect(made, store=refusing(lambda path: path == stuck))
    assert (report.decision, set(report.failed)) == ("incomplete", {stuck})
    assert generation_folders(made) == {folder}
    for _ in range(100):
        report = collect(made, replace(IMMEDIATE, max_deletes=4))
        assert report.deleted_objects <= 4
        if not report.limited:
            break
    assert generation_folders(made) == set()
    sound(made)


def test_planning_writes_nothing(made: LsmTable) -> None:
    free(made)
    before = Files(made.uri, made.storage_options).listing("")
    gc.plan(table_of(made), GcOptions())
    expire.plan(table_of(made), expire.ExpireOptions(ZERO, allow_unsafe=True))
    assert Files(made.uri, made.storage_options).listing("") == before


def test_tags_and_branches_are_read_again_only_if_they_changed(made: LsmTable) -> None:
    """A tag that is made, moved, moved back or deleted is seen by the next refresh; unchanged ones are not read."""
    table = table_of(made)
    dataset = open_dataset(made.uri, made.storage_options)
    retention = LiveVersions()
    first, last = retention_versions(retention, table)
    dataset.tags.create("kept", first)
    retention.refresh(table, datetime.now(UTC))
    assert retention.tags == {"kept": (None, first)}
    asked = Counter[str]()

    def counted(listed: str) -> dict[str, object]:
        asked[listed] += 1
        return dict(getattr(dataset, listed).list())

    refs: Any = SimpleNamespace(
        tags=SimpleNamespace(list=lambda: counted("tags")), branches=SimpleNamespace(list=lambda: counted("branches"))
    )
    watched = replace(table, handle=SimpleNamespace(get=lambda: refs))
    changes: list[tuple[Callable[[], object], dict[str, int]]] = [
        (lambda: dataset.tags.update("kept", last), {"kept": last}),
        (lambda: dataset.tags.update("kept", first), {"kept": first}),
        (lambda: dataset.tags.create("other", last), {"kept": first, "other": last}),
        (lambda: dataset.tags.delete("kept"), {"other": last}),
    ]
    for change, tags in changes:
        asked.clear()
        change()
        for _ in range(2):
            retention.refresh(watched, datetime.now(UTC))
            assert {name: version for name, (_, version) in retention.tags.items()} == tags
        assert asked == {"tags": 1, "branches": 1}, "by the first refresh"
    dataset.create_branch("side", last)
    retention.refresh(watched, datetime.now(UTC))
    assert retention.branches == 1


def retention_versions(retention: LiveVersions, table: Table) -> tuple[int, int]:
    """The oldest and the newest version, after a refresh."""
    retention.refresh(table, datetime.now(UTC))
    assert retention.newest == retention.versions[-1]
    return retention.versions[0], retention.newest
