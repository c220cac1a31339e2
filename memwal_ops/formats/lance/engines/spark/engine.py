"""The Spark engine: executors stream the payload from Lance to Lance; the driver publishes one version, or nothing.

A pass has one of two plans, which write the same rows and deletions as the local engine does, by its functions:

* :mod:`.broadcast`: the driver finds the newest rows, as their keys are few. Nothing is shuffled.
* :mod:`.shuffle`: executors find them; keys and locators are shuffled. The driver's memory grows with the number of
  generations and fragments, not with that of rows.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.spark.faults import between_stages
from memwal_ops.core.spark.session import our_tasks
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.engines.merge import sharing
from memwal_ops.formats.lance.engines.merge.api import MergePass, PassResult
from memwal_ops.formats.lance.engines.merge.encoded_keys import key_code
from memwal_ops.formats.lance.engines.merge.passes import commit_pass, open_generations
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, all_field_ids, remove_files
from memwal_ops.formats.lance.engines.spark import tasks
from memwal_ops.formats.lance.engines.spark.broadcast import DRIVER_KEY_BYTES, Broadcast, find_newest, fits
from memwal_ops.formats.lance.engines.spark.locators import MAX_GENERATIONS
from memwal_ops.formats.lance.engines.spark.runner import log_files, log_files_if_kept, log_leftovers
from memwal_ops.formats.lance.engines.spark.running import Running
from memwal_ops.formats.lance.engines.spark.shuffle import Shuffle
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from memwal_ops.core.spark.stages import StageProgress
    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.engines.merge.collapse import Winners
    from memwal_ops.formats.lance.engines.spark.running import Changed
    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.table import Table

_ROWS_PER_TASK = 50_000
_SHARE_OF_BUDGET = 4


class SparkEngine:
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
        on_progress: Callable[[StageProgress], None] | None = None,
        checkpoint: Callable[[], None] | None = None,
    ) -> None:
        self._spark = spark
        self._rows_per_task = rows_per_task
        self._driver_key_bytes = driver_key_bytes
        self._on_progress = on_progress
        self._checkpoint = checkpoint

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Publish one pass; see :meth:`memwal_ops.formats.lance.engines.merge.api.Engine.run`.

        Raises:
            SparkUnavailableError: the executors' Python cannot run our tasks.
            SparkJobFailedError: a stage failed in Spark.
        """
        with between_stages(), our_tasks(self._spark):
            return self._pass(table, merge_pass).run(note, on_rows)

    def refuse_shared_keys(self, table: Table, whole: MergePass) -> None:
        """See :meth:`memwal_ops.formats.lance.engines.merge.api.Engine.refuse_shared_keys`.

        Raises:
            SparkUnavailableError: the executors' Python cannot run our tasks.
            SparkJobFailedError: a stage failed in Spark.
        """
        rows = [one.rows for one in whole.generations]
        if None not in rows and fits(sum(filter(None, rows)), table, self._driver_key_bytes):
            sharing.refuse_shared_keys(table, replace(whole, max_bytes=_SHARE_OF_BUDGET * self._driver_key_bytes))
            return
        with our_tasks(self._spark):
            self._pass(table, whole).refuse_shared_keys()

    def _pass(self, table: Table, merge_pass: MergePass) -> _Pass:
        run = Running(self._spark, table, merge_pass, self._rows_per_task, self._on_progress, self._checkpoint)
        return _Pass(run, self._driver_key_bytes)


class _Pass:
    """One pass in progress."""

    def __init__(self, run: Running, driver_key_bytes: int) -> None:
        self.table, self.merge_pass, self.stages = run.table, run.merge_pass, run.stages
        self._run = run
        self._driver_key_bytes = driver_key_bytes
        self.began = datetime.now(UTC)

    def refuse_shared_keys(self) -> None:
        with self.stages.stage("open", "open generations"):
            work = self._work(open_generations(self.table, self.merge_pass))
        Shuffle(self._run, work).refuse_shared_keys()

    def run(self, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        started = time.monotonic()
        with self.stages.stage("open", "open generations"):
            generations = open_generations(self.table, self.merge_pass)
            work = self._work(generations)
        winners = self._newest(work, generations)
        del generations  # executors open them for themselves
        plan = Broadcast(self._run, work, winners) if winners is not None else Shuffle(self._run, work)
        change, changed = self._change(plan)
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
            rows_deleted=changed.deletions.tombstones,
            bytes_read=sum(one.data_bytes for one in work.generations),
            use_index=changed.use_index,
            seconds=time.monotonic() - started,
            phases=self.stages.seconds,
            metrics=self.stages.metrics,
        )

    def _newest(self, work: tasks.Pass, generations: Sequence[Generation]) -> Winners | None:
        """The newest row of each key, if the driver can hold the keys."""
        if not fits(sum(one.live_rows for one in work.generations), self.table, self._driver_key_bytes):
            return None
        with self.stages.stage("keys", "read keys of generations, find the newest row of each key"):
            return find_newest(self.table, work, generations, self._driver_key_bytes)

    def _change(self, plan: Broadcast | Shuffle) -> tuple[Rewrite, Changed]:
        try:
            changed = plan.change()
            deletions = changed.deletions
            fields = all_field_ids(self.table.dataset)
            return Rewrite(changed.fragments, deletions.updated, deletions.removed, fields), changed
        except BaseException:
            self._remove(self._run.files)
            if "delete" in self.stages.seconds:  # before that, no stage writes files
                self.stages.settle()
                log_leftovers(self.table, self.began)
            raise

    def _work(self, generations: Sequence[Generation]) -> tasks.Pass:
        if len(generations) > MAX_GENERATIONS:
            raise UnsupportedFeatureError(
                f"A pass of {len(generations)} generations exceeds the limit of {MAX_GENERATIONS}.",
                remedy=f"Run it with --max-generations {MAX_GENERATIONS}.",
            )
        table = self.table
        return tasks.Pass(
            table.location,
            table.version,
            table.primary_key,
            key_code(table.schema, table.primary_key),
            bool(table.dataset.has_stable_row_ids),
            tuple(one.sealed() for one in generations),
            self._run.counters,
        )

    def _commit(self, change: Rewrite, note: CommitNote) -> int:
        # Credentials may have expired while executors worked.
        table = replace(self.table, location=self.table.location.refreshed())
        with log_files_if_kept(table, change.written_files()), self.stages.stage("commit", "commit"):
            return commit_pass(table, change, self.merge_pass, note)

    def _remove(self, paths: Sequence[str]) -> None:
        """Delete the files that finished stages wrote for a pass that failed before its commit."""
        if paths:
            failed = remove_files(self.table, paths).failed
            log_files(self.table, list(failed), "they could not be removed")
