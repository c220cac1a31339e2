"""Plan and apply garbage collection of any table. A format implements :class:`Collector`.

A deletion is the only effect that a later run cannot repair. A plan is therefore only printed, or written to a file
as JSON lines, and never executed: :func:`collect` revalidates each batch (at most 1,000 objects) against the current
state of the store, deletes what is still deletable, and continues; an object that became needed after it was planned is
in no batch. Right before each deletion the collector's anchors verify that the table is the one that the plan was made
from, and the guard that the run still holds its lease. If either fails, nothing more is deleted, and the report has the
reason.

A run can be killed at any line: drained objects still exist but are not listed for readers any more, deleted objects
are gone, and the next run completes the work.
"""

from __future__ import annotations

import abc
import json
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from memwal_ops.core.anchors import Anchor, CommitGuard, delete_proven
from memwal_ops.core.candidates import Candidate, CollectionReport, Gate, Verdict
from memwal_ops.core.options import CollectOptions, OptionError
from memwal_ops.errors import MemwalOpsError, TableReplacedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memwal_ops.core.context import RunContext
    from memwal_ops.storage.api import DeleteReport, Store


@contextmanager
def plan_file(path: str | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that writes one document as a line; without a path it does nothing.

    The file appears when the block ends, or not at all if the block raises. Raises ``OptionError``: the folder cannot
    be written.
    """
    if path is None:
        yield lambda _: None
        return
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise OptionError(f"{{plan_file}} {path} cannot be written: {error}.", "plan_file") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield lambda document: print(json.dumps(document), file=file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


CandidateT = TypeVar("CandidateT", bound=Candidate)
ResultT = TypeVar("ResultT")
ReportT = TypeVar("ReportT", bound="CollectionReport[Any]")
BATCH_OBJECTS = 1000
_MAX_FAILED_BATCHES = 5
_NOT_DONE = "not deleted, or only in part: see failed, or --max-deletes; the next run continues"


class PartReplacedError(Exception):
    """A part of the table may have been replaced since the plan. The table itself is the same."""


@dataclass(frozen=True, slots=True)
class Stage(Generic[CandidateT]):
    """Candidates that are deleted before the next stage of the collector is read.

    Attributes:
        candidates: in the order in which they are deleted; may be lazy.
        in_order: the reason why a candidate must not be deleted before all candidates in front of it are; they are
            then deleted one by one. None: any order.
    """

    candidates: Iterable[CandidateT]
    in_order: str | None = None


class Collector(abc.ABC, Generic[CandidateT]):
    """Finds the candidates of one part of a table.

    Or of one family of its objects, with the proof that each is deletable.

    A format's gc is a lazy sequence of collectors; each is completed before the next one starts. A plan calls only
    :meth:`stages`; the other methods are for deleting.

    ``part``: its name in ``faults`` if the part can be unreadable by itself; None: the table as a whole.
    """

    part: object = None
    store: Store

    @property
    @abc.abstractmethod
    def anchors(self) -> Sequence[Anchor]:
        """Objects that are unchanged as long as the table is the one that was read; checked before each deletion.

        Empty for a plan, and if :meth:`delete` is a transaction that fails on any other table.
        """

    @abc.abstractmethod
    def stages(self) -> Iterable[Stage[CandidateT]]:
        """All candidates with their gates, including those that are held or unrecognized."""

    @abc.abstractmethod
    def revalidate(self, batch: Sequence[CandidateT]) -> Iterable[CandidateT]:
        """The same candidates with gates from the current state of the store; without those that no longer exist.

        Raises:
            TableReplacedError: it is not certain that the table is the one that the plan was made from.
            PartReplacedError: it is not certain that this part is the one that the plan was made from.
        """

    def drain(self) -> int:
        """Remove unneeded entries from the list that readers follow, and return their number. Idempotent.

        New readers do not find them from then on; their age gates count from there.
        """
        return 0

    def objects(self, candidate: CandidateT) -> Iterable[tuple[str, int]]:
        """Path and size in bytes of each object of a candidate; a folder is listed now."""
        return ((candidate.path, candidate.bytes),)

    def delete(self, paths: Sequence[str], guard: CommitGuard) -> DeleteReport:
        """Delete objects that passed :meth:`revalidate`, at most 1,000. The only method that deletes.

        The table's store checks the guard by itself. An effect that does not use the store (for example a database
        transaction) calls ``guard.check()`` right before its commit. An object that is gone counts as deleted. Raises
        ``TableReplacedError`` or ``PartReplacedError``: an anchor has changed; nothing was deleted.
        """
        del guard  # the store checks it
        return delete_proven(self.store, paths, self.anchors)

    def not_deleted(self, candidate: CandidateT) -> None:
        """Keep what a candidate refers to: it was not deleted, or only in part."""

    def unreadable(self, error: MemwalOpsError) -> CandidateT | None:
        """The candidate that is reported, and kept, for a part that cannot be read; None: the error ends the run."""
        del error
        return None


def candidates(
    collectors: Iterable[Collector[CandidateT]], report: CollectionReport[CandidateT]
) -> Iterator[CandidateT]:
    """All candidates of the collectors. Reads only; memory does not grow with the number of objects."""
    for collector in collectors:
        faults: list[CandidateT] = []
        with _keep_if_unreadable(collector, report, faults.append):
            for stage in collector.stages():
                yield from stage.candidates
        yield from faults


def plan(
    collectors: Iterable[Collector[CandidateT]],
    report: ReportT,
    options: CollectOptions,
    context: RunContext,
    on_candidate: Callable[[CandidateT], None] = lambda _: None,
) -> ReportT:
    """Report which candidates are deletable, which are held and why, and which are unrecognized. Reads only.

    ``report``: receives every candidate, and is returned. ``context``: receives progress, and can stop the run after
    each candidate.
    """
    with _recording(report, options, context, on_candidate) as record:
        for candidate in candidates(collectors, report):
            record(candidate)
    return report


def collect(
    collectors: Iterable[Collector[CandidateT]],
    report: ReportT,
    options: CollectOptions,
    context: RunContext,
    on_candidate: Callable[[CandidateT], None] = lambda _: None,
    *,
    drains: bool = True,
) -> ReportT:
    """Drain and delete. Safe to kill, to repeat and to run concurrently, if the collectors' proofs are.

    Args: as for :func:`plan`; ``on_candidate`` is called once the outcome of a candidate is known. ``drains``: False:
        for a full disk, nothing is written, and what must be drained before it is deleted stays.
    """
    with _recording(report, options, context, on_candidate) as record:
        run = _Run(report, options.max_deletes, context.guard, record, drains=drains)
        for collector in collectors:
            run.collect(collector)
        context.figures["bytes_collected"] += report.deleted_bytes
        context.figures["objects_collected"] += report.deleted_objects
        context.figures["delete_requests"] += run.requests
    return report


@contextmanager
def _recording(
    report: CollectionReport[CandidateT],
    options: CollectOptions,
    context: RunContext,
    on_candidate: Callable[[CandidateT], None],
) -> Iterator[Callable[[CandidateT], None]]:
    """Yield the function that adds a candidate to the report, the plan file and the front end."""
    report.limit, report.plan_file = options.limit, options.plan_file
    with plan_file(options.plan_file) as write:

        def record(candidate: CandidateT) -> None:
            report.add(candidate)
            on_candidate(candidate)
            write({**candidate.to_json(), "verdict": candidate.verdict.value})
            context.advance("collecting", "candidates")
            context.checkpoint()

        yield record
    report.seconds = time.monotonic() - report.began


@contextmanager
def _keep_if_unreadable(
    collector: Collector[CandidateT], report: CollectionReport[CandidateT], record: Callable[[CandidateT], None]
) -> Iterator[None]:
    try:
        yield
    except MemwalOpsError as error:
        kept = collector.unreadable(error)
        if kept is None:
            raise
        report.faults[collector.part] = str(error)
        record(kept)


@dataclass(slots=True)
class _Deleted:
    """The outcome of a deletion. The paths that are gone, whether any failed, whether ``all`` are gone."""

    paths: set[str] = field(default_factory=set)
    failed: bool = False
    all: bool = False


@dataclass
class _Run(Generic[CandidateT]):
    """The state of one run of :func:`collect`.

    Attributes:
        part_replaced: why the current part may have been replaced; the rest of it is kept.
        stopped: whether the store is unavailable or refuses every deletion; the rest is for the next run. (A single
            refusal does not stop the run: one object alone may be locked.)
        failed_batches: consecutive batches of which nothing could be deleted.
        drains: False: nothing is written, only deleted.
    """

    report: CollectionReport[CandidateT]
    max_deletes: int | None
    guard: CommitGuard
    record: Callable[[CandidateT], None]
    part_replaced: str | None = None
    stopped: bool = False
    failed_batches: int = 0
    requests: int = 0
    drains: bool = True

    def collect(self, collector: Collector[CandidateT]) -> None:
        """Drain, then delete one stage after the other."""
        self.part_replaced = None
        with _keep_if_unreadable(collector, self.report, self.record):
            if self.drains and not self.stopped and self._replaced is None:
                self.report.drained += self._call(collector.drain) or 0
            for stage in collector.stages():
                self._collect_stage(collector, stage)

    @property
    def _replaced(self) -> str | None:
        """Why the table or the part may have been replaced; None: there is no sign of it."""
        return self.report.replaced or self.part_replaced

    @property
    def _stop_reason(self) -> str | None:
        """Why nothing more may be deleted now; None: more may."""
        return self._replaced or (_NOT_DONE if self.stopped or self.report.limited else None)

    def _call(self, method: Callable[[], ResultT]) -> ResultT | None:
        """The result of a call of the collector; None, with the reason noted, if the table or part was replaced."""
        try:
            return method()
        except PartReplacedError as error:
            self.part_replaced = str(error)
        except TableReplacedError as error:
            self.report.replaced = str(error)
        return None

    def _collect_stage(self, collector: Collector[CandidateT], stage: Stage[CandidateT]) -> None:
        """Report the held candidates; delete the others in batches."""
        batch: list[CandidateT] = []
        objects = 0
        # Carried over from batch to batch. Timeline otherwise: version 5 cannot be deleted; version 1,001, in the next
        # batch, is deleted; the region has a gap, and no process can read it.
        all_gone = True
        for candidate in stage.candidates:
            if candidate.verdict is not Verdict.DELETE:
                self.record(candidate)
                all_gone = False
            elif (why := self._stop_reason or (None if all_gone else stage.in_order)) is not None:
                self._keep(candidate, why)
            else:
                batch.append(candidate)
                objects += candidate.objects
            if objects >= BATCH_OBJECTS:
                all_gone = self._delete(collector, batch, stage.in_order) and all_gone
                batch, objects = [], 0
        if batch:
            self._delete(collector, batch, stage.in_order)

    def _delete(self, collector: Collector[CandidateT], batch: list[CandidateT], in_order: str | None) -> bool:
        """Revalidate a batch, and delete the candidates that are still deletable. Return whether all are gone."""
        revalidated = self._call(lambda: list(collector.revalidate(batch)))
        if revalidated is None:
            for candidate in batch:
                self._keep(candidate, self._stop_reason or _NOT_DONE)
            return False
        if in_order is None:
            return self._remove(collector, revalidated)
        for at, candidate in enumerate(revalidated):
            if not self._remove(collector, [candidate]):
                for rest in revalidated[at + 1 :]:
                    self._keep(rest, self._stop_reason or in_order)
                return False
        return True

    def _remove(self, collector: Collector[CandidateT], revalidated: Iterable[CandidateT]) -> bool:
        """Delete the deletable candidates; small ones share a request. Return whether all of them are gone."""
        small: list[tuple[CandidateT, dict[str, int]]] = []
        all_gone = True
        for candidate in revalidated:
            if candidate.verdict is not Verdict.DELETE:
                self.record(candidate)
                all_gone = False
            elif candidate.objects < BATCH_OBJECTS:
                small.append((candidate, dict(collector.objects(candidate))))
            else:
                gone = self._delete_objects(collector, collector.objects(candidate)).all
                all_gone = self._record_deleted(collector, candidate, gone=gone) and all_gone
        deleted = self._delete_objects(collector, (item for _, objects in small for item in objects.items())).paths
        for candidate, objects in small:
            all_gone = self._record_deleted(collector, candidate, gone=deleted.issuperset(objects)) and all_gone
        return all_gone

    def _record_deleted(self, collector: Collector[CandidateT], candidate: CandidateT, *, gone: bool) -> bool:
        if gone:
            self.record(candidate)
        else:
            collector.not_deleted(candidate)
            self._keep(candidate, self._stop_reason or _NOT_DONE)
        return gone

    def _delete_objects(self, collector: Collector[CandidateT], objects: Iterable[tuple[str, int]]) -> _Deleted:
        """Delete as many as the store and ``max_deletes`` allow, each batch after a check of the anchors.

        A batch is listed before the anchors are checked, so the listing is that of the anchored table.
        """
        deleted = _Deleted()
        rest = iter(objects)
        while not self.stopped and self._replaced is None:
            chunk = dict(islice(rest, self._next_batch_size()))
            if not chunk:
                deleted.all = not deleted.failed and next(rest, None) is None
                self.report.limited = self.report.limited or (not deleted.all and not deleted.failed)
                break
            outcome = self._call(partial(collector.delete, [*chunk], self.guard))
            if outcome is None:
                break
            gone = chunk.keys() - outcome.failed.keys()
            self.requests += 1
            self.report.deleted_objects += outcome.deleted
            self.report.deleted_bytes += sum(chunk[path] for path in gone)
            self.report.failed |= outcome.failed
            deleted.failed = deleted.failed or bool(outcome.failed)
            deleted.paths |= gone
            self.failed_batches = self.failed_batches + 1 if outcome.failed and not outcome.deleted else 0
            self.stopped = self.failed_batches >= _MAX_FAILED_BATCHES
        return deleted

    def _next_batch_size(self) -> int:
        if self.max_deletes is None:
            return BATCH_OBJECTS
        return min(BATCH_OBJECTS, self.max_deletes - self.report.deleted_objects)

    def _keep(self, candidate: CandidateT, why: str) -> None:
        self.record(replace(candidate, gates=(*candidate.gates, Gate(met=False, text=why))))
