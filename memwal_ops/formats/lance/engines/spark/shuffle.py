"""Carry out a pass whose keys do not fit the driver: shuffle keys and locators, never the payload.

1. **keys**: one task per few generations reads key columns; ``max(locator)`` per key is the winner. A
   key that is in two regions is refused, as in the local engine.
2. **locate and delete**: base rows of these keys, by a join with the base's key column or through its
   key index, as row addresses; grouped by fragment, executors write deletion vectors.
3. **write**: winners grouped by generation; executors stream the payload and write new fragments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.spark.stages import release
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError, shared_keys_error
from memwal_ops.formats.lance.engines.merge.locate import SCANNED_KEYS_PER_LOOKUP, is_indexed
from memwal_ops.formats.lance.engines.spark import running, tasks
from memwal_ops.formats.lance.files.datasets import readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from lance.fragment import FragmentMetadata
    from pyspark.sql import DataFrame

    from memwal_ops.formats.lance.engines.spark.running import Running

_ROWS_PER_PARTITION = 2_000_000
_INT64_MIN = -(2**63)


@dataclass(frozen=True, slots=True)
class _WinnerCounts:
    """Counts of the first stage. ``shared``: keys in two regions; ``per_generation``: upserts by ordinal."""

    winners: int
    tombstones: int
    shared: int
    smallest: int | None
    per_generation: dict[int, int]


class Shuffle:
    """The three stages on executors, whose tasks share ``work``. They have a Spark session of their own."""

    def __init__(self, run: Running, work: tasks.Pass) -> None:
        self.run, self.work = run, work
        self.table = run.table
        self.merge_pass = run.merge_pass
        self.session = run.spark.newSession()  # the same application, with settings of its own
        self._configure()

    def refuse_shared_keys(self) -> None:
        """See :meth:`memwal_ops.formats.lance.engines.merge.collapse.MergeEngine.refuse_shared_keys`."""
        winners = self._winners()
        try:
            with self.run.stages.stage("keys", "compare the keys of all regions"):
                shared = self._count(winners).shared
            if shared:
                self._refuse_shared(winners)
        finally:
            winners.unpersist()

    def change(self) -> running.Changed:
        """Find the newest rows, write deletion vectors and new fragments.

        Raises:
            BlockedRegionsError: regions that share a key, or whose generations cannot be read.
            SparkJobFailedError: a stage failed in Spark.
        """
        winners = self._winners()
        try:
            return self._change(winners)
        finally:
            release(winners)

    def _configure(self) -> None:
        rows = sum(generation.live_rows for generation in self.work.generations) + int(self.table.dataset.count_rows())
        conf = self.session.conf
        # Fixed, so that the join finds the winners in the partitions of the first shuffle.
        conf.set("spark.sql.adaptive.enabled", "false")
        partitions = max(min(self.run.cores, self.run.tasks(rows)), -(-rows // _ROWS_PER_PARTITION))
        conf.set("spark.sql.shuffle.partitions", str(partitions))
        conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")
        conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")

    def _change(self, winners: DataFrame) -> running.Changed:
        stages, work = self.run.stages, self.work
        with stages.stage("keys", "read keys of generations, find the newest row of each key"):
            won = self._count(winners)
        if won.shared:
            self._refuse_shared(winners)
        use_index = self._index_is_cheaper(won)
        superseded = self._superseded(winners, use_index=use_index)
        if work.stable:
            superseded = superseded.persist()
        try:
            with stages.stage("delete", "find superseded base rows, write deletion vectors"):
                deletions = self._delete(superseded, won.winners)
            with stages.stage("write", "write the newest rows as base fragments"):
                fragments = self._write(winners, superseded, won)
        finally:
            if work.stable:
                release(superseded)
        return running.Changed(fragments, deletions, use_index)

    def _splits(self, count: int, rows: int) -> DataFrame:
        return self.session.range(0, count, 1, max(1, min(count, self.run.tasks(rows))))

    def _winners(self) -> DataFrame:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        newest = [f.max("locator").alias("locator")]
        if len(self.merge_pass.regions) > 1:
            # Ordinals of one region are consecutive, so the oldest and the newest row show whether a key is in two.
            newest.append(f.min("locator").alias("oldest"))
        return self._keys().groupBy("key").agg(*newest).persist()

    def _keys(self) -> DataFrame:
        live = sum(generation.live_rows for generation in self.work.generations)
        return self._splits(len(self.work.generations), live).mapInArrow(
            tasks.key_reader(self.work), f"key {self.work.code.spark_type}, locator bigint"
        )

    def _count(self, winners: DataFrame) -> _WinnerCounts:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        shared = self._is_shared() if "oldest" in winners.columns else f.lit(False)  # noqa: FBT003
        smallest = f.min("key") if self.work.code.spark_type == "bigint" else f.lit(None)
        counted = (
            winners.groupBy(f.shiftright("locator", tasks.ORDINAL_SHIFT).alias("ordinal"))
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

    def _is_shared(self) -> Any:
        return self._region("locator") != self._region("oldest")

    def _region(self, locator: str) -> Any:
        """The region of a row, as its position in ``merge_pass.regions``."""
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        numbers = {region_id: number for number, region_id in enumerate(self.merge_pass.regions)}
        region_numbers = _lookup_array([numbers[generation.ref.region_id] for generation in self.work.generations])
        return region_numbers[f.shiftright(locator, tasks.ORDINAL_SHIFT).cast("int")]

    def _refuse_shared(self, winners: DataFrame) -> None:
        """Block every region that shares a key with another one, also regions between the oldest and the newest row."""
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        shared = winners.filter(self._is_shared()).select("key")
        rows = self._keys().join(shared, "key", "left_semi").withColumn("region", self._region("locator"))
        of_region = rows.groupBy("key", "region").agg(f.max("locator").alias("locator")).groupBy("region")
        with self.run.stages.stage("keys", "find the regions that share keys"):
            counted = of_region.agg(f.count("*").alias("keys"), f.max("locator").alias("locator")).collect()
            by_number = {row["region"]: (row["keys"], _key_of(self.work, row["locator"])) for row in counted}
        raise BlockedRegionsError(
            {
                region_id: (None, shared_keys_error(region_id, by_number[number][0], [by_number[number][1]]))
                for number, region_id in enumerate(self.merge_pass.regions)
                if number in by_number
            }
        )

    def _key_type(self) -> pa.DataType:
        return self.table.schema.field(self.table.primary_key[0]).type

    def _index_is_cheaper(self, won: _WinnerCounts) -> bool:
        import pyarrow as pa  # noqa: PLC0415

        if len(self.work.primary_key) != 1 or not won.winners:
            return False
        kind = self._key_type()
        if pa.types.is_integer(kind):
            # The smallest int64 has no literal in SQL.
            writable = not pa.types.is_int64(kind) or (won.smallest or 0) > _INT64_MIN
        else:
            writable = not self.work.code.framed and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        return (
            writable
            and won.winners * SCANNED_KEYS_PER_LOOKUP < int(self.table.dataset.count_rows())
            and is_indexed(self.table, self.work.primary_key[0])
        )

    def _superseded(self, winners: DataFrame, *, use_index: bool) -> DataFrame:
        """``locator`` of each winner with the ``address`` (and ``row_id``) of the base row that has its key."""
        ids = ", row_id bigint" if self.work.stable else ""
        columns = ["locator", "address", *(["row_id"] if self.work.stable else [])]
        if use_index:
            keys = winners.select("key", "locator")
            return keys.mapInArrow(
                tasks.index_reader(self.work, self._key_type()), f"locator bigint, address bigint{ids}"
            )
        fragments = [fragment.fragment_id for fragment in self.table.dataset.get_fragments()]
        base = self._splits(len(fragments), self.table.dataset.count_rows()).mapInArrow(
            tasks.base_reader(self.work, fragments), f"key {self.work.code.spark_type}, address bigint{ids}"
        )
        # Never broadcast: that would send every key through the driver.
        return base.join(winners.select("key", "locator").hint("shuffle_hash"), "key").select(*columns)

    def _delete(self, superseded: DataFrame, most: int) -> running.Deletions:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        fragments = len(self.table.dataset.get_fragments())
        count = max(1, min(fragments, self.run.tasks(most)))
        by_fragment = f.pmod(f.shiftrightunsigned("address", 32), f.lit(count)).cast("int")
        rows = superseded.select("locator", "address").repartitionById(count, by_fragment)
        return self.run.deletions(_results(rows.mapInArrow(tasks.deleter(self.work), "result string")))

    def _write(self, winners: DataFrame, superseded: DataFrame, won: _WinnerCounts) -> tuple[FragmentMetadata, ...]:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        generations = self.work.generations
        groups = self.run.groups(
            generations, [won.per_generation.get(ordinal, 0) for ordinal in range(len(generations))]
        )
        count = max(groups, default=0) + 1
        rows = winners.select("locator")
        if self.work.stable:
            rows = rows.withColumn("row_id", f.lit(None).cast("bigint")).union(superseded.select("locator", "row_id"))
        target = _lookup_array(groups)[f.shiftright("locator", tasks.ORDINAL_SHIFT).cast("int")]
        rows = rows.filter(f.col("locator").bitwiseAND(1) == 0).repartitionById(count, target)
        results = _results(rows.mapInArrow(tasks.writer(self.work), "result string"))
        return self.run.fragments(results, won.winners - won.tombstones)


def _lookup_array(values: Sequence[int]) -> Any:
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    return f.split(f.lit(",".join(map(str, values))), ",").cast("array<int>")


def _key_of(work: tasks.Pass, locator: int) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415

    sealed = work.generations[locator >> tasks.ORDINAL_SHIFT]
    position = tasks.positions(np.array([locator]), sealed.live_rows, newest_row_first=sealed.newest_row_first)
    generation = sealed.open(work.location)
    taken = generation.dataset.take(position.tolist(), columns=list(generation.projection.keys))
    return readable(taken.rename_columns(list(work.primary_key)))[0]


def _results(frame: DataFrame) -> list[dict[str, Any]]:
    return [json.loads(row["result"]) for row in frame.collect()]
