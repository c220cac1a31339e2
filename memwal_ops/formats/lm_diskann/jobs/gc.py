"""Collect the garbage of an index folder: deleted nodes, the end of the graph, replaced views, files of ended readers.

| what | proof |
|---|---|
| deleted node | no epoch below that of its healing is retained; no reachable node links to it; it is no entry point and has no unmerged version. Removed by one commit: its slot goes to the free list, and is reused once no reader is at an epoch below that commit |
| end of the graph | its slots were freed at an epoch that is not retained any more, or a killed run wrote there without a commit |
| file of a view | `CURRENT` names another view, and only rises; a reader with the file open keeps it, and one that does not find it reads `CURRENT` again; nothing is published meanwhile: the run has the writer lock |
| file of a reader | its kernel lock is released, which happens when its process ends |
| anything else | kept, reported as unrecognized |
"""  # noqa: E501 - a table

from __future__ import annotations

import enum
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.core import collector
from memwal_ops.core.anchors import Anchor, CommitGuard, anchor_at
from memwal_ops.core.candidates import (
    UNKNOWN,
    Candidate,
    CollectionReport,
    Gate,
    GcDecision,
    KindText,
    Verdict,
    unrecognized,
)
from memwal_ops.core.explanation import Explanation, explain
from memwal_ops.errors import TableReplacedError
from memwal_ops.formats.lm_diskann import files, merging, publishing
from memwal_ops.formats.lm_diskann.graph import around
from memwal_ops.formats.lm_diskann.kernels.healing import linked
from memwal_ops.formats.lm_diskann.publishing import locked_store, stale_files
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import LOG, NAME, Store, Store as Database
from memwal_ops.formats.lm_diskann.view import View, read_current
from memwal_ops.formats.lm_diskann.wire import U8, Changes
from memwal_ops.storage.api import DeleteReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.specs import IndexGcOptions, IndexWhyOptions
    from memwal_ops.formats.lm_diskann.table import Table


@dataclass(frozen=True)
class Tombstone:
    """A deleted node, with the properties that determine whether it is deletable.

    Attributes:
        healed: the epoch from which on no path leads to it; None: it is not healed yet.
        unmerged: whether the delta table has a version of it.
        linked: whether a node that searches can reach links to it.
        entry: whether a retained epoch begins its searches there.
    """

    node: int
    healed: int | None
    unmerged: bool
    linked: bool
    entry: bool


def tombstones(store: Store, after: int, most: int) -> NDArray[np.int64]:
    """The next deleted nodes above ``after``, ascending."""
    [nodes] = store.columns(
        f"SELECT DISTINCT node_id FROM lmd_sweep_list WHERE node_id BETWEEN {after + 1} AND "
        f"{store.state.next_node_id - 1} ORDER BY node_id LIMIT {most}"
    )
    return nodes.astype(np.int64)


def read_tombstones(view: View, store: Store, nodes: NDArray[np.int64]) -> list[Tombstone]:
    """Deleted nodes (ascending), from the store and the blocks of nodes that linked to them."""
    ids = nodes.astype(U8)
    wanted = "node_id IN (SELECT id FROM wanted)"
    swept, epochs = store.columns(
        f"SELECT node_id, max(since_epoch) FROM lmd_sweep_list WHERE reason = 'healed' AND {wanted} GROUP BY 1",
        wanted=ids,
    )
    healed = dict(zip(swept.tolist(), epochs.tolist(), strict=True))
    [unmerged] = store.columns(f"SELECT DISTINCT node_id FROM lmd_delta_blocks WHERE {wanted}", wanted=ids)
    [entries] = store.columns(
        f"SELECT DISTINCT node_id FROM lmd_entry_points WHERE {wanted} AND (removed_epoch IS NULL OR removed_epoch > "
        "(SELECT retained_from FROM lmd_metadata))", wanted=ids,
    )  # fmt: skip
    referrers = around(view, store, nodes, view.epoch).referrers.astype(U8)
    [unreachable] = store.columns(
        "SELECT node_id FROM lmd_sweep_list WHERE reason = 'healed' AND node_id IN (SELECT id FROM wanted)",
        wanted=referrers,
    )
    marks = np.zeros(len(nodes), np.uint8)
    reachable = np.setdiff1d(referrers, unreachable).astype(np.int64)
    if linked(view.source, view.parameters.layout, reachable, nodes, view.epoch, marks) < 0:
        raise view.fail()
    first, kept = {*unmerged.tolist()}, {*entries.tolist()}
    return [
        Tombstone(node, healed.get(node), node in first, bool(mark), node in kept)
        for node, mark in zip(nodes.tolist(), marks.tolist(), strict=True)
    ]


