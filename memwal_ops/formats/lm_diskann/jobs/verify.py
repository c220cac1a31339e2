"""Check an index folder: every block against checksums, map, rows and links; the view against the store. Reads only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from memwal_ops.core.answers import IndexAnswers
from memwal_ops.core.own_files import check_own_files
from memwal_ops.core.verification import (
    AnswersPlan,
    Finding,
    Findings,
    Severity,
    VerifyReport,
    finding_of,
    with_findings,
)
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann import deep
from memwal_ops.formats.lm_diskann.files import GRAPH as GRAPH_FILE
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.locks import WriterLock
from memwal_ops.formats.lm_diskann.quality import is_stale
from memwal_ops.formats.lm_diskann.store import Store
from memwal_ops.formats.lm_diskann.verification import Verified, verify

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import VerifyOptions
    from memwal_ops.formats.lm_diskann.table import Table


GRAPH = "graph"
_BASE: Mapping[str, Any] = {"index": GRAPH, "type": "LM-DiskANN", "segments": 1}
_FINDS_ITSELF = 0.9
_BY_BUILD = (
    "Of an index that follows no table, memwal-ops catchup URI --rebuild builds the graph anew; one that follows a "
    "table can be created again."
)
_BY_LONGER = f"Search with a larger L. {_BY_BUILD}"
_PAGE = "runbooks/wrong-answers.md"


def plan(table: Table, options: VerifyOptions, context: RunContext) -> VerifyReport | AnswersPlan:
    """Verify an index folder, or tell what asking its index costs."""
    if options.dry_run:
        _check_name(options)
        return _planned(table, options)
    return verified(table, options, context)


apply = plan


def verified(table: Table, options: VerifyOptions, context: RunContext) -> VerifyReport:
    """Check everything; every block is read, with --deep or without, but not with --answers-only.

    With --deep also reachability and recall, unless there are findings already.

    Raises:
        IndexBusyError: another writer or job has the index.
        TableCorruptError: the store cannot be opened, or is that of another index.
    """
    _check_name(options)
    seed = options.seed_at(table.revision)
    answers: list[IndexAnswers] = []
    found, checked = Verified(Findings(options.max_findings)), dict[str, Any]()
    if not options.checks_all:
        found.findings.extend(
            finding_of(one, one.reason, "the folder", "Readers or jobs stop.") for one in table.faults
        )
    if not options.checks_all and _size(table) > options.max_bytes:  # without the lock, for which others wait
        return VerifyReport(table.revision, found.findings, checked, answers=[_above(table)], seed=seed)
    lock = WriterLock(table.location.uri, options.wait.total_seconds())
    try:
        if options.checks_all:
            found = verify(table.location.uri, table.parameters, options.max_findings, context)
            checked = {"blocks": found.blocks}
        sound = not found.findings.counts
        if options.asks:
            answers = _answers(table, options, found, seed)
        if options.deep and sound:
            checked["recall"] = None if answers[0].recall is None else answers[0].recall.value
    finally:
        lock.release()
    if options.checks_all:
        found.findings.extend(check_own_files(table))
    return VerifyReport(table.revision, found.findings, checked, answers=answers, seed=seed if options.asks else None)


def _check_name(options: VerifyOptions) -> None:
    if options.index and set(options.index) != {GRAPH}:
        raise InvalidUsageError(f"The folder has no index {options.index[0]!r}; it has: {GRAPH}.")


def _size(table: Table) -> int:
    """Bytes of all blocks."""
    try:
        return os.path.getsize(os.path.join(table.location.uri, GRAPH_FILE))
    except FileNotFoundError:
        return 0


def _above(table: Table) -> IndexAnswers:
    return IndexAnswers(**_BASE, skipped=f"its blocks have {_size(table):,} bytes, above --max-bytes")


def _planned(table: Table, options: VerifyOptions) -> AnswersPlan:
    size = _size(table)
    one = IndexAnswers(**_BASE, queries=options.samples, bytes_at_most=size)
    return AnswersPlan(table.revision, [one if size <= options.max_bytes else _above(table)], options.max_bytes)


def _is_low(measured: deep.Recall, least: float) -> bool:
    return measured.share.high < least or measured.itself.high < _FINDS_ITSELF


def _low(measured: deep.Recall, least: float, *, stale: bool) -> Iterator[Finding]:
    """The finding about recall below the objective: a warning if rows find themselves and the codebook fits them."""
    if not _is_low(measured, least):
        return
    why = f"Searches find {measured.share.value:.1%} of the nearest {deep.K} rows of {measured.queries:,} rows"
    lost = measured.itself.high < _FINDS_ITSELF
    if lost:
        why += f", and {measured.itself.value:.0%} of these rows themselves"
    remedy = _BY_LONGER
    if stale:
        why += "; the codebook was trained on other rows than these"
        remedy = "memwal-ops catchup URI builds the graph anew, with a codebook trained on the rows of now."
    elif lost:
        remedy = f"memwal-ops repair URI --deep --apply connects nodes that no path leads to. {_BY_BUILD}"
    yield Finding(
        Severity.ERROR if stale or lost else Severity.WARNING, "index_recall_low", f"the index {GRAPH!r}", f"{why}.",
        "Searches by it do not find the nearest rows.", remedy, _PAGE,
    )  # fmt: skip


def _answers(table: Table, options: VerifyOptions, found: Verified, seed: int) -> list[IndexAnswers]:
    """Recall of searches, unless there are findings already; with --deep, add the findings of that."""
    if found.findings.counts:
        return [IndexAnswers(**_BASE, skipped="there are other findings, which come first")]
    size = _size(table)
    if size > options.max_bytes and not options.deep:
        return [_above(table)]
    store = Store(table.location.uri, table.parameters, read_only=True)
    try:
        with Index(table.location.uri, read_only=True) as index:
            if options.deep:
                found.add("epoch_beyond_end", deep.late_epochs(store))
                found.add("slot_lost", deep.lost_slots(store))
                unreachable = deep.unreachable(index.view, store)
                found.add("unreachable", (f"no path leads to node {one}" for one in unreachable))
            measured = deep.recall(index, store, options.samples, seed)
            stale = measured is not None and _is_low(measured, options.min_recall) and is_stale(index, store)
    finally:
        store.close()
    if measured is None:
        return [IndexAnswers(**_BASE, skipped="it has no rows")]
    wrong = [*_low(measured, options.min_recall, stale=stale)]
    found.findings.extend(wrong)
    answers = IndexAnswers(
        **_BASE,
        settings=f"k {deep.K}",
        queries=measured.queries,
        recall=measured.share,
        found_itself=measured.itself,
        rows_compared=measured.rows,
        bytes_at_most=size,
    )
    return [with_findings(answers, wrong)]
