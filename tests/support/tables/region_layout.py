"""The region layout of the specification, by the product's own parts of a writer (`memwal/region_files.py`).

No more than its parts: tests put epochs, claims and flushes in orders that a writer refuses. Zero copy: a generation
is a Lance table whose fragments lie in `wal/` by `base_paths`; a key that was written twice stands twice in it (the
newest has the highest row address), and nothing hides the older row, as other writers may leave it.
Left out: bloom_filter.bin, deletion vectors, the key index and the generations' own indexes, which no merge needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError

from memwal_ops import open_table
from memwal_ops.formats.lance.log.create import create_mem_wal
from memwal_ops.formats.lance.log.region_columns import region_columns
from memwal_ops.formats.lance.log.region_files import WalEntry, put_entry, put_generation
from memwal_ops.formats.lance.wire.names import region_folder, region_manifest_name
from memwal_ops.formats.lance.wire.region_manifest import (
    FlushedGeneration,
    RegionManifest,
    RegionStatus,
    encode_region_manifest,
    encode_version_hint,
)
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.locations import Location
from memwal_ops.storage.objects import open_store
from tests.support.tables.files import Files
from tests.support.tables.lsm_table import LsmTable


class _NoKeyFiles:
    """A store that takes of a generation its manifest alone, and that without deletion vectors."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if "/_versions/" not in path:
            return True
        found = decode_version_manifest(data)
        for fragment in found.manifest.fragments:
            fragment.ClearField("deletion_file")
        found.manifest.reader_feature_flags &= ~1
        found.manifest.writer_feature_flags &= ~1
        return bool(self._store.put_if_absent(path, encode_version_manifest(found)))


@dataclass
class _Region:
    """What a region's writer knows; `pending` are the WAL entries that no generation holds yet."""

    version: int = 0
    epoch: int = 1
    replay_after: int = 0
    last_entry: int = 0
    current_generation: int = 1
    generations: dict[int, str] = field(default_factory=dict)
    pending: list[WalEntry] = field(default_factory=list)

    def manifest(self, region: str) -> RegionManifest:
        """The manifest that says so."""
        listed = tuple(FlushedGeneration(number, path) for number, path in sorted(self.generations.items()))
        return RegionManifest(
            UUID(region), self.version, 0, self.epoch, self.replay_after or None, self.last_entry or None,
            self.current_generation, listed, RegionStatus.ACTIVE,
        )  # fmt: skip


class RegionLayout(LsmTable):
    """The same interface as Workload, over the specification's layout; it takes every key type.

    Args:
        tombstones: carry deletes in a `_tombstone` bool column, as pylance does; without it the
            generations have the base's columns alone, as in the specification, and deletes are refused.
    """

    def __init__(self, seed: int, *, tombstones: bool = True, **options: Any) -> None:
        super().__init__(seed, **options)
        self.tombstones = tombstones
        self._states = {region: _Region() for region in self.regions}

    def _initialize(self, dataset: lance.LanceDataset) -> None:
        create_mem_wal(self._location, open_store(self._location))
        self._columns = region_columns(open_table(self.uri, self.storage_options), tombstones=self.tombstones)
        for region in self.regions:
            self._publish(region)

    def onto_branch(self, name: str) -> RegionLayout:
        super().onto_branch(name)
        self._states = {region: _Region() for region in self.regions}
        for region in self.regions:
            self._publish(region)
        return self

    @property
    def _location(self) -> Location:
        return resolve(self.uri, self.storage_options)

    def _publish(self, region: str) -> None:
        """The next region manifest version, by put-if-not-exists, then the hint."""
        state = self._states[region]
        state.version += 1
        files, folder = Files(self._location.uri, self.storage_options), f"{region_folder(UUID(region))}/manifest"
        try:
            files.put_new(
                f"{folder}/{region_manifest_name(state.version)}", encode_region_manifest(state.manifest(region))
            )
        except AlreadyExistsError:
            # A snapshot builder wrote the end of the log down (S0-172): its version has nothing else that is new.
            self._publish(region)
            return
        files.put(f"{folder}/version_hint.json", encode_version_hint(state.version))

    def _append(self, region: str, rows: pa.Table) -> int:
        state = self._states[region]
        state.last_entry += 1
        store = open_store(self._location)
        entry = put_entry(store, UUID(region), state.last_entry, rows, state.epoch, self._columns)
        assert entry is not None, f"entry {state.last_entry} of region {region} is there already"
        state.pending.append(entry)
        return state.current_generation

    def _put(self, region: str, rows: pa.Table) -> int:
        return self._append(region, self._columns.put_rows(rows))

    def _delete(self, region: str, keys: pa.Table) -> int:
        return self._append(region, self._columns.delete_rows(keys))

    def _flush(self, region: str) -> None:
        if self._states[region].pending:
            self.flush_generation(region)

    def flush_generation(self, region: str) -> str:
        """Flush also when nothing is pending: a generation without rows. Its path below the table."""
        state = self._states[region]
        number = state.current_generation
        folder = f"_mem_wal/{region}"
        files, location = Files(self._location.uri, self.storage_options), self._location
        # Whoever repeats its numbers (Hypothesis) must not come upon what an earlier writer died in.
        while files.listing(f"{folder}/{(name := f'{self.rng.getrandbits(32):08x}_gen_{number}')}"):
            pass
        store = _NoKeyFiles(open_store(location))
        assert put_generation(store, location, UUID(region), name, state.pending, self._columns)
        state.generations[number] = name
        state.current_generation += 1
        state.replay_after = state.last_entry
        state.pending = []
        self._publish(region)
        return f"{folder}/{name}"
