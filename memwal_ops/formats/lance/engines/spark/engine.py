"""The Spark engine: executors stream the payload from Lance to Lance; the driver publishes one version, or nothing.

A pass has one of two plans, which write the same rows and deletions as the local engine does, by its functions:

* broadcast, here: the driver finds the newest rows, as their keys are few. Nothing is shuffled.
* shuffle (:mod:`memwal_ops.formats.lance.engines.spark.shuffle`): executors find them; keys and locators are shuffled.
  The driver's memory grows with the number of generations and fragments, not with that of rows.

A broadcast has three steps:

1. **keys**: the driver reads the keys of all generations and finds the newest row of each, by the code of the local
   engine.
2. **delete**: it looks the keys up in the key index where that is cheaper; else they are sent to the executors
   (a broadcast), which scan the base's keys. Executors write deletion vectors.
3. **write**: each task gets the mask of its generations' newest rows, one bit for each row, and writes fragments.

The driver's memory is bounded by the size of the pass's keys (:data:`DRIVER_KEY_BYTES`); the base's keys are never sent
to it. Tasks are those of RDDs: nothing is planned, compiled or converted by Spark SQL. Their inputs are positions,
masks and keys, their results the written files; no rows are transferred, and a task may run twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.spark import stages
from memwal_ops.core.spark.session import our_tasks
from memwal_ops.errors import MemwalOpsError, UnsupportedFeatureError
from memwal_ops.formats.lance.engines.merge import collapse, passes
from memwal_ops.formats.lance.engines.merge.locate import (
    count_deleted,
    index_is_cheaper,
    key_code,
    locate,
    matching_rows,
    replaced_ids,
    scan_keys,
)
from memwal_ops.formats.lance.engines.merge.passes import commit_pass, open_generations
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, all_field_ids, remove_files
from memwal_ops.formats.lance.engines.spark import running, shuffle, tasks
from memwal_ops.formats.lance.files.blobs import stream_bytes
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, lance_errors
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    import numpy.typing as npt
    from pyspark import Broadcast as SparkBroadcast
    from pyspark.sql import SparkSession

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.table import Table

    ItemTask = Callable[[Iterable[Any]], Iterator[dict[str, Any]]]


_CHUNK_BYTES = tasks.TASK_BYTES // 16


@dataclass(frozen=True, slots=True)
class Group:
    """The rows that one task writes, of the generations at these ordinals.

    Attributes:
        masks: for each of them, which of its live rows are written; one bit for each.
        row_ids: with stable row ids, for each of them the id of the base row that each row replaces, or -1.
    """

    ordinals: Sequence[int]
    masks: Sequence[npt.NDArray[np.uint8]]
    row_ids: Sequence[npt.NDArray[np.int64]] | None


def to_bytes(keys: pa.Table) -> bytes:
    """Encode keys for sending them to executors.

    Not pickled: the result of a grouping has many chunks, each a slice of one buffer, and is pickled with all of
    it for each chunk. 1,800,000 numbers took 794 MB.
    """
    return stream_bytes(keys.combine_chunks())


def group_writer(work: tasks.Pass) -> ItemTask:
    """A task from a :class:`Group` to new fragments."""

    def write_groups(groups: Iterable[Group]) -> Iterator[dict[str, Any]]:
        with stages.reported():
            for group in groups:
                rows = [work.generations[ordinal].live_rows for ordinal in group.ordinals]
                masks = [
                    np.unpackbits(mask, count=count).view(np.bool_)
                    for mask, count in zip(group.masks, rows, strict=True)
                ]
                row_ids = None if group.row_ids is None else np.concatenate(group.row_ids)
                yield {"fragments": tasks.write_masked(work, group.ordinals, masks, row_ids)}

    return write_groups


def address_deleter(work: tasks.Pass) -> ItemTask:
    """A task from addresses of superseded base rows (ascending, uint64) to deletion vectors."""

    def write_deletion_vectors(parts: Iterable[npt.NDArray[np.uint64]]) -> Iterator[dict[str, Any]]:
        with stages.reported():
            for addresses in parts:
                yield work.without(addresses)

    return write_deletion_vectors


def key_scanner(work: tasks.Pass, sought: SparkBroadcast[tuple[bytes, npt.NDArray[np.bool_]]]) -> ItemTask:
    """A task from ids of base fragments to deletion vectors that hide the rows that have one of the ``sought`` keys.

    These are the keys of winners, of :func:`to_bytes`, and which of them are tombstones.
    """

    def scan_and_delete(parts: Iterable[Sequence[int]]) -> Iterator[dict[str, Any]]:
        with stages.reported():
            content, is_tombstone = sought.value
            keys = pa.ipc.open_stream(content).read_all()
            base = work.base()
            for ids in parts:
                with lance_errors("read the keys of", work.location.uri):
                    present = [fragment for number in ids if (fragment := base.get_fragment(number)) is not None]
                    assert len(present) == len(ids)  # noqa: S101 - the driver saw them in the same version
                    scanned = scan_keys(base, work.primary_key, _CHUNK_BYTES, stable=work.stable, fragments=present)
                    hits = matching_rows(scanned, keys, _CHUNK_BYTES)
                if hits is None:
                    continue
                result = work.without(np.sort(hits.column(ROW_ADDRESS).to_numpy()))
                result["deleted"] = count_deleted(hits, keys, is_tombstone)
                if work.stable:
                    result["replacing"], result["row_ids"] = replaced_ids(hits, keys)
                yield result

    return scan_and_delete


DRIVER_KEY_BYTES = 64 << 20
"""Keys of a pass up to this many bytes, with 9 bytes for each row's address and tombstone, are resolved by the driver.

