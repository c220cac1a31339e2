"""Collection: what goes, in how many runs, and what must never."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from memwal_ops import run_job
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.errors import (
    FragmentMissingError,
    SegmentCorruptError,
    TableCorruptError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.zeppelin import writer
from memwal_ops.formats.zeppelin.backlog import damaged_parts
from memwal_ops.formats.zeppelin.jobs import merge
from memwal_ops.formats.zeppelin.lease import held_lease
from memwal_ops.formats.zeppelin.namespace import retried
from memwal_ops.formats.zeppelin.roots import ledger_path
from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions
from memwal_ops.formats.zeppelin.wire import new_ulid
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.dying_store import DyingStore, Killed
from tests.support.stores import Beside, refusing
from tests.support.zeppelin.independent import Reader
from tests.support.zeppelin.merging import FAST, expire, opened
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.jobs.gc import ZeppelinGcReport
    from memwal_ops.formats.zeppelin.namespace import Namespace

NOW = ZeppelinGcOptions(reader_grace=timedelta(0), orphan_min_age=timedelta(0), keep_revisions=1, allow_unsafe=True)
# No beat in the middle of a test: whether a lease stands is what the test says.


@pytest.fixture(params=["wiki", "native"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> NamespaceUnderTest:
    """Two compactions: there is a segment and a log that were replaced, and a log that was not."""
    found = NamespaceUnderTest(str(tmp_path / "ns"), request.param)
    for _ in range(2):
        found.write()
        run_job(found.uri, "merge")
    found.write()
    return found


def gc(made: NamespaceUnderTest, options: ZeppelinGcOptions = NOW, *, apply: bool = True) -> ZeppelinGcReport:
    found: Any = run_job(made.uri, "gc", options, apply=apply)
    return found


def files(made: NamespaceUnderTest, folder: str) -> set[str]:
    place = Path(made.uri, folder)
    return {str(path.relative_to(made.uri)) for path in place.rglob("*") if path.is_file()}


def segments(made: NamespaceUnderTest) -> set[str]:
    return {path.split("/")[1] for path in files(made, "segments")}


@pytest.mark.req("S4-010", "S4-034")
def test_what_compactions_removed_is_deleted(made: NamespaceUnderTest) -> None:
    planned = gc(made, apply=False)
    assert planned.decision == "planned"
    log, stood = files(made, "wal"), segments(made)
    assert (len(log), len(stood)) == (9, 2)
    report = gc(made)
    assert report.decision == "deleted", report.describe()
    table = opened(made)
    assert files(made, "wal") == {one.key for one in table.manifest.fragments}
    assert segments(made) == {table.manifest.segments[0].id}
    assert made.read() == made.expected()
    assert opened(made).manifest.pending == ()
    gc(made)  # a native drain has published a revision, which then goes, too
    again = gc(made)
    assert again.decision == "nothing_to_delete", again.describe()
    made.write()
    run_job(made.uri, "merge")
    assert made.read() == made.expected()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lost", ["centroids.bin", "cluster_0.bin", "attrs_0.bin", "wal"])
def test_nothing_is_deleted_while_the_live_manifest_lacks_an_object(made: NamespaceUnderTest, lost: str) -> None:
    """The segment and the log that a compaction replaced may be all that still has its rows."""
    manifest = opened(made).manifest
    segment = manifest.segments[0]
    if lost == "wal":
        path = manifest.fragments[0].key
    else:
        path = segment.prefix + lost
        if lost == "cluster_0.bin" and segment.objects:
            path = segment.objects[0]["key"]
    data = Path(made.uri, path).read_bytes()
    Path(made.uri, path).unlink()
    before = files(made, "wal") | files(made, "segments")
    for apply in (False, True):
        with pytest.raises((SegmentCorruptError, FragmentMissingError), match=path):
            gc(made, apply=apply)
    assert files(made, "wal") | files(made, "segments") == before
    Path(made.uri, path).write_bytes(data)
    assert gc(made).decision == "deleted"
    assert made.read() == made.expected()


@pytest.mark.req("S4-035")
def test_readers_on_the_old_manifest_have_their_time(made: NamespaceUnderTest) -> None:
    before = files(made, "wal") | files(made, "segments")
    report = gc(made, ZeppelinGcOptions(keep_revisions=1))
    assert report.deleted_objects == 0
    assert "younger than 0:15:00" in report.describe()
    assert files(made, "wal") | files(made, "segments") == before


def test_the_newest_revisions_are_kept(made: NamespaceUnderTest) -> None:
    everything = ZeppelinGcOptions(reader_grace=timedelta(0), keep_revisions=100, allow_unsafe=True)
    assert gc(made, everything).deleted_objects == 0
    assert len(segments(made)) == 2
    if made.dialect == "native":
        assert gc(made, ZeppelinGcOptions(reader_grace=timedelta(0), allow_unsafe=True)).deleted_objects == 0, (
            "128, as its own collector keeps"
        )


def test_a_hold_keeps_a_revision(made: NamespaceUnderTest) -> None:
    table = opened(made)
    with_segment = [n for n in range(1, table.revision) if table.has_revision(n) and made.read_revision(n)]
    held = with_segment[0]
    rows = made.read_revision(held)
    hold = take_hold(table, held, timedelta(hours=1))
    gc(made)
    assert Reader(made.uri, made.manifest_of(held)).read_base() == rows
    assert len(segments(made)) == 2
    release_hold(opened(made), hold.number)
    assert gc(made).decision == "deleted"
    assert len(segments(made)) == 1
    assert not opened(made).has_revision(held)


def test_a_named_snapshot_pins_until_it_is_released(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    run_job(made.uri, "merge")
    pinned, rows = opened(made).revision, made.expected()
    made.write()
    run_job(made.uri, "merge")
    snapshot = Path(made.uri, "snapshots/nightly.msgpack")
    snapshot.parent.mkdir()
    snapshot.write_bytes(b"\x01" + msgpack.packb([pinned, "2026-08-15T12:00:00Z"]))
    assert "nightly keeps it" in gc(made).describe()
    assert Reader(made.uri, made.manifest_of(pinned)).read() == rows
    snapshot.write_bytes(b"PK")
    with pytest.raises(TableCorruptError, match="nightly"):
        gc(made)
    snapshot.unlink()
    assert gc(made).decision == "deleted"
    assert len(segments(made)) == 1


def orphan_segment(made: NamespaceUnderTest) -> str:
    """What a compaction leaves that is killed right before its commit."""
    table = opened(made)
    before = segments(made)
    for at in range(1, 60):
        with pytest.raises(Killed):
            merge.apply(replace(table, store=DyingStore(table.store, at, after=True)), FAST)
        if segments(made) - before and any("centroids" in path for path in files(made, "segments")):
            (left,) = segments(made) - before
            return left
        expire(made)
        table = opened(made)
    raise AssertionError


def backdate(made: NamespaceUnderTest, days: float) -> None:
    """Let time pass since orphans were noted."""
    path = Path(made.uri, ledger_path(made.dialect))
    document = json.loads(path.read_text())
    past = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    for one in document["candidates"]:
        one["first_seen_unreachable_at"] = past
    path.write_text(json.dumps(document))


@pytest.mark.sampled(1)
@pytest.mark.req("S4-037")
def test_orphan_segments_are_deleted_in_two_runs(made: NamespaceUnderTest) -> None:
    left = orphan_segment(made)
    expire(made)
    grown = ZeppelinGcOptions(reader_grace=timedelta(microseconds=1), keep_revisions=1, allow_unsafe=True)
    first = gc(made, grown)
    assert left in segments(made)
    assert "no earlier run recorded" in first.describe()
    token = opened(made).manifest.token
    backdate(made, 1)
    second = gc(made, grown)
    assert second.decision == "deleted", second.describe()
    assert left not in segments(made)
    assert opened(made).manifest.token > token, "its writer cannot publish it any more"
    assert made.read() == made.expected()


@pytest.mark.req("S4-041", "S4-047")
def test_a_compactor_that_slept_cannot_publish_what_was_collected(made: NamespaceUnderTest) -> None:
    """All but the manifest is written; its lease expires; no other compacts; its objects are deleted; it resumes."""

    def others() -> None:
        expire(made)
        gc(made, NOW)
        backdate(made, 30)
        gc(made, NOW)
        assert len(segments(made)) == 1

    gc(made)
    before = len(segments(made))
    table = opened(made)

    def publishes(path: str, *_: object) -> bool:
        return path == "manifest.json" and len(segments(made)) > before

    sleeper = Beside(table.store, "compare_and_swap", publishes, others)
    report = merge.apply(replace(table, store=sleeper), FAST)
    assert sleeper.happened
    assert report.decision in {"superseded", "merged"}
    assert made.read() == made.expected()
    assert run_job(made.uri, "merge", FAST).exit_code == 0
    assert made.read() == made.expected()


def test_a_compactor_that_slept_misses_what_was_collected(made: NamespaceUnderTest) -> None:
    """The segment that it reads is replaced and deleted: another compactor was faster, and nothing is corrupt."""

    def others() -> None:
        expire(made)
        made.put("late")
        run_job(made.uri, "merge", FAST)
        gc(made)

    table = opened(made)
    sleeper = Beside(table.store, "get", lambda path: path.endswith("cluster_0.bin"), others)
    report = merge.apply(replace(table, store=sleeper), FAST)
    assert sleeper.happened
    assert report.decision == "superseded"
    assert made.read() == made.expected()


@pytest.mark.sampled(1)
def test_while_another_compacts_orphans_stay(made: NamespaceUnderTest) -> None:
    left = orphan_segment(made)
    expire(made)
    gc(made)
    backdate(made, 30)
    with held_lease(opened(made), timedelta(minutes=5)):
        report = gc(made, replace(NOW, reader_grace=timedelta(microseconds=1)))
    assert left in segments(made)
    assert "a compaction may be writing it" in report.describe()


@pytest.mark.req("S4-037")
def test_orphan_fragments_are_deleted_after_days_and_two_runs(made: NamespaceUnderTest) -> None:
    """A writer that stalls between its PUT and its swap: its fragment must be there when it wakes."""
    key = opened(made).manifest.fragments[0].key
    orphan = key.replace(opened(made).manifest.fragments[0].id, "01GZZZ0000000000000000000A")
    shutil.copy(Path(made.uri, key), Path(made.uri, orphan))
    patient = replace(NOW, orphan_min_age=timedelta(days=7))
    gc(made, patient)
    gc(made, patient)
    assert orphan in files(made, "wal")
    backdate(made, 3)
    assert "kept for 7 d" in " ".join(gc(made, patient).describe().split())
    backdate(made, 8)
    gc(made, patient)
    assert orphan not in files(made, "wal")
    assert made.read() == made.expected()


@pytest.mark.parametrize("folder", ["probe", "clock"])
def test_objects_of_killed_probes_are_deleted(made: NamespaceUnderTest, folder: str) -> None:
    place = Path(made.uri, "_mem_wal_ops", folder)
    place.mkdir(parents=True, exist_ok=True)
    for name in ("old", "young"):
        (place / name).write_bytes(b"x")
    two_hours_ago = time.time() - 7200
    os.utime(place / "old", (two_hours_ago, two_hours_ago))
    gc(made)
    assert [path.name for path in place.iterdir()] == ["young"]


def test_a_writer_that_was_suspended_lists_no_deleted_fragment(
    made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stalls between its PUT and its swap for longer than gc keeps orphans."""
    monkeypatch.setattr(writer, "_STALE_SECONDS", 0.0)
    put: list[str] = []

    def others() -> None:
        put.extend(files(made, "wal") - {one.key for one in opened(made).manifest.fragments})
        gc(made)
        gc(made)
        assert not files(made, "wal").intersection(put)

    table = opened(made)
    sleeper = Beside(table.store, "compare_and_swap", lambda path, *_: path == "manifest.json", others)
    made.model["late"] = ((1.0, 2.0, 3.0, 4.0), {})
    writer.Writer(replace(table, store=sleeper)).append([{"id": "late", "values": [1.0, 2.0, 3.0, 4.0]}])
    assert put
    assert damaged_parts(opened(made)) == ()
    assert made.read() == made.expected()


