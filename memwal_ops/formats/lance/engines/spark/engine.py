"""The Spark engine: shuffle keys and locators only; executors stream the payload from Lance to Lance.

1. **keys**: one task per few generations reads key columns; ``max(locator)`` per key is the winner. A
   key that is in two regions is refused, as in the local engine.
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

from memwal_ops.errors import InvariantViolatedError, UnsupportedFeatureError
from memwal_ops.formats.lance.engines.api import BlockedRegionsError, MergePass, PassResult
from memwal_ops.formats.lance.engines.collapse import shared_keys_error
from memwal_ops.formats.lance.engines.locate import SCANNED_KEYS_PER_LOOKUP, is_indexed
from memwal_ops.formats.lance.engines.passes import commit_pass, open_generations
from memwal_ops.formats.lance.engines.rewrite import Rewrite, all_field_ids, remove_files
from memwal_ops.formats.lance.engines.spark import tasks
from memwal_ops.formats.lance.engines.spark.faults import between_stages
from memwal_ops.formats.lance.engines.spark.keys import key_code
from memwal_ops.formats.lance.engines.spark.leftovers import log_files, log_files_if_kept, log_leftovers
from memwal_ops.formats.lance.engines.spark.locators import MAX_GENERATIONS, ORDINAL_SHIFT, positions
from memwal_ops.formats.lance.engines.spark.session import check_executors, quiet
from memwal_ops.formats.lance.engines.spark.stages import Stages, release
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from memwal_ops.formats.lance.commit import CommitNote
    from memwal_ops.formats.lance.engines.api import StageProgress
    from memwal_ops.formats.lance.table import Table

_ROWS_PER_PARTITION = 2_000_000
_ROWS_PER_TASK = 50_000
_TASKS_PER_CORE = 3
_BYTES_PER_WRITE = 256 << 20
_INT64_MIN = -(2**63)


class SparkEngine:
    """Merges passes on a Spark session, which the caller stops.

    Args:
        spark: the session.
        rows_per_task: a stage over fewer rows than that gets one task.
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
        """Publish one pass; see :meth:`memwal_ops.formats.lance.engines.api.Engine.run`.

        Raises:
            SparkUnavailableError: the executors' Python cannot run our tasks.
            SparkJobFailedError: Spark gave up a stage.
        """
        with quiet(), between_stages():
            check_executors(self._spark)
            run = _Run(self._spark, table, merge_pass, self._rows_per_task, self._on_progress)
            return run.run(note, on_rows)

    def refuse_shared_keys(self, table: Table, whole: MergePass) -> None:
        """See :meth:`memwal_ops.formats.lance.engines.api.Engine.refuse_shared_keys`.

        Raises:
            SparkUnavailableError: the executors' Python cannot run our tasks.
            SparkJobFailedError: Spark gave up a stage.
        """
        with quiet():
            check_executors(self._spark)
            _Run(self._spark, table, whole, self._rows_per_task, self._on_progress).refuse_shared_keys()


@dataclass(frozen=True, slots=True)
class _WinnerCounts:
    """Result of the first stage: winners, how many of them are tombstones, keys in two regions, upserts by ordinal."""

    winners: int
    tombstones: int
    shared: int
    smallest: int | None
    per_generation: dict[int, int]


