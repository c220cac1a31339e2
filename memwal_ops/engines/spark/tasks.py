"""What runs on executors: read keys, find superseded rows, write winners and deletion vectors.

Each function here makes the function of one stage; what it closes over travels to the executors in
Spark's task closure and stands in no configuration, log or page of the UI. Only keys, locators and
row addresses come in and go out as Spark rows: payload goes from Lance to Lance within one task.

A task may run twice (a retry, speculation). It only adds files under names that nobody knows; the
driver commits those that the one successful attempt of each partition names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.datasets import open_dataset
from memwal_ops.core.generations import ROW_ADDRESS
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.projection import TOMBSTONE
from memwal_ops.engines.api import BlockedRegionsError
from memwal_ops.engines.collapse import read_keys
from memwal_ops.engines.locate import MAX_LOOKUPS, ROW_ID, lookup_keys, scan_keys
from memwal_ops.engines.rewrite import Target, delete_superseded, write_winners
from memwal_ops.engines.spark.faults import reported
from memwal_ops.engines.spark.locators import ordinals, pack, positions, tombstones
from memwal_ops.errors import GenerationCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import lance
    import numpy.typing as npt
    from pyspark import Accumulator

    from memwal_ops.core.generations import Generation, SealedGeneration
    from memwal_ops.engines.spark.keys import KeyCode
    from memwal_ops.storage.locations import Location

    Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

TASK_BYTES = 256 << 20
"""Memory that one task may use for rows under way, in bytes."""

_ROWS_PER_BATCH = 65_536
_RESULT = pa.schema([("result", pa.string())])


@dataclass(frozen=True, slots=True)
class Counters:
    """Spark accumulators, for progress: what tasks that ended have dealt with."""

    rows: Accumulator[int]
    bytes: Accumulator[int]

    def add(self, rows: int, size: int) -> None:
        """Count rows and bytes, in a task."""
        self.rows.add(rows)
        self.bytes.add(size)


@dataclass(frozen=True, slots=True)
class Pass:
    """What every task of a pass knows.

    Attributes:
        location: the table's, with the credentials of the moment; its ``repr`` shows none.
        version: the base version that the pass was decided on.
        code: how keys cross.
        stable: whether rows have stable ids.
        generations: the pass's generations in order; a place in it is an ordinal.
        counters: where tasks count, if anybody wants to know.
    """

    location: Location
    version: int
    primary_key: tuple[str, ...]
    code: KeyCode
    stable: bool
    generations: tuple[SealedGeneration, ...]
    counters: Counters | None = None

    def count(self, rows: int, size: int) -> None:
        """Count what a task has dealt with."""
        if self.counters is not None:
            self.counters.add(rows, size)

    def base(self) -> lance.LanceDataset:
        """The base at that version."""
        with lance_errors("open", self.location.uri):
            return open_dataset(self.location, version=self.version)

    def open(self, ordinal: int) -> Generation:
        """One of its generations.

        Raises:
            BlockedRegionsError: it does not open any more.
        """
        sealed = self.generations[ordinal]
        try:
            return sealed.open(self.location)
        except GenerationCorruptError as error:
            raise BlockedRegionsError({sealed.ref.region_id: (sealed.ref.generation, error)}) from error


def key_reader(work: Pass) -> Task:
    """Ordinals (``id``) to ``key`` and ``locator`` of every live row of these generations."""

    def read_generation_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            for ordinal in _ids(batches):
                yield from _keys_of(work, ordinal)

    return read_generation_keys


def _keys_of(work: Pass, ordinal: int) -> Iterator[pa.RecordBatch]:
    sealed = work.generations[ordinal]
    table = read_keys(work.open(ordinal), work.primary_key)
    if table.num_rows != sealed.live_rows:
        fault = GenerationCorruptError(f"{sealed.ref} counts {sealed.live_rows} rows and reads {table.num_rows}.")
        raise BlockedRegionsError({sealed.ref.region_id: (sealed.ref.generation, fault)})
    deletes = np.asarray(table.column(TOMBSTONE).fill_null(False).combine_chunks().to_numpy(zero_copy_only=False))  # noqa: FBT003
    locators = pack(ordinal, deletes, newest_row_first=sealed.newest_row_first)
    codes = work.code.encode(table.select(list(work.primary_key)))
    work.count(table.num_rows, codes.nbytes + locators.nbytes)
    yield from pa.table({"key": codes, "locator": locators}).to_batches(_ROWS_PER_BATCH)


def base_reader(work: Pass, fragment_ids: Sequence[int]) -> Task:
    """Places (``id``) in ``fragment_ids`` to ``key``, ``address`` (and ``row_id``) of these fragments' live rows."""

    def read_base_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            base = work.base()
            with lance_errors("read the keys of", work.location.uri):
                for place in _ids(batches):
                    fragment = base.get_fragment(fragment_ids[place])
                    assert fragment is not None  # noqa: S101 - the driver saw it in the same version
                    found = scan_keys(
                        base, work.primary_key, TASK_BYTES // 16, stable=work.stable, fragments=[fragment]
                    )
                    for batch in found:
                        keys = pa.Table.from_batches([batch])
                        yield _located(work.code.encode(keys.select(list(work.primary_key))), keys, work, "key")

    return read_base_keys