def test_what_became_needed_is_not_collected(made: NamespaceUnderTest) -> None:
    """An orphan fragment is listed right before its deletion: roots are read again."""
    table = opened(made)
    late = new_ulid()
    orphan = table.manifest.fragments[0].key.replace(table.manifest.fragments[0].id, late)
    shutil.copy(Path(made.uri, table.manifest.fragments[0].key), Path(made.uri, orphan))
    gc(made, replace(NOW, orphan_min_age=timedelta(days=7)))
    backdate(made, 30)

    def listed(live: Namespace) -> Any:
        ref = replace(live.manifest.fragments[0], id=late, key=orphan, order=10_000)
        return live.manifest.changed(fragments=[*live.manifest.fragments, ref])

    class Late(StoreWrapper):
        """The writer wakes after the listing."""

        woke = False

        def list(self, prefix: str = "", **more: Any) -> Any:
            found = [*super().list(prefix, **more)]
            if prefix == "" and not self.woke:
                self.woke = True
                retried(opened(made), listed)
            return iter(found)

    table = opened(made)
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.jobs import gc as job

    store = Late(table.store)
    job.apply(replace(table, store=store), NOW, RunContext())
    assert store.woke
    assert orphan in files(made, "wal")


def test_carried_clusters_keep_the_prefix_that_they_stand_in(tmp_path: Path) -> None:
    """A server's incremental compaction: clusters of an old segment, by ``cluster_owners``."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    run_job(made.uri, "merge", clusters=2)
    old = opened(made).manifest.segments[0]
    name = f"seg_{new_ulid()}"
    new = Path(made.uri, "segments", name)
    new.mkdir()
    shutil.copy(Path(made.uri, old.prefix, "centroids.bin"), new)
    for file in ("cluster_0.bin", "attrs_0.bin"):
        shutil.move(Path(made.uri, old.prefix, file), new)

    def carried(live: Namespace) -> Any:
        found = live.manifest.changed(segments=[replace(old, id=name, prefix=f"segments/{name}/")])
        entry = {**found.document["segments"][0], "cluster_owners": [name, old.id]}
        return replace(found, document={**found.document, "segments": [entry]})

    retried(opened(made), carried, compaction=True)
    assert made.read() == made.expected()
    gc(made, NOW)
    backdate(made, 30) if Path(made.uri, ledger_path("native")).exists() else None
    gc(made, NOW)
    assert made.read() == made.expected(), "nothing of the carried cluster is gone"
    made.write()
    run_job(made.uri, "merge")
    assert made.read() == made.expected()
    gc(made, NOW)
    assert segments(made) == {opened(made).manifest.segments[0].id}
    assert made.read() == made.expected()


def test_pending_keys_are_kept_until_their_objects_are_gone(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    for _ in range(2):
        made.write()
        run_job(made.uri, "merge")
    pending = opened(made).manifest.pending
    assert len(pending) > 6

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.jobs import gc as job

    table = opened(made)
    report = job.apply(replace(table, store=refusing(lambda path: path == pending[0])(table.store)), NOW, RunContext())
    assert report.exit_code == 27
    assert opened(made).manifest.pending == (pending[0],), "confirmed ones only"
    assert gc(made).exit_code == 0
    assert opened(made).manifest.pending == ()
    assert pending[0] not in files(made, "wal")


def test_a_pending_key_that_is_live_is_not_deleted(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    run_job(made.uri, "merge")
    made.write()
    live = opened(made).manifest
    keys = [live.fragments[0].key, live.segments[0].prefix + "cluster_0.bin"]
    retried(opened(made), lambda table: table.manifest.changed(pending=[*table.manifest.pending, *keys]))
    gc(made)
    assert made.read() == made.expected()
    assert {*keys} <= {*opened(made).manifest.pending}


def test_what_is_not_recognized_is_kept_and_reported(made: NamespaceUnderTest) -> None:
    odd = ["readme.txt", "wal/notes.txt", "segments/x", "wal/sub/01H.wal", "segments/seg-a/sub/cluster_0.bin"]
    for path in odd:
        Path(made.uri, path).parent.mkdir(parents=True, exist_ok=True)
        Path(made.uri, path).write_text("x")
    report = gc(made)
    assert {one.path for one in report.items["unknown"]} == {*odd}  # type: ignore[index]
    assert all(Path(made.uri, path).exists() for path in odd)


def test_namespaces_of_servers_are_left_alone(made: NamespaceUnderTest) -> None:
    document = {**opened(made).manifest.document, "late_state": ["x"], "next_sequence": 9, "active_segment": None}
    if made.dialect == "wiki":
        return
    document["active_segment"] = opened(made).manifest.segments[0].id
    Path(made.uri, "manifest.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedFeatureError, match="late state"):
        gc(made)


@pytest.mark.long
def test_killed_anywhere(made: NamespaceUnderTest) -> None:
    """And the next run ends it; what only an expired revision proves is never left without its proof."""
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.jobs import gc as job

    backup = f"{made.uri}.backup"
    shutil.copytree(made.uri, backup)
    at = 0
    while True:
        at += 3
        shutil.rmtree(made.uri)
        shutil.copytree(backup, made.uri)
        table = opened(made)
        try:
            job.apply(replace(table, store=DyingStore(table.store, at, after=at % 2 == 0)), NOW, RunContext())
        except Killed:
            assert made.read() == made.expected(), at
            report = gc(made)
            assert report.exit_code == 0
            assert not any("orphan" in kind and any(counts.values()) for kind, counts in report.counts.items()), at
            assert made.read() == made.expected(), at
            assert segments(made) == {opened(made).manifest.segments[0].id}, at
            continue
        break
    assert at > 9


def test_the_document_of_a_third_partys_compaction(tmp_path: Path) -> None:
    """A wiki namespace that only scripts compact has no history: what they drop is an orphan, and goes in two runs."""
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    made.write()
    dropped = {one.key for one in opened(made).manifest.fragments}
    manifest = json.loads(Path(made.uri, "manifest.json").read_text())
    Path(made.uri, "manifest.json").write_text(json.dumps({**manifest, "fragments": []}))
    gc(made)
    assert files(made, "wal") == dropped
    backdate(made, 30)
    gc(made)
    assert files(made, "wal") == set()
