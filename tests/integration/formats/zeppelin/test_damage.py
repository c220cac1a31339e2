"""An object that is missing or damaged is seen by every command that reports a namespace's health."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.server import BUCKET, counting_server
from memwal_ops import open_table, run_job
from memwal_ops.core.figures import fingerprint_of, is_unchanged, poll_table
from memwal_ops.core.maintain import scan_table
from memwal_ops.errors import FragmentCorruptError, MemwalOpsError, SegmentCorruptError
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.backlog import damaged_parts
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.run_cli import contents, run_here
from tests.support.zeppelin.merging import FAST, opened
from tests.support.zeppelin.namespace import NamespaceUnderTest
from tests.support.zeppelin.server import compact_carrying, edit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = ("centroids.bin", "cluster_0.bin", "cluster_1.bin", "attrs_0.bin")
INDEXES = ("bitmap_0.bin", "fts_index_1.bin", "sq_cluster_0.bin", "sq_calibration.bin")


@pytest.fixture(params=["wiki", "native"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> NamespaceUnderTest:
    """A segment of two clusters with all indexes, and an empty log."""
    found = NamespaceUnderTest(str(tmp_path / "ns"), request.param)
    found.write()
    run_job(found.uri, "merge", clusters=2, bitmap_field=("color",), fts_field=("color",), quantization="scalar")
    return found


def of_segment(made: NamespaceUnderTest, name: str) -> Path:
    (segment,) = opened(made).manifest.segments
    return Path(made.uri, segment.prefix, name)


def cut(path: Path) -> None:
    """Take the last byte away."""
    path.write_bytes(path.read_bytes()[:-1])


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


HARMS = (Path.unlink, cut, halved, emptied)


def assert_seen(made: NamespaceUnderTest, path: Path, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every command that reads without changing anything names the object, and none of them says that all is well."""
    before, key = contents(made.uri), str(path.relative_to(made.uri))
    checked = run_here(capfd, "check", "--nagios", made.uri)
    assert (checked.code, "1 part blocked" in checked.out) == (2, True), checked.out
    shown = run_here(capfd, "inspect", made.uri)
    assert f"{'damaged' if path.exists() else 'missing'}: {key}" in shown.out
    (blocked,) = run_here(capfd, "inspect", made.uri, "--json").document["blocked"]
    assert (blocked["reason"], key in blocked["detail"]) == (reason, True)
    report = run_here(capfd, "report", made.uri, "--json").document
    assert any(one["level"] == "critical" and key in one["what"] for one in report["findings"])
    assert report["blocked"][0]["reason"] == reason
    scanned = scan_table(open_table(made.uri))
    assert [(one.reason, key in one.detail) for one in scanned.blocked] == [(reason, True)]
    assert [one.error.reason for one in damaged_parts(opened(made))] == [reason]
    found = run_job(made.uri, "verify").to_json()
    assert any(one["severity"] == "error" and key in f"{one['place']} {one['evidence']}" for one in found["findings"])
    assert contents(made.uri) == before


def refused(made: NamespaceUnderTest, job: str, **options: Any) -> MemwalOpsError:
    """The error with which a job stops; nothing was changed."""
    before = contents(made.uri)
    with pytest.raises(MemwalOpsError) as raised:
        run_job(made.uri, job, **options)
    assert contents(made.uri) == before
    return raised.value