def index_reader(work: Pass, kind: pa.DataType) -> Task:
    """``key`` and ``locator`` of winners to ``locator``, ``address`` (and ``row_id``) of base rows, by key index."""
    name = work.primary_key[0]

    def look_up_base_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            base: lance.LanceDataset | None = None
            for chunk in _chunked(batches, MAX_LOOKUPS):
                base = base or work.base()
                asked = pa.chunked_array([work.code.decode(chunk.column("key").combine_chunks(), kind)])
                with lance_errors("look up keys of", work.location.uri):
                    batches_found = list(lookup_keys(base, name, asked, stable=work.stable))
                if not batches_found:
                    continue
                found = pa.Table.from_batches(batches_found)
                codes = work.code.encode(found.select([name]))
                # Without the key's own column, whose name is the user's: it may be one of ours.
                places = found.drop_columns([name]).append_column("key", codes)
                hits = places.join(chunk, "key", join_type="inner").combine_chunks()
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
    """``locator`` and ``address`` of superseded base rows, grouped by fragment, to one ``result``: what was written."""

    def write_deletion_vectors(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            rows = _gathered(batches)
            if not rows.num_rows:
                return
            addresses = np.sort(_int64(rows, "address").view(np.uint64))
            updated, removed = delete_superseded(Target(work.location, work.base()), addresses)
            deleted = int(tombstones(_int64(rows, "locator")).sum())
            work.count(len(addresses), 0)
            yield _result(
                updated=[fragment.to_json() for fragment in updated],
                removed=removed,
                superseded=len(addresses),
                deleted=deleted,
            )

    return write_deletion_vectors


def writer(work: Pass) -> Task:
    """``locator`` (and ``row_id``, null where unknown) of winners, grouped by generation, to new fragments."""

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
            chosen = np.unique(ordinals(locators)).tolist()
            masks, replaced = [], []
            for ordinal in chosen:
                mask, ids = _mask(work.generations[ordinal], ordinal, locators, row_ids)
                masks.append(mask)
                replaced.append(ids)
            fragments = write_winners(
                Target(work.location, work.base()),
                [work.open(ordinal) for ordinal in chosen],
                masks,
                np.concatenate([ids for ids in replaced if ids is not None]) if work.stable else None,
                TASK_BYTES,
                lambda _: None,
            )
            work.count(len(locators), sum(file.file_size_bytes or 0 for one in fragments for file in one.files))
            yield _result(fragments=[fragment.to_json() for fragment in fragments])

    return write_winning_rows


def _mask(
    sealed: SealedGeneration,
    ordinal: int,
    locators: npt.NDArray[np.int64],
    row_ids: npt.NDArray[np.int64] | None,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64] | None]:
    """Which live rows of one generation win, and the ids of the base rows that they replace."""
    here = ordinals(locators) == ordinal
    places = positions(locators[here], sealed.live_rows, newest_row_first=sealed.newest_row_first)
    mask = np.zeros(sealed.live_rows, dtype=np.bool_)
    mask[places] = True
    if row_ids is None:
        return mask, None
    ids = np.full(sealed.live_rows, -1, dtype=np.int64)
    # A winner stands here twice: once by itself, once with the base row that it replaces.
    np.maximum.at(ids, places, row_ids[here])
    return mask, ids


def _ids(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _gathered(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    held = [batch for batch in batches if batch.num_rows]
    return pa.Table.from_batches(held) if held else pa.table({})


def _chunked(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            if size + piece.num_rows > rows:
                yield pa.Table.from_batches(held)
                held, size = [], 0
            held.append(piece)
            size += piece.num_rows
    if size:
        yield pa.Table.from_batches(held)


def _int64(rows: pa.Table, name: str, *, null: int | None = None) -> npt.NDArray[np.int64]:
    column = rows.column(name)
    values: npt.NDArray[np.int64] = (column if null is None else column.fill_null(null)).to_numpy()
    return values


def _result(**document: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"result": json.dumps(document)}], schema=_RESULT)
