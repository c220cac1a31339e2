"""Read a region's write-ahead log from its last flush to its end, and the columns of its entries (S0-122, S0-142).

A replay that ends too early loses acknowledged rows. A missing entry is therefore the end of the log only if no later
entry exists, and a truncated entry only if it is the last one: its put was never acknowledged. Entries of pylance's own
writers are Arrow streams, with the base's field ids.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.errors import ObjectNotFoundError, SchemaProjectionError, UnsupportedFeatureError, WalCorruptError
from memwal_ops.formats.lance.files.blobs import read_stream
from memwal_ops.formats.lance.generations.projection import TOMBSTONE
from memwal_ops.formats.lance.generations.wal import log_gap, unflushed_entries, wal_entry_path
from memwal_ops.formats.lance.log.region_columns import RegionColumns, stored_columns
from memwal_ops.formats.lance.log.region_files import WalEntry, WalEntryCutError, cut_entry, entry_path, read_entry
from memwal_ops.formats.lance.retention.schema_history import Flush, SchemaHistory, WriterVersion
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.storage.api import Store, results_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

# Entries read concurrently, per step. It begins with two: most logs are short, and the entry after the first missing
# one must be checked anyway.
_READ_AHEAD = (2, 4, 8, 16, 32, 64)
_CONCURRENT_READS = 16
_FIELD_ID = b"lance:field_id"
_NUMBER = re.compile(rb"[0-9]{1,9}")


def read_log(store: Store, manifest: RegionManifest) -> Iterator[WalEntry]:
    """Yield the entries after the last flush in ascending order. The last one may be truncated (``cut``, no rows).

    Raises ``WalCorruptError``: an entry before the end of the log is missing or unreadable.
    """
    number = (manifest.replay_after_wal_id or 0) + 1
    for count in chain(_READ_AHEAD, repeat(_READ_AHEAD[-1])):
        numbers = range(number, number + count)
        ahead = results_of(lambda number: _read(store, manifest, number), numbers, threads=_READ_AHEAD[-1] // 4)
        good = next((place for place, entry in enumerate(ahead) if entry is None or entry.cut), count)
        entries = [entry for entry in ahead[:good] if entry is not None]
        yield from entries
        number += good
        if good < count:
            later = any(entry is not None for entry in ahead[good + 1 :]) or (
                good == count - 1 and store.head(entry_path(manifest.region_id, number + 1)) is not None
            )
            last, path = ahead[good], entry_path(manifest.region_id, number)
            seen = manifest.wal_id_last_seen or 0
            if last is not None:
                if later or seen > number:
                    raise WalCorruptError(f"WAL entry {path} is truncated, and later entries exist or existed.")
                yield last
                return
            if not later and seen < number:
                return
            # A live writer puts entries concurrently: the first of two may be missing when it is read, and both exist
            # afterwards.
            if store.head(path) is None:
                raise WalCorruptError(f"WAL entry {path} is missing, and later entries exist or existed.")


def _read(store: Store, manifest: RegionManifest, number: int) -> WalEntry | None:
    try:
        return read_entry(store, manifest.region_id, number)
    except WalEntryCutError:
        return cut_entry(number)


def read_shard_log(table: Table, manifest: RegionManifest) -> list[WalEntry]:
    """The entries after the last flush that have rows, ascending. An entry by which a writer claims has none.

    Raises ``WalCorruptError``: an entry is missing or unreadable.
    """
    first = (manifest.replay_after_wal_id or 0) + 1
    numbers = range(first, first + unflushed_entries(table, manifest))
    if (gap := log_gap(table, manifest.region_id, numbers.stop)) is not None:
        raise gap
    region_id = manifest.region_id
    entries = results_of(lambda it: read_shard_entry(table, region_id, it), numbers, threads=_CONCURRENT_READS)
    return [entry for entry in entries if entry.rows.num_rows]


def read_shard_entry(table: Table, region_id: UUID, number: int) -> WalEntry:
    """Read one entry. One request. Raises ``WalCorruptError``: it is missing or unreadable."""
    path = wal_entry_path(region_id, number, table.layout_of(region_id))
    try:
        data = table.store.get(path)
        rows = read_stream(data)
    except ObjectNotFoundError as error:
        raise WalCorruptError(f"WAL entry {path} is missing, although it is after the last flush.") from error
    except pa.ArrowException as error:
        raise WalCorruptError(f"WAL entry {path} is not an Arrow stream: {error}") from error
    epoch = (rows.schema.metadata or {}).get(b"writer_epoch", b"")
    if _NUMBER.fullmatch(epoch) is None:
        raise WalCorruptError(f"WAL entry {path} has no writer epoch.")
    return WalEntry(number, int(epoch), rows.replace_schema_metadata(None), _field_ids(rows.schema), len(data))


def _field_ids(schema: pa.Schema) -> tuple[int, ...] | None:
    """The ids of the fields, each before those inside it, as a table numbers them; None if the writer stored none."""
    columns = [field for field in schema if field.name != TOMBSTONE]
    ids = tuple(_ids(columns))
    if len(ids) < len(columns):
        return None
    return (*ids, max(ids, default=0) + 1) if TOMBSTONE in schema.names else ids


def _ids(fields: Iterable[pa.Field]) -> Iterator[int]:
    for field in fields:
        stored = (field.metadata or {}).get(_FIELD_ID, b"")
        if _NUMBER.fullmatch(stored) is not None:
            yield int(stored)
        yield from _ids(field.type.field(at) for at in range(field.type.num_fields))


class LoggedColumns:
    """Finds the columns of entries. Entries with other columns than the writer's become separate generations.

    The same names, types and field ids may be other columns: Lance gives the id of a dropped column to the next one
    where no data file has it. Timeline by these alone: a writer puts ``note`` and is killed; ``note`` is dropped and
    added again; the next writer replays the log and puts notes. One generation has the columns of one time: either
    the dropped values come back, or the new ones are lost.
    """

    def __init__(self, table: Table, region_id: UUID, own: RegionColumns) -> None:
        """``table`` is the version at which the writer began. Nothing is read before the first entry."""
        self._table, self._region_id, self._own = table, region_id, own
        self._history = SchemaHistory(table)
        self._known: dict[tuple[WriterVersion | None, int], RegionColumns] = {}

    def of(self, entry: WalEntry, last: RegionColumns) -> RegionColumns:
        """The columns of an entry of another writer; ``last``, those of the entry before it, if they are the same.

        Raises ``UnsupportedFeatureError``: other columns than the table has, and no ids to identify them.
        """
        if _are(self._own, entry):
            key = entry.opened, entry.writer_epoch
            if key not in self._known:
                same = self.is_current(entry_path(self._region_id, entry.entry_id), entry.opened)
                self._known[key] = self._own if same else replace(self._own, opened=entry.opened)
            return self._known[key]
        if _are(last, entry) and last.opened == entry.opened:
            return last
        if entry.field_ids is None:
            raise UnsupportedFeatureError(
                f"WAL entry {entry.entry_id} of region {self._region_id} has the columns {entry.rows.column_names}, "
                "which the table does not have, and no field ids to identify them."
            )
        return stored_columns(entry.rows.schema, entry.field_ids, self._own, entry.opened)

    def is_current(self, path: str, opened: WriterVersion | None = None) -> bool:
        """Whether no column was dropped and added again since the entry at a path was put.

        ``opened`` is the version that its writer had opened; None: not recorded.
        """
        if opened is not None and opened == self._own.opened:
            return True
        meta = self._table.store.head(path)
        if meta is None:
            return False
        flush = Flush(None, nanoseconds(meta.last_modified), opened)
        ids = [field.id for field in self._table.manifest.manifest.fields]
        try:
            return all(self._history.is_same_field(field_id, flush, renamed=False) for field_id in ids)
        except SchemaProjectionError:  # a version that has them is damaged: the merge decides
            return False


def _are(columns: RegionColumns, entry: WalEntry) -> bool:
    return entry.rows.schema == columns.schema and entry.field_ids in {None, columns.ids}
