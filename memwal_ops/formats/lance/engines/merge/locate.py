"""Find the base rows that a pass supersedes: their row addresses, by key.

There are two ways with the same result. The scan compares the key columns of the whole base, as a stream, with the
keys of the winners (the newest rows of the pass); its memory is one chunk, whatever the size of the base. (A hash join
over the base's keys, as ``merge_insert`` runs it, grows with the base.) The index looks up the key of each winner; it
is faster if there are few winners compared with the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.formats.lance.engines.merge.joins import chunks_with_keys, with_keys
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, ROW_ID
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.sql_literals import has_sql_literals, is_one_of
from memwal_ops.formats.lance.indexes.index_faults import can_find_addresses, known_faults, sampled_fault
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import lance
    import numpy.typing as npt

    from memwal_ops.formats.lance.engines.merge.collapse import Winners
    from memwal_ops.formats.lance.table import Table

_ROW = "__memwal_ops_row"
# Measured (benchmarks/README.md, "Index or scan"): one index look-up costs about as much as
# scanning this many keys of the base.
SCANNED_KEYS_PER_LOOKUP = 100
_MIN_CHUNK_BYTES = 4 << 20
MAX_LOOKUPS = 20_000
_FRAGMENTS_READ_AHEAD = 2
_BATCHES_READ_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Superseded:
    """Base rows whose key has a winner.

    Attributes:
        addresses: uint64 row addresses, ascending.
        deleted: how many of them belong to a tombstone.
        row_ids: for a table with stable row ids, int64 per row of the pass: the id of the base row
            that this winner replaces, or -1; None for other tables.
        use_index: whether the key index found them.
    """

    addresses: npt.NDArray[np.uint64]
    deleted: int
    row_ids: npt.NDArray[np.int64] | None
    use_index: bool


def locate(table: Table, winners: Winners, *, max_bytes: int) -> Superseded:
    """Find the base rows that the winners supersede.

    Args:
        table: pinned; addresses are those of exactly this version.
        max_bytes: memory budget; a sixteenth of it is used for one chunk of base keys.
    """
    stable = bool(table.dataset.has_stable_row_ids)
    columns = [*table.primary_key]
    chunk_bytes = max(max_bytes // 16, _MIN_CHUNK_BYTES)
    with lance_errors("read the keys of", table.location.uri):
        use_index = index_is_cheaper(table, winners)
        source = (
            lookup_keys(table.dataset, columns[0], winners.keys.column(columns[0]), stable=stable)
            if use_index
            else scan_keys(table.dataset, columns, chunk_bytes, stable=stable)
        )
        hits = matching_rows(source, winners.keys, chunk_bytes)
    row_ids = np.full(winners.rows_read, -1, dtype=np.int64) if stable else None
    if hits is None:
        return Superseded(np.empty(0, dtype=np.uint64), 0, row_ids, use_index)
    if row_ids is not None:
        replacing, ids = replaced_ids(hits, winners.keys)
        row_ids[winners.rows[replacing]] = ids
    addresses = np.sort(hits.column(ROW_ADDRESS).to_numpy())
    return Superseded(addresses, count_deleted(hits, winners.keys, winners.is_tombstone), row_ids, use_index)


def matching_rows(base: Iterable[pa.RecordBatch], keys: pa.Table, chunk_bytes: int) -> pa.Table | None:
    """The base rows, of :func:`scan_keys` or :func:`lookup_keys`, that have one of ``keys``; None: there are none."""
    if not keys.num_rows:
        return None
    matches = [*chunks_with_keys(base, keys, keys.column_names, chunk_bytes=max(chunk_bytes, keys.nbytes))]
    hits = pa.concat_tables(matches) if matches else None
    return hits if hits is not None and hits.num_rows else None


def count_deleted(hits: pa.Table, keys: pa.Table, is_tombstone: npt.NDArray[np.bool_]) -> int:
    """How many of these base rows have the key of a tombstone, by the mask over ``keys``."""
    tombstones = keys.filter(pa.array(is_tombstone))
    return with_keys(hits, tombstones, keys.column_names).num_rows if tombstones.num_rows else 0


def replaced_ids(hits: pa.Table, keys: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each of these base rows the position of its key in ``keys``, and its stable row id."""
    columns = keys.column_names
    numbered = keys.append_column(_ROW, pa.array(np.arange(keys.num_rows)))
    joined = hits.select([*columns, ROW_ID]).join(numbered, columns, join_type="inner")
    return joined.column(_ROW).to_numpy(), joined.column(ROW_ID).to_numpy().astype(np.int64)


