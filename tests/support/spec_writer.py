"""A region writer that follows the specification step by step, so that a test can stall it between any two.

The same steps run on dictionaries (`MemoryRegion`, for all interleavings) and on a real table of the
region layout (`TableRegion`). The writer is as trusting as the specification lets it be: it never looks
at a manifest before a write, and reads past entries of newer epochs when it looks for the end of the
log. `PylanceWriter` does what pylance 14 does: a sentinel when it claims, and a replay that stops at
newer epochs; the real one cannot be stalled within its opening.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import UUID

import pyarrow as pa
from obstore.exceptions import AlreadyExistsError

from memwal_ops.formats.lance.log.region_files import put_entry, put_generation, read_entry
from memwal_ops.formats.lance.wire.region_manifest import (
    FlushedGeneration,
    RegionManifest,
    RegionStatus,
    encode_region_manifest,
)
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import TOMBSTONE


@dataclass(frozen=True)
class Manifest:
    """One version of a region manifest."""

    version: int = 0
    epoch: int = 0
    replay_after: int = 0
    last_seen: int = 0
    current_generation: int = 1
    generations: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Entry:
    """A WAL entry; `row` is None in a sentinel."""

    epoch: int
    row: int | None


class Region(Protocol):
    """What writers need of a store."""

    def newest(self) -> Manifest: ...
    def publish(self, manifest: Manifest) -> bool: ...
    def entry(self, position: int) -> Entry | None: ...
    def put_entry(self, position: int, entry: Entry) -> bool: ...
    def positions(self) -> Iterable[int]: ...
    def put_generation(self, generation: int, positions: list[int]) -> str: ...


@dataclass
class MemoryRegion:
    """A region in dictionaries; nothing is ever overwritten."""

    manifests: dict[int, Manifest] = field(default_factory=dict)
    log: dict[int, Entry] = field(default_factory=dict)
    flushed: frozenset[int] = frozenset()

    def copy(self) -> MemoryRegion:
        return MemoryRegion(dict(self.manifests), dict(self.log), self.flushed)

    def key(self) -> object:
        """Its state, but for the names of rows."""
        manifests = ((v, m.epoch, m.replay_after, m.last_seen) for v, m in self.manifests.items())
        return frozenset((at, one.epoch, one.row is None) for at, one in self.log.items()), frozenset(manifests)

    def newest(self) -> Manifest:
        return self.manifests[max(self.manifests)] if self.manifests else Manifest()

    def publish(self, manifest: Manifest) -> bool:
        return self.manifests.setdefault(manifest.version, manifest) is manifest

    def entry(self, position: int) -> Entry | None:
        return self.log.get(position)

    def put_entry(self, position: int, entry: Entry) -> bool:
        return self.log.setdefault(position, entry) is entry

    def positions(self) -> Iterable[int]:
        return self.log

    def put_generation(self, generation: int, positions: list[int]) -> str:
        rows = {entry.row for at in positions if (entry := self.log[at]).row is not None}
        self.flushed |= {row for row in rows if row is not None}
        return f"gen_{generation}"

    def readable(self) -> set[int]:
        """Rows that the next reader finds: in generations, or in the log behind `replay_after`."""
        at, rows = self.newest().replay_after + 1, set(self.flushed)
        while at in self.log:
            row = self.log[at].row
            rows |= set() if row is None else {row}
            at += 1
        return rows


class TableRegion:
    """A region of a real table, unclaimed at first."""

    def __init__(self, made: RegionLayout) -> None:
        self.made, self.region = made, made.regions[0]
        self.files, self.store, self.id = Files(made.uri), open_store(resolve(made.uri)), UUID(self.region)
        self.folder = f"_mem_wal/{self.region}"
        for path in self.files.listing(f"{self.folder}/manifest"):
            self.files.delete(path)

    def newest(self) -> Manifest:
        if not self.files.listing(f"{self.folder}/manifest"):
            return Manifest()
        found = wire.region_manifest(self.files, self.region)
        seen = int(wire.get(found.fields, 4))
        generations = tuple(sorted(found.generations.items()))
        return Manifest(found.version, found.epoch, found.replay_after, seen, found.current_generation, generations)

    def publish(self, manifest: Manifest) -> bool:
        listed = tuple(FlushedGeneration(number, name) for number, name in manifest.generations)
        message = encode_region_manifest(
            RegionManifest(
                self.id, manifest.version, 0, manifest.epoch, manifest.replay_after or None, manifest.last_seen or None,
                manifest.current_generation, listed, RegionStatus.ACTIVE,
            )
        )  # fmt: skip
        if not self._put_new(f"manifest/{wire.bit_reversed(manifest.version)}.binpb", message):
            return False
        self.files.put(f"{self.folder}/manifest/version_hint.json", b'{"version": %d}' % manifest.version)
        return True

    def entry(self, position: int) -> Entry | None:
        found = read_entry(self.store, self.id, position)
        return None if found is None else Entry(found.writer_epoch, found.rows["id"].to_pylist()[0])

    def put_entry(self, position: int, entry: Entry) -> bool:
        columns = self.made._columns
        schema = pa.schema([one for one in columns.schema if one.name != TOMBSTONE])
        row = columns.put_rows(pa.Table.from_pylist([{"id": entry.row}], schema=schema))
        return put_entry(self.store, self.id, position, row, entry.epoch, columns) is not None

    def positions(self) -> Iterable[int]:
        return [wire.from_bit_reversed(path.rsplit("/", 1)[-1]) for path in self.files.listing(f"{self.folder}/wal")]

    def put_generation(self, generation: int, positions: list[int]) -> str:
        name = f"{self.made.rng.getrandbits(32):08x}_gen_{generation}"
        entries = [entry for at in positions if (entry := read_entry(self.store, self.id, at)) is not None]
        assert len(entries) == len(positions)
        assert put_generation(self.store, resolve(self.made.uri), self.id, name, entries, self.made._columns)
        return name

    def replayed(self) -> set[int]:
        """Rows that a writer would replay: in the log behind `replay_after`."""
        at, rows = self.newest().replay_after + 1, set()
        while (entry := self.entry(at)) is not None:
            rows.add(entry.row)
            at += 1
        return {row for row in rows if row is not None}

    def _put_new(self, path: str, data: bytes) -> bool:
        try:
            self.files.put_new(f"{self.folder}/{path}", data)
        except AlreadyExistsError:
            return False
        return True


@dataclass
class SpecWriter:
    """One writer; every public method is one step. `doing` says which one may come next.

    Attributes:
        doing: new, claimed, ready (for a put or a flush), collided (with a put), or fenced.
        position: where its next entry goes.
        acknowledged: rows that it promised.
    """

    region: Region
    doing: str = "new"
    claimed: Manifest = Manifest()
    position: int = 0
    row: int | None = None
    acknowledged: frozenset[int] = frozenset()

    def on(self, region: Region) -> SpecWriter:
        """The same writer in a copy of its world."""
        other = copy.copy(self)
        other.region = region
        return other

    def claim(self) -> None:
        """S0-120, S0-121: the next epoch by put-if-not-exists."""
        while True:
            newest = self.region.newest()
            mine = replace(newest, version=newest.version + 1, epoch=newest.epoch + 1)
            if self.region.publish(mine):
                self.claimed, self.doing = mine, "claimed"
                return

    def look(self) -> None:
        """S0-122: read the log from the claim's `replay_after` on, until an entry is missing."""
        self.position = self.claimed.replay_after + 1
        while self.region.entry(self.position) is not None:
            self.position += 1
        self.doing = "ready"

    def put(self, row: int) -> bool:
        """Write an entry at the own position; whether that was acknowledged. Not: `check` comes next."""
        if not self.region.put_entry(self.position, Entry(self.claimed.epoch, row)):
            self.row, self.doing = row, "collided"
            return False
        self.position += 1
        self.acknowledged |= {row}
        self.row, self.doing = None, "ready"
        return True

    def check(self) -> None:
        """After a collision: fenced by a newer epoch, or the next position."""
        if self.region.newest().epoch > self.claimed.epoch:
            self.doing = "fenced"
        else:
            self.position += 1
            self.doing = "ready"

    def flush(self) -> None:
        """All entries behind `replay_after` become a generation (S0-145 and on), unless it is fenced (S0-154)."""
        while True:
            newest = self.region.newest()
            if newest.epoch > self.claimed.epoch:
                self.doing = "fenced"
                return
            positions = self.flushable(newest)
            if not positions:
                return
            number = newest.current_generation
            flushed = replace(
                newest,
                version=newest.version + 1,
                replay_after=positions[-1],
                last_seen=self.seen(newest, positions[-1]),
                current_generation=number + 1,
                generations=(*newest.generations, (number, self.region.put_generation(number, positions))),
            )
            if self.region.publish(flushed):
                return

    def seen(self, newest: Manifest, flushed: int) -> int:
        """What a flush writes down as `wal_id_last_seen`."""
        return max(newest.last_seen, flushed)

    def flushable(self, newest: Manifest) -> list[int]:
        """What it would flush."""
        return list(range(newest.replay_after + 1, self.position))

    def steps(self) -> list[str]:
        """What it may do next, as the names of methods."""
        return {
            "new": ["claim"], "claimed": ["look"], "ready": ["put", "flush"], "collided": ["check"], "fenced": [],
        }[self.doing]  # fmt: skip

    def key(self) -> object:
        """Its state, but for the names of rows."""
        claimed = self.claimed
        return (self.doing, claimed.epoch, claimed.replay_after, claimed.last_seen, self.position, self.row is None)


