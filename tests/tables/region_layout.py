"""The region layout of the specification: WAL entries are Lance files, generations point into them.

Written by hand for tests, as no release of pylance writes it. Zero copy: a generation is a Lance table
whose fragments lie in `wal/` by `base_paths`; a key that was written twice stands twice in it (the
newest has the highest row address), and nothing hides the older row. Left out: bloom_filter.bin and
the generations' own indexes, which no merge needs.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.dataset import DatasetBasePath, Index
from lance.file import LanceFileWriter
from lance.fragment import DataFile, FragmentMetadata
from obstore.exceptions import AlreadyExistsError

from tests.tables import wire
from tests.tables.files import Files
from tests.tables.lsm_table import LsmTable
from tests.tables.schemas import TOMBSTONE

_BASE_ID = 1


@dataclass
class _Region:
    """What a region's writer knows; `pending` are the WAL entries that no generation holds yet."""

    version: int = 0
    epoch: int = 1
    replay_after: int = 0
    last_entry: int = 0
    current_generation: int = 1
    generations: dict[int, str] = field(default_factory=dict)
    pending: list[tuple[int, int]] = field(default_factory=list)  # (entry id, rows)


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
        details = wire.encode([(1, time.time_ns() // 1_000_000)])  # a snapshot of no regions
        index = Index(
            uuid=str(uuid.uuid4()), name=wire.MEM_WAL_INDEX, fields=[], dataset_version=dataset.version,
            fragment_ids=set(), index_version=0, index_details=(wire.DETAILS_URL, details),
        )  # fmt: skip
        lance.LanceDataset.commit(
            self.uri, LanceOperation.CreateIndex([index], []),
            read_version=dataset.version, storage_options=self.storage_options,
        )  # fmt: skip
        self._version = dataset.data_storage_version
        self._schema = self.schema.append(pa.field(TOMBSTONE, pa.bool_())) if self.tombstones else self.schema
        self._template = self._data_file_template()
        for region in self.regions:
            self._publish(region)

    @property
    def _root(self) -> str:
        return self.uri if "://" in self.uri else os.path.abspath(self.uri)

    def _data_file_template(self) -> DataFile:
        """Field ids and column positions of these columns in one file, as pylance lays them out."""
        with tempfile.TemporaryDirectory() as folder:
            fields = pa.schema([f.with_nullable(True).remove_metadata() for f in self._schema])
            one = pa.table({f.name: pa.nulls(1, f.type) for f in fields}, schema=fields)
            made = lance.write_dataset(one, f"{folder}/t.lance", data_storage_version=self._version)
            return made.get_fragments()[0].metadata.files[0]

    def _publish(self, region: str) -> None:
        """The next region manifest version, by put-if-not-exists, then the hint."""
        state = self._states[region]
        state.version += 1
        generations = [(8, wire.encode([(1, g), (2, p.encode())])) for g, p in sorted(state.generations.items())]
        numbers = [
            (1, state.version), (2, state.epoch), (3, state.replay_after),
            (4, state.last_entry), (6, state.current_generation),
        ]  # fmt: skip
        message = wire.encode([*(n for n in numbers if n[1]), *generations, wire.uuid_field(11, region)])
        files, folder = Files(self._root, self.storage_options), f"_mem_wal/{region}/manifest"
        try:
            files.put_new(f"{folder}/{wire.bit_reversed(state.version)}.binpb", message)
        except AlreadyExistsError:
            # A snapshot builder wrote the end of the log down (S0-172): its version has nothing else that is new.
            self._publish(region)
            return
        files.put(f"{folder}/version_hint.json", b'{"version": %d}' % state.version)

    def _append(self, region: str, rows: pa.Table) -> int:
        state = self._states[region]
        state.last_entry += 1
        folder = f"{self._root}/_mem_wal/{region}/wal"
        if "://" not in folder:
            os.makedirs(folder, exist_ok=True)
        schema = self._schema.with_metadata({"writer_epoch": str(state.epoch)})
        path = f"{folder}/{wire.bit_reversed(state.last_entry)}.lance"
        with LanceFileWriter(path, schema, version=self._version, storage_options=self.storage_options) as writer:
            for batch in rows.combine_chunks().to_batches():
                writer.write_batch(batch)
        state.pending.append((state.last_entry, rows.num_rows))
        return state.current_generation

    def _put(self, region: str, rows: pa.Table) -> int:
        if self.tombstones:
            rows = rows.append_column(self._schema.field(TOMBSTONE), pa.array([False] * rows.num_rows))
        return self._append(region, rows)

    def delete(self, numbers: Any) -> None:
        if not self.tombstones:
            raise ValueError("the specification has no deletes: make the table with tombstones=True")
        super().delete(numbers)

    def _delete(self, region: str, keys: pa.Table) -> int:
        columns = [
            keys[f.name] if f.name in keys.schema.names
            else pa.array([True] * keys.num_rows) if f.name == TOMBSTONE
            else pa.nulls(keys.num_rows, f.type)
            for f in self._schema
        ]  # fmt: skip
        return self._append(region, pa.Table.from_arrays(columns, schema=self._schema))

    def _flush(self, region: str) -> None:
        if self._states[region].pending:
            self.flush_generation(region)

    def flush_generation(self, region: str) -> str:
        """Flush also when nothing is pending: a generation without rows. Its path below the table."""
        state = self._states[region]
        number = state.current_generation
        folder = f"_mem_wal/{region}"
        files = Files(self._root, self.storage_options)
        # Whoever repeats its numbers (Hypothesis) must not come upon what an earlier writer died in.
        while files.listing(f"{folder}/{(name := f'{self.rng.getrandbits(32):08x}_gen_{number}')}"):
            pass
        fragments = []
        for at, (entry, rows) in enumerate(state.pending):
            stem = f"{wire.bit_reversed(entry)}.lance"
            data = DataFile(
                stem, self._template.fields, self._template.column_indices,
                self._template.file_major_version, self._template.file_minor_version,
                file_size_bytes=files.size(f"{folder}/wal/{stem}"), base_id=_BASE_ID,
            )  # fmt: skip
            fragments.append(FragmentMetadata(id=at, files=[data], physical_rows=rows))
        wal = DatasetBasePath(f"{self._root}/{folder}/wal", id=_BASE_ID, is_dataset_root=False)
        lance.LanceDataset.commit(
            f"{self._root}/{folder}/{name}",
            LanceOperation.Overwrite(self._schema, fragments, initial_bases=[wal]),
            storage_options=self.storage_options, enable_v2_manifest_paths=True,
        )  # fmt: skip
        state.generations[number] = name
        state.current_generation += 1
        state.replay_after = state.last_entry
        state.pending = []
        self._publish(region)
        return f"{folder}/{name}"
