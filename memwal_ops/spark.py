"""Merge, read and bulk load Lance tables on Spark.

A merge on your own session: ``bulk_merge(spark, "s3://bucket/table.lance")``. A table as a DataFrame:
``register(spark)``, then ``spark.read.format("memwal").load(uri)``; rows into it: ``bulk_load(df, uri)``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from memwal_ops.core.spark import session
from memwal_ops.formats.lance.engines.spark.engine import SparkMergeEngine
from memwal_ops.formats.lance.engines.spark.load import bulk_load
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.table import open_lance_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from pyspark.sql import SparkSession


__all__ = ["bulk_load", "bulk_merge", "register"]


def bulk_merge(
    spark: SparkSession,
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    regions: Sequence[UUID] = (),
    max_bytes: int | None = None,
    max_generations: int | None = None,
    branch: str | None = None,
) -> merge.MergeReport:
    """Merge all generations that were flushed before the call, on the caller's Spark session.

    Args:
        spark: the session; its settings are not changed, and it is not stopped.
        uri: the table, as :func:`memwal_ops.open_table` takes it.
        storage_options: as :func:`memwal_ops.open_table` takes them; sent to executors in the task closure, never in
            a configuration.
        regions: only these; empty for all.
        max_bytes: budget of one pass, by the sizes in the region manifests; None: 1 TiB.
        max_generations: at most this many generations in one pass.
        branch: as :func:`memwal_ops.open_table` takes it.

    Raises:
        SparkUnavailableError: the executors' Python cannot run the tasks.
        SparkJobFailedError: a stage failed; nothing of that pass was published.
        MemwalOpsError: as :func:`memwal_ops.formats.lance.jobs.merge.apply`.
    """
    options = merge.MergeOptions(tuple(regions), "spark", max_bytes, max_generations)
    return merge.apply(open_lance_table(uri, storage_options, branch), options, engine=SparkMergeEngine(spark))


def register(spark: SparkSession, *, storage_options: Mapping[str, str] | None = None) -> None:
    """Register the data source ``memwal`` in a Spark session, for ``spark.read.format("memwal")``.

    It reads base and unmerged generations as one table, last write wins; vectors as ``array<float>``. Another session
    of the same application (``newSession()``) needs a call of its own; a second call replaces the first one's options.
    ``.option("columns", "id,text")`` reads only these columns, ``.option("filter", "id > 5")`` only these rows, by a
    Lance expression that is evaluated on the newest row of each key. Without PYSPARK_PYTHON, its Python workers on a
    local or standalone master run the driver's interpreter.

    Args:
        spark: the session.
        storage_options: as pylance takes them, for all reads through it: they are pickled with the registered
            class, and appear in no query plan and on no page of the Spark UI.

    Raises:
        SparkUnavailableError: the session is stopped, or its executors' Python lacks our packages.
    """
    # The module imports PySpark.
    from memwal_ops.formats.lance.engines.spark.source import data_source  # noqa: PLC0415

    session.refuse_stopped(spark)
    with session.drivers_python(spark) as is_driver:
        if is_driver:
            session.check_executors(spark)
        with session.active(spark) if is_driver else nullcontext():
            spark.dataSource.register(data_source(dict(storage_options or {})))