@pytest.mark.sampled(5)
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ROWS)
def test_an_object_with_rows(
    made: NamespaceUnderTest, name: str, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    path = of_segment(made, name)
    whole = path.read_bytes()
    assert run_here(capfd, "check", "--nagios", made.uri).code == 0
    assert "were not read" in run_here(capfd, "inspect", made.uri).out
    harm(path)
    assert_seen(made, path, "segment_corrupt", capfd)
    for job, options in (("merge", {}), ("merge", {"apply": False}), ("gc", {"apply": True}), ("gc", {})):
        error = refused(made, job, **options)
        assert isinstance(error, SegmentCorruptError)
        assert name in str(error)
    for flag in ("--dry-run", "--apply"):
        done = run_here(capfd, "maintain", made.uri, flag, "--json")
        assert done.code == 62
        assert name in done.document["steps"][0]["error"]["message"]
    path.write_bytes(whole)
    assert run_here(capfd, "check", "--nagios", made.uri).code == 0
    assert run_job(made.uri, "merge").decision == "nothing_to_merge"
    assert made.read() == made.expected()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", INDEXES)
def test_an_index(
    made: NamespaceUnderTest, name: str, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """No row is lost with it: what its error advises writes it again."""
    path = of_segment(made, name)
    harm(path)
    assert_seen(made, path, "segment_corrupt", capfd)
    for apply in (False, True):
        report = run_job(made.uri, "merge", apply=apply)
        assert any(name in one and "--retrain" in one for one in report.to_json()["warnings"])
    assert run_job(made.uri, "merge", retrain=True).decision == "merged"
    assert run_here(capfd, "check", "--nagios", made.uri).code == 0
    found = run_job(made.uri, "verify").to_json()["findings"]
    assert {one["check"] for one in found if one["severity"] == "error"} == set()
    assert made.read() == made.expected()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", (*ROWS, *INDEXES))
def test_other_bytes_of_the_same_length(made: NamespaceUnderTest, name: str) -> None:
    """No listing shows them. A merge reads objects with rows, and must not write such bytes again as good ones."""
    flipped(of_segment(made, name))
    found = [one for one in run_job(made.uri, "verify").to_json()["findings"] if one["severity"] == "error"]
    assert found
    assert all(one["runbook"] == "runbooks/errors/62-segment_corrupt.md" for one in found)
    if name in ROWS:
        made.put("new")
        assert name in str(refused_merge(made))
        with pytest.raises(SegmentCorruptError, match=name):
            zeppelin.query(made.uri, vector=[1, 0, 0, 0], k=99)


def refused_merge(made: NamespaceUnderTest) -> MemwalOpsError:
    before = opened(made).manifest.segments
    with pytest.raises(SegmentCorruptError) as raised:
        run_job(made.uri, "merge", FAST)
    assert opened(made).manifest.segments == before
    return raised.value


@pytest.mark.sampled(4)
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_fragment(
    made: NamespaceUnderTest, at: int, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    made.write()
    ref = opened(made).manifest.fragments[at]
    path = Path(made.uri, ref.key)
    whole = path.read_bytes()
    harm(path)
    reason = "fragment_corrupt" if path.exists() else "fragment_missing"
    assert_seen(made, path, reason, capfd)
    plan = run_here(capfd, "merge", made.uri, "--dry-run", "--json").document
    assert (plan["fragments"], [one["fragment"] for one in plan["blocked"]]) == (at, [ref.id])
    assert refused(made, "gc", apply=True).reason == reason
    for _ in range(2):
        report = run_job(made.uri, "merge")
        (blocked,) = report.to_json()["blocked"]
        assert (report.exit_code, blocked["fragment"], blocked["reason"]) == (10, ref.id, reason)
        assert path.name in blocked["detail"]
    before = contents(made.uri)
    assert run_job(made.uri, "merge").decision == "blocked"
    assert contents(made.uri) == before, "nothing is written while the first fragment cannot be used"
    path.write_bytes(whole)
    assert run_job(made.uri, "merge").decision == "merged"
    assert made.read() == made.expected()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("content", [b"", b"{", b'{"fencing_token": "x"}'])
def test_a_lease_that_cannot_be_read(
    made: NamespaceUnderTest, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """No compaction can start: that is not healthy, and what reads goes on."""
    path = Path(made.uri, "lease.json")
    path.write_bytes(content)
    assert_seen(made, path, "table_corrupt", capfd)
    made.put("new")
    error = refused(made, "merge")
    assert "at or above 1" in error.remedy
    assert made.read() == made.expected()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("harm", [emptied, halved, flipped, Path.unlink])
def test_records_of_ours_are_no_reason_to_stop(made: NamespaceUnderTest, harm: Callable[[Path], None]) -> None:
    """Neither a record of a segment's checksums nor one of an old manifest has a row."""
    made.put("new")
    for folder in ("_mem_wal_ops/training", "_mem_wal_ops/history"):
        for path in Path(made.uri, folder).glob("*"):
            harm(path)
    assert damaged_parts(opened(made)) == ()
    assert run_job(made.uri, "merge").decision == "merged"
    assert made.read() == made.expected()
    found = run_job(made.uri, "verify").to_json()["findings"]
    assert {one["check"] for one in found} <= {"history", "orphans"}, "neither is a loss"


@pytest.mark.sampled(1)
def test_each_bit_of_a_records_checksums(made: NamespaceUnderTest) -> None:
    """A record that is damaged must not make an intact segment a corrupt one."""
    (path,) = Path(made.uri, "_mem_wal_ops/training").glob("*")
    data = path.read_bytes()
    for at in range(data.index(b'"objects"'), len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert damaged_parts(opened(made)) == (), data[at - 20 : at + 20]


def test_a_manifest_that_was_deleted(made: NamespaceUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    Path(made.uri, "manifest.json").unlink()
    for job in ("inspect", "merge", "verify", "gc"):
        shown = run_here(capfd, job, made.uri, "--json")
        assert shown.code == 9
        assert "history" in shown.document["error"]["remedy"]


def test_a_native_manifest_that_differs_from_its_record(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    table = opened(made)
    manifest = Path(made.uri, "manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"2026", b"2024").replace(b"2025", b"2024"))
    assert opened(made).data != table.data
    (found,) = run_job(made.uri, "verify").to_json()["findings"]
    assert (found["severity"], found["check"]) == ("error", "history")
    assert "Compare the two" in found["remedy"]


def test_a_native_namespace_without_settings(tmp_path: Path) -> None:
    """No server finds it, and its metric and full-text fields are unknown."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    Path(made.uri, "meta.json").unlink()
    assert "meta.json is missing" in str(refused(made, "merge")).replace(f" of {made.uri}", "")
    (found,) = run_job(made.uri, "verify").to_json()["findings"]
    assert (found["severity"], found["place"]) == ("error", "meta.json")


def test_a_text_that_is_cut_behind_a_vector_is_no_document(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    made.put("a", "b", "c")
    path = Path(made.uri, opened(made).manifest.fragments[0].key)
    text = path.read_text()
    document = json.loads(text)
    whole = [
        text,
        text + "\n",
        json.dumps(document, indent=2),
        json.dumps({**document, "deletes": document["deletes"]}),
    ]
    orders = (("vectors", "deletes"), ("deletes", "vectors"), ("id",), ("checksum",), ("created_at",))
    whole += [json.dumps({name: document[name] for name in sorted(document, key=last.__contains__)}) for last in orders]
    for one in whole:
        path.write_text(one)
        assert damaged_parts(opened(made)) == (), one[-80:]
    for end in [at + 1 for at, letter in enumerate(text) if letter == "}"][:-1]:
        path.write_text(text[:end])
        assert [part.error.reason for part in damaged_parts(opened(made))] == ["fragment_corrupt"], text[:end]


def test_a_segment_of_another_program(made: NamespaceUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    """Its sizes are recorded nowhere: what its rows need at least is known."""
    made.forget_records()
    assert damaged_parts(opened(made)) == ()
    for name, harm in (("centroids.bin", cut), ("cluster_0.bin", halved), ("attrs_1.bin", emptied)):
        path = of_segment(made, name)
        whole = path.read_bytes()
        harm(path)
        assert name.partition("_")[0] in str(damaged_parts(opened(made))[0].error)
        assert run_here(capfd, "check", "--nagios", made.uri).code == 2
        path.write_bytes(whole)


def pending(uri: str) -> list[str]:
    """Keys that verify finds both pending and needed."""
    findings = run_job(uri, "verify").to_json()["findings"]
    return [one["place"] for one in findings if one["check"] == "pending_deletes"]


def test_carried_clusters_are_looked_for_where_they_are(tmp_path: Path) -> None:
    """A server's compaction leaves untouched clusters with the older segment."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.put(*(f"v{at}" for at in range(40)))
    run_job(made.uri, "merge", clusters=4)
    (old,) = opened(made).manifest.segments
    made.put("v1")
    assert compact_carrying(made.uri, 9)
    (new,) = opened(made).manifest.segments
    carried = [number for number, owner in enumerate(new.owners) if owner == old.prefix]
    assert 0 < len(carried) < 4
    assert damaged_parts(opened(made)) == ()
    assert pending(made.uri) == [], "it retired what it did not carry"
    assert made.read() == made.expected()
    path = Path(made.uri, old.prefix, f"attrs_{carried[0]}.bin")
    needed = f"{path.relative_to(made.uri)}"
    edit(made.uri, lambda found: found["pending_deletes"].append(f"{found['namespace']}/{needed}"))
    assert pending(made.uri) == [needed]
    for harm in HARMS:
        whole = path.read_bytes()
        harm(path)
        (part,) = damaged_parts(opened(made))
        assert (part.id, part.path) == (new.id, f"{old.prefix}{path.name}")
        path.write_bytes(whole)
    for number in {*range(4)} - {*carried}:
        Path(made.uri, old.prefix, f"cluster_{number}.bin").unlink()
    assert damaged_parts(opened(made)) == (), "nothing needs these any more"


def test_all_objects_of_a_segment_and_of_the_log(made: NamespaceUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    made.write()
    for folder in ("segments", "wal"):
        shutil.rmtree(Path(made.uri, folder))
    parts = damaged_parts(opened(made))
    assert [one.kind for one in parts] == ["fragment"] * 3 + ["segment"]
    assert "more of its objects" in str(parts[-1].error)
    assert "4 parts blocked" in run_here(capfd, "check", "--nagios", made.uri).out
    error = refused(made, "gc", apply=True)
    assert error.reason == "fragment_missing"


def test_what_a_compaction_replaced_meanwhile_is_not_damage(made: NamespaceUnderTest) -> None:
    table = opened(made)
    made.write()
    run_job(made.uri, "merge", FAST)
    for name in (*ROWS, *INDEXES):
        Path(made.uri, table.manifest.segments[0].prefix, name).unlink()
    assert damaged_parts(table) == ()


def test_objects_of_another_namespace_are_not_looked_for_here(tmp_path: Path) -> None:
    """A branch's manifest refers to objects of its parent."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    key = opened(made).manifest.fragments[0].key
    Path(made.uri, key).unlink()
    assert len(damaged_parts(opened(made))) == 1
    edit(made.uri, lambda found: found["fragments"][0].update(artifact_origin=0))
    assert damaged_parts(opened(made)) == ()
    shown = run_job(made.uri, "inspect").describe()
    assert f"Not looked for, as only a server can: the objects of {Path(key).stem}." in shown
    assert "All listed objects exist" not in shown


def test_no_migration_of_an_incomplete_namespace(made: NamespaceUnderTest, tmp_path: Path) -> None:
    made.write()
    cut(Path(made.uri, opened(made).manifest.fragments[0].key))
    with pytest.raises(FragmentCorruptError):
        run_job(made.uri, "migrate", target=str(tmp_path / "t.lance"), apply=True)


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[dict[str, str], Any]]:
    """A server that counts."""
    with counting_server() as server:
        yield server


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dialect", ["wiki", "native"])
def test_requests(counted: tuple[dict[str, str], Any], dialect: str) -> None:
    """An idle poll is one request; what checks the objects costs a listing and a record of the segment."""
    options, requests = counted
    uri = f"s3://{BUCKET}/{dialect}"
    zeppelin.create(uri, dimensions=2, dialect=dialect, storage_options=options)
    writer = zeppelin.open_writer(uri, options)
    made: dict[str, int] = {}

    def count(name: str, act: Callable[[], object]) -> None:
        requests.clear()
        act()
        made[name] = requests.total()

    def poll() -> None:
        table = open_table(uri, options)
        jobs = [*table.jobs.values()]
        known = fingerprint_of(table, jobs)
        figures, faults = poll_table(table, jobs)
        assert (figures["blocked_parts"], faults) == (0, [])
        assert known is not None
        polled.append(known)

    polled: list[str] = []
    writer.append(vectors=[{"id": f"v{at}", "values": [1.0, float(at)]} for at in range(9)])
    run_job(uri, "merge", storage_options=options)
    count("poll", poll)
    count("idle", lambda: is_unchanged(uri, options, polled[-1]))
    assert is_unchanged(uri, options, polled[-1])
    count("nothing", lambda: run_job(uri, "merge", storage_options=options))
    count("inspect", lambda: run_job(uri, "inspect", storage_options=options))
    for at in range(5):
        writer.append(vectors=[{"id": f"w{at}", "values": [1.0, float(at)]}])
    assert not is_unchanged(uri, options, polled[-1])
    count("waiting", poll)
    most = {"poll": 8, "idle": 1, "nothing": 9, "inspect": 10, "waiting": 9 + 5 * (dialect == "wiki")}
    assert all(made[name] <= most[name] for name in most), made
    assert run_job(uri, "merge", storage_options=options).decision == "merged"


def test_an_idle_namespace_is_read_again_only_when_it_is_written(made: NamespaceUnderTest) -> None:
    table = open_table(made.uri)
    known = fingerprint_of(table, table.jobs.values())
    assert known is not None
    assert is_unchanged(made.uri, {}, known)
    made.put("a")
    assert not is_unchanged(made.uri, {}, known)
    Path(made.uri, "manifest.json").unlink()
    assert not is_unchanged(made.uri, {}, known)


def test_a_fragment_that_is_listed_late_is_no_damage(made: NamespaceUnderTest) -> None:
    """A listing that began before the fragment was written does not have it."""
    made.put("late")
    key = opened(made).manifest.fragments[-1].key

    class Early(StoreWrapper):
        def list(self, prefix: str = "", **more: Any) -> Any:
            return (one for one in super().list(prefix, **more) if one.path != key)

    table = opened(made)
    assert damaged_parts(replace(table, store=Early(table.store))) == ()
