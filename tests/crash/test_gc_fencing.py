"""A fenced writer that wakes after gc is refused, or its rows are read: in every interleaving.

An acknowledged row must stay readable. All interleavings of the steps of several writers and gc are
tried on dictionaries, with the collector's own decisions (`RegionView`); a part of them on real tables,
with the whole collector; pylance's real writers in all orders of what they can be made to do from
outside. That the search finds losses at all is shown by collectors that keep too little.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.fence_posts import FencePosts
from memwal_ops.core.layout import Layout
from memwal_ops.core.region_contents import FileState, RegionContents
from memwal_ops.core.retention import Retention
from memwal_ops.format.region_manifest import RegionManifest
from memwal_ops.jobs import gc, merge
from memwal_ops.jobs.collectables import Verdict
from memwal_ops.jobs.gc_region import RegionView, _History
from memwal_ops.jobs.gc_rules import Rules
from memwal_ops.storage.api import ObjectMeta
from tests.contracts.small import REGION, make, rows, writer
from tests.crash.spec_writer import Entry, Manifest, MemoryRegion, PylanceWriter, SpecWriter, TableRegion
from tests.tables import wire
from tests.tables.region_layout import RegionLayout

AT_ONCE = gc.GcOptions(
    reader_grace=timedelta(0), orphan_min_age=timedelta(0), manifest_retention=2, allow_unsafe=True
)  # fmt: skip
PATIENT = replace(AT_ONCE, manifest_retention=1000)
NOW = datetime(2030, 1, 1, tzinfo=UTC)
ID = UUID(REGION)

# -- the collector's decisions, on dictionaries


class View(RegionView):
    """The product's view of a region in memory; only the reading of bytes is replaced."""

    def _epoch_of(self, entry_id: int) -> int | None:
        entry: Entry = self.rules.table.region_in_memory.log[entry_id]  # type: ignore[attr-defined]
        return entry.epoch


Ages = Callable[[int], timedelta]


def view(region: MemoryRegion, layout: Layout, options: gc.GcOptions = PATIENT, ages: Ages | None = None) -> View:
    """What the collector sees; `ages` per entry, and per manifest as a negative number."""
    age = ages or (lambda _: timedelta(0))
    contents = RegionContents(ID)
    for position in region.log:
        contents.wal.add(position, ObjectMeta(f"{position}", 1, NOW - age(position), None))
    contents.wal.sort()
    read: dict[int, RegionManifest] = {}
    for version, one in region.manifests.items():
        contents.manifests[version] = FileState(1, NOW - age(-version))
        read[version] = decoded(one)
    history = _History()
    for version in sorted(read):
        history.claims.setdefault(read[version].writer_epoch, read[version])
    manifest = SimpleNamespace(manifest=SimpleNamespace(base_paths=()))
    index = SimpleNamespace(merged_generations={ID: 1 << 40})
    table: Any = SimpleNamespace(layout=layout, index=index, manifest=manifest, region_in_memory=region)
    newest = read[max(read)]
    return View(Rules(table, Retention(), {}, NOW, options), contents, newest, newest, _history=history)


def decoded(one: Manifest) -> RegionManifest:
    return RegionManifest(
        region_id=ID,
        version=one.version,
        region_spec_id=0,
        writer_epoch=one.epoch,
        replay_after_wal_id=one.replay_after,
        wal_id_last_seen=one.last_seen,
        current_generation=one.current_generation,
        flushed_generations=(),
        status=0,
    )


Collector = Callable[[MemoryRegion, Layout], set[int]]


def by_proof(region: MemoryRegion, layout: Layout) -> set[int]:
    """The entries that gc deletes."""
    if not region.manifests:
        return set()
    items = view(region, layout).wal_entries()
    return {wire.from_bit_reversed(one.path.rsplit("/", 1)[-1]) for one in items if one.verdict is Verdict.DELETE}


def forgetful(region: MemoryRegion, layout: Layout) -> set[int]:
    """The same, where the manifests that made the claims are collected first."""
    newest = region.newest()
    region.manifests = {version: one for version, one in region.manifests.items() if version > newest.version - 2}
    return by_proof(region, layout)


def everything(region: MemoryRegion, _: Layout) -> set[int]:
    """Landmine 3: all that is flushed."""
    return {position for position in region.log if position <= region.newest().replay_after}


