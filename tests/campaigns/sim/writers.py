"""The tables of the simulation: both layouts, with fenced writers, killed flushes, and columns that change.

Every name that a column ever has is its own for good, so that a name tells a column, wherever it is
met. A *trait* is what does not change about a column: its first name. The model keeps rows by traits.
"""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from memwal_ops.formats.lance.log.region_columns import stored_columns
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.lsm_table import LsmTable
from tests.support.tables.model import Model
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import TOMBSTONE, row_table
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memwal_ops.formats.lance.log.region_columns import RegionColumns
    from tests.support.tables.model import Row, Rows

# -- columns


@dataclass
class Columns:
    """Which columns the base table has, from which version on."""

    #: Per name its trait; a name that is not in here never changed.
    traits: dict[str, str] = field(default_factory=dict)
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        return bool(self.names)

    def trait(self, name: str) -> str:
        return self.traits.get(name, name)

    def at(self, version: int) -> tuple[str, ...] | None:
        """The names in a version; None: those of the beginning."""
        since = max((one for one in self.names if one <= version), default=None)
        return None if since is None else self.names[since]

    def by_trait(self, rows: Iterable[Row]) -> list[Row]:
        return [{self.trait(name): value for name, value in row.items()} for row in rows]

    def seen(self, rows: Rows, version: int) -> Rows:
        """Rows of the model as a version shows them, still by traits."""
        names = self.at(version)
        if names is None:
            return rows
        traits = [self.trait(name) for name in names]
        return {key: {trait: row.get(trait) for trait in traits} for key, row in rows.items()}

    def copy(self) -> Columns:
        return Columns(dict(self.traits), dict(self.names))


class _TraitModel(Model):
    """The model of a table whose columns change."""

    columns: Columns

    def put(self, region: str, generation: int, rows: Iterable[Row]) -> None:
        super().put(region, generation, self.columns.by_trait(rows) if self.columns.traits else rows)


class Evolving(LsmTable):
    """A table whose writers have the columns of the time at which they began."""

    columns: Columns

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.columns = Columns()
        model = _TraitModel(self.model.keys)
        model.columns = self.columns
        self.model = model
        self.base_schema = self.schema
        self.schemas: dict[str, pa.Schema] = {}

    def evolve(self, dataset: lance.LanceDataset) -> None:
        """The base table has other columns from this version on; writers learn of it when they begin."""
        self.base_schema = dataset.schema
        self.columns.names[dataset.version] = tuple(dataset.schema.names)

    def put(self, numbers: Sequence[int]) -> None:
        self.schema = self.schema_of(self._one_region(numbers))
        super().put(numbers)

    def delete(self, numbers: Sequence[int]) -> None:
        self.schema = self.schema_of(self._one_region(numbers))
        super().delete(numbers)

    def schema_of(self, region: str) -> pa.Schema:
        """The columns of a region's writer, which begins if there is none."""
        return self.schemas.setdefault(region, self.base_schema)


# -- the two layouts, with more than one writer


