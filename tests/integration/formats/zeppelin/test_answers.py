"""verify --answers of a namespace: recall of queries, bitmaps and inverted lists against the rows of their clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memwal_ops import run_job
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.zeppelin import reader, segments
from memwal_ops.formats.zeppelin.wire import segment
from memwal_ops.formats.zeppelin.wire.segment import decode_bitmaps, encode_bitmaps
from tests.support.zeppelin.namespace import NamespaceUnderTest


@pytest.fixture
def made(tmp_path: Path) -> NamespaceUnderTest:
    found = NamespaceUnderTest(str(tmp_path / "ns"), "wiki")
    found.write()
    run_job(found.uri, "merge", clusters=2, bitmap_field=("color",), fts_field=("color",))
    found.write()
    return found


def test_a_healthy_namespace_answers_right(made: NamespaceUnderTest) -> None:
    report = run_job(made.uri, "verify", answers=True)
    assert not report.findings.kept, report.describe()
    answers = {one["index"]: one for one in report.to_json()["answers"]}
    assert answers.keys() == {"vectors", "bitmap color", "text color"}
    assert answers["vectors"]["recall"] == 1, "two clusters, and eight are probed"
    assert answers["vectors"]["queries"] >= 4
    assert [answers[name]["wrong"] for name in ("bitmap color", "text color")] == [0, 0]
    assert min(answers[name]["queries"] for name in answers) > 1


def test_a_bitmap_that_lost_a_row(made: NamespaceUnderTest) -> None:
    made.forget_records()
    by_path = {path: decode_bitmaps(path.read_bytes())["color"] for path in Path(made.uri).rglob("bitmap_*.bin")}
    path, found = next((path, found) for path, found in sorted(by_path.items()) if found)
    cluster = path.stem.removeprefix("bitmap_")
    colors: dict[int, str] = {row: key.partition(":")[2] for key, rows in found.items() for row in rows}
    count = max(colors) + 1
    lost = min(colors)
    rows = [{"color": colors[at]} if at in colors and at != lost else None for at in range(count)]
    path.write_bytes(encode_bitmaps(rows, ("color",)))
    report = run_job(made.uri, "verify", answers=True)
    assert {one.check for one in report.findings.kept} == {"index_misses_rows"}, report.describe()
    [entry] = [one for one in report.answers if one.index == "bitmap color"]
    assert (entry.wrong, entry.missing, entry.examples_missing) == (1, 1, [f"{cluster}:{lost}"])
    assert report.exit_code == 9


def test_wrong_distances_are_found(made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right is computed by other code than that of queries: else a fault of theirs would be in both."""

    def farthest(vectors: Any, wanted: Any, metric: str) -> Any:
        return -right(vectors, wanted, metric)

    for number in range(40):
        made.put(f"more{number}")
    right = reader.distances
    monkeypatch.setattr(reader, "distances", farthest)
    report = run_job(made.uri, "verify", answers=True)
    assert {one.check for one in report.findings.kept} == {"index_recall_low"}, report.describe()
    monkeypatch.undo()
    assert run_job(made.uri, "verify", answers=True).decision == "healthy"


@pytest.mark.parametrize(("kind", "encoder"), [("bitmap", "encode_bitmaps"), ("text", "encode_text_index")])
def test_wrong_indexes_are_found(
    made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch, kind: str, encoder: str
) -> None:
    """A fault of the encoder is not one of verify."""

    def late(rows: Any, fields: Any) -> bytes:
        return right([*rows[1:], None], fields)

    right = getattr(segments, encoder)
    monkeypatch.setattr(segments, encoder, late)
    monkeypatch.setattr(segment, encoder, late)
    run_job(made.uri, "merge", clusters=1, retrain=True)
    report = run_job(made.uri, "verify", deep=True)
    assert report.exit_code == 9, report.describe()
    [entry] = [one for one in report.answers if one.index == f"{kind} color"]
    assert entry.wrong
    assert any(one.check == "index" for one in report.findings.kept)


def test_an_unknown_index_is_refused(made: NamespaceUnderTest) -> None:
    with pytest.raises(InvalidUsageError, match="no index 'x'"):
        run_job(made.uri, "verify", index=["x"])


def test_the_indexes_alone_and_what_that_costs(made: NamespaceUnderTest) -> None:
    plan = run_job(made.uri, "verify", answers=True, dry_run=True)
    assert plan.decision == "dry_run"
    done = run_job(made.uri, "verify", answers_only=True)
    assert (dict(done.checked), done.decision) == ({}, "healthy")
    told = {one.index: one.bytes_at_most for one in plan.answers}
    assert {one.index: one.bytes_at_most for one in done.answers} == told
