"""Read and encode region snapshots, which a table stores inside the MemWAL index or in a file of the index.

A snapshot speeds up reads and may be stale; each region's manifest is authoritative (S0-017).
With it, a reader finds the regions by opening the table, without a listing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.lance_files import lance_bytes, lance_rows
from memwal_ops.formats.lance.wire.names import U64_MAX
from memwal_ops.formats.lance.wire.snapshot_rows import RegionRow, decode_rows, without_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.snapshot_rows import Row

INDICES_FOLDER = "_indices"
# Readable by every release with MemWAL.
_FILE_VERSION = "2.0"
_WHAT = "the region snapshot"
_STATES = b"memwal-ops:states"
_STATE_NUMBERS = 3


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
        return None  # a release that records the number of regions without a snapshot
    return Snapshot(index.snapshot_ts_millis or 0, "external", decode_file(data))


@dataclass(frozen=True, slots=True)
class Known:
    """A region's state in a snapshot, by which an unchanged manifest is recognized.

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
    states = _states(snapshot.rows)
    found: dict[UUID, Known] = {}
    for region, row in zip(snapshot.regions, snapshot.rows.to_pylist(), strict=True):
        if region.state is not None:
            state = region.state
            found[region.region_id] = Known(state.version, state.replay_after_wal_id, state.wal_id_last_seen, row)
        elif str(region.region_id) in states:
            version, replayed, seen = states[str(region.region_id)]
            found[region.region_id] = Known(version, replayed, seen, row)
    return found


def _states(rows: pa.Table) -> Mapping[str, tuple[int, int | None, int | None]]:
    """The states that :func:`with_states` stored, as far as they decode."""
    try:
        stored = json.loads((rows.schema.metadata or {}).get(_STATES, b"{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {region: (state[0], state[1], state[2]) for region, state in stored.items() if _is_state(state)}


def _is_state(stored: object) -> bool:
    if not isinstance(stored, list) or len(stored) != _STATE_NUMBERS or stored[0] is None:
        return False
    return all(one is None or (type(one) is int and 0 <= one <= U64_MAX) for one in stored)


def with_states(rows: pa.Table, states: Mapping[UUID, Sequence[int | None]]) -> pa.Table:
    """Store the states in the metadata of the rows: version, ``replay_after_wal_id``, ``wal_id_last_seen``."""
    stored = json.dumps({str(region_id): [*state] for region_id, state in states.items()})
    return rows.replace_schema_metadata({_STATES: stored.encode()})


def rows_without_values(rows: pa.Table) -> pa.Table:
    """The rows without the columns of region values, and without the metadata of other programs.

    Raises:
        InvalidFormatError: the columns are of no known layout.
    """
    return without_fields(rows).replace_schema_metadata({_STATES: json.dumps(_states(rows)).encode()})


def encode_file(rows: pa.Table) -> bytes:
    """Encode the rows as a Lance file; without rows, an empty file with the schema (S0-070)."""
    return lance_bytes(rows, _FILE_VERSION, _WHAT)


def decode_file(data: bytes) -> pa.Table:
    """Decode the rows of a Lance file. Raises ``InvalidFormatError`` if it is not one."""
    return lance_rows(data, _WHAT, max_rows=len(data))