def reclaim(index: Index, nodes: NDArray[np.int64], step: files.Step) -> None:
    """Remove deleted nodes that were proven to be needed by nothing: one commit, and its frame."""
    store = index.writable()
    ids = nodes.astype(U8)
    epoch = store.state.epoch + 1
    retired = store.columns(
        f"SELECT slot, node_id, from_epoch, {epoch}::UBIGINT FROM lmd_slots WHERE node_id IN (SELECT id FROM wanted)",
        wanted=ids,
    )
    state = replace(store.state, epoch=epoch, healed=store.state.healed - len(nodes))
    merging.commit(index, Changes(state, retired=np.stack(retired, axis=1).astype(U8), reclaimed=ids), step)


def tail(store: Store, folder: str, size: int, horizon: int) -> tuple[int, int]:
    """The number of slots to which the graph can be truncated, and the bytes beyond them."""
    descending = store.free_slots(horizon)[::-1]
    count = store.state.slot_count
    is_tail = descending == count - 1 - np.arange(len(descending))
    kept = count - (len(descending) if is_tail.all() else int(np.argmin(is_tail)))
    return kept, max(0, os.path.getsize(os.path.join(folder, files.GRAPH)) - kept * size)


def trim(index: Index, horizon: int, step: files.Step) -> int:
    """Truncate free slots, and blocks of killed runs, at the end of the graph. Returns the bytes.

    The slots are removed from the store first: if the run is killed in between, the file is longer than the store
    needs, as after a killed merge.
    """
    store, size = index.writable(), index.parameters.layout.block_size
    kept, beyond = tail(store, index.folder, size, horizon)
    if kept < store.state.slot_count:
        state = replace(store.state, epoch=store.state.epoch + 1, slot_count=kept)
        merging.commit(index, Changes(state, taken=np.arange(kept, store.state.slot_count).astype(U8)), step)
    if beyond:
        # Otherwise, after a crash of the machine, an older view could refer to truncated blocks.
        publishing.settle(index.view, step)
        with files.open_file(os.path.join(index.folder, files.GRAPH)) as graph:

            def cut() -> None:
                os.ftruncate(graph, kept * size)
                files.sync(graph)

            step("trim the graph", cut)
    return beyond


_KNOWN = {FOLLOW, files.METADATA, files.GRAPH, NAME, LOG, files.WRITER, files.CURRENT}
_OTHERS = re.compile(rf"(_mem_wal_ops|diskann_store\.duckdb\.tmp|{files.READERS})/.*|view/[0-9]{{16}}\.(base|log)")


class IndexKind(enum.StrEnum):
    """The kinds of candidates."""

    NODE = "node"
    TAIL = "tail"
    VIEW = "view"
    READER = "reader"


class IndexGcReport(CollectionReport[Candidate]):
    """The report of gc, as in every format."""

    kinds = {  # noqa: RUF012 - as in the base class
        IndexKind.NODE: KindText("deleted nodes", ("node", "nodes")),
        IndexKind.TAIL: KindText("end of the graph"),
        IndexKind.VIEW: KindText("files of replaced views", ("file", "files")),
        IndexKind.READER: KindText("files of ended readers", ("file", "files")),
        UNKNOWN: KindText("unknown"),
    }

    @property
    def decision(self) -> GcDecision:
        """The decision; deleted nodes and a truncation count as well, although they are no objects."""
        decision = super().decision
        more = any(self.counts[kind][Verdict.DELETE] for kind in (IndexKind.NODE, IndexKind.TAIL))
        return GcDecision.DELETED if self.applied and more and decision is GcDecision.NOTHING_TO_DELETE else decision


class _Part(collector.Collector[Candidate]):
    anchors: Sequence[Anchor] = ()

    def __init__(self, table: Table, anchors: Sequence[Anchor] = ()) -> None:
        self.table, self.store, self.anchors = table, table.store, anchors


