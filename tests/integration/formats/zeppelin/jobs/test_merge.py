"""Compaction: what is read afterwards, what is cleared, who may commit."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash

from memwal_ops import open_table, run_job
from memwal_ops.core.context import RunContext
from memwal_ops.errors import (
    ConditionalWriteUnsupportedError,
    InvalidUsageError,
    SegmentCorruptError,
    TableCorruptError,
    UnsupportedFeatureError,
)
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.jobs import merge
from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions
from memwal_ops.storage.wrapper import StoreWrapper
from tests.integration.formats.zeppelin.test_queries import Script
from tests.support.overtaken import Overtaken
from tests.support.zeppelin import independent, server
from tests.support.zeppelin.merging import FAST, opened
from tests.support.zeppelin.namespace import NamespaceUnderTest


def empty_fragment(made: NamespaceUnderTest) -> None:
    """Another program's fragment without vectors and deletes."""
    if made.dialect == "native":
        name = server.ulid()
        data = b"\x01" + msgpack.packb([name, [], [], independent.native_checksum([], [])])
        server.append(made.uri, name, data, 0, 0)
        return
    name = server.ulid()
    checksum = xxhash.xxh64_intdigest(b'{"deletes":[],"vectors":[]}')
    document = {"id": name, "namespace": "ns", "vectors": [], "deletes": [], "checksum": checksum, "created_at": None}
    path = Path(made.uri, "wal", f"{name}.fragment.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
    entry = {"id": name, "key": f"{Path(made.uri).name}/wal/{name}.fragment.json", "vector_count": 0, "delete_count": 0}
    server.edit(made.uri, lambda found: found["fragments"].append(entry))


def test_an_empty_fragment_leaves_the_log(made: NamespaceUnderTest) -> None:
    """It would keep the triggers of a supervisor due, by its age, for ever."""
    run_job(made.uri, "merge", FAST)
    segments = opened(made).manifest.segments
    empty_fragment(made)
    empty_fragment(made)
    assert open_table(made.uri).summary().backlog["fragments"] == 2
    report = run_job(made.uri, "merge", FAST)
    assert (report.decision, report.fragments) == ("merged", 2)
    assert opened(made).manifest.segments == segments, "nothing is written again"
    assert opened(made).manifest.fragments == ()
    assert open_table(made.uri).summary().backlog["oldest_age"] == 0
    assert made.read() == made.expected()
    run_job(made.uri, "gc", apply=True, reader_grace="0s", keep_revisions=1, allow_unsafe=True)
    assert made.read() == made.expected()
    assert run_job(made.uri, "verify", deep=True).decision == "healthy"
    empty_fragment(made)
    made.put("z")
    assert run_job(made.uri, "merge", FAST).fragments == 2
    assert made.read() == made.expected()


def test_an_empty_fragment_beside_a_contested_row(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "wiki")
    made.put("a", "b")
    server.hide(made.uri, "a")
    run_job(made.uri, "merge", FAST)
    empty_fragment(made)
    assert run_job(made.uri, "merge", FAST).decision == "merged"
    assert [one.vectors for one in opened(made).manifest.fragments] == [1]
    assert run_job(made.uri, "merge", FAST).decision == "nothing_to_merge"
    assert {one["id"] for one in zeppelin.query(made.uri, vector=[1, 0, 0, 0])} == {"b"}


@pytest.mark.sampled(1)
@pytest.mark.req("S4-009", "S4-025", "S4-027", "S4-028", "S4-029", "S4-033")
def test_rounds_of_appends_and_compactions(made: NamespaceUnderTest) -> None:
    dice = random.Random(3)
    for round_ in range(12):
        for _ in range(dice.randint(1, 4)):
            ids = [f"v{dice.randrange(60)}" for _ in range(dice.randint(0, 9))]
            gone = tuple({f"v{dice.randrange(60)}" for _ in range(dice.randint(1, 5))} - {*ids})
            made.put(*dict.fromkeys(ids), deletes=gone)
        assert made.read() == made.expected()
        options = ZeppelinMergeOptions(
            max_bytes=dice.choice([1, 1000, 1 << 28]),
            clusters=dice.choice([None, 3]),
            quantization=dice.choice([None, "scalar", "product", "none"]),
            retrain_imbalance_threshold=dice.choice([1.0, 10.0]),
            bitmap_field=("color",),
        )
        report = run_job(made.uri, "merge", options)
        assert report.decision == "merged"
        table = opened(made)
        assert table.manifest.fragments == ()
        assert table.manifest.segments[0].bitmap_fields == ("color",)
        assert made.read() == made.read_revision(table.revision) == made.expected(), round_
        assert {one["id"] for one in zeppelin.query(made.uri, vector=[1, 0, 0, 0], k=1000)} == {*made.expected()}


@pytest.mark.sampled(1)
@pytest.mark.req("S4-033")
def test_what_is_appended_meanwhile_stays(made: NamespaceUnderTest) -> None:
    """Also under a ULID below all that was read (a clock that is behind)."""
    for at in range(1, 9):
        made.write()
        table = opened(made)
        store = Overtaken(table.store, at, lambda: made.put("late", "b"), writes=True)
        assert merge.apply(replace(table, store=store), FAST).decision == "merged"
        assert made.read() == made.expected(), at
        assert {*made.read()} >= {"late"}


@pytest.mark.req("S4-021", "S4-022", "S4-043")
def test_concurrent_appends(made: NamespaceUnderTest) -> None:
    """Many writers at once, and two compactors: every write is there."""
    errors: list[BaseException] = []

    def writes(number: int) -> None:
        try:
            for at in range(4):
                zeppelin.open_writer(made.uri).append([{"id": f"w{number}-{at}", "values": [number, at, 1, 0]}])
        except BaseException as error:
            errors.append(error)

    def compacts() -> None:
        try:
            for _ in range(3):
                run_job(made.uri, "merge", FAST)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=writes, args=(number,)) for number in range(3)]
    threads += [threading.Thread(target=compacts) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert errors == []
    run_job(made.uri, "merge", FAST)
    wanted = {f"w{number}-{at}" for number in range(3) for at in range(4)}
    assert {*made.read()} == {*made.expected()} | wanted


@pytest.mark.req("S4-006")
def test_a_damaged_fragment_blocks_and_is_named(made: NamespaceUnderTest) -> None:
    second = opened(made).manifest.fragments[1]
    file = Path(made.uri, second.key)
    whole = file.read_bytes()
    for damaged in (whole[:-3], whole.replace(b"e", b"f"), b"", b"PK\x03\x04"):
        file.write_bytes(damaged)
        report = run_job(made.uri, "merge")
        assert (report.decision, report.exit_code) == ("blocked", 10)
        (entry,) = report.to_json()["blocked"]
        assert (entry["fragment"], entry["reason"]) == (second.id, "fragment_corrupt")
        assert opened(made).manifest.fragments[0].id == second.id, "the one before is compacted"
    file.write_bytes(whole)
    assert run_job(made.uri, "merge").decision == "merged"
    assert made.read() == made.expected()


def test_dimensions_that_differ_block(tmp_path: Path) -> None:
    made = Script(tmp_path / "ns")
    made.fragment([("a", [1, 0])], [])
    made.fragment([("b", [1, 0, 0])], [])
    report = run_job(made.uri, "merge")
    assert report.decision == "blocked"
    assert "3 dimensions" in report.describe()
    assert {*(one["id"] for one in zeppelin.query(made.uri, vector=[1, 0], consistency="eventual"))} == {"a"}


def test_a_missing_object_of_the_segment_stops_before_anything_is_published(made: NamespaceUnderTest) -> None:
    run_job(made.uri, "merge")
    made.write()
    table = opened(made)
    file = Path(made.uri, table.manifest.segments[0].prefix, "attrs_0.bin")
    whole = file.read_bytes()
    for damage in (file.unlink, lambda: file.write_bytes(b"[]"), lambda: file.write_bytes(b"[")):
        damage()
        with pytest.raises(SegmentCorruptError, match=r"attrs_0\.bin"):
            run_job(made.uri, "merge")
        assert opened(made).manifest.segments == table.manifest.segments
        assert len(opened(made).manifest.fragments) == 3
    file.write_bytes(whole)
    assert run_job(made.uri, "merge").decision == "merged"
    assert made.read() == made.expected()


def test_settings_with_more_dimensions_than_a_segment_can_have(made: NamespaceUnderTest) -> None:
    Path(made.uri, "meta.json").write_text(json.dumps({"dimensions": 1 << 62}))
    with pytest.raises(TableCorruptError, match="dimensions is"):
        run_job(made.uri, "merge")
    with pytest.raises(InvalidUsageError, match="65537 dimensions"):
        zeppelin.create(f"{made.uri}-other", dimensions=65537)


def test_nothing_is_left_of_a_failed_run(made: NamespaceUnderTest) -> None:
    run_job(made.uri, "merge")
    made.write()
    table = opened(made)
    path = Path(made.uri, table.manifest.segments[0].prefix, "attrs_0.bin")
    path.write_bytes(b"[")
    with pytest.raises(SegmentCorruptError):
        run_job(made.uri, "merge")
    assert [one.name for one in Path(made.uri, "segments").iterdir()] == [table.manifest.segments[0].id]


def test_everything_deleted_leaves_no_segment(made: NamespaceUnderTest) -> None:
    run_job(made.uri, "merge")
    made.put(deletes=tuple(made.expected()))
    assert run_job(made.uri, "merge").decision == "merged"
    table = opened(made)
    assert (table.manifest.segments, table.manifest.fragments) == ((), ())
    assert made.read() == {}
    made.write()
    assert run_job(made.uri, "merge").decision == "merged"
    assert made.read() == made.expected()


@pytest.mark.req("S4-035", "S4-036")
def test_old_objects_stand_after_the_commit(made: NamespaceUnderTest) -> None:
    """A reader that began before finishes on its manifest."""
    run_job(made.uri, "merge")
    made.write()
    before = Path(made.uri, "manifest.json").read_bytes()
    expected = made.expected()
    slow: Any = open_table(made.uri)
    run_job(made.uri, "merge")
    assert independent.Reader(made.uri, before).read() == expected
    from memwal_ops.formats.zeppelin.reader import Query, query_namespace

    assert {one["id"] for one in query_namespace(slow, Query([1, 0, 0, 0], k=99))} == {*expected}
    if made.dialect == "native":
        pending = independent.manifest(Path(made.uri, "manifest.json").read_bytes())["pending_deletes"]
        assert len(pending) >= 6, "in the same compare-and-swap"
        assert all(Path(made.uri).parent.joinpath(key).exists() for key in pending)


def test_what_only_a_server_may_write_is_refused(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    meta = Path(made.uri, "meta.json")
    settings = json.loads(meta.read_text())
    for change, says in (({"state": "deleting"}, "deleting"), ({"full_text_search": {"body": {}}}, "full-text")):
        meta.write_text(json.dumps({**settings, **change}))
        with pytest.raises(UnsupportedFeatureError, match=says):
            run_job(made.uri, "merge")
        assert run_job(made.uri, "inspect").exit_code == 0
    meta.write_text(json.dumps(settings))
    document = dict(opened(made).manifest.document)
    document["manifest_binding_version"] = "v4_lineage"
    Path(made.uri, "manifest.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedFeatureError, match="v4_lineage"):
        run_job(made.uri, "merge")
    with pytest.raises(UnsupportedFeatureError):
        zeppelin.open_writer(made.uri)
    assert {one["id"] for one in zeppelin.query(made.uri, vector=[1, 0, 0, 0], k=99)} == {*made.expected()}


class NoSwap(StoreWrapper):
    """A store that takes If-Match and ignores it."""

    root = "s3://bucket/ns"

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        self.put(path, data)
        return True


@pytest.mark.req("S4-023")
def test_a_store_without_compare_and_swap_is_refused(made: NamespaceUnderTest) -> None:
    before = Path(made.uri, "manifest.json").read_bytes()
    with pytest.raises(ConditionalWriteUnsupportedError):
        merge.apply(replace(opened(made), store=NoSwap(opened(made).store)), FAST)
    assert Path(made.uri, "manifest.json").read_bytes() == before
    assert not Path(made.uri, "lease.json").exists()


def test_memory_is_bounded_by_the_budget(made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a few bytes: each reads one fragment, and spills what it partitions."""
    for number in range(6):
        made.put(*(f"x{number}-{at}" for at in range(40)))
    context = RunContext()
    report: Any = run_job(made.uri, "merge", max_bytes=4000, retrain=True, clusters=5, context=context)
    assert len(report.passes) > 2
    assert context.revisions[-1] == opened(made).revision
    assert made.read() == made.expected()


@pytest.mark.req("S4-024")
def test_the_supervisor_compacts_every_30_seconds_by_default() -> None:
    from memwal_ops.formats.zeppelin.specs import MERGE

    assert MERGE.every == timedelta(seconds=30)
    assert MERGE.enabled


@pytest.mark.parametrize("quantization", ["none", "scalar", "product"])
def test_a_server_is_told_all_objects_that_are_being_written(tmp_path: Path, quantization: str) -> None:
    """Its gc deletes what no manifest and no staging record lists, after a horizon that a long pass exceeds."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    staged: list[str] = []

    class Staging(StoreWrapper):
        def put(self, path: str, data: bytes) -> None:
            if path.startswith("_staging/"):
                staged.extend(json.loads(data)["keys"])
            super().put(path, data)

    table = opened(made)
    options = replace(FAST, clusters=2, bitmap_field=("color",), fts_field=("color",), quantization=quantization)
    assert merge.apply(replace(table, store=Staging(table.store)), options).decision == "merged"
    written = {f"ns/{path.relative_to(made.uri)}" for path in Path(made.uri, "segments").rglob("*.bin")}
    assert written == {*staged}
