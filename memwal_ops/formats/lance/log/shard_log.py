"""Read the write-ahead log of pylance's own writers: entries are Arrow streams, with the base's field ids."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.errors import ObjectNotFoundError, WalCorruptError
from memwal_ops.formats.lance.files.encoded_rows import read_stream
from memwal_ops.formats.lance.generations.projection import TOMBSTONE
from memwal_ops.formats.lance.generations.wal import unflushed_entries, wal_entry_path
from memwal_ops.formats.lance.log.region_files import WalEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_CONCURRENT_READS = 16
_FIELD_ID = b"lance:field_id"
_NUMBER = re.compile(rb"[0-9]{1,9}")


def read_shard_log(table: Table, manifest: RegionManifest) -> list[WalEntry]:
    """The entries after the last flush that have rows, ascending. An entry by which a writer claims has none.

    Args:
        manifest: newest manifest of the region.

    Raises:
        WalCorruptError: an entry is missing or unreadable.
    """
    first = (manifest.replay_after_wal_id or 0) + 1
    numbers = range(first, first + unflushed_entries(table, manifest))
    _refuse_gap(table, manifest, numbers.stop)
    with ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="read-log") as pool:
        entries = list(pool.map(lambda number: read_shard_entry(table, manifest.region_id, number), numbers))
    return [entry for entry in entries if entry.rows.num_rows]


def _refuse_gap(table: Table, manifest: RegionManifest, end: int) -> None:
    """Raise if the entry at the end of the log is missing, and a later one exists: its rows would be left out."""
    layout = table.layout_of(manifest.region_id)
    missing, later = (wal_entry_path(manifest.region_id, number, layout) for number in (end, end + 1))
    if table.store.head(later) is not None and table.store.head(missing) is None:
        raise WalCorruptError(f"WAL entry {missing} is missing, and later entries exist.")


def read_shard_entry(table: Table, region_id: UUID, number: int) -> WalEntry:
    """Read one entry. One request.

    Raises:
        WalCorruptError: it is missing or unreadable.
    """
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
    columns = [one for one in schema if one.name != TOMBSTONE]
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