Finding the newest rows needs about seven times that memory. With an int64 key: 3,900,000 rows.
"""
_ROW_BYTES = 9


def fits(rows: int, table: Table, most_bytes: int) -> bool:
    """Whether the keys of that many rows may take at most ``most_bytes``: those of a variable length may be empty."""
    return rows * (_width(table) or _ROW_BYTES) <= most_bytes


def find_newest(
    table: Table, work: tasks.Pass, generations: Sequence[Generation], most_bytes: int
) -> collapse.Winners | None:
    """The newest row of each key of a pass; None if the keys take more than ``most_bytes``.

    Keys of a variable length are read until they are too many, with what as many generations hold as have
    ``most_bytes`` of data files, or one.

    Raises ``BlockedRegionsError``: generations that cannot be read, or regions that share keys.
    """
    keys: list[collapse.KeysOf] = []
    for some in _slices(generations, most_bytes) if _width(table) is None else [generations]:
        keys += collapse.keys_of_all(some, work.primary_key)
        if sum(generation_keys.keys.nbytes for generation_keys in keys) > most_bytes:
            return None
    causes: dict[UUID, tuple[int | None, MemwalOpsError]] = {}
    for sealed, generation_keys in zip(work.generations, keys, strict=True):
        work.count(generation_keys.keys.num_rows, generation_keys.keys.nbytes)
        if generation_keys.keys.num_rows != sealed.live_rows:
            error = tasks.miscounted(sealed, generation_keys.keys.num_rows)
            causes.setdefault(sealed.ref.region_id, (sealed.ref.generation, error))
    if causes:
        raise collapse.BlockedRegionsError(causes)
    return collapse.newest_of(keys, work.primary_key)


def _width(table: Table) -> int | None:
    """Bytes that a row takes; None for keys of a variable length."""
    schema = table.schema
    try:
        bits = [int(schema.field(name).type.bit_width) for name in table.primary_key]
    except ValueError:
        return None
    return sum(-(-bit // 8) for bit in bits) + _ROW_BYTES


def _slices(generations: Sequence[Generation], most_bytes: int) -> list[list[Generation]]:
    """Consecutive generations of at most ``most_bytes`` of data files, or one."""
    slices: list[list[Generation]] = []
    size = 0
    for generation in generations:
        if not slices or size + generation.data_bytes > most_bytes:
            slices.append([])
            size = 0
        slices[-1].append(generation)
        size += generation.data_bytes
    return slices


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The two stages on executors."""

    run: running.Running
    work: tasks.Pass
    winners: collapse.Winners

    def change(self) -> running.Changed:
        """Write deletion vectors and new fragments. Raises ``SparkJobFailedError``: a stage failed in Spark."""
        run, winners = self.run, self.winners
        context = run.spark.sparkContext
        with run.stages.stage("delete", "find superseded base rows, write deletion vectors"):
            deletions, row_ids, use_index = self._delete()
        with run.stages.stage("write", "write the newest rows as base fragments"):
            results = stages.run_parts(context, group_writer(self.work), self._groups(row_ids))
            fragments = run.fragments(results, winners.num_upserts)
        return running.Changed(fragments, deletions, use_index)

    def _delete(self) -> tuple[running.Deletions, npt.NDArray[np.int64] | None, bool]:
        run, winners, work = self.run, self.winners, self.work
        context = run.spark.sparkContext
        if index_is_cheaper(run.table, winners):
            located = locate(run.table, winners, max_bytes=tasks.TASK_BYTES)
            results = stages.run_parts(context, address_deleter(work), self._by_fragment(located.addresses))
            return replace(run.deletions(results), tombstones=located.deleted), located.row_ids, True
        row_ids = np.full(winners.rows_read, -1, dtype=np.int64) if work.stable else None
        sought = context.broadcast((to_bytes(winners.keys), winners.is_tombstone))
        try:
            results = stages.run_parts(context, key_scanner(work, sought), self._fragments())
        finally:
            stages.release_broadcast(sought)
        if row_ids is not None:
            for result in results:
                row_ids[winners.rows[result["replacing"]]] = result["row_ids"]
        return run.deletions(results), row_ids, False

    def _fragments(self) -> list[list[int]]:
        """The ids of the base's fragments by task, of about as many rows each."""
        if not self.winners.keys.num_rows:
            return []
        fragments = [fragment.metadata for fragment in self.run.table.dataset.get_fragments()]
        rows = [fragment.num_rows for fragment in fragments]
        return stages.in_parts(
            [fragment.id for fragment in fragments], stages.part_numbers(rows, self.run.tasks(sum(rows)), sum(rows))
        )

    def _by_fragment(self, addresses: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.uint64]]:
        _, starts = np.unique(addresses >> np.uint64(32), return_index=True)
        count = max(1, min(len(starts), self.run.tasks(len(addresses))))
        firsts = [int(some[0]) for some in np.array_split(starts, count) if len(some)]
        return [addresses[start:end] for start, end in pairwise([*firsts, len(addresses)])]

    def _groups(self, row_ids: npt.NDArray[np.int64] | None) -> list[Group]:
        upserts = self.winners.upserts
        bounds = np.cumsum([0, *(len(mask) for mask in upserts)])
        counts = [int(mask.sum()) for mask in upserts]
        numbers = self.run.groups(self.work.generations, counts)
        of_each = stages.in_parts(range(len(upserts)), numbers)
        return [
            Group(
                ordinals,
                [np.packbits(upserts[ordinal]) for ordinal in ordinals],
                None if row_ids is None else [row_ids[bounds[ordinal] : bounds[ordinal + 1]] for ordinal in ordinals],
            )
            for ordinals in ([ordinal for ordinal in some if counts[ordinal]] for some in of_each)
            if ordinals
        ]


