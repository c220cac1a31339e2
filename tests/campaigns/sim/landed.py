"""What stands in the logs of a table's regions, decoded from the files; and the model that it makes.

An entry of a log is the only proof of a write: one that was acknowledged stands in it, one that was not may. So the
model is what was seen in the logs, in their order, and nothing that a writer says of itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lance.file import LanceFileReader

from tests.campaigns.sim.writers import _TraitModel
from tests.support.tables import wire
from tests.support.tables.model import Operation
from tests.support.tables.schemas import TOMBSTONE

if TYPE_CHECKING:
    from tests.campaigns.sim.writers import Columns
    from tests.support.tables.model import Row

Stored = tuple[bool, tuple[tuple[str, object], ...]]
"""Whether a row is a tombstone, and its columns; of a tombstone those of the key."""


def stored(row: Row, keys: list[str], *, deleted: bool) -> Stored:
    """A row as it is compared with what was to be written."""
    return deleted, tuple((name, value) for name, value in sorted(row.items()) if not deleted or name in keys)


@dataclass(frozen=True)
class Landed:
    """One entry of a log."""

    epoch: int
    rows: list[Stored]


@dataclass
class Log:
    """Everything that a region's log and manifests ever showed."""

    entries: dict[int, Landed] = field(default_factory=dict)
    #: Per generation the last entry that it has.
    ends: dict[int, int] = field(default_factory=dict)
    epoch: int = 0
    generation: int = 1
    replay_after: int = 0
    version: int = 0

    @property
    def end(self) -> int:
        return max(self.entries, default=0)

    def unflushed(self) -> list[Stored]:
        """All rows that no generation has, in the order of the log."""
        return [row for at in sorted(self.entries) if at > self.replay_after for row in self.entries[at].rows]

    def generation_of(self, entry: int) -> int:
        """In which generation an entry stands, or will."""
        return next((number for number, end in sorted(self.ends.items()) if entry <= end), self.generation)


class LandedModel(_TraitModel):
    """The model of what stands in the logs; nothing is told to it, it looks."""

    def __init__(self, keys: list[str], columns: Columns) -> None:
        super().__init__(keys)
        self.columns = columns
        self.logs: dict[str, Log] = {}
        self._order: list[tuple[str, int]] = []

    def look(self, uri: str) -> None:
        """Read the entries and manifests that are new."""
        root = f"{uri}/_mem_wal"
        before = len(self._order), [one.version for one in self.logs.values()]
        for region in sorted(os.listdir(root)) if os.path.isdir(root) else ():
            log = self.logs.setdefault(region, Log())
            for entry, path in _numbered(f"{root}/{region}/wal", ".lance"):
                if entry not in log.entries:
                    assert entry == log.end + 1, f"{region}: entry {entry} was put behind entry {log.end}"
                    log.entries[entry] = self._decoded(path)
                    self._order.append((region, entry))
                    last = log.entries.get(entry - 1)
                    assert last is None or last.epoch <= log.entries[entry].epoch, (
                        f"{region}: entry {entry} is of epoch {log.entries[entry].epoch}, behind one of {last.epoch}"
                    )
            for version, path in _numbered(f"{root}/{region}/manifest", ".binpb"):
                if version > log.version:
                    self._look_at_manifest(region, log, path)
        if before != (len(self._order), [one.version for one in self.logs.values()]):
            self._tell()

    def _look_at_manifest(self, region: str, log: Log, path: str) -> None:
        with open(path, "rb") as file:
            manifest = wire.decode_region_manifest(file.read())
        assert manifest.version == log.version + 1, f"{region}: manifest {log.version + 1} was never seen"
        assert manifest.epoch in {log.epoch, log.epoch + 1}, f"{region}: epoch {log.epoch}, then {manifest.epoch}"
        assert manifest.current_generation - log.generation in {0, 1}
        assert log.replay_after <= manifest.replay_after <= log.end, (
            f"{region}: flushed up to {manifest.replay_after}, was {log.replay_after}, the log ends at {log.end}"
        )
        if manifest.current_generation > log.generation:
            log.ends[log.generation] = manifest.replay_after
        log.version, log.epoch = manifest.version, manifest.epoch
        log.generation, log.replay_after = manifest.current_generation, manifest.replay_after

    def _decoded(self, path: str) -> Landed:
        reader = LanceFileReader(path)
        rows = reader.read_all().to_table().to_pylist()
        epoch = int(reader.metadata().schema.metadata[b"writer_epoch"])
        return Landed(epoch, [stored(row, self.keys, deleted=row.pop(TOMBSTONE)) for row in rows])

    def _tell(self) -> None:
        """Make the operations of what was seen."""
        self.log.clear()
        for region, entry in self._order:
            log = self.logs[region]
            generation = log.generation_of(entry)
            for deleted, columns in log.entries[entry].rows:
                (row,) = self.columns.by_trait([dict(columns)])
                self.log.append(Operation(region, generation, self.key_of(row), None if deleted else row))


def _numbered(folder: str, suffix: str) -> list[tuple[int, str]]:
    """Number and path of the files of a folder that are named by reversed bits, ascending."""
    if not os.path.isdir(folder):
        return []
    names = [name for name in os.listdir(folder) if name.endswith(suffix) and "#" not in name]
    return sorted((wire.from_bit_reversed(name), f"{folder}/{name}") for name in names)