class _Run:
    """One pass in progress."""

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

    def refuse_shared_keys(self) -> None:
        work = self._open()
        winners = self._winners(work)
        try:
            with self.stages.stage("keys", "compare the keys of all regions"):
                shared = self._count(work, winners).shared
            if shared:
                self._refuse_shared(work, winners)
        finally:
            winners.unpersist()

    def run(self, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        started = time.monotonic()
        work = self._open()
        winners = self._winners(work)
        try:
            change, use_index, deleted = self._change(work, winners)
        except BaseException:
            self._remove(self.files)
            if "delete" in self.stages.seconds:  # before that, no stage writes files
                self.stages.settle()
                log_leftovers(self.table, self.began)
            raise
        finally:
            release(winners)
        on_rows(sum(one.live_rows for one in work.generations))
        version = self._commit(change, note)
        lost = int(self.stages.metrics["lost_attempts"])
        if lost or "incomplete" in self.stages.metrics:
            get_logger(__name__).warning("task_attempts_lost", table=self.table.location.uri, attempts=lost)
            log_leftovers(self.table, self.began)
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

    def _open(self) -> tasks.Pass:
        with self.stages.stage("open", "open generations"):
            generations = open_generations(self.table, self.merge_pass)
            work = self._work(tuple(one.sealed() for one in generations))
            del generations
        self._configure(work)
        return work

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
        # Fixed, so that the join finds the winners in the partitions of the first shuffle.
        conf.set("spark.sql.adaptive.enabled", "false")
        partitions = max(min(self.cores, self._tasks(rows)), -(-rows // _ROWS_PER_PARTITION))
        conf.set("spark.sql.shuffle.partitions", str(partitions))
        conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")
        conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")

    def _change(self, work: tasks.Pass, winners: DataFrame) -> tuple[Rewrite, bool, int]:
        with self.stages.stage("keys", "read keys of generations, find the newest row of each key"):
            won = self._count(work, winners)
        if won.shared:
            self._refuse_shared(work, winners)
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
                release(superseded)
        written = sum(fragment.physical_rows for fragment in fragments)
        if written != won.winners - won.tombstones:
            raise InvariantViolatedError(
                f"{written} rows were written for {won.winners - won.tombstones} winners; nothing was published."
            )
        change = Rewrite(fragments, updated, removed, all_field_ids(self.table.dataset))
        return change, use_index, deleted

    def _tasks(self, rows: int) -> int:
        """How many tasks a stage over that many rows gets."""
        return max(1, min(self.cores * _TASKS_PER_CORE, -(-rows // self.rows_per_task)))

    def _splits(self, count: int, rows: int) -> DataFrame:
        return self.session.range(0, count, 1, max(1, min(count, self._tasks(rows))))

    def _winners(self, work: tasks.Pass) -> DataFrame:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        newest = [f.max("locator").alias("locator")]
        if len(self.merge_pass.regions) > 1:
            # Ordinals of one region are consecutive, so the oldest and the newest row show whether a key is in two.
            newest.append(f.min("locator").alias("oldest"))
        return self._keys(work).groupBy("key").agg(*newest).persist()

    def _keys(self, work: tasks.Pass) -> DataFrame:
        """``key`` and ``locator`` of all rows of the pass."""
        live = sum(one.live_rows for one in work.generations)
        return self._splits(len(work.generations), live).mapInArrow(
            tasks.key_reader(work), f"key {work.code.spark_type}, locator bigint"
        )

    def _count(self, work: tasks.Pass, winners: DataFrame) -> _WinnerCounts:
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
        return _WinnerCounts(
            winners=sum(row["winners"] for row in counted),
            tombstones=sum(row["tombstones"] for row in counted),
            shared=sum(row["shared"] for row in counted),
            smallest=min(known, default=None),
            per_generation={row["ordinal"]: row["winners"] - row["tombstones"] for row in counted},
        )

    def _is_shared(self, work: tasks.Pass) -> Any:
        return self._region(work, "locator") != self._region(work, "oldest")

    def _region(self, work: tasks.Pass, locator: str) -> Any:
        """The region of a row, as its position in ``merge_pass.regions``."""
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        numbers = {region_id: number for number, region_id in enumerate(self.merge_pass.regions)}
        region_numbers = _lookup_array([numbers[one.ref.region_id] for one in work.generations])
        return region_numbers[f.shiftright(locator, ORDINAL_SHIFT).cast("int")]

    def _refuse_shared(self, work: tasks.Pass, winners: DataFrame) -> None:
        """Block every region that shares a key with another one, also regions between the oldest and the newest row."""
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        shared = winners.filter(self._is_shared(work)).select("key")
        rows = self._keys(work).join(shared, "key", "left_semi").withColumn("region", self._region(work, "locator"))
        of_region = rows.groupBy("key", "region").agg(f.max("locator").alias("locator")).groupBy("region")
        with self.stages.stage("keys", "name the regions that share keys"):
            counted = of_region.agg(f.count("*").alias("keys"), f.max("locator").alias("locator")).collect()
            by_number = {row["region"]: (row["keys"], _key_of(work, row["locator"])) for row in counted}
        raise BlockedRegionsError(
            {
                region_id: (None, shared_keys_error(region_id, by_number[number][0], [by_number[number][1]]))
                for number, region_id in enumerate(self.merge_pass.regions)
                if number in by_number
            }
        )

    def _key_type(self) -> pa.DataType:
        return self.table.dataset.schema.field(self.table.primary_key[0]).type

    def _index_is_cheaper(self, work: tasks.Pass, won: _WinnerCounts) -> bool:
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
            and is_indexed(self.table, work.primary_key[0])
            and won.winners * SCANNED_KEYS_PER_LOOKUP < int(self.table.dataset.count_rows())
        )

    def _superseded(self, work: tasks.Pass, winners: DataFrame, *, use_index: bool) -> DataFrame:
        """``locator`` of each winner with the ``address`` (and ``row_id``) of the base row that has its key."""
        ids = ", row_id bigint" if work.stable else ""
        columns = ["locator", "address", *(["row_id"] if work.stable else [])]
        if use_index:
            keys = winners.select("key", "locator")
            return keys.mapInArrow(tasks.index_reader(work, self._key_type()), f"locator bigint, address bigint{ids}")
        fragments = [fragment.fragment_id for fragment in self.table.dataset.get_fragments()]
        base = self._splits(len(fragments), self.table.dataset.count_rows()).mapInArrow(
            tasks.base_reader(work, fragments), f"key {work.code.spark_type}, address bigint{ids}"
        )
        # Never broadcast: that would send every key through the driver.
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
        """Raise unless exactly the rows that were found are hidden, and no fragment is listed twice."""
        before = {one.fragment_id: one.metadata for one in self.table.dataset.get_fragments()}
        touched = [*(one.id for one in updated), *removed]
        gone = sum(before[one.id].num_rows - one.num_rows for one in updated)
        gone += sum(before[one].num_rows for one in removed)
        if len(set(touched)) != len(touched) or gone != superseded:
            raise InvariantViolatedError(
                f"{gone} base rows were deleted for {superseded} that were superseded; nothing was published."
            )

    def _write(
        self, work: tasks.Pass, winners: DataFrame, superseded: DataFrame, won: _WinnerCounts
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

    def _groups(self, work: tasks.Pass, won: _WinnerCounts) -> list[int]:
        """Per generation the number of the task that writes its winners; tasks are balanced by bytes."""
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
        with log_files_if_kept(table, change.written_files()), self.stages.stage("commit", "commit"):
            return commit_pass(table, change, self.merge_pass, note)

    def _remove(self, paths: Sequence[str]) -> None:
        """Delete what finished stages wrote for a pass that failed before its commit."""
        if paths:
            failed = remove_files(self.table, paths).failed
            log_files(self.table, list(failed), "they could not be removed")


def _lookup_array(values: Sequence[int]) -> Any:
    """A constant array column, for a look-up by position."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    return f.split(f.lit(",".join(map(str, values))), ",").cast("array<int>")


def _key_of(work: tasks.Pass, locator: int) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415

    sealed = work.generations[locator >> ORDINAL_SHIFT]
    position = positions(np.array([locator]), sealed.live_rows, newest_row_first=sealed.newest_row_first)
    generation = sealed.open(work.location)
    taken = generation.dataset.take(position.tolist(), columns=list(generation.projection.keys))
    row: dict[str, Any] = taken.rename_columns(list(work.primary_key)).to_pylist()[0]
    return row


def _results(frame: DataFrame) -> list[dict[str, Any]]:
    return [json.loads(row["result"]) for row in frame.collect()]


def _fragment(document: dict[str, Any]) -> FragmentMetadata:
    return FragmentMetadata.from_json(json.dumps(document))
