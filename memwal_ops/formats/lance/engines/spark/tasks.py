"""The tasks of executors: read keys, find superseded rows, write winners and deletion vectors.

Each function here returns the function of one stage; the variables in its closure are sent to the executors in Spark's
task closure and appear in no configuration, log or page of the UI. Only keys, locators and row addresses are Spark
rows: a task streams the payload from Lance to Lance. A task may run twice (a retry, speculation). It only adds files
that no version names; the driver commits those that the one successful attempt of each partition returns.

A locator is the position and the age of a row of a pass in one int64. The order of the numbers is the order of the
writes within a region: ordinal of the generation in the pass, then row within the generation, then one bit for a
tombstone. So ``max`` over a key finds its newest row, and no second column has to be shuffled.

Arrow types that Spark does not have are mapped to the nearest one that it has: vectors (fixed-size lists) become lists;
unsigned integers the next wider signed one; half floats floats; dictionaries their values. The reverse is a cast to the
table's own type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from lance.blob import BlobType

from memwal_ops.core.spark.stages import Counters, reported
from memwal_ops.errors import GenerationCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError, read_keys
from memwal_ops.formats.lance.engines.merge.locate import MAX_LOOKUPS, KeyCode, lookup_keys, scan_keys
from memwal_ops.formats.lance.engines.merge.rewrite import BaseVersion, delete_superseded, write_winners
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, ROW_ID, lance_errors, open_dataset
from memwal_ops.formats.lance.generations.projection import TOMBSTONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import lance
    import numpy.typing as npt

    from memwal_ops.formats.lance.generations.generation import Generation, SealedGeneration
    from memwal_ops.storage.locations import Location

    Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


ORDINAL_SHIFT = 41
MAX_GENERATIONS = 1 << 22
MAX_ROWS = 1 << 40
_RANK_MASK = MAX_ROWS - 1


def pack(ordinal: int, tombstones: npt.NDArray[np.bool_], *, newest_row_first: bool) -> npt.NDArray[np.int64]:
    """Locators of all live rows of one generation, in row order."""
    ranks = np.arange(len(tombstones), dtype=np.int64)
    if newest_row_first:
        ranks = ranks[::-1]
    return np.int64(ordinal << ORDINAL_SHIFT) | (ranks << 1) | tombstones.astype(np.int64)


def ordinals(locators: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The generation of each row, as its position in the pass."""
    return locators >> ORDINAL_SHIFT


def positions(locators: npt.NDArray[np.int64], live_rows: int, *, newest_row_first: bool) -> npt.NDArray[np.int64]:
    """The position of each row among the live rows of its generation."""
    ranks = (locators >> 1) & _RANK_MASK
    return live_rows - 1 - ranks if newest_row_first else ranks


