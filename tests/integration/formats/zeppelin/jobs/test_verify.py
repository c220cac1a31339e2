"""Verification: a healthy namespace is healthy, each damage is named, and nothing is changed."""

from __future__ import annotations

import json
import random
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import run_job
from memwal_ops.errors import MemwalOpsError, ObjectNotFoundError, runbook
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.lease import LeaseRecord, encode_lease
from tests.support.run_cli import contents, run_here
from tests.support.zeppelin.merging import opened
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from collections.abc import Callable


KEYS = {"severity", "check", "place", "evidence", "consequence", "remedy", "runbook"}


@pytest.fixture(params=["wiki", "native"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> NamespaceUnderTest:
    found = NamespaceUnderTest(str(tmp_path / "ns"), request.param)
    found.write()
    run_job(found.uri, "merge", clusters=2, bitmap_field=("color",), fts_field=("color",), quantization="scalar")
    found.write()
    return found


def findings(made: NamespaceUnderTest, **options: Any) -> list[dict[str, Any]]:
    before = contents(made.uri)
    report = run_job(made.uri, "verify", **options)
    assert contents(made.uri) == before
    document = report.to_json()
    assert json.loads(json.dumps(document)) == document
    assert report.describe()
    found: list[dict[str, Any]] = document["findings"]
    assert all(one.keys() == KEYS for one in found)
    worst = {one["severity"] for one in found}
    assert report.decision == ("findings" if worst - {"info"} else "healthy")
    assert report.exit_code == (9 if "error" in worst else 0)
    return found


@pytest.mark.sampled(1)
def test_healthy_after_any_history(made: NamespaceUnderTest) -> None:
    dice = random.Random(5)
    for _ in range(4):
        assert findings(made) == findings(made, deep=True) == []
        made.put(*(f"v{dice.randrange(20)}" for _ in range(6)), deletes=(f"w{dice.randrange(9)}",))
        run_job(made.uri, "merge", clusters=dice.choice([None, 3]), retrain=dice.random() < 0.5)
        if dice.random() < 0.5:
            run_job(made.uri, "gc", apply=True, reader_grace=timedelta(0), keep_revisions=1, allow_unsafe=True)


def test_the_metric_of_a_namespace_without_settings_is_that_of_its_last_training(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), metric="euclidean")
    # Three groups by distance, of which the one at the origin has all directions.
    places = [(0.0, 0.0)] * 8 + [(1000.0, 0.0)] * 4 + [(0.0, 1000.0)] * 4
    around = [(1.0, 0.1), (0.1, 1.0), (1.0, 0.2), (0.2, 1.0)] * 4
    rows = [[x + dx, y + dy, 0.0, 0.0] for (x, y), (dx, dy) in zip(places, around, strict=True)]
    zeppelin.open_writer(made.uri).append([{"id": f"v{at}", "values": row} for at, row in enumerate(rows)])
    Path(made.uri, "meta.json").unlink()
    assert run_job(made.uri, "merge", clusters=3, metric="euclidean").warnings == []
    assert findings(made) == findings(made, metric="euclidean") == []
    assert {one["check"] for one in findings(made, metric="cosine")} == {"assignment"}
    zeppelin.open_writer(made.uri).append([{"id": "late", "values": [3.0, 1.0, 1.0, 2.0]}])
    assert run_job(made.uri, "merge").warnings == [], "it is known now"
    assert findings(made) == []


def first(made: NamespaceUnderTest) -> str:
    return opened(made).manifest.fragments[0].key


def prefix(made: NamespaceUnderTest) -> str:
    return opened(made).manifest.segments[0].prefix


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def lease(made: NamespaceUnderTest, token: int, days: float) -> None:
    now = datetime.now(UTC)
    record = LeaseRecord("node-abc", token, now, now + timedelta(days=days))
    Path(made.uri, "lease.json").write_bytes(encode_lease(record, made.dialect))


def of(name: str) -> Callable[[NamespaceUnderTest], Path]:
    return lambda made: Path(made.uri, prefix(made), name)


DAMAGES: list[tuple[str, str, Callable[[NamespaceUnderTest], object]]] = [
    ("error", "fragment", lambda made: Path(made.uri, first(made)).unlink()),
    ("error", "fragment", lambda made: Path(made.uri, first(made)).write_bytes(b"{")),
    ("error", "fragment", lambda made: rewrite(Path(made.uri, first(made)), b"d", b"x")),
    ("error", "segment", lambda made: of("centroids.bin")(made).unlink()),
    ("error", "segment", lambda made: of("centroids.bin")(made).write_bytes(b"x" * 20)),
    ("error", "cluster", lambda made: of("cluster_1.bin")(made).unlink()),
    ("error", "cluster", lambda made: of("cluster_0.bin")(made).write_bytes(b"\x01\x00\x00")),
    ("error", "cluster", lambda made: of("attrs_0.bin")(made).write_bytes(b"[]")),
    ("error", "segment", lambda made: (made.forget_records(), *(
        shutil.copy(of(f"{name}_0.bin")(made), of(f"{name}_1.bin")(made)) for name in ("cluster", "attrs")))),
    ("error", "index", lambda made: of("bitmap_0.bin")(made).unlink()),
    ("error", "index", lambda made: of("fts_index_0.bin")(made).write_bytes(b"ZFTS")),
    ("error", "compactor_lease", lambda made: Path(made.uri, "lease.json").write_text("{")),
    ("warning", "tokens", lambda made: lease(made, 0, -1)),
    ("warning", "compactor_lease", lambda made: lease(made, 9, 3)),
    ("info", "unrecognized", lambda made: Path(made.uri, "wal/notes.txt").write_text("x")),
    ("info", "orphans", lambda made: shutil.copytree(Path(made.uri, prefix(made)), Path(made.uri, "segments/seg-x"))),
]  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("severity", "check", "damage"), DAMAGES, ids=[str(at) for at in range(len(DAMAGES))])
def test_each_damage_is_named(
    made: NamespaceUnderTest, severity: str, check: str, damage: Callable[[NamespaceUnderTest], object]
) -> None:
    damage(made)
    found = findings(made)
    assert (severity, check) in {(one["severity"], one["check"]) for one in found}
    named = {one["runbook"] for one in found} - {None}
    assert all((Path(__file__).parents[5] / page).exists() for page in named)
    if severity == "error":
        assert named <= {runbook(code) for code in range(100)}
        assert named


