"""A fenced writer that wakes after gc is refused, or its rows are read: in every interleaving.

An acknowledged row must stay readable. All interleavings of the steps of several writers and gc are
tried on dictionaries, with the collector's own decisions (`WalView`). That the search finds losses at
all is shown by collectors that keep too little. test_gc_fencing_tables.py tries a part of them on real
tables, with the whole collector, and pylance's real writers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from memwal_ops.formats.lance.jobs.gc.wal import FencePosts
from memwal_ops.formats.lance.layouts import REGION as REGION_LAYOUT, SHARD as SHARD_LAYOUT
from tests.campaigns.crash.fencing import (
    Collector,
    but_first_entries,
    but_first_entries_and_the_last,
    by_proof,
    everything,
    forgetful,
)
from tests.support.spec_writer import Manifest, MemoryRegion, PylanceWriter, SpecWriter


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
        """Whether a row was acknowledged that no reader finds any more."""
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
        self.layout = SHARD_LAYOUT if kind is PylanceWriter else REGION_LAYOUT
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
        (SpecWriter, Bounds(3, 5, 1), "may write here"),
        (SpecWriter, Bounds(3, 5, 1), "after a newer epoch"),
        (HintedWriter, Bounds(2, 4, 2), "searches for the end"),
        (PylanceWriter, Bounds(3, 4, 2), "the last entry"),
        (PylanceWriter, Bounds(3, 4, 2), "the first entry"),
        (PylanceWriter, Bounds(3, 4, 2), "still have to read"),
        (PylanceWriter, Bounds(3, 4, 2), "may write here"),
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