def but_first_entries(region: MemoryRegion, layout: Layout) -> set[int]:
    """All but the first entry of each epoch."""
    first: dict[int, int] = {}
    for position in sorted(region.log):
        first.setdefault(region.log[position].epoch, position)
    return everything(region, layout) - set(first.values())


def but_first_entries_and_the_last(region: MemoryRegion, layout: Layout) -> set[int]:
    """All but the first entry of each epoch, and the last of the log."""
    return but_first_entries(region, layout) - {max(region.log, default=0)}


# -- all interleavings


class HintedWriter(SpecWriter):
    """Looks behind `wal_id_last_seen` (S0-122's other reading), which only a snapshot builder keeps: `note`."""

    def look(self) -> None:
        claimed = self.claimed
        self.claimed = replace(claimed, replay_after=claimed.last_seen or claimed.replay_after)
        super().look()
        self.claimed = claimed

    def note(self) -> None:
        newest = self.region.newest()
        self.region.publish(replace(newest, version=newest.version + 1, last_seen=self.position - 1))

    def seen(self, newest: Manifest, _: int) -> int:
        return newest.last_seen

    def steps(self) -> list[str]:
        noted = self.doing != "ready" or self.region.newest().last_seen
        return super().steps() if noted or self.position == 1 else [*super().steps(), "note"]


@dataclass(frozen=True)
class World:
    """A moment: the region, its writers, what collectors have planned and not deleted yet, and how it came to be."""

    region: MemoryRegion
    writers: tuple[SpecWriter, ...]
    plans: tuple[frozenset[int], ...]
    entries: int = 0
    flushes: int = 0
    path: tuple[str, ...] = ()

    def key(self) -> object:
        """Its state, but for the names of rows."""
        writers = tuple(one.key() for one in self.writers)
        return self.region.key(), writers, self.plans, self.entries, self.flushes

    def after(self, step: str, **changes: Any) -> World:
        """The next moment, in a copy of everything."""
        region = self.region.copy()
        writers = tuple(one.on(region) for one in self.writers)
        return replace(self, region=region, writers=writers, path=(*self.path, step), **changes)

    @property
    def lost(self) -> bool:
        """Whether a row was acknowledged that nobody reads any more."""
        return not {row for one in self.writers for row in one.acknowledged} <= self.region.readable()


@dataclass(frozen=True)
class Bounds:
    """How far the search goes: most writers, entries and flushes in one history, collectors at once."""

    writers: int
    entries: int
    flushes: int
    collectors: int = 1


class Search:
    """Depth first through all orders of steps; each state is visited once.

    Attributes:
        lost: a history in which a row was acknowledged and lost; empty: there is none.
        deleted, refused: how many deletions changed something, how many writers learned that they are fenced.
    """

    def __init__(self, kind: type[SpecWriter], collector: Collector, bounds: Bounds) -> None:
        self.collector, self.bounds = collector, bounds
        self.layout = Layout.SHARD if kind is PylanceWriter else Layout.REGION
        self.lost = ""
        self.deleted = self.refused = 0
        self._known: dict[object, frozenset[int]] = {}
        region = MemoryRegion()
        writers = tuple(kind(region) for _ in range(bounds.writers))
        stack = [World(region, writers, (frozenset(),) * bounds.collectors)]
        seen: set[object] = set()
        while stack and not self.lost:
            world = stack.pop()
            if (key := world.key()) in seen:
                continue
            seen.add(key)
            if world.lost:
                self.lost = ", ".join(world.path)
            stack += self._collections(world)
            stack += self._writes(world)

    def _collections(self, world: World) -> Iterator[World]:
        for number, planned in enumerate(world.plans):
            if planned:
                after = world.after(f"gc {number} deletes")
                for position in planned & after.region.log.keys():
                    del after.region.log[position]
                self.deleted += len(after.region.log) < len(world.region.log)
                yield replace(after, plans=(*after.plans[:number], frozenset(), *after.plans[number + 1 :]))
                continue
            after = world.after(f"gc {number} plans")
            plan = self._plan(after.region)
            if plan:
                assert max(plan) <= world.region.newest().replay_after
                yield replace(after, plans=(*after.plans[:number], plan, *after.plans[number + 1 :]))
            if not number or world.plans[number - 1]:
                break  # they are alike

    def _plan(self, region: MemoryRegion) -> frozenset[int]:
        """What the collector would delete; asked once for each state of the region, if the manifests stay."""
        key = region.key()
        if key in self._known:
            return self._known[key]
        plan = frozenset(self.collector(region, self.layout))
        if region.key() == key:
            self._known[key] = plan
        return plan

    def _writes(self, world: World) -> Iterator[World]:
        for number, one in enumerate(world.writers):
            for step in one.steps():
                new = step == "put" and one.row is None
                flushes = step == "flush" and bool(one.flushable(world.region.newest()))
                bounded = (new and world.entries == self.bounds.entries) or (
                    step == "flush" and (not flushes or world.flushes == self.bounds.flushes)
                )
                if bounded:
                    continue
                after = world.after(f"{number} {step}", entries=world.entries + new, flushes=world.flushes + flushes)
                acting = after.writers[number]
                if step == "put":
                    acting.put(world.entries if one.row is None else one.row)
                else:
                    getattr(acting, step)()
                self.refused += step == "check" and acting.doing == "fenced"
                yield after
            if one.doing == "new":
                break  # they are alike


