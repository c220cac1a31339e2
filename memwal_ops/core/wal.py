"""The write-ahead log of a region: where it ends, and who wrote an entry.

Entries are numbered without a gap (S0-122), and a manifest's ``wal_id_last_seen`` is a hint that
only rises. From there on the end is found by HEAD alone, in steps that double, so that a hint that
is a thousand entries old costs twenty requests and not a thousand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa
from lance.file import LanceFileReader
from pyarrow import ipc

from memwal_ops.core.datasets import lance_options
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.layout import Layout, region_folder
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, StorageError, StoreUnavailableError
from memwal_ops.format.lance_file import check_lance_file
from memwal_ops.format.names import U64_MAX, wal_entry_name

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.core.table import Table
    from memwal_ops.storage.api import Store

_EPOCH = b"writer_epoch"
_NO_STREAM = (pa.ArrowException, ValueError, OSError)
_NUMBER = re.compile(rb"[0-9]{1,20}")
# A schema of some hundred columns; a larger one costs a second request.
_SCHEMA_BYTES = 32 << 10
# The columns of a Lance file; more of them cost another request too.
_TAIL_BYTES = 32 << 10
_SUFFIX = {Layout.REGION: "lance", Layout.SHARD: "arrow"}


def wal_entry_path(region_id: UUID, entry_id: int, layout: Layout) -> str:
    """Path of a WAL entry, relative to the table's root (S0-034)."""
    return f"{region_folder(region_id)}/wal/{wal_entry_name(entry_id, _SUFFIX[layout])}"


def last_wal_entry(
    store: Store, region_id: UUID, replay_after_wal_id: int | None, wal_id_last_seen: int | None, layout: Layout
) -> int:
    """The id of the region's last WAL entry, at least what its manifest knows (S0-171, S0-172).

    Entries up to ``replay_after_wal_id`` may be collected: what stands at or below the hint is not
    looked at. 0: no entry yet. One request where nothing was written since the hint.
    """
    known = max(wal_id_last_seen or 0, replay_after_wal_id or 0)

    def stands(entry_id: int) -> bool:
        return entry_id <= U64_MAX and store.head(wal_entry_path(region_id, entry_id, layout)) is not None

    step = 1
    while stands(known + step):
        known += step
        step *= 2
    while step > 1:
        step //= 2
        if stands(known + step):
            known += step
    return known


def read_writer_epoch(table: Table, region_id: UUID, entry_id: int) -> int:
    """Which writer epoch wrote a WAL entry (S0-032); read by ranges, one request for most.

    Raises:
        InvalidFormatError: it is no readable entry, or says no epoch.
        ObjectNotFoundError: it is not there.
        StorageError: the store failed.
    """
    path = wal_entry_path(region_id, entry_id, table.layout)
    metadata = _lance_metadata(table, path) if table.layout is Layout.REGION else _arrow_metadata(table.store, path)
    epoch = metadata.get(_EPOCH, b"")
    if _NUMBER.fullmatch(epoch) is None:
        raise InvalidFormatError(f"WAL entry {path} does not say which writer epoch wrote it.")
    return int(epoch)


def _arrow_metadata(store: Store, path: str) -> dict[bytes, bytes]:
    head = store.get_range(path, 0, _SCHEMA_BYTES)
    try:
        return ipc.open_stream(pa.BufferReader(head)).schema.metadata or {}
    except _NO_STREAM:
        if len(head) < _SCHEMA_BYTES:
            raise InvalidFormatError(f"WAL entry {path} is no Arrow stream.") from None
    try:
        return ipc.open_stream(pa.BufferReader(store.get(path))).schema.metadata or {}
    except _NO_STREAM as error:
        raise InvalidFormatError(f"WAL entry {path} is no Arrow stream: {error}") from error


def _lance_metadata(table: Table, path: str) -> dict[bytes, bytes]:
    meta = table.store.head(path)
    if meta is None:
        raise ObjectNotFoundError(f"WAL entry {path} is not there.")
    tail = table.store.get_range(path, max(0, meta.size - _TAIL_BYTES), _TAIL_BYTES)
    if not check_lance_file(tail, meta.size):
        check_lance_file(table.store.get(path), meta.size)
    try:
        with lance_errors("read", path):
            reader = LanceFileReader(f"{table.location.uri}/{path}", storage_options=lance_options(table.location))
            return reader.metadata().schema.metadata or {}
    except StoreUnavailableError:
        raise
    except StorageError as error:
        # pylance has one error for what is not there, what is damaged and what it may not read.
        if table.store.head(path) is None:
            raise ObjectNotFoundError(f"WAL entry {path} is not there.") from error
        raise InvalidFormatError(f"WAL entry {path} is no readable Lance file: {error}") from error