_ROWS_PER_TASK = 50_000
_SHARE_OF_BUDGET = 4


class SparkMergeEngine:
    """Merges passes on a Spark session, which the caller stops.

    Args:
        rows_per_task: a stage over fewer rows than that gets one task.
        driver_key_bytes: keys of a pass up to this size are resolved by the driver; 0: always by executors.
        on_progress: called about twice a second while a stage runs, and when it ends.
        checkpoint: called as often; raises if the run is to stop: the stage is cancelled, and nothing published.
    """

    name = "spark"

    def __init__(
        self,
        spark: SparkSession,
        *,
        rows_per_task: int = _ROWS_PER_TASK,
        driver_key_bytes: int = DRIVER_KEY_BYTES,
        on_progress: Callable[[stages.StageProgress], None] | None = None,
        checkpoint: Callable[[], None] | None = None,
    ) -> None:
        self._spark, self._rows_per_task, self._driver_key_bytes = spark, rows_per_task, driver_key_bytes
        self._on_progress, self._checkpoint = on_progress, checkpoint

    def run(
        self, table: Table, merge_pass: collapse.MergePass, note: CommitNote, on_rows: Callable[[int], None]
    ) -> collapse.PassResult:
        """Publish one pass; see :meth:`memwal_ops.formats.lance.engines.merge.collapse.MergeEngine.run`.

        Raises ``SparkUnavailableError``: the executors' Python cannot run our tasks; ``SparkJobFailedError``: a stage
        failed.
        """
        with stages.between_stages(), our_tasks(self._spark):
            return self._pass(table, merge_pass).run(note, on_rows)

    def refuse_shared_keys(self, table: Table, whole: collapse.MergePass) -> None:
        """See :class:`memwal_ops.formats.lance.engines.merge.collapse.MergeEngine`; raises as :meth:`run`."""
        rows = [generation.rows for generation in whole.generations]
        if None not in rows and fits(sum(filter(None, rows)), table, self._driver_key_bytes):
            passes.refuse_shared_keys(table, replace(whole, max_bytes=_SHARE_OF_BUDGET * self._driver_key_bytes))
            return
        with our_tasks(self._spark):
            self._pass(table, whole).refuse_shared_keys()

    def _pass(self, table: Table, merge_pass: collapse.MergePass) -> _Pass:
        run = running.Running(self._spark, table, merge_pass, self._rows_per_task, self._on_progress, self._checkpoint)
        return _Pass(run, self._driver_key_bytes)


