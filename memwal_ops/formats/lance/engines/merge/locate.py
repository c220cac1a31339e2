"""Find the base rows that a pass supersedes: their row addresses, by key.

There are two ways with the same result. The scan compares the key columns of the whole base, as a stream, with the keys
of the winners (the newest rows of the pass); its memory is one chunk, whatever the size of the base. (A hash join over
the base's keys, as ``merge_insert`` runs it, grows with the base.) The index looks up the key of each winner; it is
faster if there are few winners compared with the base.

Keys are encoded for Spark as one ``bigint`` or one ``binary`` column, equal exactly if the keys are equal. Spark has no
unsigned integers and no fixed-size binary, and represents decimals and time zones differently. None of that may affect
whether two keys are equal, so a key is encoded as the bits that Lance stores.

Rows are joined with keys by row numbers, as rows may have columns that pyarrow does not join (lists, structs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.formats.lance.files import datasets
from memwal_ops.formats.lance.indexes.index_faults import can_find_addresses, known_faults, sampled_fault
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import lance
    import numpy.typing as npt
    from numpy.typing import NDArray

    from memwal_ops.formats.lance.engines.merge.collapse import Winners
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True, slots=True)
class KeyCode:
    """The code of a table's keys. It follows from the base's schema, and is the same on driver and executors.

    Attributes:
        spark_type: ``bigint`` or ``binary``.
        framed: each column with a mark for null and its length before it, so that ("a", "bc") is not ("ab", "c").
    """

    spark_type: str
    framed: bool

    def encode(self, keys: pa.Table) -> pa.Array:
        """One value per row of ``keys`` (the key columns in key order): int64 or binary, never null."""
        columns = [_stored(column) for column in keys.columns]
        if self.spark_type == "bigint":
            return _int64(columns[0])
        if not self.framed:
            return _bytes(columns[0])
        marks = pa.array([b"\x00", b"\x01"])
        parts: list[pa.Array] = []
        for column in columns:
            values = pc.fill_null(_bytes(column), b"")
            lengths = pc.binary_length(values).cast(pa.int32())
            parts += [marks.take(column.is_valid().cast(pa.int8())), _bytes(lengths), values]
        return pc.binary_join_element_wise(*parts, b"")

    def decode(self, codes: pa.Array, kind: pa.DataType) -> pa.Array:
        """Decode keys of the types that can be looked up in the key index: integers and strings."""
        if self.spark_type != "bigint":
            return codes.cast(kind)
        return codes.view(kind) if pa.types.is_uint64(kind) else codes.cast(kind)


def key_code(schema: pa.Schema, primary_key: Sequence[str]) -> KeyCode:
    """The code for a base table's key."""
    fields = [schema.field(name) for name in primary_key]
    if len(fields) != 1 or fields[0].nullable:
        return KeyCode("binary", framed=True)
    return KeyCode("bigint" if _is_number(_stored_type(fields[0].type)) else "binary", framed=False)


def _stored_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _stored_type(kind.storage_type)
    return _stored_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _stored(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no chunks at all, in some releases
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    while isinstance(array.type, pa.BaseExtensionType) or pa.types.is_dictionary(array.type):
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array.storage
    return array


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind)) and not (
        pa.types.is_interval(kind)
    )


def _int64(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind.bit_width < 64):  # noqa: PLR2004
        return array.cast(pa.int64())
    return array.view(pa.int64()) if kind.bit_width == 64 else array.view(pa.int32()).cast(pa.int64())  # noqa: PLR2004


