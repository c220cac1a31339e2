"""Carry out a pass whose keys fit the driver: without a shuffle, as Spark's broadcast joins.

1. **keys**: the driver reads the keys of all generations and finds the newest row of each, by the code of the local
   engine.
2. **delete**: it looks the keys up in the key index where that is cheaper; else they are sent to the executors
   (a broadcast), which scan the base's keys. Executors write deletion vectors.
3. **write**: each task gets the mask of its generations' newest rows, one bit for each row, and writes fragments.

The driver's memory is bounded by the size of the pass's keys (:data:`DRIVER_KEY_BYTES`); the base's keys are never sent
to it. Tasks are those of RDDs: nothing is planned, compiled or converted by Spark SQL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.core.spark.division import in_parts, part_numbers, run_parts
from memwal_ops.core.spark.stages import release_broadcast
from memwal_ops.formats.lance.engines.merge.api import BlockedRegionsError
from memwal_ops.formats.lance.engines.merge.collapse import KeysOf, keys_of_all, newest_of
from memwal_ops.formats.lance.engines.merge.locate import index_is_cheaper, locate
from memwal_ops.formats.lance.engines.spark import resolved, tasks
from memwal_ops.formats.lance.engines.spark.running import Changed, Deletions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    import numpy.typing as npt

    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.formats.lance.engines.merge.collapse import Winners
    from memwal_ops.formats.lance.engines.spark.running import Running
    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.table import Table

DRIVER_KEY_BYTES = 64 << 20
"""Keys of a pass up to this many bytes, with 9 bytes for each row's address and tombstone, are resolved by the driver.

Finding the newest rows needs about seven times that memory. With an int64 key: 3,900,000 rows.
"""
_ROW_BYTES = 9


def fits(rows: int, table: Table, most_bytes: int) -> bool:
    """Whether the keys of that many rows may take at most ``most_bytes``: those of a variable length may be empty."""
    return rows * (_width(table) or _ROW_BYTES) <= most_bytes


def find_newest(table: Table, work: tasks.Pass, generations: Sequence[Generation], most_bytes: int) -> Winners | None:
    """The newest row of each key of a pass; None if the keys take more than ``most_bytes``.

    Keys of a variable length are read until they are too many, with what as many generations hold as have
    ``most_bytes`` of data files, or one.

    Raises:
        BlockedRegionsError: generations that cannot be read, or regions that share keys.
    """
    keys: list[KeysOf] = []
    for some in _slices(generations, most_bytes) if _width(table) is None else [generations]:
        keys += keys_of_all(some, work.primary_key)
        if sum(one.keys.nbytes for one in keys) > most_bytes:
            return None
    causes: dict[UUID, tuple[int | None, MemwalOpsError]] = {}
    for sealed, one in zip(work.generations, keys, strict=True):
        work.count(one.keys.num_rows, one.keys.nbytes)
        if one.keys.num_rows != sealed.live_rows:
            error = tasks.miscounted(sealed, one.keys.num_rows)
            causes.setdefault(sealed.ref.region_id, (sealed.ref.generation, error))
    if causes:
        raise BlockedRegionsError(causes)
    return newest_of(keys, work.primary_key)


def _width(table: Table) -> int | None:
    """Bytes that a row takes; None for keys of a variable length."""
    schema = table.schema
    try:
        bits = [int(schema.field(name).type.bit_width) for name in table.primary_key]
    except ValueError:
        return None
    return sum(-(-one // 8) for one in bits) + _ROW_BYTES


def _slices(generations: Sequence[Generation], most_bytes: int) -> list[list[Generation]]:
    """Consecutive generations of at most ``most_bytes`` of data files, or one."""
    slices: list[list[Generation]] = []
    size = 0
    for one in generations:
        if not slices or size + one.data_bytes > most_bytes:
            slices.append([])
            size = 0
        slices[-1].append(one)
        size += one.data_bytes
    return slices


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The two stages on executors."""

    run: Running
    work: tasks.Pass
    winners: Winners

    def change(self) -> Changed:
        """Write deletion vectors and new fragments.

        Raises:
            SparkJobFailedError: a stage failed in Spark.
        """
        run, winners = self.run, self.winners
        context = run.spark.sparkContext
        with run.stages.stage("delete", "find superseded base rows, write deletion vectors"):
            deletions, row_ids, use_index = self._delete()
        with run.stages.stage("write", "write the newest rows as base fragments"):
            results = run_parts(context, resolved.group_writer(self.work), self._groups(row_ids))
            fragments = run.fragments(results, winners.num_upserts)
        return Changed(fragments, deletions, use_index)

    def _delete(self) -> tuple[Deletions, npt.NDArray[np.int64] | None, bool]:
        run, winners, work = self.run, self.winners, self.work
        context = run.spark.sparkContext
        if index_is_cheaper(run.table, winners):
            found = locate(run.table, winners, max_bytes=tasks.TASK_BYTES)
            results = run_parts(context, resolved.address_deleter(work), self._by_fragment(found.addresses))
            return replace(run.deletions(results), tombstones=found.deleted), found.row_ids, True
        row_ids = np.full(winners.rows_read, -1, dtype=np.int64) if work.stable else None
        sought = context.broadcast((resolved.to_bytes(winners.keys), winners.is_tombstone))
        try:
            results = run_parts(context, resolved.key_scanner(work, sought), self._fragments())
        finally:
            release_broadcast(sought)
        if row_ids is not None:
            for result in results:
                row_ids[winners.rows[result["replacing"]]] = result["row_ids"]
        return run.deletions(results), row_ids, False

    def _fragments(self) -> list[list[int]]:
        """The ids of the base's fragments by task, of about as many rows each."""
        if not self.winners.keys.num_rows:
            return []
        fragments = [one.metadata for one in self.run.table.dataset.get_fragments()]
        rows = [one.num_rows for one in fragments]
        return in_parts([one.id for one in fragments], part_numbers(rows, self.run.tasks(sum(rows)), sum(rows)))

    def _by_fragment(self, addresses: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.uint64]]:
        """Row addresses by task, those of one fragment in one of them."""
        _, starts = np.unique(addresses >> np.uint64(32), return_index=True)
        count = max(1, min(len(starts), self.run.tasks(len(addresses))))
        firsts = [int(some[0]) for some in np.array_split(starts, count) if len(some)]
        return [addresses[start:end] for start, end in pairwise([*firsts, len(addresses)])]

    def _groups(self, row_ids: npt.NDArray[np.int64] | None) -> list[resolved.Group]:
        """The input of each writing task."""
        upserts = self.winners.upserts
        bounds = np.cumsum([0, *(len(mask) for mask in upserts)])
        counts = [int(mask.sum()) for mask in upserts]
        numbers = self.run.groups(self.work.generations, counts)
        of_each = in_parts(range(len(upserts)), numbers)
        return [
            resolved.Group(
                ordinals,
                [np.packbits(upserts[one]) for one in ordinals],
                None if row_ids is None else [row_ids[bounds[one] : bounds[one + 1]] for one in ordinals],
            )
            for ordinals in ([one for one in some if counts[one]] for some in of_each)
            if ordinals
        ]