def repeated_keys(table: Table, winners: Winners, *, max_bytes: int) -> Mapping[str, Any] | None:
    """A key of a winner that several rows of the base have; None: there is none.

    For a key that is given by an option and not marked in the schema: the upsert would replace all these rows by one.
    """
    columns = [*table.primary_key]
    chunk_bytes = max(max_bytes // 16, _MIN_CHUNK_BYTES)
    with lance_errors("read the keys of", table.location.uri):
        hits = matching_rows(scan_keys(table.dataset, columns, chunk_bytes, stable=False), winners.keys, chunk_bytes)
    if hits is None:
        return None
    counts = hits.group_by(columns, use_threads=False).aggregate([([], "count_all")])
    several = counts.filter(pc.greater(counts.column("count_all"), 1)).select(columns).slice(0, 1).to_pylist()
    return several[0] if several else None


def index_is_cheaper(table: Table, winners: Winners) -> bool:
    """Whether the base rows are found sooner by looking up each key of ``winners``, at most ``MAX_LOOKUPS``."""
    if len(table.primary_key) != 1 or not 0 < winners.keys.num_rows <= MAX_LOOKUPS:
        return False
    key = table.primary_key[0]
    return (
        has_sql_literals(winners.keys.column(key))
        and winners.keys.num_rows * SCANNED_KEYS_PER_LOOKUP < table.dataset.count_rows()
        and is_indexed(table, key)
    )


def is_indexed(table: Table, key: str) -> bool:
    """Whether there is a B-tree index over exactly this column, and a sample of its rows is found by it.

    Timeline of the loss otherwise: an index lacks rows that it claims to cover (:mod:`.index_faults` has how); a
    look-up does not find the base row of a key, which then stands twice, or is not deleted.
    """
    field = next((one.id for one in table.manifest.manifest.fields if one.parent_id < 0 and one.name == key), None)
    of_key = [entry for entry in table.manifest.index_entries if [*entry.fields] == [field]]
    trees = [entry for entry in of_key if entry.index_details.type_url.lower().endswith("btreeindexdetails")]
    if not trees or not can_find_addresses(table, key):
        return False
    # pylance may choose any index of the column.
    known = known_faults(table)
    faults = [known[entry.name] for entry in of_key if entry.name in known]
    fault = faults[0] if faults else sampled_fault(table, key, trees)
    if fault is not None:
        get_logger(__name__).warning("key_index_not_used", table=table.location.uri, column=key, reason=fault.why)
    return fault is None


def has_key_index(dataset: lance.LanceDataset, key: str) -> bool:
    """Whether there is a B-tree index over exactly this column."""
    return "`" not in key and any(
        index.field_names == [key] and index.type_url.lower().endswith("btreeindexdetails")
        for index in dataset.describe_indices()
    )


def scan_keys(
    dataset: lance.LanceDataset,
    primary_key: Sequence[str],
    read_ahead_bytes: int,
    *,
    stable: bool,
    fragments: list[lance.LanceFragment] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Key columns, ``_rowaddr`` and, if ``stable``, ``_rowid`` of all live rows, or those of ``fragments``."""
    return iter(
        dataset.scanner(
            columns=list(primary_key),
            with_row_address=True,
            with_row_id=stable,
            scan_in_order=False,
            io_buffer_size=read_ahead_bytes,
            fragment_readahead=_FRAGMENTS_READ_AHEAD,
            batch_readahead=_BATCHES_READ_AHEAD,
            fragments=fragments,
        ).to_batches()
    )


def lookup_keys(
    dataset: lance.LanceDataset, key: str, keys: pa.ChunkedArray, *, stable: bool
) -> Iterator[pa.RecordBatch]:
    """The same columns of the rows that hold one of ``keys`` (at most ``MAX_LOOKUPS``), through the index."""
    condition = is_one_of(key, keys.to_pylist())
    return iter(
        dataset.scanner(columns=[key], filter=condition, with_row_address=True, with_row_id=stable).to_batches()
    )