class _InStore(_Part):
    """Candidates that a transaction deletes. Args: ``store`` is open; ``index`` deletes, and is None for a plan."""

    def __init__(
        self, table: Table, store: Database, index: Index | None = None, anchors: Sequence[Anchor] = ()
    ) -> None:
        super().__init__(table, anchors)
        self._database, self._index = store, index

    def _writable(self, guard: CommitGuard) -> Index:
        guard.check()
        for anchor in self.anchors:
            anchor.check(self.store)
        assert self._index is not None  # noqa: S101 - a plan deletes nothing
        return self._index


class Nodes(_InStore):
    """Deleted nodes: candidates named ``nodes/ID``. Args: ``view`` is at the epoch of the store."""

    def __init__(
        self, table: Table, store: Database, view: View, index: Index | None = None, anchors: Sequence[Anchor] = ()
    ) -> None:
        super().__init__(table, store, index, anchors)
        self._view = view

    def stages(self) -> Iterator[collector.Stage[Candidate]]:
        """Ascending by node."""
        yield collector.Stage(self._all())

    def revalidate(self, batch: Sequence[Candidate]) -> Iterable[Candidate]:
        """Check their gates again."""
        return self._candidates(np.array(sorted(_node(candidate.path) for candidate in batch), np.int64))

    def delete(self, paths: Sequence[str], guard: CommitGuard) -> DeleteReport:
        """One commit."""
        index = self._writable(guard)
        reclaim(index, np.array(sorted(map(_node, paths)), np.int64), self.table.durable)
        return DeleteReport(0, {})  # not an object

    def _all(self) -> Iterator[Candidate]:
        after = -1
        while len(nodes := tombstones(self._database, after, collector.BATCH_OBJECTS)):
            after = int(nodes[-1])
            yield from self._candidates(nodes)

    def _candidates(self, nodes: NDArray[np.int64]) -> Iterator[Candidate]:
        needed = files.needed_from(self.table.location.uri, self._database.state.epoch)
        for tombstone in read_tombstones(self._view, self._database, nodes):
            yield Candidate(IndexKind.NODE, f"nodes/{tombstone.node}", 0, 1, tuple(_gates(tombstone, needed)))


def _node(path: str) -> int:
    return int(path.partition("/")[2])


def _gates(tombstone: Tombstone, needed: int) -> Iterator[Gate]:
    if tombstone.healed is None:
        yield Gate(met=False, text="searches pass through it until catchup has healed its neighbours")
        return
    text = f"its neighbours were healed at epoch {tombstone.healed}; readers and holds need epochs from {needed} on"
    yield Gate(tombstone.healed <= needed, text)
    for holds, why, why_not in (
        (tombstone.linked, "a node links to it: run memwal-ops verify", "no node that searches can reach links to it"),
        (tombstone.entry, "it is an entry point of a retained epoch", "it is an entry point of no retained epoch"),
        (tombstone.unmerged, "a version of it is not merged", "all its versions are merged"),
    ):
        yield Gate(not holds, why if holds else why_not)


class Tail(_InStore):
    """The end of the graph, as one candidate."""

    def drain(self) -> int:
        """Stop retaining the epochs before the nodes were reclaimed: their slots may be at the end."""
        if self._index is not None:
            merging.raise_horizon(self._index, self.table.durable)
        return 0

    def stages(self) -> Iterator[collector.Stage[Candidate]]:
        """One candidate, or none."""
        yield collector.Stage(self.revalidate(()))

    def revalidate(self, batch: Sequence[Candidate]) -> Iterable[Candidate]:
        """Measure it again."""
        del batch
        size = self.table.parameters.layout.block_size
        kept, beyond = tail(self._database, self.table.location.uri, size, self._horizon())
        if beyond:
            gate = Gate(met=True, text=f"{beyond:,} bytes: no slot from {kept} on is needed by any reader")
            yield Candidate(IndexKind.TAIL, f"{files.GRAPH}/from-slot-{kept}", 0, 1, (gate,))

    def delete(self, paths: Sequence[str], guard: CommitGuard) -> DeleteReport:
        """Commit, then truncate the file."""
        del paths  # there is one
        trim(self._writable(guard), self._horizon(), self.table.durable)
        return DeleteReport(0, {})  # not an object

    def _horizon(self) -> int:
        state = self._database.state
        needed = files.needed_from(self.table.location.uri, state.epoch)
        # A run first raises the lowest retained epoch; a plan does not.
        return needed if self._index is None else min(state.retained_from, needed)


