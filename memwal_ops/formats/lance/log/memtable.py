"""The MemTable of a region writer: rows that are not flushed yet (S0-024, S0-027), and the indexes of its generations.

A generation's index (S0-111, S0-135 to S0-139) is used for the same queries as the base's, and both results are merged:
so it has the base's name, type and parameters, and a vector index its centroids and codebook, without training. After
the build, its parameters are compared with the base's; parameters that pylance does not accept as arguments are refused
beforehand.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import CodebookChangedError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.datasets import lance_errors, open_dataset
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, base_indexes, index_folder, is_of_key
from memwal_ops.formats.lance.indexes.codebook import CodebookParameters, codebook_at
from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments, arguments_like, without_hints
from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from memwal_ops.formats.lance.log.region_columns import RegionColumns
    from memwal_ops.formats.lance.log.region_files import WalEntry
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """Thresholds at which a writer flushes by itself (S0-022, S0-128).

    Attributes:
        wal_bytes: bytes of buffered rows that are written as a WAL entry. The buffer never exceeds twice this size: a
            ``put`` that would exceed it writes the entry itself first.
        wal_puts: number of buffered ``put`` calls that are written as a WAL entry.
        wal_interval: longest time that rows stay in the buffer.
        memtable_bytes: bytes in the log that are flushed as a generation. The MemTable never exceeds twice this size: a
            ``put`` that finds it full waits for the flush.
        memtable_rows: rows in the log that are flushed as a generation.
    """

    wal_bytes: int = 8 << 20
    wal_puts: int = 1000
    wal_interval: timedelta = timedelta(seconds=1)
    memtable_bytes: int = 256 << 20
    memtable_rows: int = 1_000_000


@dataclass(frozen=True, slots=True)
class WalPosition:
    """Position of a MemTable fragment in the log (S0-142): its index within the entry, from 0.

    Entries count from ``replay_after_wal_id``: 1 is the first one after it.
    """

    entry: int
    position: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A WAL entry in the MemTable. ``fragments``: the number of rows of each."""

    entry: WalEntry
    fragments: tuple[int, ...]


# Well below the age at which gc deletes directories that no manifest lists.
_STALE_SECONDS = 3600.0
_FILTERED_KEYS = 1 << 16


@dataclass(slots=True)
class Growing:
    """A generation that grows: consecutive WAL entries with the same columns, ascending.

    Attributes:
        sealed: whether the flush began; no more entries are added then.
        path: directory of the generation that was written; None before.
    """

    columns: RegionColumns
    logged: list[LogEntry] = field(default_factory=list)
    sealed: bool = False
    path: str | None = None
    _manifest: int = 0
    _begun: float = 0.0

    @property
    def entries(self) -> list[WalEntry]:
        """The WAL entries."""
        return [logged.entry for logged in self.logged]

    @property
    def last(self) -> int:
        """The id of the last WAL entry."""
        return self.logged[-1].entry.entry_id

    def publishable(self, newest: int) -> str | None:
        """The directory that was written, if the region manifest after ``newest`` may list it; None: write it now.

        A directory is listed by the manifest after the one that was the newest when it was begun, or by none: gc
        publishes a manifest before it deletes directories that none lists. Timeline otherwise: a flush writes a
        generation, and its commit fails; days later gc deletes the directory; the next flush lists it.
        """
        now = time.monotonic()
        if newest != self._manifest or now - self._begun > _STALE_SECONDS:
            self.path = None
        if self.path is None:
            self._manifest, self._begun = newest, now
        return self.path


@dataclass(frozen=True, slots=True)
class InMemory:
    """The rows that no generation has, at one time, in the order of writes, each fragment with its columns.

    ``generation``: the number of the first one that will have some of them, as far as the writer knows.
    """

    generation: int
    fragments: tuple[tuple[pa.Table, RegionColumns], ...]


