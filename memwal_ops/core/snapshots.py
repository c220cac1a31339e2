"""Region snapshots as a table stores them: inside the MemWAL index, or in a file beside it.

A snapshot is for reading fast and may be stale; each region's manifest stays the truth (S0-017).
With it, "which regions are there" is one open table and no listing.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lance.file import LanceFileReader, LanceFileWriter

from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.format.snapshot_rows import RegionRow, decode_rows

if TYPE_CHECKING:
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.core.table import Table

INDICES_FOLDER = "_indices"
# Readable by every release that knows MemWAL.
_FILE_VERSION = "2.0"


@dataclass(frozen=True)
class Snapshot:
    """The region snapshot of one version.

    Attributes:
        timestamp_millis: when it was taken, Unix milliseconds.
        stored: ``inline`` or ``external``.
        rows: as stored, one per region.
    """

    timestamp_millis: int
    stored: str
    rows: pa.Table

    @cached_property
    def regions(self) -> tuple[RegionRow, ...]:
        """The regions, in the order of the rows."""
        return decode_rows(self.rows)


def snapshot_path(uuid: UUID) -> str:
    """Where the rows of a snapshot stand that is not inline (S0-104)."""
    return f"{INDICES_FOLDER}/{uuid}/index.lance"


def is_external(table: Table) -> bool:
    """Whether the MemWAL index says that its rows stand in a file under the index's own id."""
    return table.index.inline_snapshots is None and table.index.num_regions > 0


def read_snapshot(table: Table) -> Snapshot | None:
    """The table's region snapshot; None where none was taken yet. At most one request.

    Raises:
        InvalidFormatError: what is stored is no Lance file, or has columns of neither layout.
        StorageError: the store failed.
    """
    index = table.index
    if index.inline_snapshots is not None:
        return Snapshot(index.snapshot_ts_millis or 0, "inline", decode_file(index.inline_snapshots))
    if not is_external(table):
        return None
    try:
        data = table.store.get(snapshot_path(index.uuid))
    except ObjectNotFoundError:
        return None  # a release that counts its regions without ever having taken a snapshot
    return Snapshot(index.snapshot_ts_millis or 0, "external", decode_file(data))


def encode_file(rows: pa.Table) -> bytes:
    """The rows as a Lance file; no row gives an empty file with the schema (S0-070)."""
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder, lance_errors("encode", "the region snapshot"):
        path = Path(folder) / "index.lance"
        with LanceFileWriter(str(path), rows.schema, version=_FILE_VERSION) as writer:
            if rows.num_rows:
                writer.write_batch(rows.combine_chunks())
        return path.read_bytes()


def decode_file(data: bytes) -> pa.Table:
    """The rows of a Lance file. Raises ``InvalidFormatError`` where it is none."""
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        path = Path(folder) / "index.lance"
        path.write_bytes(data)
        try:
            with lance_errors("decode", "the region snapshot"):
                return LanceFileReader(str(path)).read_all().to_table()
        except Exception as error:
            raise InvalidFormatError(f"The region snapshot is no readable Lance file: {error}") from error
