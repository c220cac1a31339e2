"""Compact the log of a namespace into its segment, pass by pass (S4-025 to S4-036)."""

from __future__ import annotations

import time
from bisect import bisect_right
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.core.context import RunContext
from memwal_ops.core.documents import document
from memwal_ops.core.options import EngineChoice, choose_engine
from memwal_ops.core.report import MergeDecision, MergeOutcome
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.backlog import (
    BlockedPart,
    Contested,
    contested,
    damaged_parts,
    figures,
    read_fragments,
)
from memwal_ops.formats.zeppelin.compaction import (
    Built,
    Compaction,
    Inputs,
    dimensions_of,
    metric_of,
    read_inputs,
    staging_path,
)
from memwal_ops.formats.zeppelin.lease import HeldLease, claim, held_lease
from memwal_ops.formats.zeppelin.namespace import FencedError, Namespace, probe, retried
from memwal_ops.formats.zeppelin.wire import META
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI, Fragment
from memwal_ops.formats.zeppelin.writer import put_fragment
from memwal_ops.log import get_logger
from memwal_ops.storage.local import swaps_wait
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memwal_ops.core.spark.runner import TaskRunner
    from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions
    from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef, Manifest

# A pass whose inputs were replaced starts again. That is rare: a process that replaces them ignores the fencing token.
_MAX_RESTARTS = 8


