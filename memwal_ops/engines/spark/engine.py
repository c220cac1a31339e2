"""The Spark engine: keys and locators through the shuffle, payload from Lance to Lance on executors.

1. **keys**: one task per few generations reads key columns; ``max(locator)`` per key is the winner. A
   key that stands in two regions is refused, like by the local engine.
2. **locate and delete**: base rows of these keys, by a join with the base's key column or through its
   key index, as row addresses; grouped by fragment, executors write deletion vectors.
3. **write**: winners grouped by generation; executors stream the payload and write new fragments.
4. **commit**: the driver publishes everything as one version, or nothing.

Rows are written by the same functions as in the local engine. The driver holds what grows with
generations and fragments, never what grows with rows.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lance.fragment import FragmentMetadata

from memwal_ops.engines.api import BlockedRegionsError, MergePass, PassResult
from memwal_ops.engines.locate import SCANNED_KEYS_PER_LOOKUP, has_key_index
from memwal_ops.engines.passes import commit_pass, open_generations
from memwal_ops.engines.rewrite import Rewrite, all_field_ids
from memwal_ops.engines.spark import tasks
from memwal_ops.engines.spark.keys import key_code
from memwal_ops.engines.spark.locators import MAX_GENERATIONS, ORDINAL_SHIFT, positions
from memwal_ops.engines.spark.session import check_executors, quiet
from memwal_ops.engines.spark.stages import Stages
from memwal_ops.engines.spark.strays import name_files, name_strays, named_where_they_stay
from memwal_ops.errors import (
    DuplicateKeysError,
    InvariantViolatedError,
    UnsupportedFeatureError,
)
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from memwal_ops.core.commit import CommitNote
    from memwal_ops.core.table import Table
    from memwal_ops.engines.api import StageProgress

_ROWS_PER_PARTITION = 2_000_000
_ROWS_PER_TASK = 50_000
_TASKS_PER_CORE = 3
_BYTES_PER_WRITE = 256 << 20
_INT64_MIN = -(2**63)
_SHOWN_KEYS = 3


class SparkEngine:
    """Merges passes on a Spark session, which stays the caller's.

    Args:
        spark: the session.
        rows_per_task: a stage over fewer rows than that gets no second task.
        on_progress: called about twice a second while a stage runs, and when it ends.
    """

    name = "spark"

    def __init__(
        self,
        spark: SparkSession,
        *,
        rows_per_task: int = _ROWS_PER_TASK,
        on_progress: Callable[[StageProgress], None] | None = None,
    ) -> None:
        self._spark = spark
        self._rows_per_task = rows_per_task
        self._on_progress = on_progress

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Land one pass; see :meth:`memwal_ops.engines.api.Engine.run`.

        Raises:
            SparkUnavailableError: the executors' Python cannot run our tasks.
            SparkJobFailedError: Spark gave a stage up.
        """
        with quiet():
            check_executors(self._spark)
            one = _Run(self._spark, table, merge_pass, self._rows_per_task, self._on_progress)
            return one.run(note, on_rows)


@dataclass(frozen=True, slots=True)
class _Won:
    """What the first stage says: winners, how many of them delete, per generation; keys in two regions."""

    winners: int
    tombstones: int
    shared: int
    smallest: int | None
    per_generation: dict[int, int]