class MemTable:
    """Rows that are not flushed yet, as fragments in order of arrival. Those in the log come first, then buffered ones.

    Thread-safe for reading; only one thread at a time may add log entries.
    """

    def __init__(self, columns: RegionColumns, *, generation: int, replay_after: int) -> None:
        """``generation``: number of the next one.

        ``replay_after``: id of the last flushed WAL entry; 0 if there is none.
        """
        self._lock = threading.Lock()
        self._columns, self._generation, self._replay_after = columns, generation, replay_after
        self._growing: list[Growing] = []
        self._buffer: list[pa.Table] = []
        self._buffered_bytes = self._logged_bytes = self._logged_rows = 0
        self._logged_fragments = self._state = 0
        self._since = 0.0

    @property
    def waiting(self) -> list[pa.Table]:
        """The buffered fragments, which are not durable yet."""
        with self._lock:
            return [*self._buffer]

    @property
    def generation(self) -> int:
        """Number of the next generation, as of the last manifest that was read."""
        return self._generation

    def fragments(self) -> tuple[pa.Table, ...]:
        """All fragments in order of arrival, tombstones included (S0-126)."""
        with self._lock:
            return tuple(reversed([*self._newest_first()]))

    def in_memory(self) -> InMemory:
        """:meth:`fragments` with their columns and generation, for readers."""
        with self._lock:
            logged = [(logged.entry.rows, growing.columns) for growing in self._growing for logged in growing.logged]
            return InMemory(self._generation, (*logged, *((rows, self._columns) for rows in self._buffer)))

    def keys_since(self, seen: int, state: int) -> tuple[int, list[list[pa.Array]]]:
        """The state, and the key columns of each fragment after the first ``seen`` ones.

        The state changes when fragments are removed or inserted between others: if it is not ``state``, that of the
        previous call, the columns are those of all fragments.
        """
        with self._lock:
            seen = seen if state == self._state else 0
            newest = [*islice(self._newest_first(), len(self._buffer) + self._logged_fragments - seen)]
            key = self._columns.key
            return self._state, [[rows.column(name).combine_chunks() for name in key] for rows in reversed(newest)]

    def mapping(self) -> dict[int, WalPosition]:
        """Map each fragment in the log, numbered from 0, to its position there (S0-142, S0-143).

        It identifies a row in the generation, where each entry is one fragment, in the same order.
        """
        with self._lock:
            places = [
                WalPosition(logged.entry.entry_id - self._replay_after, position)
                for growing in self._growing
                for logged in growing.logged
                for position in range(len(logged.fragments))
            ]
        return dict(enumerate(places))

    def columns_of_last(self) -> RegionColumns:
        """Columns of the last entry in the log; of buffered rows if there is none."""
        with self._lock:
            return self._growing[-1].columns if self._growing else self._columns

    def add_logged(self, entry: WalEntry, columns: RegionColumns, fragments: Sequence[int], *, taken: int = 0) -> int:
        """Add a WAL entry, which contains the first ``taken`` buffered fragments (S0-131).

        Returns the number of the generation that will contain it.
        """
        with self._lock:
            if not self._growing or self._growing[-1].sealed or self._growing[-1].columns is not columns:
                self._growing.append(Growing(columns))
            if self._buffer and not taken:
                self._state += 1  # another writer's entry, before the buffered rows
            self._growing[-1].logged.append(LogEntry(entry, tuple(fragments)))
            self._count(self._growing[-1].logged[-1], 1)
            self._buffered_bytes -= sum(rows.nbytes for rows in self._buffer[:taken])
            del self._buffer[:taken]
            self._since = time.monotonic()
            return self._generation + len(self._growing) - 1

    def add_waiting(self, rows: pa.Table) -> int:
        """Buffer a fragment, which is not durable yet. Returns as :meth:`add_logged`."""
        with self._lock:
            if not self._buffer:
                self._since = time.monotonic()
            self._buffer.append(rows)
            self._buffered_bytes += rows.nbytes
            last = self._growing[-1] if self._growing else None
            joins = last is not None and not last.sealed and last.columns is self._columns
            return self._generation + len(self._growing) - joins

    def published(self, replay_after: int, generation: int) -> bool:
        """Remove entries up to ``replay_after``, which are flushed; return whether there were any."""
        with self._lock:
            self._replay_after, self._generation = replay_after, generation
            dropped = [growing for growing in self._growing if growing.last <= replay_after]
            for growing in dropped:
                for logged in growing.logged:
                    self._count(logged, -1)
            del self._growing[: len(dropped)]
            self._state += bool(dropped)
            return bool(dropped)

    def next_generation(self, until: int) -> Growing | None:
        """Seal and return the next generation to be flushed; None if no entry up to the id ``until`` is left."""
        with self._lock:
            if not self._growing or self._growing[0].logged[0].entry.entry_id > until:
                return None
            self._growing[0].sealed = True
            return self._growing[0]

    def has_room(self, rows: pa.Table, limits: WriterLimits) -> bool:
        """Whether the rows fit into the buffer, which holds at most twice ``wal_bytes``."""
        with self._lock:
            return not self._buffer or self._buffered_bytes + rows.nbytes <= 2 * limits.wal_bytes

    def log_is_due(self, limits: WriterLimits, *, waited: bool = True) -> bool:
        """Whether buffered rows are due to be written as a WAL entry; ``waited=False`` ignores their age."""
        with self._lock:
            old = waited and time.monotonic() - self._since >= limits.wal_interval.total_seconds()
            full = self._buffered_bytes >= limits.wal_bytes or len(self._buffer) >= limits.wal_puts
            return bool(self._buffer) and (old or full)

    def flush_is_due(self, limits: WriterLimits, *, times: int = 1) -> bool:
        """Whether the log exceeds the limits, multiplied by ``times``, and is due to be flushed as a generation."""
        with self._lock:
            rows, size = times * limits.memtable_rows, times * limits.memtable_bytes
            return self._logged_rows >= rows or self._logged_bytes >= size

    def _newest_first(self) -> Iterator[pa.Table]:
        yield from reversed(self._buffer)
        for growing in reversed(self._growing):
            for logged in reversed(growing.logged):
                end = logged.entry.rows.num_rows
                for rows in reversed(logged.fragments):
                    end -= rows
                    yield logged.entry.rows.slice(end, rows)

    def _count(self, logged: LogEntry, sign: int) -> None:
        self._logged_fragments += sign * len(logged.fragments)
        self._logged_rows += sign * logged.entry.rows.num_rows
        self._logged_bytes += sign * logged.entry.rows.nbytes


