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

from tests.tables import wire
from tests.tables.files import Files
from tests.tables.lsm_table import LsmTable
from tests.tables.model import Model
from tests.tables.region_layout import RegionLayout
from tests.tables.schemas import TOMBSTONE, row_table
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lance.fragment import DataFile

    from tests.tables.model import Row, Rows

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
        # Per list of columns: how pylance lays out one file of them, and their ids in the base table.
        self._plain: dict[tuple[str, ...], DataFile] = {}
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
        ids = self._ids(tuple(self.schemas[region].names))
        if ids is not None:
            _renumber(Files(f"{self.uri}/{path}"), ids)
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
        """The writer's columns, and how a file of them is laid out."""
        schema = self.schema_of(region)
        self._schema = schema.append(pa.field(TOMBSTONE, pa.bool_()))
        names = tuple(schema.names)
        if names not in self._plain:
            self._plain[names] = self._data_file_template() if self.columns.changed else self._template
        self._template = self._plain[names]

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


def _renumber(files: Files, ids: Sequence[int]) -> None:
    """Give a generation's fields the base table's ids, as pylance's own writer does; a commit counts from zero."""
    name, manifest = wire.newest_manifest(files)
    numbers = dict(enumerate(ids))
    fields = [
        _with_id(one, numbers) if one.number == 1 else _with_files(one, ids) if one.number == 2 else one
        for one in manifest.fields
    ]
    files.put(name, wire.build_manifest(replace(manifest, fields=fields)))


def _with_id(field_of: wire.Field, numbers: Mapping[int, int]) -> wire.Field:
    message = wire.decode(bytes(field_of.value))
    number = numbers[int(wire.get(message, 3))]
    return wire.Field(1, wire.encode([*(one for one in message if one.number != 3), (3, number)]), 2)


def _with_files(fragment: wire.Field, ids: Sequence[int]) -> wire.Field:
    packed = wire.Field(2, bytes(ids), 2)  # each below 128: one byte
    parts = [
        wire.Field(2, wire.encode(packed if one.number == 2 else one for one in wire.decode(bytes(part.value))), 2)
        if part.number == 2
        else part
        for part in wire.decode(bytes(fragment.value))
    ]
    return wire.Field(2, wire.encode(parts), 2)


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
        """Whether a fenced writer is believed; it goes on trying where a later one wrote something."""
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