class _Pass:
    def __init__(self, run: running.Running, driver_key_bytes: int) -> None:
        self.table, self.merge_pass, self.stages = run.table, run.merge_pass, run.stages
        self._run = run
        self._driver_key_bytes = driver_key_bytes
        self.began = datetime.now(UTC)

    def refuse_shared_keys(self) -> None:
        with self.stages.stage("open", "open generations"):
            work = self._work(open_generations(self.table, self.merge_pass))
        shuffle.Shuffle(self._run, work).refuse_shared_keys()

    def run(self, note: CommitNote, on_rows: Callable[[int], None]) -> collapse.PassResult:
        started = time.monotonic()
        with self.stages.stage("open", "open generations"):
            generations = open_generations(self.table, self.merge_pass)
            work = self._work(generations)
        winners = self._newest(work, generations)
        del generations  # executors open them for themselves
        plan = Broadcast(self._run, work, winners) if winners is not None else shuffle.Shuffle(self._run, work)
        change, changed = self._change(plan)
        on_rows(sum(generation.live_rows for generation in work.generations))
        version = self._commit(change, note)
        lost = int(self.stages.metrics["lost_attempts"])
        if lost or "incomplete" in self.stages.metrics:
            get_logger(__name__).warning("task_attempts_lost", table=self.table.location.uri, attempts=lost)
            running.log_leftovers(self.table, self.began)
        return collapse.PassResult(
            version=version,
            rows_read=sum(generation.live_rows for generation in work.generations),
            rows_upserted=sum(fragment.physical_rows for fragment in change.new_fragments),
            rows_deleted=changed.deletions.tombstones,
            bytes_read=sum(generation.data_bytes for generation in work.generations),
            use_index=changed.use_index,
            seconds=time.monotonic() - started,
            phases=self.stages.seconds,
            metrics=self.stages.metrics,
        )

    def _newest(self, work: tasks.Pass, generations: Sequence[Generation]) -> collapse.Winners | None:
        if not fits(sum(generation.live_rows for generation in work.generations), self.table, self._driver_key_bytes):
            return None
        with self.stages.stage("keys", "read keys of generations, find the newest row of each key"):
            return find_newest(self.table, work, generations, self._driver_key_bytes)

    def _change(self, plan: Broadcast | shuffle.Shuffle) -> tuple[Rewrite, running.Changed]:
        try:
            changed = plan.change()
            deletions = changed.deletions
            fields = all_field_ids(self.table.dataset)
            return Rewrite(changed.fragments, deletions.updated, deletions.removed, fields), changed
        except BaseException:
            self._remove(self._run.files)
            if "delete" in self.stages.seconds:  # before that, no stage writes files
                self.stages.settle()
                running.log_leftovers(self.table, self.began)
            raise

    def _work(self, generations: Sequence[Generation]) -> tasks.Pass:
        if len(generations) > tasks.MAX_GENERATIONS:
            raise UnsupportedFeatureError(
                f"A pass of {len(generations)} generations exceeds the limit of {tasks.MAX_GENERATIONS}.",
                remedy=f"Run it with --max-generations {tasks.MAX_GENERATIONS}.",
            )
        table = self.table
        return tasks.Pass(
            table.location,
            table.version,
            table.primary_key,
            key_code(table.schema, table.primary_key),
            bool(table.dataset.has_stable_row_ids),
            tuple(generation.sealed() for generation in generations),
            self._run.counters,
        )

    def _commit(self, change: Rewrite, note: CommitNote) -> int:
        # Credentials may have expired while executors worked.
        table = replace(self.table, location=self.table.location.refreshed())
        with running.log_files_if_kept(table, change.written_files()), self.stages.stage("commit", "commit"):
            return commit_pass(table, change, self.merge_pass, note)

    def _remove(self, paths: Sequence[str]) -> None:
        if paths:
            failed = remove_files(self.table, paths).failed
            running.log_files(self.table, list(failed), "they could not be removed")