def tombstones(locators: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each row deletes its key."""
    return (locators & 1).astype(np.bool_)


_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}
_MAX_DECIMAL = 38


def spark_schema(schema: pa.Schema) -> pa.Schema:
    """The same columns in types that Spark has; metadata is left out."""
    return pa.schema([pa.field(field.name, spark_type(field.type), field.nullable) for field in schema])


def spark_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type in which Spark gets values of ``kind``. Raises ``UnsupportedFeatureError``: none."""
    if isinstance(kind, BlobType):
        return pa.binary()
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return spark_type(kind.value_type)
    if pa.types.is_nested(kind):
        return _nested(kind)
    if pa.types.is_time(kind) or (pa.types.is_decimal(kind) and kind.precision > _MAX_DECIMAL):
        raise UnsupportedFeatureError(
            f"Spark has no type for {kind}.", remedy='Leave the column out: .option("columns", "id,...").'
        )
    return _flat(kind)


def _flat(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)  # the same instant in any zone; Spark sets its own
    if pa.types.is_duration(kind):
        return pa.duration("us")
    return _WIDER.get(kind, kind)


def _nested(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, spark_type(field.type), field.nullable) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(spark_type(kind.key_type), spark_type(kind.item_type))
    if not hasattr(kind, "value_field"):
        raise UnsupportedFeatureError(f"Spark has no type for {kind}.")
    return pa.list_(pa.field("element", spark_type(kind.value_type), kind.value_field.nullable))


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of ``schema`` (from :func:`spark_schema`) from ``batch``."""
    return pa.RecordBatch.from_arrays(
        [_plain(batch.column(field.name)).cast(field.type) for field in schema], schema=schema
    )


def _plain(array: pa.Array) -> pa.Array:
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


TASK_BYTES = 256 << 20
"""Memory that one task may use for rows in flight, in bytes."""

_ROWS_PER_BATCH = 65_536
_RESULT = pa.schema([("result", pa.string())])


@dataclass(frozen=True, slots=True)
class Pass:
    """The input that all tasks of a pass share, at the base version that it was planned on.

    ``location``: the table's, with its current credentials, which its ``repr`` does not show. ``code``: how keys are
    encoded. ``stable``: whether rows have stable ids. ``generations``: in order; a position in it is an ordinal.
    ``counters``: where tasks count, if progress is reported.
    """

    location: Location
    version: int
    primary_key: tuple[str, ...]
    code: KeyCode
    stable: bool
    generations: tuple[SealedGeneration, ...]
    counters: Counters | None = None

    def count(self, rows: int, size: int) -> None:
        """Count the rows and bytes that a task has processed."""
        if self.counters is not None:
            self.counters.add(rows, size)

    def base(self) -> lance.LanceDataset:
        """The base at that version."""
        with lance_errors("open", self.location.uri):
            return open_dataset(self.location, version=self.version)

    def without(self, addresses: npt.NDArray[np.uint64]) -> dict[str, Any]:
        """Write deletion vectors that hide base rows (ascending); ``deleted`` is 0: who has their keys fills it in."""
        updated, removed = delete_superseded(BaseVersion(self.location, self.base()), addresses)
        self.count(len(addresses), 0)
        return {
            "updated": [fragment.to_json() for fragment in updated],
            "removed": removed,
            "superseded": len(addresses),
            "deleted": 0,
        }

    def open(self, ordinal: int) -> Generation:
        """One of its generations. Raises ``BlockedRegionsError``: it cannot be opened any more."""
        sealed = self.generations[ordinal]
        try:
            return sealed.open(self.location)
        except GenerationCorruptError as error:
            raise BlockedRegionsError({sealed.ref.region_id: (sealed.ref.generation, error)}) from error


def key_reader(work: Pass) -> Task:
    """A task from ordinals (``id``) to ``key`` and ``locator`` of every live row of these generations."""

    def read_generation_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            for ordinal in _ids(batches):
                yield from _keys_of(work, ordinal)

    return read_generation_keys


def _keys_of(work: Pass, ordinal: int) -> Iterator[pa.RecordBatch]:
    sealed = work.generations[ordinal]
    table = read_keys(work.open(ordinal), work.primary_key)
    if table.num_rows != sealed.live_rows:
        raise BlockedRegionsError({sealed.ref.region_id: (sealed.ref.generation, miscounted(sealed, table.num_rows))})
    deletes = np.asarray(table.column(TOMBSTONE).fill_null(False).combine_chunks().to_numpy(zero_copy_only=False))  # noqa: FBT003
    locators = pack(ordinal, deletes, newest_row_first=sealed.newest_row_first)
    codes = work.code.encode(table.select(list(work.primary_key)))
    work.count(table.num_rows, codes.nbytes + locators.nbytes)
    yield from pa.table({"key": codes, "locator": locators}).to_batches(_ROWS_PER_BATCH)


def miscounted(sealed: SealedGeneration, rows: int) -> GenerationCorruptError:
    """The error of a generation of which ``rows`` rows were read, and not the number in its metadata."""
    return GenerationCorruptError(f"{sealed.ref} has {sealed.live_rows} rows by its metadata, but {rows} were read.")


def base_reader(work: Pass, fragment_ids: Sequence[int]) -> Task:
    """A task from positions (``id``) in ``fragment_ids`` to ``key``, ``address`` (and ``row_id``) of live rows."""

    def read_base_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            base = work.base()
            with lance_errors("read the keys of", work.location.uri):
                for position in _ids(batches):
                    fragment = base.get_fragment(fragment_ids[position])
                    assert fragment is not None  # noqa: S101 - the driver saw it in the same version
                    scanned = scan_keys(
                        base, work.primary_key, TASK_BYTES // 16, stable=work.stable, fragments=[fragment]
                    )
                    for batch in scanned:
                        keys = pa.Table.from_batches([batch])
                        yield _located(work.code.encode(keys.select(list(work.primary_key))), keys, work, "key")

    return read_base_keys


def index_reader(work: Pass, kind: pa.DataType) -> Task:
    """A task from ``key`` and ``locator`` of winners to ``locator``, ``address`` (and ``row_id``) of base rows.

    It looks them up in the key index.
    """
    name = work.primary_key[0]

    def look_up_base_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            base: lance.LanceDataset | None = None
            for chunk in _chunked(batches, MAX_LOOKUPS):
                base = base or work.base()
                keys = pa.chunked_array([work.code.decode(chunk.column("key").combine_chunks(), kind)])
                with lance_errors("look up keys of", work.location.uri):
                    batches_found = list(lookup_keys(base, name, keys, stable=work.stable))
                if not batches_found:
                    continue
                stored_keys = pa.Table.from_batches(batches_found)
                codes = work.code.encode(stored_keys.select([name]))
                # Without the key's own column: its name is the user's, and may be one of ours.
                rows = stored_keys.drop_columns([name]).append_column("key", codes)
                hits = rows.join(chunk, "key", join_type="inner").combine_chunks()
                yield from (
                    _located(batch.column("locator"), pa.Table.from_batches([batch]), work, "locator")
                    for batch in hits.to_batches()
                )

    return look_up_base_keys


def _located(first: pa.Array, rows: pa.Table, work: Pass, name: str) -> pa.RecordBatch:
    """``first`` with the rows' addresses (and ids) as int64: Spark has no unsigned numbers."""
    columns = {name: first, "address": rows.column(ROW_ADDRESS).combine_chunks().view(pa.int64())}
    if work.stable:
        columns["row_id"] = rows.column(ROW_ID).combine_chunks().cast(pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def deleter(work: Pass) -> Task:
    """A task from ``locator`` and ``address`` of superseded base rows, grouped by fragment, to deletion vectors."""

    def write_deletion_vectors(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            rows = _gathered(batches)
            if not rows.num_rows:
                return
            addresses = np.sort(_int64(rows, "address").view(np.uint64))
            deleted = int(tombstones(_int64(rows, "locator")).sum())
            yield _result(**{**work.without(addresses), "deleted": deleted})

    return write_deletion_vectors


def writer(work: Pass) -> Task:
    """A task from ``locator`` (and ``row_id``, null if unknown) of winners, grouped by generation, to new fragments."""

    def write_winning_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            rows = _gathered(batches)
            if not rows.num_rows:
                return
            locators = _int64(rows, "locator")
            wins = ~tombstones(locators)
            row_ids = _int64(rows, "row_id", null=-1)[wins] if work.stable else None
            locators = locators[wins]
            if not len(locators):
                return
            own_ordinals = np.unique(ordinals(locators)).tolist()
            masks, replaced = [], []
            for ordinal in own_ordinals:
                mask, ids = _mask(work.generations[ordinal], ordinal, locators, row_ids)
                masks.append(mask)
                replaced.append(ids)
            kept = np.concatenate([ids for ids in replaced if ids is not None]) if work.stable else None
            yield _result(fragments=write_masked(work, own_ordinals, masks, kept))

    return write_winning_rows


def write_masked(
    work: Pass,
    own_ordinals: Sequence[int],
    masks: Sequence[npt.NDArray[np.bool_]],
    row_ids: npt.NDArray[np.int64] | None,
) -> list[dict[str, Any]]:
    """Write the winners of some generations, by a mask and, with stable row ids, an id for each of their rows."""
    fragments = write_winners(
        BaseVersion(work.location, work.base()),
        [work.open(ordinal) for ordinal in own_ordinals],
        masks,
        row_ids,
        TASK_BYTES,
        lambda _: None,
    )
    size = sum(file.file_size_bytes or 0 for fragment in fragments for file in fragment.files)
    work.count(sum(fragment.physical_rows for fragment in fragments), size)
    return [fragment.to_json() for fragment in fragments]


def _mask(
    sealed: SealedGeneration, ordinal: int, locators: npt.NDArray[np.int64], row_ids: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64] | None]:
    """Which live rows of one generation win, and the ids of the base rows that they replace."""
    here = ordinals(locators) == ordinal
    offsets = positions(locators[here], sealed.live_rows, newest_row_first=sealed.newest_row_first)
    mask = np.zeros(sealed.live_rows, dtype=np.bool_)
    mask[offsets] = True
    if row_ids is None:
        return mask, None
    ids = np.full(sealed.live_rows, -1, dtype=np.int64)
    # A winner may be here twice: once by itself, once with the base row that it replaces.
    np.maximum.at(ids, offsets, row_ids[here])
    return mask, ids


def _ids(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _gathered(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    gathered = [batch for batch in batches if batch.num_rows]
    return pa.Table.from_batches(gathered) if gathered else pa.table({})


def _chunked(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            if size + piece.num_rows > rows:
                yield pa.Table.from_batches(gathered)
                gathered, size = [], 0
            gathered.append(piece)
            size += piece.num_rows
    if size:
        yield pa.Table.from_batches(gathered)


def _int64(rows: pa.Table, name: str, *, null: int | None = None) -> npt.NDArray[np.int64]:
    column = rows.column(name)
    values: npt.NDArray[np.int64] = (column if null is None else column.fill_null(null)).to_numpy()
    return values


def _result(**document: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"result": json.dumps(document)}], schema=_RESULT)