@pytest.mark.req("S0-209")
@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        (SpecWriter, Bounds(writers=3, entries=5, flushes=1)),
        (SpecWriter, Bounds(writers=2, entries=5, flushes=2, collectors=2)),
        (HintedWriter, Bounds(writers=2, entries=4, flushes=2)),
        (PylanceWriter, Bounds(writers=3, entries=3, flushes=2)),
        (PylanceWriter, Bounds(writers=2, entries=4, flushes=3, collectors=2)),
    ],
)
def test_no_interleaving_loses_a_row_that_was_acknowledged(kind: type[SpecWriter], bounds: Bounds) -> None:
    """Also where gc deletes much later than it planned, twice, and two at once."""
    search = Search(kind, by_proof, bounds)
    assert search.lost == ""
    assert search.deleted > 10
    assert search.refused > 10


@pytest.mark.parametrize("kind", [SpecWriter, PylanceWriter])
def test_nor_where_the_manifests_of_claims_are_collected(kind: type[SpecWriter]) -> None:
    search = Search(kind, forgetful, Bounds(writers=2, entries=4, flushes=2))
    assert search.lost == ""
    assert search.deleted > 10


@pytest.mark.parametrize("kind", [SpecWriter, HintedWriter, PylanceWriter])
def test_without_a_collector_nothing_is_lost(kind: type[SpecWriter]) -> None:
    """The writers themselves are sound, so that what the search finds is the collector's doing."""
    search = Search(kind, lambda *_: set(), Bounds(writers=3, entries=3, flushes=1))
    assert search.lost == ""
    assert search.refused > 10


@pytest.mark.parametrize("collector", [everything, but_first_entries, but_first_entries_and_the_last])
@pytest.mark.parametrize("kind", [SpecWriter, PylanceWriter])
def test_the_search_finds_what_simpler_rules_lose(kind: type[SpecWriter], collector: Collector) -> None:
    assert Search(kind, collector, Bounds(writers=3, entries=4, flushes=1)).lost


@pytest.mark.parametrize(
    ("kind", "bounds", "rule"),
    [
        (SpecWriter, Bounds(3, 5, 1), "the first entry"),
        (SpecWriter, Bounds(3, 5, 1), "may go on here"),
        (SpecWriter, Bounds(3, 5, 1), "behind a newer one"),
        (HintedWriter, Bounds(2, 4, 2), "looks for the end"),
        (PylanceWriter, Bounds(3, 4, 2), "the last entry"),
        (PylanceWriter, Bounds(3, 4, 2), "the first entry"),
        (PylanceWriter, Bounds(3, 4, 2), "still have to read"),
        (PylanceWriter, Bounds(3, 4, 2), "may go on here"),
    ],
)
def test_no_rule_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, kind: type[SpecWriter], bounds: Bounds, rule: str
) -> None:
    """Each kind of fence post is what stands between some history and a loss."""
    all_posts = FencePosts._posts
    monkeypatch.setattr(
        FencePosts,
        "_posts",
        lambda self, run, at: [one for one in all_posts(self, run, at) if rule not in one.what],
    )
    assert Search(kind, by_proof, bounds).lost


# -- how long


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
    items = view(region, Layout.REGION, options, ages).wal_entries()
    return [wire.from_bit_reversed(one.path.rsplit("/", 1)[-1]) for one in items if one.verdict is not Verdict.DELETE]


DAY = timedelta(days=1)


def test_posts_go_when_the_next_ones_are_old() -> None:
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


