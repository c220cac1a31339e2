"""Region snapshots as a table stores them: inside the MemWAL index, or in a file beside it.

A snapshot is for reading fast and may be stale; each region's manifest stays the truth (S0-017).
With it, "which regions are there" is one open table and no listing.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lance.file import LanceFileReader, LanceFileWriter

from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.format.lance_file import check_lance_file
from memwal_ops.format.names import U64_MAX
from memwal_ops.format.snapshot_rows import RegionRow, decode_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.core.table import Table
    from memwal_ops.format.snapshot_rows import Row

INDICES_FOLDER = "_indices"
# Readable by every release that knows MemWAL.
_FILE_VERSION = "2.0"
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


@dataclass(frozen=True, slots=True)
class Known:
    """What a snapshot knows of a region: enough to see that its manifest did not move since.

    ``row`` is its row; the rest is the manifest's.
    """

    version: int
    replay_after_wal_id: int | None
    wal_id_last_seen: int | None
    row: Row


def known_regions(snapshot: Snapshot) -> Mapping[UUID, Known]:
    """Per region what the snapshot knows of its manifest.

    The rows of the region layout say it. Those of the shard layout have no room for it: there it
    stands in the schema's metadata, and a snapshot that another release took knows nothing.

    Raises:
        InvalidFormatError: a row is no region.
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
    """What :func:`with_states` wrote, as far as it can be read."""
    try:
        said = json.loads((rows.schema.metadata or {}).get(_STATES, b"{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    return {region: (state[0], state[1], state[2]) for region, state in said.items() if _is_state(state)}


def _is_state(said: object) -> bool:
    if not isinstance(said, list) or len(said) != _STATE_NUMBERS or said[0] is None:
        return False
    return all(one is None or (type(one) is int and 0 <= one <= U64_MAX) for one in said)


def with_states(rows: pa.Table, states: Mapping[UUID, Sequence[int | None]]) -> pa.Table:
    """The rows with what :func:`known_regions` reads: version, ``replay_after_wal_id``, ``wal_id_last_seen``."""
    said = json.dumps({str(region_id): [*state] for region_id, state in states.items()})
    return rows.replace_schema_metadata({_STATES: said.encode()})


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
            check_lance_file(data, len(data))
            with lance_errors("decode", "the region snapshot"):
                reader = LanceFileReader(str(path))
                if reader.num_rows() > len(data):
                    raise InvalidFormatError(f"it claims {reader.num_rows()} rows in {len(data)} bytes")
                return reader.read_all().to_table()
        except Exception as error:
            raise InvalidFormatError(f"The region snapshot is no readable Lance file: {error}") from error
