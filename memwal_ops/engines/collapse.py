"""Collapse before you join: who wins each key of a pass, from keys and row addresses alone.

Newest is the highest (generation, row address) (S0-192). Reading keys first costs a few bytes a
row and spares the payload of every row that a later generation supersedes; it also means that the
base is joined once, however many generations wrote a key. Memory: the key columns of the pass and
16 bytes a row.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.core.generations import ROW_ADDRESS
from memwal_ops.core.projection import TOMBSTONE
from memwal_ops.engines.api import BlockedRegionsError
from memwal_ops.errors import DuplicateKeysError, GenerationCorruptError, InvariantViolatedError, MemwalOpsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from memwal_ops.core.generations import Generation

_AGE = "__memwal_ops_age"
_CONCURRENT_READS = 4
_SHOWN_KEYS = 3


@dataclass(frozen=True, slots=True)
class Winners:
    """The newest row of every key in a pass.

    Attributes:
        keys: key columns under the base's names; upserts and tombstones alike, one row a key.
        rows: row number of each key's winner in the pass, aligned with ``keys``.
        is_tombstone: whether the winner deletes its key, aligned with ``keys``.
        upserts: per generation of the pass, a mask over its live rows: True where the row wins
            and is no tombstone.
        rows_read: live rows in the pass.
    """

    keys: pa.Table
    rows: npt.NDArray[np.int64]
    is_tombstone: npt.NDArray[np.bool_]
    upserts: tuple[npt.NDArray[np.bool_], ...]
    rows_read: int

    @property
    def num_upserts(self) -> int:
        """Rows that the pass writes."""
        return int(len(self.is_tombstone) - self.is_tombstone.sum())

    @property
    def num_tombstones(self) -> int:
        """Keys that the pass deletes."""
        return int(self.is_tombstone.sum())


def collapse(generations: Sequence[Generation], primary_key: Sequence[str]) -> Winners:
    """Read the keys of all generations and find each key's newest row.

    Args:
        generations: grouped by region, ascending within each region.
        primary_key: the base's names of the key columns.

    Raises:
        BlockedRegionsError: a generation's keys cannot be read, or a key stands in two regions
            (S0-009): then nothing tells which row is newer.
    """
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        tables = list(pool.map(lambda generation: read_keys(generation, primary_key), generations))
    bounds = np.cumsum([0, *(table.num_rows for table in tables)])
    everything = pa.concat_tables(tables)
    total = everything.num_rows
    ages = _ages(generations, bounds)
    ranked = everything.select(list(primary_key)).append_column(_AGE, pa.array(ages))
    grouped = ranked.group_by(list(primary_key), use_threads=False).aggregate([(_AGE, "max"), (_AGE, "min")])
    newest = ages[_numpy(grouped.column(f"{_AGE}_max"))]
    oldest = ages[_numpy(grouped.column(f"{_AGE}_min"))]
    _refuse_shared_keys(generations, tables, grouped.select(list(primary_key)), newest, oldest)

    tombstones = _numpy(everything.column(TOMBSTONE))
    is_winner = np.zeros(total, dtype=np.bool_)
    is_winner[newest] = True
    if int(is_winner.sum()) != grouped.num_rows:
        raise InvariantViolatedError("Two keys of a pass share one row: the collapse is wrong, nothing was merged.")
    is_upsert = is_winner & ~tombstones
    return Winners(
        keys=grouped.select(list(primary_key)),
        rows=newest,
        is_tombstone=tombstones[newest],
        upserts=tuple(is_upsert[start:end] for start, end in pairwise(bounds)),
        rows_read=total,
    )


def read_keys(generation: Generation, primary_key: Sequence[str]) -> pa.Table:
    """Key columns under the base's names, ``_tombstone`` and ``_rowaddr``, in row order.

    Raises:
        BlockedRegionsError: they cannot be read.
        InvariantViolatedError: rows did not come in the order of their addresses.
    """
    try:
        table = generation.read_keys()
    except GenerationCorruptError as error:
        raise BlockedRegionsError({generation.ref.region_id: (generation.ref.generation, error)}) from error
    addresses = _numpy(table.column(ROW_ADDRESS))
    if len(addresses) > 1 and not bool(np.all(addresses[1:] > addresses[:-1])):
        raise InvariantViolatedError(f"{generation.ref} was not read in the order of its row addresses.")
    return table.rename_columns([*primary_key, TOMBSTONE, ROW_ADDRESS])


def _ages(generations: Sequence[Generation], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How new each row of the pass is: its row number, turned around within a generation that is newest first.

    The array is its own inverse: it also gives the row number of an age.
    """
    ages = np.arange(bounds[-1], dtype=np.int64)
    for generation, (start, end) in zip(generations, pairwise(bounds), strict=True):
        if generation.newest_row_first:
            ages[start:end] = ages[start:end][::-1].copy()
    return ages


def _refuse_shared_keys(
    generations: Sequence[Generation],
    tables: Sequence[pa.Table],
    keys: pa.Table,
    newest: npt.NDArray[np.int64],
    oldest: npt.NDArray[np.int64],
) -> None:
    region_of_generation = [generation.ref.region_id for generation in generations]
    ordinals = {region_id: ordinal for ordinal, region_id in enumerate(dict.fromkeys(region_of_generation))}
    if len(ordinals) == 1:
        return
    region_of_row = np.repeat(
        np.array([ordinals[region_id] for region_id in region_of_generation]), [table.num_rows for table in tables]
    )
    # Rows of one region are consecutive, so first and last row of a key tell whether it left it.
    shared = region_of_row[newest] != region_of_row[oldest]
    if not bool(shared.any()):
        return
    names = list(ordinals)
    causes: dict[Any, tuple[int | None, MemwalOpsError]] = {}
    for ordinal in sorted({*region_of_row[newest][shared].tolist(), *region_of_row[oldest][shared].tolist()}):
        examples = keys.filter(pa.array(shared)).slice(0, _SHOWN_KEYS).to_pylist()
        causes[names[ordinal]] = (
            None,
            DuplicateKeysError(
                f"{int(shared.sum())} keys of region {names[ordinal]} stand in another region too, "
                f"for example {examples}; nothing tells which row is newer."
            ),
        )
    raise BlockedRegionsError(causes)


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = (pc.fill_null(column, 0) if column.null_count else column).to_numpy()
    return values
