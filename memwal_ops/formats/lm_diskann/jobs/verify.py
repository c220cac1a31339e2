"""Check an index folder: every block against checksums, map, rows and links; the view against the store. Reads only.

Its repair publishes the view, maps rows, links nodes, gives up epochs; else it lists the choices. The view is made from
the store alone, and replaced atomically under the next number, so the old view need not be kept. It is not made from a
store that has findings itself: then the old view may be the better copy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.core.answers import IndexAnswers, Interval, share_by_query, wilson
from memwal_ops.core.context import RunContext
from memwal_ops.core.repair import Fix, FixAttempt, Keep, RepairJob, UnsafeError
from memwal_ops.core.verification import (
    AnswersPlan,
    Inconsistencies,
    Inconsistency,
    Severity,
    VerifyReport,
    check_own_files,
    finding_of,
    with_findings,
)
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann import graph, merging, publishing, verification
from memwal_ops.formats.lm_diskann.errors import IndexCorruptError
from memwal_ops.formats.lm_diskann.files import GRAPH as GRAPH_FILE, WriterLock, needed_from
from memwal_ops.formats.lm_diskann.graph import around
from memwal_ops.formats.lm_diskann.jobs.catchup import ROUNDING, ZERO, K, is_stale
from memwal_ops.formats.lm_diskann.kernels.healing import ROOT, reach
from memwal_ops.formats.lm_diskann.kernels.searching import scan
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.specs import IndexVerifyOptions
from memwal_ops.formats.lm_diskann.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from memwal_ops.core.options import VerificationOptions
    from memwal_ops.formats.lm_diskann.table import Table
    from memwal_ops.formats.lm_diskann.view import View


def unreachable(view: View, store: Store) -> NDArray[np.int64]:
    """Live nodes to which no path from an entry point leads; none if there is no graph.

    Raises ``TableCorruptError``: a block cannot be read.
    """
    entries = view.entries(view.epoch)
    if not len(entries) or not view.state.codebook_id:
        return np.zeros(0, np.int64)
    count = view.state.next_node_id
    parents, queue = np.empty(count, np.int64), np.empty(count, np.int64)
    if reach(view.source, view.parameters.layout, entries, view.epoch, parents, queue) < 0:
        raise view.fail()
    [live] = store.columns("SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id")
    lost: NDArray[np.int64] = live[parents[live.astype(np.int64)] < ROOT].astype(np.int64)
    return lost


def lost_slots(store: Store) -> Iterator[str]:
    """Slots that are neither mapped nor free: they would never be used again."""
    state = store.state
    taken = np.zeros(state.slot_count, bool)
    for table in ("lmd_slots", "lmd_free_nodes"):
        [slots] = store.columns(f"SELECT slot FROM {table} WHERE slot < {state.slot_count}")
        taken[slots.astype(np.int64)] = True
    return (f"slot {slot} is neither mapped nor free" for slot in np.flatnonzero(~taken))


def late_epochs(store: Store) -> Iterator[str]:
    """Versions that are newer than the index."""
    epoch = store.state.epoch
    nodes, epochs = store.columns(
        f"SELECT node_id, from_epoch FROM lmd_slots WHERE from_epoch > {epoch} UNION ALL "
        f"SELECT node_id, commit_epoch FROM lmd_delta_blocks WHERE commit_epoch > {epoch} ORDER BY 1"
    )
    return (
        f"node {node} has a version of epoch {version}; the index is at {epoch}"
        for node, version in zip(nodes.tolist(), epochs.tolist(), strict=True)
    )


@dataclass(frozen=True, slots=True)
class Recall:
    """What searches for a sample of rows find: of the nearest rows, and of each row itself; and how many were asked."""

    share: Interval
    itself: Interval
    queries: int
    rows: int


def recall(index: Index, store: Store, samples: int = 100, seed: int = 0) -> Recall | None:
    """The share of the nearest rows that searches find, for a sample of rows; None: the index is empty.

    A row that is found counts if it is not farther than the k-th nearest: of equally far ones, each is right.
    """
    view = index.view
    [live] = store.columns("SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id")
    if not len(live):
        return None
    chosen = np.sort(np.random.default_rng(seed).choice(live.astype(np.int64), min(samples, len(live)), replace=False))
    queries = around(view, store, chosen, view.epoch).vectors
    k = min(K, len(live))
    nearest, far = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    everything = np.arange(view.state.next_node_id, dtype=np.int64)
    done = scan(
        view.source, index.parameters.layout, everything, queries, view.epoch, view.dead, view.dead_epochs,
        nearest, far,
    )  # fmt: skip
    if done < 0:
        raise view.fail()
    _, distances = index.search(queries, k=k, as_of=view.epoch)
    limits = index.given(far)
    hits = (distances <= limits[:, -1:] * ROUNDING).sum(axis=1)
    share = share_by_query(hits.tolist(), [k] * len(queries), seed)
    itself = wilson(int((distances[:, 0] <= limits[:, 0] * ROUNDING + ZERO).sum()), len(queries))
    assert share is not None  # noqa: S101 - there are queries
    assert itself is not None  # noqa: S101 - see above
    return Recall(share, itself, len(queries), len(live))


GRAPH = "graph"
_BASE: Mapping[str, Any] = {"index": GRAPH, "type": "LM-DiskANN", "segments": 1}
_FINDS_ITSELF = 0.9
_BY_LONGER = (
    "Search with a larger L. Of an index that follows no table, memwal-ops catchup URI --rebuild builds the graph "
    "anew; one that follows a table can be created again."
)
_PAGE = "runbooks/wrong-answers.md"


def plan(table: Table, options: IndexVerifyOptions, context: RunContext) -> VerifyReport | AnswersPlan:
    """Verify an index folder, or tell what asking its index costs."""
    if not options.dry_run:
        return verified(table, options, context)
    _check_name(options)
    size = _size(table)
    answers = IndexAnswers(**_BASE, queries=options.samples, bytes_at_most=size)
    return AnswersPlan(table.revision, [answers if size <= options.max_bytes else _above(table)], options.max_bytes)


apply = plan


def verified(table: Table, options: IndexVerifyOptions, context: RunContext) -> VerifyReport:
    """Check everything; every block is read, with --deep or without, but not with --answers-only.

    With --deep also reachability and recall, unless there are findings already.

    Raises:
        IndexBusyError: another writer or job has the index.
        TableCorruptError: the store cannot be opened, or is that of another index.
    """
    _check_name(options)
    seed = options.seed_at(table.revision)
    answers: list[IndexAnswers] = []
    checks, checked = verification.Verified(Inconsistencies(options.max_findings)), dict[str, Any]()
    if not options.checks_all:
        checks.findings.extend(
            finding_of(fault, fault.reason, "the folder", "Readers or jobs stop.") for fault in table.faults
        )
    if not options.checks_all and _size(table) > options.max_bytes:  # without the lock, for which others wait
        return VerifyReport(table.revision, checks.findings, checked, answers=[_above(table)], seed=seed)
    lock = WriterLock(table.location.uri, options.wait.total_seconds())
    try:
        if options.checks_all:
            checks = verification.verify(table.location.uri, table.parameters, options.max_findings, context)
            checked = {"blocks": checks.blocks}
        sound = not checks.findings.counts
        if options.asks:
            answers = _answers(table, options, checks, seed)
        if options.deep and sound:
            checked["recall"] = None if answers[0].recall is None else answers[0].recall.value
    finally:
        lock.release()
    if options.checks_all:
        checks.findings.extend(check_own_files(table))
    return VerifyReport(table.revision, checks.findings, checked, answers=answers, seed=seed if options.asks else None)


def _check_name(options: IndexVerifyOptions) -> None:
    if options.index and set(options.index) != {GRAPH}:
        raise InvalidUsageError(f"The folder has no index {options.index[0]!r}; it has: {GRAPH}.")


def _size(table: Table) -> int:
    try:
        return os.path.getsize(os.path.join(table.location.uri, GRAPH_FILE))
    except FileNotFoundError:
        return 0


def _above(table: Table) -> IndexAnswers:
    return IndexAnswers(**_BASE, skipped=f"its blocks have {_size(table):,} bytes, above --max-bytes")


def _is_low(measured: Recall, least: float) -> bool:
    return measured.share.high < least or measured.itself.high < _FINDS_ITSELF


def _low(measured: Recall, least: float, *, stale: bool) -> Iterator[Inconsistency]:
    """The finding about recall below the objective: a warning if rows find themselves and the codebook fits them."""
    if not _is_low(measured, least):
        return
    why = f"Searches find {measured.share.value:.1%} of the nearest {K} rows of {measured.queries:,} rows"
    lost = measured.itself.high < _FINDS_ITSELF
    if lost:
        why += f", and {measured.itself.value:.0%} of these rows themselves"
    remedy = _BY_LONGER
    if stale:
        why += "; the codebook was trained on other rows than these"
        remedy = "memwal-ops catchup URI builds the graph anew, with a codebook trained on the rows of now."
    yield Inconsistency(
        Severity.ERROR if stale or lost else Severity.WARNING, "index_recall_low", f"the index {GRAPH!r}", f"{why}.",
        "Searches by it do not find the nearest rows.", remedy, _PAGE,
    )  # fmt: skip


def _answers(table: Table, options: IndexVerifyOptions, checks: verification.Verified, seed: int) -> list[IndexAnswers]:
    """Recall of searches, unless there are findings already; with --deep, add the findings of that."""
    if checks.findings.counts:
        return [IndexAnswers(**_BASE, skipped="there are other findings, which come first")]
    size = _size(table)
    if size > options.max_bytes and not options.deep:
        return [_above(table)]
    store = Store(table.location.uri, table.parameters, read_only=True)
    try:
        with Index(table.location.uri, read_only=True) as index:
            if options.deep:
                checks.add("epoch_beyond_end", late_epochs(store))
                checks.add("slot_lost", lost_slots(store))
                lost = unreachable(index.view, store)
                checks.add("unreachable", (f"no path leads to node {node}" for node in lost))
            measured = recall(index, store, options.samples, seed)
            stale = measured is not None and _is_low(measured, options.min_recall) and is_stale(index, store)
    finally:
        store.close()
    if measured is None:
        return [IndexAnswers(**_BASE, skipped="it has no rows")]
    wrong = [*_low(measured, options.min_recall, stale=stale)]
    checks.findings.extend(wrong)
    answers = IndexAnswers(
        **_BASE, settings=f"k {K}", queries=measured.queries, recall=measured.share, found_itself=measured.itself,
        rows_compared=measured.rows, bytes_at_most=size,
    )  # fmt: skip
    return [with_findings(answers, wrong)]


_DAMAGED_STORE = "store"

_NEEDED = "A reader or a hold needs epochs from {} on; repair again when it has ended."


def _verified_for_repair(table: Table, options: VerificationOptions, context: RunContext) -> VerifyReport:
    """The findings; those about the view record whether the store has any."""
    report = verified(table, IndexVerifyOptions(deep=options.deep, max_findings=options.max_findings), context)
    if (
        report.findings.counts.keys()
        - verification.OF_VIEW
        - {verification.FOLLOW_DAMAGED, verification.OLD_VERSION_DAMAGED}
    ):
        report.findings.kept = [
            replace(finding, about=_DAMAGED_STORE) if finding.check in verification.OF_VIEW else finding
            for finding in report.findings.kept
        ]
    return report


def _fix_of(table: Table, finding: Inconsistency) -> Fix[Table] | None:
    if finding.check == "unreachable":
        return Fix("graph:", "link unreachable nodes again", _link)
    if finding.check == verification.OLD_VERSION_DAMAGED:
        needed = needed_from(table.location.uri, table.revision)
        if needed <= table.state.retained_from:
            raise UnsafeError(_NEEDED.format(needed))
        return Fix("epochs:", f"give up the epochs below {needed}", _give_up)
    if finding.check in verification.CHECKS:
        if finding.about:
            raise UnsafeError(finding.about)
        return Fix("rows:", "map the rows again by the row ids in their blocks", _remap)
    if finding.check not in verification.OF_VIEW:
        return None
    if finding.about == _DAMAGED_STORE:
        raise UnsafeError("The store has findings itself: a view made from it could lose rows that this one has.")
    return Fix("view:", "publish the view again from the store", _publish)


def _publish(table: Table, keep: Keep) -> FixAttempt:
    del keep  # the view is made from the store, which has all of it
    with table.open(IndexVerifyOptions().wait.total_seconds()) as index:
        if not index.republished:  # opening it publishes a view that is behind, or cannot be read
            publishing.publish(table.location.uri, table.parameters, index.writable(), table.durable)
    return FixAttempt.DONE


def _remap(table: Table, keep: Keep) -> FixAttempt:
    del keep  # the replaced entries contradict the blocks, which are kept
    with table.open(IndexVerifyOptions().wait.total_seconds()) as index:
        store, folder = index.writable(), table.location.uri
        blocks = verification.Check(
            folder, table.parameters, store, verification.Verified(Inconsistencies(1)), RunContext()
        ).read_blocks()
        if (why := verification.refusal(store, blocks)) is not None:
            raise UnsafeError(why)
        changes = verification.changes(store, blocks)
        if changes is None:
            return FixAttempt.GONE
        table.durable("commit to the store", lambda: store.commit(changes))
        publishing.publish(folder, table.parameters, store, table.durable)
    return FixAttempt.DONE


def _give_up(table: Table, keep: Keep) -> FixAttempt:
    del keep  # only epochs that no reader and no hold needs are given up
    with table.open(IndexVerifyOptions().wait.total_seconds()) as index:
        store, folder = index.writable(), table.location.uri
        needed = needed_from(folder, store.state.epoch)
        if needed > store.state.retained_from:
            merging.give_up(index, needed, table.durable)
            merging.finish(index, table.durable)  # a view without the versions that are given up
        checks = verification.Verified(Inconsistencies(1))
        verification.Check(folder, table.parameters, store, checks, RunContext()).read_blocks()
        if verification.OLD_VERSION_DAMAGED in checks.findings.counts:
            raise UnsafeError(_NEEDED.format(needed))
    return FixAttempt.DONE


def _link(table: Table, keep: Keep) -> FixAttempt:
    del keep  # links are added
    with table.open(IndexVerifyOptions().wait.total_seconds(), changes=True) as index:
        nodes = unreachable(index.view, index.writable())
        if not len(nodes):
            return FixAttempt.GONE
        with index.staged() as staged:
            graph.relink(staged, nodes)
            # With few links per node, linking one may take the last path from another one.
            left = graph.link_unreached(staged)
            staged.rewired = nodes
    if left:
        raise IndexCorruptError(
            f"{left:,} rows remain without a path: no node has a link left for them.",
            remedy="Run memwal-ops catchup URI --rebuild: it builds the graph anew.",
        )
    return FixAttempt.DONE


REPAIR = RepairJob(_verified_for_repair, _fix_of)