class KeyFilter:
    """The bloom filter of a MemTable's keys (S0-025, S0-136): it shows whether a row may be stale.

    Keys are added at each query, and removed once generations have them. Other indexes are not kept in memory: a scan
    of the rows, which are there anyway, is exact.
    """

    def __init__(self, memtable: MemTable) -> None:
        self._memtable = memtable
        self._lock = threading.Lock()
        self._state = self._fragments = self._keys = 0
        self._room = _FILTERED_KEYS
        self._bloom = BloomFilter.for_keys(self._room)

    def refresh(self) -> None:
        """Add the keys of all rows that the MemTable has now."""
        with self._lock:
            state, fragments = self._memtable.keys_since(self._fragments, self._state)
            if state != self._state:
                self._begin(state)
            elif self._keys + _count(fragments) > self._room:
                self._room = 2 * (self._keys + _count(fragments))
                self._begin(state)
                self._state, fragments = self._memtable.keys_since(0, state)
            for columns in fragments:
                self._bloom.add(columns)
            self._fragments += len(fragments)
            self._keys += _count(fragments)

    def may_have(self, columns: Sequence[pa.Array]) -> NDArray[np.bool_]:
        """Per key whether the MemTable may have it."""
        self.refresh()
        return self._bloom.may_have(columns)

    def _begin(self, state: int) -> None:
        self._bloom = BloomFilter.for_keys(self._room)
        self._state, self._fragments, self._keys = state, 0, 0


def _count(fragments: Sequence[Sequence[pa.Array]]) -> int:
    return sum(len(columns[0]) for columns in fragments)


_SCALAR = frozenset({"BTREE", "BITMAP", "LABEL_LIST", "NGRAM", "INVERTED", "ZONEMAP"})


@dataclass(frozen=True)
class GenerationIndex:
    """How to build one index on a generation, with the name of the base's, by a call of pylance.

    ``codebook``: of the base's index; None for a scalar one.
    """

    name: str
    arguments: IndexArguments
    codebook: CodebookParameters | None


def generation_indexes(table: Table, *, strict: bool) -> tuple[GenerationIndex, ...]:
    """The indexes of generations: the maintained ones, and that of the key where the base has one.

    Raises ``UnsupportedFeatureError``, if ``strict``: pylance cannot build one like the base's. Else it is logged and
    left out.
    """
    known = base_indexes(table)
    key = [name for name, index in known.items() if is_of_key(table, index)]
    planned = []
    for name in dict.fromkeys([*table.index.maintained_indexes, *key]):
        if name not in known:
            continue  # dropped since: there is no base index to compare it with
        try:
            planned.append(planned_index(table, known[name]))
        except UnsupportedFeatureError as error:
            if strict:
                raise
            get_logger(__name__).warning("index_not_maintained", index=name, reason=str(error))
    return tuple(planned)


def build_indexes(table: Table, folder: str, indexes: Sequence[GenerationIndex]) -> None:
    """Build indexes on the generation at ``folder``, below the table's root, and compare them with the base's.

    Raises:
        CodebookChangedError: one that was built has other parameters than the base's.
        StorageError: pylance or the store failed.
    """
    for index in indexes:
        with lance_errors(f"build index {index.name} on", folder):
            dataset = open_dataset(table.location, folder)
            if index.arguments.column not in dataset.schema.names:
                continue  # entries of a writer that began before the column was added
            index.arguments.create(dataset, index.name)
            (built,) = (made for made in dataset.describe_indices() if made.name == index.name)
            (segment,) = (UUID(str(made.uuid)) for made in built.segments)
        same = without_hints(built.details) == index.arguments.described
        if index.codebook is not None:
            place = f"{table.location.uri}/{folder}/{INDICES_FOLDER}/{segment}"
            same = codebook_at(table.location, place, index.name) == index.codebook
        if not same:
            raise CodebookChangedError(
                f"Index {index.name} of {folder} was not built with the parameters of the base's: results from both "
                "could not be compared.",
                remedy="No generation was published, and the rows are in the region's log. Remove the index from the "
                "maintained ones, and open the region again.",
            )


def planned_index(table: Table, index: BaseIndex) -> GenerationIndex:
    """How to build an index like one of the base's. Raises ``UnsupportedFeatureError``: pylance cannot."""
    arguments = arguments_like(table, index, trained=True)
    if not index.is_vector:
        if arguments.kind not in _SCALAR:
            raise UnsupportedFeatureError(f"Index {index.name} is of the type {index.type}, which is not built here.")
        return GenerationIndex(index.name, arguments, None)
    codebook = codebook_at(table.location, index_folder(table, index.segments[-1]), index.name)
    return GenerationIndex(index.name, arguments, codebook)