def test_rows_in_the_wrong_cluster(made: NamespaceUnderTest) -> None:
    made.forget_records()
    for name in ("cluster", "attrs", "bitmap", "fts_index"):
        a, b = of(f"{name}_0.bin")(made), of(f"{name}_1.bin")(made)
        first, second = a.read_bytes(), b.read_bytes()
        a.write_bytes(second)
        b.write_bytes(first)
    assert {one["check"] for one in findings(made)} >= {"assignment"}


@pytest.mark.long
def test_random_bytes_never_break_it(made: NamespaceUnderTest) -> None:
    dice = random.Random(11)
    backup = f"{made.uri}.backup"
    shutil.copytree(made.uri, backup)
    for _ in range(60):
        shutil.rmtree(made.uri)
        shutil.copytree(backup, made.uri)
        file = dice.choice(sorted(path for path in Path(made.uri).rglob("*") if path.is_file()))
        data = bytearray(file.read_bytes() or b"x")
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data[: dice.randrange(len(data))] if dice.random() < 0.3 else data)
        try:
            run_job(made.uri, "verify", deep=True)
        except MemwalOpsError as error:
            assert error.exit_code > 2, file
            assert error.remedy


def test_why_and_the_other_name_of_merge(made: NamespaceUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    key = first(made)
    shown = run_here(capfd, "why", made.uri, key)
    assert shown.code == 0
    assert "- the live manifest lists it" in shown.out
    assert "the live manifest needs it" in run_here(capfd, "why", made.uri, prefix(made) + "cluster_0.bin").out
    with pytest.raises(ObjectNotFoundError):
        run_job(made.uri, "why", target="wal/none")
    done = run_here(capfd, "compact", made.uri, "--json")
    assert (done.code, done.document["decision"]) == (0, "merged")
    assert (
        "is deletable" in run_here(capfd, "why", made.uri, key).out or made.dialect == "native" or "kept" in shown.out
    )
    assert run_here(capfd, "verify", made.uri).out.startswith("healthy: ")
    assert made.read() == made.expected()
