"""Check an index folder: every block against checksums, map, rows and links; the view against the store. Reads only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from memwal_ops.core.answers import IndexAnswers
from memwal_ops.core.own_files import check_own_files
from memwal_ops.core.verification import Finding, Severity, VerifyReport
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann import deep
from memwal_ops.formats.lm_diskann.errors import RESTORE
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.locks import WriterLock
from memwal_ops.formats.lm_diskann.store import NAME, Store
from memwal_ops.formats.lm_diskann.verification import Verified, verify

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import VerifyOptions
    from memwal_ops.formats.lm_diskann.table import Table


GRAPH = "graph"
_FINDS_ITSELF = 0.9
_PAGE = "runbooks/wrong-answers.md"


def plan(table: Table, options: VerifyOptions, context: RunContext) -> VerifyReport:
    """Check everything; every block is read, with --deep or without.

    With --deep also reachability and recall, unless there are findings already.

    Raises:
        IndexBusyError: another writer or job has the index.
        TableCorruptError: the store cannot be opened, or is that of another index.
    """
    seed = options.seed_at(table.revision)
    answers: list[IndexAnswers] = []
    lock = WriterLock(table.location.uri, options.wait.total_seconds())
    try:
        found = verify(table.location.uri, table.parameters, options.max_findings, context)
        checked: dict[str, Any] = {"blocks": found.blocks}
        if options.index and set(options.index) != {GRAPH}:
            raise InvalidUsageError(f"The folder has no index {options.index[0]!r}; it has: {GRAPH}.")
        sound = not found.findings.counts
        if options.asks:
            answers = _answers(table, options, found, seed)
        if options.deep and sound:
            checked["recall"] = None if answers[0].recall is None else answers[0].recall.value
    finally:
        lock.release()
    found.findings.extend(check_own_files(table))
    return VerifyReport(table.revision, found.findings, checked, answers=answers, seed=seed if answers else None)


def _answers(table: Table, options: VerifyOptions, found: Verified, seed: int) -> list[IndexAnswers]:
    """Recall of searches, unless there are findings already; with --deep, add the findings of that."""
    base: dict[str, Any] = {"index": GRAPH, "type": "LM-DiskANN", "segments": 1}
    if found.findings.counts:
        return [IndexAnswers(**base, skipped="there are other findings, which come first")]
    size = found.blocks * table.parameters.layout.block_size
    if size > options.max_bytes and not options.deep:
        return [IndexAnswers(**base, skipped=f"its blocks have {size:,} bytes, above --max-bytes")]
    store = Store(
        os.path.join(table.location.uri, NAME), table.parameters.uuid, table.parameters.quantizer, read_only=True
    )
    try:
        with Index(table.location.uri, read_only=True) as index:
            if options.deep:
                found.add("epoch_beyond_end", deep.late_epochs(store))
                found.add("slot_lost", deep.lost_slots(store))
                unreachable = deep.unreachable(index.view, store)
                found.add("unreachable", (f"no path leads to node {one}" for one in unreachable))
            measured = deep.recall(index, store, options.samples, seed)
    finally:
        store.close()
    if measured is None:
        return [IndexAnswers(**base, skipped="it has no rows")]
    if measured.itself.high < _FINDS_ITSELF:
        found.findings.add(Finding(
            Severity.ERROR, "index_recall_low", f"the index {GRAPH!r}",
            f"A search by the vector of a row finds that row in {measured.itself.value:.0%} of {measured.queries:,} "
            "cases.", "Searches by it do not find the nearest rows.",
            f"memwal-ops repair URI --deep connects nodes that no path leads to. {RESTORE}", _PAGE,
        ))  # fmt: skip
    return [
        IndexAnswers(
            **base,
            settings=f"k {deep.K}",
            queries=measured.queries,
            recall=measured.share,
            found_itself=measured.itself,
            rows_compared=measured.rows,
            bytes_at_most=size,
        )
    ]


apply = plan