class RegionTable(Evolving, RegionLayout):
    """The specification's layout with a writer that may be fenced, or killed in a flush."""

    #: Per region the positions at which a fenced writer goes on when it wakes.
    stalled: dict[str, list[int]]
    _dying = False

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.stalled, self.written = {}, {}
        # Per list of columns: how rows of them are stored, and their ids in the base table.
        self._stored: dict[tuple[str, ...], RegionColumns] = {}
        self._fields: dict[tuple[str, ...], list[int]] = {}

    def claim(self, region: str) -> None:
        """Another writer takes the region over, and with it what the log holds."""
        state = self._states[region]
        self.stalled.setdefault(region, []).append(state.last_entry + 1)
        state.epoch += 1
        self._publish(region)

    def die_in_flush(self, region: str) -> None:
        """A flush ends before it is published: the directory stands, its rows are in the log still."""
        self.flush_slowly(region)
        self._states[region] = self._kept

    def flush_slowly(self, region: str) -> str:
        """A flush that is still to be published (:meth:`end_of_flush`); its directory below the table."""
        state = self._states[region]
        self._kept = replace(state, generations=dict(state.generations), pending=list(state.pending))
        self._dying = True
        try:
            return self.flush_generation(region)
        finally:
            self._dying = False

    def end_of_flush(self, region: str) -> None:
        self._publish(region)
        self.schemas.pop(region, None)

    def wake(self, region: str) -> bool:
        """Whether a fenced writer's next entry would be taken, although a later epoch wrote at its position."""
        written = {int(entry) for entry in self.written.get(region, ())}
        folder = f"{self.uri}/_mem_wal/{region}/wal"
        return any(
            at in written and not os.path.exists(f"{folder}/{wire.bit_reversed(at)}.lance")
            for at in self.stalled.get(region, ())
        )

    def schema_of(self, region: str) -> pa.Schema:
        # Nothing that is not flushed is left of the columns of before: a writer flushes, then takes the new ones.
        if region not in self.schemas and self._states[region].pending:
            raise AssertionError("a writer changed its columns in the middle of a MemTable")
        return super().schema_of(region)

    def flush_generation(self, region: str) -> str:
        self._begin(region)
        path = super().flush_generation(region)
        if not self._dying:
            self.schemas.pop(region, None)
        return path

    def _append(self, region: str, rows: pa.Table) -> int:
        generation = super()._append(region, rows)
        self.written.setdefault(region, set()).add(self._states[region].last_entry)
        return generation

    def _put(self, region: str, rows: pa.Table) -> int:
        self._begin(region)
        return super()._put(region, rows)

    def _delete(self, region: str, keys: pa.Table) -> int:
        self._begin(region)
        return super()._delete(region, keys)

    def _begin(self, region: str) -> None:
        """The writer's columns, with the ids that they have in the base table."""
        schema = self.schema_of(region)
        names = tuple(schema.names)
        if names not in self._stored:
            ids, first = self._ids(names), self._columns
            plain = [one if one.name in first.key else one.with_nullable(True) for one in schema]
            stored = pa.schema([*plain, first.schema.field(TOMBSTONE)])
            self._stored[names] = first if ids is None else stored_columns(stored, ids, first)
        self._columns = self._stored[names]

    def evolve(self, dataset: lance.LanceDataset) -> None:
        super().evolve(dataset)
        self._fields[tuple(dataset.schema.names)] = [one.id() for one in dataset.lance_schema.fields()]

    def _ids(self, names: tuple[str, ...]) -> list[int] | None:
        """The base table's ids of these columns, and the next one for the tombstone; None: as of the beginning."""
        ids = self._fields.get(names)
        return None if ids is None else [*ids, max(ids) + 1]

    def _publish(self, region: str) -> None:
        """As a writer must: on top of the newest manifest, from which a collector may have dropped generations."""
        if self._dying:
            return
        state = self._states[region]
        if state.version:
            newest = wire.region_manifest(Files(self.uri), region)
            made = state.current_generation - 1
            state.version = newest.version
            state.generations = {
                number: path
                for number, path in state.generations.items()
                if number in newest.generations or (number == made and newest.current_generation <= made)
            }
        super()._publish(region)


class ShardTable(Evolving, Workload):
    """pylance's own writer; fenced ones are kept, to be woken later."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.stalled: dict[str, list[Any]] = {}
        self._rows: dict[int, pa.Table] = {}

    def schema_of(self, region: str) -> pa.Schema:
        self.writer(region)
        return self.schemas[region]

    def writer(self, region: str) -> Any:
        if region not in self._writers:
            self.schemas[region] = self.base_schema
        return super().writer(region)

    def claim(self, region: str) -> None:
        """A second writer opens the region while the first one is open still, and holds unflushed rows or not."""
        first = self.writer(region)
        self._rows[id(first)] = row_table(
            self.schemas[region], self.key, [self.regions.index(region)], random.Random(0), 0
        )
        del self._writers[region]
        self.writer(region)
        self.stalled.setdefault(region, []).append(first)

    def die_in_flush(self, region: str) -> None:
        """A generation's files, of which the region manifest never heard."""
        manifest = wire.region_manifest(Files(self.uri), region) if self._known(region) else None
        if manifest is None:
            return
        folder = f"{self.uri}/_mem_wal/{region}/{self.rng.getrandbits(32):08x}_gen_{manifest.current_generation}"
        if os.path.exists(folder):
            return  # Hypothesis repeats its numbers; a writer does not
        lance.write_dataset(pa.table({"id": pa.array([1], pa.int64())}), folder)

    def wake(self, region: str) -> bool:
        """Whether a fenced writer's put is accepted; it retries where a later one wrote something."""
        for writer in self.stalled.get(region, ()):
            try:
                writer.put(self._rows[id(writer)])
            except OSError as error:
                assert "fenced" in str(error), error
            else:
                return True
        return False

    def bury(self) -> None:
        """Let go of the fenced writers; those that hold rows say that they were fenced."""
        for writer in (one for several in self.stalled.values() for one in several):
            with contextlib.suppress(OSError):
                writer.close()
        self.stalled = {}

    def _known(self, region: str) -> bool:
        return os.path.isdir(f"{self.uri}/_mem_wal/{region}/manifest")
