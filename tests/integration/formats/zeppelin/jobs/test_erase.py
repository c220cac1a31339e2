"""erase on a namespace: the values of a deleted row are in no object, and all other rows are read."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.context import RunContext
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.core.options import EraseOptions
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.jobs import erase as job
from tests.support.dying_store import DyingStore, Killed
from tests.support.zeppelin import server
from tests.support.zeppelin.namespace import NamespaceUnderTest

# In the segment; replaced by the log; in the log alone; deleted before.
GONE = ["p0003", "p0007", "p0042", "p0009"]
WHERE = '{"op": "in", "field": "user", "values": [3, 7, 42, 9]}'
NOW: dict[str, Any] = {"older_than": "0s", "allow_unsafe": True}


def pattern(name: str, more: str = "") -> str:
    """16 letters and digits that no other row has."""
    return f"{name}qx{int(name[1:]) * 7919 % 999983:06d}{more or 'zzzz'}"


def row(name: str, more: str = "") -> dict[str, Any]:
    values = np.random.default_rng(int(name[1:]) + 1000 * len(more)).random(4, dtype=np.float32).tolist()
    attributes = {"user": int(name[1:]), "text": pattern(name, more), "tags": [pattern(name, more)[::-1]]}
    return {"id": name, "values": values, "attributes": attributes}


class Made:
    """A namespace, and the rows that stay."""

    def __init__(self, uri: str, dialect: str) -> None:
        self.uri = uri
        self.rows = {name: row(name) for name in (f"p{number:04}" for number in range(40)) if name not in GONE}
        NamespaceUnderTest(uri, dialect)
        writer = zeppelin.open_writer(uri)
        writer.append(vectors=[row(f"p{number:04}") for number in range(40)])
        run_job(uri, "merge")
        writer = zeppelin.open_writer(uri)
        writer.append(vectors=[row("p0007", "new1"), row("p0042"), row("p0043")], deletes=["p0009"])
        self.rows["p0043"] = row("p0043")

    def check(self, uri: str) -> None:
        found = {hit["id"] for hit in zeppelin.query(uri, vector=[1, 1, 1, 1], k=100, nprobe=100)}
        assert found == {*self.rows}
        report = run_job(uri, "verify", deep=True)
        assert report.decision == "healthy", report.describe()


def holders(uri: str) -> set[str]:
    """Folders with an object that has a pattern, or 16 bytes of a vector, of a row that must be gone."""
    wanted = [(row(name, more), name) for name in GONE for more in ("", "new1")]
    texts = [one["attributes"]["text"].encode() for one, _ in wanted]
    texts += [one[::-1] for one in texts] + [np.array(one["values"], "<f4").tobytes() for one, _ in wanted]
    texts += [name.encode() for name in GONE]
    files = [path for path in Path(uri).rglob("*") if path.is_file()]
    return {path.relative_to(uri).parts[0] for path in files if any(one in path.read_bytes() for one in texts)}


@pytest.fixture(params=["wiki", "native"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return Made(str(tmp_path / "namespace"), request.param)


def erase(uri: str, **options: Any) -> Any:
    report = None
    for _ in range(3):
        report = run_job(uri, "erase", **{"where": WHERE, "apply": True, **NOW, **options})
        if report.decision != "waiting":
            break
    return report


def test_no_object_has_a_value_afterwards(made: Made) -> None:
    assert holders(made.uri) >= {"wal", "segments"}
    plan = run_job(made.uri, "erase", where=WHERE)
    assert (plan.decision, plan.living) == ("planned", 3)
    assert {one.kind for one in plan.holders} == {"fragment", "segment"}
    report = erase(made.uri, certificate=f"{made.uri}.json")
    assert report.decision == "erased", report.describe()
    assert holders(made.uri) == set()
    made.check(made.uri)
    again = erase(made.uri)
    assert (again.decision, again.done) == ("erased", {})
    zeppelin.open_writer(made.uri).append(vectors=[row("p0050")])
    run_job(made.uri, "maintain", apply=True)
    assert run_job(made.uri, "erase", check=f"{made.uri}.json").decision == "valid"


def test_all_that_was_deleted_before_a_time(made: Made) -> None:
    zeppelin.open_writer(made.uri).append(deletes=[name for name in GONE if name != "p0009"])
    assert erase(made.uri, where=None, deleted_before=datetime.now(UTC).isoformat()).decision == "erased"
    assert holders(made.uri) == set()
    made.check(made.uri)


def test_a_hold_is_named_and_grace_times_wait(made: Made) -> None:
    table = open_table(made.uri)
    hold = take_hold(table, table.revision, timedelta(hours=1), note="a notebook")
    report = erase(made.uri)
    assert (report.decision, report.exit_code) == ("held", 63)
    held = [one.why for one in report.holders if one.blocks]
    assert held
    assert all(f"hold {hold.number} keeps it" in one for one in held)
    release_hold(open_table(made.uri), hold.number)
    report = erase(made.uri, older_than="1h", allow_unsafe=False)
    assert report.decision == "waiting"
    assert report.until is not None
    assert erase(made.uri).decision == "erased"
    assert holders(made.uri) == set()


def test_bad_input_is_refused(made: Made) -> None:
    for where in ("user = 3", "[]", "{}", '{"op": "like"}'):
        with pytest.raises(InvalidUsageError):
            run_job(made.uri, "erase", where=where)
    Path(made.uri, "export.csv").write_text("a,b")
    assert {one.kind for one in erase(made.uri).holders} == {"unrecognized"}


def test_an_attribute_that_is_named_id_hides_no_id(tmp_path: Path) -> None:
    uri = str(tmp_path / "namespace")
    zeppelin.create(uri, dimensions=4)
    rows = [("user-1", "ext-9"), ("user-2", "user-3"), ("user-3", None)]
    zeppelin.open_writer(uri).append([
        {**row("p0001"), "id": name, "attributes": {"mail": f"mail-of-{name}"} | ({"id": other} if other else {})}
        for name, other in rows
    ])  # fmt: skip
    for gone, left in (("user-1", {"user-2", "user-3"}), ("user-3", {"user-2"})):
        report = erase(uri, where=f'{{"id":"{gone}"}}', certificate=f"{uri}.json")
        assert report.decision == "erased", report.describe()
        assert {hit["id"] for hit in zeppelin.query(uri, vector=[1, 1, 1, 1])} == left
        assert not any(f"mail-of-{gone}".encode() in path.read_bytes() for path in files_of(uri))
    assert "1 row with another id" in " ".join(report.describe().split()), "user-2 has the attribute"


def test_contested_ids_are_deleted(tmp_path: Path) -> None:
    """No query returns them, and no compaction removes them: without a delete, they would wait for ever."""
    uri = str(tmp_path / "namespace")
    zeppelin.create(uri, dimensions=4)
    zeppelin.open_writer(uri).append([row("p0003"), row("p0050")])
    server.hide(uri, "p0003")
    assert run_job(uri, "erase", where=WHERE).living == 1
    # Without an expression, nothing says that it is to be deleted: a person decides.
    report = erase(uri, where=None, deleted_before=datetime.now(UTC).isoformat())
    assert (report.decision, report.exit_code) == ("held", 63)
    assert any("both in pending_deletes and in the log: 'p0003'" in one.why for one in report.holders)
    assert erase(uri, certificate=f"{uri}.json").decision == "erased"
    assert holders(uri) == set()
    assert [hit["id"] for hit in zeppelin.query(uri, vector=[1, 1, 1, 1])] == ["p0050"]


def files_of(uri: str) -> list[Path]:
    return [path for path in Path(uri).rglob("*") if path.is_file()]


LEAKS = {
    "a bitmap of the segment": "segments/{segment}/bitmap_0.bin",
    "the state of memwal-ops": "_mem_wal_ops/training/{segment}.json",
    "a note of a hold": "_mem_wal_ops/holds/note.json",
    "settings": "meta.json",
}


@pytest.mark.parametrize("where", [WHERE, None])
@pytest.mark.parametrize("name", LEAKS)
def test_bytes_that_stay_prevent_a_certificate(made: Made, tmp_path: Path, name: str, where: str | None) -> None:
    """The survey takes these objects for clean: it knows what the format writes into them."""
    if where is None:
        zeppelin.open_writer(made.uri).append(deletes=[gone for gone in GONE if gone != "p0009"])
    more = {"where": where, "deleted_before": None if where else datetime.now(UTC).isoformat()}
    certificate = Path(tmp_path, "proof.json")
    assert erase(made.uri, **more, older_than="7d", allow_unsafe=False).decision == "waiting"
    table: Any = open_table(made.uri)
    (segment,) = table.manifest.segments
    path = Path(made.uri, LEAKS[name].format(segment=segment.id))
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.exists() else b"{}"
    path.write_bytes(before.rstrip()[:-1] + b',"x":"%b"}' % pattern("p0003").encode())
    report = erase(made.uri, **more, certificate=str(certificate))
    assert (report.decision, report.exit_code) == ("held", 63), report.describe()
    assert [one.name for one in report.holders] == [path.relative_to(made.uri).as_posix()]
    assert "the attribute 'text'" in report.holders[0].why
    assert not certificate.exists()


def test_warnings_are_those_of_namespaces(made: Made) -> None:
    text = run_job(made.uri, "erase", where=WHERE, **NOW).describe()
    assert "a reader reads the manifest" in " ".join(text.split())
    assert "a writer begins at version N" not in text
    with pytest.raises(InvalidUsageError, match="a reader reads the manifest"):
        run_job(made.uri, "erase", where=WHERE, older_than="0s")


def kill(uri: str, at: int) -> int:
    """Run until the n-th call of the store, and no further; returns how many calls there were."""
    table: Any = open_table(uri)
    store = DyingStore(table.store, at, after=at % 2 == 0)
    options = EraseOptions(where=WHERE, older_than=timedelta(0), allow_unsafe=True)
    with suppress(Killed):
        job.apply(replace(table, store=store), options, RunContext())
    return len(store.calls)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("points", [3, pytest.param(40, marks=pytest.mark.campaign)])
def test_killed_and_run_again(made: Made, tmp_path: Path, points: int) -> None:
    calls = kill(str(shutil.copytree(made.uri, tmp_path / "whole" / "namespace")), 10**9)
    for at in range(calls // (2 * points) + 1, calls, max(1, calls // points)):
        uri = str(shutil.copytree(made.uri, tmp_path / "namespaces" / "namespace"))
        kill(uri, at)
        Path(uri, "lease.json").unlink(missing_ok=True)  # the lease of the killed run has expired
        for _ in range(3):
            report = erase(uri)
        assert report.decision == "erased", f"{at}: {report.describe()}"
        assert holders(uri) == set(), at
        # Of a revision whose objects it had deleted, the killed run left the record.
        none = {"reader_grace": "0s", "orphan_min_age": "0s", "keep_revisions": 1, "allow_unsafe": True}
        run_job(uri, "gc", apply=True, **none)
        made.check(uri)
        shutil.rmtree(uri)
