"""verify --answers of a namespace: recall of queries, bitmaps and inverted lists against the rows of their clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from memwal_ops import run_job
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.zeppelin.wire.indexes import decode_bitmaps, encode_bitmaps
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
    [path] = Path(made.uri).rglob("bitmap_0.bin")
    found = decode_bitmaps(path.read_bytes())["color"]
    colors: dict[int, str] = {row: key.partition(":")[2] for key, rows in found.items() for row in rows}
    count = max(colors) + 1
    lost = min(colors)
    rows = [{"color": colors[at]} if at in colors and at != lost else None for at in range(count)]
    path.write_bytes(encode_bitmaps(rows, ("color",)))
    report = run_job(made.uri, "verify", answers=True)
    assert {one.check for one in report.findings.kept} == {"index_misses_rows"}, report.describe()
    [entry] = [one for one in report.answers if one.index == "bitmap color"]
    assert (entry.wrong, entry.missing, entry.examples_missing) == (1, 1, [f"0:{lost}"])
    assert report.exit_code == 9


def test_an_unknown_index_is_refused(made: NamespaceUnderTest) -> None:
    with pytest.raises(InvalidUsageError, match="no index 'x'"):
        run_job(made.uri, "verify", index=["x"])