@dataclass
class PylanceWriter(SpecWriter):
    """As pylance 14 opens a region: claim, sentinel at the end of the log, replay; then it writes and flushes.

    Its generation has what it replayed and what it wrote itself: `held`. What somebody else put in between
    is passed over.
    """

    held: frozenset[int] = frozenset()

    def claim(self) -> None:
        super().claim()
        if self.claimed.epoch > 1:
            self.doing = "unmarked"

    def mark(self) -> None:
        """Put the sentinel where the log ends: by the hint of the own claim, else behind the highest name."""
        while True:
            at = self.claimed.last_seen
            if self.region.entry(at) is None:
                at = max(self.region.positions(), default=0)
            while self.region.entry(at + 1) is not None:
                at += 1
            if self.region.put_entry(at + 1, Entry(self.claimed.epoch, None)):
                self.doing = "claimed"
                return

    def look(self) -> None:
        """Replay; an entry of a newer epoch means that it is fenced."""
        self.position = self.claimed.replay_after + 1
        while (entry := self.region.entry(self.position)) is not None:
            if entry.epoch > self.claimed.epoch:
                self.doing = "fenced"
                return
            self.held |= {self.position}
            self.position += 1
        self.doing = "ready"

    def put(self, row: int) -> bool:
        at = self.position
        if not super().put(row):
            return False
        self.held |= {at}
        return True

    def flush(self) -> None:
        region = self.region
        self.region = _Held(region, self.held)
        super().flush()
        self.region = region

    def steps(self) -> list[str]:
        return ["mark"] if self.doing == "unmarked" else super().steps()

    def key(self) -> object:
        return (super().key(), self.held)


class _Held:
    """A region into which only some entries are flushed."""

    def __init__(self, region: Region, held: frozenset[int]) -> None:
        self._region, self._held = region, held
        self.newest: Callable[[], Manifest] = region.newest
        self.publish: Callable[[Manifest], bool] = region.publish
        self.entry: Callable[[int], Entry | None] = region.entry
        self.put_entry: Callable[[int, Entry], bool] = region.put_entry
        self.positions: Callable[[], Iterable[int]] = region.positions

    def put_generation(self, generation: int, positions: list[int]) -> str:
        return self._region.put_generation(generation, [at for at in positions if at in self._held])
