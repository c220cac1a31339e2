"""Run the stages of a pass in Spark: parts, progress, cost, and errors of their tasks."""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self, TypeVar

from memwal_ops import errors
from memwal_ops.core import tracing
from memwal_ops.storage.options import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyspark import Accumulator, Broadcast, SparkContext
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Counters:
    """Spark accumulators, for progress: what finished tasks have processed."""

    rows: Accumulator[int]
    bytes: Accumulator[int]

    @classmethod
    def of(cls, context: SparkContext) -> Self:
        """New ones."""
        return cls(context.accumulator(0), context.accumulator(0))

    @property
    def values(self) -> tuple[int, int]:
        """Rows and bytes, on the driver."""
        return self.rows.value, self.bytes.value

    def add(self, rows: int, size: int) -> None:
        """Count rows and bytes, in a task."""
        self.rows.add(rows)
        self.bytes.add(size)


_T = TypeVar("_T")


def part_numbers(sizes: Sequence[int], parts: int, most: int) -> list[int]:
    """Per item the number of its part, from 0: neighbors together, all parts about as large.

    Args:
        sizes: of the items, in bytes or another measure.
        parts: how many are wanted; fewer, if there are not as many items.
        most: how large a part of several items may be; there are more parts where that takes them.
    """
    share = max(1, min(most, -(-sum(sizes) // max(1, parts))))
    groups, seen = [], 0
    for size in sizes:
        groups.append((seen + size // 2) // share)
        seen += size
    numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
    return [numbers[group] for group in groups]


def in_parts(items: Sequence[_T], numbers: Sequence[int]) -> list[list[_T]]:
    """The items that have the same number, by number."""
    parts: dict[int, list[_T]] = {}
    for item, number in zip(items, numbers, strict=True):
        parts.setdefault(number, []).append(item)
    return [parts[number] for number in sorted(parts)]


def run_parts(context: SparkContext, task: Callable[[Iterable[Any]], Iterator[Any]], parts: Sequence[Any]) -> list[Any]:
    """Run one task for each part, and return all results, in the order of parts.

    Parts are tasks of RDDs: nothing is planned, compiled or converted by Spark SQL.

    Results are those of the one successful attempt of each task.
    """
    return context.parallelize(parts, len(parts)).mapPartitions(task).collect() if parts else []


_MARK = re.compile(r"memwal-ops-fault<([A-Za-z0-9+/=]+)>")
_NO_RESPONSE = re.compile(r"An error occurred while calling \S+")
_CRASHED = re.compile(
    r"Python worker exited unexpectedly|Python worker.* crashed|ExecutorLostFailure|SparkContext was shut down"
)
_SHOWN = 600


class TaskFaultError(Exception):
    """The exception that a task raises: a redacted message, and the encoded error.

    Spark gives the driver the text of the exception that a task raised, and shows the same text in its UI and its
    logs. So a task raises one kind of exception: the message without secrets, then a mark and the encoded error, from
    which the driver raises the same error again.
    """


@contextmanager
def reported(*, marked: bool = True) -> Iterator[None]:
    """Turn any exception of a task's code into a :class:`TaskFaultError`.

    ``marked``: whether the driver can raise the same error again; if not, the text is for people only.
    """
    try:
        yield
    except errors.MemwalOpsError as error:
        raise TaskFaultError(_encode(error) if marked else _readable(error)) from None
    except Exception as error:  # noqa: BLE001 - any text may quote an option
        raise TaskFaultError(redact(f"{type(error).__name__}: {error}")) from None


@contextmanager
def raised_again(stage: str) -> Iterator[None]:
    """On the driver: turn Spark's exception for a failed stage into the task's own error.

    Raises ``SparkJobFailedError``: Spark failed for another reason, such as lost executors.
    """
    try:
        yield
    except errors.MemwalOpsError:
        raise
    except Exception as error:
        text = str(error)
        match = _MARK.search(text)
        if match is not None:
            raise _decode(json.loads(base64.b64decode(match[1]))) from error
        raise errors.SparkJobFailedError(f"Spark failed in the stage {stage!r}: {brief(error)}") from error


@contextmanager
def between_stages() -> Iterator[None]:
    """On the driver: turn Spark's exceptions outside of stages, as when its JVM was killed, into our error.

    Raises ``SparkJobFailedError``: for an error of PySpark, Py4J or the connection to the JVM; others pass.
    """
    try:
        yield
    except Exception as error:
        if not is_gone(error) and not type(error).__module__.startswith(("pyspark", "py4j")):
            raise
        raise errors.SparkJobFailedError(f"Spark failed between two stages: {brief(error)}") from error


def is_gone(error: BaseException) -> bool:
    """Whether an error of Py4J means that the JVM of the driver has ended."""
    # For a call in progress, Py4J itself then returns this text, without a reason.
    return isinstance(error, (ConnectionError, EOFError)) or _NO_RESPONSE.fullmatch(str(error).strip()) is not None


def is_crash(error: BaseException) -> bool:
    """Whether a job failed because a process of Spark's ended: a JVM, an executor, a Python worker."""
    return is_gone(error) or _CRASHED.search(str(error)) is not None


def brief(error: BaseException) -> str:
    """Spark's message in one line, without secrets and without Java's stack frames."""
    if is_gone(error):
        return "the JVM of the driver ended: it was killed (mostly for its memory) or crashed."
    lines = takewhile(lambda line: not line.startswith("at "), map(str.strip, str(error).splitlines()))
    return redact(" ".join(" ".join(lines).split()))[:_SHOWN]


def _encode(error: errors.MemwalOpsError) -> str:
    # Of one with more than a message; its class has ``unpacked``, too.
    packed = getattr(error, "packed", lambda pack: pack(error))(to_document)
    document = {"module": type(error).__module__, "kind": type(error).__name__, "error": packed}
    return f"{_readable(error)} memwal-ops-fault<{base64.b64encode(json.dumps(document).encode()).decode()}>"


def _readable(error: errors.MemwalOpsError) -> str:
    """The text for people: while a read is planned, Spark shows this text and raises an error of its own."""
    return f"{error.reason}: {redact(str(error))} {redact(error.remedy)}"


def to_document(error: errors.MemwalOpsError) -> dict[str, Any]:
    """An error as text: its class in :mod:`memwal_ops.errors`, message and remedy, without secrets."""
    return {"class": type(error).__name__, "message": redact(str(error)), "remedy": redact(error.remedy)}


def _decode(document: dict[str, Any]) -> errors.MemwalOpsError:
    # Only what is imported already: the text may be forged by a message that quotes data.
    kind = getattr(sys.modules.get(document["module"]), document["kind"], None)
    error = getattr(kind, "unpacked", lambda one, unpack: unpack(one))(document["error"], from_document)
    assert isinstance(error, errors.MemwalOpsError)  # noqa: S101 - for the type checker: ``unpacked`` returns one
    return error


def from_document(one: Any) -> errors.MemwalOpsError:
    """The reverse of :func:`to_document`."""
    kind: type[errors.MemwalOpsError] = getattr(errors, one["class"], errors.MemwalOpsError)
    return kind(one["message"], remedy=one["remedy"])


_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_LISTENER_MILLIS = 5_000
_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Progress of a stage that runs on other machines.

    Attributes:
        stage: its name, as in a report's ``phases``.
        tasks_done: tasks that succeeded, of ``tasks``; 0 of 0 before the first is started.
        rows: read, deleted or written by these tasks; a repeated task may count twice.
        bytes: likewise: of keys that were read, of files that were written.
    """

    stage: str
    tasks_done: int
    tasks: int
    rows: int
    bytes: int


def release(rows: DataFrame) -> None:
    """Unpersist rows. Errors are ignored: the rows end with the session anyway, and an error must not hide another."""
    with suppress(Exception):
        rows.unpersist()


def release_broadcast(value: Broadcast[Any]) -> None:
    """Remove a broadcast value from the driver and all executors; errors are ignored, as of :func:`release`."""
    with suppress(Exception):
        value.destroy()


@dataclass(slots=True)
class Stages:
    """Runs named stages and adds up their cost.

    Attributes:
        counters: where tasks count, for ``on_progress``.
        on_progress: called about twice a second while a stage runs, and when it ends.
        checkpoint: called as often: raises if the run is to stop, and the jobs of the stage are cancelled then.
        metrics: tasks, failed and killed attempts, bytes written to the shuffle, seconds of executors.
        failed_group: the job group of the stage that failed.
    """

    context: SparkContext
    table: str
    counters: Counters | None = None
    on_progress: Callable[[StageProgress], None] | None = None
    checkpoint: Callable[[], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("tasks", "lost_attempts", "shuffle_bytes", "executor_seconds", "spilled_bytes"), 0
        )
    )
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    failed_group: str | None = None

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[None]:
        """Give the jobs of the block a group and a description; cancel them if the block raises."""
        started = time.monotonic()
        group = f"memwal-ops-{self.run}-{name}"
        before: dict[str, str | None] = {}
        # Names for the UI. If the JVM is gone, a stage that needs it raises, and the commit does not need it:
        # a pass that was published must not be reported as failed.
        with suppress(Exception):
            before = {key: self.context.getLocalProperty(key) for key in _PROPERTIES}
            self.context.setJobGroup(group, f"memwal-ops: {doing} ({self.table})", interruptOnCancel=False)
        try:
            with tracing.phase(name), raised_again(name), self._observed(name, group):
                yield
        except BaseException:
            self.failed_group = group
            with suppress(Exception):
                self.context.cancelJobGroup(group)
            raise
        finally:
            with suppress(Exception):
                for key, value in before.items():
                    self.context.setLocalProperty(key, value)  # the caller's session keeps its own names
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 6)
        self._add_up(name, group)

    @contextmanager
    def _observed(self, name: str, group: str) -> Iterator[None]:
        """Report the progress of a stage, and cancel its jobs if the run is to stop: from a thread of its own."""
        if self.on_progress is None and self.checkpoint is None:
            yield
            return
        report = self._reporter(name, group)
        ended = threading.Event()
        stops: list[BaseException] = []

        def observe() -> None:
            while not ended.wait(_PROGRESS_SECONDS):
                with suppress(Exception):  # only a display: the stage itself raises the error
                    report()
                if self.checkpoint is not None and not stops:
                    try:
                        self.checkpoint()
                    except BaseException as stop:  # noqa: BLE001 - raised again below
                        stops.append(stop)
                        with suppress(Exception):  # the JVM is gone, and the stage fails anyway
                            self.context.cancelJobGroup(group)

        observer = threading.Thread(target=observe, daemon=True)
        observer.start()
        try:
            yield
        except Exception as error:
            if stops:
                raise stops[0] from error
            raise
        finally:
            ended.set()
            observer.join()
            with suppress(Exception):
                self.context._jsc.sc().listenerBus().waitUntilEmpty(_LISTENER_MILLIS)  # noqa: SLF001
                report()

    def _reporter(self, name: str, group: str) -> Callable[[], None]:
        counters, on_progress = self.counters, self.on_progress
        if on_progress is None:
            return lambda: None
        before = (0, 0) if counters is None else counters.values

        def report() -> None:
            rows, size = (0, 0) if counters is None else counters.values
            on_progress(StageProgress(name, *self._tasks(group), rows - before[0], size - before[1]))

        return report

    def _tasks(self, group: str) -> tuple[int, int]:
        """How many tasks of a group's jobs succeeded, and how many there are; without skipped ones."""
        scala: Any = self.context._jsc.sc()  # noqa: SLF001 - the public tracker counts skipped tasks as waiting
        jobs = [scala.statusStore().job(job) for job in self.context.statusTracker().getJobIdsForGroup(group)]
        return sum(job.numCompletedTasks() for job in jobs), sum(job.numTasks() - job.numSkippedTasks() for job in jobs)

    def settle(self) -> None:
        """Wait, for a limited time, until no task of the failed stage is running."""
        end = time.monotonic() + _SETTLE_SECONDS
        with suppress(Exception):  # the JVM is gone, and the error is already being raised
            tracker = self.context.statusTracker()
            while self.failed_group is not None and time.monotonic() < end:
                jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.failed_group)]
                stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
                if not any(stage.numActiveTasks for stage in stages if stage is not None):
                    return
                time.sleep(_POLL_SECONDS)

    def _add_up(self, name: str, group: str) -> None:
        """Add figures from Spark's status store. They serve reports only, so a failure to read them is not an error."""
        try:
            tracker = self.context.statusTracker()
            scala: Any = self.context._jsc.sc()  # noqa: SLF001 - no public way to these figures
            scala.listenerBus().waitUntilEmpty(_LISTENER_MILLIS)
            for job in tracker.getJobIdsForGroup(group):
                info = tracker.getJobInfo(job)
                for stage in info.stageIds if info is not None else ():
                    self._add_attempts(name, self._attempts(scala.statusStore(), stage))
        except Exception:  # noqa: BLE001 - the status store evicted the stage, or its API changed
            self.metrics["incomplete"] = 1

    def _attempts(self, store: Any, stage: int) -> list[Any]:
        """All attempts of a stage: Spark starts another one when a lost executor took shuffle files with it."""
        jvm, gateway = self.context._jvm, self.context._gateway  # noqa: SLF001
        assert jvm is not None  # noqa: S101 - there is a context
        assert gateway is not None  # noqa: S101
        attempts = store.stageData(stage, False, jvm.java.util.ArrayList(), False, gateway.new_array(jvm.double, 0))  # noqa: FBT003
        return [attempts.apply(position) for position in range(attempts.size())]

    def _add_attempts(self, name: str, attempts: list[Any]) -> None:
        key = f"shuffle_bytes_{name}"
        for data in attempts:
            self.metrics["tasks"] += data.numCompleteTasks()
            # The stage has ended: another attempt of a task that still runs succeeded, and this one will be killed.
            overtaken = data.numActiveTasks()
            self.metrics["lost_attempts"] += data.numFailedTasks() + data.numKilledTasks() + overtaken
            self.metrics["shuffle_bytes"] += data.shuffleWriteBytes()
            self.metrics["spilled_bytes"] += data.diskBytesSpilled()
            self.metrics["executor_seconds"] += data.executorRunTime() / 1000
            self.metrics[key] = self.metrics.get(key, 0) + data.shuffleWriteBytes()