@dataclass(frozen=True)
class PassReport:
    """One published pass: its fragments, and the resulting segment."""

    version: int
    fragments: int
    upserts: int
    deletes: int
    segment: str | None
    rows: int
    retrained: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The ``passes`` entry."""
        return document(self)


@dataclass
class NamespaceMergeReport(MergeOutcome):
    """The result of a compaction; in a plan, ``fragments`` are those that would be compacted."""

    decision: MergeDecision
    version: int
    fragments: int
    passes: list[PassReport] = field(default_factory=list)
    blocked: BlockedPart | None = None
    warnings: list[str] = field(default_factory=list)
    contested: bool = False
    seconds: float = 0.0
    engine: EngineChoice = field(default_factory=lambda: EngineChoice("local", "nothing to write"))

    def to_json(self) -> dict[str, Any]:
        """The document of ``merge --json``."""
        blocked = [] if self.blocked is None else [self.blocked]
        return document(self, "contested", blocked=blocked, engine=self.engine.name, engine_reason=self.engine.reason)

    def describe(self) -> str:
        """The report as text for people."""
        fragments = counted(self.fragments, "fragment")
        nothing = "all fragments are compacted; the segment's objects are there, their contents were not read"
        what = {
            MergeDecision.MERGED: f"{fragments} compacted",
            MergeDecision.NOTHING_TO_MERGE: "only rows of contested ids are left in the log"
            if self.contested
            else nothing,
            MergeDecision.SUPERSEDED: "another compactor has a later token; nothing of this run is visible",
            MergeDecision.BLOCKED: f"{fragments} compacted, up to an unusable one",
            MergeDecision.DRY_RUN: f"{fragments} would be compacted",
        }[self.decision]
        lines = [f"{self.decision}: {what}; the namespace is at revision {self.version}."]
        for pass_ in self.passes:
            how = "new centroids" if pass_.retrained else "existing centroids"
            lines.append(
                f"  revision {pass_.version}: {counted(pass_.fragments, 'fragment')} ({pass_.upserts:,} upserts, "
                f"{pass_.deletes:,} deletes) -> {pass_.segment or 'no segment'}, {counted(pass_.rows, 'row')}, {how}, "
                f"{pass_.seconds:.1f} s"
            )
        if self.engine.name == "spark" or self.engine.fell_back:
            why = self.engine.reason.removesuffix(".")
            lines.append(paragraph(f"Engine: {self.engine.name} ({why}).", indent="  "))
        if self.blocked is not None:
            lines += [f"  blocked: {self.blocked.error}", f"           {self.blocked.error.remedy}"]
        lines += [paragraph(f"WARNING: {warning}", indent="  ", hanging="  ") for warning in self.warnings]
        return "\n".join(lines)


class _ReplacedError(Exception):
    """The manifest does not list the inputs of a pass any more: the pass is computed again."""


backlog = figures


def plan(table: Namespace, options: ZeppelinMergeOptions, context: RunContext | None = None) -> NamespaceMergeReport:
    """The fragments that would be compacted. Reads the manifest, and lists; the log only if ids are pending deletion.

    Raises:
        UnsupportedFeatureError: only a server may write the namespace.
        SegmentCorruptError: an object of the segment is missing or cut.
    """
    del context
    _check(table)
    report = NamespaceMergeReport(MergeDecision.DRY_RUN, table.revision, len(table.manifest.fragments))
    warning = metric_of(table, options.metric)[1]
    report.warnings += [] if warning is None else [warning]
    if _has_work(table.manifest, options):
        report.engine = _engine(table, options)
    left = contested(table)
    report.warnings += _warnings(table.manifest, left)
    blocked = _damage(table, report)
    if left.alone:
        report.fragments = 0
    elif blocked is not None:
        report.blocked = blocked
        report.fragments = table.manifest.fragment_ids.index(blocked.id)
    return report


def apply(table: Namespace, options: ZeppelinMergeOptions, context: RunContext | None = None) -> NamespaceMergeReport:
    """Compact all fragments that are listed now; fragments appended meanwhile are for the next run.

    Raises:
        BusyError: another compactor holds the lease, or, in a local folder, the lock of a swap.
        UnsupportedFeatureError: only a server may write the namespace.
        SegmentCorruptError: an object of the segment is missing or damaged; nothing was published.
        StorageError: the store failed.
        CommitConflictError: other writers replaced the manifest too often.
    """
    context, started = context or RunContext(), time.monotonic()
    _check(table)
    metric, warning = metric_of(table, options.metric)
    report = NamespaceMergeReport(MergeDecision.NOTHING_TO_MERGE, table.revision, 0)
    if warning is not None:
        report.warnings.append(warning)
        get_logger(__name__).warning("metric_unknown", table=table.location.uri, metric=metric)
    left = contested(table)
    report.warnings += _warnings(table.manifest, left)
    report.contested = left.alone
    report.blocked = _blocked(table)
    if report.blocked is not None:
        report.decision = MergeDecision.BLOCKED
    elif _has_work(table.manifest, options) and (options.retrain or not left.alone):
        probe(table)
        wanted = {*table.manifest.fragment_ids}
        try:
            with (
                _spark(table, options, context, report) as spark,
                swaps_wait(options.wait),
                held_lease(table, options.lease_ttl, options.wait) as lease,
            ):
                table = _Run(options, context, metric, lease, report, wanted, spark).run(table)
        except FencedError as error:
            get_logger(__name__).info("superseded", table=table.location.uri, why=str(error))
            report.decision = MergeDecision.SUPERSEDED
        report.version = table.revision
    if report.decision is MergeDecision.NOTHING_TO_MERGE:
        _damage(table, report)
    report.seconds = time.monotonic() - started
    return report


@contextmanager
def _spark(
    table: Namespace, options: ZeppelinMergeOptions, context: RunContext, report: NamespaceMergeReport
) -> Iterator[TaskRunner | None]:
    """The runner of tasks if the engine is Spark, which starts with the first stage; else None."""
    report.engine = _engine(table, options)
    if report.engine.name != "spark":
        yield None
        return
    from memwal_ops.core.spark.runner import TaskRunner  # noqa: PLC0415 - Spark only
    from memwal_ops.core.spark.session import check_environment  # noqa: PLC0415 - Spark only

    check_environment()
    with TaskRunner(options.master, context, "memwal-ops merge") as runner:
        yield runner


def _engine(table: Namespace, options: ZeppelinMergeOptions) -> EngineChoice:
    """The engine, by the vectors of segments and log: a pass reads and writes all of them."""
    manifest = table.manifest
    if len(manifest.segments) > 1 and options.engine != "local":
        return EngineChoice("local", "several segments, whose ids are compared in one process")
    rows = manifest.segment_rows + sum(ref.vectors for ref in manifest.fragments)
    return choose_engine(options, "a namespace with vectors", 4 * rows * (_known_dimensions(table) or 0))


def _check(table: Namespace) -> None:
    table.check_writable()
    if table.manifest.dialect == NATIVE and table.meta.metric is None:
        # Its full-text fields may be unknown, too: queries would find too little in the new segment.
        raise errors.TableCorruptError(
            f"{META} of {table.location.uri} is missing, or has no distance_metric.", remedy=remedies.META
        )
    if table.manifest.dialect == NATIVE and table.meta.full_text:
        raise errors.UnsupportedFeatureError(
            f"{table.location.uri} has full-text search on {', '.join(table.meta.full_text)}, with stemming that only "
            "its server implements: text queries would find nothing in a segment without it.",
            remedy="Let the Zeppelin server compact it, or migrate it.",
        )


def _damage(table: Namespace, report: NamespaceMergeReport) -> BlockedPart | None:
    """The first fragment that is missing or cut; a segment without an index gets a warning.

    Raises ``SegmentCorruptError``: an object with rows is missing or cut.
    """
    parts = damaged_parts(table)
    for part in parts:
        if part.kind == "segment" and part.has_rows:
            raise part.error
    report.warnings += [f"{part.error} {part.error.remedy}" for part in parts if not part.has_rows]
    return next((part for part in parts if part.kind == "fragment"), None)


def _blocked(table: Namespace) -> BlockedPart | None:
    """The first fragment, if it cannot be used: then nothing is written, not even a token."""
    for ref, fragment in read_fragments(table, table.manifest.fragments[:1], _known_dimensions(table)):
        if isinstance(fragment, errors.MemwalOpsError) and ref.id in table.newest().manifest.fragment_ids:
            return BlockedPart("fragment", ref.id, fragment)
    return None


def _known_dimensions(table: Namespace) -> int | None:
    with suppress(errors.SegmentCorruptError):  # the pass reports it, unless the log is blocked
        return dimensions_of(table)
    return None


def _has_work(manifest: Manifest, options: ZeppelinMergeOptions) -> bool:
    """Whether there may be work: a log, ids to hide permanently, or a requested training."""
    hidden = manifest.hidden.difference(manifest.pending_keys)
    return bool(manifest.fragments or hidden or (options.retrain and manifest.segments))


def _warnings(manifest: Manifest, left: Contested) -> Iterator[str]:
    if manifest.pending_keys:
        yield (
            f"pending_deletes has {counted(len(manifest.pending_keys), 'entry', 'entries')} like "
            f"{manifest.pending_keys[0]!r}, which look like object keys and not like vector ids: they are kept."
        )
    if left.ids:
        yield (
            f"{left}. No query returns them, and both are kept, as the document does not define which came later. "
            "Delete them by an append, or write them again, to decide."
        )


@dataclass
class _Run:
    options: ZeppelinMergeOptions
    context: RunContext
    metric: str
    lease: HeldLease
    report: NamespaceMergeReport
    wanted: set[str]
    spark: TaskRunner | None
    restarts: int = 0

    def run(self, table: Namespace) -> Namespace:
        """Run passes until all fragments that were listed at the start are compacted."""
        first = True
        while True:
            self.context.checkpoint()
            table = claim(table.newest(), self.lease)
            if not first and not any(ref.id in self.wanted for ref in table.manifest.fragments):
                return table
            if first and not _has_work(table.manifest, self.options):
                return table  # another compactor finished before this run acquired the lease
            try:
                table, more = self._pass(table)
            except (_ReplacedError, errors.SegmentCorruptError) as error:
                # Else another compactor replaced them meanwhile, and gc deleted them.
                live = {*table.newest().manifest.segment_ids}
                if isinstance(error, errors.SegmentCorruptError) and {*table.manifest.segment_ids} <= live:
                    raise
                self.restarts += 1
                self.context.figures["conflicts"] += 1
                if self.restarts > _MAX_RESTARTS:
                    raise FencedError(f"The inputs were replaced {self.restarts} times in a row: {error}") from error
                continue
            if not more:
                return table
            first = False

    def _pass(self, table: Namespace) -> tuple[Namespace, bool]:
        """Run and publish one pass; returns whether there may be another one."""
        started = time.monotonic()
        with self.context.phase("read"):
            inputs = read_inputs(table, self._within_budget(table), self.context)
        self.report.blocked = inputs.blocked
        if inputs.blocked is not None:
            if inputs.blocked.id not in table.newest().manifest.fragment_ids:
                raise _ReplacedError(f"{inputs.blocked.id} is not listed any more")
            self.report.decision = MergeDecision.BLOCKED
            if not inputs.fragments:
                return table, False
        if inputs.changes_nothing and not self.options.retrain:
            return self._clear_empty(table, inputs, started)
        compaction = Compaction(inputs, self.options, self.metric, self.context, self.spark)
        carried: list[FragmentRef] = []
        try:
            if inputs.contested.ids:
                kept = inputs.contested
                carried.append(put_fragment(table, Fragment("", kept.ids, kept.vectors, kept.attributes, ())))
            built = replace(compaction.build(), carried=tuple(carried))
            table = self._commit(inputs, built)
        except errors.StorageError:
            raise  # the manifest may list the segment: it is kept, and gc determines whether it is needed
        except BaseException:
            with suppress(errors.MemwalOpsError):
                table.discard([*compaction.built.paths, *(ref.key for ref in carried)])
            raise
        if built.segment is None:
            table.discard(built.paths)
        if table.manifest.dialect == NATIVE:
            with suppress(errors.MemwalOpsError):
                table.store.delete_many([staging_path(self.lease.token)])
        self._note(table, inputs, built, time.monotonic() - started)
        self.options = replace(self.options, retrain=False)  # once
        return table, inputs.blocked is None

    def _clear_empty(self, table: Namespace, inputs: Inputs, started: float) -> tuple[Namespace, bool]:
        """Remove fragments without vectors and deletes from the log; others have only contested rows, which stay."""
        empty = tuple(ref for ref in inputs.fragments if ref.is_empty)
        if empty:
            inputs = replace(inputs, fragments=empty, upserts=0)
            table = self._commit(inputs, None)
            kept = Built(next(reversed(table.manifest.segments), None), rows=table.manifest.segment_rows)
            self._note(table, inputs, kept, time.monotonic() - started)
            return table, inputs.blocked is None
        # Read more, if there are more.
        self.options = replace(self.options, max_bytes=2 * self.options.max_bytes)
        return table, inputs.blocked is None and len(inputs.fragments) < len(table.manifest.fragments)

    def _within_budget(self, table: Namespace) -> Sequence[FragmentRef]:
        """The first fragments of the log, up to the budget; at least one."""
        refs = table.manifest.fragments
        sizes = {meta.path: meta.size for meta in table.store.list("wal")} if refs else {}
        held = [*accumulate(sizes.get(ref.key, 0) for ref in refs)]
        return refs[: max(1, bisect_right(held, self.options.max_bytes))]

    def _commit(self, inputs: Inputs, built: Built | None) -> Namespace:
        """Publish, if this run's token is current and all inputs are listed; checked at every attempt (S4-042, S4-043).

        Without ``built``, the segments stay.

        Exactly the inputs are removed from the log: a fragment with a smaller ULID may have been appended meanwhile. In
        their place are those with the rows that stay in the log.
        """
        read = {ref.id for ref in inputs.fragments}
        old = set() if built is None else {*inputs.table.manifest.segment_ids}
        retired: list[str] = []
        if inputs.table.manifest.dialect == NATIVE:
            # Keys that the commit retires: those of the log, and of all objects that only the old segment needs.
            prefixes = sorted(inputs.table.manifest.prefixes) if old else []
            objects = [meta.path for prefix in prefixes for meta in inputs.table.store.list(prefix.rstrip("/"))]
            retired = [*(ref.key for ref in inputs.fragments), *objects]

        def change(table: Namespace) -> Manifest:
            live = table.manifest
            self.lease.check()
            if live.token != self.lease.token:
                raise FencedError(f"The manifest has the token {live.token}; ours is {self.lease.token}.")
            gone = (read - {*live.fragment_ids}) | (old - {*live.segment_ids})
            if gone:
                raise _ReplacedError(f"not listed any more: {', '.join(sorted(gone))}")
            if live.dialect == WIKI and set(live.pending) - inputs.hidden:
                # They would hide ids that the log wrote again, which are in the new segment.
                raise _ReplacedError("ids were added to pending_deletes")
            segments = [segment for segment in live.segments if segment.id not in old]
            if built is not None and built.segment is not None:
                segments.insert(0, built.segment)
            if live.dialect == NATIVE:
                pending = [*live.pending, *(key for key in retired if key not in live.pending)]
            else:
                later = {*live.fragment_ids} - read  # it may write hidden ids
                pending = [key for key in live.pending if later or key in inputs.kept_pending]
            carried = () if built is None else built.carried
            fragments = [*carried, *(ref for ref in live.fragments if ref.id not in read)]
            return live.changed(fragments=fragments, segments=segments, pending=pending)

        with self.context.phase("commit"):
            return retried(inputs.table.newest(), change, compaction=True)

    def _note(self, table: Namespace, inputs: Inputs, built: Built, seconds: float) -> None:
        deletes = sum(ref.deletes for ref in inputs.fragments)
        segment = None if built.segment is None else built.segment.id
        counts = (len(inputs.fragments), inputs.upserts, deletes)
        self.report.passes.append(PassReport(table.revision, *counts, segment, built.rows, built.retrained, seconds))
        self.report.fragments += len(inputs.fragments)
        if self.report.decision is not MergeDecision.BLOCKED:
            self.report.decision = MergeDecision.MERGED
        self.context.revisions.append(table.revision)
        self.context.figures["fragments_merged"] += len(inputs.fragments)
        self.context.figures["rows_merged"] += inputs.upserts
