"""Read and encode region snapshots, which a table stores inside the MemWAL index or in a file of the index.

A snapshot speeds up reads and may be stale; each region's manifest is authoritative (S0-017).
With it, a reader finds the regions by opening the table, without a listing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.encoded_rows import lance_bytes, lance_rows
from memwal_ops.formats.lance.wire.memwal_index import (
    RegionRow,
    decode_rows,
    states_of,
    with_states_alone,
    without_fields,
)
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.memwal_index import Row

# Readable by every release with MemWAL.
_FILE_VERSION = "2.0"
_WHAT = "the region snapshot"


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
    """The path of the rows of a snapshot that is not inline (S0-104)."""
    return f"{INDICES_FOLDER}/{uuid}/index.lance"


def is_external(table: Table) -> bool:
    """Whether, according to the MemWAL index, the rows are in a file named by the index's id."""
    return table.index.inline_snapshots is None and table.index.num_regions > 0


def read_snapshot(table: Table) -> Snapshot | None:
    """The table's region snapshot; None if none was taken yet. At most one request.

    Raises:
        InvalidFormatError: the stored bytes are not a Lance file, or have columns of neither layout.
    """
    index = table.index
    if index.inline_snapshots is not None:
        return Snapshot(index.snapshot_ts_millis or 0, "inline", decode_file(index.inline_snapshots))
    if not is_external(table):
        return None
    try:
        data = table.store.get(snapshot_path(index.uuid))
    except ObjectNotFoundError:
        return None  # a release that records the number of regions without a snapshot
    return Snapshot(index.snapshot_ts_millis or 0, "external", decode_file(data))


@dataclass(frozen=True, slots=True)
class Known:
    """A region's state in a snapshot. By it an unchanged manifest is recognized.

    ``row`` is its row; the other attributes are those of the manifest.
    """

    version: int
    replay_after_wal_id: int | None
    wal_id_last_seen: int | None
    row: Row


def known_regions(snapshot: Snapshot) -> Mapping[UUID, Known]:
    """Per region its state in the snapshot.

    Rows of the region layout contain it. Rows of the shard layout do not: there it
    is in the schema's metadata, which snapshots of other programs do not have.

    Raises:
        InvalidFormatError: a row does not decode.
    """
    states = states_of(snapshot.rows)
    found: dict[UUID, Known] = {}
    for region, row in zip(snapshot.regions, snapshot.rows.to_pylist(), strict=True):
        if region.state is not None:
            state = region.state
            found[region.region_id] = Known(state.version, state.replay_after_wal_id, state.wal_id_last_seen, row)
        elif str(region.region_id) in states:
            version, replayed, seen = states[str(region.region_id)]
            found[region.region_id] = Known(version, replayed, seen, row)
    return found


def rows_without_values(rows: pa.Table) -> pa.Table:
    """The rows without the columns of region values, and without the metadata of other programs.

    Raises:
        InvalidFormatError: the columns are of no known layout.
    """
    return with_states_alone(without_fields(rows), rows)


def encode_file(rows: pa.Table) -> bytes:
    """Encode the rows as a Lance file; without rows, an empty file with the schema (S0-070)."""
    return lance_bytes(rows, _FILE_VERSION, _WHAT)


def decode_file(data: bytes) -> pa.Table:
    """Decode the rows of a Lance file. Raises ``InvalidFormatError`` if it is not one."""
    return lance_rows(data, _WHAT, max_rows=len(data))