def test_a_region_that_nobody_writes_to() -> None:
    region = lived_through([0, 0, 4, 0], silent=2)
    assert left(region, lambda _: DAY) == [1, 2, 3, 4]
    assert left(region, lambda _: 31 * DAY) == [1, 4]
    assert left(lived_through([0]), lambda _: DAY) == []


def test_posts_of_a_real_table_go_by_the_times_of_their_files(tmp_path: Path) -> None:
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


# -- real tables: the specification's writer, the whole collector


def region_table(folder: Path) -> TableRegion:
    """A table of the region layout, without a writer so far."""
    made = RegionLayout(1, regions=1, base_rows=10, with_btree=False)
    return TableRegion(made.create(f"{folder}/t.lance"))


def collect(uri: str, options: gc.GcOptions = PATIENT) -> gc.GcReport:
    """Merge, let old versions go, then collect twice: what the first run drained, the second finds drained."""
    merge.apply(open_table(uri), merge.MergeOptions())
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    gc.apply(open_table(uri), options)
    return gc.apply(open_table(uri), options)


def readable(region: TableRegion) -> set[int]:
    """The rows of the table: what is merged, what is flushed, what a writer would replay."""
    rows = {key for (key,) in region.made.read_spec()}
    return rows | region.replayed()


def perform(region: TableRegion, writers: list[SpecWriter], step: str, row: int) -> None:
    """One step of a history, as `Search` writes them down."""
    who, _, what = step.partition(" ")
    if who == "gc":
        collect(region.made.uri)
    elif what == "put":
        one = writers[int(who)]
        one.put(row if one.row is None else one.row)
    else:
        getattr(writers[int(who)], what)()


LOSSES = {
    # Epoch 2 looks for the end of the log when what it would have found was flushed and collected.
    "late look": "0 claim, 0 look, 0 put, 0 put, 1 claim, 2 claim, 2 look, 2 put, 2 flush, 2 put, gc, 1 look, 1 put",
    # Epoch 1 looks only when epoch 2 wrote already, and its next position is not the first entry of epoch 2.
    "behind a newer one": (
        "0 claim, 1 claim, 1 look, 1 put, 0 look, 1 put, 1 put, 1 flush, 1 put, gc, 0 put"
    ),
    # Epoch 1 writes between entries of epoch 2, where a bisection does not look.
    "between": (
        "0 claim, 1 claim, 1 look, 1 put, 0 look, 0 put, 1 put, 1 check, 1 put, 1 flush, 1 put, gc, 0 put"
    ),
    # Epoch 2 goes on behind what the late epoch 1 wrote, which has the next position too.
    "hopping": (
        "0 claim, 1 claim, 1 look, 1 put, 0 look, 0 put, 1 put, 1 check, 2 claim, 2 look, 0 put, 2 put, 2 check, "
        "2 put, 2 flush, 2 put, gc, 1 put"
    ),
}  # fmt: skip


@pytest.mark.req("S0-209")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_simpler_rules_on_a_real_table(tmp_path: Path, name: str) -> None:
    """Each of these lost an acknowledged row where only the first entry of each epoch was kept."""
    region = region_table(tmp_path)
    writers = [SpecWriter(region) for _ in range(3)]
    for row, step in enumerate(LOSSES[name].split(", "), 100):
        perform(region, writers, step, row)
        acknowledged = {row for one in writers for row in one.acknowledged}
        assert acknowledged <= readable(region), step
    memory = MemoryRegion()
    simple = [SpecWriter(memory) for _ in range(3)]
    for row, step in enumerate(LOSSES[name].split(", "), 100):
        if step == "gc":
            for position in but_first_entries(memory, Layout.REGION):
                del memory.log[position]
        else:
            perform(memory, simple, step, row)  # type: ignore[arg-type]
    assert not {row for one in simple for row in one.acknowledged} <= memory.readable()


@pytest.mark.req("S0-209")
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_on_a_real_table(tmp_path: Path, seed: int) -> None:
    """Up to five writers, any of which may stall at any step; the collector is the product's own."""
    rng = random.Random(seed)
    done = {"gc": 0, "fenced": 0}
    for number in range(12):
        region = region_table(tmp_path / str(number))
        writers: list[SpecWriter] = []
        path: list[str] = []
        for row in range(100, 100 + rng.randint(15, 40)):
            if not writers or (len(writers) < 5 and rng.random() < 0.12):
                writers.append(SpecWriter(region))
            moves = [f"{at} {step}" for at, one in enumerate(writers) for step in one.steps()]
            step = "gc" if not moves or rng.random() < 0.12 else rng.choice(moves)
            path.append(step)
            if step == "gc":
                if region.newest().version:
                    before = set(region.positions())
                    collect(region.made.uri, rng.choice([PATIENT, AT_ONCE]))
                    done["gc"] += set(region.positions()) < before
                continue
            perform(region, writers, step, row)
        done["fenced"] += sum(one.doing == "fenced" for one in writers)
        acknowledged = {row for one in writers for row in one.acknowledged}
        assert acknowledged <= readable(region), (seed, number, path)
    assert min(done.values()) > 5, done


