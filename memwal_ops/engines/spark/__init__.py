"""Bulk merges on Spark: for a backlog that outgrows one machine.

From a session of one's own: ``bulk_merge(spark, "s3://bucket/table.lance")``. A table as a DataFrame:
``register(spark)``, then ``spark.read.format("memwal").load(uri)``; rows into it: ``bulk_load(df, uri)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.table import open_table
from memwal_ops.engines.spark.engine import SparkEngine
from memwal_ops.engines.spark.load import bulk_load
from memwal_ops.engines.spark.session import refuse_stopped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from pyspark.sql import SparkSession

    from memwal_ops.jobs.merge import MergeReport

__all__ = ["SparkEngine", "bulk_load", "bulk_merge", "register"]


def bulk_merge(
    spark: SparkSession,
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    regions: Sequence[UUID] = (),
    max_bytes: int | None = None,
    max_generations: int | None = None,
) -> MergeReport:
    """Merge everything that was flushed when the call began, on a Spark session of the caller's.

    Args:
        spark: stays the caller's; settings are not changed, jobs appear under names of their own.
        uri: the table, as :func:`memwal_ops.open_table` takes it.
        storage_options: the same; executors get them in the task closure, never in a configuration.
        regions: only these; empty for all.
        max_bytes: of one pass, by the region manifests' accounting; None: 1 TiB.
        max_generations: at most this many generations in one pass.

    Raises:
        SparkUnavailableError: the executors' Python cannot run our tasks.
        SparkJobFailedError: Spark gave a stage up; nothing of that pass was published.
        MemwalOpsError: as :func:`memwal_ops.jobs.merge.apply`.
    """
    # The one import that goes up: users of a session look for it here, and the pass loop is the job's.
    from memwal_ops.jobs import merge  # noqa: PLC0415

    options = merge.MergeOptions(tuple(regions), "spark", max_bytes, max_generations)
    return merge.apply(open_table(uri, storage_options), options, engine=SparkEngine(spark))


def register(spark: SparkSession, *, storage_options: Mapping[str, str] | None = None) -> None:
    """Let this session ``read.format("memwal")``.

    Gives base and unmerged generations as one table, last write wins; vectors as ``array<float>``.
    ``.option("columns", "id,text")`` reads these columns only, ``.option("filter", "id > 5")`` these rows, by an
    expression of Lance's that is asked of the newest row of each key.

    Args:
        spark: the session.
        storage_options: as pylance takes them, for all reads through it: they travel inside the registered
            class, and stand in no plan and on no page.

    Raises:
        SparkUnavailableError: the session is stopped.
    """
    # Needs PySpark to be imported at all.
    from memwal_ops.engines.spark.source import data_source  # noqa: PLC0415

    refuse_stopped(spark)
    spark.dataSource.register(data_source(dict(storage_options or {})))