class Files(_Part):
    """The files of the folder that are not in use."""

    def stages(self) -> Iterator[collector.Stage[Candidate]]:
        """In the order of their names."""
        yield collector.Stage(self._unused())

    def revalidate(self, batch: Sequence[Candidate]) -> Iterable[Candidate]:
        """Check the gates of the batch again, by the current ``CURRENT`` and locks."""
        wanted = {candidate.path for candidate in batch}
        return [candidate for candidate in self._unused() if candidate.path in wanted]

    def _unused(self) -> list[Candidate]:
        folder, parameters = self.table.location.uri, self.table.parameters
        _check_same(self.table)
        number = read_current(folder, parameters).number
        stale, dead = {*stale_files(folder, parameters)}, {*files.dead_readers(folder)}
        candidates = []
        for meta in self.store.list(""):
            if meta.path in stale:
                gate = Gate(met=True, text=f"{files.CURRENT} names view {number}")
                candidates.append(Candidate(IndexKind.VIEW, meta.path, meta.size, 1, (gate,)))
            elif meta.path in dead:
                gate = Gate(met=True, text="its reader's lock is released: the process has ended")
                candidates.append(Candidate(IndexKind.READER, meta.path, meta.size, 1, (gate,)))
            elif meta.path not in _KNOWN and not _OTHERS.fullmatch(meta.path):
                candidates.append(unrecognized(meta.path, meta.size, "its name is not one of the format's"))
        return sorted(candidates, key=lambda candidate: candidate.path)


def backlog(table: Table) -> Mapping[str, float]:
    """The backlog metric, from the published view."""
    return {"healed_nodes": table.state.healed}


def plan(table: Table, options: IndexGcOptions, context: RunContext) -> IndexGcReport:
    """The candidates. Reads only. Raises ``IndexBusyError``: another writer or job has the index."""
    with opened(table, options) as collectors:
        return collector.plan(collectors, IndexGcReport(applied=False), options, context)


@contextmanager
def opened(table: Table, options: IndexGcOptions) -> Iterator[list[collector.Collector[Candidate]]]:
    """The collectors of a plan. Raises as :func:`plan`."""
    table.check_files()
    folder, parameters = table.location.uri, table.parameters
    with locked_store(folder, parameters, options.wait.total_seconds()) as store:
        view = View(folder, parameters)
        try:
            # A view that is behind is published by the next run that applies changes, not by a plan.
            current = view.state == store.state
            nodes = [Nodes(table, store, view), Tail(table, store)] if current else []
            yield [*nodes, Files(table)]
        finally:
            view.close()


def apply(table: Table, options: IndexGcOptions, context: RunContext) -> IndexGcReport:
    """Delete the candidates. Safe to kill, to run twice, and concurrently with readers.

    Raises ``IndexBusyError``: another writer or job has the index.
    """
    _check_same(table)
    with table.open(options.wait.total_seconds()) as index:
        merging.raise_horizon(index, table.durable)
        anchors = (anchor_at(table.store, files.METADATA, "The index"),)
        store = index.writable()
        collectors: list[collector.Collector[Candidate]] = [
            Nodes(table, store, index.view, index, anchors), Tail(table, store, index, anchors), Files(table, anchors)
        ]  # fmt: skip
        return collector.collect(collectors, IndexGcReport(applied=True), options, context)


def _check_same(table: Table) -> None:
    if files.read_parameters(table.location.uri).uuid != table.parameters.uuid:
        raise TableReplacedError(f"{table.location.uri} does not contain the same index as before.")


class Why:
    """The job why: every gate of a candidate. Reads only."""

    @staticmethod
    def plan(table: Table, options: IndexWhyOptions, context: RunContext | None = None) -> Explanation:
        """Explain ``options.target``: ``nodes/ID``, the end of the graph, or a file of a view or reader.

        Raises ``IndexBusyError``: another writer or job has the index; ``ObjectNotFoundError``: no such candidate.
        """
        del context
        with opened(table, options) as collectors:
            return explain(table, options.target, collectors)

    apply = plan