class _Run:
    """One pass on its way."""

    def __init__(
        self,
        spark: SparkSession,
        table: Table,
        merge_pass: MergePass,
        rows_per_task: int,
        on_progress: Callable[[StageProgress], None] | None,
    ) -> None:
        self.table = table
        self.rows_per_task = rows_per_task
        self.merge_pass = merge_pass
        self.session = spark.newSession()  # the same application, with settings of its own
        context = spark.sparkContext
        self.counters = None
        if on_progress is not None:
            self.counters = tasks.Counters(context.accumulator(0), context.accumulator(0))
        self.stages = Stages(context, table.location.uri, self.counters, on_progress)
        self.cores = max(1, int(spark.sparkContext.defaultParallelism))
        self.files: list[str] = []
        self.began = datetime.now(UTC)

    def run(self, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        started = time.monotonic()
        with self.stages.stage("open", "open generations"):
            generations = open_generations(self.table, self.merge_pass)
            work = self._work(tuple(one.sealed() for one in generations))
            del generations
        self._configure(work)
        winners = self._winners(work)
        try:
            change, use_index, deleted = self._change(work, winners)
        except BaseException:
            self._remove(self.files)
            if "delete" in self.stages.seconds:  # before that, no stage writes files
                self.stages.settle()
                name_strays(self.table, self.began)
            raise
        finally:
            winners.unpersist()
        on_rows(sum(one.live_rows for one in work.generations))
        version = self._commit(change, note)
        lost = int(self.stages.metrics["lost_attempts"])
        if lost or "incomplete" in self.stages.metrics:
            get_logger(__name__).warning("task_attempts_lost", table=self.table.location.uri, attempts=lost)
            name_strays(self.table, self.began)
        return PassResult(
            version=version,
            rows_read=sum(one.live_rows for one in work.generations),
            rows_upserted=sum(fragment.physical_rows for fragment in change.new_fragments),
            rows_deleted=deleted,
            bytes_read=sum(one.data_bytes for one in work.generations),
            use_index=use_index,
            seconds=time.monotonic() - started,
            phases=self.stages.seconds,
            metrics=self.stages.metrics,
        )

    def _work(self, generations: tuple[Any, ...]) -> tasks.Pass:
        if len(generations) > MAX_GENERATIONS:
            raise UnsupportedFeatureError(
                f"A pass of {len(generations)} generations is too long.",
                remedy=f"Run it with --max-generations {MAX_GENERATIONS}.",
            )
        table = self.table
        return tasks.Pass(
            table.location,
            table.version,
            table.primary_key,
            key_code(table.dataset.schema, table.primary_key),
            bool(table.dataset.has_stable_row_ids),
            generations,
            self.counters,
        )

    def _configure(self, work: tasks.Pass) -> None:
        rows = sum(one.live_rows for one in work.generations) + int(self.table.dataset.count_rows())
        conf = self.session.conf
        # Fixed and ours: the join then meets the winners where the first shuffle left them.
        conf.set("spark.sql.adaptive.enabled", "false")
        partitions = max(min(self.cores, self._tasks(rows)), -(-rows // _ROWS_PER_PARTITION))
        conf.set("spark.sql.shuffle.partitions", str(partitions))
        conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")
        conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")

    def _change(self, work: tasks.Pass, winners: DataFrame) -> tuple[Rewrite, bool, int]:
        with self.stages.stage("keys", "read keys of generations, find the newest row of each key"):
            won = self._count(work, winners)
        if won.shared:
            self._refuse_shared(work, winners, won.shared)
        use_index = self._index_is_cheaper(work, won)
        superseded = self._superseded(work, winners, use_index=use_index)
        if work.stable:
            superseded = superseded.persist()
        try:
            with self.stages.stage("delete", "find superseded base rows, write deletion vectors"):
                updated, removed, deleted = self._delete(work, superseded, won.winners)
            with self.stages.stage("write", "write the newest rows as base fragments"):
                fragments = self._write(work, winners, superseded, won)
        finally:
            if work.stable:
                superseded.unpersist()
        written = sum(fragment.physical_rows for fragment in fragments)
        if written != won.winners - won.tombstones:
            raise InvariantViolatedError(
                f"{written} rows were written for {won.winners - won.tombstones} winners; nothing was published."
            )
        change = Rewrite(fragments, updated, removed, all_field_ids(self.table.dataset))
        return change, use_index, deleted

    def _tasks(self, rows: int) -> int:
        """How many tasks a stage over that many rows is worth."""
        return max(1, min(self.cores * _TASKS_PER_CORE, -(-rows // self.rows_per_task)))

    def _splits(self, count: int, rows: int) -> DataFrame:
        return self.session.range(0, count, 1, max(1, min(count, self._tasks(rows))))

    def _winners(self, work: tasks.Pass) -> DataFrame:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        live = sum(one.live_rows for one in work.generations)
        rows = self._splits(len(work.generations), live).mapInArrow(
            tasks.key_reader(work), f"key {work.code.spark_type}, locator bigint"
        )
        newest = [f.max("locator").alias("locator")]
        if len(self.merge_pass.regions) > 1:
            # Ordinals of one region are consecutive, so oldest and newest row tell whether a key left it.
            newest.append(f.min("locator").alias("oldest"))
        return rows.groupBy("key").agg(*newest).persist()

    def _count(self, work: tasks.Pass, winners: DataFrame) -> _Won:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        shared = self._is_shared(work) if "oldest" in winners.columns else f.lit(False)  # noqa: FBT003
        smallest = f.min("key") if work.code.spark_type == "bigint" else f.lit(None)
        counted = (
            winners.groupBy(f.shiftright("locator", ORDINAL_SHIFT).alias("ordinal"))
            .agg(
                f.count("*").alias("winners"),
                f.sum(f.col("locator").bitwiseAND(1)).alias("tombstones"),
                f.count_if(shared).alias("shared"),
                smallest.alias("smallest"),
            )
            .collect()
        )
        known = [row["smallest"] for row in counted if row["smallest"] is not None]
        return _Won(
            winners=sum(row["winners"] for row in counted),
            tombstones=sum(row["tombstones"] for row in counted),
            shared=sum(row["shared"] for row in counted),
            smallest=min(known, default=None),
            per_generation={row["ordinal"]: row["winners"] - row["tombstones"] for row in counted},
        )

    def _is_shared(self, work: tasks.Pass) -> Any:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        regions = {region_id: place for place, region_id in enumerate(self.merge_pass.regions)}
        places = _lookup_array([regions[one.ref.region_id] for one in work.generations])
        newest, oldest = (places[f.shiftright(name, ORDINAL_SHIFT).cast("int")] for name in ("locator", "oldest"))
        return newest != oldest

    def _refuse_shared(self, work: tasks.Pass, winners: DataFrame, count: int) -> None:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        shared = winners.filter(self._is_shared(work))
        ordinal = f.explode(f.array(*(f.shiftright(name, ORDINAL_SHIFT) for name in ("locator", "oldest"))))
        with self.stages.stage("keys", "name keys that stand in two regions"):
            examples = [_key_of(work, row["locator"]) for row in shared.select("locator").limit(_SHOWN_KEYS).collect()]
            ordinals = [row["ordinal"] for row in shared.select(ordinal.alias("ordinal")).distinct().collect()]
        regions: list[UUID] = sorted({work.generations[one].ref.region_id for one in ordinals})
        raise BlockedRegionsError(
            {
                region_id: (
                    None,
                    DuplicateKeysError(
                        f"{count} keys of region {region_id} stand in another region too, "
                        f"for example {examples}; nothing tells which row is newer."
                    ),
                )
                for region_id in regions
            }
        )

    def _key_type(self) -> pa.DataType:
        return self.table.dataset.schema.field(self.table.primary_key[0]).type

    def _index_is_cheaper(self, work: tasks.Pass, won: _Won) -> bool:
        import pyarrow as pa  # noqa: PLC0415

        if len(work.primary_key) != 1 or not won.winners:
            return False
        kind = self._key_type()
        if pa.types.is_integer(kind):
            # The smallest int64 has no literal in SQL.
            writable = not pa.types.is_int64(kind) or (won.smallest or 0) > _INT64_MIN
        else:
            writable = not work.code.framed and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        return (
            writable
            and has_key_index(self.table.dataset, work.primary_key[0])
            and won.winners * SCANNED_KEYS_PER_LOOKUP < int(self.table.dataset.count_rows())
        )

    def _superseded(self, work: tasks.Pass, winners: DataFrame, *, use_index: bool) -> DataFrame:
        """``locator`` of each winner with the ``address`` (and ``row_id``) of the base row that has its key."""
        ids = ", row_id bigint" if work.stable else ""
        columns = ["locator", "address", *(["row_id"] if work.stable else [])]
        if use_index:
            asked = winners.select("key", "locator")
            return asked.mapInArrow(tasks.index_reader(work, self._key_type()), f"locator bigint, address bigint{ids}")
        fragments = [fragment.fragment_id for fragment in self.table.dataset.get_fragments()]
        base = self._splits(len(fragments), self.table.dataset.count_rows()).mapInArrow(
            tasks.base_reader(work, fragments), f"key {work.code.spark_type}, address bigint{ids}"
        )
        # Never broadcast: that would lead every key through the driver.
        return base.join(winners.select("key", "locator").hint("shuffle_hash"), "key").select(*columns)

    def _delete(
        self, work: tasks.Pass, superseded: DataFrame, most: int
    ) -> tuple[tuple[FragmentMetadata, ...], tuple[int, ...], int]:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        fragments = len(self.table.dataset.get_fragments())
        count = max(1, min(fragments, self._tasks(most)))
        by_fragment = f.pmod(f.shiftrightunsigned("address", 32), f.lit(count)).cast("int")
        rows = superseded.select("locator", "address").repartitionById(count, by_fragment)
        results = _results(rows.mapInArrow(tasks.deleter(work), "result string"))
        updated = tuple(_fragment(one) for result in results for one in result["updated"])
        self.files += Rewrite((), updated, (), ()).written_files()
        removed = tuple(one for result in results for one in result["removed"])
        self._check_deletions(updated, removed, sum(result["superseded"] for result in results))
        return updated, removed, sum(result["deleted"] for result in results)

    def _check_deletions(self, updated: Sequence[FragmentMetadata], removed: Sequence[int], superseded: int) -> None:
        """Exactly the rows that were found are hidden, and no fragment stands twice."""
        before = {one.fragment_id: one.metadata for one in self.table.dataset.get_fragments()}
        touched = [*(one.id for one in updated), *removed]
        gone = sum(before[one.id].num_rows - one.num_rows for one in updated)
        gone += sum(before[one].num_rows for one in removed)
        if len(set(touched)) != len(touched) or gone != superseded:
            raise InvariantViolatedError(
                f"{gone} base rows were deleted for {superseded} that were superseded; nothing was published."
            )

    def _write(
        self, work: tasks.Pass, winners: DataFrame, superseded: DataFrame, won: _Won
    ) -> tuple[FragmentMetadata, ...]:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        groups = self._groups(work, won)
        count = max(groups, default=0) + 1
        rows = winners.select("locator")
        if work.stable:
            rows = rows.withColumn("row_id", f.lit(None).cast("bigint")).union(superseded.select("locator", "row_id"))
        target = _lookup_array(groups)[f.shiftright("locator", ORDINAL_SHIFT).cast("int")]
        rows = rows.filter(f.col("locator").bitwiseAND(1) == 0).repartitionById(count, target)
        results = _results(rows.mapInArrow(tasks.writer(work), "result string"))
        fragments = tuple(_fragment(one) for result in results for one in result["fragments"])
        self.files += Rewrite(fragments, (), (), ()).written_files()
        return fragments

    def _groups(self, work: tasks.Pass, won: _Won) -> list[int]:
        """Per generation the number of the task that writes its winners: alike in bytes, no more than useful."""
        sizes = [
            one.data_bytes * won.per_generation.get(ordinal, 0) // max(1, one.physical_rows)
            for ordinal, one in enumerate(work.generations)
        ]
        tasks_wanted = min(self.cores, self._tasks(won.winners))
        share = max(1, min(_BYTES_PER_WRITE, -(-sum(sizes) // tasks_wanted)))
        groups, seen = [], 0
        for size in sizes:
            groups.append((seen + size // 2) // share)
            seen += size
        numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
        return [numbers[group] for group in groups]

    def _commit(self, change: Rewrite, note: CommitNote) -> int:
        # Credentials may have expired while executors worked.
        table = replace(self.table, location=self.table.location.refreshed())
        with named_where_they_stay(table, change.written_files()), self.stages.stage("commit", "commit"):
            return commit_pass(table, change, self.merge_pass, note)

    def _remove(self, paths: Sequence[str]) -> None:
        """Take back what finished stages wrote for a pass that never came to its commit."""
        if paths:
            failed = self.table.store.delete_many(paths).failed
            name_files(self.table, list(failed), "they could not be removed")


def _lookup_array(values: Sequence[int]) -> Any:
    """A constant array column, for a look-up by place."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    return f.split(f.lit(",".join(map(str, values))), ",").cast("array<int>")


def _key_of(work: tasks.Pass, locator: int) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415

    sealed = work.generations[locator >> ORDINAL_SHIFT]
    place = positions(np.array([locator]), sealed.live_rows, newest_row_first=sealed.newest_row_first)
    generation = sealed.open(work.location)
    found = generation.dataset.take(place.tolist(), columns=list(generation.projection.keys))
    row: dict[str, Any] = found.rename_columns(list(work.primary_key)).to_pylist()[0]
    return row


def _results(frame: DataFrame) -> list[dict[str, Any]]:
    return [json.loads(row["result"]) for row in frame.collect()]


def _fragment(document: dict[str, Any]) -> FragmentMetadata:
    return FragmentMetadata.from_json(json.dumps(document))