# -- pylance's real writers


class Histories:
    """All histories of some steps: claim (the next writer opens), put, close, gc."""

    def __init__(self, writers: int, steps: int) -> None:
        self.writers, self.steps = writers, steps

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return self._from((), 0, frozenset())

    def _from(self, path: tuple[str, ...], claimed: int, standing: frozenset[int]) -> Iterator[tuple[str, ...]]:
        if len(path) == self.steps:
            if "gc" in path and standing:
                yield path
            return
        if path[-1:] != ("gc",):
            yield from self._from((*path, "gc"), claimed, standing)
        if claimed < self.writers:
            yield from self._from((*path, "claim"), claimed + 1, standing | {claimed})
        for one in standing:
            yield from self._from((*path, f"put {one}"), claimed, standing)
            if one == claimed - 1:  # whoever is fenced flushes nothing when it closes
                yield from self._from((*path, f"close {one}"), claimed, standing - {one})


def lived(template: str, folder: Path, history: tuple[str, ...]) -> tuple[int, int]:
    """One history on a copy of a table; how many late puts were refused, and how many believed.

    In the end all writers wake, the oldest first, then all close, and the next reader must find every row
    that was acknowledged.
    """
    uri = str(folder / "t.lance")
    shutil.copytree(template, uri)
    writers: dict[int, Any] = {}
    acknowledged: set[int] = set()
    row = 1000
    outcome = [0, 0]

    def put(number: int) -> None:
        nonlocal row
        row += 1
        try:
            writers[number].put(rows(row, row + 1))
        except (OSError, RuntimeError) as error:
            assert "fenced" in str(error), error
            outcome[0] += 1
        else:
            acknowledged.add(row)
            outcome[1] += 1

    for step in history:
        what, _, number = step.partition(" ")
        if what == "gc":
            collect(uri, AT_ONCE)
        elif what == "claim":
            writers[max(writers, default=-1) + 1] = writer(uri)
        elif what == "put":
            put(int(number))
        else:
            writers[int(number)].close()
            writers[int(number)] = None
    for number in sorted(number for number, one in writers.items() if one is not None):
        put(number)
    for number in sorted((number for number, one in writers.items() if one is not None), reverse=True):
        with contextlib.suppress(OSError, RuntimeError):
            writers[number].close()
    with writer(uri) as after:
        there = set(after.lsm_scanner().to_table()["id"].to_pylist())
    assert acknowledged <= there, (history, sorted(acknowledged - there))
    shutil.rmtree(folder)
    return outcome[0], outcome[1]


@pytest.fixture(scope="module")
def flushed_table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A region whose first writer wrote three entries, flushed them and closed."""
    uri = make(tmp_path_factory.mktemp("flushed"), rows(0, 1), btree=False)
    with writer(uri) as first:
        for one in (10, 11, 12):
            first.put(rows(one, one + 1))
    return uri


@pytest.mark.req("S0-209")
@pytest.mark.parametrize("part", range(4))
def test_every_order_of_pylance_writers(tmp_path: Path, flushed_table: str, part: int) -> None:
    """All histories of five steps of three writers and gc; then everybody wakes."""
    refused = believed = 0
    for number, history in enumerate(Histories(writers=3, steps=5)):
        if number % 4 == part:
            one, other = lived(flushed_table, tmp_path / str(number), history)
            refused, believed = refused + one, believed + other
    assert refused > 20
    assert believed > 20


@pytest.mark.req("S0-209")
def test_longer_histories_of_pylance_writers(tmp_path: Path, flushed_table: str) -> None:
    """Some of those with eight steps."""
    every = 499
    refused = 0
    for number, history in enumerate(Histories(writers=3, steps=8)):
        if number % every == 0:
            refused += lived(flushed_table, tmp_path / str(number), history)[0]
    assert refused > 20
