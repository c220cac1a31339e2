"""The benchmark of a table's month: its store counts what was asked, and every way ends with the rows of the others."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest

from benchmarks.life import __main__ as life, store as stores
from benchmarks.life.loop import Calendar
from benchmarks.life.month import Month, Place, live, own_process
from benchmarks.life.shapes import SHORT, Shape, Writer
from benchmarks.life.store import BUCKET, Used, counting_store, part_of
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NARROW = Shape("narrow rows", 500, 60)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with counting_store(tmp_path) as (store, options):
        yield Place(store, options)


def test_bytes_and_requests_are_counted_by_what_they_are_for(place: Place) -> None:
    place.store.taken()
    made = lance.write_dataset(pa.table({"id": range(5000)}), place.uri("t.lance"), storage_options=place.options)
    made.create_scalar_index("id", "BTREE")
    lance.dataset(place.uri("t.lance"), storage_options=place.options).delete("id < 10")
    used = place.store.taken()

    on_disk: dict[str, int] = {}
    for path in (place.store.folder / "t.lance").rglob("*"):
        if path.is_file():
            part = part_of(str(path.relative_to(place.store.folder)))
            on_disk[part] = on_disk.get(part, 0) + path.stat().st_size
    # Nothing was deleted or written twice, so that what was written is there.
    assert used.written == on_disk == place.store.sizes("t.lance")
    assert set(on_disk) == {"data", "indexes", "metadata"}
    assert used.requests["PUT"] >= len([*(place.store.folder / "t.lance").rglob("*.*")])
    assert used.price == pytest.approx(sum(stores.PRICES[kind] * count for kind, count in used.requests.items()))
    assert place.store.taken() == Used()


@pytest.mark.long
def test_a_table_in_the_store_is_the_table_in_its_folder(place: Place) -> None:
    rows = pa.table({"id": range(3_000_000), "text": [f"{number:09}" for number in range(3_000_000)]})
    lance.write_dataset(rows, place.uri("t.lance"), storage_options=place.options)  # in parts: above 5 MiB

    assert lance.dataset(place.path("t.lance")).to_table() == rows
    assert lance.dataset(place.uri("t.lance"), storage_options=place.options).to_table() == rows


def test_listings_end_at_their_pages_and_writes_are_conditional(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PAGE", 2)
    store = open_store(resolve(f"s3://{BUCKET}/t.lance", place.options))
    names = [f"a/{number}/x" for number in range(3)] + [f"b{number}" for number in range(4)]
    for name in names:
        assert store.put_if_absent(name, b"1")

    assert sorted(one.path for one in store.list("")) == names
    level = store.list_level("")
    assert (level.directories, [one.path for one in level.objects]) == (("a",), names[3:])
    assert not store.put_if_absent("b1", b"2")
    assert (place.store.folder / "t.lance" / "b1").read_bytes() == b"1"


def test_a_day_of_the_month_is_as_old_as_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    calendar = Calendar(2, [100.0, 101.0, 103.0, 107.0])
    monkeypatch.setattr("time.time", lambda: 108.0)

    assert calendar.day_ends
    assert calendar.hours == 48
    assert calendar.age(1) == timedelta(seconds=7)  # two rounds before the newest
    assert calendar.age(7) == timedelta(days=1)  # before the month: nothing is as old


def test_what_is_written_depends_on_the_round_alone(tmp_path: Path) -> None:
    shape, tables = SHORT[0], []
    for number in range(2):
        writer = Writer(shape, str(tmp_path / f"{number}.lance"), {}, rounds=4, a_day=2)
        writer.make()
        for at in range(4):
            writer.write(at)
        tables.append(lance.dataset(writer.uri).to_table().sort_by("id"))
        assert writer.appended > 0

    assert tables[0] == tables[1]
    assert len(tables[0]) > shape.rows
    assert not np.array_equal(tables[0]["id"], np.arange(len(tables[0])))  # some were deleted


@pytest.mark.long
@pytest.mark.parametrize("shape", [shape.name for shape in SHORT])
def test_the_short_form_prints_every_figure(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--short", "--days", "2", "--rounds", "1", "--only", shape]
    life.main([*arguments, "--results", str(tmp_path), "--charts", str(tmp_path)])
    printed = capsys.readouterr().out

    figures = {line.split(" | ")[0].strip("| "): line for line in printed.splitlines() if line.startswith("| ")}
    assert {life.NOTHING, life.PYLANCE, life.OURS, "built anew"} <= figures.keys()
    assert "<svg" in (tmp_path / f"life-{shape.lower().replace(' ', '-')}.svg").read_text()
    # What was kept is printed again, and nothing runs.
    life.main([*arguments, "--results", str(tmp_path), "--way", life.OURS])
    assert re.findall(r"^\| memwal-ops .*", capsys.readouterr().out, re.MULTILINE) == re.findall(
        r"^\| memwal-ops .*", printed, re.MULTILINE
    )


@pytest.mark.long
def test_jobs_run_as_the_service_runs_them(place: Place) -> None:
    """What has to be written is written, nothing is lost, and what was not appended costs little."""
    left = live(place, NARROW, "nothing", [], 2, 1)
    place.store.remove("table.lance")
    place.store.remove("fresh.lance")
    kept = live(place, NARROW, "ours", own_process("ours"), 2, 1)

    assert kept.rows == left.rows
    assert kept.appended == left.appended
    assert kept.did
    assert kept.used.requests["GET"] > left.used.requests["GET"]
    assert Month.from_json(kept.to_json()) == kept
