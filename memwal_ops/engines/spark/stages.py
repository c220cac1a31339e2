"""The stages of a pass as Spark sees them: a name in its UI, seconds, tasks and shuffled bytes in our report."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.engines.api import StageProgress
from memwal_ops.engines.spark.faults import raised_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark import SparkContext

    from memwal_ops.engines.spark.tasks import Counters

_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_LISTENER_MILLIS = 5_000
_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 0.5


@dataclass(slots=True)
class Stages:
    """Runs stages under names and adds up what they cost.

    Attributes:
        context: the Spark context.
        table: the table's URI, for the UI.
        counters: where tasks count, for ``on_progress``.
        on_progress: called about twice a second while a stage runs, and when it ends.
        seconds: per stage.
        metrics: tasks, failed and killed attempts, bytes written to the shuffle, seconds of executors.
        ended_badly: the job group of the stage that was given up.
    """

    context: SparkContext
    table: str
    counters: Counters | None = None
    on_progress: Callable[[StageProgress], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("tasks", "lost_attempts", "shuffle_bytes", "executor_seconds", "spilled_bytes"), 0
        )
    )
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    ended_badly: str | None = None

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[None]:
        """Give what the block runs a group and a description; cancel it where the block does not end well."""
        started = time.monotonic()
        group = f"memwal-ops-{self.run}-{name}"
        before = {key: self.context.getLocalProperty(key) for key in _PROPERTIES}
        self.context.setJobGroup(group, f"memwal-ops: {doing} ({self.table})", interruptOnCancel=False)
        try:
            with raised_again(name), self._shown(name, group):
                yield
        except BaseException:
            self.context.cancelJobGroup(group)
            self.ended_badly = group
            raise
        finally:
            for key, value in before.items():
                self.context.setLocalProperty(key, value)  # a user's own session goes on under its own names
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 6)
        self._add_up(name, group)

    @contextmanager
    def _shown(self, name: str, group: str) -> Iterator[None]:
        """Tell ``on_progress`` how far the stage is, from a thread of its own."""
        counters, tell = self.counters, self.on_progress
        if counters is None or tell is None:
            yield
            return
        before = counters.rows.value, counters.bytes.value
        ended = threading.Event()

        def look() -> None:
            done, all_of_them = self._tasks(group)
            tell(
                StageProgress(
                    name, done, all_of_them, counters.rows.value - before[0], counters.bytes.value - before[1]
                )
            )

        def watch() -> None:
            while not ended.wait(_PROGRESS_SECONDS):
                with suppress(Exception):  # a display; whatever is wrong, the stage itself will say
                    look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            with suppress(Exception):
                self.context._jsc.sc().listenerBus().waitUntilEmpty(_LISTENER_MILLIS)  # noqa: SLF001
                look()

    def _tasks(self, group: str) -> tuple[int, int]:
        """How many tasks of a group's jobs ended well, of how many that are to run."""
        scala: Any = self.context._jsc.sc()  # noqa: SLF001 - the public tracker counts skipped tasks as waiting
        jobs = [scala.statusStore().job(job) for job in self.context.statusTracker().getJobIdsForGroup(group)]
        return sum(job.numCompletedTasks() for job in jobs), sum(job.numTasks() - job.numSkippedTasks() for job in jobs)

    def settle(self) -> None:
        """Wait a little until no task of the stage that was given up is under way."""
        tracker = self.context.statusTracker()
        end = time.monotonic() + _SETTLE_SECONDS
        while self.ended_badly is not None and time.monotonic() < end:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.ended_badly)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
            if not any(stage.numActiveTasks for stage in stages if stage is not None):
                return
            time.sleep(_POLL_SECONDS)

    def _add_up(self, name: str, group: str) -> None:
        """Figures out of Spark's status store; they serve reports only, so that a failure to get them is none."""
        tracker = self.context.statusTracker()
        try:
            scala: Any = self.context._jsc.sc()  # noqa: SLF001 - no public way to these figures
            scala.listenerBus().waitUntilEmpty(_LISTENER_MILLIS)
            for job in tracker.getJobIdsForGroup(group):
                info = tracker.getJobInfo(job)
                for stage in info.stageIds if info is not None else ():
                    self._add_attempts(name, self._attempts(scala.statusStore(), stage))
        except Exception:  # noqa: BLE001 - a status store that forgot, or that Spark changed
            self.metrics["incomplete"] = 1

    def _attempts(self, store: Any, stage: int) -> list[Any]:
        """All attempts of a stage: Spark begins one anew when an executor takes its share of the shuffle along."""
        jvm, gateway = self.context._jvm, self.context._gateway  # noqa: SLF001
        assert jvm is not None  # noqa: S101 - there is a context
        assert gateway is not None  # noqa: S101
        found = store.stageData(stage, False, jvm.java.util.ArrayList(), False, gateway.new_array(jvm.double, 0))  # noqa: FBT003
        return [found.apply(place) for place in range(found.size())]

    def _add_attempts(self, name: str, attempts: list[Any]) -> None:
        key = f"shuffle_bytes_{name}"
        for data in attempts:
            self.metrics["tasks"] += data.numCompleteTasks()
            # The stage is over: whatever still runs was overtaken by another attempt, and is about to be killed.
            overtaken = data.numActiveTasks()
            self.metrics["lost_attempts"] += data.numFailedTasks() + data.numKilledTasks() + overtaken
            self.metrics["shuffle_bytes"] += data.shuffleWriteBytes()
            self.metrics["spilled_bytes"] += data.diskBytesSpilled()
            self.metrics["executor_seconds"] += data.executorRunTime() / 1000
            self.metrics[key] = self.metrics.get(key, 0) + data.shuffleWriteBytes()