def _bytes(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind):
        return _bytes(array.cast(pa.int8()))
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        return array.cast(pa.binary())
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary())
    return array.view(pa.binary(kind.bit_width // 8)).cast(pa.binary())


_ROW = "__memwal_ops_row"
# A reader makes a bitmap of integer keys that are at least this dense: 8 MiB for a million keys.
_NUMBERS_PER_KEY = 64
# Bits for each hashed key: of the other keys, every 16th to 32nd finds a bit that is set.
_BITS_PER_KEY = 32
_FOLD, _MULTIPLIER = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD)  # the first step of MurmurHash3's finalizer
_BYTE, _BIT = np.uint64(3), np.uint64(7)


def in_chunks(batches: Iterable[pa.RecordBatch], max_bytes: int) -> Iterator[pa.Table]:
    """Batches gathered into tables of about ``max_bytes``: a join or a filter costs something for each table."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= max_bytes:
            yield pa.Table.from_batches(gathered)
            gathered, size = [], 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def batches_without_keys(
    batches: Iterable[pa.RecordBatch], keys: pa.Table, key: list[str], *, chunk_bytes: int
) -> Iterator[pa.RecordBatch]:
    """The rows whose key is none of these, in their order.

    Integer keys that lie close together are looked up in a bitmap, batch by batch, while the batch is
    in the processor's caches. For others a hash table is made for each ``chunk_bytes`` of rows.
    """
    bitmap = _Bitmap.of(keys.column(key[0]), _NUMBERS_PER_KEY * keys.num_rows // 8) if len(key) == 1 else None
    if bitmap is None or not bitmap.exact:
        for rows in in_chunks(batches, chunk_bytes):
            yield from without_keys(rows, keys, key).to_batches()
        return
    for batch in batches:
        yield batch.filter(pa.array(~bitmap.found(batch.column(key[0]))))


def chunks_with_keys(
    batches: Iterable[pa.RecordBatch], keys: pa.Table, key: list[str], *, chunk_bytes: int
) -> Iterator[pa.Table]:
    """The rows whose key is one of these.

    Integer keys are looked up in a bitmap first. If that is not exact, the rows that it leaves are gathered to
    ``chunk_bytes``, for which a hash table of all keys is made: for each chunk of all rows it would take longer than
    all else.
    """
    bitmap = _Bitmap.of(keys.column(key[0]), chunk_bytes) if len(key) == 1 else None
    if bitmap is not None:
        batches = (batch.filter(pa.array(bitmap.found(batch.column(key[0])))) for batch in batches)
    for rows in in_chunks(batches, chunk_bytes):
        yield rows if bitmap is not None and bitmap.exact else with_keys(rows, keys, key)


class _Bitmap:
    """A set of integers.

    Attributes:
        exact: there is a bit for each number from the lowest to the highest, and one that is never set. Otherwise a
            number's bit is chosen by a hash, and some numbers that are not in the set are found as well.
    """

    def __init__(self, numbers: NDArray[np.int64], bits: int, *, exact: bool) -> None:
        self.exact = exact
        self._lowest, self._last = numbers.min(), np.uint64(bits - 1)
        self._shift = np.uint64(65 - bits.bit_length())
        self._bytes = np.zeros(-(-bits // 8), np.uint8)
        places = self._places(numbers)
        np.bitwise_or.at(self._bytes, places >> _BYTE, np.left_shift(np.uint8(1), (places & _BIT).astype(np.uint8)))

    @classmethod
    def of(cls, keys: pa.ChunkedArray, max_bytes: int) -> _Bitmap | None:
        """A bitmap of at most ``max_bytes``; None: other types than integers, or too many for it."""
        if not pa.types.is_signed_integer(keys.type) or not len(keys) or keys.null_count:
            return None
        numbers = keys.to_numpy().astype(np.int64, copy=False)
        width = int(numbers.max()) - int(numbers.min()) + 2
        if width <= 8 * max_bytes:
            return cls(numbers, width, exact=True)
        bits = 1 << min(_BITS_PER_KEY * len(numbers), 8 * max_bytes).bit_length() - 1
        return cls(numbers, bits, exact=False) if bits >= 2 * len(numbers) else None

    def found(self, keys: pa.Array) -> NDArray[np.bool_]:
        """Which of these are in the set, or may be if it is not exact; a null is not."""
        numbers = (keys.fill_null(0) if keys.null_count else keys).to_numpy().astype(np.int64, copy=False)
        places = self._places(numbers)
        bits = (self._bytes[places >> _BYTE] >> (places & _BIT).astype(np.uint8)) & np.uint8(1)
        held: NDArray[np.bool_] = bits.view(np.bool_)
        return held & keys.is_valid().to_numpy(zero_copy_only=False) if keys.null_count else held

    def _places(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        if not self.exact:
            bits = numbers.view(np.uint64)
            hashed: NDArray[np.uint64] = ((bits ^ (bits >> _FOLD)) * _MULTIPLIER) >> self._shift
            return hashed
        # Numbers below the lowest, and differences that overflow, become large unsigned numbers.
        places: NDArray[np.uint64] = np.minimum((numbers - self._lowest).view(np.uint64), self._last)
        return places


def newest_rows(rows: pa.Table, key: list[str]) -> pa.Table:
    """The last row of each key."""
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(key, use_threads=False).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
    return rows.take(last)


def without_keys(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Table:
    """The rows whose key is none of these, in their order."""
    return _chosen(rows, keys, key, among=False)


def with_keys(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Table:
    """The rows whose key is one of these, in their order."""
    return _chosen(rows, keys, key, among=True)


def _chosen(rows: pa.Table, keys: pa.Table, key: list[str], *, among: bool) -> pa.Table:
    if not keys.num_rows or not rows.num_rows:
        return rows.slice(0, 0) if among else rows
    if len(key) == 1:
        column, others = (table.column(key[0]) for table in (rows, keys))
        if pa.types.is_float16(column.type):  # which Arrow cannot look up
            column, others = column.cast(pa.float32()), others.cast(pa.float32())
        chosen = pc.is_in(column, value_set=others)
        return rows.filter(chosen if among else pc.invert(chosen))
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    left = numbered.join(keys.select(key), keys=key, join_type="left semi" if among else "left anti").column(_ROW)
    return rows.take(left.combine_chunks().sort())


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

    ``addresses``: uint64 row addresses, ascending. ``deleted``: how many of them belong to a tombstone. ``row_ids``:
    for a table with stable row ids, int64 per row of the pass: the id of the base row that this winner replaces, or -1;
    None for other tables. ``use_index``: whether the key index found them.
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
    with datasets.lance_errors("read the keys of", table.location.uri):
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
    addresses = np.sort(hits.column(datasets.ROW_ADDRESS).to_numpy())
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
    joined = hits.select([*columns, datasets.ROW_ID]).join(numbered, columns, join_type="inner")
    return joined.column(_ROW).to_numpy(), joined.column(datasets.ROW_ID).to_numpy().astype(np.int64)


def repeated_keys(table: Table, winners: Winners, *, max_bytes: int) -> Mapping[str, Any] | None:
    """A key of a winner that several rows of the base have; None: there is none.

    For a key that is given by an option and not marked in the schema: the upsert would replace all these rows by one.
    """
    columns = [*table.primary_key]
    chunk_bytes = max(max_bytes // 16, _MIN_CHUNK_BYTES)
    with datasets.lance_errors("read the keys of", table.location.uri):
        hits = matching_rows(scan_keys(table.dataset, columns, chunk_bytes, stable=False), winners.keys, chunk_bytes)
    if hits is None:
        return None
    counts = hits.group_by(columns, use_threads=False).aggregate([([], "count_all")])
    several = datasets.readable(counts.filter(pc.greater(counts.column("count_all"), 1)).select(columns).slice(0, 1))
    return several[0] if several else None


def index_is_cheaper(table: Table, winners: Winners) -> bool:
    """Whether the base rows are found sooner by looking up each key of ``winners``, at most ``MAX_LOOKUPS``."""
    if len(table.primary_key) != 1 or not 0 < winners.keys.num_rows <= MAX_LOOKUPS:
        return False
    key = table.primary_key[0]
    return (
        datasets.has_sql_literals(winners.keys.column(key))
        and winners.keys.num_rows * SCANNED_KEYS_PER_LOOKUP < table.dataset.count_rows()
        and is_indexed(table, key)
    )


def is_indexed(table: Table, key: str) -> bool:
    """Whether there is a B-tree index over exactly this column, and a sample of its rows is found by it.

    Timeline of the loss otherwise: an index lacks rows that it claims to cover (``index_faults`` has how); a
    look-up does not find the base row of a key, which then stands twice, or is not deleted.
    """
    field = next(
        (field.id for field in table.manifest.manifest.fields if field.parent_id < 0 and field.name == key), None
    )
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
    condition = datasets.is_one_of(key, keys.to_pylist())
    return iter(
        dataset.scanner(columns=[key], filter=condition, with_row_address=True, with_row_id=stable).to_batches()
    )
