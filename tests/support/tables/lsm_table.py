"""What every table under test shares: a base, regions, a seeded random script, and the model.

A layout adds how rows are put, deleted and flushed (workload.py, region_layout.py).
"""

from __future__ import annotations

import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

import lance
import pyarrow as pa

from tests.support.tables.model import Model, Rows
from tests.support.tables.reading import read_spec
from tests.support.tables.schemas import Columns, KeyKind, key_columns, key_table, row_table, table_schema

_BASE_FRAGMENTS = 3


class LsmTable(ABC):
    """A table that is written through regions, and the dictionary that it must equal.

    Keys are whole numbers (schemas.key_of makes values of them); number n lives in region
    `regions[n % len(regions)]` and nowhere else.

    Args:
        seed: fixes rows, order and region ids; print it when a test fails.
        base_rows: rows in the base at creation, keys 0 to base_rows - 1.
        with_btree: build a BTREE on the (single) key column.
    """

    def __init__(
        self,
        seed: int,
        *,
        key: KeyKind = "int64",
        columns: Columns = "plain",
        regions: int = 2,
        base_rows: int = 1000,
        stable_row_ids: bool = False,
        with_btree: bool = True,
        data_storage_version: str | None = None,
    ) -> None:
        self.seed = seed
        self.key: KeyKind = key
        self.rng = random.Random(seed)
        self.schema = table_schema(key, columns)
        self.regions = [str(uuid.UUID(int=self.rng.getrandbits(128), version=4)) for _ in range(regions)]
        self.base_rows = base_rows
        self.stable_row_ids = stable_row_ids
        self.with_btree = with_btree
        self.data_storage_version = data_storage_version
        self.model = Model(key_columns(key))
        self.uri = ""
        self.storage_options: dict[str, str] | None = None
        self._stamp = 0
        self._next = base_rows
        # per region: numbers that stand, and numbers that were deleted; dicts, for a stable order
        self._live: list[dict[int, None]] = [dict.fromkeys(range(r, base_rows, regions)) for r in range(regions)]
        self._dead: list[dict[int, None]] = [{} for _ in range(regions)]

    # -- what a layout has to do

    @abstractmethod
    def _initialize(self, dataset: lance.LanceDataset) -> None:
        """Put the MemWAL index on the base."""

    @abstractmethod
    def _put(self, region: str, rows: pa.Table) -> int:
        """Write rows; the generation in which they stand."""

    @abstractmethod
    def _delete(self, region: str, keys: pa.Table) -> int:
        """Write deletes; the generation in which they stand."""

    @abstractmethod
    def _flush(self, region: str) -> None:
        """Everything written so far becomes a flushed generation."""

    def close(self) -> None:
        """Flush all regions and let go of their writers; the next write takes them up again."""
        self.flush()

    def onto_branch(self, name: str) -> Self:
        """Branch off the newest version, and write there from now on, to regions that main does not have.

        All generations must be merged: a branch has those of no other one.
        """
        self.close()
        lance.dataset(self.uri, storage_options=self.storage_options).create_branch(name)
        self.uri += f"/tree/{name}"
        self.regions = [str(uuid.UUID(int=self.rng.getrandbits(128), version=4)) for _ in self.regions]
        return self

    # -- what tests do

    def create(self, uri: str, storage_options: Mapping[str, str] | None = None) -> Self:
        """Write the base table (several fragments), its BTREE and the MemWAL index."""
        self.uri = str(uri)
        self.storage_options = dict(storage_options) if storage_options else None
        rows = row_table(self.schema, self.key, range(self.base_rows), self.rng, 0)
        self.model.base = {self.model.key_of(row): row for row in rows.to_pylist()}
        dataset = lance.write_dataset(
            rows,
            self.uri,
            storage_options=self.storage_options,
            max_rows_per_file=max(1, -(-self.base_rows // _BASE_FRAGMENTS)),
            data_storage_version=self.data_storage_version,
            enable_stable_row_ids=self.stable_row_ids,
        )
        if self.with_btree and len(self.model.keys) == 1:
            dataset.create_scalar_index(self.model.keys[0], "BTREE")
        self._initialize(dataset)
        return self

    def region_of(self, number: int) -> str:
        """The one region that may hold a key."""
        return self.regions[number % len(self.regions)]

    def put(self, numbers: Sequence[int]) -> None:
        """Upsert keys of ONE region with fresh payload; a number may stand in the list several times."""
        region = self._one_region(numbers)
        self._stamp += 1
        rows = row_table(self.schema, self.key, numbers, self.rng, self._stamp)
        generation = self._put(region, rows)
        self.model.put(region, generation, rows.to_pylist())
        at = self.regions.index(region)
        for n in numbers:
            self._live[at][n] = None
            self._dead[at].pop(n, None)
        self._next = max(self._next, max(numbers) + 1)

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete keys of ONE region; absent ones are fine and have no effect."""
        region = self._one_region(numbers)
        keys = key_table(self.schema, self.key, numbers)
        generation = self._delete(region, keys)
        self.model.delete(region, generation, keys.to_pylist())
        at = self.regions.index(region)
        for n in numbers:
            if n in self._live[at]:
                del self._live[at][n]
                self._dead[at][n] = None

    def flush(self, region: str | None = None) -> None:
        """Flush one region, or all."""
        for one in self.regions if region is None else [region]:
            self._flush(one)

    def step(self, n: int = 1) -> Self:
        """Do n random operations: updates, inserts, re-inserts, repeats, deletes, flushes."""
        for _ in range(n):
            self._step(self.rng.randrange(len(self.regions)))
        return self

    def expected(self, merged: Mapping[str, int] | None = None) -> Rows:
        """The rows that must stand; with `merged` ({region: generation}) those of a base table into
        which exactly these generations (and all before them) were merged."""
        return self.model.expected(merged)

    def read_spec(self) -> Rows:
        """Base and flushed generations by the specification's rules."""
        return read_spec(self.uri, self.storage_options)

    # -- the random script

    def _one_region(self, numbers: Sequence[int]) -> str:
        (region,) = {self.region_of(n) for n in numbers}
        return region

    def _fresh(self, at: int) -> int:
        """A number of this region that was never used."""
        size = len(self.regions)
        self._next += (at - self._next) % size
        self._next += size
        return self._next - size

    def _some(self, pool: dict[int, None], most: int) -> list[int]:
        return self.rng.sample(list(pool), min(len(pool), self.rng.randint(1, most)))

    def _step(self, at: int) -> None:
        rng, live, dead = self.rng, self._live[at], self._dead[at]
        dice = rng.random()
        if dice < 0.50:
            numbers = self._some(live, 25) + [self._fresh(at) for _ in range(rng.randint(0, 15))] + self._some(dead, 3)
            if numbers and rng.random() < 0.4:  # the same key several times in one batch
                numbers += rng.choices(numbers, k=rng.randint(1, 6))
            rng.shuffle(numbers)
            if numbers:
                self.put(numbers)
        elif dice < 0.60:  # the same key in several batches
            number = self._fresh(at) if not live or rng.random() < 0.3 else rng.choice(list(live))
            for _ in range(rng.randint(2, 4)):
                self.put([number])
                if rng.random() < 0.3:
                    self.delete([number])
        elif dice < 0.76:
            numbers = self._some(live, 10)
            if numbers:
                self.delete(numbers)
        elif dice < 0.81:  # deletes of keys that never were, and of keys that are gone
            self.delete([self._fresh(at), *self._some(dead, 2)])
        elif dice < 0.85:  # a generation of only tombstones
            self._flush(self.regions[at])
            self.delete([*self._some(live, 8), self._fresh(at)])
            self._flush(self.regions[at])
        elif dice < 0.91:  # deleted in one generation, back in the next
            numbers = self._some(live, 4)
            if numbers:
                self.delete(numbers)
                self._flush(self.regions[at])
                self.put(numbers[:1] * 2 + numbers[1:])
        else:
            self._flush(self.regions[at])
