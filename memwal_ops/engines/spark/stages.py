"""The stages of a pass as Spark sees them: a name in its UI, seconds, tasks and shuffled bytes in our report."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.engines.spark.faults import raised_again

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark import SparkContext

_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_LISTENER_MILLIS = 5_000


@dataclass(slots=True)
class Stages:
    """Runs stages under names and adds up what they cost.

    Attributes:
        context: the Spark context.
        table: the table's URI, for the UI.
        seconds: per stage.
        metrics: tasks, failed and killed attempts, bytes written to the shuffle, seconds of executors.
    """

    context: SparkContext
    table: str
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("tasks", "lost_attempts", "shuffle_bytes", "executor_seconds", "spilled_bytes"), 0
        )
    )
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[None]:
        """Give what the block runs a group and a description; cancel it where the block does not end well."""
        started = time.monotonic()
        group = f"memwal-ops-{self.run}-{name}"
        before = {key: self.context.getLocalProperty(key) for key in _PROPERTIES}
        self.context.setJobGroup(group, f"memwal-ops: {doing} ({self.table})", interruptOnCancel=False)
        try:
            with raised_again(name):
                yield
        except BaseException:
            self.context.cancelJobGroup(group)
            raise
        finally:
            for key, value in before.items():
                self.context.setLocalProperty(key, value)  # a user's own session goes on under its own names
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 6)
        self._add_up(name, group)

    def _add_up(self, name: str, group: str) -> None:
        """Figures out of Spark's status store; they serve reports only, so that a failure to get them is none."""
        tracker = self.context.statusTracker()
        try:
            scala: Any = self.context._jsc.sc()  # noqa: SLF001 - no public way to these figures
            scala.listenerBus().waitUntilEmpty(_LISTENER_MILLIS)
            for job in tracker.getJobIdsForGroup(group):
                info = tracker.getJobInfo(job)
                for stage in info.stageIds if info is not None else ():
                    data = scala.statusStore().lastStageAttempt(stage)
                    self.metrics["tasks"] += data.numCompleteTasks()
                    self.metrics["lost_attempts"] += data.numFailedTasks() + data.numKilledTasks()
                    self.metrics["shuffle_bytes"] += data.shuffleWriteBytes()
                    self.metrics["spilled_bytes"] += data.diskBytesSpilled()
                    self.metrics["executor_seconds"] += data.executorRunTime() / 1000
                    key = f"shuffle_bytes_{name}"
                    self.metrics[key] = self.metrics.get(key, 0) + data.shuffleWriteBytes()
        except Exception:  # noqa: BLE001 - a stage that Spark skipped, a status store that forgot
            self.metrics["incomplete"] = 1
