"""A region writer that follows the specification step by step, so that a test can stall it between any two.

The same steps run on dictionaries (`MemoryRegion`, for all interleavings) and on a real table of the
region layout (`TableRegion`). The writer is as trusting as the specification lets it be: it never looks
at a manifest before a write, and reads past entries of newer epochs when it looks for the end of the
log. `PylanceWriter` does what pylance 14 does: a sentinel when it claims, and a replay that stops at
newer epochs; the real one cannot be stalled within its opening.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.dataset import DatasetBasePath
from lance.file import LanceFileReader, LanceFileWriter
from lance.fragment import DataFile, FragmentMetadata
from obstore.exceptions import AlreadyExistsError

from tests.tables import wire
from tests.tables.files import Files
from tests.tables.region_layout import RegionLayout
from tests.tables.schemas import TOMBSTONE


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
        self.files = Files(made.uri)
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
        numbers = [
            (1, manifest.version), (2, manifest.epoch), (3, manifest.replay_after),
            (4, manifest.last_seen), (6, manifest.current_generation),
        ]  # fmt: skip
        generations = [(8, wire.encode([(1, number), (2, name.encode())])) for number, name in manifest.generations]
        message = wire.encode([*(n for n in numbers if n[1]), *generations, wire.uuid_field(11, self.region)])
        if not self._put_new(f"manifest/{wire.bit_reversed(manifest.version)}.binpb", message):
            return False
        self.files.put(f"{self.folder}/manifest/version_hint.json", b'{"version": %d}' % manifest.version)
        return True

    def entry(self, position: int) -> Entry | None:
        path = self._wal(position)
        if not path.exists():
            return None
        reader = LanceFileReader(str(path))
        epoch = int((reader.metadata().schema.metadata or {})[b"writer_epoch"])
        return Entry(epoch, reader.read_all().to_table()["id"].to_pylist()[0])

    def put_entry(self, position: int, entry: Entry) -> bool:
        schema = self.made._schema.with_metadata({"writer_epoch": str(entry.epoch)})
        columns = [
            pa.array([entry.row], f.type) if f.name == "id"
            else pa.array([False]) if f.name == TOMBSTONE
            else pa.nulls(1, f.type)
            for f in schema
        ]  # fmt: skip
        staged = Path(self.made.uri).parent / f"staged-{position}-{entry.epoch}.lance"
        with LanceFileWriter(str(staged), schema, version=self.made._version) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        data = staged.read_bytes()
        staged.unlink()
        return self._put_new(f"wal/{wire.bit_reversed(position)}.lance", data)

    def positions(self) -> Iterable[int]:
        return [wire.from_bit_reversed(path.rsplit("/", 1)[-1]) for path in self.files.listing(f"{self.folder}/wal")]

    def put_generation(self, generation: int, positions: list[int]) -> str:
        name = f"{self.made.rng.getrandbits(32):08x}_gen_{generation}"
        template, root = self.made._template, os.path.abspath(self.made.uri)
        fragments = [
            FragmentMetadata(
                id=at,
                files=[
                    DataFile(
                        self._wal(position).name, template.fields, template.column_indices,
                        template.file_major_version, template.file_minor_version,
                        file_size_bytes=self._wal(position).stat().st_size, base_id=1,
                    )
                ],
                physical_rows=1,
            )
            for at, position in enumerate(positions)
        ]  # fmt: skip
        wal = DatasetBasePath(f"{root}/{self.folder}/wal", id=1, is_dataset_root=False)
        lance.LanceDataset.commit(
            f"{root}/{self.folder}/{name}",
            LanceOperation.Overwrite(self.made._schema, fragments, initial_bases=[wal]),
            enable_v2_manifest_paths=True,
        )
        return name

    def replayed(self) -> set[int]:
        """Rows that a writer would replay: in the log behind `replay_after`."""
        at, rows = self.newest().replay_after + 1, set()
        while (entry := self.entry(at)) is not None:
            rows.add(entry.row)
            at += 1
        return {row for row in rows if row is not None}

    def _wal(self, position: int) -> Path:
        return Path(self.made.uri, self.folder, "wal", f"{wire.bit_reversed(position)}.lance")

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
