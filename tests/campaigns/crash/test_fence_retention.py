"""How long gc keeps fence posts: by the age of what came after them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.layouts import REGION as REGION_LAYOUT
from tests.campaigns.crash.fencing import PATIENT, Ages, collect, region_table, view
from tests.support.spec_writer import MemoryRegion, SpecWriter
from tests.support.tables import wire


def lived_through(epochs: list[int], silent: int = 0) -> MemoryRegion:
    """A region in which each epoch wrote so many entries, all flushed; `silent` ones were claimed last."""
    region = MemoryRegion()
    for entries in epochs + [0] * silent:
        one = SpecWriter(region)
        one.claim()
        one.look()
        for row in range(entries):
            one.put(row)
        one.flush()
    return region


def left(region: MemoryRegion, ages: Ages, options: gc.GcOptions = PATIENT) -> list[int]:
    """The entries that gc leaves."""
    items = view(region, REGION_LAYOUT, options, ages).entries()
    return [wire.from_bit_reversed(one.path.rsplit("/", 1)[-1]) for one in items if one.verdict is not Verdict.DELETE]


DAY = timedelta(days=1)


def test_fence_posts_are_deleted_when_the_next_ones_are_old() -> None:
    region = lived_through([3, 3, 3, 3, 3])
    assert left(region, lambda _: timedelta(0)) == [1, 4, 7, 10, 13, 15]
    assert left(region, lambda _: 29 * DAY) == [1, 4, 7, 10, 13, 15]
    # The newest two epochs' stay at any age, and the last entry, behind which the next writer goes on.
    assert left(region, lambda _: 31 * DAY) == [10, 13, 15]
    assert left(region, lambda _: 4000 * DAY) == [10, 13, 15]
    # Epoch 3 began to write yesterday: until then epoch 2 wrote.
    assert left(region, lambda at: 40 * DAY if abs(at) < 7 else DAY) == [4, 7, 10, 13, 15]


def test_what_a_silent_epoch_may_meet_stays_for_as_long_as_a_writer_may_stall() -> None:
    region = MemoryRegion()
    one, other = SpecWriter(region), SpecWriter(region)
    one.claim()
    one.look()
    one.put(1)
    other.claim()  # and it stalls before it looks
    third = SpecWriter(region)
    third.claim()
    third.look()
    for row in range(2, 6):
        third.put(row)
    third.flush()
    assert left(region, lambda _: DAY) == [1, 2, 3, 4, 5]
    # The time of its claim counts: what stood long before may be where it goes on.
    assert left(region, lambda at: 400 * DAY if at == 1 else DAY) == [1, 2, 3, 4, 5]
    assert left(region, lambda at: 31 * DAY if at < 0 else DAY) == [1, 2, 5]
    assert left(region, lambda _: 31 * DAY) == [1, 2, 5]


def test_a_region_without_a_writer() -> None:
    region = lived_through([0, 0, 4, 0], silent=2)
    assert left(region, lambda _: DAY) == [1, 2, 3, 4]
    assert left(region, lambda _: 31 * DAY) == [1, 4]
    assert left(lived_through([0]), lambda _: DAY) == []


def test_fence_posts_of_a_real_table_expire_by_the_times_of_their_files(tmp_path: Path) -> None:
    region = region_table(tmp_path)
    for epoch in range(4):
        one = SpecWriter(region)
        one.claim()
        one.look()
        for row in range(3):
            one.put(100 + 10 * epoch + row)
        one.flush()
    collect(region.made.uri)
    assert sorted(region.positions()) == [1, 4, 7, 10, 12]
    then = (datetime.now(UTC) - 31 * DAY).timestamp()
    for path in Path(region.made.uri, region.folder).glob("*/*"):
        os.utime(path, (then, then))
    collect(region.made.uri)
    assert sorted(region.positions()) == [7, 10, 12]
    collect(region.made.uri)
    assert sorted(region.positions()) == [7, 10, 12]
